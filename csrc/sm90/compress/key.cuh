// A projected index key in a warp, lane l with channels 4l .. 4l + 3: norm, RoPE, index FP4.
#pragma once

#include "sm90/common/warp_norm.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {

// Rotation of a lane's two pairs; of lanes 16 .. 31.
struct KeyTurn {
    float2 cos, sin;

    __device__ __forceinline__ void load(const float* cos_sin, int lane) {
        if (lane < 16) return;
        cos = *reinterpret_cast<const float2*>(cos_sin + 2 * (lane - 16));
        sin = *reinterpret_cast<const float2*>(cos_sin + kRopeDims / 2 + 2 * (lane - 16));
    }
};

// RMSNorm of a key in shared memory; the lane's weights. As BF16.
__device__ __forceinline__ uint2 norm_key(const float* key, float4 weight, float eps, int lane) {
    float x[kIndexDim / 32];
#pragma unroll
    for (int i = 0; i < kIndexDim / 32; ++i) x[i] = key[lane + 32 * i];
    const float4 own = *reinterpret_cast<const float4*>(key + 4 * lane);
    const float factor = warp_rms_factor<kIndexDim>(x, eps);
    return make_uint2(
        pack_bf16(mul_rn(mul_rn(own.x, factor), weight.x), mul_rn(mul_rn(own.y, factor), weight.y)),
        pack_bf16(mul_rn(mul_rn(own.z, factor), weight.z),
                  mul_rn(mul_rn(own.w, factor), weight.w)));
}

// Rotates a key and writes it to a slot that the pages hold.
__device__ __forceinline__ void write_key(const CompressParams& p, int32_t slot, int lane,
                                          uint2 pairs, const KeyTurn& turn) {
    if (lane >= 16) {
        float a, b, c, d;
        rope_pair(low_bf16(pairs.x), high_bf16(pairs.x), turn.cos.x, turn.sin.x, &a, &b);
        rope_pair(low_bf16(pairs.y), high_bf16(pairs.y), turn.cos.y, turn.sin.y, &c, &d);
        pairs = make_uint2(pack_bf16(a, b), pack_bf16(c, d));
    }
    const uint32_t magnitudes = __vmaxu2(pairs.x & kMagnitudes, pairs.y & kMagnitudes);
    uint32_t largest = max_u32(magnitudes & 0xffffu, magnitudes >> 16);
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
        largest = max_u32(largest, __shfl_xor_sync(kAllLanes, largest, h));
    const uint32_t byte = index_scale_byte(largest);
    const float reciprocal = ue8m0_reciprocal(static_cast<uint8_t>(byte));
    const uint32_t codes = e2m1_codes(make_uint4(pairs.x, pairs.y, 0, 0), reciprocal, 1.0f);
    constexpr Record r = record(RecordId::IndexFp4);
    reinterpret_cast<uint16_t*>(p.index.row(r, slot))[lane] =
        static_cast<uint16_t>(byte == kNanUE8M0 ? 0 : codes);
    if (lane % 8 == 0) p.index.scales(r, slot)[lane / 8] = static_cast<uint8_t>(byte);
}

}  // namespace flash_csa::sm90
