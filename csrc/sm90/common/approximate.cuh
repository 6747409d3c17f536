// Instructions that CUDA has no exact name for.
#pragma once

namespace flash_csa::sm90 {

// 1 / x within an ulp; subnormals count as zero.
__device__ __forceinline__ float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash_csa::sm90
