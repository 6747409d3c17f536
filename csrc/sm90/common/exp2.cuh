// 2^x by the special function unit: 2 ulp, results below 2^-126 are 0.
#pragma once

namespace flash_csa::sm90 {

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace flash_csa::sm90
