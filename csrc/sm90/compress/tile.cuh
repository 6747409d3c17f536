// What the warps of prefill.cu and tokens.cu hand to each other, in shared memory: rows of entries
// and tiles of 64 latents.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "core/params.h"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {

using cutlass::arch::ClusterTransactionBarrier;

inline constexpr int kTile = 64;     // entries: rows of a warpgroup's product
inline constexpr int kHalfUnit = 2;  // entries that a finish warp has at a time
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kKeyThreads = 128;

// An entry of a tile.
struct alignas(16) Item {
    int32_t row;  // that closes it; -1: none, nothing is stored
    int32_t slot;
    int32_t rotation;  // position of its first token
    int32_t in_tail;   // 1 + slot of the tail that has its first row, negative where a new row
                       // replaces that one; 0: it is in the call
};
inline constexpr Item kNoItem = {-1, -1, 0, 0};

// BF16 rows of kRows entries. Odd ones lie half a line of banks further, so that two neighbours are
// read side by side without a conflict.
template <int kRows>
struct PairedRows {
    alignas(128) uint16_t even[kRows / 2][kHeadDim];
    uint8_t apart[64];
    uint16_t odd[kRows / 2][kHeadDim];

    __device__ __forceinline__ uint16_t* row(int i) {
        return i % 2 == 0 ? even[i / 2] : odd[i / 2];
    }
};

// Takes or gives registers; whole warpgroups call.
template <int kRegisters, int kLaunched>
__device__ __forceinline__ void set_registers() {
    if constexpr (kRegisters > kLaunched)
        cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    else if constexpr (kRegisters < kLaunched)
        cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

// Waits for use `n` of what fills and empties by turns.
__device__ __forceinline__ void wait_full(ClusterTransactionBarrier& barrier, uint32_t n) {
    barrier.wait(n & 1);
}
__device__ __forceinline__ void wait_empty(ClusterTransactionBarrier& barrier, uint32_t n) {
    barrier.wait(~n & 1);
}

}  // namespace flash_csa::sm90
