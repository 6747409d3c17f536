// Stores to shared memory that a lane may leave out without a branch.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// 16 bytes to `to`, which is in shared memory and a multiple of 16 bytes, where `mine` is true.
__device__ __forceinline__ void store_shared_if(bool mine, uint4* to, uint4 values) {
    asm volatile(
        "{.reg .pred mine; setp.ne.u32 mine, %5, 0;"
        "@mine st.shared.v4.u32 [%4], {%0, %1, %2, %3};}" ::"r"(values.x),
        "r"(values.y), "r"(values.z), "r"(values.w),
        "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "r"(static_cast<uint32_t>(mine))
        : "memory");
}

}  // namespace flash_csa::sm90
