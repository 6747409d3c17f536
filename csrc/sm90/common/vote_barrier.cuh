// A barrier of some of a block's warps that also votes.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Whether all of `threads` threads, whole warps, say yes. Barrier 0 is that of the block.
__device__ __forceinline__ bool vote_barrier(int32_t barrier, int32_t threads, bool yes) {
    uint32_t all;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "barrier.cta.red.and.aligned.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}"
        : "=r"(all)
        : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(yes))
        : "memory");
    return all != 0;
}

}  // namespace flash_csa::sm90
