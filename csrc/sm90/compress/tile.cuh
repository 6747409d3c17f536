// What the warps of prefill.cu hand to each other, in shared memory.
//
//   pool warps -> Slot: 4 pooled entries -> finish warps -> Tile: 64 latents -> key warps
#pragma once

#include <cutlass/arch/barrier.h>

#include "core/params.h"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {

using cutlass::arch::ClusterBarrier;

inline constexpr int kTile = 64;                  // entries: rows of a warpgroup's product
inline constexpr int kUnit = 4;                   // entries of a warp at a time
inline constexpr int kTileUnits = kTile / kUnit;  // arrivals at a full tile
inline constexpr int kSlots = 8;                  // units on their way: 32 KiB
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kRoleWarps = 12;  // that pool or finish; 4 more make keys
inline constexpr int kKeyThreads = 128;
inline constexpr int kThreads = 32 * kRoleWarps + kKeyThreads;

// How the warps share the work. A pool warp has slots of its own, a finish warp as well, so that
// each knows its partners.
template <int kRatio>
struct Roles {
    static constexpr int kPoolWarps = 4 * kRatio;  // ratio 2: 64 KiB of rows in their registers
    static constexpr int kFinishWarps = kRoleWarps - kPoolWarps;
    static constexpr int kPoolSlots = kSlots / kPoolWarps;
    static constexpr int kFinishSlots = kSlots / kFinishWarps;
    static constexpr int kChunk = kTile / kPoolWarps;   // entries of a pool warp in a tile
    static constexpr int kChunkRows = kChunk * kRatio;  // and the rows that close them
    static constexpr int kFinishUnits = kTileUnits / kFinishWarps;

    // Registers of a thread, where the launch gives 128 to each: ratio 2's for rows that land in
    // them, ratio 1's for the sums of all keys of a tile. None spills.
    static constexpr int kKeyColumns = kRatio == 1 ? kIndexDim : kIndexDim / 2;
    static constexpr int kPoolRegisters = kRatio == 1 ? 112 : 152;
    static constexpr int kFinishRegisters = kRatio == 1 ? 120 : 104;
    static constexpr int kKeyRegisters = kRatio == 1 ? 160 : 104;
    static_assert(kPoolWarps * kPoolRegisters + kFinishWarps * kFinishRegisters +
                      4 * kKeyRegisters ==
                  kThreads / 32 * 128);
};

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

// An entry on its way.
struct alignas(16) Place {
    int32_t row;  // that closes it; -1: none, nothing is stored
    int32_t slot;
    int32_t rotation;  // position of its first token
    float factor;      // of the norm
};

struct alignas(128) Slot {
    // 16-byte chunk c of entry e lies at c ^ 4 (e % 2): octets write, and lanes read 32 bytes each,
    // without a bank conflict.
    uint16_t rows[kUnit][kHeadDim];
};

struct Head {
    Place places[kUnit];
    int32_t passes;  // tiles of the same rows
    int32_t padding[3];
};

struct KeyPlace {
    int32_t slot;
    int32_t rotation;
};

struct Shared {
    alignas(1024) uint8_t weight[kPanels][kIndexDim * kPanelRowBytes];
    alignas(1024) uint8_t latents[kPanels][kTile * kPanelRowBytes];
    Slot slots[kSlots];
    Head heads[kSlots];
    alignas(16) KeyPlace key_places[kTile];
    alignas(16) float key_norm_weight[kIndexDim];
    uint8_t closing[kRoleWarps - 4][16];  // a pool warp's closing rows
    int32_t passes;                       // of the tile's rows
    ClusterBarrier full[kSlots];          // pooled: the pool warp
    ClusterBarrier empty[kSlots];         // read: the finish warp
    ClusterBarrier tile_full;             // a unit's latents are there
    ClusterBarrier tile_empty;            // multiplied: the key warps

    // All threads of a warp arrive, each behind its own accesses.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kSlots; ++i) {
            full[i].init(32);
            empty[i].init(32);
        }
        tile_full.init(32 * kTileUnits);
        tile_empty.init(kKeyThreads);
        cutlass::arch::fence_barrier_init();
    }
};
static_assert(sizeof(Shared) <= 227 * 1024);

// Waits for use `n` of what fills and empties by turns.
__device__ __forceinline__ void wait_full(ClusterBarrier& barrier, uint32_t n) {
    barrier.wait(n & 1);
}
__device__ __forceinline__ void wait_empty(ClusterBarrier& barrier, uint32_t n) {
    barrier.wait(~n & 1);
}

}  // namespace flash_csa::sm90
