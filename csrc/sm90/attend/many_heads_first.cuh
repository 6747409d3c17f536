// Part of many_heads.cu: how a pair begins its first row.
//
// Until the first tile is there the consumers have nothing to do, and the converting warps, which
// take longer for FP8 records than consumers do, are what everybody waits for later. So where lists
// are known to begin with WindowFp8 records, the consumers copy and convert the first tile, while
// the second one is found, copied and converted. A warp has 8 records; both CTAs convert all of
// them, and nothing is sent.
//
// Records come to where the second tile and the weights will be: of the former to rows that the
// peer does not write.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/list.h"
#include "sm90/attend/many_heads.cuh"
#include "sm90/attend/many_heads_query.cuh"

namespace flash_csa::sm90::many_heads {

// A warp's part in the first tile: warps 0 to 7 are the consumers.
class FirstTile {
    using Passes = PassesOf<RecordId::WindowFp8>;
    static constexpr int kRecords = kAttendTile / (2 * kWarps), kEach = Passes::kCopied;
    static constexpr uint32_t kAll = (1u << kRecords) - 1;
    // Of a warp all records but the last lie in the own half of a panel's rows.
    static constexpr int kTogether = kRecords - 1, kHalfPanel = kTilePanelBytes / 2;
    static_assert(kTogether * kEach <= kHalfPanel && 2 * kWarps == kPanels);
    static_assert(2 * kWarps * kEach <= sizeof(Shared::p));

  public:
    // Whether there is one: else the converting warps begin.
    static __device__ __forceinline__ bool is_there(const AttendParams& p,
                                                    const PlannedRow& first) {
        return first.row < p.rows && slot_lists(p, first.row).window > 0;
    }

    // Slots behind the list's length are read before that is known.
    __device__ __forceinline__ FirstTile(const AttendParams& p, const PlannedRow& first,
                                         Shared& shared, int warp, int lane)
        : shared_(shared), warp_(warp), lane_(lane) {
        if (first.row >= p.rows) return;
        if (entry() < p.window.columns) slot_ = p.window.slots.row(first.row)[entry()];
        records_ = static_cast<int32_t>(slot_lists(p, first.row).window);
    }

    __device__ __forceinline__ void start_copies(const Places& window) {
        if (records_ == 0) return;
        const bool there = entry() < records_ && slot_ >= 0 && slot_ < window.slots;
        int32_t page, offset;
        window.page(page, offset, there ? slot_ : 0);
        const auto at =
            reinterpret_cast<uint64_t>(window.data + page * window.page_stride + offset * kEach);
        present_ = __ballot_sync(~0u, there) & kAll;
        const bool follows = at == __shfl_up_sync(~0u, at, 1) + kEach;
        const uint32_t joined = (__ballot_sync(~0u, follows) | 1) & kAll >> 1;
        const bool together = present_ == kAll && joined == kAll >> 1;
        if (lane_ == 0) shared_.first_there.arrive_and_expect_tx(__popc(present_) * kEach);
        __syncwarp();
        if (together) copy(at, 0, kTogether);
#pragma unroll 1
        for (uint32_t left = together ? 1u << kTogether : present_; left != 0; left &= left - 1)
            copy(at, __ffs(left) - 1, 1);
    }

    // As the converting warps would.
    __device__ __forceinline__ void convert() {
        if (records_ == 0) return;
        shared_.first_there.wait(0);
#pragma unroll 1
        for (int first = 0; first < kRecords; first += Passes::kRecords) {
            const int mine = first + Passes::record_of(lane_);
            LaneCodes codes;
            Passes::read_record(place(mine), lane_, codes);
            if ((present_ >> mine & 1) == 0) codes = LaneCodes{};  // zeros
            const auto row = static_cast<uint32_t>(kRecords * warp_ + mine);
            Passes::template write<0, Passes::kChunks>(codes, lane_, TileRow{shared_.kv[0], row});
        }
        shared_.first_read.arrive();
        const int shift = kRecords * warp_ % 32;
        if (lane_ == 0) shared_.present[0][warp_] = ~(kAll << shift) | present_ << shift;
        cutlass::arch::fence_view_async_shared();
        cutlass::arch::NamedBarrier::sync(kConsumers, kFirstTile);
        if (warp_ < kWarps) shared_.tile_full[0].arrive();
    }

  private:
    static constexpr uint32_t kFirstTile = 2;  // behind the consumers' own barriers

    __device__ __forceinline__ int entry() const { return kRecords * warp_ + lane_ % kRecords; }

    // Where record k of the warp comes to.
    __device__ __forceinline__ uint8_t* place(int k) const {
        const int own = static_cast<int>(blockIdx.x % 2) * kHalfPanel;
        return k < kTogether ? shared_.kv[1] + warp_ * kTilePanelBytes + own + k * kEach
                             : reinterpret_cast<uint8_t*>(shared_.p) + warp_ * kEach;
    }

    // `count` records from k on. at: of lane k, where that lies.
    __device__ __forceinline__ void copy(uint64_t at, int k, int count) const {
        const auto* from = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, at, k));
        if (cute::elect_one_sync())
            cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&shared_.first_there),
                                           place(k), count * kEach);
        __syncwarp();
    }

    Shared& shared_;
    const int warp_, lane_;
    int32_t slot_ = -1, records_ = 0;  // the lane's; of the list
    uint32_t present_ = 0;             // a bit each, of the warp's
};

// The consumers call. Queries of the first row come behind what lists say.
__device__ __forceinline__ void begin_pair(const AttendParams& p, const Plan& plan,
                                           const CUtensorMap& queries, const PlannedRow& first,
                                           int warp, int lane, Shared& shared) {
    FirstTile tile(p, first, shared, warp, lane);
    tile.start_copies(plan.window);
    if (warp == kWarps && first.row < p.rows) {
        shared.piece_full[0].wait(0);
        if (lane == 0) start_queries_of_pair(queries, first.row, first.head_block, shared);
    }
    tile.convert();
}

}  // namespace flash_csa::sm90::many_heads
