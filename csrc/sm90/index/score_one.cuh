// Scores of folded keys (score_folded.cuh) for one row with as many heads as an MMA takes. Positive
// and negative codes are apart, the latter to be multiplied by negated queries: the tensor cores
// have time for both, and a conversion saves six instructions a word.
//
// A tile is converted in halves of its K steps; the MMAs of one run while the next is converted.
//
//   convert   0 low | 0 high | 1 low | 1 high |
//   MMA             | 0 low  | 0 high | 1 low | 1 high |
//   add heads                                | tile 0 | tile 1
#pragma once

#include "sm90/index/score_folded.cuh"

namespace flash_csa::sm90 {

constexpr int kHalfSteps = kFoldedSteps / 2;

struct HalfFragment {
    uint32_t plus[kHalfSteps][4], minus[kHalfSteps][4];
};

// K steps [part * kHalfSteps, (part + 1) * kHalfSteps) of a tile: one group of two keys.
__device__ __forceinline__ HalfFragment convert_half(const FoldedGroup (&groups)[2], int part) {
    HalfFragment out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 0; step < kHalfSteps; ++step) {
            const uint32_t word = groups[half].words[part * kHalfSteps + step];
            const IntegerWord plus = positive_units(word, groups[half].table);
            const IntegerWord less = negative_units(word, groups[half].table);
            out.plus[step][half] = plus.low;
            out.plus[step][2 + half] = plus.high;
            out.minus[step][half] = less.low;
            out.minus[step][2 + half] = less.high;
        }
    }
    return out;
}

template <int kHeads>
__device__ __forceinline__ void start_half(const HalfFragment& keys, int part, uint32_t units,
                                           uint32_t minus, uint32_t (&sums)[kHeads / 2]) {
    using Mma = IntegerMma<kHeads>;
    constexpr std::make_index_sequence<kHeads / 2> kAll;
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kHalfSteps; ++step) {
        const int k = part * kHalfSteps + step;
        const uint32_t at = 32 * k >> 4;
        mma_step<Mma>(keys.plus[step], whole_descriptor(units + at), sums, k > 0, kAll);
        mma_step<Mma>(keys.minus[step], whole_descriptor(minus + at), sums, true, kAll);
    }
    cute::warpgroup_commit_batch();
}

template <class Config>
__device__ __forceinline__ void score_one(const Segment& segment, const ScoreShared<Config>& shared,
                                          const PassKeys& keys, typename Config::Sink& sink) {
    constexpr int kHeads = Config::kHeads;
    const uint32_t units = query_descriptor(shared.queries.units);
    const uint32_t minus = query_descriptor(shared.queries.minus);
    uint32_t sums[kPassTiles][Config::kSums] = {};
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
        cute::warpgroup_fence_operand(sums[0][i]);
        cute::warpgroup_fence_operand(sums[1][i]);
    }
    const FoldedGroup first[2] = {{keys, keys.at(0, 0)}, {keys, keys.at(0, 1)}};
    const HalfFragment first_low = convert_half(first, 0);
    start_half<kHeads>(first_low, 0, units, minus, sums[0]);
    const HalfFragment first_high = convert_half(first, 1);
    start_half<kHeads>(first_high, 1, units, minus, sums[0]);
    const FoldedGroup second[2] = {{keys, keys.at(1, 0)}, {keys, keys.at(1, 1)}};
    const HalfFragment second_low = convert_half(second, 0);
    start_half<kHeads>(second_low, 0, units, minus, sums[1]);
    float2 weights[kHeads / 8];
    load_weights(shared, 0, weights);
    finish_folded<1>(sums[0]);
    const HalfFragment second_high = convert_half(second, 1);
    start_half<kHeads>(second_high, 1, units, minus, sums[1]);
    float partials[kPassTiles][2] = {};
    add_folded_heads<kHeads>(sums[0], 0, weights, partials[0]);
    finish_folded<0>(sums[1]);
    add_folded_heads<kHeads>(sums[1], 0, weights, partials[1]);
    const float score = canonical_nan(mul_rn(reduce_quad(partials), keys.stage->rest[keys.own]));
    sink.put(segment.first_row, keys.column, score, keys.column < segment.count);
}

}  // namespace flash_csa::sm90
