// The queries of one row in shared memory, as B of the tensor cores, for keys with an offset.
//
// Keys are bytes 64 + v, v their half units with the powers of two of their groups: MMAs then take
// one byte a code. What 64 adds to a dot is a constant of the head, which one more K step takes
// away: keys of 64 by bytes whose sum is that of the head's units, negated.
#pragma once

#include "sm90/index/score_folded.cuh"
#include "sm90/index/score_keys.cuh"

namespace flash_csa::sm90 {

constexpr uint32_t kKeyOffset = 0x40404040u;
// Exponents of a key differ by at most this: 64 - 12 * 2^2 > 0 and 64 + 12 * 2^2 < 128.
constexpr int32_t kMaxRowFold = 2;

// Bytes 64 + v and 64 - v for v = 0, 1, 2, 3 and 4, 6, 8, 12 half units times a power of two, the
// latter from the last to the first: a complement selects them. No top bit is set, so a permutation
// gives 0 where that of its selector is.
struct alignas(16) OffsetUnits {
    uint32_t plus_low, plus_high, minus_low, minus_high;

    __device__ __forceinline__ static OffsetUnits of(uint32_t shift) {
        return {kKeyOffset + (0x03020100u << shift), kKeyOffset + (0x0c080604u << shift),
                kKeyOffset - (0x0406080cu << shift), kKeyOffset - (0x00010203u << shift)};
    }
    // Four codes in the low 16 bits, and their complements.
    __device__ __forceinline__ uint32_t bytes(uint32_t codes, uint32_t opposite) const {
        return permute(plus_low, plus_high, codes) + permute(minus_low, minus_high, opposite);
    }
    // Eight codes. Dots of two halves shift and complement: their pipe is not that of permutations.
    __device__ __forceinline__ IntegerWord word(uint32_t codes) const {
        return {bytes(codes, dot_halves(codes, 0x00ffu, ~0u)),
                bytes(dot_halves(codes, 0x0100u, 0), dot_halves(codes, 0xff00u, ~0u))};
    }
};

// A group of a head of a row, half units with the powers of two of the head folded in.
struct RowHead {
    uint4 codes;
    uint32_t scales;
    float weight;

    __device__ __forceinline__ void load(const IndexScoresParams& p, int64_t row, int32_t head,
                                         int32_t group) {
        codes = {};
        scales = kUnitScales;
        weight = 0.0f;
        if (head >= p.query.heads) return;
        const uint8_t* from = p.query.codes.row(row) + head * kKeyBytes;
        codes = reinterpret_cast<const uint4*>(from)[group];
        scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
        weight = p.weights.f32 ? p.weights.f32.row(row)[head]
                               : __uint_as_float(p.weights.bf16.row(row)[head]);
    }
    // Once, when all has come: nothing waits for it before.
    __device__ __forceinline__ void finish(const IndexScoresParams& p) {
        if (!p.weights.f32) weight = bf16_to_f32(static_cast<uint16_t>(__float_as_uint(weight)));
    }
    __device__ __forceinline__ bool folds() const {
        const ByteRange range = scale_range(scales);
        return is_plain_query(range) && is_plain_weight(weight) &&
               range.high - range.low <= kMaxIntegerFold;
    }
    __device__ __forceinline__ HalfUnits table(int32_t group) const {
        const int32_t shift = scale_byte(scales, group) - scale_range(scales).low;
        return HalfUnits(min(shift, kMaxIntegerFold));
    }
    __device__ __forceinline__ IntegerWord convert(int step, const HalfUnits& table) const {
        const uint32_t words[kFoldedSteps] = {codes.x, codes.y, codes.z, codes.w};
        return signed_units(positive_units(words[step], table), negative_units(words[step], table));
    }
    __device__ __forceinline__ float folded_weight() const {
        const int32_t exponent = scale_range(scales).low + kFoldedWeightExponent;
        return mul_rn(weight, power_of_two(min(exponent, 254)));
    }
};

template <int kHeads>
struct RowTile {
    // [heads] of 128 bytes, 128-byte swizzle, K contiguous. Of the offsets: the first 32 bytes.
    alignas(1024) uint8_t units[kHeads * kQueryBytes];
    alignas(1024) uint8_t offsets[kHeads * kQueryBytes];
    float weights[kHeads];
    alignas(128) uint32_t zeros[32];  // eight keys of 0 as A, 16 bytes each: all of them, repeated
    int32_t row;
    uint32_t folds;  // a byte 1 of each warp whose part folds

    static constexpr uint32_t kAllFold = 0x01010101u;

    // A thread puts group `group` of head `head`; true where that can be.
    __device__ __forceinline__ bool put(const RowHead& from, int32_t head, int32_t group) {
        const HalfUnits table = from.table(group);
        int32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kFoldedSteps; ++i) {
            const IntegerWord word = from.convert(i, table);
            QueryTile::put_units(units, head, group, i, word);
            sum = __dp4a(static_cast<int32_t>(word.low), 0x01010101, sum);
            sum = __dp4a(static_cast<int32_t>(word.high), 0x01010101, sum);
        }
        // Eight bytes whose sum is -sum.
        const int32_t each = -sum >> 3, more = -sum & 7;
        uint64_t out = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            out |= uint64_t{static_cast<uint8_t>(each + (i < more))} << (8 * i);
        }
        uint8_t* row = offsets + head * kQueryBytes + ((group / 2) ^ (head % 8)) * 16;
        *reinterpret_cast<uint64_t*>(row + group % 2 * 8) = out;
        if (group == 0) weights[head] = from.folded_weight();
        return from.folds() && each >= -127 && each < 127;
    }
};

}  // namespace flash_csa::sm90
