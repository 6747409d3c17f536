// Scores of the entries of a row's pool, computed by the warps of a block into shared memory, with
// the bits of core/scoring.h.
//
// A unit is 16 blocks of the pool, 128 keys of a warpgroup: 4 blocks, 32 keys, a warp. A warp
// fetches its keys itself, kStages units ahead, by asynchronous copies of 16 bytes, and scales by
// plain loads. Codes become E4M3 in registers, the A of two MMA tiles; queries are B in shared
// memory. The sums, and which scales are plain, are those of score_groups.cuh.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "core/columns.h"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/index/score_groups.cuh"

namespace flash_csa::sm90 {

inline constexpr int kPoolThreads = 512;
inline constexpr int kPoolWarps = kPoolThreads / 32;
inline constexpr int kPoolGroups = kPoolThreads / 128;  // of warps
inline constexpr int kPoolWarpBlocks = 4;               // of a unit
inline constexpr int kPoolWarpKeys = kPoolWarpBlocks * kPoolBlock;
inline constexpr int kPoolUnitBlocks = 4 * kPoolWarpBlocks;
inline constexpr int kPoolStages = 3;  // units in flight: 96 KiB a block of threads
inline constexpr int kPoolHeads = 64;  // most
inline constexpr int kMaxPoolBlocks = 2048;
inline constexpr int kPoolBlockBytes = kPoolBlock * kKeyBytes;
static_assert(kPoolBlockBytes == 32 * 16, "16 bytes a lane");
static_assert(kPoolUnitBlocks * kPoolBlock == kPassKeys);

// Where a block of the pool lies, and how many of its positions are visible (0: absent).
struct alignas(16) PoolPlace {
    const uint8_t* codes;
    int32_t scales_at;  // from codes
    int32_t visible;
};

// Codes of a warp's part of a unit. 16 more bytes a block put two neighbouring keys of each of the
// four blocks, the rows of a matrix, into different banks.
struct alignas(16) WarpKeys {
    uint8_t codes[kPoolWarpBlocks][kPoolBlockBytes + 16];
};

struct PoolRing {
    WarpKeys keys[kPoolWarps][kPoolStages];
};

struct alignas(1024) PoolScoresShared {
    uint8_t queries[kPoolHeads * kQueryBytes];  // E4M3, 128-byte swizzle
    float weights[kPoolHeads];
    // Of each key: 2^(exponents of groups 1, 2, 3 - that of group 0), 2^(exponent of group 0).
    float4 factors[kPoolWarps][kPoolWarpKeys];
};

// The dots of one MMA.
struct PoolDots {
    static constexpr int kGroupHeads = 32, kGroupSums = kGroupHeads / 2;
};

// Right where the scales are plain.
__device__ __forceinline__ float4 scale_factors(uint32_t scales) {
    const float3 relative = relative_factors(scales);
    return {relative.x, relative.y, relative.z, bits_float(scales << 23 & kInfBits)};
}

class PoolScorer {
  public:
    // places: those of the units' blocks, in shared memory.
    __device__ PoolScorer(const IndexScoresParams& p, const PoolPlace* places, int32_t units,
                          PoolRing& ring, PoolScoresShared& shared)
        : p_(p),
          places_(places + threadIdx.x / 32 % 4 * kPoolWarpBlocks),
          units_(units),
          ring_(ring.keys[threadIdx.x / 32]),
          s_(shared),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32),
          key_(fresh(lane_ / 8 * kPoolBlock + lane_ / 4 % 2)),
          source_(fresh(lane_ % 8 / 2 * static_cast<int32_t>(sizeof(WarpKeys::codes[0])) +
                        (lane_ / 8 % 2 * 2 + lane_ % 2) * kKeyBytes +
                        lane_ / 16 * (kKeyBytes / 4))) {}

    // All threads of the block call. scores: f32 [units, 128].
    __device__ void run(int64_t row, float* scores) {
        if (p_.query.heads <= PoolDots::kGroupHeads) {
            run<1>(row, scores);
        } else {
            run<kPoolHeads / PoolDots::kGroupHeads>(row, scores);
        }
    }

  private:
    // kMmas: that take all heads.
    template <int kMmas>
    __device__ __forceinline__ void run(int64_t row, float* scores) {
        int32_t unit = warp_ / 4;
        for (int i = 0; i < kPoolStages; ++i) fetch(unit + i * kPoolGroups, i);
        uint32_t scales = load_scales(unit);
        const bool plain = load_queries(row);
        for (int32_t stage = 0; unit < units_; unit += kPoolGroups) {
            const uint32_t own_scales = scales;
            scales = load_scales(unit + kPoolGroups);
            wait_copies<kPoolStages - 1>();
            __syncwarp();
            write_scores<kMmas>(row, unit, ring_[stage], own_scales, plain, scores);
            __syncwarp();
            fetch(unit + kPoolStages * kPoolGroups, stage);
            stage = stage + 1 == kPoolStages ? 0 : stage + 1;
        }
        wait_for_copies();
    }

    // Starts the copies of the codes of a unit; absent blocks are zeros.
    __device__ __forceinline__ void fetch(int32_t unit, int32_t stage) {
        if (unit < units_) {
            const PoolPlace* places = places_ + unit * kPoolUnitBlocks;
#pragma unroll
            for (int i = 0; i < kPoolWarpBlocks; ++i) {
                const PoolPlace place = places[i];
                copy_16_async(ring_[stage].codes[i] + 16 * lane_, place.codes + 16 * lane_,
                              place.visible > 0);
            }
        }
        commit_copies();
    }

    // The scale word of key `lane` of a unit; exponents of 0 where it is absent.
    __device__ __forceinline__ uint32_t load_scales(int32_t unit) const {
        if (unit >= units_) return kUnitScales;
        const PoolPlace& place = places_[unit * kPoolUnitBlocks + lane_ / kPoolBlock];
        if (lane_ % kPoolBlock >= place.visible) return kUnitScales;
        const uint8_t* scales = place.codes + place.scales_at;
        return __ldg(reinterpret_cast<const uint32_t*>(scales) + lane_ % kPoolBlock);
    }

    // Queries and weights of the row; whether all its scales and weights are plain.
    __device__ bool load_queries(int64_t row) {
        const int32_t heads = p_.query.heads;
        const int32_t padded =
            (heads + PoolDots::kGroupHeads - 1) / PoolDots::kGroupHeads * PoolDots::kGroupHeads;
        const uint8_t* codes = p_.query.codes.row(row);
        const int32_t* scales_of = p_.query.scales_ue8m0.row(row);
        QueryTile tile = {};
        tile.codes = s_.queries;
        bool plain = true;
        for (int32_t i = threadIdx.x; i < padded * kIndexGroups; i += kPoolThreads) {
            const int32_t head = i / kIndexGroups, group = i % kIndexGroups;
            uint32_t raw[4] = {}, scales = kUnitScales;
            float weight = 0.f;
            if (head < heads) {
                const uint4 words = reinterpret_cast<const uint4*>(codes + head * kKeyBytes)[group];
                raw[0] = words.x, raw[1] = words.y, raw[2] = words.z, raw[3] = words.w;
                scales = static_cast<uint32_t>(scales_of[head]);
                weight = head_weight(p_.weights, row, head);
            }
            const ByteRange range = scale_range(scales);
            tile.put_codes(head, group, raw, head_fold(scales, range, group));
            // Halved: a dot and its magnitude are added instead of taking a maximum.
            if (group == 0) {
                s_.weights[head] = mul_rn(weight, mul_rn(0.5f, power_of_two(range.high)));
            }
            plain = plain && is_plain_query(range) && is_plain_weight(weight) &&
                    range.high - range.low <= kMaxFold - kMinFold;
        }
        cutlass::arch::fence_view_async_shared();
        return __syncthreads_and(plain);
    }

    // Of a warp's keys, a lane has, in tile i / 2 and its half i % 2, this one.
    __device__ int32_t lane_key(int32_t i) const { return key_ + 2 * i; }

    // The warp's 16 keys of a tile as A: row r of half h is key 2 (2 tile + h) + r % 2 of block
    // r / 2. A matrix is a group of eight such rows; lane l names row l % 8 of half l / 8 % 2 and
    // group l / 16, of two.
    __device__ __forceinline__ KeyFragment load_keys(const WarpKeys& keys, int32_t tile) const {
        const uint8_t* source = keys.codes[0] + source_ + 4 * tile * kKeyBytes;
        KeyFragment out;
#pragma unroll
        for (int first = 0; first < kIndexGroups; first += 2) {
            uint32_t words[4];
            load_matrices(source + first * (kKeyBytes / 4), words);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const PlacedWord placed = place_codes(words[i]);
                out.a[first + i / 2][i % 2] = placed.even;
                out.a[first + i / 2][2 + i % 2] = placed.odd;
            }
        }
        return out;
    }

    // Partial sums of a tile. Warps of a group may take different branches between MMAs.
    template <int kMmas>
    __device__ __forceinline__ void add_tile(int64_t row, const WarpKeys& keys, int32_t tile,
                                             uint32_t scales, bool plain,
                                             float (&partials)[2]) const {
        const KeyFragment fragment = load_keys(keys, tile);
        const uint32_t queries = query_descriptor(s_.queries);
        const float4* of_keys = s_.factors[warp_];
        const float4 first_key = of_keys[lane_key(2 * tile)];
        const float4 second_key = of_keys[lane_key(2 * tile + 1)];
        const float3 factors[2] = {{first_key.x, first_key.y, first_key.z},
                                   {second_key.x, second_key.y, second_key.z}};
#pragma unroll
        for (int32_t first = 0; first < kMmas * PoolDots::kGroupHeads;
             first += PoolDots::kGroupHeads) {
            float sums[kIndexGroups][PoolDots::kGroupSums];
            start_dots<PoolDots>(fragment, queries + first * (kQueryBytes >> 4), sums);
            float2 weights[PoolDots::kGroupHeads / 8];
            const float2* source = reinterpret_cast<const float2*>(s_.weights + first) + lane_ % 4;
#pragma unroll
            for (int i = 0; i < PoolDots::kGroupHeads / 8; ++i) weights[i] = source[4 * i];
            finish_dots<PoolDots>(sums);
            if (plain) {
                add_plain_heads<PoolDots>(sums, weights, factors, partials);
            } else {
                const uint32_t words[2] = {__shfl_sync(~0u, scales, lane_key(2 * tile)),
                                           __shfl_sync(~0u, scales, lane_key(2 * tile + 1))};
                add_heads<PoolDots>(p_, row, first, sums, words, partials);
            }
        }
    }

    template <int kMmas>
    __device__ __forceinline__ void write_scores(int64_t row, int32_t unit, const WarpKeys& keys,
                                                 uint32_t scales, bool plain, float* scores) const {
        plain = __all_sync(~0u, is_plain(odd_key_bits(scales))) && plain;
        s_.factors[warp_][lane_] = scale_factors(scales);
        __syncwarp();
        float partials[kPassTiles][2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            add_tile<kMmas>(row, keys, tile, scales, plain, partials[tile]);
        }
        float score = reduce_quad(partials);
        const int32_t key = lane_key(lane_ % 4);
        if (plain) score = mul_rn(score, s_.factors[warp_][key].w);
        const int32_t visible = places_[unit * kPoolUnitBlocks + key / kPoolBlock].visible;
        scores[unit * kPassKeys + warp_ % 4 * kPoolWarpKeys + key] =
            key % kPoolBlock < visible ? canonical_nan(score) : bits_float(kNanBits);
    }

    const IndexScoresParams& p_;
    const PoolPlace* places_;  // of this warp's blocks in unit 0
    const int32_t units_;
    WarpKeys* ring_;  // [kPoolStages]
    PoolScoresShared& s_;
    const int32_t warp_, lane_;
    const int32_t key_, source_;  // this lane's first key; the row of keys that it names
};

}  // namespace flash_csa::sm90
