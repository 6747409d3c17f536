// Entries that the rows of a call close, and where the rows of their groups lie: in the call, or,
// before the request's first row, in its tail. Nothing of a batch is trusted: a row outside the
// rotation table or the requests is padding, a tail slot outside the tail is none.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/platform.h"

namespace flash_csa {

// An entry that row `row` closes, with everything that finds its rows.
struct Entry {
    int64_t row;
    int64_t position;  // of `row`
    int64_t request;
    int64_t index;  // within the request
    int64_t first;  // position of its oldest row: overlapping, that of the previous group
};

FCSA_HD bool is_valid_row(const CompressParams& p, int64_t row) {
    const int32_t request = p.batch.row_request[row];
    return p.cos_sin.holds(p.batch.positions[row]) && request >= 0 && request < p.batch.requests;
}

FCSA_HD bool has_tail(const CompressParams& p, int64_t request) {
    if (p.tail.data == nullptr) return false;
    const int32_t slot = p.batch.tail_slot[request];
    return slot >= 0 && slot < p.tail.slots;
}

// Entries before this one are stored already.
FCSA_HD int64_t first_entry(const CompressParams& p, int64_t request) {
    return p.entry_first == nullptr ? 0 : p.entry_first[request];
}

// Where the rows of a request lie: from `start` in the call, before it in its tail, if it has one.
struct RequestState {
    int64_t start;
    bool tail;
};

FCSA_HD RequestState request_state(const CompressParams& p, int64_t request) {
    return {p.batch.start[request], has_tail(p, request)};
}

// Whether a valid row at `position` closes an entry that this call computes.
FCSA_HD bool closes_entry(const CompressParams& p, int64_t row, int64_t position, int64_t request,
                          const RequestState& state, Entry* entry) {
    if ((position + 1) % p.ratio != 0) return false;
    const int64_t index = position / p.ratio;
    if (index < first_entry(p, request)) return false;
    const int64_t groups = p.overlap && index > 0 ? 2 : 1;
    const int64_t first = position + 1 - groups * p.ratio;
    *entry = {row, position, request, index, first};
    const int64_t oldest_in_call = first < state.start ? state.start : first;
    return row - (position - oldest_in_call) >= 0 && (first >= state.start || state.tail);
}

FCSA_HD bool closes_entry(const CompressParams& p, int64_t row, Entry* entry) {
    if (!is_valid_row(p, row)) return false;
    const int64_t request = p.batch.row_request[row];
    return closes_entry(p, row, p.batch.positions[row], request, request_state(p, request), entry);
}

// kv, gate and bias of one position, in the columns of its role; bias is null where there is none.
struct PoolRow {
    const float* kv;
    const float* gate;
    const float* bias;
};

FCSA_HD PoolRow pool_row(const CompressParams& p, const Entry& e, int64_t position) {
    const int64_t column = p.overlap && position >= e.index * p.ratio ? p.dim : 0;
    const float* bias = p.bias ? p.bias.row(position % p.ratio) + column : nullptr;
    if (position < p.batch.start[e.request]) {
        const int64_t slot = p.batch.tail_slot[e.request];
        return {p.tail.kv(slot, position) + column, p.tail.gate(slot, position) + column, bias};
    }
    const int64_t row = e.row - (e.position - position);
    return {p.kv.row(row) + column, p.gate.row(row) + column, bias};
}

// Rows of the call that belong to a request: its valid rows come first.
struct RowRange {
    int64_t begin;
    int64_t end;
};

FCSA_HD RowRange request_rows(const CompressParams& p, int64_t request) {
    const int64_t from = p.batch.cu_tokens[request], to = p.batch.cu_tokens[request + 1];
    return {from < 0 ? 0 : from, to < p.batch.rows ? to : int64_t{p.batch.rows}};
}

FCSA_HD bool is_row_of(const CompressParams& p, int64_t row, int64_t request) {
    return is_valid_row(p, row) && p.batch.row_request[row] == request;
}

}  // namespace flash_csa
