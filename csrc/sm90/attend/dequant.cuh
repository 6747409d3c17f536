// Codes to BF16 on packed halves, for tiles that tensor cores read.
//
// Sign, exponent and mantissa bits of a code are placed where BF16 has its own: the result is the
// value times a power of two, subnormals included. One packed multiplication brings in the group's
// scale. The tile holds value * 2^-8: 2^126 * 448 is no BF16, and 2^118 * 448 is. Users put
// kTileFactor into the logits and the output; it cancels nothing and rounds nothing.
//
// Paired order: the 16-bit places of 8 neighbouring dims hold dims 0 4 1 5 2 6 3 7, as shifts leave
// them. A dot product does not mind, if the query has the same order; outputs are put back by
// natural_order.
//
// A NaN scale makes its group NaN. Two differences from core/numerics.h on bytes that no encoder
// writes: FP8 NaN codes read as 480, and an UE8M0 scale of 2^-127 as 0 where its factor is found
// alone (docs/numerics.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/numerics.h"
#include "sm90/common/permute.cuh"

namespace flash_csa::sm90 {

inline constexpr float kTileFactor = 0x1p8f;  // value / what the tile holds

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    __nv_bfloat162 x, y;
    memcpy(&x, &a, sizeof a);
    memcpy(&y, &b, sizeof b);
    const __nv_bfloat162 product = __hmul2(x, y);
    uint32_t bits;
    memcpy(&bits, &product, sizeof bits);
    return bits;
}

// Both halves of the result are the upper half of a float, which is exact in BF16.
__device__ __forceinline__ uint32_t twice_bf16(float x) {
    return __byte_perm(__float_as_uint(x), 0, 0x3232);
}

// Factors of two E4M3 scales (bytes 0 and 1) for e2m1_paired: 2^118 * scale, in both halves.
__device__ __forceinline__ uint2 e4m3_factors(uint32_t scales) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(scales), __NV_E4M3);
    const float2 scale = __half22float2(__half2(raw));
    return make_uint2(twice_bf16(scale.x * 0x1p118f), twice_bf16(scale.y * 0x1p118f));
}

// The same as the halves of a word, in fewer instructions; one of them in both halves, which costs
// nothing beside a multiplication.
__device__ __forceinline__ uint32_t e4m3_factor_pair(uint32_t scales) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(scales), __NV_E4M3);
    const float2 scale = __half22float2(__half2(raw));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(scale.x, scale.y);  // exact
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return multiply_bf16x2(bits, 0x7a807a80u);
}
template <int kHalf>
__device__ __forceinline__ uint32_t twice_half(uint32_t halves) {
    __nv_bfloat162 x;
    memcpy(&x, &halves, sizeof x);
    x = kHalf == 0 ? __low2bfloat162(x) : __high2bfloat162(x);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Factor of an UE8M0 byte for e4m3_paired: the scale, in both halves.
__device__ __forceinline__ uint32_t ue8m0_factor(uint32_t byte) {
    const uint32_t bits = (byte << 7) + ((byte + 1) >> 8 << 6);  // 0xff: NaN, not infinity
    return bits * 0x10001u;
}

// Eight E2M1 codes. Placed bits are value * 2^-126. The product makes two copies of a nibble that
// do not overlap: the upper one has the sign in its place, the lower one exponent and mantissa.
__device__ __forceinline__ uint4 e2m1_paired(uint32_t codes, uint32_t factor) {
    constexpr uint32_t kPlaced = 0x81c081c0u, kEven = 0x000f000fu, kOdd = 0x00f000f0u;
    const uint32_t upper = codes >> 8;
    const uint32_t x = (codes & kEven) * 0x1040u & kPlaced;
    const uint32_t y = (codes & kOdd) * 0x0104u & kPlaced;
    const uint32_t z = (upper & kEven) * 0x1040u & kPlaced;
    const uint32_t w = (upper & kOdd) * 0x0104u & kPlaced;
    return make_uint4(multiply_bf16x2(x, factor), multiply_bf16x2(y, factor),
                      multiply_bf16x2(z, factor), multiply_bf16x2(w, factor));
}

// Eight E4M3 codes. Placed bits are value * 2^-120; the first factor leaves value * 2^-8, so that
// no scale overflows the second. kOnce: the factor is one of ue8m0_factors_at_most, which has both.
template <bool kOnce = false>
__device__ __forceinline__ uint4 e4m3_paired(uint32_t low, uint32_t high, uint32_t factor) {
    constexpr uint32_t kPlaced = 0x87f087f0u, kTo2m8 = 0x77807780u;
    const auto pair = [=](uint32_t selector) {
        // The upper bytes are codes n and n + 4; below the latter is the former's sign, which the
        // shift brings to where its own would come from.
        const auto codes = static_cast<int32_t>(permute(low, high, selector));
        const uint32_t placed = static_cast<uint32_t>(codes >> 4) & kPlaced;
        return multiply_bf16x2(kOnce ? placed : multiply_bf16x2(placed, kTo2m8), factor);
    };
    return make_uint4(pair(0x4800), pair(0x5911), pair(0x6a22), pair(0x7b33));
}

// Of two UE8M0 bytes, in the low bytes of halves: scale * 2^112, of scales up to 2^15. A larger one
// leaves an excess, a power of two as well: a product with both is exact, or rounded once.
inline constexpr uint32_t kMostUe8m0 = 127 + 15;

__device__ __forceinline__ uint32_t ue8m0_factors_at_most(uint32_t bytes) {
    return __vminu2(bytes, kMostUe8m0 * 0x10001u) * 0x80u + 0x38003800u;
}
__device__ __forceinline__ bool ue8m0_exceeds(uint32_t bytes, uint32_t more = 0) {
    constexpr uint32_t kToBit8 = (255 - kMostUe8m0) * 0x10001u;
    return (((bytes + kToBit8) | (more + kToBit8)) & 0x01000100u) != 0;
}
__device__ __forceinline__ uint32_t ue8m0_excess(uint32_t byte) {  // of one above kMostUe8m0
    return byte == 0xff ? 0x7fc07fc0u : (byte - kMostUe8m0 + 127) * 0x00800080u;
}
__device__ __forceinline__ uint4 multiply_bf16x8(uint4 x, uint32_t factor) {
    return make_uint4(multiply_bf16x2(x.x, factor), multiply_bf16x2(x.y, factor),
                      multiply_bf16x2(x.z, factor), multiply_bf16x2(x.w, factor));
}

// Eight 16-bit values in natural order, to paired order and back.
__device__ __forceinline__ uint4 paired_order(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}
__device__ __forceinline__ uint4 natural_order(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410),
                      __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632));
}

// Eight BF16 values.
__device__ __forceinline__ uint4 bf16_paired(uint4 values) {
    constexpr uint32_t k2m8 = 0x3b803b80u;
    const uint4 x = paired_order(values);
    return make_uint4(multiply_bf16x2(x.x, k2m8), multiply_bf16x2(x.y, k2m8),
                      multiply_bf16x2(x.z, k2m8), multiply_bf16x2(x.w, k2m8));
}

}  // namespace flash_csa::sm90
