// What the warps of prefill.cu share, and the entries of its tiles, looked up ahead of the warps
// that need them: a table of Items for each tile, in two buffers by turns.
#pragma once

#include "sm90/common/lane_codec.cuh"
#include "sm90/compress/key_tiles.cuh"
#include "sm90/compress/look_up.cuh"

namespace flash_csa::sm90 {

inline constexpr int kUnit = 4;  // entries of a slot: two finish warps share it
inline constexpr int kTileUnits = kTile / kUnit;
inline constexpr int kSlots = 8;   // units on their way: 32 KiB
inline constexpr int kTables = 2;  // of the entries of a tile
inline constexpr int kTileRows = 2 * kTile;
inline constexpr int kBlock = 128;  // channels of a warp's copy of 16 bytes a lane
inline constexpr int kBlocks = kHeadDim / kBlock;

// How the warps share the work, registers of a thread, of those that the launch gives to all. None
// spills.
inline constexpr int kPoolWarps = 8, kFinishWarps = 8;
inline constexpr int kPoolRegisters = 104, kFinishRegisters = 80, kKeyRegisters = 112;
inline constexpr int kLaunchRegisters = 96;
inline constexpr int kThreads = 32 * (kPoolWarps + kFinishWarps) + kKeyThreads;

// Unit u of a block lies in slot u % kSlots; a slot's units are neighbours in a tile.
__device__ __forceinline__ int unit_row(uint32_t unit) {
    return static_cast<int>(unit % kSlots * (kTile / kSlots) + unit / kSlots % 2 * kUnit);
}
static_assert(kTileUnits == 2 * kSlots);

// Rows of the block's first tile, and between its tiles.
__device__ __forceinline__ uint32_t first_row() { return blockIdx.x * kTileRows; }
__device__ __forceinline__ uint32_t row_stride() { return gridDim.x * kTileRows; }

struct PairsShared {
    // Half of the weight at a time, from the L2, and the rows of an entry of each pool warp, on
    // their way.
    static constexpr int kWeightKeys = kIndexDim / 2;
    alignas(1024) uint8_t weight[kPanels][kWeightKeys * kPanelRowBytes];
    float4 rows[kPoolWarps][kBlocks][4][32];
    alignas(1024) uint8_t latents[kPanels][kTile * kPanelRowBytes];
    PairedRows<kSlots * kUnit> slots;
    Item tables[kTables][kTile];  // entries of a tile
    alignas(16) float key_norm_weight[kIndexDim];
    alignas(8) uint8_t closing[kTables][8];   // rows of each chunk that close entries
    int32_t ended[kTables];                   // there is no such tile
    ClusterTransactionBarrier full[kSlots];   // pooled
    ClusterTransactionBarrier empty[kSlots];  // read: the finish warps
    ClusterTransactionBarrier table_full[kTables];
    ClusterTransactionBarrier tile_full;   // latents are there
    ClusterTransactionBarrier tile_empty;  // multiplied: the key warps

    // All threads of a warp arrive, each behind its own accesses.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kSlots; ++i) {
            full[i].init(32);
            empty[i].init(2 * 32);
        }
        for (int i = 0; i < kTables; ++i) table_full[i].init(kKeyThreads);
        tile_full.init(2 * 32 * kTileUnits);
        tile_empty.init(kKeyThreads);
        cutlass::arch::fence_barrier_init();
    }
    // Row of entry e of a unit.
    __device__ __forceinline__ uint16_t* unit(uint32_t slot, int e) {
        return slots.row(static_cast<int>(slot) * kUnit + e);
    }
};
static_assert(sizeof(PairsShared) <= 227 * 1024);

// The table of tile number `tile` is there; false: the tile before was the last.
__device__ __forceinline__ bool has_table(PairsShared& shared, uint32_t tile) {
    wait_full(shared.table_full[tile % kTables], tile / kTables);
    return !shared.ended[tile % kTables];
}

// By the key warps: a pool warp has 16 rows of a tile, and places for 8 entries. Rows of many
// short requests close more: the tile comes twice.
struct RowTables {
    static constexpr int kChunkRows = 16, kChunk = 8;
    uint32_t rows = first_row(), number = 0;
    int pass = 0;
    bool more = true;

    // The next table. All key threads have read the one before the last.
    __device__ __forceinline__ void write(const CompressParams& p, PairsShared& shared,
                                          int thread) {
        if (!more) return;
        const uint32_t row = rows + thread, buffer = number++ % kTables;
        const int chunk = thread / kChunkRows, i = thread % kChunkRows;
        const bool first_pass = pass == 0;
        const Item item = find_item(p, row);
        const uint32_t closing =
            __ballot_sync(kAllLanes, item.row >= 0) >> thread % 32 / kChunkRows * kChunkRows &
            0xffffu;
        if (i == 0) shared.closing[buffer][chunk] = static_cast<uint8_t>(__popc(closing));
        cutlass::arch::NamedBarrier::sync(kKeyThreads, kKeyBarrier);
        Item* items = shared.tables[buffer] + kChunk * chunk;
        const int at = __popc(closing & ((1u << i) - 1)) - kChunk * pass;
        if (item.row >= 0 && at >= 0 && at < kChunk) items[at] = item;
        if (i < kChunk && i >= __popc(closing) - kChunk * pass) items[i] = kNoItem;
        more = in_batch(p, rows);
        if (thread == 0) shared.ended[buffer] = !more;
        const uint2 counts = *reinterpret_cast<const uint2*>(shared.closing[buffer]);
        constexpr uint32_t kEach = 0x01010101u * kChunk;
        const bool twice = (__vcmpgtu4(counts.x, kEach) | __vcmpgtu4(counts.y, kEach)) != 0;
        shared.table_full[buffer].arrive();
        pass = first_pass && twice;
        if (pass == 0) rows += row_stride();
        if (first_pass && p.tail.data != nullptr) keep_rows(p, row, thread % 32);
    }

  private:
    // Of a warp's rows.
    __device__ __forceinline__ void keep_rows(const CompressParams& p, uint32_t row,
                                              int lane) const {
        uint32_t kept = __ballot_sync(kAllLanes, in_batch(p, row) && keeps_row(p, row));
        for (; kept != 0; kept &= kept - 1)
            keep_row(p, row - lane + __ffs(static_cast<int>(kept)) - 1, lane, 32);
    }
};

}  // namespace flash_csa::sm90
