// Fragments of a warp's matrix multiply, as PTX lays them out: lane 4 g + t holds, of rows g and
// g + 8, columns 2t, 2t + 1 (and + 8).
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>

namespace flash_csa::sm90 {

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets word
// l % 4 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&words)[4]) {
    cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), words[0], words[1],
                                  words[2], words[3]);
}

}  // namespace flash_csa::sm90
