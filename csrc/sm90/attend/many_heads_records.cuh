// Part of many_heads.cu: records as they lie in a slot of shared memory, and from there into a
// tile.
//
// A slot holds a warp's records of one pass: 8 FP4 records, or 4 FP8 ones. Lanes read 16 bytes of
// codes at a time. Which lane has which is such that neither what 8 neighbours read nor what they
// store to the swizzled panels meets a bank twice.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "core/records.h"
#include "sm90/attend/dequant.cuh"
#include "sm90/common/predicated_store.cuh"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90::many_heads {

inline constexpr int kTilePanelBytes = 64 * kPanelRowBytes;  // 64 records (or heads)
inline constexpr int kMostChunks = 5;                        // of 16 bytes, of a lane in a pass
inline constexpr int kSlotBytes = 2336;
inline constexpr int kMostRecords = 8;  // of a slot

// A lane's share of a slot, in registers.
struct LaneCodes {
    uint4 codes[kMostChunks];
    uint32_t scales[4];

    // Something of each of the first kCount loads, and of all scales.
    template <int kCount>
    __device__ __forceinline__ uint32_t some() const {
        uint32_t x = scales[0] | scales[1] | scales[2] | scales[3];
#pragma unroll
        for (int j = 0; j < kCount; ++j) x |= codes[j].x;
        return x;
    }
};

// The lane's row of the tile.
struct TileRow {
    uint8_t* base;
    uint32_t row;
};

// Chunks of it: `first`, and those whose numbers have bits set that its number has not. The swizzle
// is an exclusive or, so that it is found once.
struct RowChunks {
    uint8_t* base;
    uint32_t first;

    __device__ __forceinline__ RowChunks(TileRow to, int panel, int chunk)
        : base(to.base),
          first(panel * kTilePanelBytes + to.row * kPanelRowBytes +
                ((chunk ^ to.row % kCoreRows) << 4)) {}
    __device__ __forceinline__ void put(int panel, int chunk, uint4 values) const {
        *at(panel, chunk) = values;
    }
    // Values of all lanes, of which some store theirs: no branch around what they follow from.
    __device__ __forceinline__ void put_if(bool mine, int panel, int chunk, uint4 values) const {
        store_shared_if(mine, at(panel, chunk), values);
    }
    __device__ __forceinline__ uint4* at(int panel, int chunk) const {
        return reinterpret_cast<uint4*>(base + (first ^ chunk << 4) + panel * kTilePanelBytes);
    }
};

// E4M3 chunks kFirst .. kEnd of a lane: a quarter of a panel's row each, of every second panel. The
// scales of two are the halves of a word. kAll: the fourth chunk is one in all lanes, else in those
// where `fourth` is true.
template <int kFirst, int kEnd, bool kAll>
__device__ __forceinline__ void write_e4m3(const LaneCodes& raw, uint2 scales, RowChunks to,
                                           bool fourth = true) {
    static_assert(kFirst % 2 == 0 && kEnd <= 4);
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
        const uint32_t factors = ue8m0_factors_at_most(j < 2 ? scales.x : scales.y);
        const uint32_t factor = j % 2 == 0 ? twice_half<0>(factors) : twice_half<1>(factors);
        const uint4 lower = e4m3_paired<true>(raw.codes[j].x, raw.codes[j].y, factor);
        const uint4 upper = e4m3_paired<true>(raw.codes[j].z, raw.codes[j].w, factor);
        if (kAll || j < 3) {
            to.put(2 * j, 0, lower);
            to.put(2 * j, 1, upper);
        } else {
            to.put_if(fourth, 2 * j, 0, lower);
            to.put_if(fourth, 2 * j, 1, upper);
        }
    }
    // Scales as large as no model has them: values are raised where they lie.
    const bool exceeds =
        kFirst > 0 ? ue8m0_exceeds(scales.y) : ue8m0_exceeds(scales.x, kEnd > 2 ? scales.y : 0);
    if (!__any_sync(~0u, exceeds)) return;
#pragma unroll 1
    for (int j = kFirst; j < (kAll || fourth ? kEnd : min(kEnd, 3)); ++j) {
        const uint32_t scale = (j < 2 ? scales.x : scales.y) >> j % 2 * 16 & 0xff;
        if (scale <= kMostUe8m0) continue;
        const uint32_t excess = ue8m0_excess(scale);
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            uint4* at = to.at(2 * j, chunk);
            *at = multiply_bf16x8(*at, excess);
        }
    }
}

// Its chunks kFirst .. kEnd are written by write<kFirst, kEnd>; kLower of them are of the lower
// half of the dims.
inline constexpr int kLower = 2;

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
    static constexpr int kTogether = 4;  // records that lie without a gap
    // 16 bytes on for the last four, so that 8 records' chunks lie in 8 groups of banks.
    static __device__ __forceinline__ int place(int record) {
        return record * kCopied + record / 4 * 16;
    }
    static __device__ __forceinline__ void read(const uint8_t* from, int lane, LaneCodes& to) {
        const uint8_t* at = from + place(lane % 8);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int chunk = lane / 8 + 4 * j;  // 32 values, two scales
            to.codes[j] = *reinterpret_cast<const uint4*>(at + 16 * chunk);
            to.scales[j] = *reinterpret_cast<const uint16_t*>(at + kRecord.data_bytes + 2 * chunk);
        }
    }
    template <int kFirst, int kEnd>
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow row) {
        const int quarter = lane / 8;
        const RowChunks to(row, quarter / 2, quarter % 2 * 4);
#pragma unroll
        for (int j = kFirst; j < kEnd; ++j) {
            const uint32_t factors = e4m3_factor_pair(raw.scales[j]);
            const uint2 factor = make_uint2(twice_half<0>(factors), twice_half<1>(factors));
            const int panel = 2 * j, first = 0;  // from the lane's own on
            to.put(panel, first, e2m1_paired(raw.codes[j].x, factor.x));
            to.put(panel, first + 1, e2m1_paired(raw.codes[j].y, factor.x));
            to.put(panel, first + 2, e2m1_paired(raw.codes[j].z, factor.y));
            to.put(panel, first + 3, e2m1_paired(raw.codes[j].w, factor.y));
        }
    }
};

// Four FP8 records; a lane has the chunks quarter + 4 panel of panels of one parity. Lanes are
// dealt out so that neither what 8 neighbours read nor what they store meets a bank twice.
template <>
struct PassesOf<RecordId::WindowFp8> {
    static constexpr Record kRecord = record(RecordId::WindowFp8);
    static constexpr int kRecords = 4, kChunks = kRecord.data_bytes / 128;
    static constexpr int kCopied = kRecord.bytes();
    static_assert(kChunks == 4 && kRecord.group == 32);

    static __device__ __forceinline__ int record_of(int lane) { return lane % 4; }
    static constexpr int kTogether = 4;
    static __device__ __forceinline__ int place(int record) { return record * kCopied; }
    // Eight neighbours have quarters 0 and 2, or 1 and 3, of all records, which lie 16 bytes apart
    // in the banks: records 2 and 3 would meet 0 and 1 there.
    static __device__ __forceinline__ int quarter_of(int lane) {
        return lane / 4 % 2 * 2 + lane / 8 % 2;
    }
    static __device__ __forceinline__ int panel_of(int lane, int j) {
        return 2 * j + (lane / 16 ^ (lane % 8 / 2 == 1));
    }
    static __device__ __forceinline__ void read(const uint8_t* from, int lane, LaneCodes& to) {
        read_record(from + place(record_of(lane)), lane, to);
    }
    static __device__ __forceinline__ void read_record(const uint8_t* at, int lane, LaneCodes& to) {
        const int quarter = quarter_of(lane);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
            const int panel = panel_of(lane, j);
            to.codes[j] = *reinterpret_cast<const uint4*>(at + 64 * panel + 16 * quarter);
            to.scales[j] = at[kRecord.data_bytes + 2 * panel + quarter / 2];
        }
    }
    template <int kFirst, int kEnd>
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow to) {
        const RowChunks mine(to, panel_of(lane, 0), 2 * quarter_of(lane));
        const uint2 scales =
            make_uint2(raw.scales[0] | raw.scales[1] << 16, raw.scales[2] | raw.scales[3] << 16);
        write_e4m3<kFirst, kEnd, true>(raw, scales, mine);
    }
};

template <>
struct PassesOf<RecordId::MixedFp8> {
    static constexpr Record kRecord = record(RecordId::MixedFp8);
    static constexpr int kCoded = kRecord.coded_dims / 64;  // panels; then 64 BF16 values: as two
    static constexpr int kRecords = 4, kChunks = (kCoded + 2 + 1) / 2;
    static constexpr int kCopied = kRecord.data_bytes;
    static_assert(kCoded == 7 && kChunks == kMostChunks && kRecord.group == 64);

    // Scales lie apart, in memory and here.
    static __device__ __forceinline__ int scales_place(int record) {
        return kRecords * kCopied + record * kRecord.scale_bytes;
    }
    static_assert(kRecords * kRecord.bytes() <= kSlotBytes);

    // Eight neighbours have four quarters of two records, which lie 64 bytes apart in the banks.
    static __device__ __forceinline__ int record_of(int lane) {
        return lane % 2 + lane / 8 % 2 * 2;
    }
    static __device__ __forceinline__ int quarter_of(int lane) { return lane / 2 % 4; }
    static __device__ __forceinline__ int panel_of(int lane, int j) { return 2 * j + lane / 16; }
    static constexpr int kTogether = 4;
    static __device__ __forceinline__ int place(int record) { return record * kCopied; }
    // Of the last chunk: all lanes have 8 BF16 values. Chunks 0 2 5 7 of two records lie, as 1 3 4
    // 6 do, in 8 groups of banks, here and in the tile.
    static __device__ __forceinline__ int last_chunk(int lane) {
        const int quarter = quarter_of(lane);
        return (2 * quarter + quarter / 2) ^ lane / 16;
    }
    static __device__ __forceinline__ void read(const uint8_t* from, int lane, LaneCodes& to) {
        const uint8_t* at = from + place(record_of(lane));
#pragma unroll
        for (int j = 0; j < 4; ++j)
            to.codes[j] = *reinterpret_cast<const uint4*>(at + 64 * panel_of(lane, j) +
                                                          16 * quarter_of(lane));
        to.codes[4] = *reinterpret_cast<const uint4*>(at + 64 * kCoded + 16 * last_chunk(lane));
        const uint8_t* scales = from + scales_place(record_of(lane));
        const uint2 all = *reinterpret_cast<const uint2*>(scales);
        to.scales[0] = all.x, to.scales[1] = all.y, to.scales[2] = to.scales[3] = 0;
    }
    template <int kFirst, int kEnd>
    static __device__ __forceinline__ void write(const LaneCodes& raw, int lane, TileRow to) {
        const RowChunks mine(to, panel_of(lane, 0), 2 * quarter_of(lane));
        const RowChunks others(to, kCoded, last_chunk(lane));
        const uint32_t bytes = lane < 16 ? 0x4240 : 0x4341;  // of the lane's panels, in halves
        const uint2 scales =
            make_uint2(permute(raw.scales[0], 0, bytes), permute(raw.scales[1], 0, bytes));
        write_e4m3 < kFirst, kEnd<4 ? kEnd : 4, false>(raw, scales, mine, lane < 16);
        if (kEnd > 4) others.put(0, 0, bf16_paired(raw.codes[4]));
    }
};

// f(PassesOf<id>{}) for a record that is the same in all lanes.
template <class F>
__device__ __forceinline__ auto with_passes(RecordId id, const F& f) {
    if (id == RecordId::MainFp4) return f(PassesOf<RecordId::MainFp4>{});
    if (id == RecordId::WindowFp8) return f(PassesOf<RecordId::WindowFp8>{});
    return f(PassesOf<RecordId::MixedFp8>{});
}

}  // namespace flash_csa::sm90::many_heads
