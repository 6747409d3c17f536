// Part of few_heads.cu: the warps that find and copy records, and bring the queries.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/attend/few_heads.cuh"

namespace flash_csa::sm90::few_heads {

// A thread's share of kCount * 2 heads of a row, of the copying warpgroup: warp w has span w, a
// lane of every fourth head the units of 8 dims (t, u) of one t and two u.
template <int kHeads>
struct QueryPart {
    static constexpr int kCount = kHeads == 16 ? 8 : 4;
    static constexpr int kParts = kHeads / 2 / kCount;
    uint4 units[kCount];

    __device__ __forceinline__ void load(const AttendParams& p, int64_t row, int part, int warp,
                                         int lane) {
        const int first = lane / 8 + part * kCount * 2, t = lane % 8 / 2, u = lane % 2;
        const uint16_t* from = p.q.at(row, first) + kSpan * warp + 32 * t + 8 * u;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            units[i] = make_uint4(0, 0, 0, 0);
            if (first + i / 2 * 4 < p.heads)
                units[i] = __ldg(reinterpret_cast<const uint4*>(from + i % 2 * 16));
            if (i % 2 == 1) from += 4 * p.q.head_stride;
        }
    }

    __device__ __forceinline__ void store(uint8_t (&q)[kPanels][kHeads][kPanelRowBytes], int part,
                                          int warp, int lane) const {
        const int first = lane / 8 + part * kCount * 2, t = lane % 8 / 2, u = lane % 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            uint8_t* to = q[2 * warp + i % 2][0] + 4 * t;
            const uint4 pairs = paired_order(units[i]);
            const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
                *reinterpret_cast<uint32_t*>(to + panel_offset(first + i / 2 * 4, 4 * u + r)) =
                    words[r];
        }
    }
};

// One warp's state.
template <int kHeads>
struct Copier {
    using Shared = few_heads::Shared<kHeads>;
    const AttendParams& p;
    const Plan& plan;
    Shared& shared;
    const int warp, lane;
    Turn<kSlots<kHeads>> slot;
    Turn<kQueries<kHeads>> query_at;
    int present_set = 0;
    Run run, next;
    QueryPart<kHeads> query;

    // The slot of the lane's record of a tile.
    __device__ __forceinline__ int32_t list_slot(const Run& of, int32_t tile) const {
        const int at = kWarpRecords * warp + lane % kWarpRecords;
        return tile < of.end ? of.tiles.slot(tile, at, plan.main.page) : -1;
    }

    __device__ __forceinline__ void work() {
        if (warp == 0) prefetch_lists(p, static_cast<int32_t>(blockIdx.x) / plan.splits, lane);
        run.start(p, plan, blockIdx.x);
        int32_t ahead = list_slot(run, run.begin);
        for (int32_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
            query.load(p, item / plan.splits, 0, warp, lane);
            const int32_t later = item + static_cast<int32_t>(gridDim.x);
            if (warp == 0 && later < plan.items) prefetch_lists(p, later / plan.splits, lane);
            bool put = false;
            int used = 0;  // slots of this run
            for (int32_t tile = run.begin;; ++tile) {
                const bool window = run.tiles.is_window(tile);
                used += window ? Reader<RecordId::WindowFp8>::kSlots
                               : Reader<RecordId::MainFp4>::kSlots;
                // At once if that needs no waiting; else when the ring is full.
                const bool free = (kQueries<kHeads> > 1 || item == blockIdx.x) && tile > run.begin;
                if (!put && (free || used > kSlots<kHeads> || tile == run.end)) {
                    put_query(item);
                    put = true;
                }
                if (tile == run.end) break;
                const int32_t mine = ahead;
                ahead = list_slot(run, tile + 1);
                if (window)
                    copy_tile<RecordId::WindowFp8>(plan.window, mine);
                else
                    copy_tile<RecordId::MainFp4>(plan.main, mine);
            }
            run = next;
            ahead = list_slot(run, run.begin);
        }
    }

    // Gives the converting warps this run's query, and looks at the next run. Called when the ring
    // is full of this run's records, that is when nothing else is to be done before they are read.
    __device__ __forceinline__ void put_query(int32_t item) {
        const int at = query_at.at;
        shared.row_empty[at].wait(query_at.parity ^ 1);
#pragma unroll
        for (int part = 0; part < QueryPart<kHeads>::kParts; ++part) {
            if (part > 0) query.load(p, item / plan.splits, part, warp, lane);
            query.store(shared.q[at], part, warp, lane);
        }
        if (warp == 0 && lane == 0) {
            const int32_t window = run.tiles.window - run.begin;
            shared.tiles[at] = run.end - run.begin;
            shared.window[at] = window;
        }
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane == 0) shared.row_full[at].arrive();
        query_at.next();
        const int32_t later = item + static_cast<int32_t>(gridDim.x);
        if (later < plan.items) next.start(p, plan, later);
    }

    template <RecordId kId>
    __device__ __forceinline__ void copy_tile(const Places& places, int32_t list_slot) {
        using Read = Reader<kId>;
        const bool there = places.holds(list_slot);
        const uint8_t* from = there ? places.row(list_slot) : places.data;
        const uint32_t present = __ballot_sync(kAllLanes, there);
#pragma unroll
        for (int pass = 0; pass < Read::kSlots; ++pass) {
            shared.slot_empty[warp][slot.at].wait(slot.parity ^ 1);
            if (pass == 0) {
                if (lane == 0) shared.present[present_set][warp] = present;
                present_set = (present_set + 1) % kPresentSets;
            }
            copy_slot<Read>(from, present >> (pass * Read::kEach), pass * Read::kEach);
            slot.next();
        }
    }

    // Starts the copies of records first .. of the warp.
    template <class Read>
    __device__ __forceinline__ void copy_slot(const uint8_t* from, uint32_t present, int first) {
        constexpr uint32_t kAll = (1u << Read::kEach) - 1;
        constexpr int kBytes = Read::kRecord.bytes();
        const uint32_t mine = present & kAll;
        uint8_t* to = shared.slots[warp][slot.at];
        CopyBarrier& full = shared.slot_full[warp][slot.at];
        if (mine != kAll) clear_absent<Read>(mine, to);
        if (lane == 0) full.arrive_and_expect_tx(__popc(mine) * kBytes);
        __syncwarp();
        if (mine == kAll)
            copy_records<Read, true>(from, mine, first, to, full);
        else
            copy_records<Read, false>(from, mine, first, to, full);
    }

    template <class Read, bool kAll>
    __device__ __forceinline__ void copy_records(const uint8_t* from, uint32_t mine, int first,
                                                 uint8_t* to, CopyBarrier& full) {
        constexpr int kStep = 8;  // addresses that are there at a time
#pragma unroll
        for (int k = 0; k < Read::kEach; k += kStep) {
            const uint8_t* records[kStep];
#pragma unroll
            for (int i = 0; i < kStep; ++i)
                records[i] = reinterpret_cast<const uint8_t*>(
                    __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(from), first + k + i));
            if (cute::elect_one_sync()) {
#pragma unroll
                for (int i = 0; i < kStep; ++i) {
                    if (kAll || (mine >> (k + i) & 1) != 0)
                        cute::SM90_BULK_COPY_G2S::copy(
                            records[i], reinterpret_cast<uint64_t*>(&full), to + Read::place(k + i),
                            Read::kRecord.bytes());
                }
            }
            __syncwarp();
        }
    }

    // Zero codes under zero scales: what is not there takes part in the second product.
    template <class Read>
    __device__ __forceinline__ void clear_absent(uint32_t mine, uint8_t* to) const {
        for (int i = 0; i < Read::kEach; ++i) {
            if ((mine >> i & 1) != 0) continue;
            for (int at = lane; at < Read::kRecord.bytes() / 16; at += 32)
                reinterpret_cast<uint4*>(to + Read::place(i))[at] = make_uint4(0, 0, 0, 0);
        }
        cutlass::arch::fence_view_async_shared();  // before a later copy to the same place
        __syncwarp();
    }
};

}  // namespace flash_csa::sm90::few_heads
