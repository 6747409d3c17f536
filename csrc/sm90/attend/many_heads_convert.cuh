// Part of many_heads.cu: the warps that turn records into BF16 tiles, at value * 2^-8, in paired
// order (dequant.cuh).
//
// A warp has 16 rows of every tile, of a pair 8. It waits for barriers only, and looks nothing up:
// what a slot holds is said beside it. A slot is given back as soon as it is in registers, and not
// before: a copy into it does not wait for reads that are under way.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <type_traits>

#include "sm90/attend/many_heads.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90::many_heads {

// One warp's state.
template <bool kPair, Lists kLists>
struct Converter {
    static constexpr int kRecords = kWarpRecords<kPair>;
    const AttendParams& p;
    const Plan& plan;
    Shared& shared;
    const int warp, lane;
    SlotTurn slot;
    Ring ring;

    __device__ __forceinline__ Converter(const AttendParams& params, const Plan& plan_,
                                         Shared& shared_, int warp_, int lane_)
        : p(params), plan(plan_), shared(shared_), warp(warp_), lane(lane_), slot(warp_) {}

    // begun: others convert the first tile, whose records come to where the second one is written.
    __device__ __forceinline__ void work(bool begun) {
        if (begun) {
            ring.advance();
            shared.first_read.wait(0);
        }
        for (;; ring.advance()) {
            shared.slot_full[slot.at].wait(slot.parity);
            const uint32_t holds = shared.holds[slot.at];
            if (holds & kNoMore) break;
            const RecordId id = record_id<kLists>(plan, holds & kOfWindow);
            with_passes(id, [&](auto passes) {
                if constexpr (kPair)
                    convert_for_both<decltype(passes)>();
                else
                    convert<decltype(passes)>();
            });
        }
        // The peer tells of every tile that it gives back: it may not tell one that has left.
        if constexpr (kPair) {
#pragma unroll
            for (int i = 0; i < kStages; ++i, ring.advance()) {
                wait_for_place<0>();
                wait_for_place<1>();
            }
        }
    }

    // Takes a slot's records into registers. Returns which are present: others have any codes.
    template <class Passes>
    __device__ __forceinline__ uint32_t take(LaneCodes& codes, int lane) {
        constexpr uint32_t kAll = (1u << Passes::kRecords) - 1;
        const uint32_t mine = shared.holds[slot.at] & kAll;
        Passes::read(shared.slots[slot.at], lane, codes);
        // Where the barrier is follows from all that was read: nobody is told before it is there.
        const uint32_t seen = codes.template some<Passes::kChunks>();
        const uint32_t zero = static_cast<uint32_t>(p.rows) >> 31;
        shared.slot_empty[slot.at + (seen & zero)].arrive();
        slot.next();
        return mine;
    }

    // Half of the dims of the next tile may be written, here and there.
    template <int kHalf>
    __device__ __forceinline__ void wait_for_place() {
        shared.tile_empty[ring.stage][kHalf].wait(ring.parity ^ 1);
        if constexpr (kPair) shared.peer_empty[ring.stage][kHalf].wait(ring.parity ^ 1);
    }

    // Says which of the warp's records are present; the word of a half of the tile.
    __device__ __forceinline__ uint32_t present_word(uint32_t present) const {
        constexpr uint32_t kMine = (1u << kRecords) - 1;
        const int shift = first_record<kPair>(warp) % 32;
        return ~(kMine << shift) | present << shift;
    }

    template <class Passes>
    __device__ __forceinline__ void convert() {
        uint32_t present = 0;
#pragma unroll 1
        for (int first = 0; first < kRecords; first += Passes::kRecords) {
            if (first > 0) shared.slot_full[slot.at].wait(slot.parity);
            LaneCodes codes;
            const uint32_t mine = take<Passes>(codes, lane);
            present |= mine << first;
            if (first == 0) {
                wait_for_place<0>();
                wait_for_place<1>();
            }
            const uint32_t row = kRecords * warp + first + Passes::record_of(lane);
            Passes::template write<0, Passes::kChunks>(codes, lane,
                                                       TileRow{shared.kv[ring.stage], row});
            constexpr uint32_t kAll = (1u << Passes::kRecords) - 1;
            if (mine != kAll) erase<0, kPanels>(kRecords * warp + first, ~mine & kAll);
        }
        if (lane == 0) shared.present[ring.stage][warp] = present_word(present);
        cutlass::arch::fence_view_async_shared();
        shared.tile_full[ring.stage].arrive();
    }

    // All of the warp's records are in registers before the first half of the place is free.
    template <class Passes>
    __device__ __forceinline__ void convert_for_both() {
        constexpr int kCount = kRecords / Passes::kRecords;
        const int lane = fresh_lane(this->lane);
        LaneCodes codes[kCount];
        uint32_t present = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i > 0) shared.slot_full[slot.at].wait(slot.parity);
            present |= take<Passes>(codes[i], lane) << (i * Passes::kRecords);
        }
        const Peer peer(shared);
        CopyBarrier& full = shared.tile_full[ring.stage];
        const auto row = [&](int i) {
            const int record = i * Passes::kRecords + Passes::record_of(lane);
            return TileRow{shared.kv[ring.stage],
                           static_cast<uint32_t>(first_record<true>(warp) + record)};
        };
        wait_for_place<0>();
        if (lane == 0) {
            uint32_t& said = shared.present[ring.stage][peer.rank * kWarps + warp];
            said = present_word(present);
            store_remote(peer.at(said), said, peer.at(full));
            full.expect_transaction(kSentBytes);  // of the same warp there
        }
        // Of a window by one loop, in which the passes change places: a third less code.
        constexpr bool kLoop = kCount > 1 && Passes::kRecord.order != PageOrder::PageSplit;
        const auto write = [&](auto first, auto end) {
            if constexpr (kLoop) {
                static_assert(kCount == 2);
#pragma unroll 1
                for (int i = 0; i < kCount; ++i) {
                    Passes::template write<first(), end()>(codes[0], lane, row(i));
                    swap<Passes::kChunks>(codes[0], codes[1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < kCount; ++i)
                    Passes::template write<first(), end()>(codes[i], lane, row(i));
            }
        };
        using std::integral_constant;
        constexpr uint32_t kMine = (1u << kRecords) - 1;
        const int first = first_record<true>(warp);
        write(integral_constant<int, 0>{}, integral_constant<int, kLower>{});
        if (present != kMine) erase<0, kPanels / 2>(first, ~present & kMine);
        send<0>(peer, full);
        wait_for_place<1>();
        write(integral_constant<int, kLower>{}, integral_constant<int, Passes::kChunks>{});
        if (present != kMine) erase<kPanels / 2, kPanels>(first, ~present & kMine);
        send<1>(peer, full);
        full.arrive();
    }

    // Makes zeros of absent records, from `first` on, in some of the panels: what was in their
    // places may be NaN.
    template <int kFirst, int kEnd>
    __device__ __forceinline__ void erase(int first, uint32_t absent) const {
        __syncwarp();  // other lanes wrote there
        const int thread = fresh_lane(this->lane);
#pragma unroll 1
        for (; absent != 0; absent &= absent - 1) {
            uint8_t* row = shared.kv[ring.stage] + (first + __ffs(absent) - 1) * kPanelRowBytes;
#pragma unroll
            for (int panel = kFirst; panel < kEnd; panel += 4)
                *reinterpret_cast<uint4*>(row + (panel + thread / 8) * kTilePanelBytes +
                                          thread % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
    }

    template <int kChunks>
    static __device__ __forceinline__ void swap(LaneCodes& a, LaneCodes& b) {
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const uint4 codes = a.codes[j];
            a.codes[j] = b.codes[j], b.codes[j] = codes;
            const uint32_t scale = a.scales[j];
            a.scales[j] = b.scales[j], b.scales[j] = scale;
        }
    }

    // Copies half of the dims of the warp's records to the peer: 8 rows of a panel lie together.
    template <int kHalf>
    __device__ __forceinline__ void send(const Peer& peer, const CopyBarrier& full) const {
        constexpr int kEach = kPanels / kHalves;
        const uint8_t* from = shared.kv[ring.stage] + kHalf * kEach * kTilePanelBytes +
                              first_record<true>(warp) * kPanelRowBytes;
        const uint32_t to = peer.at(*from), there = peer.at(full);
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (cute::elect_one_sync()) {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                copy_remote(to + i * kTilePanelBytes, from + i * kTilePanelBytes,
                            kRecords * kPanelRowBytes, there);
        }
        __syncwarp();
    }
};

}  // namespace flash_csa::sm90::many_heads
