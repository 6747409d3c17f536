// Instructions that CUDA has no exact name for.
#pragma once

namespace flash_csa::sm90 {

// 1 / x within an ulp; subnormals count as zero.
__device__ __forceinline__ float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The smaller one; NaN if one is.
__device__ __forceinline__ float min_or_nan(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

}  // namespace flash_csa::sm90
