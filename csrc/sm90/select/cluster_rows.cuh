// A cluster's work on a row: its share of the ids, and the row's Selection.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "core/params.h"
#include "sm90/select/cluster_top_k.cuh"

namespace flash_csa::sm90 {

// `each` ids, a multiple of 4, for every block of the cluster.
template <bool kCluster>
__device__ Share share_of(int32_t count, int32_t each) {
    if (!kCluster) return {0, count, count};
    const int64_t begin = int64_t{each} * cooperative_groups::this_cluster().block_rank();
    const int64_t end = begin + each;
    return {static_cast<int32_t>(begin < count ? begin : count),
            static_cast<int32_t>(end < count ? end : count), each};
}

// Whole units, as even as may be, for the 2^size_log blocks of the cluster.
template <bool kCluster>
__device__ Share even_share_of(int32_t count, int32_t size_log) {
    return share_of<kCluster>(count, ((count >> size_log) / kUnit + 1) * kUnit);
}

// Threads of all blocks of the cluster, counted from its first block's.
template <bool kCluster>
__device__ int32_t cluster_thread() {
    return kCluster ? static_cast<int32_t>(cooperative_groups::this_cluster().thread_rank())
                    : static_cast<int32_t>(threadIdx.x);
}
template <bool kCluster>
__device__ int32_t cluster_threads() {
    return kCluster ? static_cast<int32_t>(cooperative_groups::this_cluster().num_threads())
                    : kClusterThreads;
}

// The row's Selection. Source has position(id) and the row that knows slots; run(sink) finds it.
template <bool kCluster, class Source, class Run>
__device__ void write_entries(const SelectionOut& out, int64_t row, int32_t k, const Source& source,
                              const Run& run) {
    const auto put = [&](int32_t i, int32_t position, int32_t slot, uint32_t key) {
        out.positions.row(row)[i] = position;
        out.slots.row(row)[i] = slot;
        if (out.scores) out.scores.row(row)[i] = score_of_key(key);
    };
    const int32_t length = run([&](int32_t i, int32_t id, uint32_t key) {
        const int32_t position = source.position(id);
        put(i, position, source.row.slot(position), key);
    });
    const int32_t thread = cluster_thread<kCluster>();
    for (int32_t i = length + thread; i < k; i += cluster_threads<kCluster>()) put(i, -1, -1, 0);
    if (thread == 0) out.lengths[row] = length;
}

template <bool kCluster, int kUnits, class Source>
__device__ void select_entries(const SelectionOut& out, int64_t row, int32_t k,
                               const Source& source, const Share& share, CandidateShared& shared) {
    ClusterTopK<kCluster, kUnits, Source> top_k(source, k, shared);
    write_entries<kCluster>(out, row, k, source,
                            [&](const auto& sink) { return top_k.run(share, sink); });
}

}  // namespace flash_csa::sm90
