// Index scores and their order, the same bits on every back end.
//
//   score[t, j] = sum over heads h of w[t, h] * max(0, q[t, h] . k[j])
//
// The dot of one 32-channel group of E2M1 values is an exact integer count of quarters; the FP32
// roundings after it are fixed by combine_groups, accumulate_head and combine_lanes
// (docs/numerics.md).
#pragma once

#include <cstdint>

#include "core/numerics.h"
#include "core/platform.h"

namespace flash_csa {

constexpr int kIndexDims = 128;
constexpr int kIndexGroups = 4;
constexpr int kIndexGroupDims = kIndexDims / kIndexGroups;

// ---- Order of selection

// Larger key = selected earlier. -0.0 and +0.0 share a key, -Inf has the lowest of all numbers, and
// NaN has key 0, which is never selected.
FCSA_HD uint32_t order_key(float score) {
    const uint32_t bits = float_bits(score);
    const uint32_t negative = mask_if((bits >> 31) != 0);
    const uint32_t key = (bits & kAbsMask) == 0 ? 0x80000000u : bits ^ (negative | 0x80000000u);
    return (bits & kAbsMask) > kInfBits ? 0u : key;
}

// Total order: larger score first, then lower position. Unique per position.
FCSA_HD uint64_t order_key(float score, int32_t position) {
    return (uint64_t{order_key(score)} << 32) | ~static_cast<uint32_t>(position);
}

constexpr uint32_t kForcedKey = 0xffffffffu;  // above the key of +Inf

// A score with this order key: zeros become +0, key 0 becomes NaN.
FCSA_HD float score_of_key(uint32_t key) {
    const uint32_t bits = key >> 31 != 0 ? key ^ 0x80000000u : ~key;
    return bits_float(key == 0 ? kNanBits : bits);
}

// ---- Dots

// E2M1 value of the low nibble in half units: 0, 1, 2, 3, 4, 6, 8, 12 with its sign. Comparisons
// instead of a table: they vectorise in bytes.
FCSA_HD int8_t e2m1_half_units(uint8_t code) {
    const uint8_t mag = code & 7;
    const int8_t units = static_cast<int8_t>(mag + (mag > 4) + (mag > 5) + 3 * (mag > 6));
    return static_cast<int8_t>((code & 8) != 0 ? -units : units);
}

// The 64 code bytes of one index vector as 128 half units.
FCSA_HD void half_units_row(const uint8_t* codes, int8_t* units) {
    uint8_t nibbles[kIndexDims];
    unpack_nibbles<kIndexDims>(codes, nibbles);
    FCSA_VECTORISE for (int i = 0; i < kIndexDims; ++i) units[i] = e2m1_half_units(nibbles[i]);
}

// 2^(q exponent + k exponent) as an FP32 product: beyond the normal range it rounds like any other
// product (subnormal, 0 or Inf), and a NaN scale makes it NaN.
FCSA_HD float scale_product(uint8_t q, uint8_t k) {
    return mul_rn(decode_ue8m0(q), decode_ue8m0(k));
}

// Dot of one head from its four group dots (in quarters) and scale products.
FCSA_HD float combine_groups(const int32_t* quarters, const float* scales) {
    float dot = mul_rn(mul_rn(static_cast<float>(quarters[0]), 0.25f), scales[0]);
    for (int g = 1; g < kIndexGroups; ++g) {
        dot = fma_rn(mul_rn(static_cast<float>(quarters[g]), 0.25f), scales[g], dot);
    }
    return dot;
}

// ---- Sum over heads

// max(x, 0) that keeps NaN, so that a NaN scale shows in the score.
FCSA_HD float relu(float x) { return x < 0.0f ? 0.0f : x; }

// The partial sum to which a head belongs: the accumulator columns of a tensor-core tile put heads
// 2t, 2t + 1 (mod 8) in one thread.
constexpr int kHeadLanes = 4;
FCSA_HD int head_lane(int head) { return (head % 8) / 2; }

FCSA_HD float accumulate_head(float partial, float weight, float dot) {
    return fma_rn(weight, relu(dot), partial);
}

// Score from the four partial sums, each an accumulate_head chain in ascending head from +0.
FCSA_HD float combine_lanes(const float* partials) {
    return canonical_nan(
        add_rn(add_rn(partials[0], partials[1]), add_rn(partials[2], partials[3])));
}

}  // namespace flash_csa
