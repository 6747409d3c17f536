// Sums over the lower lanes of a warp.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Of the lanes up to this one. All lanes call.
__device__ __forceinline__ int32_t sum_of_lanes_up_to(int32_t value, int32_t lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

}  // namespace flash_csa::sm90
