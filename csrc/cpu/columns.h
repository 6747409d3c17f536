// The columns of a row of scores: which position each one is and where its entry lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/causal.h"
#include "core/params.h"
#include "core/step.h"

namespace flash_csa::cpu {

// Where in a row's columns an entry is.
constexpr int32_t kAbsent = -1;  // visible, but on no page: never scored, never selected
constexpr int32_t kHidden = -2;  // no visible position: beyond n_vis, or padding of a pool

struct Columns {
    const int32_t* pages = nullptr;   // the request's row of the block table
    const int32_t* blocks = nullptr;  // the row's pool; null: column c is position c
    int32_t page_size = 1;
    int32_t n_vis = 0;
    int32_t count = 0;  // columns from here on are hidden

    int64_t position(int32_t column) const {
        if (blocks == nullptr) return column;
        return int64_t{blocks[column / kPoolBlock]} * kPoolBlock + column % kPoolBlock;
    }
    int32_t slot(int32_t position) const {
        return slot_of(pages[position / page_size], page_size, position % page_size);
    }

    // Calls f(column, length, slot) for columns [begin, end), in runs of consecutive slots; slot
    // is kAbsent or kHidden where there is no entry.
    template <class F>
    void for_each_run(int32_t begin, int32_t end, const F& f) const {
        for (int32_t column = begin; blocks != nullptr && column < end;) {
            const int32_t in_block = std::min(end - column, kPoolBlock - column % kPoolBlock);
            const int64_t at = position(column);
            if (at < 0 || at >= n_vis) {
                f(column, in_block, kHidden);
            } else {
                const int32_t visible = std::min<int64_t>(in_block, n_vis - at);
                for_each_page(column, visible, static_cast<int32_t>(at), f);
                if (visible < in_block) f(column + visible, in_block - visible, kHidden);
            }
            column += in_block;
        }
        if (blocks == nullptr) for_each_page(begin, end - begin, begin, f);
    }

  private:
    // The same for columns that hold visible positions, from `position` on.
    template <class F>
    void for_each_page(int32_t column, int32_t length, int32_t position, const F& f) const {
        int32_t page = position / page_size;
        for (int32_t offset = position % page_size; length > 0; offset = 0) {
            const int32_t run = std::min(length, page_size - offset);
            f(column, run, slot_of(pages[page++], page_size, offset));
            column += run;
            length -= run;
        }
    }
};

// Number of visible entries among the first `capacity`.
inline int32_t visible_count(int32_t position, int32_t ratio, bool strict, int64_t capacity) {
    return static_cast<int32_t>(std::min<int64_t>(n_vis(position, ratio, strict), capacity));
}

// The columns of `row` in a score matrix of `width` columns. A padded row has none.
// Params: IndexScoresParams or SelectParams.
template <class Params>
Columns columns_of(const Params& p, int32_t page_size, int64_t width, int64_t row) {
    const int32_t request = p.batch.row_request[row];
    if (request < 0 || request >= p.batch.requests) return {};
    Columns columns;
    columns.pages = p.block_table.row(request);
    columns.page_size = page_size;
    columns.n_vis = visible_count(p.batch.positions[row], p.ratio, p.strict,
                                  int64_t{p.block_table.columns} * page_size);
    int64_t count = columns.n_vis;
    if (p.pool.blocks) {
        columns.blocks = p.pool.blocks.row(row);
        const int32_t blocks = std::min(p.pool.counts[row], p.pool.width);
        count = columns.n_vis > 0 ? int64_t{std::max(blocks, 0)} * kPoolBlock : 0;
    }
    columns.count = static_cast<int32_t>(std::min(count, width));
    return columns;
}

// A share of the work: columns [begin, stop) of rows [first, end). The rows are of one request, so
// they share pages and, up to causality, columns.
struct Tile {
    int32_t first, end;
    int32_t begin, stop;
};

// Tiles of at most max_rows and max_columns that cover every row (at least one each) and column,
// those of the same rows one after another by ascending column.
template <class Params>
std::vector<Tile> tiles_of(const Params& p, int32_t page_size, int64_t width, int32_t max_rows,
                           int32_t max_columns) {
    const BatchView& batch = p.batch;
    std::vector<Tile> tiles;
    for (int32_t first = 0, end = 0; first < batch.rows; first = end) {
        int32_t count = 0;
        while (end < batch.rows && end - first < max_rows &&
               batch.row_request[end] == batch.row_request[first]) {
            count = std::max(count, columns_of(p, page_size, width, end++).count);
        }
        int64_t begin = 0;
        do {
            const int64_t stop = std::min<int64_t>(begin + max_columns, count);
            tiles.push_back({first, end, static_cast<int32_t>(begin), static_cast<int32_t>(stop)});
            begin = stop;
        } while (begin < count);
    }
    return tiles;
}

// Number of tiles from tile i on that are of its rows.
inline int64_t tiles_of_rows(const std::vector<Tile>& tiles, int64_t i) {
    const int64_t size = static_cast<int64_t>(tiles.size());
    int64_t end = i + 1;
    while (end < size && tiles[end].first == tiles[i].first) ++end;
    return end - i;
}

}  // namespace flash_csa::cpu
