// From the best pairs of a row to its Selection or Pool. All threads of a block call.
#pragma once

#include "core/columns.h"
#include "sm90/select/top_k.cuh"

namespace flash_csa::sm90 {

// Ids are columns, in ascending position.
template <class Source>
__device__ void write_selection(const SelectionOut& out, int64_t row, int32_t k,
                                const Columns& columns, const Source& source, TopKShared& shared) {
    const auto put = [&](int32_t i, int32_t position, int32_t slot, uint32_t key) {
        out.positions.row(row)[i] = position;
        out.slots.row(row)[i] = slot;
        if (out.scores) out.scores.row(row)[i] = score_of_key(key);
    };
    const int32_t length = top_k(source, k, shared, [&](int32_t i, int32_t id, uint32_t key) {
        const int32_t position = static_cast<int32_t>(columns.position(id));
        put(i, position, columns.visible(position) ? columns.slot(position) : -1, key);
    });
    for (int32_t i = length + threadIdx.x; i < k; i += kTopKThreads) put(i, -1, -1, 0);
    if (threadIdx.x == 0) out.lengths[row] = length;
}

// Ids are blocks; newest_key is the key of the block that was forced in.
template <class Source>
__device__ void write_pool(const PoolOut& out, int64_t row, uint32_t newest_key,
                           const Source& source, TopKShared& shared) {
    const auto put = [&](int32_t i, int32_t block, uint32_t key) {
        out.blocks.row(row)[i] = block;
        if (out.scores) out.scores.row(row)[i] = score_of_key(key);
    };
    const int32_t count =
        top_k(source, out.width, shared, [&](int32_t i, int32_t id, uint32_t key) {
            put(i, id, key == kForcedKey ? newest_key : key);
        });
    for (int32_t i = count + threadIdx.x; i < out.width; i += kTopKThreads) put(i, -1, 0);
    if (threadIdx.x == 0) out.counts[row] = count;
}

}  // namespace flash_csa::sm90
