// Whole records on the CPU: a BF16 row to the bytes of one slot, and back. The codec follows from
// the table row (element and scale), so a new record of known elements needs nothing here.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/numerics.h"
#include "core/params.h"
#include "core/records.h"

namespace flash_csa::cpu {

// One record outside its page: the loops encode here, where no store can alias the input, and one
// copy per part moves it into the page.
template <RecordId kId>
struct RecordBytes {
    uint8_t row[record(kId).data_bytes];
    uint8_t scales[record(kId).scale_bytes];
};

inline constexpr int32_t code_bytes(const Record& r, int32_t values) {
    return r.element == Element::E2M1 ? values / 2 : values;
}

template <RecordId kId>
inline void encode_row(const uint16_t* x, RecordBytes<kId>* out) {
    constexpr Record r = record(kId);
    if constexpr (r.scale_kind == ScaleKind::FP32) {
        float scale = 0;
        encode_row_index_fp8(x, out->row, &scale);
        std::memcpy(out->scales, &scale, sizeof scale);
    }
    if constexpr (r.scale_kind == ScaleKind::E4M3) {
        encode_groups_main<r.num_scales()>(x, out->row, out->scales);
    }
    if constexpr (r.scale_kind == ScaleKind::UE8M0) {
        for (int g = 0; g < r.num_scales(); ++g) {
            uint8_t* codes = out->row + code_bytes(r, g * r.group);
            if constexpr (r.element == Element::E2M1) {
                encode_group_index(x + g * r.group, codes, &out->scales[g]);
            } else {
                encode_group_fp8<r.group>(x + g * r.group, codes, &out->scales[g]);
            }
        }
    }
    constexpr int32_t plain = r.dims - r.coded_dims;
    if constexpr (plain > 0) {
        std::memcpy(out->row + code_bytes(r, r.coded_dims), x + r.coded_dims, 2 * plain);
    }
    if constexpr (r.scale_kind != ScaleKind::FP32) {
        constexpr int32_t padding = r.scale_bytes - r.num_scales();
        std::memset(out->scales + r.num_scales(), 0, padding);
    }
}

inline void copy_plain(const uint16_t* x, int n, uint16_t* out) { std::memcpy(out, x, 2 * n); }
inline void copy_plain(const uint16_t* x, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = bf16_to_f32(x[i]);
}

template <RecordId kId, class Out>
inline void decode_row(const RecordBytes<kId>& in, Out* out) {
    constexpr Record r = record(kId);
    if constexpr (r.scale_kind == ScaleKind::FP32) {
        float scale = 0;
        std::memcpy(&scale, in.scales, sizeof scale);
        decode_row_index_fp8(in.row, scale, out);
    }
    if constexpr (r.scale_kind == ScaleKind::E4M3) {
        decode_groups_main<r.num_scales()>(in.row, in.scales, out);
    }
    if constexpr (r.scale_kind == ScaleKind::UE8M0) {
        for (int g = 0; g < r.num_scales(); ++g) {
            const uint8_t* codes = in.row + code_bytes(r, g * r.group);
            if constexpr (r.element == Element::E2M1) {
                decode_group_index(codes, in.scales[g], out + g * r.group);
            } else {
                decode_group_fp8<r.group>(codes, in.scales[g], out + g * r.group);
            }
        }
    }
    constexpr int32_t plain = r.dims - r.coded_dims;
    if constexpr (plain > 0) {
        uint16_t values[plain];
        std::memcpy(values, in.row + code_bytes(r, r.coded_dims), sizeof values);
        copy_plain(values, plain, out + r.coded_dims);
    }
}

// The caller has checked that pages.holds(slot).
template <RecordId kId>
inline void write_record(const uint16_t* x, const Pages& pages, int32_t slot) {
    RecordBytes<kId> bytes;
    encode_row<kId>(x, &bytes);
    std::memcpy(pages.row(record(kId), slot), bytes.row, sizeof bytes.row);
    std::memcpy(pages.scales(record(kId), slot), bytes.scales, sizeof bytes.scales);
}

template <RecordId kId, class Out>
inline void read_record(const ConstPages& pages, int32_t slot, Out* out) {
    RecordBytes<kId> bytes;
    std::memcpy(bytes.row, pages.row(record(kId), slot), sizeof bytes.row);
    std::memcpy(bytes.scales, pages.scales(record(kId), slot), sizeof bytes.scales);
    decode_row<kId>(bytes, out);
}

// An index key or query before it is quantised: RoPE, and for V4 the Hadamard rotation; BF16 after
// each of the two.
inline void rotate_index_vector(uint16_t* x, const float* cos_sin, bool hadamard) {
    rope_row<kIndexDim>(x, cos_sin);
    if (!hadamard) return;
    float values[kIndexDim];
    for (int i = 0; i < kIndexDim; ++i) values[i] = bf16_to_f32(x[i]);
    hadamard_128(values);
    for (int i = 0; i < kIndexDim; ++i) x[i] = f32_to_bf16(values[i]);
}

}  // namespace flash_csa::cpu
