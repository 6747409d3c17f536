// Entries in octets: of a warp's 4 entries, lane 8e + o holds of entry e, in every block of 32
// channels, channels 4o .. 4o + 3. A row of FP32 is read in lines of 128 bytes; a group of main FP4
// is 4 lanes, one of index FP4 an octet; and the lane class c % 32 of the sum of squares belongs to
// one thread. Two neighbouring blocks are a pair, packed as BF16: x, y of the first, z, w of the
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

// Largest magnitude of the lane's channels in 2^kSteps lanes: of the first block in the low half,
// of the second in the high.
template <int kSteps>
__device__ __forceinline__ uint32_t largest_of(uint4 packed) {
    const uint32_t first = __vmaxu2(packed.x & kMagnitudes, packed.y & kMagnitudes);
    const uint32_t second = __vmaxu2(packed.z & kMagnitudes, packed.w & kMagnitudes);
    uint32_t largest =
        __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
        largest = __vmaxu2(largest, __shfl_xor_sync(kAllLanes, largest, 1 << i));
    return largest;
}

// Codes of a pair (of the first block in the low half) and its groups' scale bytes. bad: bits 15
// and 31 of groups with Inf or NaN, whose codes and scale `spoil` sets.
struct PairCodes {
    uint32_t codes;
    uint32_t scales;
    uint32_t bad;

    __device__ __forceinline__ void spoil() {
        if (bad & 0x00008000u) {
            codes &= 0xffff0000u;
            scales = (scales & 0xff00u) | kNanE4M3;
        }
        if (bad & 0x80000000u) {
            codes &= 0x0000ffffu;
            scales = (scales & 0x00ffu) | kNanE4M3 << 8;
        }
    }
};

__device__ __forceinline__ PairCodes encode_main_pair(uint4 packed) {
    const uint32_t largest = largest_of<2>(packed);
    const MainScales scales = main_scales(largest);
    return {e2m1_codes(packed, scales.low_factor, scales.high_factor), scales.bytes,
            not_finite(largest)};
}

__device__ __forceinline__ PairCodes encode_index_pair(uint4 packed) {
    const uint32_t largest = largest_of<3>(packed);
    const uint32_t low = index_scale_byte(largest & 0xffffu),
                   high = index_scale_byte(largest >> 16);
    PairCodes pair = {e2m1_codes(packed, ue8m0_reciprocal(static_cast<uint8_t>(low)),
                                 ue8m0_reciprocal(static_cast<uint8_t>(high))),
                      low | high << 8, 0};
    if (low == kNanUE8M0) pair.codes &= 0xffff0000u;
    if (high == kNanUE8M0) pair.codes &= 0x0000ffffu;
    return pair;
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

// Rotates the pair of the 64 RoPE dims.
__device__ __forceinline__ uint4 rotate_last_pair(uint4 packed, const float* cos_sin, int octet) {
    const uint2 a = rotate_block(make_uint2(packed.x, packed.y), cos_sin + 2 * octet);
    const uint2 b = rotate_block(make_uint2(packed.z, packed.w), cos_sin + 2 * octet + 16);
    return make_uint4(a.x, a.y, b.x, b.y);
}

// Norm of pair q.
__device__ __forceinline__ uint4 norm_pair(const float (&x)[8], float factor, const float* weight,
                                           int q, int octet) {
    const float4 w0 = *reinterpret_cast<const float4*>(weight + 64 * q + 4 * octet);
    const float4 w1 = *reinterpret_cast<const float4*>(weight + 64 * q + 32 + 4 * octet);
    const float w[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = mul_rn(mul_rn(x[j], factor), w[j]);
    return pack_blocks(y);
}

}  // namespace flash_csa::sm90
