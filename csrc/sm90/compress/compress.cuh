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

}  // namespace flash_csa::sm90
