// Tail rows in the launch that also reads them.
//
// The ring is larger than the span of an entry, so a row of the call replaces a row that an entry
// of the call reads only in calls of several rows. Then the reader of an old row, a thread that
// has its channels, writes the new one behind its own loads; every other kept row is written by
// the block that has it among its rows. In an overlapping compressor the two halves of a tail row
// have one reader each.
#pragma once

#include "core/entry.h"

namespace flash_csa::sm90 {

// End of a request's valid rows, which come first.
__device__ inline int64_t end_of_valid(const CompressParams& p, const RowRange& rows,
                                       int64_t request) {
    int64_t low = rows.begin, high = rows.end;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (is_row_of(p, middle, request))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Row of the call at whose end the ring holds the slot of `position`, a position before the
// request's first row; -1 if the call leaves that slot alone.
__device__ inline int64_t replacing_row(const CompressParams& p, const Entry& e, int64_t position) {
    const RowRange rows = request_rows(p, e.request);
    const int64_t row = e.row - (e.position - position) + p.tail.ring;  // the first candidate
    if (row >= rows.end || !is_row_of(p, row, e.request)) return -1;
    const int64_t end = end_of_valid(p, rows, e.request);
    const int64_t last = row + (end - 1 - row) / p.tail.ring * p.tail.ring;
    const int64_t last_position = e.position + (last - e.row);
    return last_position < first_entry(p, e.request) * p.ratio ? -1 : last;
}

// Whether a half (0: previous role, or all columns without overlap; 1: current role) of the slot
// of `position` is read by an entry of the call before `row` replaces it.
__device__ inline bool is_read(const CompressParams& p, int64_t row, int64_t position, int half) {
    const int64_t request = p.batch.row_request[row];
    const int64_t start = p.batch.start[request];
    const int64_t ring = p.tail.ring;
    const int64_t old = position - (position - start + ring) / ring * ring;
    if (old < 0) return false;
    const int64_t entry = old / p.ratio + (p.overlap && half == 0 ? 1 : 0);
    const int64_t closing = (entry + 1) * p.ratio - 1;
    if (closing < start || closing > position) return false;
    Entry e;
    return closes_entry(p, row - (position - closing), &e);
}

// Whether the tail keeps `row`, a row of the call: a valid one among the last of its request.
__device__ inline bool keeps_row(const CompressParams& p, int64_t row) {
    if (!is_valid_row(p, row)) return false;
    const int64_t request = p.batch.row_request[row];
    if (!has_tail(p, request)) return false;
    if (p.batch.positions[row] < first_entry(p, request) * p.ratio) return false;
    const int64_t next = row + p.tail.ring;
    return next >= request_rows(p, request).end || !is_row_of(p, next, request);
}

// Copies kept rows to the tail; `threads` threads take part, of which this is number `thread`.
// Leaves halves to their readers.
__device__ inline void keep_row(const CompressParams& p, int64_t row, int thread, int threads) {
    const int64_t position = p.batch.positions[row];
    const int64_t slot = p.batch.tail_slot[p.batch.row_request[row]];
    const int halves = p.overlap ? 2 : 1;
    const int columns = p.tail.width / halves;
    for (int half = 0; half < halves; ++half) {
        if (is_read(p, row, position, half)) continue;
        float* kv = p.tail.kv(slot, position) + half * columns;
        float* gate = p.tail.gate(slot, position) + half * columns;
        const float* from_kv = p.kv.row(row) + half * columns;
        const float* from_gate = p.gate.row(row) + half * columns;
        for (int c = 4 * thread; c < columns; c += 4 * threads) {
            const float4 a = *reinterpret_cast<const float4*>(from_kv + c);
            const float4 b = *reinterpret_cast<const float4*>(from_gate + c);
            *reinterpret_cast<float4*>(kv + c) = a;
            *reinterpret_cast<float4*>(gate + c) = b;
        }
    }
}

// Whether a row of the call may replace the oldest row of entry e, which lies in the tail.
__device__ inline bool replaces_read_rows(const CompressParams& p, const Entry& e) {
    return e.row - (e.position - e.first) + p.tail.ring < request_rows(p, e.request).end;
}

// Puts new rows into the tail slots that entry e has read: copy(kv, gate, from_kv, from_gate)
// moves the calling thread's channels, the columns of the entry's role.
template <class Copy>
__device__ inline void replace_read_rows(const CompressParams& p, const Entry& e,
                                         const Copy& copy) {
    const int64_t start = p.batch.start[e.request];
    if (e.first >= start) return;
    if (!replaces_read_rows(p, e)) return;
    const int64_t slot = p.batch.tail_slot[e.request];
    for (int64_t position = e.first; position < start && position <= e.position; ++position) {
        const int64_t row = replacing_row(p, e, position);
        if (row < 0) continue;
        const int64_t column = p.overlap && position >= e.index * p.ratio ? p.dim : 0;
        copy(p.tail.kv(slot, position) + column, p.tail.gate(slot, position) + column,
             p.kv.row(row) + column, p.gate.row(row) + column);
    }
}

}  // namespace flash_csa::sm90
