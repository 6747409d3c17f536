// select on its fast path: exact top-k of each row's scores, and the candidate pool of its best
// blocks, in one launch.
//
//   in   scores [R, columns], block table, pool       out  positions, slots, lengths; pool
//
// A cluster of 1 to 16 blocks takes a row, as many as fit while every row has one
// (cluster_top_k.cuh says how). Scores are read once, and once more for the pool; a row whose
// entries do not fit the first look keeps candidates alone.
//
// Floor: 4 bytes a column. Limits: k and pool of at most 2048; page sizes 8, 16, .., 256; scores
// aligned to 16 bytes. select.cu has the other shapes.
#include "sm90/common/cluster.h"
#include "sm90/common/launch.h"
#include "sm90/select/cluster_rows.cuh"
#include "sm90/select/score_sources.cuh"
#include "sm90/select/select_clusters.h"

namespace flash_csa::sm90 {
namespace {

constexpr int32_t kLeastColumns = 4096;  // of a block: below, a larger cluster only waits longer
constexpr int64_t kMostColumns = int64_t{1} << 30;  // ids a chunk further on do not overflow

struct Shared {
    CandidateShared top_k;
    PagedRow row;
};

template <bool kCluster>
__device__ void write_blocks(const PoolOut& out, int64_t row, const BlockScores& source,
                             int32_t size_log, CandidateShared& shared) {
    const auto put = [&](int32_t i, int32_t block, uint32_t key) {
        out.blocks.row(row)[i] = block;
        if (!out.scores) return;
        out.scores.row(row)[i] =
            score_of_key(key == kForcedKey ? order_key(source.maximum(block)) : key);
    };
    ClusterTopK<kCluster, 2, BlockScores> top_k(source, out.width, shared);
    const int32_t count = top_k.run(even_share_of<kCluster>(source.count(), size_log), put);
    const int32_t thread = cluster_thread<kCluster>();
    for (int32_t i = count + thread; i < out.width; i += cluster_threads<kCluster>()) put(i, -1, 0);
    if (thread == 0) out.counts[row] = count;
}

template <bool kCluster, bool kInPool>
__global__ void __launch_bounds__(kClusterThreads, kCluster ? 1 : 2)
    select_clusters_kernel(SelectParams p, int32_t page_shift, int32_t size_log) {
    extern __shared__ uint4 shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    cudaGridDependencySynchronize();  // launched while the kernel in front was ending
    const int64_t row = blockIdx.x >> size_log;
    if (threadIdx.x == 0) {
        shared.row =
            paged_row(columns_of(p, p.page_size, p.columns, row), p.scores.row(row), page_shift);
    }
    __syncthreads();
    constexpr int kUnits = kCluster ? 2 * kLookUnits : kLookUnits;  // registers of 1 or 2 blocks
    const Share share = even_share_of<kCluster>(shared.row.columns.count, size_log);
    if (kInPool) {
        select_entries<kCluster, kUnits>(p.out, row, p.k, PoolScores{shared.row}, share,
                                         shared.top_k);
    } else {
        select_entries<kCluster, kUnits>(p.out, row, p.k, EntryScores{shared.row}, share,
                                         shared.top_k);
        if (p.pool_out.blocks) {
            write_blocks<kCluster>(p.pool_out, row, BlockScores{shared.row}, size_log,
                                   shared.top_k);
        }
    }
}

template <bool kInPool>
cudaError_t launch_rows(const SelectParams& p, cudaStream_t stream) {
    const int32_t page_shift = floor_log2(p.page_size);
    constexpr auto kernel = select_clusters_kernel<true, kInPool>;
    int32_t size = cluster_size_for<kernel>(p.batch.rows, kClusterThreads, sizeof(Shared));
    while (size > 1 && p.columns / size < kLeastColumns) size /= 2;
    if (size == 1) {
        return launch(select_clusters_kernel<false, kInPool>, blocks_for(p.batch.rows, 1),
                      kClusterThreads, sizeof(Shared), stream, p, page_shift, 0);
    }
    return launch_clusters(kernel, p.batch.rows, size, kClusterThreads, sizeof(Shared), stream, p,
                           page_shift, floor_log2(size));
}

}  // namespace

bool select_fits_clusters(const SelectParams& p) {
    const int32_t size = p.page_size;
    const bool paged = size >= kPoolBlock && (size & (size - 1)) == 0;
    const bool aligned = reinterpret_cast<uintptr_t>(p.scores.data) % sizeof(float4) == 0 &&
                         p.scores.stride % 4 == 0;
    return paged && aligned && p.columns <= kMostColumns && p.k <= kMaxClusterTopK &&
           p.pool_out.width <= kMaxClusterTopK;
}

cudaError_t select_clusters(const SelectParams& p, cudaStream_t stream) {
    return p.pool.blocks ? launch_rows<true>(p, stream) : launch_rows<false>(p, stream);
}

}  // namespace flash_csa::sm90
