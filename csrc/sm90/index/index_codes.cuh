// FP4 index codes as E4M3 operands of the tensor cores, in registers and in shared memory.
//
// A group of 32 codes is four words of 16 bytes. Of each word, the even codes become one word of
// four E4M3 bytes and the odd codes another; the even words of a group are K 0..15 of an MMA step,
// the odd ones K 16..31. Keys and queries share that order, so no dot depends on it.
#pragma once

#include <cstdint>

#include "core/scoring.h"
#include "sm90/common/permute.cuh"

namespace flash_csa::sm90 {

// E2M1 bits s eem put into E4M3 as s00eem00 are the value times 2^-6, subnormals and zeros too.
constexpr int kPlacedExponent = -6;

struct PlacedWord {
    uint32_t even, odd;
};

__device__ __forceinline__ PlacedWord place_codes(uint32_t codes) {
    PlacedWord out;
    out.even = ((codes << 2) & 0x1c1c1c1cu) | ((codes << 4) & 0x80808080u);
    out.odd = ((codes >> 2) & 0x1c1c1c1cu) | (codes & 0x80808080u);
    return out;
}

// E4M3 of four E2M1 magnitudes (one in the low 3 bits of each byte) times 2^fold: a table of bytes,
// zero stays zero, the others are normal for -5 <= fold <= 6.
__device__ __forceinline__ uint32_t fold_magnitudes(uint32_t magnitudes, int32_t fold) {
    const uint32_t low = 0x3c383000u + fold * 0x08080800u;   // 1.5, 1, 0.5, 0
    const uint32_t high = 0x4c484440u + fold * 0x08080808u;  // 6, 4, 3, 2
    const uint32_t pairs = magnitudes | magnitudes >> 4;
    return __byte_perm(low, high, __byte_perm(pairs, 0, 0x4420));
}

__device__ __forceinline__ PlacedWord fold_codes(uint32_t codes, int32_t fold) {
    PlacedWord out;
    out.even = fold_magnitudes(codes & 0x07070707u, fold) | ((codes << 4) & 0x80808080u);
    out.odd = fold_magnitudes(codes >> 4 & 0x07070707u, fold) | (codes & 0x80808080u);
    return out;
}

constexpr int32_t kMinFold = -5, kMaxFold = 6;  // 0.5 * 2^-5 is normal, 6 * 2^6 finite

__device__ __forceinline__ int32_t scale_byte(uint32_t word, int group) {
    return static_cast<int32_t>(word >> (8 * group) & 0xffu);
}

// The least of the four.
__device__ __forceinline__ int32_t lowest_scale(uint32_t word) {
    const uint32_t pairs = __vminu2(word & 0x00ff00ffu, __byte_perm(word, 0, 0x4341));
    return static_cast<int32_t>(__vminu2(pairs, pairs >> 16) & 0xffu);
}

struct ByteRange {
    int32_t low, high;
};

__device__ __forceinline__ ByteRange scale_range(uint32_t word) {
    const int32_t a = scale_byte(word, 0), b = scale_byte(word, 1);
    const int32_t c = scale_byte(word, 2), d = scale_byte(word, 3);
    return {min(min(a, b), min(c, d)), max(max(a, b), max(c, d))};
}

// Powers of two may be moved between the factors of a score where no sum or product of it leaves
// the normal range, however they are moved. That holds for exponents of keys in -31 .. 32, those of
// queries within 20, and weights of 0 or 2^-40 .. 2^6; docs/index.md has the count of bits.
constexpr uint32_t kUnitScales = 0x7f7f7f7fu;  // four exponents of 0

// Bits by which the scales of keys are not plain, to be united with those of other keys.
__device__ __forceinline__ uint32_t odd_key_bits(uint32_t scales) {
    return (scales + 0x20202020u) ^ 0x80808080u;  // a byte in 0x60 .. 0x9f gets 00 on top
}
__device__ __forceinline__ bool is_plain(uint32_t odd_bits) {
    return (odd_bits & 0xc0c0c0c0u) == 0;
}

__device__ __forceinline__ bool is_plain_query(ByteRange scales) {
    return scales.low >= 127 - 20 && scales.high <= 127 + 20;
}

// Infinities and NaN give the same score wherever the powers are.
__device__ __forceinline__ bool is_plain_weight(float weight) {
    const float size = fabsf(weight);
    return !(size < 0x1p-40f && size > 0.0f) && !(size > 0x1p6f && size < bits_float(kInfBits));
}

// 2^(byte - 127) for 1 <= byte <= 254.
__device__ __forceinline__ float power_of_two(int32_t byte) {
    return __uint_as_float(static_cast<uint32_t>(byte) << 23);
}

// How far the exponents of a query head are folded into its codes: the largest becomes kMaxFold.
__device__ __forceinline__ int32_t head_fold(uint32_t scales, ByteRange range, int group) {
    const bool folds = range.high - range.low <= kMaxFold - kMinFold;
    return folds ? scale_byte(scales, group) - range.high + kMaxFold : 0;
}

// ---- Integers: half units times powers of two, for dots of all groups in one accumulator

// Exponents of a vector's groups differ by at most this: 12 half units times 2^3 fit a byte.
constexpr int32_t kMaxIntegerFold = 3;

// Dots of folded keys are integers, which the epilogue takes for subnormal floats: as quarters of
// 2^-149. Their weights make up for most of it, the last factor of a score for the rest.
constexpr int32_t kFoldedWeightExponent = 100;
constexpr int32_t kFoldedScoreExponent = 149 - 2 - kFoldedWeightExponent;

// Bytes of four E2M1 codes (the low 16 bits) that select positive values, negative ones are 0: a
// set top bit of a selector repeats the sign of the byte, which is 0.
struct HalfUnits {
    uint32_t low, high;  // 0, 1, 2, 3 and 4, 6, 8, 12 half units times a power of two

    // Times 2^shift.
    __device__ __forceinline__ explicit HalfUnits(uint32_t shift)
        : low(0x03020100u << shift), high(0x0c080604u << shift) {}
    __device__ __forceinline__ uint32_t positive(uint32_t codes) const {
        return permute(low, high, codes);
    }
};

// Two words of four bytes each: codes 0 .. 3 and 4 .. 7 of a word.
struct IntegerWord {
    uint32_t low, high;
};

__device__ __forceinline__ IntegerWord positive_units(uint32_t codes, const HalfUnits& units) {
    return {units.positive(codes), units.positive(codes >> 16)};
}

__device__ __forceinline__ IntegerWord negative_units(uint32_t codes, const HalfUnits& units) {
    return positive_units(codes ^ 0x88888888u, units);
}

// positive - negative in every byte; one of the two is 0.
__device__ __forceinline__ uint32_t signed_units(uint32_t positive, uint32_t negative) {
    return ((positive | 0x80808080u) - negative) ^ 0x80808080u;
}
__device__ __forceinline__ IntegerWord signed_units(const IntegerWord& positive,
                                                    const IntegerWord& negative) {
    return {signed_units(positive.low, negative.low), signed_units(positive.high, negative.high)};
}

}  // namespace flash_csa::sm90
