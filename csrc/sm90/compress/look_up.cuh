// The entries that rows of a batch close.
#pragma once

#include "sm90/compress/tail.cuh"
#include "sm90/compress/tile.cuh"

namespace flash_csa::sm90 {

__device__ __forceinline__ bool in_batch(const CompressParams& p, uint32_t row) {
    return row < static_cast<uint32_t>(p.batch.rows);
}

// That of row `row`.
__device__ __forceinline__ Item find_item(const CompressParams& p, uint32_t row) {
    if (!in_batch(p, row)) return kNoItem;
    const int32_t slot = p.entry_slots[row];  // read beside what follows
    Entry e;
    if (!closes_entry(p, row, &e)) return kNoItem;
    int32_t in_tail = 0;
    if (p.ratio > 1 && e.first < p.batch.start[e.request]) {
        in_tail = p.batch.tail_slot[e.request] + 1;
        if (replaces_read_rows(p, e)) in_tail = -in_tail;
    }
    return {static_cast<int32_t>(row), slot, static_cast<int32_t>(e.first), in_tail};
}

}  // namespace flash_csa::sm90
