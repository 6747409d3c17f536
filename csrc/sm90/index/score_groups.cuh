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

// Waits for all but the last kRunning batches that were started.
template <class Config, int kRunning>
__device__ __forceinline__ void finish_dots(float (*sums)[Config::kGroupSums]) {
    cute::warpgroup_wait<kRunning>();
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
    // By turns of a thread's heads. The first is taken and the others move up: an index at run time
    // would want local memory.
    constexpr int kTurns = Config::kGroupHeads / 4;
    float sums[kTurns][2][kIndexGroups];
#pragma unroll
    for (int i = 0; i < kTurns * 2 * kIndexGroups; ++i) {
        const int g = i % kIndexGroups, half = i / kIndexGroups % 2, turn = i / kIndexGroups / 2;
        sums[turn][half][g] = accumulators[g][4 * (turn / 2) + 2 * half + turn % 2];
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        const int32_t head = first + 8 * (turn / 2) + threadIdx.x % 4 * 2 + turn % 2;
        if (head >= p.query.heads) break;
        const uint32_t scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
        const ByteRange range = scale_range(scales);
        const float weight = head_weight(p.weights, row, head);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int32_t quarters[kIndexGroups];
            float products[kIndexGroups];
#pragma unroll
            for (int g = 0; g < kIndexGroups; ++g) {
                const int32_t fold = head_fold(scales, range, g) + kPlacedExponent;
                quarters[g] = static_cast<int32_t>(sums[0][half][g] * power_of_two(127 + 2 - fold));
                products[g] = scale_product(static_cast<uint8_t>(scales >> (8 * g)),
                                            static_cast<uint8_t>(key_scales[half] >> (8 * g)));
            }
            partials[half] =
                accumulate_head(partials[half], weight, combine_groups(quarters, products));
        }
#pragma unroll
        for (int i = 0; i < (kTurns - 1) * 2 * kIndexGroups; ++i) {
            const int g = i % kIndexGroups, half = i / kIndexGroups % 2, to = i / kIndexGroups / 2;
            sums[to][half][g] = sums[to + 1][half][g];
        }
    }
}

// Powers of two of groups 1, 2, 3 of a plain key, relative to that of group 0.
__device__ __forceinline__ float3 relative_factors(uint32_t scales) {
    const uint32_t relative = scales + (kUnitScales - (scales & 0xffu) * 0x01010101u);
    return {__uint_as_float(relative << 15 & kInfBits), __uint_as_float(relative << 7 & kInfBits),
            __uint_as_float(relative >> 1 & kInfBits)};
}

// Partial sums of a row's heads [first, first + kHeads), whose scales are plain like those of the
// keys. While the heads of one block are added, the MMAs of the next one run.
template <class Config>
__device__ __forceinline__ void add_plain_row(const KeyFragment (&fragments)[kPassTiles],
                                              const float3 (&factors)[kPassTiles][2],
                                              uint32_t codes, const float2* weights,
                                              float (&partials)[kPassTiles][2]) {
    constexpr int kBlocks = Config::kHeads / Config::kGroupHeads;
    constexpr uint32_t kBlockStep = Config::kGroupHeads * kQueryBytes >> 4;  // of descriptors
    float sums[kPassTiles][kIndexGroups][Config::kGroupSums];
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        start_dots<Config>(fragments[tile], codes, sums[tile]);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        float2 own[Config::kGroupHeads / 8];
#pragma unroll
        for (int i = 0; i < Config::kGroupHeads / 8; ++i) {
            own[i] = weights[4 * (Config::kGroupHeads / 8 * block + i)];
        }
        const bool more = block + 1 < kBlocks;
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            if (more || tile == 0) {
                finish_dots<Config, 1>(sums[tile]);
            } else {
                finish_dots<Config, 0>(sums[tile]);
            }
            add_plain_heads<Config>(sums[tile], own, factors[tile], partials[tile]);
            if (more) {
                start_dots<Config>(fragments[tile], codes + (block + 1) * kBlockStep, sums[tile]);
            }
        }
    }
}

// The same for any scales, heads [first, first + kGroupHeads) of a row.
template <class Config>
__device__ __forceinline__ void add_odd_block(const IndexScoresParams& p, const PassKeys& keys,
                                              const KeyFragment (&fragments)[kPassTiles],
                                              uint32_t codes, int64_t row, int32_t first,
                                              float (&partials)[kPassTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        float sums[kIndexGroups][Config::kGroupSums];
        start_dots<Config>(fragments[tile], codes, sums);
        const uint32_t scales[2] = {keys.scales(keys.at(tile, 0)), keys.scales(keys.at(tile, 1))};
        finish_dots<Config, 0>(sums);
        add_heads<Config>(p, row, first, sums, scales, partials[tile]);
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
    KeyFragment fragments[kPassTiles];
    float3 factors[kPassTiles][2];
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        load_fragment(keys, tile, &fragments[tile]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[tile][half] = relative_factors(keys.scales(keys.at(tile, half)));
        }
    }
    const uint32_t plain_keys = keys.stage->plain;
    const bool present = keys.stage->present >> keys.own / 8 & 1;
    const float exponent =
        present ? power_of_two(keys.scales(keys.own) & 0xffu) : bits_float(kNanBits);
    const uint32_t codes = query_descriptor(shared.queries.codes);
    const float2* weights =
        reinterpret_cast<const float2*>(shared.queries.weights) + threadIdx.x % 4;
    int32_t head = 0;  // of the segment
    for (int32_t row = 0; row < segment.rows; ++row) {
        const bool plain = plain_keys & shared.queries.plain[row];
        float partials[kPassTiles][2] = {};
        const int32_t end = head + plan.padded_heads, begin = head;
        if (plain) {
            for (; head < end; head += Config::kHeads) {
                const uint32_t at = __shfl_sync(~0u, codes + head * (kQueryBytes >> 4), 0);
                add_plain_row<Config>(fragments, factors, at, weights + head / 2, partials);
            }
        } else {
            for (; head < end; head += Config::kGroupHeads) {
                add_odd_block<Config>(p, keys, fragments, codes + head * (kQueryBytes >> 4),
                                      int64_t{segment.first_row} + row, head - begin, partials);
            }
        }
        float score = reduce_quad(partials);
        if (plain || !present) score = mul_rn(score, exponent);
        put_score<Config>(shared, segment, row, keys.column, score, sink);
    }
}

}  // namespace flash_csa::sm90
