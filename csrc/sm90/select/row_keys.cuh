// The order keys of a row of scores, as sources for top_k: of its entries, of its blocks, and of
// what the pieces of a row have kept.
#pragma once

#include "core/columns.h"
#include "sm90/select/split.cuh"
#include "sm90/select/top_k.cuh"

namespace flash_csa::sm90 {

struct ScoreRow {  // the same for all threads: lies in shared memory, which saves registers
    Columns columns;
    const float* scores;

    __device__ int32_t num_blocks() const { return (columns.count + kPoolBlock - 1) / kPoolBlock; }

    // Keys of the columns of a block; 0 for those that are hidden or on no page.
    __device__ __forceinline__ void block_keys(int32_t block, uint32_t (&keys)[kPoolBlock]) const {
        const int32_t first = block * kPoolBlock;
        const int64_t at = columns.position(first);
        float values[kPoolBlock];
        // Scores of hidden columns are undefined: nobody reads them.
        const bool whole = columns.count - first >= kPoolBlock && columns.visible(at) &&
                           columns.visible(at + kPoolBlock - 1);
        if (whole && reinterpret_cast<uintptr_t>(scores) % sizeof(float4) == 0) {
#pragma unroll
            for (int i = 0; i < kPoolBlock; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(scores + first + i);
                values[i] = four.x;
                values[i + 1] = four.y;
                values[i + 2] = four.z;
                values[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kPoolBlock; ++i) {
                const bool read = first + i < columns.count && columns.visible(at + i);
                values[i] = read ? scores[first + i] : bits_float(kNanBits);
            }
        }
        // The visible positions of a block are its first: pages are read for them alone.
        int32_t page_column = 0, page = -1, offset = 0;
#pragma unroll
        for (int i = 0; i < kPoolBlock; ++i) {
            keys[i] = 0;
            if (!columns.visible(at + i)) continue;
            if (i == 0) {
                page_column = static_cast<int32_t>(at) / columns.page_size;
                offset = static_cast<int32_t>(at) % columns.page_size;
                page = columns.pages[page_column];
            } else if (++offset == columns.page_size) {
                offset = 0;
                page = columns.pages[++page_column];
            }
            if (slot_of(page, columns.page_size, offset) >= 0) keys[i] = order_key(values[i]);
        }
    }

    __device__ uint32_t block_key(int32_t block) const {
        uint32_t keys[kPoolBlock];
        block_keys(block, keys);
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < kPoolBlock; ++i) best = max_u32(best, keys[i]);
        return best;
    }
};

struct BlockRange {
    int32_t begin, end;
};

// Ids are columns.
struct EntryKeys {
    const ScoreRow& row;
    BlockRange blocks;

    template <class F>
    __device__ void sweep(const F& f) const {
        for (int32_t first = blocks.begin; first < blocks.end; first += kTopKThreads) {
            const int32_t block = first + static_cast<int32_t>(threadIdx.x);
            uint32_t keys[kPoolBlock] = {};
            if (block < blocks.end) row.block_keys(block, keys);
            f(block * kPoolBlock, keys);
        }
    }
};

// Ids are blocks; the newest has the forced key.
struct BlockKeys {
    const ScoreRow& row;
    BlockRange blocks;
    int32_t newest;

    template <class F>
    __device__ void sweep(const F& f) const {
        for (int32_t first = blocks.begin; first < blocks.end; first += kTopKThreads) {
            const int32_t block = first + static_cast<int32_t>(threadIdx.x);
            uint32_t keys[1] = {};
            if (block < blocks.end) keys[0] = block == newest ? kForcedKey : row.block_key(block);
            f(block, keys);
        }
    }
};

// The pairs that all pieces of a row have kept. Kept lists lie `stride` bytes apart; other blocks
// wrote them, so they are read from L2.
struct KeptKeys {
    Kept first;
    int64_t stride;
    int32_t pieces;

    template <class F>
    __device__ void sweep(const F& f) const {
        for (int32_t piece = 0; piece < pieces; ++piece) {
            const int64_t skip = piece * stride;
            const int32_t count = __ldcg(first.count + skip / sizeof(int32_t));
            const uint2* pairs = first.pairs + skip / sizeof(uint2);
            for (int32_t at = 0; at < count; at += kTopKThreads) {
                const int32_t i = at + static_cast<int32_t>(threadIdx.x);
                const uint2 pair = i < count ? __ldcg(pairs + i) : uint2{0, 0};
                const uint32_t keys[1] = {pair.x};
                f(static_cast<int32_t>(pair.y), keys);
            }
        }
    }
};

}  // namespace flash_csa::sm90
