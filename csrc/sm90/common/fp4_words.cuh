// E2M1 codes of whole words of BF16 values, two an instruction, without a conversion. Bit-equal to
// core/numerics.h.
//
// The code of a magnitude q is round(min(2q, q + 2, q / 2 + 4)): each line is one BF16 operation
// that adds 128, where BF16 counts in ones. A power of two as scale divides within it. For an E4M3
// scale q is rounded to BF16 first, from a reciprocal of 16 bits: a quotient of a BF16 value and an
// E4M3 scale that is no tie is at least 1 / 240 away from every tie, more than BF16 rounds by, and
// ties are exact. All values below 7 scales by all scales, each with the reciprocal off by
// -2 .. 2 ulp: no code differs.
#pragma once

#include <cuda_bf16.h>

#include "sm90/common/fp4_pairs.cuh"

namespace flash_csa::sm90 {

__device__ __forceinline__ uint32_t word_of(__nv_bfloat162 x) {
    return reinterpret_cast<const uint32_t&>(x);
}
__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t word) {
    return reinterpret_cast<const __nv_bfloat162&>(word);
}

// Eight magnitudes.
struct Magnitudes {
    uint32_t word[4];

    __device__ __forceinline__ explicit Magnitudes(uint4 x)
        : word{x.x & kMagnitudes, x.y & kMagnitudes, x.z & kMagnitudes, x.w & kMagnitudes} {}

    // The largest of the low halves and of the high ones.
    __device__ __forceinline__ uint32_t largest() const {
        return __vmaxu2(__vmaxu2(word[0], word[1]), __vmaxu2(word[2], word[3]));
    }
};

// 1 / scale in two parts, in both halves of a word.
struct Reciprocal {
    __nv_bfloat162 high, low;

    __device__ __forceinline__ explicit Reciprocal(float x) {
        high = __float2bfloat162_rn(x);
        low = __float2bfloat162_rn(x - low_bf16(word_of(high)));
    }
    __device__ __forceinline__ __nv_bfloat162 times(__nv_bfloat162 x) const {
        return __hfma2(x, high, __hmul2(x, low));
    }
};

// Codes in the low bytes of the halves, from the three lines.
__device__ __forceinline__ uint32_t lowest_line(__nv_bfloat162 near, __nv_bfloat162 middle,
                                                __nv_bfloat162 far) {
    return __vimin3_u16x2(word_of(near), word_of(middle), word_of(far));
}

// A word of BF16 that is small and exact.
__device__ __forceinline__ __nv_bfloat162 both(float x) { return __float2bfloat162_rn(x); }

__device__ __forceinline__ uint32_t word_codes(uint32_t magnitudes, const Reciprocal& reciprocal) {
    const __nv_bfloat162 q = reciprocal.times(pair_of(magnitudes));
    return lowest_line(__hfma2(q, both(2.0f), both(128.0f)), __hadd2(q, both(130.0f)),
                       __hfma2(q, both(0.5f), both(132.0f)));
}

// The same for a power of two, whose reciprocal is exact, halved and doubled as well.
struct PowerReciprocal {
    __nv_bfloat162 one, half, twice;

    __device__ __forceinline__ explicit PowerReciprocal(float x)
        : one(both(x)), half(both(0.5f * x)), twice(both(2.0f * x)) {}
};

__device__ __forceinline__ uint32_t word_codes(uint32_t magnitudes, const PowerReciprocal& r) {
    const __nv_bfloat162 x = pair_of(magnitudes);
    return lowest_line(__hfma2(x, r.twice, both(128.0f)), __hfma2(x, r.one, both(130.0f)),
                       __hfma2(x, r.half, both(132.0f)));
}

// Codes of eight values, the first in the lowest nibble: of their magnitudes, with their signs.
template <class Factor>
__device__ __forceinline__ uint32_t word_row_codes(const Magnitudes& magnitudes, uint4 x,
                                                   const Factor& factor) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // Bytes: values 0, 2, 1, 3.
        const uint32_t codes = __byte_perm(word_codes(magnitudes.word[2 * i], factor),
                                           word_codes(magnitudes.word[2 * i + 1], factor), 0x6240);
        const uint32_t signs = __byte_perm(words[2 * i], words[2 * i + 1], 0x7351);
        const uint32_t nibbles = codes | (signs >> 4 & 0x08080808u);
        half[i] = nibbles + (nibbles >> 12);  // the low half: 0, 1, 2, 3
    }
    return __byte_perm(half[0], half[1], 0x5410);
}

}  // namespace flash_csa::sm90
