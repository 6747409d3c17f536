// What the kernels of compress share: an entry's latent and records in a warp.
#pragma once

#include "core/entry.h"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/warp_norm.cuh"

namespace flash_csa::sm90 {

// RMSNorm of strided channels (lane l has l, l + 32, ...) into a row of BF16 values in shared
// memory.
template <int kDim>
__device__ __forceinline__ void norm_row(const float (&x)[kDim / 32], const float* weight,
                                         float eps, int lane, uint16_t* row) {
    const float factor = warp_rms_factor<kDim>(x, eps);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
        const int c = lane + 32 * i;
        row[c] = f32_to_bf16(mul_rn(mul_rn(x[i], factor), weight[c]));
    }
    __syncwarp();
}

__device__ __forceinline__ void store_main(const CompressParams& p, const Entry& e, int lane,
                                           const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row];
    if (p.main.data == nullptr || !p.main.holds(slot)) return;
    LaneRow<kHeadDim> row;
    row.load(latent, lane);
    row.rope(p.cos_sin.at(e.index * p.ratio), lane);
    switch (p.main.record) {
        case RecordId::WindowFp8:
            return write_record<RecordId::WindowFp8>(row, lane, p.main, slot);
        case RecordId::MixedFp8:
            return write_record<RecordId::MixedFp8>(row, lane, p.main, slot);
        default:
            return write_record<RecordId::MainFp4>(row, lane, p.main, slot);
    }
}

__device__ __forceinline__ bool stores_key(const CompressParams& p, const Entry& e) {
    return p.index.data != nullptr && p.index.holds(p.entry_slots[e.row]);
}

// Rotates and stores an index key; stores_key holds.
__device__ __forceinline__ void store_key(const CompressParams& p, const Entry& e, int lane,
                                          const uint16_t* key) {
    const int32_t slot = p.entry_slots[e.row];
    LaneRow<kIndexDim> row;
    row.load(key, lane);
    row.rope(p.cos_sin.at(e.index * p.ratio), lane);
    if (p.rotate) hadamard(row, lane);
    if (p.index.record == RecordId::IndexFp4)
        write_record<RecordId::IndexFp4>(row, lane, p.index, slot);
    else
        write_record<RecordId::IndexFp8>(row, lane, p.index, slot);
}

// Norm, latent and main record of a pooled entry in a warp.
template <int kDim>
__device__ void finish_entry(const CompressParams& p, const Entry& e, int lane, uint16_t* latent) {
    float x[kDim / 32];
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) x[i] = bf16_to_f32(latent[lane + 32 * i]);
    norm_row<kDim>(x, p.norm_weight, p.eps, lane, latent);
    if (p.latent_out) {
        uint32_t* out = reinterpret_cast<uint32_t*>(p.latent_out.row(e.row));
#pragma unroll
        for (int i = 0; i < kDim / 64; ++i)
            out[lane + 32 * i] = reinterpret_cast<const uint32_t*>(latent)[lane + 32 * i];
    }
    if constexpr (kDim == kHeadDim) {
        store_main(p, e, lane, latent);
    } else if (stores_key(p, e)) {  // V4's index compressor: the latent is the key
        store_key(p, e, lane, latent);
    }
}

}  // namespace flash_csa::sm90
