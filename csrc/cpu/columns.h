// Walks over the columns of rows of scores: runs of slots, and tiles that threads take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/columns.h"
#include "core/params.h"

namespace flash_csa::cpu {

// Where in a row's columns an entry is.
constexpr int32_t kAbsent = -1;  // visible, but on no page: never scored, never selected
constexpr int32_t kHidden = -2;  // no visible position: beyond n_vis, or padding of a pool

// Calls f(column, length, slot) for columns that hold visible positions, from `position` on, in
// runs of consecutive slots; slot is kAbsent where there is no entry.
template <class F>
void for_each_page(const Columns& columns, int32_t column, int32_t length, int32_t position,
                   const F& f) {
    const int32_t page_size = columns.page_size;
    int32_t page = position / page_size;
    for (int32_t offset = position % page_size; length > 0; offset = 0) {
        const int32_t run = std::min(length, page_size - offset);
        f(column, run, slot_of(columns.pages[page++], page_size, offset));
        column += run;
        length -= run;
    }
}

// The same for any columns [begin, end); slot is kHidden where there is no visible position.
template <class F>
void for_each_run(const Columns& columns, int32_t begin, int32_t end, const F& f) {
    if (columns.blocks == nullptr) return for_each_page(columns, begin, end - begin, begin, f);
    for (int32_t column = begin; column < end;) {
        const int32_t in_block = std::min(end - column, kPoolBlock - column % kPoolBlock);
        const int64_t at = columns.position(column);
        if (!columns.visible(at)) {
            f(column, in_block, kHidden);
        } else {
            const int32_t visible = std::min<int64_t>(in_block, columns.n_vis - at);
            for_each_page(columns, column, visible, static_cast<int32_t>(at), f);
            if (visible < in_block) f(column + visible, in_block - visible, kHidden);
        }
        column += in_block;
    }
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
