// What score_groups and score_folded share: a unit of keys as A of the tensor cores, queries as B,
// the last sum of a score.
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "sm90/common/mma.h"
#include "sm90/index/score_config.cuh"

namespace flash_csa::sm90 {

// What a consumer has of a unit. Its lane's keys are [4 tile + 2 half] of the two pointers.
struct UnitKeys {
    const KeyStage* stage;
    const uint4* factors;
    const uint32_t* scales;
    int32_t own;     // index of the key whose score this lane hands over
    int32_t column;  // its column
    bool present;    // it is on a page
};

// Accumulator rows lane / 4 and lane / 4 + 8 of a warp are, in run lane / 4 % 4, the keys
// 8 warp + 4 tile + 2 half + lane / 16.
// f(codes, group, half) for the words of a tile that the lane holds as A: row lane / 4 + 8 half,
// word lane % 4 of the group.
template <class F>
__device__ __forceinline__ void for_each_word(const KeyStage& stage, int32_t tile, const F& f) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t row = lane % 8, group = lane / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t key = 8 * warp + 4 * tile + 2 * half + row / 4;
        const uint8_t* source =
            stage.codes + row % 4 * kRunBytes + key * kKeyBytes + group * (kKeyBytes / 4);
        uint32_t words[kIndexGroups];
        load_matrices(source, words);
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) f(words[g], g, half);
    }
}

template <class Mma, class Sum, size_t... I>
__device__ __forceinline__ void mma_step(const uint32_t (&a)[4], uint64_t b, Sum* sums,
                                         bool accumulate, std::index_sequence<I...>) {
    Mma::fma(a[0], a[1], a[2], a[3], b, sums[I]...,
             accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// Lower half of the descriptor of B: the address of 8 heads and more.
__device__ __forceinline__ uint32_t query_descriptor(const uint8_t* codes) {
    cute::GmmaDescriptor desc;
    desc.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(codes) >> 4;
    desc.bitfield.leading_byte_offset_ = 1;  // unused by a swizzle
    return desc.reg32_[0];
}

// The whole: K contiguous, 128-byte swizzle, 8 heads in 1024 bytes.
__device__ __forceinline__ uint64_t whole_descriptor(uint32_t lower) {
    cute::GmmaDescriptor desc;
    desc.bitfield.stride_byte_offset_ = 8 * kQueryBytes >> 4;
    desc.bitfield.layout_type_ = 1;
    desc.reg32_[0] = lower;
    return desc;
}

// Four keys of a quad, each a partial sum per lane, to one score a lane: lane t gets key t.
__device__ __forceinline__ float reduce_quad(const float (&partials)[kUnitTiles][2]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    float pairs[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const float keep = odd ? partials[tile][1] : partials[tile][0];
        const float give = odd ? partials[tile][0] : partials[tile][1];
        pairs[tile] = add_rn(keep, __shfl_xor_sync(~0u, give, 1));
    }
    const float keep = upper ? pairs[1] : pairs[0];
    const float give = upper ? pairs[0] : pairs[1];
    return add_rn(keep, __shfl_xor_sync(~0u, give, 2));
}

// The score of the key whose column a lane hands over, from its quad's partial sums.
template <class Config>
__device__ __forceinline__ void put_score(const ScoreShared<Config>& shared, const Segment& segment,
                                          int32_t row, int32_t column, float score,
                                          typename Config::Sink& sink) {
    sink.put(int64_t{segment.first_row} + row, column, canonical_nan(score),
             column < shared.fixed->counts[row]);
}

}  // namespace flash_csa::sm90
