// Scores of folded keys (score_folded.cuh) for four rows at a time: columns of an MMA are dealt so
// that lane t of a quad gets the heads of row t alone. Its sums then need no other lane, and the
// keys are dealt so that it has the scores of four neighbours.
#pragma once

#include "sm90/common/fresh.cuh"
#include "sm90/index/score_folded.cuh"

namespace flash_csa::sm90 {

__device__ __forceinline__ float4 canonical_nans(const float4& scores) {
    return {canonical_nan(scores.x), canonical_nan(scores.y), canonical_nan(scores.z),
            canonical_nan(scores.w)};
}

// The heads of a block, of one row a lane. Chains of core/scoring.h: p_t has heads 2 t, 2 t + 1
// of every eight.
template <int kSums>
__device__ __forceinline__ void add_quad_heads(const uint32_t (&sums)[kSums], const float2* weights,
                                               float (&partials)[2][kHeadLanes]) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
        const float2 weight = weights[4 * i];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& partial = partials[half][i % kHeadLanes];
            const float first = __saturatef(__uint_as_float(sums[4 * i + 2 * half]));
            const float second = __saturatef(__uint_as_float(sums[4 * i + 2 * half + 1]));
            partial = fma_rn(weight.x, first, partial);
            partial = fma_rn(weight.y, second, partial);
        }
    }
}

// Three rows or more. While the heads of one tile are added, the MMAs of the other run.
// kTwoBlocks: of every row.
template <class Config, bool kTwoBlocks>
__device__ __forceinline__ void score_quads(const Segment& segment, const ScorePlan& plan,
                                            const ScoreShared<Config>& shared, const PassKeys& keys,
                                            typename Config::Sink& sink) {
    constexpr int kColumns = 4 * Config::kQuadHeads, kSums = kColumns / 2;
    constexpr uint32_t kBlockStep = kColumns * kQueryBytes >> 4;  // of descriptors
    const uint32_t lane = fresh(static_cast<int>(threadIdx.x)) % 32;
    const uint32_t units = query_descriptor(shared.queries.units);
    const float2* weights =
        reinterpret_cast<const float2*>(shared.queries.folded_weights) + lane % 4;
    const int32_t own = keys.first + static_cast<int32_t>(lane / 4 * 4);
    const int32_t column = keys.column - keys.own + own;
    FoldedFragment fragments[kPassTiles];
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; ++i) {
        fragments[i / 2].set(i % 2, FoldedGroup(keys, own + i));
    }
    const int32_t blocks = plan.padded_heads / Config::kQuadHeads;  // of a row
    const int32_t quads = (segment.rows + 3) / 4;
    const int32_t last = quads * blocks - 1;
    float partials[kPassTiles][2][kHeadLanes] = {};
    const auto start = [&](int32_t block) {
        return __shfl_sync(~0u, units + block * kBlockStep, 0);  // uniform
    };
    const auto hand_over = [&](int32_t quad) {
        float scores[kPassTiles][2];
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float (&p)[kHeadLanes] = partials[tile][half];
                scores[tile][half] = add_rn(add_rn(p[0], p[1]), add_rn(p[2], p[3]));
#pragma unroll
                for (float& partial : partials[tile][half]) partial = 0.0f;
            }
        }
        const float4 rest = *reinterpret_cast<const float4*>(keys.stage->rest + own);
        const int32_t row = 4 * quad + static_cast<int32_t>(lane % 4);
        const bool here = row < segment.rows;
        const float4 four = {mul_rn(scores[0][0], rest.x), mul_rn(scores[0][1], rest.y),
                             mul_rn(scores[1][0], rest.z), mul_rn(scores[1][1], rest.w)};
        const uint32_t global_row = segment.first_row + row;
        sink.put_four(global_row, column, four, shared.fixed->counts[row] - column, here);
    };
    int32_t in_row = 0, quad = 0;
    const auto end_block = [&] {
        weights += kColumns / 2;
        if (!kTwoBlocks && ++in_row < blocks) return;
        hand_over(quad++);
        in_row = 0;
    };
    for (int32_t block = 0; block <= last; block += 2) {
        const uint32_t first = start(block);
        const uint32_t second = kTwoBlocks ? first + kBlockStep : start(min(block + 1, last));
        uint32_t sums[kPassTiles][kSums] = {};
        start_folded<kColumns>(fragments[0], first, sums[0]);
        start_folded<kColumns>(fragments[1], first, sums[1]);
        finish_folded<1>(sums[0]);
        add_quad_heads(sums[0], weights, partials[0]);
        start_folded<kColumns>(fragments[0], second, sums[0]);
        finish_folded<1>(sums[1]);
        add_quad_heads(sums[1], weights, partials[1]);
        start_folded<kColumns>(fragments[1], second, sums[1]);
        if constexpr (kTwoBlocks) {
            weights += kColumns / 2;
        } else {
            end_block();
        }
        finish_folded<1>(sums[0]);
        add_quad_heads(sums[0], weights, partials[0]);
        finish_folded<0>(sums[1]);
        add_quad_heads(sums[1], weights, partials[1]);
        end_block();
    }
}

}  // namespace flash_csa::sm90
