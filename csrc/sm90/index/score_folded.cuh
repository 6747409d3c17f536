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
template <>
struct IntegerMma<64> : cute::SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN {};

constexpr int kFoldedSteps = kIndexDims / 32;  // of K

// The group of a key that a lane has: its 16 bytes, which one table turns into integers. A K step
// is one word of every group, on both sides (QueryTile::put_units).
struct FoldedGroup {
    uint32_t words[kFoldedSteps];
    HalfUnits table;

    // key: of the warp's.
    __device__ __forceinline__ FoldedGroup(const PassKeys& keys, int32_t key)
        : table(reinterpret_cast<const uint8_t*>(keys.stage->shifts + key)[threadIdx.x % 4]) {
        const uint4 raw = reinterpret_cast<const uint4*>(keys.codes(key))[threadIdx.x % 4];
        words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    }
};

// The codes of a tile as integers, exponents folded.
struct FoldedFragment {
    uint32_t units[kFoldedSteps][4];

    // The rows of one half.
    __device__ __forceinline__ void set(int half, const FoldedGroup& group) {
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            const uint32_t word = group.words[step];
            const IntegerWord both =
                signed_units(positive_units(word, group.table), negative_units(word, group.table));
            units[step][half] = both.low;
            units[step][2 + half] = both.high;
        }
    }
};

// Starts the dots of a tile with kColumns query heads.
template <int kColumns>
__device__ __forceinline__ void start_folded(const FoldedFragment& keys, uint32_t units,
                                             uint32_t (&sums)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) cute::warpgroup_fence_operand(sums[i]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kFoldedSteps; ++step) {
        mma_step<IntegerMma<kColumns>>(keys.units[step], whole_descriptor(units + (32 * step >> 4)),
                                       sums, step > 0, std::make_index_sequence<kColumns / 2>{});
    }
    cute::warpgroup_commit_batch();
}

// Waits for all but the last kRunning batches that were started.
template <int kRunning, int kSums>
__device__ __forceinline__ void finish_folded(uint32_t (&sums)[kSums]) {
    cute::warpgroup_wait<kRunning>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(sums[i]);
}

// Adds kHeads heads, of accumulators [first, first + kHeads / 2), to the partial sums of a thread's
// two keys. A dot that is not negative is a subnormal float of as many 2^-149, which a fused
// multiply-add takes like any other: no conversion. A negative one is a NaN, which saturation makes
// 0: a ReLU on the fast pipe, where a maximum is not.
template <int kHeads, int kSums>
__device__ __forceinline__ void add_folded_heads(const uint32_t (&sums)[kSums], int first,
                                                 const float2 (&weights)[kHeads / 8],
                                                 float (&partials)[2]) {
#pragma unroll
    for (int i = 0; i < kHeads / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float weight = c == 0 ? weights[i].x : weights[i].y;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t sum = sums[first + 4 * i + 2 * half + c];
                partials[half] = fma_rn(weight, __saturatef(__uint_as_float(sum)), partials[half]);
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void load_weights(const ScoreShared<Config>& shared, int32_t head,
                                             float2 (&weights)[Config::kHeads / 8]) {
    const float2* source =
        reinterpret_cast<const float2*>(shared.queries.folded_weights + head) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < Config::kHeads / 8; ++i) weights[i] = source[4 * i];
}

// One or two rows: an MMA takes two blocks of heads. kWhole: a block is a row.
template <class Config, bool kWhole>
__device__ __forceinline__ void score_folded(const Segment& segment, const ScorePlan& plan,
                                             const ScoreShared<Config>& shared,
                                             const PassKeys& keys, typename Config::Sink& sink) {
    constexpr int kHeads = Config::kHeads, kColumns = Config::kColumns;
    const uint32_t units = query_descriptor(shared.queries.units);
    const float rest = keys.stage->rest[keys.own];
    FoldedFragment fragments[kPassTiles];
#pragma unroll
    for (int i = 0; i < 2 * kPassTiles; ++i) {
        fragments[i / 2].set(i % 2, FoldedGroup(keys, keys.at(i / 2, i % 2)));
    }
    float partials[kPassTiles][2] = {};
    int32_t row = 0, row_end = plan.padded_heads;
    const int32_t heads = segment.rows * plan.padded_heads;
    for (int32_t first = 0; first < heads; first += kColumns) {
        const uint32_t at = __shfl_sync(~0u, units + first * (kQueryBytes >> 4), 0);  // uniform
        uint32_t sums[kPassTiles][kColumns / 2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            start_folded<kColumns>(fragments[tile], at, sums[tile]);
        }
#pragma unroll
        for (int head = 0; head < kColumns; head += kHeads) {
            float2 weights[kHeads / 8];
            load_weights(shared, first + head, weights);
            if (head == 0) finish_folded<1>(sums[0]);
            add_folded_heads<kHeads>(sums[0], head / 2, weights, partials[0]);
            if (head == 0) finish_folded<0>(sums[1]);
            add_folded_heads<kHeads>(sums[1], head / 2, weights, partials[1]);
            if (!kWhole && first + head + kHeads != row_end) continue;
            if (row < segment.rows) {  // the last block may have no row
                put_score<Config>(shared, segment, row, keys.column,
                                  mul_rn(reduce_quad(partials), rest), sink);
            }
            partials[0][0] = partials[0][1] = partials[1][0] = partials[1][1] = 0.0f;
            ++row;
            row_end += plan.padded_heads;
        }
    }
}

}  // namespace flash_csa::sm90
