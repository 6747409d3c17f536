// Part of few_heads.cu: the warps that find and copy records, and bring the queries.
#pragma once

#include "sm90/attend/few_heads.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90::few_heads {

// A thread's share of kCount * 2 heads of a row, of the copying warpgroup: warp w has span w, a
// lane of every fourth head the units of 8 dims (t, u) of one t and two u.
template <int kHeads>
struct QueryPart {
    static constexpr int kCount = kHeads == 8 ? 4 : 8;
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
template <int kHeads, bool kWhole>
struct Copier {
    using Shared = few_heads::Shared<kHeads>;
    using Main = Reader<RecordId::MainFp4, kBankRows<kHeads>>;
    using Window = Reader<RecordId::WindowFp8, kBankRows<kHeads>>;
    const AttendParams& p;
    const Plan<kWhole>& plan;
    Shared& shared;
    const int warp, lane;
    static constexpr bool kEarlyQuery = kHeads == 8;  // before lengths are known: registers
    Turn<kSlots<kHeads>> slot;
    Turn<kQueries<kHeads>> query_at;
    int present_set = 0;
    Run run;
    Tiles next{};  // of the row after
    QueryPart<kHeads> query;

    // Slots of two tiles: lane 16 h + r has that of record r of the warp's of tile `tile` + h.
    __device__ __forceinline__ int32_t find(int32_t tile) const {
        const int of_lane = seldom<kHeads>(lane);
        tile += of_lane / kWarpRecords;
        const int at = kWarpRecords * warp + of_lane % kWarpRecords;
        plan.know_lists(p);
        return tile < run.end ? run.tiles.slot(p, tile, at, plan.main.page) : -1;
    }

    __device__ __forceinline__ uint32_t distance(int32_t tile, int32_t slot) const {
        return run.tiles.is_window(tile + seldom<kHeads>(lane) / kWarpRecords)
                   ? plan.window.distance(slot)
                   : plan.main.distance(slot);
    }

    __device__ __forceinline__ void ask_for_query(int32_t item, int part = 0) {
        query.load(p, item / plan.splits, part, warp, fresh(lane));
    }

    __device__ __forceinline__ void prefetch(int32_t item) const {
        if (item >= plan.items) return;
        if (warp == 0) prefetch_lists(p, item / plan.splits, seldom<kHeads>(lane));
        if (warp == 1) prefetch_query(p, item / plan.splits, seldom<kHeads>(lane));
    }

    __device__ __forceinline__ void look_at(int32_t item) {
        next.start<kWhole>(p, item / plan.splits);
    }

    // Loads stand in the order in which they are needed, lengths first: one that waits for a page's
    // translation holds up those behind it. What is for the row after is asked for behind the first
    // copies.
    __device__ __forceinline__ void work() {
        look_at(blockIdx.x);
        if (kEarlyQuery) ask_for_query(blockIdx.x);
        run.start(next, plan, blockIdx.x);
        int32_t ahead = find(run.begin);
        for (int32_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
            const int32_t later = item + static_cast<int32_t>(gridDim.x);
            if (kWhole && item != static_cast<int32_t>(blockIdx.x)) prefetch(later);
            const int32_t put = put_before(item);
            uint32_t places = 0;  // of the records of two tiles
            for (int32_t tile = run.begin;; ++tile) {
                if (tile == put) {
                    put_query(item);
                    if (!kWhole || item == static_cast<int32_t>(blockIdx.x)) prefetch(later);
                }
                if (tile == run.end) break;
                const bool window = run.tiles.is_window(tile);
                const int second = (tile - run.begin) % 2;
                if (second == 0) {
                    places = distance(tile, ahead);
                    ahead = find(tile + 2);
                }
                if (window)
                    copy_tile<RecordId::WindowFp8>(plan.window.data, places, second);
                else
                    copy_tile<RecordId::MainFp4>(plan.main.data, places, second);
            }
            run.start(next, plan, later);
            ahead = find(run.begin);
            if (kEarlyQuery && later < plan.items) ask_for_query(later);
        }
    }

    // The tile before which the query is put: the second one if that needs no waiting; else where
    // the ring is full, that is when nothing else is to be done before its records are read.
    __device__ __forceinline__ int32_t put_before(int32_t item) const {
        const int32_t window = run.tiles.window() - run.begin;
        int32_t fit = kSlots<kHeads> / 2;
        if (2 * window < kSlots<kHeads>) fit = kSlots<kHeads> - (window > 0 ? window : 0);
        if (kQueries<kHeads> > 1 || item == static_cast<int32_t>(blockIdx.x)) fit = 1;
        return run.begin + fit < run.end ? run.begin + fit : run.end;
    }

    // Gives the converting warps this run's query, and looks at the next run.
    __device__ __forceinline__ void put_query(int32_t item) {
        const int at = query_at.at;
        if (!kEarlyQuery) ask_for_query(item);
        shared.row_empty[at].wait(query_at.parity ^ 1);
#pragma unroll
        for (int part = 0; part < QueryPart<kHeads>::kParts; ++part) {
            if (part > 0) ask_for_query(item, part);
            query.store(shared.q[at], part, warp, fresh(lane));
        }
        cutlass::arch::fence_view_async_shared();
        if (warp == 0 && lane == 0) {
            shared.tiles[at] = run.end - run.begin;
            shared.window[at] = run.tiles.window() - run.begin;
        }
        __syncwarp();
        shared.row_full[at].arrive();
        query_at.next();
        const int32_t later = item + static_cast<int32_t>(gridDim.x);
        if (later < plan.items) look_at(later);
    }

    // Starts the copies of the warp's records of a tile, of which lane 16 * second + r has the
    // place of record r. Absent ones are zeros: codes and scales of zero, which add nothing.
    template <RecordId kId>
    __device__ __forceinline__ void copy_tile(const uint8_t* data, uint32_t places, int second) {
        using Read = Reader<kId, kBankRows<kHeads>>;
        const int first = kWarpRecords * second;
        const uint32_t there = __ballot_sync(kAllLanes, places != Places::kAbsent);
#pragma unroll
        for (int pass = 0; pass < Read::kSlots; ++pass) {
            shared.slot_empty[warp][slot.at].wait(slot.parity ^ 1);
            uint8_t* to = shared.slots[warp][slot.at];
            Barrier& full = shared.slot_full[warp][slot.at];
            if (pass == 0) {
                if (lane == 0) shared.present[present_set][warp] = there >> first & kAllRecords;
                present_set = (present_set + 1) % kPresentSets;
            }
            copy_slot(Read{}, data, places, first + pass * Read::kEach, to);
            cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
            full.arrive();
            slot.next();
        }
    }

    // 16 bytes of the record whose place lane `from` has. All lanes call.
    __device__ __forceinline__ void copy_chunk(uint8_t* to, const uint8_t* data, uint32_t places,
                                               int from, bool wanted = true) const {
        const uint32_t at = __shfl_sync(kAllLanes, places, from);
        const bool there = at != Places::kAbsent;
        if (wanted) copy_16_async(to, data + uint64_t{Places::kUnit} * (there ? at : 0), there);
    }

    // A half of the warp brings a record's codes; pairs of lanes the scales.
    __device__ __forceinline__ void copy_slot(Main read, const uint8_t* data, uint32_t places,
                                              int first, uint8_t* to) const {
        const int at = seldom<kHeads>(lane), half = at / 16, chunk = at % 16;
        uint8_t* own = to + read.chunk(half, chunk);
#pragma unroll
        for (int i = 0; i < read.kEach; i += 2)
            copy_chunk(own + read.chunk(i, 0), data + 16 * chunk, places, first + i + half);
        copy_chunk(to + read.scales(at / 2) + at % 2 * 16,
                   data + read.kRecord.data_bytes + at % 2 * 16, places, first + at / 2);
    }

    // The warp brings a record's codes; a lane the scales.
    __device__ __forceinline__ void copy_slot(Window read, const uint8_t* data, uint32_t places,
                                              int first, uint8_t* to) const {
        const int at = seldom<kHeads>(lane);
#pragma unroll(kHeads == 32 ? 4 : 8)  // of few registers
        for (int i = 0; i < read.kEach; ++i)
            copy_chunk(to + read.chunk(i, at), data + at * 16, places, first + i);
        constexpr int kCodes = read.kRecord.data_bytes;
        copy_chunk(to + read.scales(at % read.kEach), data + kCodes, places,
                   first + at % read.kEach, lane < read.kEach);
    }
};

}  // namespace flash_csa::sm90::few_heads
