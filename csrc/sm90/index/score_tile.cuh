// The main loop of the kernels that score index keys for rows that share them or many heads
// (score_single.cuh and score_rows.cuh have the others): FP4 keys from pages against the queries of
// a group, final FP32 scores handed to a sink.
//
// Warps: groups of four take passes of kPassKeys keys in turn; three feeders behind them bring the
// keys (key_ring.cuh). Keys are the M rows of MMA tiles, their codes in registers; queries are N.
// Units whose scales allow it go to score_quads.cuh (three rows or more) or score_folded.cuh, the
// others to score_groups.cuh: the bits are those of core/scoring.h either way.
//
// A sink is an object of each consumer thread:
//
//   struct Sink {
//       struct Params {...};                  // passed by value to the kernel
//       static constexpr int kSharedBytes;    // of the block, for the sink alone, 16-byte aligned
//       Sink(const Params&, uint8_t* shared);
//       void begin(const Segment&, int thread, int threads);    // all consumers, before its scores
//       void put(int64_t row, int32_t column, float score, bool visible);
//       void put_four(int64_t row, int32_t column, const float4& scores, int32_t visible,
//                     bool here);
//       void end(const Segment&, int thread, int threads);      // all consumers, after its scores
//   };
//
// A barrier of the consumers separates begin, the scores and end. put and put_four are called by
// whole warps. put takes one score a lane, of 32 neighbouring columns that start at a multiple of
// 32: bits 0, 1 of the lane say which block of eight, bits 2 .. 4 the column in it. put_four takes
// four neighbours a lane, of four rows: bits 0, 1 of the lane say which row, bits 2 .. 4 which four
// of the 32 columns; without `here` there is no such row, and `visible` counts the columns from the
// first one on that are (it may be negative or above four).
//
// Scores are canonical (core/numerics.h); that of an entry on no page is NaN. Columns that are not
// visible have undefined scores. Each visible column of each row of the segment is handed over
// once, in any order.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/common/dependents.cuh"
#include "sm90/index/score_groups.cuh"
#include "sm90/index/score_quads.cuh"

namespace flash_csa::sm90 {

// All rows of the segment against the keys of a pass, which are in the ring at `at`, in passes.
template <class Config>
__device__ __forceinline__ void score_pass(const IndexScoresParams& p, const Segment& segment,
                                           int32_t pass, const ScorePlan& plan,
                                           const ScoreShared<Config>& shared,
                                           const RingPosition& at, typename Config::Sink& sink) {
    const KeyRing& ring = shared.ring;
    const uint32_t at_stage = static_cast<uint32_t>(at.stage) / kPasses;
    const KeyStage& stage = ring.stages[at_stage];
    const int32_t unit = static_cast<uint32_t>(pass) / kPasses;
    const PassKeys keys(stage, Pieces(p.index), unit, static_cast<uint32_t>(pass) % kPasses);
    ring.ready[at_stage].wait(at.phase);  // whose feeder has waited for the copies
    if ((*shared.queries.folds & stage.folds) == 0) {
        score_groups<Config>(p, segment, plan, shared, keys, sink);
    } else if (segment.rows >= kQuadRows) {
        if (plan.padded_heads == 2 * Config::kQuadHeads) {
            score_quads<Config, true>(segment, plan, shared, keys, sink);
        } else {
            score_quads<Config, false>(segment, plan, shared, keys, sink);
        }
    } else if (plan.padded_heads == Config::kHeads) {
        score_folded<Config, true>(segment, plan, shared, keys, sink);
    } else {
        score_folded<Config, false>(segment, plan, shared, keys, sink);
    }
    ring.empty[at_stage].arrive();
}

template <class Config>
__device__ __forceinline__ void consumers_sync() {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers, kConsumerBarrier);
}

template <class Config>
__device__ __forceinline__ void load_segment(const IndexScoresParams& p, const Segment& segment,
                                             const ScorePlan& plan,
                                             const ScoreShared<Config>& shared,
                                             typename Config::Sink& sink) {
    constexpr int kThreads = Config::kConsumers;
    const int32_t thread = threadIdx.x;
    sink.begin(segment, thread, kThreads);
    if (thread == 0) *shared.queries.folds = 1;
    for (int32_t row = thread; row < segment.rows; row += kThreads) {
        shared.queries.plain[row] = 1;
        const int64_t at = int64_t{segment.first_row} + row;
        shared.fixed->counts[row] = segment.rows == 1
                                        ? segment.count
                                        : columns_of(p, p.index.page_size, p.columns, at).count;
    }
    consumers_sync<Config>();
    load_queries<kThreads, Config::kQuadHeads>(p, segment, plan.padded_heads, shared.queries,
                                               thread);
    cutlass::arch::fence_view_async_shared();
}

// One thread of the consumers: a segment.
template <class Config>
__device__ __forceinline__ void consume_segment(const IndexScoresParams& p, const Segment& segment,
                                                const ScorePlan& plan,
                                                const ScoreShared<Config>& shared, UnitTurn& turn,
                                                typename Config::Sink& sink) {
    load_segment<Config>(p, segment, plan, shared, sink);
    consumers_sync<Config>();
    const int32_t end = segment.end * kPasses;
    int32_t pass = segment.begin * kPasses + turn.skip;
    for (; pass < end; pass += turn.step) {
        score_pass<Config>(p, segment, pass, plan, shared, turn.at, sink);
        turn.at.advance(turn.step);
    }
    turn.skip = pass - end;
    consumers_sync<Config>();
    sink.end(segment, threadIdx.x, Config::kConsumers);
}

// All segments of the list.
template <class Config>
__device__ __forceinline__ void consume(const IndexScoresParams& p, const ScorePlan& plan,
                                        const ScoreShared<Config>& shared, UnitTurn& turn,
                                        typename Config::Sink& sink) {
    for (int32_t i = shared.fixed->work.first; i <= shared.fixed->work.last; ++i) {
        Segment segment = shared.fixed->work.segments[i];
        segment.rows = __shfl_sync(~0u, segment.rows, 0);  // known to be uniform: so are loops
        if (segment.begin == segment.end) continue;
        consumers_sync<Config>();  // the last segment's queries are read
        consume_segment<Config>(p, segment, plan, shared, turn, sink);
    }
}

// ---- Kernel

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    score_kernel(const __grid_constant__ IndexScoresParams p, const ScorePlan plan,
                 const __grid_constant__ typename Config::Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const ScoreShared<Config> shared(shared_bytes, plan);
    if (threadIdx.x == 0) {
        shared.fixed->list_full.init(kPlanners);
        shared.fixed->list_empty.init(Config::kThreads);
        shared.ring.init(kPasses * kGroupThreads);
    }
    wait_for_previous();
    allow_dependents();
    __syncthreads();
    const int32_t warp = threadIdx.x / 32;
    constexpr int32_t kFirstFeeder = Config::kConsumers / 32;
    const RingPosition start = {plan.num_stages};
    WorkList& work = shared.fixed->work;
    if (warp < kFirstFeeder) {
        cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
        const RingPosition passes = {kPasses * plan.num_stages};
        UnitTurn turn(passes, warp / 4, Config::kGroups);
        typename Config::Sink sink(sink_params, shared.fixed->sink);
        for (uint32_t phase = 0;; phase ^= 1) {
            shared.fixed->list_full.wait(phase);
            if (work.last < 0) break;
            consume<Config>(p, plan, shared, turn, sink);
            shared.fixed->list_empty.arrive();
        }
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kFeederRegisters>();
        UnitTurn copies(start, warp - kFirstFeeder, kFeeders), scales = copies;
        Planner planner(p, plan.max_rows, work, threadIdx.x - Config::kConsumers);
        for (uint32_t phase = 0;; phase ^= 1) {
            planner.next();
            shared.fixed->list_full.arrive();
            shared.fixed->list_full.wait(phase);
            if (work.last < 0) break;
            if (warp < kFirstFeeder + kFeeders) feed_keys(p, work, shared.ring, copies, scales);
            shared.fixed->list_empty.arrive();
            shared.fixed->list_empty.wait(phase);
        }
    }
}

}  // namespace flash_csa::sm90
