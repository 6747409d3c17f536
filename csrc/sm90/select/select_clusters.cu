// select on its fast path: exact top-k of each row's scores, and the candidate pool of its best
// blocks, in one launch.
//
//   in   scores [R, columns], block table, pool       out  positions, slots, lengths; pool
//
// A cluster of 1 to 16 blocks takes a row, as many as fit while every row has one
// (cluster_top_k.cuh says how). Scores are read once, and once more for the pool; a row whose
// entries do not fit the first look keeps candidates alone. Where maxima of blocks are there, a
// pool has a cluster of its own, beside that of the entries and by the same instructions: code that
// runs once comes from device memory, and would do so twice.
//
// Floor: 4 bytes a column. Limits: k and pool of at most 2048; page sizes 8, 16, .., 256; columns a
// multiple of 4, scores aligned to 16 bytes. select.cu has the other shapes.
#include "core/schedule.h"
#include "sm90/common/cluster.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/select/cluster_rows.cuh"
#include "sm90/select/score_sources.cuh"
#include "sm90/select/select_clusters.h"

namespace flash_csa::sm90 {
namespace {

// Of a block: below, a larger cluster only waits longer. A unit of each thread.
constexpr int32_t kLeastColumns = 4096, kLeastOfMaxima = kPoolBlock * kStripe;
constexpr int64_t kMostColumns = int64_t{1} << 30;  // ids a chunk further on do not overflow

struct Shared {
    CandidateShared top_k;
    PagedRow row;
};
// Of a pool of 2048 blocks a cluster has some 3500 candidates, unevenly spread.
constexpr int32_t kInboxPairs = 8192;
struct ClusterShared : Shared {
    InboxOf<kInboxPairs> inbox;
};
template <bool kCluster>
constexpr size_t kSharedBytes = kCluster ? sizeof(ClusterShared) : sizeof(Shared);

// Where the kernel looks for the best entries.
enum class Among { Entries, Pool, BlockMaxima, EntryOrBlockMaxima };

constexpr bool by_maxima(Among among) { return among >= Among::BlockMaxima; }

template <class Source>
__device__ __forceinline__ void put_block(const PoolOut& out, int64_t row, const Source& source,
                                          int32_t i, int32_t block, uint32_t key) {
    out.blocks.row(row)[i] = block;
    if (!out.scores) return;
    out.scores.row(row)[i] =
        score_of_key(key == kForcedKey ? order_key(source.maximum(block)) : key);
}

template <bool kCluster, int kUnits, class Source>
__device__ void write_blocks(const PoolOut& out, int64_t row, const Source& source,
                             int32_t size_log, CandidateShared& shared,
                             Exchange<kCluster>& exchange) {
    const auto put = [&](int32_t i, int32_t block, uint32_t key) {
        put_block(out, row, source, i, block, key);
    };
    ClusterTopK<kCluster, kUnits, Source> top_k(source, size_log, out.width, shared, exchange);
    float4 units[kUnits];
    top_k.load(units);
    __syncthreads();  // the entries' candidates are done with
    exchange.close();
    clear_candidates(shared);
    __syncthreads();
    const int32_t count = top_k.run(units, put);
    const int32_t thread = cluster_thread<kCluster>();
    for (int32_t i = count + thread; i < out.width; i += cluster_threads<kCluster>()) put(i, -1, 0);
    if (thread == 0) out.counts[row] = count;
}

// begin(top_k) comes before units are looked at.
template <bool kCluster, int kUnits, class Source, class Begin>
__device__ void write_row(const SelectParams& p, int64_t row, const Source& source,
                          int32_t size_log, float4 (&units)[kUnits], CandidateShared& shared,
                          Exchange<kCluster>& exchange, const Begin& begin) {
    ClusterTopK<kCluster, kUnits, Source> top_k(source, size_log, p.k, shared, exchange);
    begin(top_k);
    write_entries<kCluster>(p.out, row, p.k, source,
                            [&](const auto& sink) { return top_k.run(units, sink); });
}

// The row's entries or its blocks.
template <bool kCluster, int kUnits, class Begin>
__device__ void write_either(const SelectParams& p, int64_t row, const EntryOrBlockMaxima& source,
                             int32_t size_log, float4 (&units)[kUnits], CandidateShared& shared,
                             Exchange<kCluster>& exchange, const Begin& begin) {
    const bool blocks = source.of_blocks;
    const int32_t k = blocks ? p.pool_out.width : p.k;
    const auto put = [&](int32_t i, int32_t id, uint32_t key) {
        if (blocks) {
            put_block(p.pool_out, row, source, i, id < 0 ? -1 : id / kPoolBlock, key);
        } else {
            put_entry(p.out, row, i, id, id < 0 ? -1 : source.row.slot(id), key);
        }
    };
    ClusterTopK<kCluster, kUnits, EntryOrBlockMaxima> top_k(source, size_log, k, shared, exchange);
    begin(top_k);
    const int32_t count = top_k.run(units, put), thread = cluster_thread<kCluster>();
    for (int32_t i = count + thread; i < k; i += cluster_threads<kCluster>()) put(i, -1, 0);
    if (thread == 0) (blocks ? p.pool_out.counts : p.out.lengths)[row] = count;
}

// maxima: of blocks of columns, where those are looked at; [R, columns / 8].
template <bool kCluster, Among kAmong>
__global__ void __launch_bounds__(kClusterThreads, kCluster ? 1 : 2)
    select_clusters_kernel(SelectParams p, Matrix<const float> maxima, int32_t page_shift,
                           int32_t size_log) {
    extern __shared__ uint4 shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    if (!kCluster) size_log = 0;
    Exchange<kCluster> exchange(
        kCluster ? &static_cast<ClusterShared&>(shared).inbox.inbox : nullptr, kInboxPairs,
        size_log);
    clear_candidates(shared.top_k);
    const auto start = [] {
        wait_for_previous();
        allow_dependents();
    };
    // The kernel that leaves maxima lets this one start when what came before it has ended: all but
    // scores and maxima is there.
    constexpr bool kByMaxima = by_maxima(kAmong), kEither = kAmong == Among::EntryOrBlockMaxima;
    if (!kByMaxima) start();
    const uint32_t cluster = blockIdx.x >> size_log;
    const int64_t row = kEither ? cluster / 2 : cluster;
    const int32_t rank = static_cast<int32_t>(blockIdx.x) & ((1 << size_log) - 1);
    static_assert(EntryScores::kLine == PoolScores::kLine);
    constexpr int kUnits = kCluster && !kByMaxima ? 2 * kLookUnits : kLookUnits;
    float4 units[kUnits];
    const float* scores = p.scores.row(row);
    const float* of_row = kByMaxima ? fresh(maxima.row(row)) : nullptr;
    const RowWords words = row_words(p, row);
    if (!kByMaxima) {
        // Where a block's part lies does not depend on how many columns count: scores are read
        // before that is known.
        const Share<EntryScores::kLine> all{static_cast<int32_t>(p.columns), size_log};
        const int32_t own = all.id(kUnit * threadIdx.x, rank);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const int32_t at = own + (u * kStripe << size_log);
            if (at < all.count) units[u] = __ldcs(reinterpret_cast<const float4*>(scores + at));
        }
    }
    if (!kByMaxima) exchange.close();
    if (threadIdx.x == 0) {
        shared.row =
            paged_row(columns_of(p, p.page_size, p.columns, row, words), scores, page_shift);
    }
    __syncthreads();
    const PagedRow& of = shared.row;
    auto& top_k = shared.top_k;
    const auto begin = [&](const auto& selection) {
        if (!kByMaxima) return;
        start();
        selection.load(units);
        exchange.close();  // peers may have begun later
    };
    if constexpr (kAmong == Among::Pool) {
        write_row<kCluster>(p, row, PoolScores{of}, size_log, units, top_k, exchange, begin);
    } else if constexpr (kAmong == Among::Entries) {
        write_row<kCluster>(p, row, EntryScores{of}, size_log, units, top_k, exchange, begin);
        if (p.pool_out.blocks) {
            write_blocks<kCluster, 2>(p.pool_out, row, BlockScores{{of}}, size_log, top_k,
                                      exchange);
        }
    } else if constexpr (kAmong == Among::BlockMaxima) {
        write_row<kCluster>(p, row, EntryMaxima{of, of_row}, size_log, units, top_k, exchange,
                            begin);
    } else {
        write_either<kCluster>(p, row, EntryOrBlockMaxima(of, of_row, cluster % 2 != 0), size_log,
                               units, top_k, exchange, begin);
    }
    exchange.close();
}

template <Among kAmong>
cudaError_t launch_rows(const SelectParams& p, const Matrix<const float>& maxima,
                        cudaStream_t stream) {
    const int32_t page_shift = floor_log2(p.page_size);
    constexpr auto kernel = select_clusters_kernel<true, kAmong>;
    const int64_t clusters = int64_t{p.batch.rows} * (kAmong == Among::EntryOrBlockMaxima ? 2 : 1);
    int32_t size = cluster_size_for<kernel>(clusters, kClusterThreads, kSharedBytes<true>);
    const int32_t least = by_maxima(kAmong) ? kLeastOfMaxima : kLeastColumns;
    while (size > 1 && p.columns / size < least) size /= 2;
    if (size == 1) {
        return launch_after(select_clusters_kernel<false, kAmong>, blocks_for(clusters, 1),
                            kClusterThreads, kSharedBytes<false>, stream, p, maxima, page_shift, 0);
    }
    return launch_clusters(kernel, clusters, size, kClusterThreads, kSharedBytes<true>, stream, p,
                           maxima, page_shift, floor_log2(size));
}

}  // namespace

bool select_fits_clusters(const SelectParams& p) {
    const int32_t size = p.page_size;
    const bool paged = size >= kPoolBlock && (size & (size - 1)) == 0;
    const bool aligned = reinterpret_cast<uintptr_t>(p.scores.data) % sizeof(float4) == 0 &&
                         p.scores.stride % 4 == 0 && p.columns % 4 == 0;
    return paged && aligned && p.columns <= kMostColumns && p.k <= kMaxClusterTopK &&
           p.pool_out.width <= kMaxClusterTopK;
}

cudaError_t select_clusters(const SelectParams& p, cudaStream_t stream) {
    return p.pool.blocks ? launch_rows<Among::Pool>(p, {}, stream)
                         : launch_rows<Among::Entries>(p, {}, stream);
}

cudaError_t select_by_maxima(const SelectParams& p, const Matrix<const float>& maxima,
                             cudaStream_t stream) {
    return p.pool_out.blocks ? launch_rows<Among::EntryOrBlockMaxima>(p, maxima, stream)
                             : launch_rows<Among::BlockMaxima>(p, maxima, stream);
}

}  // namespace flash_csa::sm90
