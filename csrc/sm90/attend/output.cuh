// The end of attention on accumulators in paired order: rounding, inverse rotation, stores.
#pragma once

#include <cstdint>

#include "core/numerics.h"
#include "core/params.h"
#include "sm90/attend/dequant.cuh"

namespace flash_csa::sm90 {

inline constexpr int kGroupDims = 8;  // dims of one 16-byte store
inline constexpr int kFirstRotated = (kHeadDim - kRopeDims) / kGroupDims;

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// The row of the rotation table with which a row's output is turned back; null: not at all.
template <class Params>
__device__ __forceinline__ const float* derotation(const Params& p, int64_t row) {
    if (p.derotate_positions == nullptr) return nullptr;
    const int32_t position = p.derotate_positions[row];
    return p.derotate.holds(position) ? p.derotate.at(position) : nullptr;
}

// Turns a pair of neighbouring rotated dims back. pair: 0 .. 31.
__device__ __forceinline__ uint32_t derotate_pair(uint32_t x, const float* cos_sin, int pair) {
    float a, b;
    inverse_rope_pair(bf16_to_f32(static_cast<uint16_t>(x)),
                      bf16_to_f32(static_cast<uint16_t>(x >> 16)), cos_sin[pair],
                      cos_sin[kRopeDims / 2 + pair], &a, &b);
    return pack_bf16(a, b);
}

// Turns group `group` (0 .. 63) of a head back: 8 BF16 dims, in natural order.
__device__ __forceinline__ uint4 derotate_group(uint4 x, const float* cos_sin, int group) {
    const int pair = (group - kFirstRotated) * kGroupDims / 2;
    return make_uint4(derotate_pair(x.x, cos_sin, pair), derotate_pair(x.y, cos_sin, pair + 1),
                      derotate_pair(x.z, cos_sin, pair + 2), derotate_pair(x.w, cos_sin, pair + 3));
}

// Stores a group. cos_sin: null where nothing is turned back, also where that is known of all
// groups of the call at compile time.
__device__ __forceinline__ void store_group(uint16_t* head, int group, uint4 x,
                                            const float* cos_sin) {
    if (cos_sin != nullptr && group >= kFirstRotated) x = derotate_group(x, cos_sin, group);
    *reinterpret_cast<uint4*>(head + group * kGroupDims) = x;
}

}  // namespace flash_csa::sm90
