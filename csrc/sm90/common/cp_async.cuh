// Copies from global to shared memory that need no registers; absent sources are zeros.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Both 16-byte aligned. Reads no more than its bytes from memory.
__device__ __forceinline__ void copy_16_async(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
// Both 8-byte aligned.
__device__ __forceinline__ void copy_8_async(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}

// All copies that the thread started.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Ends a group: the copies that the thread started since the last one.
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most kPending groups of the thread, the youngest, are on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_csa::sm90
