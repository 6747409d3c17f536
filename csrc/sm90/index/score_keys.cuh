// One key in a thread's registers against query heads in shared memory: the inner loops of
// index_scores. A format gives both sides' decoded form and the dot of a head.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "core/params.h"
#include "core/scoring.h"

namespace flash_csa::sm90 {

__device__ __forceinline__ float head_weight(const Weights& weights, int64_t row, int32_t head) {
    return weights.f32 ? weights.f32.row(row)[head] : bf16_to_f32(weights.bf16.row(row)[head]);
}

// ---- FP4: half units in bytes and a scale per group; bit-equal

// Four E2M1 codes (the low 16 bits, first code lowest) as half units in the bytes of a word.
__device__ __forceinline__ uint32_t half_units_word(uint32_t codes) {
    const uint32_t magnitude = codes & 0x7777u;
    const uint32_t plus = __byte_perm(0x03020100u, 0x0c080604u, magnitude);
    const uint32_t minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, magnitude);
    const uint32_t negative = __byte_perm(0x0000ff00u, 0u, codes >> 3 & 0x1111u);
    return plus ^ ((plus ^ minus) & negative);
}

struct Fp4 {
    static constexpr RecordId kRecord = RecordId::IndexFp4;
    static constexpr int kWords = kIndexDims / 4;
    static constexpr int kGroupWords = kIndexGroupDims / 4;

    struct Key {
        uint32_t units[kWords];
        float scales[kIndexGroups];
    };
    struct alignas(16) Head {
        uint32_t units[kWords];
        float scales[kIndexGroups];
        float weight;
    };

    // 64 bytes of codes at a multiple of 16.
    static __device__ __forceinline__ void load_units(const uint8_t* codes, uint32_t* units) {
#pragma unroll
        for (int i = 0; i < kIndexDims / 32; ++i) {
            const uint4 words = reinterpret_cast<const uint4*>(codes)[i];
            const uint32_t packed[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                units[8 * i + 2 * w] = half_units_word(packed[w]);
                units[8 * i + 2 * w + 1] = half_units_word(packed[w] >> 16);
            }
        }
    }

    static __device__ __forceinline__ void load_scales(uint32_t word, float* scales) {
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            scales[g] = decode_ue8m0(static_cast<uint8_t>(word >> (8 * g)));
        }
    }

    static __device__ __forceinline__ void load_key(const uint8_t* row, const uint8_t* scales,
                                                    Key* key) {
        load_units(row, key->units);
        load_scales(*reinterpret_cast<const uint32_t*>(scales), key->scales);
    }

    static __device__ __forceinline__ void load_head(const IndexScoresParams& p, int64_t row,
                                                     int32_t head, Head* out) {
        load_units(p.query.codes.row(row) + int64_t{head} * (kIndexDims / 2), out->units);
        load_scales(static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]), out->scales);
        out->weight = head_weight(p.weights, row, head);
    }

    static __device__ __forceinline__ float dot(const Key& key, const Head& head) {
        int32_t quarters[kIndexGroups] = {};
        float scales[kIndexGroups];
#pragma unroll
        for (int w = 0; w < kWords; w += 4) {
            const uint4 query = *reinterpret_cast<const uint4*>(head.units + w);
            int32_t& sum = quarters[w / kGroupWords];
            sum = __dp4a(static_cast<int32_t>(query.x), static_cast<int32_t>(key.units[w]), sum);
            sum =
                __dp4a(static_cast<int32_t>(query.y), static_cast<int32_t>(key.units[w + 1]), sum);
            sum =
                __dp4a(static_cast<int32_t>(query.z), static_cast<int32_t>(key.units[w + 2]), sum);
            sum =
                __dp4a(static_cast<int32_t>(query.w), static_cast<int32_t>(key.units[w + 3]), sum);
        }
        const float4 query_scales = *reinterpret_cast<const float4*>(head.scales);
        scales[0] = mul_rn(query_scales.x, key.scales[0]);
        scales[1] = mul_rn(query_scales.y, key.scales[1]);
        scales[2] = mul_rn(query_scales.z, key.scales[2]);
        scales[3] = mul_rn(query_scales.w, key.scales[3]);
        return combine_groups(quarters, scales);
    }
};

// ---- FP8: values and a scale per key. FP4 queries come with their scales multiplied in.

struct Fp8 {
    static constexpr RecordId kRecord = RecordId::IndexFp8;
    struct Key {
        float values[kIndexDims];
        float scale;
    };
    struct alignas(16) Head {
        float values[kIndexDims];
        float scale;
        float weight;
    };

    // 128 bytes of codes at a multiple of 16.
    static __device__ __forceinline__ void load_values(const uint8_t* codes, float* values) {
#pragma unroll
        for (int i = 0; i < kIndexDims / 16; ++i) {
            const uint4 words = reinterpret_cast<const uint4*>(codes)[i];
            const uint32_t packed[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int b = 0; b < 16; b += 2) {
                const __half2 pair{__nv_cvt_fp8x2_to_halfraw2(
                    static_cast<__nv_fp8x2_storage_t>(packed[b / 4] >> (b % 4 * 8)), __NV_E4M3)};
                values[16 * i + b] = __low2float(pair);
                values[16 * i + b + 1] = __high2float(pair);
            }
        }
    }

    static __device__ __forceinline__ void load_key(const uint8_t* row, const uint8_t* scales,
                                                    Key* key) {
        load_values(row, key->values);
        key->scale = *reinterpret_cast<const float*>(scales);
    }

    static __device__ __forceinline__ void load_head(const IndexScoresParams& p, int64_t row,
                                                     int32_t head, Head* out) {
        const uint8_t* codes = p.query.codes.row(row);
        if (p.query.scales_f32) {
            load_values(codes + int64_t{head} * kIndexDims, out->values);
            out->scale = p.query.scales_f32.row(row)[head];
        } else {
            codes += int64_t{head} * (kIndexDims / 2);
            const uint32_t word = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
            for (int i = 0; i < kIndexDims; ++i) {
                const uint8_t code = static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4));
                const uint8_t scale = static_cast<uint8_t>(word >> (i / kIndexGroupDims * 8));
                out->values[i] = mul_rn(decode_e2m1(code), decode_ue8m0(scale));
            }
            out->scale = 1.0f;
        }
        out->weight = head_weight(p.weights, row, head);
    }

    // The CPU's chains: products of FP8 values are exact, so that fusing changes no bit.
    static __device__ __forceinline__ float dot(const Key& key, const Head& head) {
        float sums[kIndexGroups] = {};
#pragma unroll
        for (int i = 0; i < kIndexDims; i += 4) {
            const float4 query = *reinterpret_cast<const float4*>(head.values + i);
            float& sum = sums[i / kIndexGroupDims];
            sum = fma_rn(query.x, key.values[i], sum);
            sum = fma_rn(query.y, key.values[i + 1], sum);
            sum = fma_rn(query.z, key.values[i + 2], sum);
            sum = fma_rn(query.w, key.values[i + 3], sum);
        }
        const float sum = add_rn(add_rn(sums[0], sums[1]), add_rn(sums[2], sums[3]));
        return mul_rn(mul_rn(head.scale, key.scale), sum);
    }
};

// ---- Score of one key: heads are taken eight at a time, so that partials stay in registers.

template <class Format>
__device__ __forceinline__ float score_of(const typename Format::Key& key,
                                          const typename Format::Head* heads, int32_t num_heads) {
    float partials[kHeadLanes] = {};
    for (int32_t first = 0; first < num_heads; first += 2 * kHeadLanes) {
#pragma unroll
        for (int h = 0; h < 2 * kHeadLanes; ++h) {
            if (first + h >= num_heads) break;
            const typename Format::Head& head = heads[first + h];
            float& partial = partials[head_lane(h)];
            partial = accumulate_head(partial, head.weight, Format::dot(key, head));
        }
    }
    return combine_lanes(partials);
}

}  // namespace flash_csa::sm90
