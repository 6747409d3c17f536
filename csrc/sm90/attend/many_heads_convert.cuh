// Part of many_heads.cu: the warps that turn records into BF16 tiles, at value * 2^-8, in paired
// order (dequant.cuh).
//
// A warp has 16 rows of every tile. It waits for barriers only, and looks nothing up: what a slot
// holds is said beside it. A slot is given back as soon as it is in registers: behind a fence, as a
// copy into it does not wait for reads that are under way.
#pragma once

#include "sm90/attend/many_heads.cuh"

namespace flash_csa::sm90::many_heads {

// One warp's state.
struct Converter {
    const AttendParams& p;
    const Plan& plan;
    Shared& shared;
    const int warp, lane;
    SlotTurn slot;
    Ring ring;

    __device__ __forceinline__ Converter(const AttendParams& params, const Plan& plan_,
                                         Shared& shared_, int warp_, int lane_)
        : p(params), plan(plan_), shared(shared_), warp(warp_), lane(lane_), slot(warp_) {}

    __device__ __forceinline__ void work() {
        for (;; ring.advance()) {
            shared.slot_full[slot.at].wait(slot.parity);
            const uint32_t holds = shared.holds[slot.at];
            if (holds & kNoMore) break;
            const RecordId id = holds & kOfWindow ? plan.window.id : plan.main.id;
            with_passes(id, [&](auto passes) { convert<decltype(passes)>(); });
        }
    }

    template <class Passes>
    __device__ __forceinline__ void convert() {
        constexpr uint32_t kAll = (1u << Passes::kRecords) - 1;
        uint32_t present = 0;
#pragma unroll 1
        for (int first = 0; first < kWarpRecords; first += Passes::kRecords) {
            if (first > 0) shared.slot_full[slot.at].wait(slot.parity);
            const uint32_t mine = shared.holds[slot.at] & kAll;
            LaneCodes codes;
            Passes::read(shared.slots[slot.at], lane, codes);
            if (mine != kAll && (mine >> Passes::record_of(lane) & 1) == 0) clear(codes);
            cutlass::arch::fence_view_async_shared();
            shared.slot_empty[slot.at].arrive();
            slot.next();
            if (first == 0) shared.tile_empty[ring.stage].wait(ring.parity ^ 1);
            present |= mine << first;
            const int row = kWarpRecords * warp + first + Passes::record_of(lane);
            Passes::write(codes, lane, TileRow{shared.kv[ring.stage], row});
        }
        if (lane == 0) shared.present[ring.stage][warp] = static_cast<uint16_t>(present);
        cutlass::arch::fence_view_async_shared();
        shared.tile_full[ring.stage].arrive();
    }

    // An absent record: zero codes under zero scales.
    static __device__ __forceinline__ void clear(LaneCodes& codes) {
#pragma unroll
        for (uint4& x : codes.codes) x = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t& x : codes.scales) x = 0;
    }
};

}  // namespace flash_csa::sm90::many_heads
