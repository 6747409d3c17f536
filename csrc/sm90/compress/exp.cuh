// exp_fma of core/numerics.h for what a softmax asks of it: differences that are not positive. The
// same bits with fewer instructions.
#pragma once

#include "core/numerics.h"

namespace flash_csa::sm90 {

struct Power {
    float mantissa;     // 0.7 .. 1.42
    uint32_t exponent;  // n in bits 23 and up, modulo 2^9
};

// 2^n * exp(r) of x, -104 <= x <= 0.
__device__ __forceinline__ Power exp_parts(float x) {
    const float shifted = fma_rn(x, 0x1.715476p+0f, 0x1.8p+23f);  // n in the low bits
    const float n = sub_rn(shifted, 0x1.8p+23f);
    float r = fma_rn(n, -0x1.62e430p-1f, x);
    r = fma_rn(n, 0x1.05c610p-29f, r);
    float p = 0x1.6a2428p-10f;
    p = fma_rn(p, r, 0x1.1239e2p-7f);
    p = fma_rn(p, r, 0x1.5558f2p-5f);
    p = fma_rn(p, r, 0x1.555492p-3f);
    p = fma_rn(p, r, 0x1.fffffcp-2f);
    p = fma_rn(p, r, 1.0f);
    p = fma_rn(p, r, 1.0f);
    return {p, float_bits(shifted) << 23};
}

// x <= 0 or NaN. 2^(n + 126) is normal for n >= -150, its product exact, and the last one rounds.
__device__ __forceinline__ float exp_negative(float x) {
    const Power e = exp_parts(x < -104.0f ? -104.0f : x);
    return mul_rn(mul_rn(e.mantissa, bits_float(e.exponent + ((127u + 126u) << 23))), 0x1p-126f);
}

// -86 <= x <= 0: the result is normal, so that n adds to the exponent.
__device__ __forceinline__ float exp_near(float x) {
    const Power e = exp_parts(x);
    return bits_float(float_bits(e.mantissa) + e.exponent);
}

}  // namespace flash_csa::sm90
