// Softmax pooling of two rows, the bits of the CPU back end without its branches.
//
// The row with the larger gate has weight exp(0) = 1, the other one e = exp(-|gate0 - gate1|). With
// usual values that is a polynomial, an addition to its exponent, and the division that nvcc makes
// for operands away from the ends of the range; eight channels test together whether theirs are,
// so that nothing but arithmetic stands between the loads.
#pragma once

#include "core/numerics.h"
#include "sm90/common/approximate.cuh"
#include "sm90/compress/exp.cuh"

namespace flash_csa::sm90 {

// a / b, correctly rounded, for 1 <= b <= 2 and |a| neither below 2^-100 nor infinite: the steps of
// __fdiv_rn without its test.
__device__ __forceinline__ float div_near(float a, float b) {
    float y = approximate_reciprocal(b);
    y = fma_rn(y, fma_rn(-b, y, 1.0f), y);
    float q = mul_rn(a, y);
    q = fma_rn(y, fma_rn(-b, q, a), q);
    return fma_rn(y, fma_rn(-b, q, a), q);
}

// One channel for any values, in the words of the contract.
inline __device__ __noinline__ float pool_any(float kv0, float kv1, float gate0, float gate1) {
    const float top = gate1 > gate0 ? gate1 : gate0 > -INFINITY ? gate0 : -INFINITY;
    const float w0 = exp_fma(sub_rn(gate0, top)), w1 = exp_fma(sub_rn(gate1, top));
    const float acc = fma_rn(w1, kv1, fma_rn(w0, kv0, 0.f));
    return div_rn(acc, add_rn(add_rn(0.f, w0), w1));
}

// kCount channels; kv and gate of either row.
template <int kCount>
__device__ __forceinline__ void pool_two(const float (&kv0)[kCount], const float (&kv1)[kCount],
                                         const float (&gate0)[kCount], const float (&gate1)[kCount],
                                         float (&pooled)[kCount]) {
    float lowest = 0.f, smallest = 1.f, largest = 1.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float distance = -fabsf(sub_rn(gate0[i], gate1[i]));
        const float e = exp_near(distance);
        const bool first = gate0[i] >= gate1[i];
        const float w0 = first ? 1.0f : e, w1 = first ? e : 1.0f;
        const float acc = fma_rn(w1, kv1[i], mul_rn(w0, kv0[i]));
        pooled[i] = div_near(acc, add_rn(1.0f, e));
        lowest = min_or_nan(lowest, distance);
        smallest = fminf(smallest, fabsf(acc));
        largest = fmaxf(largest, fabsf(acc));
    }
    if (lowest >= -86.0f && smallest >= 0x1p-100f && largest < INFINITY) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pooled[i] = pool_any(kv0[i], kv1[i], gate0[i], gate1[i]);
}

}  // namespace flash_csa::sm90
