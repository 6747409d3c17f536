// Records in a warp: lane l holds values [l * V, (l + 1) * V) of a row, V = dims / 32, as BF16
// bits. Groups of values that share a scale are runs of neighbouring lanes. Bit-equal to
// core/numerics.h.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "core/numerics.h"
#include "core/params.h"
#include "core/records.h"

namespace flash_csa::sm90 {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

template <int kDims>
inline constexpr int kLaneValues = kDims / 32;

// Unaligned-free copies of 2, 4, 8, 16 or 32 bytes as the widest words that divide them.
template <int kBytes>
__device__ __forceinline__ void copy_bytes(const void* from, void* to) {
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i)
            static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    } else if constexpr (kBytes == 8) {
        *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    } else if constexpr (kBytes == 4) {
        *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
    } else {
        static_assert(kBytes == 2);
        *static_cast<uint16_t*>(to) = *static_cast<const uint16_t*>(from);
    }
}

// A lane's values of a BF16 row.
template <int kDims>
struct LaneRow {
    static constexpr int kValues = kLaneValues<kDims>;
    alignas(16) uint16_t x[kValues];

    __device__ __forceinline__ void load(const uint16_t* row, int lane) {
        copy_bytes<2 * kValues>(row + lane * kValues, x);
    }
    __device__ __forceinline__ void store(uint16_t* row, int lane) const {
        copy_bytes<2 * kValues>(x, row + lane * kValues);
    }
    // Rotates the last 64 dims. cos_sin: 32 cosines, then 32 sines.
    __device__ __forceinline__ void rope(const float* cos_sin, int lane) {
        const int first = lane * kValues - (kDims - kRopeDims);
        if (first < 0) return;
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) {
            const int pair = first / 2 + i;
            float a, b;
            rope_pair(bf16_to_f32(x[2 * i]), bf16_to_f32(x[2 * i + 1]), cos_sin[pair],
                      cos_sin[kRopeDims / 2 + pair], &a, &b);
            x[2 * i] = f32_to_bf16(a);
            x[2 * i + 1] = f32_to_bf16(b);
        }
    }
};

// Walsh-Hadamard transform / sqrt(128) of a warp's 128 values, distance 1, 2, ... 64.
__device__ __forceinline__ void hadamard(LaneRow<kIndexDim>& row, int lane) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = bf16_to_f32(row.x[i]);
#pragma unroll
    for (int h = 1; h < 4; h *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & h) continue;
            const float a = x[i], b = x[i + h];
            x[i] = add_rn(a, b);
            x[i + h] = sub_rn(a, b);
        }
    }
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(kAllLanes, x[i], h);
            x[i] = lane & h ? sub_rn(other, x[i]) : add_rn(x[i], other);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) row.x[i] = f32_to_bf16(mul_rn(x[i], 0.08838834764831845f));
}

// Lane's share of a record: bytes of codes (or of BF16 values), and the scale of its group.
template <RecordId kId>
struct LaneRecord {
    static constexpr Record kRecord = record(kId);
    static constexpr int kValues = kLaneValues<kRecord.dims>;
    static constexpr int kCodeBytes = kRecord.element == Element::E2M1 ? kValues / 2 : kValues;
    static constexpr int kGroupLanes = kRecord.group / kValues;
    static constexpr int kCodedLanes = kRecord.coded_dims / kValues;

    // All lanes call. `to_codes` and `to_scales` are the record's row and scales.
    static __device__ __forceinline__ void encode(const LaneRow<kRecord.dims>& row, int lane,
                                                  uint8_t* to_codes, uint8_t* to_scales) {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kValues; ++i) amax = max_u32(amax, row.x[i] & 0x7fffu);
#pragma unroll
        for (int h = 1; h < kGroupLanes; h *= 2)
            amax = max_u32(amax, __shfl_xor_sync(kAllLanes, amax, h));
        if (lane >= kCodedLanes) {  // plain BF16 behind the codes
            if constexpr (kRecord.coded_dims < kRecord.dims) row_tail(row, lane, to_codes);
            return;
        }
        const float largest = bf16_to_f32(static_cast<uint16_t>(amax));
        alignas(16) uint8_t bytes[kCodeBytes];
        if constexpr (kRecord.scale_kind == ScaleKind::FP32) {
            const float divisor = index_fp8_scale(largest);
            const uint8_t keep = float_bits(divisor) == kNanBits ? 0x00 : 0xff;
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                bytes[i] = encode_e4m3(div_rn(bf16_to_f32(row.x[i]), divisor)) & keep;
            if (lane == 0) *reinterpret_cast<float*>(to_scales) = divisor;
        } else {
            uint8_t scale = 0;
            encode_group(row, largest, bytes, &scale);
            if (lane % kGroupLanes == 0) to_scales[lane / kGroupLanes] = scale;
            constexpr int kPadding = kRecord.scale_bytes - kRecord.num_scales();
            if (lane < kPadding) to_scales[kRecord.num_scales() + lane] = 0;
        }
        copy_bytes<kCodeBytes>(bytes, to_codes + lane * kCodeBytes);
    }

    // Values of this lane, as Out: float or BF16 bits.
    template <class Out>
    static __device__ __forceinline__ void decode(const uint8_t* codes, const uint8_t* scales,
                                                  int lane, Out* out) {
        if (lane >= kCodedLanes) {
            if constexpr (kRecord.coded_dims < kRecord.dims) {
                alignas(16) uint16_t plain[kValues];
                copy_bytes<2 * kValues>(
                    codes + kCodedLanes * kCodeBytes + (lane - kCodedLanes) * 2 * kValues, plain);
#pragma unroll
                for (int i = 0; i < kValues; ++i) put_plain(plain[i], &out[i]);
            }
            return;
        }
        alignas(16) uint8_t bytes[kCodeBytes];
        copy_bytes<kCodeBytes>(codes + lane * kCodeBytes, bytes);
        const float scale = group_scale(scales, lane / kGroupLanes);
#pragma unroll
        for (int i = 0; i < kValues; ++i) put_value(mul_rn(value(bytes, i), scale), &out[i]);
    }

  private:
    static __device__ __forceinline__ void row_tail(const LaneRow<kRecord.dims>& row, int lane,
                                                    uint8_t* to_codes) {
        copy_bytes<2 * kValues>(
            row.x, to_codes + kCodedLanes * kCodeBytes + (lane - kCodedLanes) * 2 * kValues);
    }

    static __device__ __forceinline__ void encode_group(const LaneRow<kRecord.dims>& row,
                                                        float largest, uint8_t* bytes,
                                                        uint8_t* scale) {
        if constexpr (kRecord.scale_kind == ScaleKind::E4M3) {
            const float divisor = fp4_main_scale(largest, scale);
            const uint8_t keep = *scale == kNanE4M3 ? 0x00 : 0x0f;
            uint8_t nibbles[kValues];
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                nibbles[i] = encode_e2m1(div_rn(bf16_to_f32(row.x[i]), divisor)) & keep;
            pack_nibbles<kValues>(nibbles, bytes);
        } else if constexpr (kRecord.element == Element::E2M1) {
            index_scale(largest, scale);
            const float reciprocal = ue8m0_reciprocal(*scale);
            const uint8_t keep = *scale == kNanUE8M0 ? 0x00 : 0x0f;
            uint8_t nibbles[kValues];
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                nibbles[i] = encode_e2m1(mul_rn(bf16_to_f32(row.x[i]), reciprocal)) & keep;
            pack_nibbles<kValues>(nibbles, bytes);
        } else {
            window_scale(largest, scale);
            const float reciprocal = ue8m0_reciprocal(*scale);
            const uint16_t keep = *scale == kNanUE8M0 ? 0x0000 : 0xffff;
#pragma unroll
            for (int i = 0; i < kValues; i += 2) {
                const float2 pair = make_float2(mul_rn(bf16_to_f32(row.x[i]), reciprocal),
                                                mul_rn(bf16_to_f32(row.x[i + 1]), reciprocal));
                *reinterpret_cast<uint16_t*>(bytes + i) =
                    __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3) & keep;
            }
        }
    }

    static __device__ __forceinline__ float group_scale(const uint8_t* scales, int group) {
        if constexpr (kRecord.scale_kind == ScaleKind::FP32)
            return *reinterpret_cast<const float*>(scales);
        else if constexpr (kRecord.scale_kind == ScaleKind::E4M3)
            return decode_e4m3(scales[group]);
        else
            return decode_ue8m0(scales[group]);
    }

    static __device__ __forceinline__ float value(const uint8_t* bytes, int i) {
        if constexpr (kRecord.element == Element::E2M1)
            return decode_e2m1(bytes[i / 2] >> (i % 2 * 4) & 0x0f);
        else
            return decode_e4m3(bytes[i]);
    }

    static __device__ __forceinline__ void put_plain(uint16_t x, uint16_t* out) { *out = x; }
    static __device__ __forceinline__ void put_plain(uint16_t x, float* out) {
        *out = bf16_to_f32(x);
    }
};

// Encodes the warp's row into a slot, which pages.holds.
template <RecordId kId>
__device__ __forceinline__ void write_record(const LaneRow<record(kId).dims>& row, int lane,
                                             const Pages& pages, int32_t slot) {
    constexpr Record r = record(kId);
    LaneRecord<kId>::encode(row, lane, pages.row(r, slot), pages.scales(r, slot));
}

}  // namespace flash_csa::sm90
