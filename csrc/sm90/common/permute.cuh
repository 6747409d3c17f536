// Byte permutation with the selector's top bits, which __byte_perm clears.
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

}  // namespace flash_csa::sm90
