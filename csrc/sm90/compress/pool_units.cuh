// The pool warps of prefill.cu. Rows land where the lanes read them, those of the next entry while
// one is pooled, also across tiles.
//
// An entry is read in whole rows, 512 bytes with an instruction: pieces of 128 bytes of 16 rows by
// turns cost a third of the DRAM's rate.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/prefetch.cuh"
#include "sm90/compress/pair_tables.cuh"
#include "sm90/compress/pool_two.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {

inline constexpr int kLineBytes = 128;  // of the L2

// The first rows of a pool warp on their way to the L2, while its batch is looked up.
__device__ __forceinline__ void prefetch_first_rows(const CompressParams& p, int warp, int lane) {
    constexpr int kRowLines = kHeadDim * sizeof(float) / kLineBytes, kBytes = 16 * 1024;
#pragma unroll
    for (int i = lane; i < kBytes / kLineBytes; i += 32) {
        const uint32_t row = first_row() + warp * 16 + i / (2 * kRowLines);
        if (!in_batch(p, row)) return;
        const float* from = i / kRowLines % 2 == 0 ? p.gate.row(row) : p.kv.row(row);
        prefetch_l2(from + i % kRowLines * (kLineBytes / sizeof(float)));
    }
}

// The lists of the first tile.
__device__ __forceinline__ void prefetch_first_lists(const CompressParams& p, int lane) {
    constexpr int kRows = kLineBytes / sizeof(int32_t), kLines = kTileRows / kRows;
    const uint32_t row = first_row() + lane % kLines * kRows;
    if (in_batch(p, row)) {
        if (lane / kLines == 0) prefetch_l2(p.batch.positions + row);
        if (lane / kLines == 1) prefetch_l2(p.batch.row_request + row);
        if (lane / kLines == 2) prefetch_l2(p.entry_slots + row);
    }
    if (lane == 31) prefetch_l2(p.batch.start);
    if (lane == 30) prefetch_l2(p.batch.tail_slot);
    if (lane == 29) prefetch_l2(p.batch.cu_tokens);
}

// A lane's channels of a block, of both rows.
struct RowBlock {
    float4 kv[2], gate[2];
};

__device__ __forceinline__ Entry entry_of(const CompressParams& p, const Item& item) {
    return {item.row, item.rotation + 1, p.batch.row_request[item.row], item.rotation / 2,
            item.rotation};
}

// The two rows of an entry, from the lane's first channel.
struct RowPair {
    const float* kv[2];
    const float* gate[2];

    __device__ __forceinline__ void find(const CompressParams& p, const Item& item, int first) {
        kv[1] = p.kv.row(item.row) + first;
        gate[1] = p.gate.row(item.row) + first;
        kv[0] = kv[1] - p.kv.stride;
        gate[0] = gate[1] - p.gate.stride;
        if (item.in_tail == 0) return;
        const int32_t slot = abs(item.in_tail) - 1;
        kv[0] = p.tail.kv(slot, item.rotation) + first;
        gate[0] = p.tail.gate(slot, item.rotation) + first;
    }
    // Starts the copies of a block.
    __device__ __forceinline__ void copy(int block, float4 (&to)[4][32], int lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            copy_16_async(&to[r][lane], kv[r] + kBlock * block, true);
            copy_16_async(&to[2 + r][lane], gate[r] + kBlock * block, true);
        }
    }
};

__device__ __forceinline__ RowBlock read_block(const float4 (&from)[4][32], int lane) {
    return {{from[0][lane], from[1][lane]}, {from[2][lane], from[3][lane]}};
}

__device__ __forceinline__ uint2 pool_block(const RowBlock& x) {
    const auto values = [](const float4& v) -> const float (&)[4] {
        return reinterpret_cast<const float (&)[4]>(v);
    };
    float pooled[4];
    pool_two(values(x.kv[0]), values(x.kv[1]), values(x.gate[0]), values(x.gate[1]), pooled);
    return make_uint2(pack_bf16(pooled[0], pooled[1]), pack_bf16(pooled[2], pooled[3]));
}

// Puts new rows into the tail slots that the entry's lanes have read.
__device__ __forceinline__ void replace_rows(const CompressParams& p, const Item& item, int first) {
    replace_read_rows(p, entry_of(p, item),
                      [first](float* to_kv, float* to_gate, const float* kv, const float* gate) {
                          for (int c = first; c < kHeadDim; c += kBlock) {
                              *reinterpret_cast<float4*>(to_kv + c) =
                                  *reinterpret_cast<const float4*>(kv + c);
                              *reinterpret_cast<float4*>(to_gate + c) =
                                  *reinterpret_cast<const float4*>(gate + c);
                          }
                      });
}

// A lane copies what it will read: three blocks are on their way, 6 KiB a warp, while one
// is pooled. The slot is waited for behind the first entry of a unit: it has been emptied
// meanwhile.
__device__ __forceinline__ void pool_units(const CompressParams& p, PairsShared& shared, int warp,
                                           int lane) {
    constexpr uint32_t kChunk = RowTables::kChunk;
    static_assert(kSlots == kPoolWarps);
    const int first = 4 * lane;
    auto& blocks = shared.rows[warp];
    RowPair rows = {};  // of `next`
    Item next = kNoItem;
    bool more = true;
    const auto find_next = [&](uint32_t n) {
        const uint32_t tile = n / kChunk;
        next = kNoItem;
        if (n % kChunk == 0) more = has_table(shared, tile);
        if (!more) return;
        next = shared.tables[tile % kTables][kChunk * warp + n % kChunk];
        if (next.row >= 0) rows.find(p, next, first);
    };
    const auto copy_next = [&](int block) {
        if (next.row >= 0) rows.copy(block, blocks[block], lane);
        commit_copies();
    };
    find_next(0);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) copy_next(i);
#pragma unroll 1
    for (uint32_t n = 0; more; ++n) {
        const Item item = next;
        find_next(n + 1);
        uint2 pooled[kBlocks] = {};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            wait_copies<kBlocks - 1>();
            if (item.row >= 0) pooled[i] = pool_block(read_block(blocks[i], lane));
            copy_next(i);
        }
        const uint32_t e = n % kUnit;
        if (e == 0) wait_empty(shared.empty[warp], n / kUnit);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            *reinterpret_cast<uint2*>(shared.unit(warp, e) + first + kBlock * i) = pooled[i];
        if (item.in_tail < 0) replace_rows(p, item, first);
        if (e == kUnit - 1) shared.full[warp].arrive();
    }
    wait_for_copies();
}

}  // namespace flash_csa::sm90
