// What the warps of prefill.cu hand to each other, in shared memory.
//
//   pool warps -> Slot: 4 pooled entries -> finish warps -> Tile: 64 latents -> key warps
#pragma once

#include <cutlass/arch/barrier.h>

#include "core/params.h"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {

using cutlass::arch::ClusterTransactionBarrier;

inline constexpr int kTile = 64;             // entries: rows of a warpgroup's product
inline constexpr int kUnit = 4;              // entries of a slot
inline constexpr int kHalfUnit = kUnit / 2;  // of a finish warp
inline constexpr int kTileUnits = kTile / kUnit;
inline constexpr int kSlots = 8;  // units on their way: 32 KiB
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kKeyThreads = 128;
inline constexpr int kTables = 2;   // of the entries of a tile
inline constexpr int kBlock = 128;  // channels of a warp's copy of 16 bytes a lane
inline constexpr int kBlocks = kHeadDim / kBlock;

// How the warps share the work: feed, finish, make keys. Registers of a thread, of those that the
// launch gives to all. None spills.
template <int kRatio>
struct Roles;
// Rows are copied: one warp feeds, two look up entries.
template <>
struct Roles<1> {
    static constexpr int kFeedWarps = 4, kFinishWarps = 16;
    static constexpr int kFeedRegisters = 40, kFinishRegisters = 80, kKeyRegisters = 120;
    static constexpr int kLaunchRegisters = 80;
    static constexpr int kLookUpThreads = kTile;
};
// 8 warps pool; 64 KiB of rows land beside half of the weight.
template <>
struct Roles<2> {
    static constexpr int kFeedWarps = 8, kFinishWarps = 8;
    static constexpr int kFeedRegisters = 104, kFinishRegisters = 80, kKeyRegisters = 112;
    static constexpr int kLaunchRegisters = 96;
    static constexpr int kLookUpThreads = kKeyThreads;
};
template <int kRatio>
inline constexpr int kThreads =
    32 * (Roles<kRatio>::kFeedWarps + Roles<kRatio>::kFinishWarps) + kKeyThreads;

// Unit u of a block lies in slot u % kSlots; a slot's units are neighbours in a tile.
__device__ __forceinline__ int unit_row(uint32_t unit) {
    return static_cast<int>(unit % kSlots * (kTile / kSlots) + unit / kSlots % 2 * kUnit);
}
static_assert(kTileUnits == 2 * kSlots);

// Rows of the block's first tile, and between its tiles.
template <int kRatio>
__device__ __forceinline__ uint32_t first_row() {
    return blockIdx.x * kTile * kRatio;
}
template <int kRatio>
__device__ __forceinline__ uint32_t row_stride() {
    return gridDim.x * kTile * kRatio;
}
__device__ __forceinline__ bool in_batch(const CompressParams& p, uint32_t row) {
    return row < static_cast<uint32_t>(p.batch.rows);
}

// An entry of a tile.
struct alignas(16) Item {
    int32_t row;  // that closes it; -1: none, nothing is stored
    int32_t slot;
    int32_t rotation;  // position of its first token
    int32_t in_tail;   // its first row
};
inline constexpr Item kNoItem = {-1, -1, 0, 0};

struct alignas(128) Slot {
    uint16_t rows[kUnit][kHeadDim];
};

// Ratio 1: the weight. Ratio 2: half of it at a time, from the L2, and the rows of an entry of each
// pool warp, on their way.
template <int kRatio>
struct Operands;
template <>
struct Operands<1> {
    static constexpr int kWeightKeys = kIndexDim;
    alignas(1024) uint8_t weight[kPanels][kWeightKeys * kPanelRowBytes];
};
template <>
struct Operands<2> {
    static constexpr int kWeightKeys = kIndexDim / 2;
    alignas(1024) uint8_t weight[kPanels][kWeightKeys * kPanelRowBytes];
    float4 rows[Roles<2>::kFeedWarps][kBlocks][4][32];
};

template <int kRatio>
struct Shared : Operands<kRatio> {
    alignas(1024) uint8_t latents[kPanels][kTile * kPanelRowBytes];
    Slot slots[kSlots];
    Item tables[kTables][kTile];  // entries of a tile
    alignas(16) float key_norm_weight[kIndexDim];
    alignas(8) uint8_t closing[kTables][8];   // rows of each chunk that close entries
    int32_t ended[kTables];                   // there is no such tile
    ClusterTransactionBarrier full[kSlots];   // of rows, or pooled
    ClusterTransactionBarrier empty[kSlots];  // read: the finish warp
    ClusterTransactionBarrier table_full[kTables];
    ClusterTransactionBarrier table_empty[kTables];  // read by all
    ClusterTransactionBarrier tile_full;             // latents are there
    ClusterTransactionBarrier tile_empty;            // multiplied: the key warps

    // All threads of a warp arrive, each behind its own accesses.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kSlots; ++i) {
            full[i].init(kRatio == 1 ? 1 : 32);
            empty[i].init(2 * 32);
        }
        for (int i = 0; i < kTables; ++i) {
            table_full[i].init(Roles<kRatio>::kLookUpThreads);
            table_empty[i].init(kKeyThreads);
        }
        tile_full.init(2 * 32 * kTileUnits);
        tile_empty.init(kKeyThreads);
        cutlass::arch::fence_barrier_init();
    }
};
static_assert(sizeof(Shared<1>) <= 227 * 1024 && sizeof(Shared<2>) <= 227 * 1024);

// Waits for use `n` of what fills and empties by turns.
__device__ __forceinline__ void wait_full(ClusterTransactionBarrier& barrier, uint32_t n) {
    barrier.wait(n & 1);
}
__device__ __forceinline__ void wait_empty(ClusterTransactionBarrier& barrier, uint32_t n) {
    barrier.wait(~n & 1);
}

// The table of tile number `tile` is there; false: the tile before was the last.
template <int kRatio>
__device__ __forceinline__ bool has_table(Shared<kRatio>& shared, uint32_t tile) {
    wait_full(shared.table_full[tile % kTables], tile / kTables);
    return !shared.ended[tile % kTables];
}

}  // namespace flash_csa::sm90
