// Scores of the only row of a launch, with at most 32 heads: groups of four warps that need nobody
// else. A group takes units of 256 keys in turn, each of its warps a chunk of 64 that it brings
// itself. Of a tile of an MMA every warp gives 16 keys (row_scores.cuh).
#pragma once

#include "sm90/common/dependents.cuh"
#include "sm90/index/row_scores.cuh"

namespace flash_csa::sm90 {

constexpr int kSingleStages = 3;

template <int kHeads>
struct alignas(1024) SingleShared {
    RowTile<kHeads> tile;
    OffsetUnits tables[kMaxRowFold + 2];  // by shift
    WarpKeys<kSingleStages> warps[kRowThreads / 32];
};
static_assert(sizeof(SingleShared<32>) <= kSmemOptIn);

// Units are dealt out in turn, so that a group knows where they lie before it knows how many there
// are: its warps look up the pages of 32 turns at once, one a lane.
class SingleTurns {
  public:
    __device__ __forceinline__ explicit SingleTurns(const ChunkCopier& copier)
        : copier_(copier),
          first_(blockIdx.x + gridDim.x * (threadIdx.x / kGroupThreads)),
          step_(gridDim.x * kRowGroups) {}

    __device__ __forceinline__ int32_t unit(int32_t turn) const { return first_ + turn * step_; }
    // Before the copy of a turn at which it is due.
    __device__ __forceinline__ void look_up(const int32_t* table, int32_t columns, int32_t turn,
                                            WarpKeys<kSingleStages>& keys) const {
        const int32_t lane = threadIdx.x % 32;
        const int32_t at = copier_.has_whole() ? (turn & ~31) + lane : turn;
        copier_.find(table, columns, chunk_of(unit(at)), keys);
    }
    __device__ __forceinline__ bool looks_up(int32_t turn) const {
        return !copier_.has_whole() || turn % 32 == 0;
    }

  private:
    const ChunkCopier& copier_;
    int32_t first_, step_;
};

template <int kHeads, class Sink>
__device__ __forceinline__ void score_single(const IndexScoresParams& p,
                                             SingleShared<kHeads>& shared, Sink& sink) {
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    WarpKeys<kSingleStages>& keys = shared.warps[warp];
    const ChunkCopier copier(p);
    const SingleTurns turns(copier);
    const bool guesses = p.batch.requests == 1;
    if (guesses) {
        const int64_t capacity = int64_t{p.block_table.columns} * p.index.page_size;
        turns.look_up(p.block_table.data, static_cast<int32_t>(min(capacity, p.columns)), 0, keys);
    }
    const RowHeads<kHeads> heads(p, 0);
    const Segment row = group_of(p, 0);
    if (row.end == 0) return;
    const int32_t* table = p.block_table.row(row.request);
    if (!guesses) turns.look_up(table, row.count, 0, keys);
    const auto copy = [&](int32_t turn, int32_t stage) {
        if (turn > 0 && turns.looks_up(turn)) turns.look_up(table, row.count, turn, keys);
        copier.copy(turn, chunk_of(turns.unit(turn)), 0, row.count, keys, stage);
    };
#pragma unroll 1
    for (int32_t i = 0; i < kSingleStages && turns.unit(i) < row.end; ++i) copy(i, i);
    if (warp < kGroupThreads / 32) heads.put(shared.tile);
    __syncthreads();
    const RowQuery<kHeads, 1> query(shared.tile);
    for (int32_t turn = 0; turns.unit(turn) < row.end; ++turn) {
        const uint32_t round = static_cast<uint32_t>(turn) / kSingleStages;
        const int32_t stage = turn - static_cast<int32_t>(round) * kSingleStages;
        keys.full[stage].wait(round & 1);
        score_chunk<true>(p, query, shared.tables, keys, stage, sink);
        if (turns.unit(turn + kSingleStages) < row.end) copy(turn + kSingleStages, stage);
    }
}

template <int kHeads, class Sink>
__global__ void __launch_bounds__(kRowThreads, 1)
    score_single_kernel(const __grid_constant__ IndexScoresParams p,
                        const __grid_constant__ typename Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SingleShared<kHeads>& shared = *reinterpret_cast<SingleShared<kHeads>*>(shared_bytes);
    shared.warps[__shfl_sync(~0u, threadIdx.x / 32, 0)].init();
    if (threadIdx.x <= kMaxRowFold) shared.tables[threadIdx.x] = OffsetUnits::of(threadIdx.x);
    wait_for_previous();
    allow_dependents();
    Sink sink(sink_params, nullptr);
    score_single(p, shared, sink);
}

}  // namespace flash_csa::sm90
