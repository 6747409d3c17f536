// Index scores as they are defined, one head and one key at a time: steps 1 to 5 of
// docs/numerics.md. Back ends have group dots otherwise and share the steps behind them.
#pragma once

#include <cstdint>

#include "core/scoring.h"

namespace flash_csa {

// Exact dot of one group of half units, in quarters: at most 32 * 12 * 12 = 4608.
FCSA_HD int32_t group_dot(const int8_t* q, const int8_t* k) {
    int32_t quarters = 0;
    for (int i = 0; i < kIndexGroupDims; ++i) quarters += q[i] * k[i];
    return quarters;
}

// Dot of one query head (half units and four scale bytes) with one key in the same form.
FCSA_HD float head_dot(const int8_t* q, const uint8_t* q_scales, const int8_t* k,
                       const uint8_t* k_scales) {
    int32_t quarters[kIndexGroups];
    float scales[kIndexGroups];
    for (int g = 0; g < kIndexGroups; ++g) {
        quarters[g] = group_dot(q + g * kIndexGroupDims, k + g * kIndexGroupDims);
        scales[g] = scale_product(q_scales[g], k_scales[g]);
    }
    return combine_groups(quarters, scales);
}

FCSA_HD float sum_heads(const float* dots, const float* weights, int heads) {
    float partials[kHeadLanes] = {};
    for (int h = 0; h < heads; ++h) {
        float& partial = partials[head_lane(h)];
        partial = accumulate_head(partial, weights[h], dots[h]);
    }
    return combine_lanes(partials);
}

}  // namespace flash_csa
