// Hints to the caches.
#pragma once

namespace flash_csa::sm90 {

// Brings the line of a global address to the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace flash_csa::sm90
