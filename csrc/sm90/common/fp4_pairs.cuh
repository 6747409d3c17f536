// E2M1 by way of FP16, two values an instruction. Bit-equal to core/numerics.h.
//
// The code of a magnitude q is round(min(2q, q + 2, q / 2 + 4)), at most 7: the three steps of the
// grid are three lines, and ties go to the even code as to the even mantissa. Each line is one FP16
// operation that adds 1024, where FP16 counts in ones. A quotient of a BF16 value and an E4M3 or
// UE8M0 scale that is no tie lies at least 2^-8 (relative) from every tie, and ties are exact in
// FP16: so neither an approximate reciprocal nor the rounding to FP16 changes a code, where the
// plain product with a reciprocal does.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/numerics.h"
#include "sm90/common/approximate.cuh"

namespace flash_csa::sm90 {

// Two BF16 magnitudes in a word.
inline constexpr uint32_t kMagnitudes = 0x7fff7fffu;

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// Every NaN of two BF16 values as core/numerics.h makes it.
__device__ __forceinline__ uint32_t canonical_bf16x2(uint32_t pair) {
    const uint32_t nan = __vcmpgtu2(pair & kMagnitudes, 0x7f807f80u);
    return (pair & ~nan) | (0x7fc07fc0u & nan);
}

// Two E2M1 magnitude codes, each above 0x6400, from two quotients.
__device__ __forceinline__ uint32_t e2m1_magnitudes(float low, float high) {
    const __half2 q = __floats2half2_rn(low, high);
    const __half2 near = __hfma2(q, __float2half2_rn(2.0f), __float2half2_rn(1024.0f));
    const __half2 middle = __hadd2(q, __float2half2_rn(1026.0f));
    const __half2 far = __hfma2(q, __float2half2_rn(0.5f), __float2half2_rn(1028.0f));
    const auto bits = [](const __half2& h) { return reinterpret_cast<const uint32_t&>(h); };
    return __vminu2(__vimin3_u16x2(bits(near), bits(middle), bits(far)), 0x64076407u);
}

// Signs of four and four BF16 values at the top of eight nibbles, added to their codes.
__device__ __forceinline__ uint32_t with_signs(uint32_t codes, uint4 x) {
    const uint32_t low = __byte_perm(x.x, x.y, 0x7531), high = __byte_perm(x.z, x.w, 0x7531);
    const uint32_t even = __byte_perm(low, high, 0x6420), odd = __byte_perm(low, high, 0x7531);
    return codes | (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Codes of eight BF16 values, the first in the lowest nibble. x.x and x.y have one scale, x.z and
// x.w another one; the factors are approximately 1 / scale.
__device__ __forceinline__ uint32_t e2m1_codes(uint4 x, float low_factor, float high_factor) {
    const float low[4] = {low_bf16(x.x), high_bf16(x.x), low_bf16(x.y), high_bf16(x.y)};
    const float high[4] = {low_bf16(x.z), high_bf16(x.z), low_bf16(x.w), high_bf16(x.w)};
    uint32_t codes = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
        codes =
            codes * 16 + e2m1_magnitudes(fabsf(low[i]) * low_factor, fabsf(high[i]) * high_factor);
    }
    return with_signs(codes - 0x64006400u * 0x1111u, x);
}

// Scales of two groups of main FP4.
struct MainScales {
    uint32_t bytes;  // two E4M3 scales, in bits 0..15
    float low_factor;
    float high_factor;
};

// largest: the groups' largest magnitudes as BF16, which are finite.
__device__ __forceinline__ MainScales main_scales(uint32_t largest) {
    constexpr float kFloor = 0x1.8p-7f;  // 6 * 2^-9
    const float low = fmaxf(low_bf16(largest), kFloor), high = fmaxf(high_bf16(largest), kFloor);
    const __half2_raw sixths = __floats2half2_rn(low * (1.0f / 6.0f), high * (1.0f / 6.0f));
    MainScales scales;
    scales.bytes = __nv_cvt_halfraw2_to_fp8x2(sixths, __NV_SATFINITE, __NV_E4M3);
    const __half2_raw decoded =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(scales.bytes), __NV_E4M3);
    const float2 values = __half22float2(decoded);
    scales.low_factor = approximate_reciprocal(values.x);
    scales.high_factor = approximate_reciprocal(values.y);
    return scales;
}

// UE8M0 scale byte of a group of index FP4 from its largest magnitude as BF16: the mantissa tells
// whether amax / 6 exceeds a power of two.
__device__ __forceinline__ uint32_t index_scale_byte(uint32_t largest) {
    constexpr uint32_t kFloor = 3u << 7 | 0x40u;  // 6 * 2^-126
    return largest >= 0x7f80u ? kNanUE8M0 : ((max_u32(largest, kFloor) + 0x3fu) >> 7) - 2u;
}

// Words of four neighbouring lanes transposed: lane t of the four gets word t of each.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int lane) {
#pragma unroll
    for (int h = 1; h < 4; h *= 2) {
        const bool upper = lane & h;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & h) continue;
            const uint32_t given = upper ? word[i] : word[i + h];
            const uint32_t taken = __shfl_xor_sync(0xffffffffu, given, h);
            if (upper)
                word[i] = taken;
            else
                word[i + h] = taken;
        }
    }
}

}  // namespace flash_csa::sm90
