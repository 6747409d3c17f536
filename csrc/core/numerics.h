// Codecs, quantisers and FP32 primitives that give the same bits in g++ and in nvcc.
//
// Two rules make that so. Every rounding step is one of the *_rn wrappers below, which no compiler
// may fuse or reassociate (host builds use -ffp-contract=off). And everything is branchless, so the
// fixed-size loops vectorise for the CPU and unroll into registers on the GPU.
// Formulas: docs/numerics.md. BF16, E4M3, E2M1 and UE8M0 travel as bit patterns.
#pragma once

#include <cstdint>

#include "core/platform.h"

// Before a short loop: g++ would unroll it completely and then miss the vector code; nvcc must
// unroll it so that local arrays become registers.
#if defined(__CUDA_ARCH__)
#define FCSA_VECTORISE _Pragma("unroll")
#elif defined(__CUDACC__)
#define FCSA_VECTORISE
#else
#define FCSA_VECTORISE _Pragma("GCC unroll 1")
#endif

namespace flash_csa {

// ---- One correctly rounded FP32 operation each
//
// Builtins, not std::fma and friends: a std function compiled in an AVX2 file may be the copy that
// the linker hands to the baseline.

#ifdef __CUDA_ARCH__
FCSA_HD uint32_t float_bits(float x) { return __float_as_uint(x); }
FCSA_HD float bits_float(uint32_t bits) { return __uint_as_float(bits); }
FCSA_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
FCSA_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
FCSA_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FCSA_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
FCSA_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FCSA_HD float sqrt_rn(float x) { return __fsqrt_rn(x); }
#else
FCSA_HD uint32_t float_bits(float x) {
    uint32_t bits = 0;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
FCSA_HD float bits_float(uint32_t bits) {
    float x = 0;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
FCSA_HD float add_rn(float a, float b) { return a + b; }
FCSA_HD float sub_rn(float a, float b) { return a - b; }
FCSA_HD float mul_rn(float a, float b) { return a * b; }
FCSA_HD float div_rn(float a, float b) { return a / b; }
FCSA_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FCSA_HD float sqrt_rn(float x) { return __builtin_sqrtf(x); }
#endif

constexpr uint32_t kAbsMask = 0x7fffffffu;
constexpr uint32_t kInfBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;
constexpr uint8_t kNanE4M3 = 0x7f;
constexpr uint8_t kNanUE8M0 = 0xff;

// mask ? a : b, bit by bit. Masks, as a conditional expression whose arms hold float operations
// becomes a branch, and the loop around it scalar code.
FCSA_HD uint32_t mask_if(bool condition) { return 0u - static_cast<uint32_t>(condition); }
FCSA_HD uint32_t blend(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

FCSA_HD uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
FCSA_HD uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The larger of two non-negative floats; NaN wins because its bits are the largest.
FCSA_HD float max_nan(float a, float b) {
    return bits_float(max_u32(float_bits(a), float_bits(b)));
}

// x, with every NaN replaced by the one quiet NaN: processors differ in the NaN that they make.
FCSA_HD float canonical_nan(float x) {
    const uint32_t bits = float_bits(x);
    return bits_float(blend(mask_if((bits & kAbsMask) > kInfBits), kNanBits, bits));
}

// ---- BF16

FCSA_HD float bf16_to_f32(uint16_t x) { return bits_float(uint32_t{x} << 16); }

// Round to nearest even. Every NaN becomes 0x7fc0, so that a computed NaN is the same everywhere.
FCSA_HD uint16_t f32_to_bf16(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<uint16_t>(blend(mask_if((bits & kAbsMask) > kInfBits), kNanBits, rounded) >>
                                 16);
}

FCSA_HD float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }

// ---- Small floats
//
// With e the exponent of |x|, at least that of the smallest normal, adding 2^(e + 23 - mantissa
// bits) leaves |x| in units of its last kept bit in the low bits of the sum: rounded to nearest
// even by the FP32 adder, subnormals included.

// Magnitude code of mag (bits of a non-negative float not above the largest finite value).
template <int kMantissaBits, uint32_t kMinExponent>
FCSA_HD uint32_t round_magnitude(uint32_t mag) {
    const uint32_t exponent = max_u32(mag >> 23, kMinExponent);
    const uint32_t magic = (exponent + (23 - kMantissaBits)) << 23;
    const uint32_t units = float_bits(add_rn(bits_float(mag), bits_float(magic))) - magic;
    return units + ((exponent - kMinExponent) << kMantissaBits);
}

// Value of a magnitude code: a subnormal is read with its leading one, which is taken off again.
template <int kMantissaBits, uint32_t kMinExponent>
FCSA_HD float decode_magnitude(uint32_t code) {
    const uint32_t subnormal = mask_if((code >> kMantissaBits) == 0);
    const uint32_t normal = (code << (23 - kMantissaBits)) + ((kMinExponent - 1) << 23);
    const float with_one = bits_float(normal + (subnormal & (1u << 23)));
    return sub_rn(with_one, bits_float(subnormal & (kMinExponent << 23)));
}

// E4M3 (FN: no infinity): round to nearest even, saturating at 448; NaN gives 0x7f.
FCSA_HD uint8_t encode_e4m3(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t mag = bits & kAbsMask;
    const uint32_t code = round_magnitude<3, 121>(min_u32(mag, 0x43e00000u));  // 448; 121 is 2^-6
    const uint32_t finite = code | ((bits >> 24) & 0x80u);
    return static_cast<uint8_t>(blend(mask_if(mag > kInfBits), kNanE4M3, finite));
}

FCSA_HD float decode_e4m3(uint8_t code) {
    const uint32_t mag = code & 0x7fu;
    const uint32_t sign = (code & 0x80u) << 24;
    const uint32_t finite = float_bits(decode_magnitude<3, 121>(mag)) | sign;
    return bits_float(blend(mask_if(mag == kNanE4M3), kNanBits, finite));
}

// E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6): round to nearest even, saturating at 6. Negative zero and
// negative values that round to zero keep their sign (code 8). NaN is the caller's affair: 6.
FCSA_HD uint8_t encode_e2m1(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t code = round_magnitude<1, 127>(min_u32(bits & kAbsMask, 0x40c00000u));  // 6
    return static_cast<uint8_t>(code | ((bits >> 28) & 8u));
}

// Reads the low nibble of code.
FCSA_HD float decode_e2m1(uint8_t code) {
    const uint32_t sign = (code & 8u) << 28;
    return bits_float(float_bits(decode_magnitude<1, 127>(code & 7u)) | sign);
}

// UE8M0: 2^(byte - 127); byte 0 is the FP32 subnormal 2^-127, byte 0xff is NaN.
FCSA_HD float decode_ue8m0(uint8_t byte) {
    const uint32_t half = byte == 0 || byte == kNanUE8M0 ? 0x400000u : 0u;
    return bits_float((uint32_t{byte} << 23) | half);
}

// ceil(log2(x)) from the bits of a non-negative x, as a UE8M0 byte; NaN and Inf give 0xff.
FCSA_HD uint8_t encode_ue8m0_ceil(float x) {
    const uint32_t mag = float_bits(x) & kAbsMask;
    const uint32_t byte = min_u32((mag + 0x7fffffu) >> 23, 0xfeu);
    return static_cast<uint8_t>(mag >= kInfBits ? kNanUE8M0 : byte);
}

// ---- Group scales: amax is not negative; NaN or Inf in a group makes its scale NaN

// Largest magnitude of kCount BF16 values, as BF16 bits: NaN above Inf above every finite value.
template <int kCount>
FCSA_HD uint16_t absmax(const uint16_t* x) {
    uint16_t largest = 0;
    FCSA_VECTORISE for (int i = 0; i < kCount; ++i) {
        const uint16_t mag = x[i] & 0x7fff;
        largest = mag > largest ? mag : largest;
    }
    return largest;
}

// Main FP4: E4M3_RNE(amax / 6), at least 2^-9, saturating at 448.
FCSA_HD float fp4_main_scale(float amax, uint8_t* byte) {
    const uint8_t finite = encode_e4m3(div_rn(max_nan(amax, 0x1.8p-7f), 6.0f));  // 6 * 2^-9
    *byte = float_bits(amax) >= kInfBits ? kNanE4M3 : finite;
    return decode_e4m3(*byte);
}

// Window FP8: 2^ceil(log2(amax / 448)), at least 2^-22.
FCSA_HD float window_scale(float amax, uint8_t* byte) {
    *byte = encode_ue8m0_ceil(div_rn(max_nan(amax, 1e-4f), 448.0f));
    return decode_ue8m0(*byte);
}

// Index FP4: 2^ceil(log2(amax / 6)), at least 2^-126.
FCSA_HD float index_scale(float amax, uint8_t* byte) {
    *byte = encode_ue8m0_ceil(div_rn(max_nan(amax, 0x1.8p-124f), 6.0f));  // 6 * 2^-126
    return decode_ue8m0(*byte);
}

// Index FP8: max(amax, 1e-4) / 448, not a power of two.
FCSA_HD float index_fp8_scale(float amax) {
    const float finite = div_rn(max_nan(amax, 1e-4f), 448.0f);
    return bits_float(float_bits(amax) >= kInfBits ? kNanBits : float_bits(finite));
}

// Exact reciprocal of the scale of a byte that window_scale or index_scale made (1..253), so that
// x * reciprocal has the bits of x / scale, subnormal results included.
FCSA_HD float ue8m0_reciprocal(uint8_t byte) { return bits_float((254u - byte) << 23); }

// ---- Whole groups of BF16 values; the codes of a group with a NaN scale are 0

// Byte i: element 2i in the low nibble, 2i + 1 in the high.
template <int kCount>
FCSA_HD void pack_nibbles(const uint8_t* nibbles, uint8_t* packed) {
    FCSA_VECTORISE for (int i = 0; i < kCount / 2; ++i) {
        packed[i] = static_cast<uint8_t>(nibbles[2 * i] | (nibbles[2 * i + 1] << 4));
    }
}

template <int kCount>
FCSA_HD void unpack_nibbles(const uint8_t* packed, uint8_t* nibbles) {
    FCSA_VECTORISE for (int i = 0; i < kCount / 2; ++i) {
        nibbles[2 * i] = packed[i] & 0x0f;
        nibbles[2 * i + 1] = packed[i] >> 4;
    }
}

// MainFp4: kGroups groups of 16 values -> 8 bytes and an E4M3 scale each. A true division:
// multiplying by the reciprocal sends 42 reachable pairs to another code. Many groups at once, as
// the CPU encodes a row twice as fast as it does 32 groups.
template <int kGroups>
FCSA_HD void encode_groups_main(const uint16_t* x, uint8_t* codes, uint8_t* scales) {
    float divisors[kGroups];
    for (int g = 0; g < kGroups; ++g) divisors[g] = bf16_to_f32(absmax<16>(x + 16 * g));
    FCSA_VECTORISE for (int g = 0; g < kGroups; ++g) {
        divisors[g] = fp4_main_scale(divisors[g], &scales[g]);
    }
    uint8_t nibbles[16 * kGroups];
    for (int g = 0; g < kGroups; ++g) {
        const uint8_t keep = scales[g] == kNanE4M3 ? 0x00 : 0x0f;
        FCSA_VECTORISE for (int i = 0; i < 16; ++i) {
            nibbles[16 * g + i] =
                encode_e2m1(div_rn(bf16_to_f32(x[16 * g + i]), divisors[g])) & keep;
        }
    }
    pack_nibbles<16 * kGroups>(nibbles, codes);
}

// IndexFp4: 32 values -> 16 bytes and a UE8M0 scale.
FCSA_HD void encode_group_index(const uint16_t* x, uint8_t* codes, uint8_t* scale) {
    index_scale(bf16_to_f32(absmax<32>(x)), scale);
    const float reciprocal = ue8m0_reciprocal(*scale);
    const uint8_t keep = *scale == kNanUE8M0 ? 0x00 : 0x0f;
    uint8_t nibbles[32];
    FCSA_VECTORISE for (int i = 0; i < 32; ++i) {
        nibbles[i] = encode_e2m1(mul_rn(bf16_to_f32(x[i]), reciprocal)) & keep;
    }
    pack_nibbles<32>(nibbles, codes);
}

// WindowFp8 (kGroup 32) and MixedFp8 (64): kGroup values -> kGroup bytes and a UE8M0 scale.
template <int kGroup>
FCSA_HD void encode_group_fp8(const uint16_t* x, uint8_t* codes, uint8_t* scale) {
    window_scale(bf16_to_f32(absmax<kGroup>(x)), scale);
    const float reciprocal = ue8m0_reciprocal(*scale);
    const uint8_t keep = *scale == kNanUE8M0 ? 0x00 : 0xff;
    FCSA_VECTORISE for (int i = 0; i < kGroup; ++i) {
        codes[i] = encode_e4m3(mul_rn(bf16_to_f32(x[i]), reciprocal)) & keep;
    }
}

// IndexFp8: 128 values -> 128 bytes and an FP32 scale.
FCSA_HD void encode_row_index_fp8(const uint16_t* x, uint8_t* codes, float* scale) {
    const float divisor = index_fp8_scale(bf16_to_f32(absmax<128>(x)));
    const uint8_t keep = float_bits(divisor) == kNanBits ? 0x00 : 0xff;
    for (int i = 0; i < 128; ++i) {
        codes[i] = encode_e4m3(div_rn(bf16_to_f32(x[i]), divisor)) & keep;
    }
    *scale = divisor;
}

// code * scale as float or as BF16 bits (exact for every record that an encoder wrote). A NaN
// scale gives NaN, a never-written group of zero bytes gives 0.
FCSA_HD void put_value(float x, float* out) { *out = canonical_nan(x); }
FCSA_HD void put_value(float x, uint16_t* out) { *out = f32_to_bf16(x); }

template <int kCount, class Out>
FCSA_HD void decode_fp8(const uint8_t* codes, float scale, Out* out) {
    FCSA_VECTORISE for (int i = 0; i < kCount; ++i) {
        put_value(mul_rn(decode_e4m3(codes[i]), scale), &out[i]);
    }
}

template <int kGroups, class Out>
FCSA_HD void decode_groups_main(const uint8_t* codes, const uint8_t* scales, Out* out) {
    uint8_t nibbles[16 * kGroups];
    unpack_nibbles<16 * kGroups>(codes, nibbles);
    for (int g = 0; g < kGroups; ++g) {
        const float scale = decode_e4m3(scales[g]);
        FCSA_VECTORISE for (int i = 0; i < 16; ++i) {
            put_value(mul_rn(decode_e2m1(nibbles[16 * g + i]), scale), &out[16 * g + i]);
        }
    }
}

template <class Out>
FCSA_HD void decode_group_index(const uint8_t* codes, uint8_t scale, Out* out) {
    uint8_t nibbles[32];
    unpack_nibbles<32>(codes, nibbles);
    const float factor = decode_ue8m0(scale);
    FCSA_VECTORISE for (int i = 0; i < 32; ++i) {
        put_value(mul_rn(decode_e2m1(nibbles[i]), factor), &out[i]);
    }
}

template <int kGroup, class Out>
FCSA_HD void decode_group_fp8(const uint8_t* codes, uint8_t scale, Out* out) {
    decode_fp8<kGroup>(codes, decode_ue8m0(scale), out);
}

template <class Out>
FCSA_HD void decode_row_index_fp8(const uint8_t* codes, float scale, Out* out) {
    decode_fp8<128>(codes, scale, out);
}

// ---- Elementary functions

// exp(x) = 2^n * mantissa; n in the low bits of `shifted`, a float that counts in ones.
struct ExpParts {
    float mantissa;  // 0.7 .. 1.42
    float shifted;
};

// -104 <= x <= 89: exp(r), |r| <= ln(2) / 2, as a degree-6 minimax polynomial.
FCSA_HD ExpParts exp_parts(float x) {
    const float shifted = fma_rn(x, 0x1.715476p+0f, 0x1.8p+23f);
    const float n = sub_rn(shifted, 0x1.8p+23f);
    float r = fma_rn(n, -0x1.62e430p-1f, x);  // exact: r is a multiple of 2^-24 below 0.35
    r = fma_rn(n, 0x1.05c610p-29f, r);
    float p = 0x1.6a2428p-10f;
    p = fma_rn(p, r, 0x1.1239e2p-7f);
    p = fma_rn(p, r, 0x1.5558f2p-5f);
    p = fma_rn(p, r, 0x1.555492p-3f);
    p = fma_rn(p, r, 0x1.fffffcp-2f);
    p = fma_rn(p, r, 1.0f);
    p = fma_rn(p, r, 1.0f);
    return {p, shifted};
}

// exp(x) within 1 ulp where the result is normal. Overflow gives Inf, underflow is gradual,
// exp(-Inf) = 0, NaN stays NaN.
FCSA_HD float exp_fma(float x) {
    const float top = x > 89.0f ? 89.0f : x;              // 2^128.4: Inf after scaling
    const float clamped = top < -104.0f ? -104.0f : top;  // 2^-150.04: 0 after scaling
    const ExpParts e = exp_parts(clamped);
    // 2^n in two exact factors, as n may be 128 or lie below -126. The offset makes n non-negative.
    const uint32_t biased = float_bits(e.shifted) - 0x4b400000u + 256u;
    const uint32_t half = biased >> 1;
    const float scale = bits_float((half - 1u) << 23);          // 2^(floor(n / 2))
    const float rest = bits_float((biased - half - 1u) << 23);  // 2^(ceil(n / 2))
    return mul_rn(mul_rn(e.mantissa, scale), rest);
}

FCSA_HD float rsqrt_ieee(float x) { return div_rn(1.0f, sqrt_rn(x)); }

// Sum of x[i]^2: lane l = i % 32 is an FMA chain in ascending i, then the lanes are halved
// 32 -> 16 -> 8 -> 4 -> 2 -> 1.
template <int kCount>
FCSA_HD float sum_squares(const float* x) {
    static_assert(kCount % 32 == 0, "whole passes over the 32 lanes");
    float lanes[32] = {};
    for (int base = 0; base < kCount; base += 32) {
        for (int l = 0; l < 32; ++l) lanes[l] = fma_rn(x[base + l], x[base + l], lanes[l]);
    }
    for (int width = 16; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] = add_rn(lanes[l], lanes[l + width]);
    }
    return lanes[0];
}

// 1 / sqrt(mean(x^2) + eps); the mean is a division by a power of two, hence exact.
template <int kCount>
FCSA_HD float rms_factor(const float* x, float eps) {
    static_assert((kCount & (kCount - 1)) == 0, "the mean must be exact");
    return rsqrt_ieee(add_rn(mul_rn(sum_squares<kCount>(x), 1.0f / kCount), eps));
}

// RMSNorm of one row, (x * factor) * w, rounded once to BF16.
template <int kCount>
FCSA_HD void rms_norm_row(const float* x, const float* w, float eps, uint16_t* out) {
    const float factor = rms_factor<kCount>(x, eps);
    FCSA_VECTORISE for (int i = 0; i < kCount; ++i) out[i] =
        f32_to_bf16(mul_rn(mul_rn(x[i], factor), w[i]));
}

// ---- RoPE on interleaved pairs (2i, 2i + 1)
//
// Products and sum are rounded one by one, as eager PyTorch does: a fused form changes golden
// bytes.

constexpr int kRopeDims = 64;  // the last dims of a main, window or index vector

FCSA_HD void rope_pair(float a, float b, float cos, float sin, float* out_a, float* out_b) {
    *out_a = sub_rn(mul_rn(a, cos), mul_rn(b, sin));
    *out_b = add_rn(mul_rn(a, sin), mul_rn(b, cos));
}

FCSA_HD void inverse_rope_pair(float a, float b, float cos, float sin, float* out_a, float* out_b) {
    *out_a = add_rn(mul_rn(a, cos), mul_rn(b, sin));
    *out_b = sub_rn(mul_rn(b, cos), mul_rn(a, sin));
}

// Rotates the last 64 dims of a BF16 row in place. cos_sin: 32 cosines, then 32 sines.
template <int kDims>
FCSA_HD void rope_row(uint16_t* row, const float* cos_sin) {
    uint16_t* tail = row + kDims - kRopeDims;
    FCSA_VECTORISE for (int i = 0; i < kRopeDims / 2; ++i) {
        float a = 0, b = 0;
        rope_pair(bf16_to_f32(tail[2 * i]), bf16_to_f32(tail[2 * i + 1]), cos_sin[i],
                  cos_sin[kRopeDims / 2 + i], &a, &b);
        tail[2 * i] = f32_to_bf16(a);
        tail[2 * i + 1] = f32_to_bf16(b);
    }
}

template <int kDims>
FCSA_HD void inverse_rope_row(uint16_t* row, const float* cos_sin) {
    uint16_t* tail = row + kDims - kRopeDims;
    FCSA_VECTORISE for (int i = 0; i < kRopeDims / 2; ++i) {
        float a = 0, b = 0;
        inverse_rope_pair(bf16_to_f32(tail[2 * i]), bf16_to_f32(tail[2 * i + 1]), cos_sin[i],
                          cos_sin[kRopeDims / 2 + i], &a, &b);
        tail[2 * i] = f32_to_bf16(a);
        tail[2 * i + 1] = f32_to_bf16(b);
    }
}

// Walsh-Hadamard transform / sqrt(128) in place: butterflies at distance 1, 2, ... 64, then scale.
// Constant geometry: each stage pairs neighbours and moves the paired index bit to the top, so all
// seven stages are the same contiguous loop and leave the natural order.
FCSA_HD void hadamard_128(float* x) {
    float sums[128];
    for (int stage = 0; stage < 7; ++stage) {
        FCSA_VECTORISE for (int i = 0; i < 64; ++i) {
            sums[i] = add_rn(x[2 * i], x[2 * i + 1]);
            sums[64 + i] = sub_rn(x[2 * i], x[2 * i + 1]);
        }
        for (int i = 0; i < 128; ++i) x[i] = sums[i];
    }
    for (int i = 0; i < 128; ++i) x[i] = mul_rn(x[i], 0.08838834764831845f);
}

}  // namespace flash_csa
