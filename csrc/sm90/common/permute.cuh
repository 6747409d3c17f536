// Instructions on parts of a word: a byte permutation with the selector's top bits, which
// __byte_perm clears, and dots of halves.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Byte i is that byte of high:low which bits 0..2 of nibble i of `selector` name; where bit 3 is
// set, eight times its sign. Upper half of `selector`: ignored.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}

// start + low half * factors' byte 0 + high half * factors' byte 1; halves unsigned, bytes signed.
__device__ __forceinline__ uint32_t dot_halves(uint32_t halves, uint32_t factors, uint32_t start) {
    uint32_t out;
    asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(halves), "r"(factors), "r"(start));
    return out;
}

}  // namespace flash_csa::sm90
