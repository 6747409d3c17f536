// Scores of 32 keys that do not fold, by a warp alone: groups have sums of their own. Rare, and
// slow beside score_single.cuh; out of its loop, so that no registers are held for it.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "sm90/index/row_keys.cuh"

namespace flash_csa::sm90 {

// Of 32 keys of a chunk: what a lane knows of the one whose score it hands over.
struct LaneKey {
    int32_t key;  // of the chunk
    float rest;   // what is left of the scales; NaN for an entry on no page
    bool folds;   // all 32 keys
};

// v of bytes 64 + v.
__device__ __forceinline__ uint32_t without_offset(uint32_t bytes) {
    const uint32_t out = bytes ^ kKeyOffset;  // bit 6: the sign
    return out | (out & kKeyOffset) << 1;
}

// As A of four MMAs: half units of rows g and g + 8 of a tile. A lane's words are of one group.
struct ApartKeys {
    uint32_t units[kFoldedSteps][4];
    float factors[2][kIndexGroups];  // powers of two of the groups, the least is 1

    __device__ __forceinline__ void load(const RowChunk& chunk, int32_t first) {
        const int32_t lane = threadIdx.x % 32;
        const OffsetUnits table = OffsetUnits::of(0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t at = 4 * (first + 8 * half) + lane;
            const uint4 raw = reinterpret_cast<const uint4*>(chunk.bytes)[at];
            const uint32_t words[kFoldedSteps] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int step = 0; step < kFoldedSteps; ++step) {
                const uint32_t word = words[step], opposite = word ^ 0x88888888u;
                units[step][half] = without_offset(table.bytes(word, opposite));
                units[step][2 + half] = without_offset(table.bytes(word >> 16, opposite >> 16));
            }
            const uint32_t scales = chunk.scales(at / 4);
            const int32_t lowest = lowest_scale(scales);
#pragma unroll
            for (int group = 0; group < kIndexGroups; ++group) {
                factors[half][group] = power_of_two(127 + scale_byte(scales, group) - lowest);
            }
        }
    }
};

// Adds eight heads of one row, group `lane % 4` of head `lane / 4` in `queries`. Sums start at an
// offset, so that they are not negative: less it they are dots in quarters, taken for subnormal
// floats.
__device__ __forceinline__ void add_apart(const ApartKeys& keys,
                                          const IntegerWord (&queries)[kFoldedSteps],
                                          const float (&weights)[2], float (&partials)[2]) {
    constexpr uint32_t kOffset = 1u << 20;
    float dots[4];
#pragma unroll
    for (int group = 0; group < kIndexGroups; ++group) {
        const bool own = threadIdx.x % 4 == group;
        uint32_t d[4] = {kOffset, kOffset, kOffset, kOffset};
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = own ? keys.units[step][i] : 0;
            cute::SM80_16x8x32_S32S8S8S32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3],
                                                  queries[step].low, queries[step].high, d[0], d[1],
                                                  d[2], d[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float sum = add_rn(__uint_as_float(d[i]), -__uint_as_float(kOffset));
            const float factor = keys.factors[i / 2][group];
            dots[i] = group == 0 ? mul_rn(sum, factor) : fma_rn(sum, factor, dots[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        partials[i / 2] = fma_rn(weights[i % 2], __saturatef(dots[i]), partials[i / 2]);
    }
}

// The score of a key as core/scoring.h writes it.
static __device__ __noinline__ float score_plainly(const IndexScoresParams& p, int64_t row,
                                                   const uint8_t* codes, const uint8_t* scales) {
    Fp4::Key key;
    Fp4::load_key(codes, scales, &key);
    float partials[kHeadLanes] = {};
#pragma unroll 1
    for (int32_t h = 0; h < p.query.heads; ++h) {
        Fp4::Head head;
        Fp4::load_head(p, row, h, &head);
        const float dot = Fp4::dot(key, head);
#pragma unroll
        for (int lane = 0; lane < kHeadLanes; ++lane) {
            if (lane == head_lane(h)) {
                partials[lane] = accumulate_head(partials[lane], head.weight, dot);
            }
        }
    }
    return combine_lanes(partials);
}

// first: of the keys, in the chunk, of which `visible` are.
__device__ __forceinline__ float score_apart(const IndexScoresParams& p, int64_t row,
                                             bool row_folds, const RowChunk& chunk, int32_t first,
                                             int32_t visible, const LaneKey& own) {
    const bool read = own.key < visible && !isnan(own.rest);
    const bool plain = __all_sync(~0u, !read || is_plain(odd_key_bits(chunk.scales(own.key))));
    if (!row_folds || !plain) {
        const float score = score_plainly(p, row, chunk.bytes + own.key * kKeyBytes,
                                          chunk.bytes + kChunkCodes + own.key * kScaleBytes);
        return isnan(own.rest) ? own.rest : score;
    }
    const int32_t lane = threadIdx.x % 32;
    float partials[kPassTiles][2] = {};
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        ApartKeys keys;
        keys.load(chunk, first + 16 * tile);
#pragma unroll 1
        for (int32_t from = 0; from < p.query.heads; from += 8) {
            RowHead head;
            head.load(p, row, from + lane / 4, lane % 4);
            IntegerWord queries[kFoldedSteps];
            head.convert(lane % 4, queries);
            const float weight = head.folded_weight();
            const float weights[2] = {__shfl_sync(~0u, weight, lane % 4 * 8),
                                      __shfl_sync(~0u, weight, lane % 4 * 8 + 4)};
            add_apart(keys, queries, weights, partials[tile]);
        }
    }
    return mul_rn(reduce_quad(partials), own.rest);
}

}  // namespace flash_csa::sm90
