// The last step of attend and merge: one head's output, in the type and rotation that was asked.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/numerics.h"
#include "core/params.h"

namespace flash_csa::cpu {

// True if the row is rotated back but has no position: a padded row.
template <class Params>
FCSA_HD bool lacks_position(const Params& p, int64_t row) {
    return p.derotate_positions != nullptr && !p.derotate.holds(p.derotate_positions[row]);
}

// values f32 [512]. FP32 output is not rounded, unless it is rotated back: the rotation starts from
// BF16 and ends in BF16, whatever holds its result.
template <class Params>
FCSA_HD void write_output(const Params& p, int64_t row, int64_t head, const float* values) {
    float* out_f32 = p.out_f32.data != nullptr ? p.out_f32.at(row, head) : nullptr;
    if (out_f32 != nullptr && p.derotate_positions == nullptr) {
        std::memcpy(out_f32, values, kHeadDim * sizeof *values);
        return;
    }
    uint16_t rounded[kHeadDim];
    FCSA_VECTORISE for (int d = 0; d < kHeadDim; ++d) rounded[d] = f32_to_bf16(values[d]);
    if (p.derotate_positions != nullptr && !lacks_position(p, row)) {
        inverse_rope_row<kHeadDim>(rounded, p.derotate.at(p.derotate_positions[row]));
    }
    if (out_f32 == nullptr) {
        std::memcpy(p.out_bf16.at(row, head), rounded, sizeof rounded);
        return;
    }
    FCSA_VECTORISE for (int d = 0; d < kHeadDim; ++d) out_f32[d] = bf16_to_f32(rounded[d]);
}

}  // namespace flash_csa::cpu
