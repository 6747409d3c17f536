// The columns of a row of scores: which position each one is and where its entry lies.
#pragma once

#include <cstdint>

#include "core/causal.h"
#include "core/params.h"
#include "core/platform.h"
#include "core/step.h"

namespace flash_csa {

struct Columns {
    const int32_t* pages = nullptr;   // the request's row of the block table
    const int32_t* blocks = nullptr;  // the row's pool; null: column c is position c
    int32_t page_size = 1;
    int32_t n_vis = 0;
    int32_t count = 0;  // columns from here on are hidden

    FCSA_HD int64_t position(int32_t column) const {
        if (blocks == nullptr) return column;
        return int64_t{blocks[column / kPoolBlock]} * kPoolBlock + column % kPoolBlock;
    }
    FCSA_HD bool visible(int64_t position) const { return position >= 0 && position < n_vis; }
    FCSA_HD int32_t slot(int32_t position) const {
        return slot_of(pages[position / page_size], page_size, position % page_size);
    }
};

// Number of visible entries among the first `capacity`.
FCSA_HD int32_t visible_count(int32_t position, int32_t ratio, bool strict, int64_t capacity) {
    const int32_t visible = n_vis(position, ratio, strict);
    return visible < capacity ? visible : static_cast<int32_t>(capacity);
}

// What memory says of a row. Loads that do not wait for each other.
struct RowWords {
    int32_t request, position;
    int32_t blocks;  // of its pool
};

// Params: IndexScoresParams or SelectParams.
template <class Params>
FCSA_HD RowWords row_words(const Params& p, int64_t row) {
    return {p.batch.row_request[row], p.batch.positions[row],
            p.pool.blocks ? p.pool.counts[row] : 0};
}

// The columns of `row` in a score matrix of `width` columns. A padded row has none.
template <class Params>
FCSA_HD Columns columns_of(const Params& p, int32_t page_size, int64_t width, int64_t row,
                           const RowWords& words) {
    const auto [request, position, blocks] = words;
    const bool padded = request < 0 || request >= p.batch.requests;
    const int64_t capacity = int64_t{p.block_table.columns} * page_size;
    const int32_t visible = visible_count(position, p.ratio, p.strict, capacity);
    Columns columns;
    columns.pages = p.block_table.row(padded ? 0 : request);
    columns.page_size = page_size;
    columns.n_vis = padded ? 0 : visible;
    int64_t count = columns.n_vis;
    if (p.pool.blocks) {
        columns.blocks = p.pool.blocks.row(row);
        const int32_t kept = blocks < p.pool.width ? blocks : p.pool.width;
        count = columns.n_vis > 0 && kept > 0 ? int64_t{kept} * kPoolBlock : 0;
    }
    columns.count = static_cast<int32_t>(count < width ? count : width);
    return columns;
}

template <class Params>
FCSA_HD Columns columns_of(const Params& p, int32_t page_size, int64_t width, int64_t row) {
    return columns_of(p, page_size, width, row, row_words(p, row));
}

// The same for a selection that is merged: every position that the table can hold.
FCSA_HD Columns columns_of(const MergeSelectionsParams& p, int64_t row) {
    const int32_t request = p.row_request[row];
    if (request < 0 || request >= p.block_table.requests) return {};
    Columns columns;
    columns.pages = p.block_table.row(request);
    columns.page_size = p.page_size;
    const int64_t capacity = int64_t{p.block_table.columns} * p.page_size;
    columns.n_vis = static_cast<int32_t>(capacity < INT32_MAX ? capacity : INT32_MAX);
    return columns;
}

}  // namespace flash_csa
