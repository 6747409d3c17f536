// Scores of 32 keys that do not fold, by a warp alone: groups have sums of their own. Rare, and
// slow beside row_scores.cuh; out of its loop, so that no registers are held for it.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "sm90/common/fresh.cuh"
#include "sm90/index/row_keys.cuh"

namespace flash_csa::sm90 {

// Of 32 keys of a chunk: what a lane knows of the one whose score it hands over.
struct LaneKey {
    int32_t key;  // of the chunk
    float rest;   // what is left of the scales; NaN for an entry on no page
};

// v of bytes 64 + v.
__device__ __forceinline__ uint32_t without_offset(uint32_t bytes) {
    const uint32_t out = bytes ^ kKeyOffset;  // bit 6: the sign
    return out | (out & kKeyOffset) << 1;
}

// Keys g and g + 8 of a tile, g = lane / 4: their rows of A. A lane's words are of one group.
struct ApartKeys {
    const uint32_t* words;  // of the first one, [kFoldedSteps]
    uint32_t above[2];      // exponents of the groups - the lowest

    __device__ __forceinline__ ApartKeys(const RowChunk& chunk, int32_t first) {
        const int32_t at = 4 * first + threadIdx.x % 32;
        words = reinterpret_cast<const uint32_t*>(chunk.bytes) + kFoldedSteps * at;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t scales = chunk.scales(at / 4 + 8 * half);
            above[half] = scales - lowest_scale(scales) * 0x01010101u;
        }
    }
    // Half units, of a K step.
    __device__ __forceinline__ void load(int step, uint32_t (&units)[4]) const {
        const OffsetUnits table = OffsetUnits::of(0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const IntegerWord both =
                table.word(words[8 * kIndexGroups * kFoldedSteps * half + step]);
            units[half] = without_offset(both.low);
            units[2 + half] = without_offset(both.high);
        }
    }
    __device__ __forceinline__ float factor(int half, int group) const {
        return power_of_two(127 + scale_byte(above[half], group));
    }
};

// Adds eight heads of one row, of which a lane has group `lane % 4` of head `lane / 4`. Sums start
// at an offset, so that they are not negative: less it they are dots in quarters, taken for
// subnormal floats.
__device__ __forceinline__ void add_apart(const ApartKeys& keys, const RowHead& head,
                                          float (&partials)[2]) {
    constexpr uint32_t kOffset = 1u << 20;
    // Fresh: words with and without zeros are not kept for all groups.
    const int32_t lane = fresh(static_cast<int>(threadIdx.x % 32));
    const HalfUnits table = head.table(lane % 4);
    uint32_t sums[kIndexGroups][4];
#pragma unroll
    for (auto& group : sums) group[0] = group[1] = group[2] = group[3] = kOffset;
#pragma unroll
    for (int step = 0; step < kFoldedSteps; ++step) {
        uint32_t units[4];
        keys.load(step, units);
        const IntegerWord query = head.convert(step, table);
#pragma unroll
        for (int group = 0; group < kIndexGroups; ++group) {
            const bool own = lane % 4 == group;
            uint32_t (&d)[4] = sums[group];
            cute::SM80_16x8x32_S32S8S8S32_TN::fma(
                d[0], d[1], d[2], d[3], own ? units[0] : 0, own ? units[1] : 0, own ? units[2] : 0,
                own ? units[3] : 0, query.low, query.high, d[0], d[1], d[2], d[3]);
        }
    }
    const float weight = head.folded_weight();
    const float weights[2] = {__shfl_sync(~0u, weight, lane % 4 * 8),
                              __shfl_sync(~0u, weight, lane % 4 * 8 + 4)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float dot = 0.0f;
#pragma unroll
        for (int group = 0; group < kIndexGroups; ++group) {
            const float sum = add_rn(__uint_as_float(sums[group][i]), -__uint_as_float(kOffset));
            const float factor = keys.factor(i / 2, group);
            dot = group == 0 ? mul_rn(sum, factor) : fma_rn(sum, factor, dot);
        }
        partials[i / 2] = fma_rn(weights[i % 2], __saturatef(dot), partials[i / 2]);
    }
}

// The score of a key as core/scoring.h writes it.
__device__ __forceinline__ float score_plainly(const IndexScoresParams& p, int64_t row,
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
            // All are computed: one chosen by its index would lie in local memory.
            const float sum = accumulate_head(partials[lane], head.weight, dot);
            partials[lane] = lane == head_lane(h) ? sum : partials[lane];
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
        const ApartKeys keys(chunk, first + 16 * tile);
#pragma unroll 1
        for (int32_t from = 0; from < p.query.heads; from += 8) {
            RowHead head;
            head.load(p, row, from + lane / 4, lane % 4);
            head.finish(p);
            add_apart(keys, head, partials[tile]);
        }
    }
    return mul_rn(reduce_quad(partials), own.rest);
}

}  // namespace flash_csa::sm90
