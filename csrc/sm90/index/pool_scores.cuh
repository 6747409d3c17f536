// Scores of the entries of a row's pool, computed by the warps of a block into shared memory, with
// the bits of core/scoring.h.
//
// A tile is 4 blocks, 32 keys. A warp fetches its tiles itself, kStages ahead, by asynchronous
// copies of 16 bytes, and scales by plain loads; then, for each scale group,
//   codes -> F16 by bit placement: s.eem becomes a half of 2^-14 times the value, exactly;
//   keys [32, 32] x queries [32, 8 heads] on the tensor cores: products and sums are exact;
//   d = fma(k_g, S_g, d).
// Words of 8 codes are multiplied in an order of their own, the same for keys and queries.
//
// S_g is a power of two for each head and key. Where exponents are moderate (Safe) those of the
// query and 2^14 commute with every rounding: query exponents go into the F16 queries, relative to
// the head's largest, and that one goes into the weight, which leaves 6 operations a head and key.
// Elsewhere the products are scaled back and combined as the formula says.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/copy_sm80.hpp>

#include "core/columns.h"
#include "core/scoring.h"
#include "sm90/common/mma.h"
#include "sm90/index/score_keys.cuh"

namespace flash_csa::sm90 {

inline constexpr int kPoolThreads = 512;
inline constexpr int kPoolWarps = kPoolThreads / 32;
inline constexpr int kTileBlocks = 4;
inline constexpr int kTileKeys = kTileBlocks * kPoolBlock;
inline constexpr int kStages = 3;       // tiles of a warp in flight: 96 KiB a block of threads
inline constexpr int kPoolHeads = 64;   // most
inline constexpr int kChunkHeads = 32;  // whose dots are in registers; padded with zeros
inline constexpr int kMaxPoolBlocks = 2048;
inline constexpr int kBlockBytes = kPoolBlock * record(RecordId::IndexFp4).data_bytes;
static_assert(kBlockBytes == 32 * 16, "16 bytes a lane");

// Where a block of the pool lies, and how many of its positions are visible (0: absent).
struct PoolPlace {
    const uint8_t* codes;
    int32_t scales_at;  // from codes
    int32_t visible;
};

struct PoolHead {
    float scales[kIndexGroups];  // of the query
    float back[kIndexGroups];    // from a product of halves to that of the values
    float weight;
};

// Codes of a tile. 16 more bytes a block put two neighbouring keys of each of the four blocks, the
// rows of a matrix, into different banks.
struct alignas(16) KeyTile {
    uint8_t codes[kTileBlocks][kBlockBytes + 16];
};

struct KeyRing {
    KeyTile tiles[kPoolWarps][kStages];
};

struct PoolScoresShared {
    uint4 queries[kPoolHeads / 8 * kIndexGroups * 32];  // B fragments, by 8 heads, group and lane
    float2 folded[kPoolHeads / 2];                      // weights with exponents moved in
    PoolHead heads[kPoolHeads];
    bool safe;
};

// Pairs (0, 4), (1, 5), (2, 6), (3, 7) of a word of E2M1 codes as halves of 2^-14 times the values.
__device__ __forceinline__ void place_halves(uint32_t codes, uint32_t (&halves)[4]) {
    constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x0e000e00u;
    halves[0] = (codes << 12 & kSign) | (codes << 9 & kMagnitude);
    halves[1] = (codes << 8 & kSign) | (codes << 5 & kMagnitude);
    halves[2] = (codes << 4 & kSign) | (codes << 1 & kMagnitude);
    halves[3] = (codes & kSign) | (codes >> 3 & kMagnitude);
}

inline constexpr int kHalfBits = 14;       // placed halves are 2^-14 times the value
inline constexpr int kMostSpread = 20;     // query exponents below the largest that F16 holds
inline constexpr int kModerateQuery = 30;  // exponents, in absolute value
inline constexpr int kModerateKey = 60;

__device__ __forceinline__ int32_t exponent(uint32_t scales, int group) {
    return static_cast<int32_t>(scales >> (8 * group) & 0xff) - 127;
}
__device__ __forceinline__ float power_of_two(int32_t e) {  // of a normal number
    return bits_float(static_cast<uint32_t>(e + 127) << 23);
}

class PoolScorer {
  public:
    // places: the blocks of this block of threads, in shared memory.
    __device__ PoolScorer(const IndexScoresParams& p, const PoolPlace* places, int32_t num_blocks,
                          KeyRing& ring, PoolScoresShared& shared)
        : p_(p),
          places_(places),
          num_blocks_(num_blocks),
          ring_(ring),
          s_(shared),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32) {}

    // All threads of the block call. scores: f32 [8 * blocks], rounded up to whole tiles.
    __device__ void run(int64_t row, float* scores) {
        const int32_t tiles = (num_blocks_ + kTileBlocks - 1) / kTileBlocks;
        for (int i = 0; i < kStages; ++i) fetch(warp_ + i * kPoolWarps, i);
        uint32_t scales = load_scales(warp_);
        load_queries(row);
        int32_t stage = 0;
        for (int32_t tile = warp_; tile < tiles; tile += kPoolWarps) {
            const uint32_t own_scales = scales;
            scales = load_scales(tile + kPoolWarps);
            cute::cp_async_wait<kStages - 1>();
            __syncwarp();
            write_scores(tile, ring_.tiles[warp_][stage], own_scales, scores);
            __syncwarp();
            fetch(tile + kStages * kPoolWarps, stage);
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        cute::cp_async_wait<0>();
    }

  private:
    // Starts the copies of a tile's codes. Absent blocks are left out.
    __device__ void fetch(int32_t tile, int32_t stage) {
        KeyTile& to = ring_.tiles[warp_][stage];
#pragma unroll
        for (int i = 0; i < kTileBlocks; ++i) {
            const int32_t block = tile * kTileBlocks + i;
            if (block >= num_blocks_ || places_[block].visible == 0) continue;
            const cute::uint128_t* from =
                reinterpret_cast<const cute::uint128_t*>(places_[block].codes);
            cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
                from[lane_], reinterpret_cast<cute::uint128_t*>(to.codes[i])[lane_]);
        }
        cute::cp_async_fence();
    }

    // The scale word of key `lane` of a tile; exponents of 0 where it is absent.
    __device__ uint32_t load_scales(int32_t tile) const {
        const int32_t block = tile * kTileBlocks + lane_ / kPoolBlock;
        if (block >= num_blocks_ || places_[block].visible == 0) return 0x7f7f7f7fu;
        const uint8_t* scales = places_[block].codes + places_[block].scales_at;
        return __ldg(reinterpret_cast<const uint32_t*>(scales) + lane_ % kPoolBlock);
    }

    // Queries as F16 fragments, weights, and whether exponents are moderate.
    __device__ void load_queries(int64_t row) {
        const int32_t heads = p_.query.heads;
        const uint8_t* codes = p_.query.codes.row(row);
        const int32_t* scales = p_.query.scales_ue8m0.row(row);
        bool safe = true;
        const int32_t head = static_cast<int32_t>(threadIdx.x);
        if (head < kPoolHeads) {
            const uint32_t word = head < heads ? static_cast<uint32_t>(scales[head]) : 0x7f7f7f7fu;
            const float weight = head < heads ? head_weight(p_.weights, row, head) : 0.f;
            safe = set_head(head, word, weight);
        }
        safe = __syncthreads_and(safe);
        if (threadIdx.x == 0) s_.safe = safe;
        const int32_t chunks = (heads + kChunkHeads - 1) / kChunkHeads;
        const int32_t items = chunks * kChunkHeads / 8 * kIndexGroups * 32;
        for (int32_t i = threadIdx.x; i < items; i += kPoolThreads) {
            const int32_t h = i / (kIndexGroups * 32) * 8 + i % 32 / 4;
            const int32_t group = i / 32 % kIndexGroups;
            uint32_t halves[4] = {};
            if (h < heads) {
                const uint8_t* at = codes + int64_t{h} * (kIndexDims / 2) + group * 16 + i % 4 * 4;
                place_halves(*reinterpret_cast<const uint32_t*>(at), halves);
                const int32_t fold = safe ? exponent(scales[h], group) - largest(scales[h]) : 0;
                const __half2 factor = __float2half2_rn(power_of_two(kHalfBits + fold));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const __half2 value = __hmul2(reinterpret_cast<__half2&>(halves[j]), factor);
                    halves[j] = reinterpret_cast<const uint32_t&>(value);
                }
            }
            s_.queries[i] = {halves[0], halves[1], halves[2], halves[3]};
        }
        __syncthreads();
        if (threadIdx.x < kPoolHeads && !safe) {
            for (float& back : s_.heads[threadIdx.x].back) back = power_of_two(kHalfBits);
        }
        __syncthreads();
    }

    static __device__ int32_t largest(uint32_t scales) {
        return max(max(exponent(scales, 0), exponent(scales, 1)),
                   max(exponent(scales, 2), exponent(scales, 3)));
    }

    // False where the head's exponents, or its weight, are not moderate.
    __device__ bool set_head(int32_t head, uint32_t scales, float weight) {
        const int32_t top = largest(scales);
        bool safe = top <= kModerateQuery;
        PoolHead& out = s_.heads[head];
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            const int32_t e = exponent(scales, g);
            safe = safe && e >= -kModerateQuery && top - e <= kMostSpread;
            out.scales[g] = decode_ue8m0(static_cast<uint8_t>(scales >> (8 * g)));
            out.back[g] = safe ? power_of_two(kHalfBits + top - e) : 0.f;
        }
        out.weight = weight;
        const float size = fabsf(weight);
        safe = safe && (size == 0.f || (size >= power_of_two(-60) && size <= power_of_two(60)));
        float* folded = reinterpret_cast<float*>(s_.folded);
        folded[head] = safe ? mul_rn(weight, power_of_two(top + kHalfBits)) : 0.f;
        return safe;
    }

    // A lane's keys: 2 i + lane / 4 % 2 of block lane / 8, i below 4.
    static constexpr int kLaneKeys = 4;
    __device__ int32_t lane_key(int i) const { return lane_ / 8 * 8 + 2 * i + lane_ / 4 % 2; }

    __device__ void write_scores(int32_t tile, const KeyTile& keys, uint32_t scales,
                                 float* scores) const {
        uint32_t key_scales[kLaneKeys];
        bool moderate = s_.safe;
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            const int32_t e = exponent(scales, g);
            moderate = moderate && e >= -kModerateKey && e <= kModerateKey;
        }
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            key_scales[i] = __shfl_sync(0xffffffffu, scales, lane_key(i));
        }
        float sums[kLaneKeys] = {};
        if (__all_sync(0xffffffffu, moderate)) {
            add_heads<true>(keys, key_scales, sums);
        } else {
            add_heads<false>(keys, key_scales, sums);
        }
        float score = 0.f;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            float sum = add_rn(sums[i], __shfl_xor_sync(0xffffffffu, sums[i], 1));
            sum = add_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            if (i == lane_ % 4) score = sum;
        }
        const int32_t key = lane_key(lane_ % 4);
        const int32_t block = tile * kTileBlocks + key / kPoolBlock;
        const bool present = block < num_blocks_ && key % kPoolBlock < places_[block].visible;
        scores[tile * kTileKeys + key] = present ? canonical_nan(score) : bits_float(kNanBits);
    }

    // Adds the weighted dots of all heads, in ascending head: lane 4 g + t has heads 2t, 2t + 1 of
    // each eight.
    template <bool kSafe>
    __device__ __forceinline__ void add_heads(const KeyTile& keys,
                                              const uint32_t (&key_scales)[kLaneKeys],
                                              float (&sums)[kLaneKeys]) const {
        constexpr int kEights = kChunkHeads / 8;
        // Of matrix i, this lane names row r: key 2 i + r % 2 of block r / 2.
        const int32_t row = lane_ % 8, matrix = lane_ / 8;
        const uint8_t* own_row = &keys.codes[row / 2][64 * (2 * matrix + row % 2)];
        for (int32_t first = 0; 8 * first < p_.query.heads; first += kEights) {
            float dots[kEights][kLaneKeys][2] = {};
#pragma unroll 1
            for (int g = 0; g < kIndexGroups; ++g) {
                uint32_t words[kLaneKeys], halves[kLaneKeys][4];
                load_matrices(own_row + 16 * g, words);
                float scale[kLaneKeys];
#pragma unroll
                for (int i = 0; i < kLaneKeys; ++i) {
                    place_halves(words[i], halves[i]);
                    const uint32_t byte = key_scales[i] >> (8 * g) & 0xff;
                    scale[i] =
                        kSafe ? bits_float(byte << 23) : decode_ue8m0(static_cast<uint8_t>(byte));
                }
#pragma unroll
                for (int n = 0; n < kEights; ++n) {
                    const uint4 b = s_.queries[((first + n) * kIndexGroups + g) * 32 + lane_];
#pragma unroll
                    for (int i = 0; i < kLaneKeys; i += 2) {
                        const uint32_t low[4] = {halves[i][0], halves[i + 1][0], halves[i][1],
                                                 halves[i + 1][1]};
                        const uint32_t high[4] = {halves[i][2], halves[i + 1][2], halves[i][3],
                                                  halves[i + 1][3]};
                        float c[4] = {};
                        mma_f16(c, low, b.x, b.y);
                        mma_f16(c, high, b.z, b.w);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            combine<kSafe>(g, 8 * (first + n) + lane_ % 4 * 2 + e % 2, c[e],
                                           scale[i + e / 2], dots[n][i + e / 2][e % 2]);
                        }
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kEights; ++n) {
                weigh<kSafe>(first + n, dots[n], sums);
            }
        }
    }

    template <bool kSafe>
    __device__ __forceinline__ void combine(int g, int32_t head, float product, float key_scale,
                                            float& dot) const {
        if (!kSafe) {
            product = mul_rn(product, s_.heads[head].back[g]);
            key_scale = mul_rn(s_.heads[head].scales[g], key_scale);
        }
        dot = fma_rn(product, key_scale, dot);  // the first: +0 instead of -0, which no score shows
    }

    template <bool kSafe>
    __device__ __forceinline__ void weigh(int32_t eight, const float (&dots)[kLaneKeys][2],
                                          float (&sums)[kLaneKeys]) const {
        const int32_t head = 8 * eight + lane_ % 4 * 2;
        const float2 folded = s_.folded[head / 2];
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            if (kSafe) {  // no NaN: fmaxf is relu
                sums[i] = fma_rn(folded.x, fmaxf(dots[i][0], 0.f), sums[i]);
                sums[i] = fma_rn(folded.y, fmaxf(dots[i][1], 0.f), sums[i]);
            } else {  // heads beyond the last have no part in a NaN
                if (head < p_.query.heads) {
                    sums[i] = accumulate_head(sums[i], s_.heads[head].weight, dots[i][0]);
                }
                if (head + 1 < p_.query.heads) {
                    sums[i] = accumulate_head(sums[i], s_.heads[head + 1].weight, dots[i][1]);
                }
            }
        }
    }

    const IndexScoresParams& p_;
    const PoolPlace* places_;
    const int32_t num_blocks_;
    KeyRing& ring_;
    PoolScoresShared& s_;
    const int32_t warp_, lane_;
};

}  // namespace flash_csa::sm90
