// What score_groups and score_folded share: keys as A of the tensor cores, queries as B,
// the last sum of a score.
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "sm90/common/mma.h"
#include "sm90/index/score_config.cuh"

namespace flash_csa::sm90 {

// The keys that a group takes in its turn, in a stage. A warp has 32 neighbours of them: row lane /
// 4 + 8 half of its part of the accumulators of a tile is key 16 tile + 8 half + lane / 4.
struct PassKeys {
    const KeyStage* stage;
    Pieces pieces;
    int32_t first;  // of the warp's keys, in the stage
    // The key whose score this lane hands over, in the stage, and its column: reduce_quad leaves
    // key 8 (lane % 4) + lane / 4.
    int32_t own, column;

    // pass: of the unit.
    __device__ __forceinline__ PassKeys(const KeyStage& key_stage, const Pieces& in_stage,
                                        int32_t unit, int32_t pass)
        : stage(&key_stage), pieces(in_stage) {
        const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        first = pass * kPassKeys + kPassKeys / 4 * warp;
        own = first + lane % 4 * 8 + lane / 4;
        column = unit * kUnitKeys + own;
    }
    // Of the warp's keys, which lie in one piece.
    __device__ __forceinline__ const uint8_t* codes(int32_t key) const {
        return stage->pieces + (pieces.code_at(first) + kKeyBytes * (key - first));
    }
    __device__ __forceinline__ uint32_t scales(int32_t key) const {
        return reinterpret_cast<const uint32_t*>(stage->pieces +
                                                 pieces.scale_at(first))[key - first];
    }
    // Index of the key of accumulator row lane / 4 + 8 half.
    __device__ __forceinline__ int32_t at(int32_t tile, int32_t half) const {
        return first + 16 * tile + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
    }
};

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

// The first `visible` of four scores, at a multiple of four columns.
__device__ __forceinline__ void store_four(const Matrix<float>& out, int64_t row, int32_t column,
                                           const float4& scores, int32_t visible) {
    float* to = out.row(row) + column;
    const bool aligned =
        reinterpret_cast<uintptr_t>(out.data) % sizeof(float4) == 0 && out.stride % 4 == 0;
    if (aligned && visible >= 4) {
        *reinterpret_cast<float4*>(to) = scores;
        return;
    }
    if (visible > 0) to[0] = scores.x;
    if (visible > 1) to[1] = scores.y;
    if (visible > 2) to[2] = scores.z;
    if (visible > 3) to[3] = scores.w;
}

// Four keys of a quad, each a partial sum per lane, to one score a lane: lane t gets key t.
__device__ __forceinline__ float reduce_quad(const float (&partials)[kPassTiles][2]) {
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
    const uint32_t global_row = segment.first_row + row;
    sink.put(global_row, column, canonical_nan(score), column < shared.fixed->counts[row]);
}

}  // namespace flash_csa::sm90
