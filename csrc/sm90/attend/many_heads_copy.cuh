// Part of many_heads.cu: the warps that find and copy records.
//
// A warp has 16 records of every tile, of a pair 8, and lane i, as every 16th (8th) lane from it
// on, knows where the i-th lies. The slots of a tile are read while the one before it is copied. A
// record is one bulk copy, or four are where they follow each other in memory, as those of windows
// do: all are started by one lane, from addresses that it gets from the others beforehand, so that
// copies are not a loop over lanes.
//
// In a pair they bring the queries of a piece behind others, too, as soon as those before are
// multiplied. Lists and queries are in the L2 by then.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/attend/many_heads.cuh"
#include "sm90/attend/many_heads_query.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/prefetch.cuh"

namespace flash_csa::sm90::many_heads {

// Asks for a row's lists and their lengths. A warpgroup calls.
__device__ __forceinline__ void prefetch_lists(const AttendParams& p, int32_t row, int thread) {
    constexpr int kEach = 128 / sizeof(int32_t);
    if (thread == 0 && p.window.lengths) prefetch_l2(p.window.lengths + row);
    if (thread == 1 && p.main.lengths) prefetch_l2(p.main.lengths + row);
    const int at = thread * kEach;  // longer lists: their beginnings
    if (p.window.slots && at < p.window.columns) prefetch_l2(p.window.slots.row(row) + at);
    if (p.main.slots && at < p.main.columns) prefetch_l2(p.main.slots.row(row) + at);
}

// Brings a record of a row's list to the L2. The list is read as it is: where the kernel before
// still writes it, another record, or none, is asked for in vain.
__device__ __forceinline__ void prefetch_record(const RecordList& list, const Places& places,
                                                RecordId id, int32_t row, int entry) {
    if (!list.slots || entry >= list.columns) return;
    const int32_t slot = __ldcg(list.slots.row(row) + entry);  // not to the L1: it may change
    if (slot < 0 || slot >= places.slots) return;
    const int each = with_passes(id, [](auto passes) { return decltype(passes)::kCopied; });
    int32_t page, offset;
    places.page(page, offset, slot);
    const uint8_t* record = places.data + page * places.page_stride + offset * each;
    for (int at = 0; at < each; at += 128) prefetch_l2(record + at);
    prefetch_l2(record + each - 1);
}

// Brings the queries of a piece to the L2. A warpgroup calls.
__device__ __forceinline__ void prefetch_queries(const AttendParams& p, int32_t row,
                                                 int32_t head_block, int thread) {
    constexpr int kLines = kHeadDim * 2 / 128;  // of a head
    const int first_head = head_block * kHeadBlock;
#pragma unroll
    for (int i = 0; i < kHeadBlock * kLines / kWarpgroup; ++i) {
        const int head = first_head + thread / kLines + i * (kWarpgroup / kLines);
        if (head < p.heads) prefetch_l2(p.q.at(row, head) + thread % kLines * 64);
    }
}

// One warp's state.
template <bool kPair, Lists kLists>
struct Copier {
    static constexpr int kRecords = kWarpRecords<kPair>;
    const AttendParams& p;
    const Plan& plan;
    const CUtensorMap& queries;
    Shared& shared;
    const int warp, lane;
    Pieces pieces;
    SlotTurn slot;
    Piece piece;
    PieceTurn turn;
    uint32_t brought;  // queries, of the first row by others

    __device__ __forceinline__ Copier(const AttendParams& params, const Plan& plan_,
                                      const SplitPlan& splits, const CUtensorMap& queries_,
                                      const Cuts& cuts, Shared& shared_, int warp_, int lane_)
        : p(params),
          plan(plan_),
          queries(queries_),
          shared(shared_),
          warp(warp_),
          lane(lane_),
          pieces(params, splits, cuts),
          slot(warp_),
          brought(first_row().known) {}

    // first: the row of the first piece.
    __device__ __forceinline__ void work(const PlannedRow& first) {
        bool begun = kConsumersBegin<kPair, kLists>;  // the first tile, by the consumers
        int32_t early = read_early(first, begun ? kAttendTile : 0);
        while (pieces.template next<kLists != Lists::Any>(piece)) {
            int32_t tile = piece.first + (begun && piece.is_window(piece.first) ? 1 : 0);
            const bool known = early >= 0 && piece.is_window(tile);
            Located here = locate(tile, known ? early : read(tile));
            early = -1;
            begun = false;
            int32_t listed = read(tile + 1);
            publish();
            const bool brings = kPair && (turn.number > 1 || !first_row().known);
            // A pair's second tile is on its way before queries are waited for: half of a tile
            // leaves no slot for the time until they are there. Then the next row is asked for.
            const int32_t second = min(piece.first + 1, piece.end - 1);
            const int32_t behind = kPair ? max(second, tile) : piece.first;
            for (; tile < piece.end; ++tile) {
                copy_tile(piece.is_window(tile), here);
                if (brings && tile == behind) bring_query();
                if (tile == behind) prefetch_next();
                here = locate(tile + 1, listed);
                listed = read(tile + 2);
            }
            if (brings && piece.first == piece.end) bring_query();
        }
        piece.row = -1;
        publish();
        put_end();
    }

    __device__ __forceinline__ PlannedRow first_row() const {
        return PlannedRow(split_plan<kLists>(plan));
    }

    // The queries of the piece, when those before are multiplied.
    __device__ __forceinline__ void bring_query() {
        shared.query_empty.wait(turn.number & 1);  // of the piece before; the turn is one ahead
        if (piece.first < piece.end) {
            const int thread = 32 * warp + lane;
            if (thread == 0) start_queries_of_pair(queries, piece.row, piece.head_block, shared);
            shared.query_there.wait(brought & 1);
            ++brought;
            order_queries<kWarpgroup>(p, thread, shared);
        }
        shared.query_full.arrive();
    }

    // Says what the piece is.
    __device__ __forceinline__ void publish() {
        if (warp == 0) {
            shared.piece_empty[turn.at()].wait(turn.parity() ^ 1);
            if (lane == 0) shared.pieces[turn.at()] = piece;
            shared.piece_full[turn.at()].arrive();
        }
        ++turn.number;
    }

    __device__ __forceinline__ bool is_contiguous(bool window) const {
        return kLists == Lists::Any && !window && p.contiguous.data != nullptr;
    }
    __device__ __forceinline__ int32_t entry(int32_t tile) const {
        return (piece.is_window(tile) ? tile : tile - piece.window_tiles) * kAttendTile +
               fresh_lane(first_record<kPair>(warp) + lane % kRecords);
    }

    // What the list says of the lane's record: its slot, or its page if the list is contiguous.
    // Slots behind a list's length are read before that is known.
    __device__ __forceinline__ int32_t read(int32_t tile) const {
        if (tile >= piece.end) return -1;
        const bool window = piece.is_window(tile);
        const int32_t at = entry(tile);
        if (is_contiguous(window)) {
            return at < piece.main ? p.contiguous.row(piece.request)[plan.main.page.div(at)] : -1;
        }
        const RecordList& list = window ? p.window : p.main;
        return at < list.columns ? list.slots.row(piece.row)[at] : -1;
    }

    // Of the first row's tile that begins at entry `from`, if it is of a window: before the length
    // is there.
    __device__ __forceinline__ int32_t read_early(const PlannedRow& first, int from) const {
        const int at = from + first_record<kPair>(warp) + lane % kRecords;
        const bool known =
            first.known && split_plan<kLists>(plan).splits == 1 && at < p.window.columns;
        return known ? p.window.slots.row(first.row)[at] : -1;
    }

    struct Located {
        const uint8_t* page;
        int32_t offset;  // record of the page
        bool there;
    };

    __device__ __forceinline__ Located locate(int32_t tile, int32_t listed) const {
        const bool window = piece.is_window(tile);
        const int32_t at = entry(tile);
        const cutlass::FastDivmod divide = window ? plan.window.page : plan.main.page;
        int32_t page = listed, offset = 0;
        bool there = tile < piece.end && at < (window ? piece.window : piece.main) && listed >= 0;
        if (is_contiguous(window)) {
            there = there && page < plan.main.pages;
            offset = at - divide.div(at) * divide.divisor;
        } else {
            there = there && listed < (window ? plan.window.slots : plan.main.slots);
            divide(page, offset, listed);
        }
        if (!there) page = offset = 0;
        return {(window ? plan.window.data : plan.main.data) +
                    page * (window ? plan.window.page_stride : plan.main.page_stride),
                offset, there};
    }

    __device__ __forceinline__ RecordId kind(bool window) const {
        return record_id<kLists>(plan, window);
    }

    // Bit i: record i follows the one before it in memory.
    static __device__ __forceinline__ uint32_t joined(const uint8_t* from, int bytes) {
        const auto at = reinterpret_cast<uint64_t>(from);
        return __ballot_sync(~0u, at == __shfl_up_sync(~0u, at, 1) + bytes);
    }

    static __device__ __forceinline__ const uint8_t* broadcast(const uint8_t* x, int lane) {
        return reinterpret_cast<const uint8_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(x), lane));
    }

    __device__ __forceinline__ void copy_tile(bool window, const Located& at) {
        with_passes(kind(window), [&](auto passes) { copy_records<decltype(passes)>(window, at); });
    }

    template <class Passes>
    __device__ __forceinline__ void copy_records(bool window, const Located& at) {
        constexpr bool kApart = Passes::kRecord.order == PageOrder::PageSplit;
        constexpr uint32_t kAll = (1u << Passes::kRecords) - 1;
        constexpr int kEach = Passes::kCopied;  // also the distance of neighbours in memory
        const uint8_t* from = at.page + at.offset * kEach;
        const uint32_t present = __ballot_sync(~0u, at.there);
        const uint32_t follows = joined(from, kEach);
        const uint32_t list = window ? kOfWindow : 0;
#pragma unroll 1
        for (int first = 0; first < kRecords; first += Passes::kRecords, slot.next()) {
            const uint32_t mine = present >> first & kAll;
            uint8_t* to = shared.slots[slot.at];
            CopyBarrier& full = shared.slot_full[slot.at];
            // Everything is known before the slot is waited for.
            const auto wait = [&]() {
                shared.slot_empty[slot.at].wait(slot.parity ^ 1);
                if (lane == 0) {
                    shared.holds[slot.at] = mine | list;
                    full.expect_transaction(__popc(mine) * kEach);
                }
                __syncwarp();
            };
            if (mine != kAll) {
                wait();
#pragma unroll 1
                for (int k = 0; k < Passes::kRecords; ++k)
                    if (mine >> k & 1) start_copies<Passes, 1, 1>(from, first, k, to, full, [] {});
            } else if (((follows >> first | 1) & kAll) == kAll) {
                start_copies<Passes, Passes::kRecords, Passes::kTogether>(from, first, 0, to, full,
                                                                          wait);
            } else {
                start_copies<Passes, Passes::kRecords, 1>(from, first, 0, to, full, wait);
            }
            if constexpr (kApart) {
                const int size = window ? plan.window.page.divisor : plan.main.page.divisor;
                if (at.there && lane >= first && lane < first + Passes::kRecords)
                    copy_8_async(to + Passes::scales_place(lane - first),
                                 at.page + size * kEach + at.offset * Passes::kRecord.scale_bytes);
                cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
            } else {
                full.arrive();
            }
        }
    }

    // Of kCount records from k on of those that are first .. of the warp, kTogether with each copy.
    template <class Passes, int kCount, int kTogether, class Wait>
    static __device__ __forceinline__ void start_copies(const uint8_t* from, int first, int k,
                                                        uint8_t* to, CopyBarrier& full,
                                                        const Wait& wait) {
        constexpr int kCopies = kCount / kTogether;
        const uint8_t* records[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; ++i) records[i] = broadcast(from, first + k + i * kTogether);
        wait();
        if (cute::elect_one_sync()) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i)
                cute::SM90_BULK_COPY_G2S::copy(records[i], reinterpret_cast<uint64_t*>(&full),
                                               to + Passes::place(k + i * kTogether),
                                               kTogether * Passes::kCopied);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void put_end() {
        shared.slot_empty[slot.at].wait(slot.parity ^ 1);
        if (lane == 0) shared.holds[slot.at] = kNoMore;
        shared.slot_full[slot.at].arrive();
    }

    // What is read of the next piece, into the L2.
    __device__ __forceinline__ void prefetch_next() const {
        int32_t row, head_block;
        if (!pieces.peek(row, head_block)) return;
        const int thread = fresh_lane(32 * warp + lane);
        prefetch_queries(p, row, head_block, thread);
        prefetch_lists(p, row, thread);
    }
};

}  // namespace flash_csa::sm90::many_heads
