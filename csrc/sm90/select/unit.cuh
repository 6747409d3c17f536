// Four neighbouring scores of a row, and which of them there are.
#pragma once

#include <cstdint>

#include "core/numerics.h"

namespace flash_csa::sm90 {

// Bits of the first of four.
__device__ __forceinline__ uint32_t first_of_four(int32_t count) {
    return count >= 4 ? 0xfu : (1u << max(count, 0)) - 1;
}

// Those of four values that have no bit become NaN.
__device__ __forceinline__ float4 only(uint32_t bits, float4 four) {
    const float nan = bits_float(kNanBits);
    if ((bits & 1) == 0) four.x = nan;
    if ((bits & 2) == 0) four.y = nan;
    if ((bits & 4) == 0) four.z = nan;
    if ((bits & 8) == 0) four.w = nan;
    return four;
}

}  // namespace flash_csa::sm90
