// reindex: scores of the entries of a pool and the best k of them, in one kernel; scores stay in
// shared memory.
//
//   in   index pages, queries, weights, block table, pool      out  a Selection
//
// A cluster of 1 to 16 blocks takes a row, as many as fit while every row has one; of rows that
// have a block each, those of the last wave have clusters, in a launch of their own. Each block
// scores a share of the pool (pool_scores.cuh); then the first block selects from the best of all
// (pool_top_k.cuh), or where those do not tell, the cluster does (cluster_top_k.cuh).
//
// Floor: 68 bytes an entry, 1.1 MB a row of 2048 blocks. Limits: IndexFp4 keys, 64 heads, k and
// pool of at most 2048, page sizes 8, 16, .., 256; index_select.cu has the other shapes.
#include "sm90/common/cluster.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/prefetch.cuh"
#include "sm90/index/pool_top_k.cuh"
#include "sm90/index/reindex.h"
#include "sm90/select/cluster_rows.cuh"
#include "sm90/select/score_sources.cuh"

namespace flash_csa::sm90 {
namespace {

static_assert(kPoolThreads == kClusterThreads);

struct Shared {
    PoolScoresShared scoring;
    union {
        PoolRing ring;  // while scoring
        PoolFinalShared final;
        CandidateShared top_k;
    };
    PagedRow row;
    PoolTopKShared selection;
};

// What is sent to the first block, and to all where that does not tell.
constexpr int32_t kInboxPairs = 4096;
union SentOrInbox {
    SentShared sent;
    InboxOf<kInboxPairs> inbox;
};

// Ids are columns of the pool; scores of this block's part are in shared memory.
struct ScoredPool {
    static constexpr int kLine = kPassKeys;
    static constexpr bool kForces = false, kAlwaysPresent = true, kBlocks = false;
    const PagedRow& row;
    const float* scores;  // by place
    int32_t size_log;     // of the cluster

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ float4 load(int32_t id) const {
        const int32_t place = (id / kLine >> size_log) * kLine + id % kLine;
        return *reinterpret_cast<const float4*>(scores + place);
    }
    __device__ int32_t position(int32_t id) const {
        return static_cast<int32_t>(row.columns.position(id));
    }
};

// Most blocks of a pool that one of 2^size_log blocks of threads scores: whole units.
__host__ __device__ constexpr int32_t blocks_each(int32_t blocks, int32_t size_log) {
    return ((blocks + (kPoolUnitBlocks << size_log) - 1) >> size_log) / kPoolUnitBlocks *
           kPoolUnitBlocks;
}

// Of a thread: a cluster has two blocks of threads at least.
template <bool kCluster>
constexpr int kOwnBlocks = kMaxPoolBlocks / (kCluster ? 2 : 1) / kPoolThreads;

// The blocks that a thread finds the places of, read before it is known how many there are. Units
// are lines of the part.
template <int kOwn>
__device__ __forceinline__ void load_blocks(const PoolView& pool, int64_t row, const PoolShare& all,
                                            int32_t rank, int32_t (&blocks)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        const int32_t block = all.id(at * kPoolBlock, rank) / kPoolBlock;
        if (block < pool.width) blocks[i] = pool.blocks.row(row)[block];
    }
}

// Their pages; -1 where a block is not in the part, or nothing of it is visible.
template <int kOwn>
__device__ __forceinline__ void load_pages(const PagedRow& row, const PoolShare& share,
                                           int32_t rank, const int32_t (&blocks)[kOwn],
                                           int32_t (&pages)[kOwn]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        const int64_t position = int64_t{blocks[i]} * kPoolBlock;
        const bool reads =
            share.id(at * kPoolBlock, rank) < share.count && row.columns.visible(position);
        pages[i] = reads ? row.columns.pages[position >> row.page_shift] : -1;
    }
}

template <int kOwn>
__device__ __forceinline__ void write_places(const PagedRow& row, const ConstPages& index,
                                             const PoolShare& share, const int32_t (&blocks)[kOwn],
                                             const int32_t (&pages)[kOwn],
                                             const PoolPlaces& places) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        if (at * kPoolBlock >= share.length()) break;
        const bool there = pages[i] >= 0 && pages[i] < index.num_pages &&
                           static_cast<uint32_t>(pages[i]) <= row.last_page;
        if (there) {
            places.set(at, index, blocks[i], pages[i]);
        } else {
            places.set_absent(at);
        }
    }
}

__device__ __forceinline__ void clear_bins(PoolRing& ring) {
    uint4* bins = reinterpret_cast<uint4*>(ring.bins);
    for (int i = threadIdx.x; i < kPoolBins / 4; i += kPoolThreads) bins[i] = {0, 0, 0, 0};
}

// Brings what is read first nearer, while the kernel in front may still write it.
__device__ __forceinline__ void prefetch_inputs(const IndexScoresParams& p, int64_t row,
                                                const PoolShare& all, int32_t rank) {
    constexpr int kLine = 128, kCodeLines = kPoolHeads * kKeyBytes / kLine;
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    if (thread < kMaxPoolBlocks / kPoolUnitBlocks) {  // a unit is half a line
        const int32_t block = all.id(thread * kPassKeys, rank) / kPoolBlock;
        if (block < p.pool.width) prefetch_l2(p.pool.blocks.row(row) + block);
    } else if (thread < kPoolThreads - 32) {
        const int32_t line = thread - kMaxPoolBlocks / kPoolUnitBlocks;
        if (line * kLine < p.query.heads * kKeyBytes) {
            prefetch_l2(p.query.codes.row(row) + line * kLine);
        }
    } else if (thread == kPoolThreads - 1) {
        prefetch_l2(p.query.scales_ue8m0.row(row));
        prefetch_l2(p.weights.f32 ? static_cast<const void*>(p.weights.f32.row(row))
                                  : p.weights.bf16.row(row));
        prefetch_l2(p.batch.row_request + row);
        prefetch_l2(p.batch.positions + row);
        prefetch_l2(p.pool.counts + row);
    }
    static_assert(kMaxPoolBlocks / kPoolUnitBlocks + kCodeLines <= kPoolThreads - 32);
}

template <bool kCluster>
__global__ void __launch_bounds__(kPoolThreads, 1)
    reindex_kernel(IndexSelectParams p, int32_t first_row, int32_t page_shift, int32_t size_log) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int32_t most = blocks_each(p.scores.pool.width, size_log);
    float* sScores = reinterpret_cast<float*>(&shared + 1);                       // [8 most]
    const PoolPlaces sPlaces(sScores + most * kPoolBlock, most);                  // [most]
    SentOrInbox& sSent = *reinterpret_cast<SentOrInbox*>(sPlaces.blocks + most);  // of a cluster
    allow_dependents();
    if (!kCluster) size_log = 0;
    const int64_t row = first_row + (blockIdx.x >> size_log);
    const int32_t rank = static_cast<int32_t>(blockIdx.x) & ((1 << size_log) - 1);
    const PoolShare all{0, size_log};
    if (threadIdx.x == 0) {
        PoolScorer::begin(row, shared.scoring);
        PoolTopK<kCluster>::begin(size_log, shared.selection);
    }
    if (kCluster) cluster_arrive_relaxed();
    clear_bins(shared.ring);
    prefetch_inputs(p.scores, row, all, rank);
    __syncthreads();
    wait_for_previous();

    const PoolScorer::Queries queries(p.scores, row);
    int32_t blocks[kOwnBlocks<kCluster>], pages[kOwnBlocks<kCluster>];
    load_blocks(p.scores.pool, row, all, rank, blocks);
    const PagedRow paged =
        paged_row(columns_of(p.select, p.select.page_size, INT32_MAX, row), nullptr, page_shift);
    const PoolShare share{paged.columns.count, size_log};
    load_pages(paged, share, rank, blocks, pages);
    if (threadIdx.x == 0) {
        shared.row = paged;
        PoolTopK<kCluster>::expect(share, rank, p.select.k, shared.selection);
    }
    write_places(paged, p.scores.index, share, blocks, pages, sPlaces);
    __syncthreads();
    const int32_t own_units = PoolShare{shared.row.columns.count, size_log}.length() / kPassKeys;
    PoolScorer scorer(p.scores, shared.row.columns.n_vis, sPlaces, own_units, sScores, shared.ring,
                      shared.scoring);
    scorer.start();
    queries.put(shared.scoring);  // while keys come
    __syncthreads();
    scorer.prepare();
    __syncthreads();
    scorer.run();
    __syncthreads();
    if (kCluster) cluster_wait();  // all blocks have begun

    const PoolShare own{shared.row.columns.count, size_log};  // not kept while scoring
    PoolTopK<kCluster> best(p.scores.index, own, rank, p.select.k, shared.selection, shared.final,
                            sSent.sent);
    if (best.run(sScores, sPlaces, shared.ring.bins, p.select.out, row)) return;
    __syncthreads();
    Exchange<kCluster> exchange(&sSent.inbox.inbox, kInboxPairs, size_log);
    clear_candidates(shared.top_k);
    exchange.close();
    __syncthreads();
    const ScoredPool source{shared.row, sScores, size_log};
    ClusterTopK<kCluster, kLookUnits, ScoredPool> top_k(source, size_log, p.select.k, shared.top_k,
                                                        exchange);
    float4 units[kLookUnits];
    top_k.load(units);
    write_entries<kCluster>(p.select.out, row, p.select.k, source,
                            [&](const auto& sink) { return top_k.run(units, sink); });
    exchange.close();
}

size_t shared_bytes_of(int32_t width, int32_t size_log) {
    const size_t block = kPoolBlock * sizeof(float) + PoolPlaces::kBytes;
    const size_t sent = size_log > 0 ? sizeof(SentOrInbox) : 0;
    return sizeof(Shared) + blocks_each(width, size_log) * block + sent;
}
static_assert(sizeof(Shared) + kMaxPoolBlocks * (kPoolBlock * sizeof(float) + PoolPlaces::kBytes) <=
              227 * 1024);
static_assert(sizeof(Shared) +
                  kMaxPoolBlocks / 2 * (kPoolBlock * sizeof(float) + PoolPlaces::kBytes) +
                  sizeof(SentOrInbox) <=
              227 * 1024);

// Of a row, for so many of them.
int32_t cluster_size(int32_t rows) {
    return cluster_size_for<reindex_kernel<true>>(rows, kPoolThreads,
                                                  shared_bytes_of(kMaxPoolBlocks, 1));
}

// Rows [first, first + rows), by `size` blocks each.
cudaError_t launch_rows(const IndexSelectParams& p, int32_t first, int32_t rows, int32_t size,
                        cudaStream_t stream) {
    const int32_t page_shift = floor_log2(p.select.page_size), size_log = floor_log2(size);
    const size_t shared = shared_bytes_of(p.scores.pool.width, size_log);
    if (size == 1) {
        return launch(reindex_kernel<false>, blocks_for(rows, 1), kPoolThreads, shared, stream, p,
                      first, page_shift, size_log);
    }
    return launch_clusters(reindex_kernel<true>, rows, size, kPoolThreads, shared, stream, p, first,
                           page_shift, size_log);
}

}  // namespace

bool reindex_fits(const IndexSelectParams& p) {
    const int32_t page_size = p.select.page_size;
    const ConstPages& pages = p.scores.index;
    const bool places = pages.page_stride % PoolPlaces::kUnit == 0 &&
                        pages.num_pages * pages.page_stride / PoolPlaces::kUnit <= INT32_MAX;
    return p.scores.pool.blocks && places && pages.num_pages > 0 &&
           p.scores.index.record == RecordId::IndexFp4 && p.scores.query.heads <= kPoolHeads &&
           p.select.k <= kMaxClusterTopK && p.scores.pool.width <= kMaxPoolBlocks &&
           page_size >= kPoolBlock && (page_size & (page_size - 1)) == 0;
}

cudaError_t reindex(const IndexSelectParams& p, cudaStream_t stream) {
    const int32_t rows = static_cast<int32_t>(p.scores.batch.rows);
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    const int32_t size = cluster_size(rows), rest = size == 1 ? rows % sms : 0;
    if (rest == 0 || cluster_size(rest) == 1) return launch_rows(p, 0, rows, size, stream);
    error = launch_rows(p, 0, rows - rest, size, stream);
    if (error != cudaSuccess) return error;
    return launch_rows(p, rows - rest, rest, cluster_size(rest), stream);
}

}  // namespace flash_csa::sm90
