// The finish warps of prefill.cu: pooled entries to latents and main records.
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
    if (row == nullptr) return;
    *reinterpret_cast<uint2*>(row + 8 * lane) = codes;
    row[record(RecordId::MainFp4).data_bytes + lane] = static_cast<uint8_t>(scale);
}

// Pooled group of an entry, from its slot.
__device__ __forceinline__ GroupHalves read_group(const uint16_t* row, int lane) {
    const uint4* chunks = reinterpret_cast<const uint4*>(row);
    const int at = 2 * lane + first_half(lane);
    return {chunks[at], chunks[at ^ 1]};
}

// Latent group to row `row` of the tile.
template <class Shared>
__device__ __forceinline__ void write_group(Shared& shared, int row, const GroupHalves& x,
                                            int lane) {
    uint8_t* panel = shared.latents[lane / 4];
    const int at = panel_offset(row, 2 * (lane % 4) + first_half(lane));
    *reinterpret_cast<uint4*>(panel + at) = x.half[0];
    *reinterpret_cast<uint4*>(panel + (at ^ 16)) = x.half[1];
}

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
        const float* table = p.cos_sin.at(row) + lane % 16 * kPairs;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            cos[i] = table[i];
            sin[i] = table[kRopeDims / 2 + i];
        }
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

using Row = uint16_t[kHeadDim];

// The factor of the norm of row lane / 16. A lane has two neighbouring classes c % 32 of the
// channels, whose chains are in the order of the row; lanes of the second row read the blocks of 32
// of a pair the other way round, against bank conflicts.
__device__ __forceinline__ float row_factor(const CompressParams& p, const Row* rows, int lane) {
    constexpr int kBlockWords = 16;
    const bool odd = lane >= 16;
    const uint32_t* first = reinterpret_cast<const uint32_t*>(rows[odd]) + lane % 16;
    const uint32_t* second = first + kBlockWords;
    float chain[2] = {};
#pragma unroll
    for (int b = 0; b < kHeadDim / 32; b += 2) {
        const uint32_t x = (odd ? second : first)[kBlockWords * b];
        const uint32_t y = (odd ? first : second)[kBlockWords * b];
        const uint32_t words[2] = {odd ? y : x, odd ? x : y};
#pragma unroll
        for (const uint32_t word : words) {
            chain[0] = fma_rn(low_bf16(word), low_bf16(word), chain[0]);
            chain[1] = fma_rn(high_bf16(word), high_bf16(word), chain[1]);
        }
    }
#pragma unroll
    for (int h = 8; h > 0; h /= 2) {
#pragma unroll
        for (float& sum : chain) sum = add_rn(sum, __shfl_xor_sync(kAllLanes, sum, h));
    }
    return rsqrt_ieee(add_rn(mul_rn(add_rn(chain[0], chain[1]), 1.0f / kHeadDim), p.eps));
}

// Two entries of a unit in the registers of a warp.
struct HalfUnit {
    GroupHalves x[kHalfUnit];
    Item item;  // of entry lane % 2

    // Pooled values to latents.
    __device__ __forceinline__ void norm(const CompressParams& p, const Row* rows,
                                         const float (&weight)[kGroup], int lane) {
        const float own_factor = row_factor(p, rows, lane);
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) {
            x[e] = read_group(rows[e], lane);
            const float factor = __shfl_sync(kAllLanes, own_factor, 16 * e);
            x[e].half[0] = norm_half(x[e].half[0], factor, weight);
            x[e].half[1] = norm_half(x[e].half[1], factor, weight + 8);
        }
        if (!p.latent_out) return;
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) {
            const int32_t row = __shfl_sync(kAllLanes, item.row, e);
            if (row >= 0) store_latent(x[e], lane, p.latent_out.row(row));
        }
    }

    // Latents to rows `first` .. of the tile.
    template <class Shared>
    __device__ __forceinline__ void write(Shared& shared, int first, int lane) const {
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e) write_group(shared, first + e, x[e], lane);
    }

    // The RoPE dims of both, by way of the slot.
    __device__ __forceinline__ void rotate(const Rotation& rotation, Row* rows, int lane) {
        const bool has = lane >= 32 - kRopeLanes;
        __syncwarp();  // all have read the rows
        if (has) {
#pragma unroll
            for (int e = 0; e < kHalfUnit; ++e) write_back(rows[e], e, lane);
        }
        __syncwarp();
        uint2* own = reinterpret_cast<uint2*>(rows[lane / 16] + kHeadDim - kRopeDims) + lane % 16;
        *own = rotation.turn(*own);
        __syncwarp();
        if (has) {
#pragma unroll
            for (int e = 0; e < kHalfUnit; ++e) x[e] = read_group(rows[e], lane);
        }
    }

    // Main records.
    __device__ __forceinline__ void store(const CompressParams& p, int lane) const {
        constexpr Record r = record(RecordId::MainFp4);
        static_assert(r.order == PageOrder::TokenMajor && r.bytes() % 16 == 0);
        const bool stores = p.main.data != nullptr && p.main.holds(item.slot);
        const uint64_t own = stores ? reinterpret_cast<uint64_t>(p.main.row(r, item.slot)) : 0;
#pragma unroll
        for (int e = 0; e < kHalfUnit; ++e)
            store_group(x[e], lane, reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, own, e)));
    }

  private:
    __device__ __forceinline__ void write_back(Row& row, int e, int lane) const {
        uint4* chunks = reinterpret_cast<uint4*>(row);
        const int at = 2 * lane + first_half(lane);
        chunks[at] = x[e].half[0];
        chunks[at ^ 1] = x[e].half[1];
    }
};

// Latents go to the tile before they are encoded, so that the key warps multiply meanwhile.
template <int kRatio>
__device__ __forceinline__ void finish_units(const CompressParams& p, Shared<kRatio>& shared,
                                             int warp, int lane) {
    using R = Roles<kRatio>;
    float weight[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
        weight[i] = p.norm_weight[kGroup * lane + (8 * first_half(lane) ^ i)];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) weight[i] = fresh(weight[i]);  // there before the loop
    const int half = warp % 2 * kHalfUnit;                          // two warps share a unit
#pragma unroll 1
    for (uint32_t u = warp / 2;; u += R::kFinishWarps / 2) {
        const uint32_t tile = u / kTileUnits;
        if (!has_table(shared, tile)) return;
        const int first = unit_row(u) + half;
        const Item* items = shared.tables[tile % kTables] + first;
        Row* rows = shared.slots[u % kSlots].rows + half;
        HalfUnit unit;
        unit.item = items[lane % kHalfUnit];
        const bool filled = __any_sync(kAllLanes, unit.item.row >= 0);
        Rotation rotation = {};
        if (filled) rotation.load(p, items[lane / 16].rotation, lane);
        wait_full(shared.full[u % kSlots], u / kSlots);
        if (filled) unit.norm(p, rows, weight, lane);
        wait_empty(shared.tile_empty, tile);
        if (filled) unit.write(shared, first, lane);
        cutlass::arch::fence_view_async_shared();
        shared.tile_full.arrive();
        if (filled) unit.rotate(rotation, rows, lane);
        if (kRatio == 1) cutlass::arch::fence_view_async_shared();  // rows are copied there
        shared.empty[u % kSlots].arrive();
        if (filled) unit.store(p, lane);
    }
}

}  // namespace flash_csa::sm90
