// Scores of a unit of keys whose groups have exponents that differ by at most kMaxIntegerFold, for
// such queries: powers of two are folded into integers, so that one accumulator takes all groups.
// 32-bit sums of bytes are exact (the tensor cores' sums of E4M3 are not: they keep 13 bits behind
// the largest term). Where a sum of integers is exact, every step of core/scoring.h is, too:
//
//   p_t   = fma(w, max(dot, 0), p_t)                       dot: taken for a subnormal float
//   score = ((p0 + p1) + (p2 + p3)) * 2^e
#pragma once

#include "sm90/index/unit_keys.cuh"

namespace flash_csa::sm90 {

template <int kHeads>
struct IntegerMma;
template <>
struct IntegerMma<8> : cute::SM90::GMMA::MMA_64x8x32_S32S8S8_RS_TN {};
template <>
struct IntegerMma<16> : cute::SM90::GMMA::MMA_64x16x32_S32S8S8_RS_TN {};
template <>
struct IntegerMma<32> : cute::SM90::GMMA::MMA_64x32x32_S32S8S8_RS_TN {};

// The codes of a tile as integers, exponents folded. Without signs: positive and negative values
// apart, the latter to be multiplied by negated queries; the tensor cores have time for both, and
// the conversion saves two instructions of nine.
template <bool kSigned>
struct FoldedFragment {
    uint32_t plus[kIndexGroups][4];
    uint32_t minus[kSigned ? 1 : kIndexGroups][4];
};

template <bool kSigned>
__device__ __forceinline__ void load_folded(const UnitKeys& keys, int32_t tile,
                                            FoldedFragment<kSigned>* out) {
    const uint32_t powers[2] = {keys.factors[4 * tile].w, keys.factors[4 * tile + 2].w};
    for_each_word(*keys.stage, tile, [&](uint32_t codes, int g, int half) {
        const HalfUnits table(powers[half] >> (8 * g) & 0xffu);
        const IntegerWord plus = positive_units(codes, table), less = negative_units(codes, table);
        if constexpr (kSigned) {
            out->plus[g][half] = signed_units(plus.low, less.low);
            out->plus[g][2 + half] = signed_units(plus.high, less.high);
        } else {
            out->plus[g][half] = plus.low;
            out->plus[g][2 + half] = plus.high;
            out->minus[g][half] = less.low;
            out->minus[g][2 + half] = less.high;
        }
    });
}

// Starts the dots of a tile with kHeads queries.
template <class Config, bool kSigned>
__device__ __forceinline__ void start_folded(const FoldedFragment<kSigned>& keys, uint32_t units,
                                             uint32_t minus, uint32_t (&sums)[Config::kSums]) {
    using Step = IntegerMma<Config::kHeads>;
    constexpr std::make_index_sequence<Config::kSums> kAll;
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) cute::warpgroup_fence_operand(sums[i]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
        const uint32_t at = g * kIndexGroupDims >> 4;
        mma_step<Step>(keys.plus[g], whole_descriptor(units + at), sums, g > 0, kAll);
        if constexpr (!kSigned) {
            mma_step<Step>(keys.minus[g], whole_descriptor(minus + at), sums, true, kAll);
        }
    }
    cute::warpgroup_commit_batch();
}

// A dot that is not negative is a subnormal float of as many 2^-149, which a fused multiply-add
// takes like any other: no conversion.
template <class Config>
__device__ __forceinline__ void add_folded_heads(const uint32_t (&sums)[Config::kSums],
                                                 const float2* weights, float (&partials)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kHeads / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float weight = c == 0 ? weights[i].x : weights[i].y;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t dot = static_cast<int32_t>(sums[4 * i + 2 * half + c]);
                partials[half] = fma_rn(weight, __int_as_float(max(dot, 0)), partials[half]);
            }
        }
    }
}

// Adds the heads of a tile whose dots are done, while those of kRunning later tiles may run.
template <class Config, int kRunning>
__device__ __forceinline__ void finish_folded(uint32_t (&sums)[Config::kSums],
                                              const float2* weights, float (&partials)[2]) {
    cute::warpgroup_wait<kRunning>();
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) cute::warpgroup_fence_operand(sums[i]);
    add_folded_heads<Config>(sums, weights, partials);
}

// The same as score_groups where the exponents of all groups are folded into the integers of
// queries and keys: one accumulator.
template <class Config, bool kSigned>
__device__ __forceinline__ void score_folded(const Segment& segment, const ScorePlan& plan,
                                             const ScoreShared<Config>& shared,
                                             const UnitKeys& keys, typename Config::Sink& sink) {
    static_assert(kUnitTiles == 2);
    const uint32_t units = query_descriptor(shared.queries.units);
    const uint32_t minus = kSigned ? 0 : query_descriptor(shared.queries.minus);
    const float2* all_weights =
        reinterpret_cast<const float2*>(shared.queries.folded_weights) + threadIdx.x % 4;
    FoldedFragment<kSigned> fragments[kUnitTiles];
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) load_folded(keys, tile, &fragments[tile]);
    const float exponent =
        keys.present ? power_of_two(scale_range(keys.scales[keys.own]).low + kFoldedScoreExponent)
                     : bits_float(kNanBits);
    const int32_t heads = segment.rows * plan.padded_heads;
    int32_t row = 0, row_end = plan.padded_heads;
    float partials[kUnitTiles][2] = {};
    for (int32_t head = 0; head < heads; head += Config::kHeads) {
        const uint32_t at = head * (kQueryBytes >> 4);
        uint32_t sums[kUnitTiles][Config::kSums];
#pragma unroll
        for (int tile = 0; tile < kUnitTiles; ++tile) {
            start_folded<Config, kSigned>(fragments[tile], units + at, minus + at, sums[tile]);
        }
        float2 weights[Config::kHeads / 8];
#pragma unroll
        for (int i = 0; i < Config::kHeads / 8; ++i) weights[i] = all_weights[head / 2 + 4 * i];
        finish_folded<Config, 1>(sums[0], weights, partials[0]);
        finish_folded<Config, 0>(sums[1], weights, partials[1]);
        if (head + Config::kHeads != row_end) continue;
        put_score<Config>(shared, segment, row, keys.column,
                          mul_rn(reduce_quad(partials), exponent), sink);
        partials[0][0] = partials[0][1] = partials[1][0] = partials[1][1] = 0.0f;
        ++row;
        row_end += plan.padded_heads;
    }
}

}  // namespace flash_csa::sm90
