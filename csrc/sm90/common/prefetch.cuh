// Hints to the caches.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Brings the line of a global address to the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Brings `bytes`, a multiple of 16 at one.
__device__ __forceinline__ void prefetch_l2(const void* address, int32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
}

// A word that the kernel before may still write, for the sake of a hint: later reads see what it
// wrote.
__device__ __forceinline__ int32_t peek(const int32_t* address) {
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}

}  // namespace flash_csa::sm90
