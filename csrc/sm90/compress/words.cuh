// BF16 values in words, two each, the first in the low half.
#pragma once

#include <cuda_bf16.h>

#include "sm90/common/fp4_pairs.cuh"
#include "sm90/common/lane_codec.cuh"

namespace flash_csa::sm90 {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint4 pack_words(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                      pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ void unpack_words(uint4 packed, float (&x)[8]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low_bf16(words[i]);
        x[2 * i + 1] = high_bf16(words[i]);
    }
}

}  // namespace flash_csa::sm90
