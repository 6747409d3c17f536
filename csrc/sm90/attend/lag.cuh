// How far maxima may lag behind, in every kernel with a running softmax.
#pragma once

namespace flash_csa::sm90 {

// Logits are in units of log 2. What weights are relative to, the base, stands until a logit
// exceeds it by more than this, so that sums and outputs are not scaled at almost every tile. The
// largest weight is then rounded to BF16 as others are, where on its own base it is 1, and a row of
// a few records would point elsewhere: so the sum of the weights before, or any part of it, has to
// be 7 times as large. docs/attend.md has what other numbers cost.
__device__ __forceinline__ float slack_of(float sum) {
    constexpr float kLog2Alike = 2.807355f;  // of 7
    constexpr float kMost = 8.f;             // sums stay finite
    return fminf(fmaxf(__log2f(sum) - kLog2Alike, 0.f), kMost);
}

// Of a sum that a quad of lanes has parts of.
__device__ __forceinline__ float slack_of_quad(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return slack_of(sum);
}

}  // namespace flash_csa::sm90
