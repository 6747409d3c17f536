// The window vector of a row, in a warp: RoPE, quantisation, page.
#pragma once

#include "sm90/common/lane_codec.cuh"

namespace flash_csa::sm90 {

template <RecordId kId>
__device__ __forceinline__ void store_window(const RopeStoreParams& p, int64_t row, int lane) {
    LaneRow<kHeadDim> values;
    values.load(p.kv.row(row), lane);
    const int32_t position = p.positions[row], slot = p.slots[row];
    if (!p.cos_sin.holds(position) || !p.window.holds(slot)) return;
    values.rope(p.cos_sin.at(position), lane);
    write_record<kId>(values, lane, p.window, slot);
}

}  // namespace flash_csa::sm90
