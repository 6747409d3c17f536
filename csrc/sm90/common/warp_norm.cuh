// RMS in a warp, in the order of core/numerics.h: lane l holds values l, l + 32, ... of the row.
#pragma once

#include "core/numerics.h"
#include "sm90/common/lane_codec.cuh"

namespace flash_csa::sm90 {

// 1 / sqrt(mean(x^2) + eps), in all lanes.
template <int kDims>
__device__ __forceinline__ float warp_rms_factor(const float (&x)[kDims / 32], float eps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kDims / 32; ++i) sum = fma_rn(x[i], x[i], sum);
#pragma unroll
    for (int h = 16; h > 0; h /= 2) sum = add_rn(sum, __shfl_xor_sync(kAllLanes, sum, h));
    return rsqrt_ieee(add_rn(mul_rn(sum, 1.0f / kDims), eps));
}

}  // namespace flash_csa::sm90
