// Warpgroup matrix products on BF16 tiles in shared memory.
//
// A tile is panels of 64 columns; a panel is rows of 128 bytes in the 128-byte swizzle: 16-byte
// chunk c of row r lies at r * 128 + (c ^ r % 8) * 16. The same bytes serve as an operand whose
// products run along the columns (K-major) or along the rows (MN-major).
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace flash_csa::sm90 {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 2 * kPanelColumns;
inline constexpr int kCoreRows = 8;  // rows after which the swizzle repeats

// Byte offset of 16-byte chunk `chunk` (0..7) of row `row` within a panel.
__device__ __forceinline__ int panel_offset(int row, int chunk) {
    return row * kPanelRowBytes + ((chunk ^ (row % kCoreRows)) << 4);
}

namespace detail {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;
namespace gmma = cute::SM90::GMMA;

__device__ __forceinline__ uint64_t swizzled_operand(const void* tile, int panel_bytes) {
    // Above the address within the block, one of a cluster has its rank.
    const uint64_t start = (static_cast<uint32_t>(__cvta_generic_to_shared(tile)) & 0x3ffff) >> 4;
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    constexpr uint64_t kCore = uint64_t{kCoreRows * kPanelRowBytes >> 4} << 32;
    return start | static_cast<uint64_t>(panel_bytes >> 4) << 16 | kCore | kSwizzle128;
}

template <class Atom, class A, int kCount, size_t... kAt>
__device__ __forceinline__ void multiply(const A& a, uint64_t b, float (&d)[kCount],
                                         bool accumulate, std::index_sequence<kAt...>) {
    const ScaleOut keep = accumulate ? ScaleOut::One : ScaleOut::Zero;
    if constexpr (sizeof(A) == sizeof(uint64_t)) {
        Atom::fma(a, b, d[kAt]..., keep);
    } else {
        Atom::fma(a[0], a[1], a[2], a[3], b, d[kAt]..., keep);
    }
}

}  // namespace detail

// Operand descriptors: of rows whose products run along the columns, and of columns whose products
// run along the rows.
__device__ __forceinline__ uint64_t k_major(const void* tile) {
    return detail::swizzled_operand(tile, 16);
}
__device__ __forceinline__ uint64_t mn_major(const void* tile, int panel_bytes) {
    return detail::swizzled_operand(tile, panel_bytes);
}

// An operand that starts `bytes` later.
__device__ __forceinline__ uint64_t advance(uint64_t operand, int bytes) {
    const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);  // the address: no carry
    return (operand >> 32 << 32) | low;
}

// The same operand, as if it were a new one: what is derived from it is computed where it is used,
// and not once for all uses and kept in registers.
__device__ __forceinline__ uint64_t fresh(uint64_t operand) {
    uint32_t low = static_cast<uint32_t>(operand);
    asm volatile("" : "+r"(low));
    return (operand >> 32 << 32) | low;
}

// Sixteen bits of K in registers: an accumulator's fragment, rounded.
using FragmentA = uint32_t[4];

// d [64, 64] (+)= a [64, 16] . b [64, 16]^T, both K-major; a in shared memory or registers.
__device__ __forceinline__ void multiply_64x64(uint64_t a, uint64_t b, float (&d)[32],
                                               bool accumulate) {
    using Atom = detail::gmma::MMA_64x64x16_F32BF16BF16_SS<detail::Major::K, detail::Major::K>;
    detail::multiply<Atom>(a, b, d, accumulate, std::make_index_sequence<32>{});
}

__device__ __forceinline__ void multiply_64x64(const FragmentA& a, uint64_t b, float (&d)[32],
                                               bool accumulate) {
    using Atom = detail::gmma::MMA_64x64x16_F32BF16BF16_RS<detail::Major::K, detail::Major::K>;
    detail::multiply<Atom>(a, b, d, accumulate, std::make_index_sequence<32>{});
}

// d [64, 128] (+)= a [64, 16] . b [16, 128], b MN-major; a in shared memory or registers.
__device__ __forceinline__ void multiply_64x128(uint64_t a, uint64_t b, float (&d)[64],
                                                bool accumulate) {
    using Atom = detail::gmma::MMA_64x128x16_F32BF16BF16_SS<detail::Major::K, detail::Major::MN>;
    detail::multiply<Atom>(a, b, d, accumulate, std::make_index_sequence<64>{});
}
__device__ __forceinline__ void multiply_64x128(const FragmentA& a, uint64_t b, float (&d)[64],
                                                bool accumulate) {
    using Atom = detail::gmma::MMA_64x128x16_F32BF16BF16_RS<detail::Major::K, detail::Major::MN>;
    detail::multiply<Atom>(a, b, d, accumulate, std::make_index_sequence<64>{});
}

// The compiler may not move accesses of `x` across.
template <class T, int kCount>
__device__ __forceinline__ void fence_registers(T (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(x[i]);
}

template <class T, int kRows, int kCount>
__device__ __forceinline__ void fence_registers(T (&x)[kRows][kCount]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) fence_registers(x[i]);
}

}  // namespace flash_csa::sm90
