// Entries in octets: of a warp's 4 entries, lane 8e + o holds of entry e, in every block of 32
// channels, channels 4o .. 4o + 3: the lane class c % 32 of the sum of squares belongs to one
// thread. Two neighbouring blocks are a pair, packed as BF16: x, y of the first, z, w of the
// second. Bit-equal to core/numerics.h.
#pragma once

#include <cuda_bf16.h>

#include "sm90/common/fp4_pairs.cuh"
#include "sm90/common/lane_codec.cuh"

namespace flash_csa::sm90 {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint4 pack_blocks(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                      pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ void unpack_blocks(uint4 packed, float (&x)[8]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low_bf16(words[i]);
        x[2 * i + 1] = high_bf16(words[i]);
    }
}

// A chain per channel class, in the order of the row.
__device__ __forceinline__ void add_squares(const float (&x)[8], float (&chain)[4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) chain[i % 4] = fma_rn(x[i], x[i], chain[i % 4]);
}

// Sum of squares of a row from the chains of classes 4o + j; all lanes of the octet get it.
__device__ __forceinline__ float sum_chains(float (&chain)[4]) {
#pragma unroll
    for (int h = 4; h > 0; h /= 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            chain[j] = add_rn(chain[j], __shfl_xor_sync(kAllLanes, chain[j], h));
    }
    return add_rn(add_rn(chain[0], chain[2]), add_rn(chain[1], chain[3]));
}

// Rotates a lane's two pairs of a block of RoPE dims. cos_sin: at the pairs' first cosine.
__device__ __forceinline__ uint2 rotate_block(uint2 packed, const float* cos_sin) {
    const float2 cos = *reinterpret_cast<const float2*>(cos_sin);
    const float2 sin = *reinterpret_cast<const float2*>(cos_sin + kRopeDims / 2);
    float a, b, c, d;
    rope_pair(low_bf16(packed.x), high_bf16(packed.x), cos.x, sin.x, &a, &b);
    rope_pair(low_bf16(packed.y), high_bf16(packed.y), cos.y, sin.y, &c, &d);
    return make_uint2(pack_bf16(a, b), pack_bf16(c, d));
}

}  // namespace flash_csa::sm90
