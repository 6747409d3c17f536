// exp_fma of core/numerics.h for what a softmax asks of it: differences that are not positive. The
// same bits with fewer instructions.
#pragma once

#include "core/numerics.h"

namespace flash_csa::sm90 {

// x <= 0 or NaN. 2^(n + 126) is normal for n >= -150, its product exact, and the last one rounds.
__device__ __forceinline__ float exp_negative(float x) {
    const ExpParts e = exp_parts(x < -104.0f ? -104.0f : x);
    const uint32_t exponent = (float_bits(e.shifted) + 127u + 126u) << 23;
    return mul_rn(mul_rn(e.mantissa, bits_float(exponent)), 0x1p-126f);
}

// -86 <= x <= 0: the result is normal, so that n adds to the exponent.
__device__ __forceinline__ float exp_near(float x) {
    const ExpParts e = exp_parts(x);
    return bits_float(float_bits(e.mantissa) + (float_bits(e.shifted) << 23));
}

}  // namespace flash_csa::sm90
