// The finish warps of prefill.cu and tokens.cu: pooled entries to latents and main records.
//
// Lane k has group k of an entry, 16 channels with one scale, so that no lane repeats another's
// work; their weights of the norm stay in its registers. Lanes of odd panels hold the upper half
// first: with that, 32 lanes read and write their 32 bytes without a bank conflict.
#pragma once

#include "sm90/common/fp4_words.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/compress/tile.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {

inline constexpr int kGroup = record(RecordId::MainFp4).group;
static_assert(kGroup * 32 == kHeadDim);
inline constexpr int kRopeLanes = kRopeDims / kGroup;  // the last ones

// Two times 8 channels of a group: of odd panels' groups the upper ones first.
struct GroupHalves {
    uint4 half[2];
};

__device__ __forceinline__ int first_half(int lane) { return lane / 4 % 2; }

// (x * factor) * w, rounded to BF16.
__device__ __forceinline__ uint4 norm_half(uint4 packed, float factor, const float* weight) {
    float x[8];
    unpack_words(packed, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = mul_rn(mul_rn(x[i], factor), weight[i]);
    return pack_words(x);
}

// Largest magnitudes of groups whose quotients stay below 7: the others' scales are rounded among
// the lowest E4M3 numbers or saturate, or they are not finite.
inline constexpr uint32_t kLeastOrdinary = 0x3cf1u;  // above 15 * 2^-9
inline constexpr uint32_t kMostOrdinary = 0x4528u;   // 6 * 448

// Codes and scale of a lane's group to the record at `row`.
__device__ __forceinline__ void store_group(const GroupHalves& x, int lane, uint8_t* row) {
    Magnitudes magnitudes[2] = {Magnitudes(x.half[0]), Magnitudes(x.half[1])};
    const uint32_t either = __vmaxu2(magnitudes[0].largest(), magnitudes[1].largest());
    const uint32_t largest = max_u32(either & 0xffffu, either >> 16);
    const MainScales scales = main_scales(largest);
    uint32_t scale = scales.bytes & 0xffu;
    const bool finite = largest < 0x7f80u;
    if (largest - kLeastOrdinary > kMostOrdinary - kLeastOrdinary) {
        const float most = 6.0f * decode_e4m3(static_cast<uint8_t>(scale));
        const uint32_t limit = word_of(both(most));
        if (!finite) scale = kNanE4M3;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                magnitudes[i].word[j] = __vminu2(magnitudes[i].word[j], limit);
        }
    }
    const Reciprocal reciprocal(scales.low_factor);
    const uint32_t a = word_row_codes(magnitudes[0], x.half[0], reciprocal);
    const uint32_t b = word_row_codes(magnitudes[1], x.half[1], reciprocal);
    uint2 codes = first_half(lane) ? make_uint2(b, a) : make_uint2(a, b);
    if (!finite) codes = make_uint2(0, 0);
    constexpr Record r = record(RecordId::MainFp4);
    static_assert(r.order == PageOrder::TokenMajor && r.bytes() % 16 == 0);
    if (row == nullptr) return;
    __builtin_assume(__isGlobal(row));  // it comes from shared memory
    reinterpret_cast<uint2*>(row)[lane] = codes;
    row[r.data_bytes + lane] = static_cast<uint8_t>(scale);
}

// Pooled group of an entry, from its slot.
__device__ __forceinline__ GroupHalves read_group(const uint16_t* row, int lane) {
    const uint4* chunks = reinterpret_cast<const uint4*>(row);
    const int at = 2 * lane + first_half(lane);
    return {chunks[at], chunks[at ^ 1]};
}

// Where a lane's groups of two neighbouring rows lie in the tile, the first an even one: the halves
// of a group are 16 bytes apart, and the other way round in the next row.
struct TilePlaces {
    uint8_t* half[2];

    // latents: panels of kPanelBytes.
    template <int kPanelBytes>
    __device__ __forceinline__ TilePlaces(uint8_t (*latents)[kPanelBytes], int first_row,
                                          int lane) {
        uint8_t* panel = latents[lane / 4];
        const int at = panel_offset(first_row, 2 * (lane % 4) + first_half(lane));
        half[0] = panel + at;
        half[1] = panel + (at ^ 16);
    }
    __device__ __forceinline__ uint4& at(int e, int i) const {
        return *reinterpret_cast<uint4*>(half[i ^ e] + e * kPanelRowBytes);
    }
};

__device__ __forceinline__ void store_latent(const GroupHalves& x, int lane, uint16_t* row) {
    uint4* to = reinterpret_cast<uint4*>(row) + 2 * lane;
    const int first = first_half(lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 v = x.half[i];
        to[i ^ first] = make_uint4(canonical_bf16x2(v.x), canonical_bf16x2(v.y),
                                   canonical_bf16x2(v.z), canonical_bf16x2(v.w));
    }
}

// Two pairs of RoPE dims: of entry lane / 16, couple lane % 16.
struct Rotation {
    static constexpr int kPairs = 2;
    float cos[kPairs], sin[kPairs];

    __device__ __forceinline__ void load(const CompressParams& p, int32_t row, int lane) {
        const float2* table = reinterpret_cast<const float2*>(p.cos_sin.at(row)) + lane % 16;
        const float2 c = table[0], s = table[kRopeDims / 2 / kPairs];
        cos[0] = c.x, cos[1] = c.y, sin[0] = s.x, sin[1] = s.y;
    }

    __device__ __forceinline__ uint2 turn(uint2 packed) const {
        uint32_t words[kPairs] = {packed.x, packed.y};
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            float a, b;
            rope_pair(low_bf16(words[i]), high_bf16(words[i]), cos[i], sin[i], &a, &b);
            words[i] = pack_bf16(a, b);
        }
        return make_uint2(words[0], words[1]);
    }
};

// The rows of two entries in shared memory: PairedRows.
struct TwoRows {
    uint16_t* row[kHalfUnit];

    __device__ __forceinline__ uint16_t* operator[](int e) const { return row[e]; }
    // That of entry lane / 16.
    __device__ __forceinline__ uint16_t* of(int lane) const { return lane < 16 ? row[0] : row[1]; }
};

// The factor of the norm of entry lane / 16. A lane has two neighbouring classes c % 32 of the
// channels, whose chains are in the order of the row.
__device__ __forceinline__ float row_factor(const CompressParams& p, const uint16_t* row,
                                            int lane) {
    constexpr int kBlockWords = 16;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(row) + lane % 16;
    float chain[2] = {};
#pragma unroll
    for (int b = 0; b < kHeadDim / 32; ++b) {
        const uint32_t x = words[kBlockWords * b];
        const float low = low_bf16(x), high = high_bf16(x);
        chain[0] = fma_rn(low, low, chain[0]);
        chain[1] = fma_rn(high, high, chain[1]);
    }
#pragma unroll
    for (int h = 8; h > 0; h /= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            chain[i] = add_rn(chain[i], __shfl_xor_sync(kAllLanes, chain[i], h));
    }
    return rsqrt_ieee(add_rn(mul_rn(add_rn(chain[0], chain[1]), 1.0f / kHeadDim), p.eps));
}

// Two entries of a unit in the registers of a warp.
struct HalfUnit {
    GroupHalves x[kHalfUnit];

    // Pooled values to latents.
    __device__ __forceinline__ void norm(const CompressParams& p, const TwoRows& rows,
                                         const float (&weight)[kGroup], int lane) {
        const float own_factor = row_factor(p, rows.of(lane), lane);
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) {
            x[e] = read_group(rows[e], lane);
            const float factor = __shfl_sync(kAllLanes, own_factor, 16 * e);
            x[e].half[0] = norm_half(x[e].half[0], factor, weight);
            x[e].half[1] = norm_half(x[e].half[1], factor, weight + 8);
        }
    }

    // Latents to the rows that close the entries; -1: none. `row` is that of entry lane / 16.
    __device__ __forceinline__ void write_out(const CompressParams& p, int32_t row,
                                              int lane) const {
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) {
            const int32_t to = __shfl_sync(kAllLanes, row, 16 * e);
            if (to >= 0) store_latent(x[e], fresh(lane), p.latent_out.row(to));
        }
    }

    // Latents to the tile.
    __device__ __forceinline__ void write(const TilePlaces& places) const {
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) {
            places.at(e, 0) = x[e].half[0];
            places.at(e, 1) = x[e].half[1];
        }
    }

    // The RoPE dims of both, by way of their rows.
    __device__ __forceinline__ void rotate(const Rotation& rotation, const TwoRows& rows,
                                           int lane) {
        const bool has = lane >= 32 - kRopeLanes;
        __syncwarp();  // all have read the rows
        if (has) {
#pragma unroll
            for (int e = 0; e < kHalfUnit; ++e) write_back(rows[e], e, lane);
        }
        __syncwarp();
        uint2* own = reinterpret_cast<uint2*>(rows.of(lane) + kHeadDim - kRopeDims) + lane % 16;
        *own = rotation.turn(*own);
        __syncwarp();
        if (has) {
#pragma unroll
            for (int e = 0; e < kHalfUnit; ++e) x[e] = read_group(rows[e], lane);
        }
    }

    // Main records; place(e): of entry e, null: none.
    template <class Place>
    __device__ __forceinline__ void store(const Place& place, int lane) const {
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) store_group(x[e], lane, place(e));
    }

  private:
    __device__ __forceinline__ void write_back(uint16_t* row, int e, int lane) const {
        uint4* chunks = reinterpret_cast<uint4*>(row);
        const int at = 2 * lane + first_half(lane);
        chunks[at] = x[e].half[0];
        chunks[at ^ 1] = x[e].half[1];
    }
};

// A group's weights of the norm, in registers before a loop.
__device__ __forceinline__ void load_norm_weight(const CompressParams& p, int lane,
                                                 float (&weight)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
        weight[i] = p.norm_weight[kGroup * lane + (8 * first_half(lane) ^ i)];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) weight[i] = fresh(weight[i]);
}

}  // namespace flash_csa::sm90
