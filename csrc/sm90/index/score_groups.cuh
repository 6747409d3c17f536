// Scores of a unit of keys for any scales: a K step of the tensor cores is one scale group, E4M3 by
// E4M3, and has an accumulator of its own, so that every dot of a group is exact. Sums over groups
// and heads are those of core/scoring.h, bit for bit:
//
//   dot   = fma(k3, r3, fma(k2, r2, fma(k1, r1, k0)))      r_g: powers of two of the key
//   p_t   = fma(w, dot + |dot|, p_t)                       w: weight and powers of two of the head
//   score = ((p0 + p1) + (p2 + p3)) * 2^e                  t: lane in the quad, e: of the key
//
// Powers of two leave the sums where no term leaves the normal range by that: where all scales of
// the unit and of the row are plain. Elsewhere the sums are taken as core/scoring.h writes them.
#pragma once

#include "sm90/index/unit_keys.cuh"

namespace flash_csa::sm90 {

template <int kHeads>
struct FloatMma;
template <>
struct FloatMma<8> : cute::SM90::GMMA::MMA_64x8x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct FloatMma<16> : cute::SM90::GMMA::MMA_64x16x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct FloatMma<32> : cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_RS_TN<> {};

// The codes of 16 keys of a warp, ready as A of four MMA steps.
struct KeyFragment {
    uint32_t a[kIndexGroups][4];
};

// Starts the dots of a tile with kHeads queries, one accumulator a scale group.
template <class Config>
__device__ __forceinline__ void start_dots(const KeyFragment& keys, uint32_t queries,
                                           float (*sums)[Config::kGroupSums]) {
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kGroupSums; ++i) cute::warpgroup_fence_operand(sums[g][i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
        mma_step<FloatMma<Config::kGroupHeads>>(
            keys.a[g], whole_descriptor(queries + (g * kIndexGroupDims >> 4)), sums[g], false,
            std::make_index_sequence<Config::kGroupSums>{});
    }
    cute::warpgroup_commit_batch();
}

template <class Config>
__device__ __forceinline__ void finish_dots(float (*sums)[Config::kGroupSums]) {
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kGroupSums; ++i) cute::warpgroup_fence_operand(sums[g][i]);
    }
}

// Adds kHeads heads to the partial sums of a thread's two keys. The MMA leaves head 8 i + 2 t + c
// of key `half` in element 4 i + 2 half + c; weights[i] are those of its heads c = 0, 1.
template <class Config>
__device__ __forceinline__ void add_plain_heads(const float (*sums)[Config::kGroupSums],
                                                const float2* weights, const float3 (&factors)[2],
                                                float (&partials)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kGroupHeads / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float weight = c == 0 ? weights[i].x : weights[i].y;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = 4 * i + 2 * half + c;
                float dot = fma_rn(sums[1][at], factors[half].x, sums[0][at]);
                dot = fma_rn(sums[2][at], factors[half].y, dot);
                dot = fma_rn(sums[3][at], factors[half].z, dot);
                partials[half] = fma_rn(weight, add_rn(dot, fabsf(dot)), partials[half]);
            }
        }
    }
}

// The same as core/scoring.h writes it, from the raw scales and weights. `first` is the first head.
template <class Config>
__device__ __forceinline__ void add_heads(const IndexScoresParams& p, int64_t row, int32_t first,
                                          const float (*accumulators)[Config::kGroupSums],
                                          const uint32_t (&key_scales)[2], float (&partials)[2]) {
    float sums[kIndexGroups][Config::kGroupSums];  // indexed at run time: a copy, in local memory
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kGroupSums; ++i) sums[g][i] = accumulators[g][i];
    }
#pragma unroll 1
    for (int i = 0; i < Config::kGroupHeads / 4; ++i) {
        const int32_t head = first + 8 * (i / 2) + threadIdx.x % 4 * 2 + i % 2;
        if (head >= p.query.heads) break;
        const uint32_t scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
        const ByteRange range = scale_range(scales);
        const float weight = head_weight(p.weights, row, head);
        for (int half = 0; half < 2; ++half) {
            int32_t quarters[kIndexGroups];
            float products[kIndexGroups];
            for (int g = 0; g < kIndexGroups; ++g) {
                const int32_t fold = head_fold(scales, range, g) + kPlacedExponent;
                const float sum = sums[g][4 * (i / 2) + 2 * half + i % 2];
                quarters[g] = static_cast<int32_t>(sum * power_of_two(127 + 2 - fold));
                products[g] = scale_product(static_cast<uint8_t>(scales >> (8 * g)),
                                            static_cast<uint8_t>(key_scales[half] >> (8 * g)));
            }
            partials[half] =
                accumulate_head(partials[half], weight, combine_groups(quarters, products));
        }
    }
}

// Powers of two of groups 1, 2, 3 of a plain key, relative to that of group 0.
__device__ __forceinline__ float3 relative_factors(uint32_t scales) {
    const uint32_t relative = scales + (kUnitScales - (scales & 0xffu) * 0x01010101u);
    return {__uint_as_float(relative << 15 & kInfBits), __uint_as_float(relative << 7 & kInfBits),
            __uint_as_float(relative >> 1 & kInfBits)};
}

// Partial sums of a tile and one row, heads [first, first + kGroupHeads). kPlain: scales of keys
// and row are.
template <class Config, bool kPlain>
__device__ __forceinline__ void add_block(const IndexScoresParams& p, const PassKeys& keys,
                                          int tile, const KeyFragment& fragment,
                                          const QueryTile& queries, int32_t head, int64_t row,
                                          int32_t first, float (&partials)[2]) {
    const uint32_t codes = query_descriptor(queries.codes) + head * (kQueryBytes >> 4);
    float sums[kIndexGroups][Config::kGroupSums];
    start_dots<Config>(fragment, codes, sums);
    const uint32_t scales[2] = {keys.scales(keys.at(tile, 0)), keys.scales(keys.at(tile, 1))};
    if constexpr (kPlain) {
        const float2* source =
            reinterpret_cast<const float2*>(queries.weights + head) + threadIdx.x % 4;
        float2 weights[Config::kGroupHeads / 8];
#pragma unroll
        for (int i = 0; i < Config::kGroupHeads / 8; ++i) weights[i] = source[4 * i];
        const float3 factors[2] = {relative_factors(scales[0]), relative_factors(scales[1])};
        finish_dots<Config>(sums);
        add_plain_heads<Config>(sums, weights, factors, partials);
    } else {
        finish_dots<Config>(sums);
        add_heads<Config>(p, row, first, sums, scales, partials);
    }
}

// Word lane % 4 of every group of a row of A is one of the four that ldmatrix gives. The rows lie
// 64 bytes apart, so that four of them meet in each bank.
__device__ __forceinline__ void load_fragment(const PassKeys& keys, int32_t tile,
                                              KeyFragment* out) {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t key = keys.first + 16 * tile + 8 * half + lane % 8;
        uint32_t words[kIndexGroups];
        load_matrices(keys.codes(key) + lane / 8 * (kKeyBytes / 4), words);
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            const PlacedWord placed = place_codes(words[g]);
            out->a[g][half] = placed.even;
            out->a[g][2 + half] = placed.odd;
        }
    }
}

// All rows of the segment against the keys of a pass, one accumulator a scale group.
template <class Config>
__device__ __forceinline__ void score_groups(const IndexScoresParams& p, const Segment& segment,
                                             const ScorePlan& plan,
                                             const ScoreShared<Config>& shared,
                                             const PassKeys& keys, typename Config::Sink& sink) {
    // Those of one row are loaded where they are used: registers are short.
    KeyFragment fragments[kPassTiles];
    if constexpr (!Config::kOne) {
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) load_fragment(keys, tile, &fragments[tile]);
    }
    const uint32_t plain_keys = keys.stage->plain;
    const bool present = keys.stage->present >> keys.own / 8 & 1;
    const float exponent =
        present ? power_of_two(keys.scales(keys.own) & 0xffu) : bits_float(kNanBits);
    for (int32_t row = 0; row < segment.rows; ++row) {
        const bool plain = plain_keys & shared.queries.plain[row];
        const int64_t global_row = int64_t{segment.first_row} + row;
        float partials[kPassTiles][2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            if constexpr (Config::kOne) load_fragment(keys, tile, &fragments[tile]);
            for (int32_t first = 0; first < plan.padded_heads; first += Config::kGroupHeads) {
                const int32_t head = row * plan.padded_heads + first;
                if (plain) {
                    add_block<Config, true>(p, keys, tile, fragments[tile], shared.queries, head,
                                            global_row, first, partials[tile]);
                } else {
                    add_block<Config, false>(p, keys, tile, fragments[tile], shared.queries, head,
                                             global_row, first, partials[tile]);
                }
            }
        }
        float score = reduce_quad(partials);
        if (plain || !present) score = mul_rn(score, exponent);
        put_score<Config>(shared, segment, row, keys.column, score, sink);
    }
}

}  // namespace flash_csa::sm90
