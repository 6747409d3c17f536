// Scores of kLanes keys for the heads of one query: the inner loops of index_scores.
//
// Keys are decoded channel by channel, so that keys are vector lanes, and serve every head of every
// row of a tile. A query head is decoded the same way: FP4 as int16 half units, FP8 as float.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/params.h"
#include "core/scoring.h"
#include "cpu/simd.h"

namespace flash_csa::cpu {

constexpr int kLanes = 32;

// A record's row and its scales, unaligned.
struct KeyPointers {
    const uint8_t* rows[kLanes];
    const uint8_t* scales[kLanes];
};

inline float head_weight(const Weights& weights, int64_t row, int32_t head) {
    return weights.f32 ? weights.f32.row(row)[head] : bf16_to_f32(weights.bf16.row(row)[head]);
}

inline void load_head_scales(const IndexScoresParams& p, int64_t row, int32_t head, float* scales) {
    const uint32_t word = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
    for (int g = 0; g < kIndexGroups; ++g) {
        scales[g] = decode_ue8m0(static_cast<uint8_t>(word >> (8 * g)));
    }
}

FCSA_HD void load_key_scales(const KeyPointers& pointers, float (*scales)[kLanes]) {
    uint32_t words[kLanes];
    for (int e = 0; e < kLanes; ++e) std::memcpy(&words[e], pointers.scales[e], sizeof(uint32_t));
    for (int g = 0; g < kIndexGroups; ++g) {
        FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
            scales[g][e] = decode_ue8m0(static_cast<uint8_t>(words[e] >> (8 * g)));
        }
    }
}

template <class Value>
struct KeyBlock {
    alignas(64) Value values[kIndexDims][kLanes];
    alignas(64) float scales[kIndexGroups][kLanes];  // of the groups; FP8: scales[0] of the key
};

template <class Value>
struct QueryHead {
    Value values[kIndexDims];
    float scales[kIndexGroups];
    float weight;
};

// ---- FP4: half units and a scale per group

struct Fp4 {
    using Value = int16_t;
    using Keys = KeyBlock<Value>;
    using Head = QueryHead<Value>;

    static void load_head(const IndexScoresParams& p, int64_t row, int32_t head, Head* out) {
        int8_t units[kIndexDims];
        half_units_row(p.query.codes.row(row) + int64_t{head} * (kIndexDims / 2), units);
        for (int i = 0; i < kIndexDims; ++i) out->values[i] = units[i];
        load_head_scales(p, row, head, out->scales);
        out->weight = head_weight(p.weights, row, head);
    }

    static void load_keys(const KeyPointers& pointers, Keys* out) {
        constexpr int kWords = kIndexDims / 4;  // of four codes
        uint16_t words[kWords][kLanes];
        for (int e = 0; e < kLanes; ++e) {
            for (int w = 0; w < kWords; ++w) {
                std::memcpy(&words[w][e], pointers.rows[e] + 2 * w, sizeof(uint16_t));
            }
        }
        for (int i = 0; i < kIndexDims; ++i) {
            FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
                out->values[i][e] =
                    e2m1_half_units(static_cast<uint8_t>(words[i / 4][e] >> (i % 4 * 4)));
            }
        }
        load_key_scales(pointers, out->scales);
    }

    // Dot of a query head with key e, from the sums over the channels of each group.
    static FCSA_HD float dot(const Value (*sums)[kLanes], const Keys& keys, const Head& head,
                             int e) {
        int32_t quarters[kIndexGroups];
        float scales[kIndexGroups];
        for (int g = 0; g < kIndexGroups; ++g) {
            quarters[g] = sums[g][e];
            scales[g] = mul_rn(head.scales[g], keys.scales[g][e]);
        }
        return combine_groups(quarters, scales);
    }
};

// ---- FP8: values and a scale per key. FP4 queries come with their scales multiplied in.

struct Fp8 {
    using Value = float;
    using Keys = KeyBlock<Value>;
    using Head = QueryHead<Value>;

    static void load_head(const IndexScoresParams& p, int64_t row, int32_t head, Head* out) {
        if (p.query.scales_ue8m0) {
            const uint8_t* codes = p.query.codes.row(row) + int64_t{head} * (kIndexDims / 2);
            float scales[kIndexGroups];
            load_head_scales(p, row, head, scales);
            for (int i = 0; i < kIndexDims; ++i) {
                const uint8_t code = static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4));
                out->values[i] = mul_rn(decode_e2m1(code), scales[i / kIndexGroupDims]);
            }
            out->scales[0] = 1.0f;
        } else {
            const uint8_t* codes = p.query.codes.row(row) + int64_t{head} * kIndexDims;
            for (int i = 0; i < kIndexDims; ++i) out->values[i] = decode_e4m3(codes[i]);
            out->scales[0] = p.query.scales_f32.row(row)[head];
        }
        out->weight = head_weight(p.weights, row, head);
    }

    static void load_keys(const KeyPointers& pointers, Keys* out) {
        uint8_t codes[kIndexDims][kLanes];
        for (int e = 0; e < kLanes; ++e) {
            for (int i = 0; i < kIndexDims; ++i) codes[i][e] = pointers.rows[e][i];
            std::memcpy(&out->scales[0][e], pointers.scales[e], sizeof(float));
        }
        for (int i = 0; i < kIndexDims; ++i) {
            FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
                out->values[i][e] = decode_e4m3(codes[i][e]);
            }
        }
    }

    static FCSA_HD float dot(const Value (*sums)[kLanes], const Keys& keys, const Head& head,
                             int e) {
        const float sum = add_rn(add_rn(sums[0][e], sums[1][e]), add_rn(sums[2][e], sums[3][e]));
        return mul_rn(mul_rn(head.scales[0], keys.scales[0][e]), sum);
    }
};

// ---- Either, at every instruction level

template <class Format>
inline void score_row_body(const typename Format::Keys& keys, const typename Format::Head* heads,
                           int32_t num_heads, float* out) {
    using Value = typename Format::Value;
    alignas(64) float partials[kHeadLanes][kLanes] = {};
    for (int32_t h = 0; h < num_heads; ++h) {
        const Value* query = heads[h].values;
        alignas(64) Value sums[kIndexGroups][kLanes] = {};
        for (int i = 0; i < kIndexGroupDims; ++i) {
            // Unrolled, so that the sums stay in registers.
            _Pragma("GCC unroll 4") for (int g = 0; g < kIndexGroups; ++g) {
                const int channel = g * kIndexGroupDims + i;
                const Value* key = keys.values[channel];
                FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
                    const Value product = static_cast<Value>(query[channel] * key[e]);
                    sums[g][e] = static_cast<Value>(sums[g][e] + product);
                }
            }
        }
        float* partial = partials[head_lane(h)];
        FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
            partial[e] =
                accumulate_head(partial[e], heads[h].weight, Format::dot(sums, keys, heads[h], e));
        }
    }
    FCSA_VECTORISE for (int e = 0; e < kLanes; ++e) {
        const float lanes[kHeadLanes] = {partials[0][e], partials[1][e], partials[2][e],
                                         partials[3][e]};
        out[e] = combine_lanes(lanes);
    }
}

template <class Format>
struct Portable : Format {
    using typename Format::Head;
    using typename Format::Keys;

    static void load_keys(const KeyPointers& pointers, Keys* out) {
        per_level<Format::load_keys>(pointers, out);
    }
    static void score_row(const Keys& keys, const Head* heads, int32_t num_heads, float* out) {
        per_level<score_row_body<Format>>(keys, heads, num_heads, out);
    }
};

}  // namespace flash_csa::cpu
