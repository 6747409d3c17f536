// Records into a tile: the part of the warpgroups that gather and dequantise.
//
// A warp takes 8 records of a tile. A record comes by one bulk copy: loads would keep the load unit
// busier than the tensor cores, with a cache line for every few bytes of a lane. A pass is what a
// warp has room for: its 8 FP4 records, or 4 FP8 ones. Lanes read 16 bytes of codes at a time, so
// that 8 neighbours store to 8 places of a panel which the swizzle spreads over all banks.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/params.h"
#include "core/records.h"
#include "sm90/attend/dequant.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {

inline constexpr int kWarpRecords = 8;
inline constexpr int kTilePanelBytes = 64 * kPanelRowBytes;  // 64 records (or heads)
inline constexpr int kMostChunks = 5;                        // of 16 bytes, of a lane in a pass

// Where a record lies.
struct Located {
    const uint8_t* row = nullptr;
    const uint8_t* scales = nullptr;
    RecordId id = RecordId::MainFp4;
    bool present = false;
};

__device__ __forceinline__ Located locate(const ConstPages& pages, int32_t slot) {
    Located at{nullptr, nullptr, pages.record, pages.holds(slot)};
    if (!at.present) return at;
    const auto find = [&](const Record& r) {
        at.row = pages.row(r, slot);
        at.scales = pages.scales(r, slot);
    };
    if (at.id == RecordId::MainFp4) {
        find(record(RecordId::MainFp4));
    } else if (at.id == RecordId::WindowFp8) {
        find(record(RecordId::WindowFp8));
    } else {
        find(record(RecordId::MixedFp8));
    }
    return at;
}

// A warp's records of one pass, as they are in memory, and the barrier on which they arrive.
struct alignas(16) RawPass {
    static constexpr int kBytes = 2320;
    uint8_t bytes[kBytes];
    uint8_t word_scales[4][8];  // of records whose scales lie elsewhere
    cutlass::arch::ClusterTransactionBarrier arrived;
};

// A lane's share of it, in registers.
struct LaneCodes {
    uint4 codes[kMostChunks];
    uint32_t scales[4];
};

// The lane's row of the tile.
struct TileRow {
    uint8_t* base;
    int row;

    __device__ __forceinline__ void put(int panel, int chunk, uint4 values) const {
        *reinterpret_cast<uint4*>(base + panel * kTilePanelBytes + panel_offset(row, chunk)) =
            values;
    }
};

// 16 E4M3 codes: a quarter of a panel's row.
__device__ __forceinline__ void write_e4m3(uint4 codes, uint32_t factor, int panel, int quarter,
                                           TileRow to) {
    to.put(panel, 2 * quarter, e4m3_paired(codes.x, codes.y, factor));
    to.put(panel, 2 * quarter + 1, e4m3_paired(codes.z, codes.w, factor));
}

template <RecordId kId>
struct PassesOf;

// Eight records; a lane has a quarter of one: chunks quarter + 4 j.
template <>
struct PassesOf<RecordId::MainFp4> {
    static constexpr Record kRecord = record(RecordId::MainFp4);
    static constexpr int kRecords = 8, kChunks = kRecord.data_bytes / 64;
    static constexpr int kCopied = kRecord.bytes();
    static_assert(kChunks == 4 && kRecord.group == 16);

    static __device__ __forceinline__ int record_of(int lane) { return lane % 8; }
    // 16 bytes on for the last four, so that 8 records' chunks lie in 8 groups of banks.
    static __device__ __forceinline__ int place(int record) {
        return record * kCopied + record / 4 * 16;
    }
    static __device__ __forceinline__ void read(const RawPass& from, int lane, LaneCodes& to) {
        const uint8_t* at = from.bytes + place(lane % 8);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int chunk = lane / 8 + 4 * j;  // 32 values, two scales
            to.codes[j] = *reinterpret_cast<const uint4*>(at + 16 * chunk);
            to.scales[j] = *reinterpret_cast<const uint16_t*>(at + kRecord.data_bytes + 2 * chunk);
        }
    }
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow to) {
        const int quarter = lane / 8;
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const uint2 factor = e4m3_factors(raw.scales[j]);
            const int panel = 2 * j + quarter / 2, first = quarter % 2 * 4;
            to.put(panel, first, e2m1_paired(raw.codes[j].x, factor.x));
            to.put(panel, first + 1, e2m1_paired(raw.codes[j].y, factor.x));
            to.put(panel, first + 2, e2m1_paired(raw.codes[j].z, factor.y));
            to.put(panel, first + 3, e2m1_paired(raw.codes[j].w, factor.y));
        }
    }
};

// Four FP8 records; a lane has the chunks quarter + 4 panel of panels of one parity. Neighbouring
// groups of four lanes have quarters 0 and 2, or 1 and 3.
__device__ __forceinline__ int fp8_quarter(int lane) { return lane / 4 % 2 * 2 + lane / 8 % 2; }
__device__ __forceinline__ int fp8_panel(int lane, int j) { return 2 * j + lane / 16; }

template <>
struct PassesOf<RecordId::WindowFp8> {
    static constexpr Record kRecord = record(RecordId::WindowFp8);
    static constexpr int kRecords = 4, kChunks = kRecord.data_bytes / 128;
    static constexpr int kCopied = kRecord.bytes();
    static_assert(kChunks == 4 && kRecord.group == 32);

    static __device__ __forceinline__ int record_of(int lane) { return lane % 4; }
    static __device__ __forceinline__ int place(int record) { return record * kCopied; }
    static __device__ __forceinline__ void read(const RawPass& from, int lane, LaneCodes& to) {
        const uint8_t* at = from.bytes + place(lane % 4);
        const int quarter = fp8_quarter(lane);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int panel = fp8_panel(lane, j);
            to.codes[j] = *reinterpret_cast<const uint4*>(at + 64 * panel + 16 * quarter);
            to.scales[j] = at[kRecord.data_bytes + 2 * panel + quarter / 2];
        }
    }
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow to) {
#pragma unroll
        for (int j = 0; j < kChunks; ++j)
            write_e4m3(raw.codes[j], ue8m0_factor(raw.scales[j]), fp8_panel(lane, j),
                       fp8_quarter(lane), to);
    }
};

template <>
struct PassesOf<RecordId::MixedFp8> {
    static constexpr Record kRecord = record(RecordId::MixedFp8);
    static constexpr int kCoded = kRecord.coded_dims / 64;  // panels; then 64 BF16 values: as two
    static constexpr int kRecords = 4, kChunks = (kCoded + 2 + 1) / 2;
    static constexpr int kCopied = kRecord.data_bytes;
    static_assert(kCoded == 7 && kChunks == kMostChunks && kRecord.group == 64);

    static __device__ __forceinline__ int record_of(int lane) { return lane % 4; }
    static __device__ __forceinline__ int place(int record) { return record * kCopied; }
    static __device__ __forceinline__ void read(const RawPass& from, int lane, LaneCodes& to) {
        const uint8_t* at = from.bytes + place(lane % 4) + 16 * fp8_quarter(lane);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int panel = fp8_panel(lane, j);
            if (panel < kCoded + 2) to.codes[j] = *reinterpret_cast<const uint4*>(at + 64 * panel);
            if (j < 4) to.scales[j] = from.word_scales[lane % 4][panel];
        }
    }
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow to) {
        const int quarter = fp8_quarter(lane);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int panel = fp8_panel(lane, j);
            if (j < 4 && panel < kCoded) {
                write_e4m3(raw.codes[j], ue8m0_factor(raw.scales[j]), panel, quarter, to);
            } else if (panel < kCoded + 2) {
                to.put(kCoded, quarter + 4 * (panel - kCoded), bf16_paired(raw.codes[j]));
            }
        }
    }
};

// f(PassesOf<id>{}) for a record that is the same in all lanes.
template <class F>
__device__ __forceinline__ auto with_passes(RecordId id, const F& f) {
    if (id == RecordId::MainFp4) return f(PassesOf<RecordId::MainFp4>{});
    if (id == RecordId::WindowFp8) return f(PassesOf<RecordId::WindowFp8>{});
    return f(PassesOf<RecordId::MixedFp8>{});
}

__device__ __forceinline__ int records_of_pass(RecordId id) {
    return with_passes(id, [](auto passes) { return decltype(passes)::kRecords; });
}

// Starts the copies of a pass; lanes 0..7 have the warp's records. present: a bit for each.
__device__ __forceinline__ void start_pass(const Located& at, uint32_t present, int pass, int lane,
                                           RawPass& to) {
    lane = fresh(lane);
    with_passes(at.id, [&](auto passes) {
        using Passes = decltype(passes);
        constexpr uint32_t kAll = (1u << Passes::kRecords) - 1;
        const int count = __popc(present >> (pass * Passes::kRecords) & kAll);
        const int index = lane - pass * Passes::kRecords;
        if (lane == 0) to.arrived.arrive_and_expect_tx(count * Passes::kCopied);
        if (index >= 0 && index < Passes::kRecords && at.present) {
            if constexpr (Passes::kRecord.order == PageOrder::PageSplit)
                copy_8_async(to.word_scales[index], at.scales);
            cute::SM90_BULK_COPY_G2S::copy(at.row, reinterpret_cast<uint64_t*>(&to.arrived),
                                           to.bytes + Passes::place(index), Passes::kCopied);
        }
    });
}

// What arrived, zeros for an absent record: zero codes under zero scales.
__device__ __forceinline__ void read_pass(RecordId id, const RawPass& from, uint32_t present,
                                          int pass, int lane, LaneCodes& raw) {
    lane = fresh(lane);
    with_passes(id, [&](auto passes) {
        using Passes = decltype(passes);
        passes.read(from, lane, raw);
        if (present >> (pass * Passes::kRecords + Passes::record_of(lane)) & 1) return;
#pragma unroll
        for (uint4& x : raw.codes) x = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t& x : raw.scales) x = 0;
    });
}

// `first_row`: the warp's first row of the tile.
__device__ __forceinline__ void write_pass(RecordId id, const LaneCodes& raw, int pass, int lane,
                                           uint8_t* tile, int first_row) {
    lane = fresh(lane);
    with_passes(id, [&](auto passes) {
        using Passes = decltype(passes);
        const int row = first_row + pass * Passes::kRecords + Passes::record_of(lane);
        passes.write(raw, lane, TileRow{tile, row});
    });
}

}  // namespace flash_csa::sm90
