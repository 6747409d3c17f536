// One key in a thread's registers against query heads in shared memory: the inner loops of
// index_scores_plain.cu.
#pragma once

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

// ---- Score of one key: heads are taken eight at a time, so that partials stay in registers.

__device__ __forceinline__ float score_of(const Fp4::Key& key, const Fp4::Head* heads,
                                          int32_t num_heads) {
    float partials[kHeadLanes] = {};
    for (int32_t first = 0; first < num_heads; first += 2 * kHeadLanes) {
#pragma unroll
        for (int h = 0; h < 2 * kHeadLanes; ++h) {
            if (first + h >= num_heads) break;
            const Fp4::Head& head = heads[first + h];
            float& partial = partials[head_lane(h)];
            partial = accumulate_head(partial, head.weight, Fp4::dot(key, head));
        }
    }
    return combine_lanes(partials);
}

}  // namespace flash_csa::sm90
