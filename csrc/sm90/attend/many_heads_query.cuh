// Part of many_heads.cu: queries, on their way to shared memory and there.
//
// They are copied as they lie, swizzled in panels, and then put into paired order (dequant.cuh).
// In blocks alone the values copy them while they wait for the last weights of the row before, and
// both consumers put them into order; in a pair, whose consumers have no time to spare between
// rows, the copying warps do both, but for a first row that is known: by tensor copies, which are
// one instruction for 64 heads of a panel instead of 512 copies.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/attend/many_heads.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90::many_heads {

// A thread's 16-byte chunks of the queries of a piece: of kSharers threads, one chunk of every
// kStep-th head.
template <int kSharers>
struct QueryChunks {
    static constexpr int kChunks = kHeadDim / kGroupDims;
    static constexpr int kStep = kSharers / kChunks, kCount = kHeadBlock / kStep;
    int chunk, head;  // the first
    uint8_t* panel;

    __device__ __forceinline__ QueryChunks(int thread, Shared& shared)
        : chunk(fresh_lane(thread) % kChunks),
          head(fresh_lane(thread) / kChunks),
          panel(shared.q + chunk / 8 * kTilePanelBytes) {}
    __device__ __forceinline__ uint8_t* at(int i) const {
        return panel + panel_offset(head + i * kStep, chunk % 8);
    }
};

// Nobody reads the queries before any more. Heads beyond the last are zero. A warpgroup calls.
__device__ __forceinline__ void start_queries(const AttendParams& p, int32_t row,
                                              int32_t head_block, int thread, Shared& shared) {
    const QueryChunks<kWarpgroup> mine(thread, shared);
    const int first_head = head_block * kHeadBlock;
    const uint16_t* heads = p.q.at(row, first_head);
#pragma unroll 4
    for (int i = 0; i < mine.kCount; ++i) {
        const int head = mine.head + i * mine.kStep;
        const bool there = first_head + head < p.heads;
        const uint16_t* from = heads + (there ? head * p.q.head_stride : 0);
        copy_16_async(mine.at(i), from + mine.chunk * kGroupDims, there);
    }
}

// The same in a pair, by a tensor copy for each panel. A thread calls.
__device__ __forceinline__ void start_queries_of_pair(const CUtensorMap& map, int32_t row,
                                                      int32_t head_block, Shared& shared) {
    CopyBarrier& there = shared.query_there;
    there.arrive_and_expect_tx(kTileBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
        cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&there),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     shared.q + panel * kTilePanelBytes, panel * kPanelColumns,
                                     head_block * kHeadBlock, row);
}

// Puts queries that are there into paired order, and takes the sign of the softmax scale into them.
// kSharers threads call.
template <int kSharers>
__device__ __forceinline__ void order_queries(const AttendParams& p, int thread, Shared& shared) {
    constexpr int kAtATime = 4;  // reads that are on their way together
    const uint32_t sign = p.softmax_scale < 0.f ? 0x80008000u : 0;
    const QueryChunks<kSharers> mine(thread, shared);
#pragma unroll 1
    for (int i = 0; i < mine.kCount; i += kAtATime) {
        uint4 x[kAtATime];
#pragma unroll
        for (int j = 0; j < kAtATime; ++j) x[j] = *reinterpret_cast<const uint4*>(mine.at(i + j));
#pragma unroll
        for (int j = 0; j < kAtATime; ++j) {
            const uint4 y = paired_order(x[j]);
            *reinterpret_cast<uint4*>(mine.at(i + j)) =
                make_uint4(y.x ^ sign, y.y ^ sign, y.z ^ sign, y.w ^ sign);
        }
    }
    cutlass::arch::fence_view_async_shared();
}

// The values' part in it.
template <bool kPair, Lists kLists>
struct QueryBringer {
    const AttendParams& p;
    const SplitPlan& plan;
    const CUtensorMap& map;
    Shared& shared;

    // Of the first row, while nobody has anything else to do; but what lists say comes first. Where
    // the consumers begin, they are on their way.
    __device__ __forceinline__ void first() const {
        const PlannedRow first(plan);
        if (kPair && !first.known) return;
        if constexpr (!kConsumersBegin<kPair, kLists>) shared.piece_full[0].wait(0);
        if constexpr (kPair) {
            if constexpr (!kConsumersBegin<kPair, kLists>) start(first.row, first.head_block);
            shared.query_there.wait(0);
            order_queries<kWarpgroup>(p, threadIdx.x % kWarpgroup, shared);
            shared.query_full.arrive();
        } else {
            start(shared.pieces[0].row, shared.pieces[0].head_block);
        }
    }

    // Of the piece behind number `turn`, when those of that are multiplied.
    __device__ __forceinline__ void next(PieceTurn turn) const {
        if constexpr (kPair) return;
        shared.query_empty.wait(turn.number & 1);
        PlannedRow row(plan, ++turn.number);
        if (!row.known) {
            shared.piece_full[turn.at()].wait(turn.parity());
            row.row = shared.pieces[turn.at()].row;
            row.head_block = shared.pieces[turn.at()].head_block;
        }
        start(row.row, row.head_block);
    }

  private:
    __device__ __forceinline__ void start(int32_t row, int32_t head_block) const {
        if (row < 0 || row >= p.rows) return;
        const int thread = threadIdx.x % kWarpgroup;
        if constexpr (kPair) {
            if (thread == 0) start_queries_of_pair(map, row, head_block, shared);
        } else {
            start_queries(p, row, head_block, thread, shared);
            cutlass::arch::cpasync_barrier_arrive_noinc(
                reinterpret_cast<uint64_t*>(&shared.query_there));
        }
    }
};

// Blocks alone: a consumer puts half of the queries of a piece into order.
template <bool kPair>
__device__ __forceinline__ void order_half(const AttendParams& p, const Piece& piece,
                                           PieceTurn turn, Shared& shared) {
    if constexpr (kPair) return;
    shared.query_there.wait(turn.number & 1);
    if (piece.first < piece.end) order_queries<kConsumers>(p, threadIdx.x % kConsumers, shared);
    shared.query_full.arrive();
}

}  // namespace flash_csa::sm90::many_heads
