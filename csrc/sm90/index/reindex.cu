// reindex: scores of the entries of a pool and the best k of them, in one launch; scores stay in
// shared memory.
//
//   in   index pages, queries, weights, block table, pool      out  a Selection
//
// A cluster of 1 to 16 blocks takes a row, as many as fit while every row has one. Each block
// scores a share of the pool (pool_scores.cuh); then the cluster selects (cluster_top_k.cuh).
//
// Floor: 68 bytes an entry, 1.1 MB a row of 2048 blocks. Limits: IndexFp4 keys, 64 heads, k and
// pool of at most 2048, page sizes 8, 16, .., 256; index_select.cu has the other shapes.
#include "sm90/common/cluster.h"
#include "sm90/common/launch.h"
#include "sm90/index/pool_scores.cuh"
#include "sm90/index/reindex.h"
#include "sm90/select/cluster_rows.cuh"
#include "sm90/select/score_sources.cuh"

namespace flash_csa::sm90 {
namespace {

static_assert(kPoolThreads == kClusterThreads);
using PoolShare = Share<kPassKeys>;  // lines are units

struct Shared {
    PoolScoresShared scoring;
    union {
        PoolRing ring;  // while scoring
        CandidateShared top_k;
    };
    PagedRow row;
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
    __device__ static constexpr uint32_t present(int32_t) { return 0xfu; }
    __device__ int32_t position(int32_t id) const {
        return static_cast<int32_t>(row.columns.position(id));
    }
};

// Most blocks of a pool that one of 2^size_log blocks of threads scores: whole units.
__host__ __device__ constexpr int32_t blocks_each(int32_t blocks, int32_t size_log) {
    return ((blocks + (kPoolUnitBlocks << size_log) - 1) >> size_log) / kPoolUnitBlocks *
           kPoolUnitBlocks;
}

__device__ __forceinline__ PoolPlace place_of(const PagedRow& row, const ConstPages& pages,
                                              int64_t position, int32_t page) {
    constexpr Record r = record(RecordId::IndexFp4);
    const int32_t size = row.columns.page_size;
    const int32_t offset = static_cast<int32_t>(position) & (size - 1);
    if (page < 0 || page >= pages.num_pages || static_cast<uint32_t>(page) > row.last_page) {
        return {};
    }
    const uint8_t* codes = pages.data + page * pages.page_stride + r.data_at(offset);
    return {codes, static_cast<int32_t>(r.scale_at(offset, size) - r.data_at(offset)),
            min(kPoolBlock, row.columns.n_vis - static_cast<int32_t>(position))};
}

constexpr int kOwnBlocks = kMaxPoolBlocks / kPoolThreads;  // of a thread

// The blocks that a thread finds the places of, read before it is known how many there are. Units
// are lines of the part.
__device__ __forceinline__ void load_blocks(const PoolView& pool, int64_t row, const PoolShare& all,
                                            int32_t rank, int32_t (&blocks)[kOwnBlocks]) {
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        const int32_t block = all.id(at * kPoolBlock, rank) / kPoolBlock;
        if (block < pool.width) blocks[i] = pool.blocks.row(row)[block];
    }
}

__device__ __forceinline__ void find_places(const PagedRow& row, const ConstPages& pages,
                                            const PoolShare& share, int32_t rank,
                                            const int32_t (&blocks)[kOwnBlocks],
                                            PoolPlace* places) {
    int64_t positions[kOwnBlocks];
    int32_t page[kOwnBlocks];
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        positions[i] = int64_t{blocks[i]} * kPoolBlock;
        const bool reads =
            share.id(at * kPoolBlock, rank) < share.count && row.columns.visible(positions[i]);
        page[i] = reads ? row.columns.pages[positions[i] >> row.page_shift] : -1;
    }
#pragma unroll
    for (int i = 0; i < kOwnBlocks; ++i) {
        const int32_t at = static_cast<int32_t>(threadIdx.x) + i * kPoolThreads;
        if (at * kPoolBlock < share.length()) {
            places[at] = place_of(row, pages, positions[i], page[i]);
        }
    }
}

template <bool kCluster>
__global__ void __launch_bounds__(kPoolThreads, 1)
    reindex_kernel(IndexSelectParams p, int32_t page_shift, int32_t size_log) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int32_t most = blocks_each(p.scores.pool.width, size_log);
    float* sScores = reinterpret_cast<float*>(&shared + 1);                          // [8 most]
    PoolPlace* sPlaces = reinterpret_cast<PoolPlace*>(sScores + most * kPoolBlock);  // [most]
    cudaGridDependencySynchronize();  // launched while the kernel in front was ending
    if (!kCluster) size_log = 0;
    const int64_t row = blockIdx.x >> size_log;
    const int32_t rank = static_cast<int32_t>(blockIdx.x) & ((1 << size_log) - 1);
    int32_t blocks[kOwnBlocks];
    load_blocks(p.scores.pool, row, {0, size_log}, rank, blocks);
    if (threadIdx.x == 0) {
        shared.row = paged_row(columns_of(p.select, p.select.page_size, INT32_MAX, row), nullptr,
                               nullptr, page_shift);
    }
    __syncthreads();
    const PoolShare share{shared.row.columns.count, size_log};
    find_places(shared.row, p.scores.index, share, rank, blocks, sPlaces);
    __syncthreads();
    PoolScorer(p.scores, sPlaces, share.length() / kPassKeys, shared.ring, shared.scoring)
        .run(row, sScores);
    __syncthreads();
    const ScoredPool source{shared.row, sScores, size_log};
    constexpr int kUnits = kMaxPoolBlocks * kPoolBlock / kStripe / (kCluster ? 2 : 1);
    ClusterTopK<kCluster, kUnits, ScoredPool> top_k(source, size_log, p.select.k, shared.top_k);
    float4 units[kUnits];
    top_k.load(units);
    write_entries<kCluster>(p.select.out, row, p.select.k, source,
                            [&](const auto& sink) { return top_k.run(units, sink); });
}

size_t shared_bytes_of(int32_t width, int32_t size_log) {
    const size_t block = kPoolBlock * sizeof(float) + sizeof(PoolPlace);
    return sizeof(Shared) + blocks_each(width, size_log) * block;
}
static_assert(sizeof(Shared) + kMaxPoolBlocks * (kPoolBlock * sizeof(float) + sizeof(PoolPlace)) <=
              227 * 1024);

}  // namespace

bool reindex_fits(const IndexSelectParams& p) {
    const int32_t page_size = p.select.page_size;
    return p.scores.pool.blocks && p.scores.index.record == RecordId::IndexFp4 &&
           p.scores.query.heads <= kPoolHeads && p.select.k <= kMaxClusterTopK &&
           p.scores.pool.width <= kMaxPoolBlocks && page_size >= kPoolBlock &&
           (page_size & (page_size - 1)) == 0;
}

cudaError_t reindex(const IndexSelectParams& p, cudaStream_t stream) {
    const int32_t page_shift = floor_log2(p.select.page_size);
    const int64_t rows = p.scores.batch.rows;
    const int32_t width = p.scores.pool.width;
    const int32_t size = cluster_size_for<reindex_kernel<true>>(rows, kPoolThreads,
                                                                shared_bytes_of(kMaxPoolBlocks, 1));
    const size_t shared = shared_bytes_of(width, floor_log2(size));
    if (size == 1) {
        return launch(reindex_kernel<false>, blocks_for(rows, 1), kPoolThreads, shared, stream, p,
                      page_shift, 0);
    }
    return launch_clusters(reindex_kernel<true>, rows, size, kPoolThreads, shared, stream, p,
                           page_shift, floor_log2(size));
}

}  // namespace flash_csa::sm90
