// Matrix multiply of a warp on F16 pairs, with fragments as PTX lays them out: lane 4 g + t holds,
// of rows g and g + 8, columns 2t, 2t + 1 (and + 8).
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

namespace flash_csa::sm90 {

// c += a b: a [16, 16], b [16, 8] given by columns, c [16, 8].
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1,
                                            c[0], c[1], c[2], c[3]);
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets word
// l % 4 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&words)[4]) {
    cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), words[0], words[1],
                                  words[2], words[3]);
}

}  // namespace flash_csa::sm90
