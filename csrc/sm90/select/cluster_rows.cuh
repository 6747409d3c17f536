// A cluster's work on a row: the row's Selection.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "core/params.h"
#include "sm90/select/cluster_top_k.cuh"

namespace flash_csa::sm90 {

// Threads of all blocks of the cluster that select, counted from its first block's.
template <bool kCluster>
__device__ int32_t cluster_thread() {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    if (!kCluster) return thread;
    const auto rank = cooperative_groups::this_cluster().block_rank();
    return static_cast<int32_t>(rank) * kClusterThreads + thread;
}
template <bool kCluster>
__device__ int32_t cluster_threads() {
    if (!kCluster) return kClusterThreads;
    return static_cast<int32_t>(cooperative_groups::this_cluster().num_blocks()) * kClusterThreads;
}

__device__ __forceinline__ void put_entry(const SelectionOut& out, int64_t row, int32_t i,
                                          int32_t position, int32_t slot, uint32_t key) {
    out.positions.row(row)[i] = position;
    out.slots.row(row)[i] = slot;
    if (out.scores) out.scores.row(row)[i] = score_of_key(key);
}

// The row's Selection. Source has position(id) and the row that knows slots; run(sink) finds it.
template <bool kCluster, class Source, class Run>
__device__ void write_entries(const SelectionOut& out, int64_t row, int32_t k, const Source& source,
                              const Run& run) {
    const int32_t length = run([&](int32_t i, int32_t id, uint32_t key) {
        const int32_t position = source.position(id);
        put_entry(out, row, i, position, source.row.slot(position), key);
    });
    const int32_t thread = cluster_thread<kCluster>();
    for (int32_t i = length + thread; i < k; i += cluster_threads<kCluster>()) {
        put_entry(out, row, i, -1, -1, 0);
    }
    if (thread == 0) out.lengths[row] = length;
}

}  // namespace flash_csa::sm90
