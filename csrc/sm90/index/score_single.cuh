// Scores of the only row of a launch, with at most 32 heads: groups of four warps that need nobody
// else. A group takes units of 256 keys in turn, each of its warps a chunk of 64 that it brings
// itself. Of a tile of an MMA every warp gives 16 keys (row_scores.cuh).
#pragma once

#include "sm90/common/dependents.cuh"
#include "sm90/common/prefetch.cuh"
#include "sm90/index/row_scores.cuh"

namespace flash_csa::sm90 {

constexpr int kSingleStages = 3;
constexpr int kShortTurns = 2;  // of rows whose first keys are asked for ahead

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
    // Of the table: a lane's of the first 32 turns, or of the first one.
    __device__ __forceinline__ int32_t entry(const int32_t* table, int32_t columns) const {
        const int32_t turn = copier_.has_whole() ? threadIdx.x % 32 : 0;
        return copier_.entry(table, columns, chunk_of(unit(turn)));
    }
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

// What is read first, as hints, while the kernel before may still write it.
template <int kHeads>
__device__ __forceinline__ void prefetch_inputs(const IndexScoresParams& p) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    if (thread < kHeads) {
        prefetch_l2(p.query.codes.row(0) + min(thread, p.query.heads - 1) * kKeyBytes);
    } else if (thread == 32) {
        prefetch_l2(p.batch.positions);
        prefetch_l2(p.batch.row_request);
        prefetch_l2(p.query.scales_ue8m0.row(0));
        prefetch_l2(p.weights.f32 ? static_cast<const void*>(p.weights.f32.data)
                                  : p.weights.bf16.data);
    } else if (thread >= 64 && thread < 64 + min(kRowGroups, p.block_table.columns)) {
        const int32_t unit = blockIdx.x + gridDim.x * (thread - 64);
        const int32_t column = unit * kUnitKeys >> (__ffs(p.index.page_size) - 1);
        prefetch_l2(p.block_table.data + min(column, p.block_table.columns - 1));
    }
}

// The first keys of a warp, as a hint, by a table and a position that may still change. most:
// columns; least: tokens that are closed where the group's first unit is one of the row.
__device__ __forceinline__ void prefetch_keys(const IndexScoresParams& p, const SingleTurns& turns,
                                              int32_t most, uint32_t least) {
    const int32_t column = chunk_of(turns.unit(0)) * kChunkKeys;
    int32_t page = -1;
    if (column < most) page = peek(p.block_table.data + column / kChunkKeys);
    const int32_t position = peek(p.batch.positions);
    const uint32_t closed = position + (p.strict ? 0u : 1u);
    if (position >= 0 && closed >= least && page >= 0 && page < p.index.num_pages &&
        cute::elect_one_sync()) {
        prefetch_l2(p.index.data + page * p.index.page_stride, kChunkBytes);
    }
}

// Ends the prologue: waits for the kernel before.
template <int kHeads, class Sink>
__device__ __forceinline__ void score_single(const IndexScoresParams& p,
                                             SingleShared<kHeads>& shared,
                                             const typename Sink::Params& sink_params) {
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    WarpKeys<kSingleStages>& keys = shared.warps[warp];
    const ChunkCopier copier(p);
    const SingleTurns turns(copier);
    const bool guesses = p.batch.requests == 1;
    const int64_t capacity = int64_t{p.block_table.columns} * p.index.page_size;
    const int32_t most = static_cast<int32_t>(min(capacity, p.columns)), first = turns.unit(0);
    // So many tokens are closed at least, where the first unit is one of the row.
    const int64_t closed = (int64_t{first} * kUnitKeys + 1) * p.ratio;
    const bool may_start = guesses && p.index.page_size == kChunkKeys && first * kUnitKeys < most &&
                           closed <= int64_t{UINT32_MAX};
    const uint32_t least = fresh(static_cast<int32_t>(closed));
    // Not where the row may be long: the kernel before would have to wait for its keys, and this
    // one waits for the table.
    const int32_t step = static_cast<int32_t>(gridDim.x) * kRowGroups;
    if (may_start && most <= kShortTurns * step * kUnitKeys) prefetch_keys(p, turns, most, least);
    wait_for_previous();
    allow_dependents();
    Sink sink(sink_params, nullptr);
    // All of these are asked for before one is waited for.
    const int32_t request = p.batch.row_request[0], position = p.batch.positions[0];
    const int32_t page = guesses ? turns.entry(p.block_table.data, most) : -1;
    RowHeads<kHeads> heads;
    if (warp < kGroupThreads / 32) heads.load(p, 0);
    // The first keys, before it is computed how many there are.
    const bool starts =
        may_start && request == 0 && position >= 0 && position + (p.strict ? 0u : 1u) >= least;
    if (starts) copier.copy_first(page, chunk_of(first), keys);
    if (guesses) copier.keep(page, keys);
    const Segment row = group_of(p, 0, request, position);
    if (row.end == 0) return;
    const int32_t* table = p.block_table.row(row.request);
    if (!guesses) turns.look_up(table, row.count, 0, keys);
    const auto copy = [&](int32_t turn, int32_t stage) {
        if (turn > 0 && turns.looks_up(turn)) turns.look_up(table, row.count, turn, keys);
        copier.copy(turn, chunk_of(turns.unit(turn)), 0, row.count, keys, stage);
    };
    if (starts && threadIdx.x % 32 == 0) keys.places[0].count = row.count;
#pragma unroll 1
    for (int32_t i = starts; i < kSingleStages && turns.unit(i) < row.end; ++i) copy(i, i);
    if (warp < kGroupThreads / 32) heads.put(p, shared.tile);
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
    prefetch_inputs<kHeads>(p);
    shared.warps[__shfl_sync(~0u, threadIdx.x / 32, 0)].init();
    if (threadIdx.x <= kMaxRowFold) shared.tables[threadIdx.x] = OffsetUnits::of(threadIdx.x);
    score_single<kHeads, Sink>(p, shared, sink_params);
}

}  // namespace flash_csa::sm90
