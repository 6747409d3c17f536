// The end of attention for one head in a warp: normalise, round, rotate back, write.
//
// Lane l has dims 4 l + 128 j + i, i < 4, j < 4: four neighbours, which are two rotated pairs.
#pragma once

#include "core/numerics.h"
#include "core/params.h"

namespace flash_csa::sm90 {

inline constexpr int kLaneDims = kHeadDim / 32;

__device__ __forceinline__ int dim_of(int lane, int i) { return i / 4 * 128 + lane * 4 + i % 4; }

// Rounds to BF16 and, where cos_sin is given, applies the inverse rotation and rounds again.
__device__ __forceinline__ void round_and_derotate(float (&x)[kLaneDims], int lane,
                                                   const float* cos_sin) {
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) x[i] = round_bf16(x[i]);
    if (cos_sin == nullptr || lane < 16) return;
#pragma unroll
    for (int i = kLaneDims - 4; i < kLaneDims; i += 2) {
        const int pair = (dim_of(lane, i) - (kHeadDim - kRopeDims)) / 2;
        float a, b;
        inverse_rope_pair(x[i], x[i + 1], cos_sin[pair], cos_sin[kRopeDims / 2 + pair], &a, &b);
        x[i] = round_bf16(a);
        x[i + 1] = round_bf16(b);
    }
}

// Params: out_bf16, out_f32, derotate, derotate_positions.
template <class Params>
__device__ __forceinline__ void write_head(const Params& p, int64_t row, int head, int lane,
                                           float (&x)[kLaneDims]) {
    const bool derotate =
        p.derotate_positions != nullptr && p.derotate.holds(p.derotate_positions[row]);
    const float* cos_sin = derotate ? p.derotate.at(p.derotate_positions[row]) : nullptr;
    const bool f32 = p.out_f32.data != nullptr;
    if (!f32 || p.derotate_positions != nullptr) round_and_derotate(x, lane, cos_sin);
#pragma unroll
    for (int j = 0; j < kLaneDims / 4; ++j) {
        const int dim = dim_of(lane, 4 * j);
        if (f32) {
            *reinterpret_cast<float4*>(p.out_f32.at(row, head) + dim) =
                make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
        } else {
            uint2 packed;
            packed.x = f32_to_bf16(x[4 * j]) | uint32_t{f32_to_bf16(x[4 * j + 1])} << 16;
            packed.y = f32_to_bf16(x[4 * j + 2]) | uint32_t{f32_to_bf16(x[4 * j + 3])} << 16;
            *reinterpret_cast<uint2*>(p.out_bf16.at(row, head) + dim) = packed;
        }
    }
}

}  // namespace flash_csa::sm90
