// The entries of the tiles of prefill.cu, looked up ahead of the warps that need them: a table of
// Items for each tile, in two buffers by turns.
#pragma once

#include "sm90/common/lane_codec.cuh"
#include "sm90/compress/tail.cuh"
#include "sm90/compress/tile.cuh"

namespace flash_csa::sm90 {

inline constexpr int kKeyBarrier = 1;  // of the key warps

__device__ __forceinline__ Item find_item(const CompressParams& p, uint32_t row) {
    if (!in_batch(p, row)) return kNoItem;
    const int32_t slot = p.entry_slots[row];  // read beside what follows
    Entry e;
    if (!closes_entry(p, row, &e)) return kNoItem;
    const bool in_tail = p.ratio > 1 && e.first < p.batch.start[e.request];
    return {static_cast<int32_t>(row), slot, static_cast<int32_t>(e.first), in_tail};
}

// Ratio 1, by 64 threads: every row has a place.
__device__ __forceinline__ void write_tables(const CompressParams& p, Shared<1>& shared,
                                             int thread) {
    uint32_t rows = first_row<1>();
    bool more = true;
    for (uint32_t tile = 0; more; ++tile, rows += row_stride<1>()) {
        const uint32_t buffer = tile % kTables;
        const Item item = find_item(p, rows + thread);
        more = in_batch(p, rows);
        wait_empty(shared.table_empty[buffer], tile / kTables);
        shared.tables[buffer][thread] = item;
        if (thread == 0) shared.ended[buffer] = !more;
        shared.table_full[buffer].arrive();
    }
}

// Ratio 2, by the key warps: a pool warp has 16 rows of a tile, and places for 8 entries. Rows of
// many short requests close more: the tile comes twice.
struct RowTables {
    static constexpr int kChunkRows = 16, kChunk = 8;
    uint32_t rows = first_row<2>(), number = 0;
    int pass = 0;
    bool more = true;

    // The next table. All key threads have read the one before the last.
    __device__ __forceinline__ void write(const CompressParams& p, Shared<2>& shared, int thread) {
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
        if (pass == 0) rows += row_stride<2>();
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
