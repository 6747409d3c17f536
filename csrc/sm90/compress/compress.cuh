// What the kernels of compress share: an entry's latent and records in a warp.
#pragma once

#include "core/entry.h"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/warp_norm.cuh"

namespace flash_csa::sm90 {

// Lane l has channels l, l + 32, ...: consecutive lanes read consecutive words of a row.
template <int kDim>
__device__ __forceinline__ void pool_entry(const CompressParams& p, const Entry& e, int lane,
                                           float (&pooled)[kDim / 32]) {
    constexpr int kChannels = kDim / 32;
    float largest[kChannels], sum[kChannels], acc[kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
        largest[i] = -INFINITY;
        sum[i] = acc[i] = 0.f;
    }
    for (int64_t position = e.first; position <= e.position; ++position) {
        const PoolRow r = pool_row(p, e, position);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int c = lane + 32 * i;
            const float g = add_rn(r.gate[c], r.bias != nullptr ? r.bias[c] : 0.f);
            largest[i] = g > largest[i] ? g : largest[i];
        }
    }
    for (int64_t position = e.first; position <= e.position; ++position) {
        const PoolRow r = pool_row(p, e, position);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const int c = lane + 32 * i;
            const float g = add_rn(r.gate[c], r.bias != nullptr ? r.bias[c] : 0.f);
            const float w = exp_fma(sub_rn(g, largest[i]));
            sum[i] = add_rn(sum[i], w);
            acc[i] = fma_rn(w, r.kv[c], acc[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) pooled[i] = round_bf16(div_rn(acc[i], sum[i]));
}

// RMSNorm of strided channels into a row of BF16 values in shared memory.
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

template <int kDim>
__device__ __forceinline__ void make_latent(const CompressParams& p, const Entry& e, int lane,
                                            uint16_t* latent) {
    float pooled[kDim / 32];
    if (p.kv_bf16) {  // ratio 1: every token is an entry
        const uint16_t* row = p.kv_bf16.row(e.row);
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) pooled[i] = bf16_to_f32(row[lane + 32 * i]);
    } else {
        pool_entry<kDim>(p, e, lane, pooled);
    }
    norm_row<kDim>(pooled, p.norm_weight, p.eps, lane, latent);
    if (p.latent_out) {
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i)
            p.latent_out.row(e.row)[lane + 32 * i] = latent[lane + 32 * i];
    }
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
