// The lists of a row as callers get them: ascending, -1 padded, with optional scores.
#pragma once

#include "core/params.h"
#include "cpu/columns.h"
#include "cpu/topk.h"

namespace flash_csa::cpu {

// Writes the finished selection of a row: ids are columns, in ascending position.
inline void write_selection(const SelectionOut& out, int64_t row, int32_t k, const TopK& best,
                            const Columns& columns) {
    int32_t* positions = out.positions.row(row);
    int32_t* slots = out.slots.row(row);
    for (int32_t i = 0; i < k; ++i) {
        positions[i] = slots[i] = -1;
        if (i < best.size()) {
            positions[i] = static_cast<int32_t>(columns.position(best.id(i)));
            if (columns.visible(positions[i])) slots[i] = columns.slot(positions[i]);
        }
    }
    out.lengths[row] = best.size();
    if (!out.scores) return;
    float* scores = out.scores.row(row);
    for (int32_t i = 0; i < k; ++i) scores[i] = score_of_key(i < best.size() ? best.key(i) : 0);
}

// Writes the finished pool of a row; newest_key is the key of the block that was forced in.
inline void write_pool(const PoolOut& out, int64_t row, const TopK& best, uint32_t newest_key) {
    int32_t* blocks = out.blocks.row(row);
    for (int32_t i = 0; i < out.width; ++i) blocks[i] = i < best.size() ? best.id(i) : -1;
    out.counts[row] = best.size();
    if (!out.scores) return;
    float* scores = out.scores.row(row);
    for (int32_t i = 0; i < out.width; ++i) {
        const uint32_t key = i < best.size() ? best.key(i) : 0;
        scores[i] = score_of_key(key == kForcedKey ? newest_key : key);
    }
}

}  // namespace flash_csa::cpu
