// A row of scores in device memory as sources for ClusterTopK: its entries, those inside a pool,
// and its blocks. Page sizes are powers of two, at least kPoolBlock, and scores are aligned to 16
// bytes, columns a multiple of four: neighbours up to a block lie on one page, four are one load.
#pragma once

#include <cstdint>

#include "core/columns.h"
#include "core/scoring.h"
#include "sm90/select/unit.cuh"

namespace flash_csa::sm90 {

struct PagedRow {
    Columns columns;
    const float* scores;
    int32_t page_shift;
    uint32_t last_page;  // with 32-bit slots

    __device__ int32_t num_blocks() const {
        return columns.count / kPoolBlock + (columns.count % kPoolBlock != 0);
    }
    // Of the entries around a visible position.
    __device__ __forceinline__ int32_t page(int32_t position) const {
        return columns.pages[position >> page_shift];
    }
    __device__ __forceinline__ bool is_page(int32_t page) const {
        return static_cast<uint32_t>(page) <= last_page;
    }
    __device__ int32_t slot(int32_t position) const {
        return slot_of(columns.pages[position >> page_shift], columns.page_size,
                       position & (columns.page_size - 1));
    }
    // Four columns of which one counts; the scores of those that do not are undefined.
    __device__ __forceinline__ float4 load(int32_t column) const {
        return __ldcs(reinterpret_cast<const float4*>(scores + column));
    }
};

__device__ inline PagedRow paged_row(const Columns& columns, const float* scores,
                                     int32_t page_shift) {
    return {columns, scores, page_shift, uint32_t{INT32_MAX} >> page_shift};
}

// Ids are columns, which are positions.
struct EntryScores {
    static constexpr int kLine = 2048;
    static constexpr bool kForces = false, kAlwaysPresent = false, kBlocks = false;
    const PagedRow& row;

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ __forceinline__ float4 load(int32_t id) const { return row.load(id); }
    __device__ __forceinline__ int32_t page(int32_t id) const { return row.page(id); }
    __device__ __forceinline__ uint32_t present(int32_t id, int32_t page) const {
        return row.is_page(page) ? first_of_four(count() - id) : 0;
    }
    __device__ int32_t position(int32_t id) const { return id; }
};

// Ids are columns of a pool: a unit is half a block.
struct PoolScores {
    static constexpr int kLine = 2048;
    static constexpr bool kForces = false, kAlwaysPresent = false, kBlocks = false;
    const PagedRow& row;

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ __forceinline__ float4 load(int32_t id) const { return row.load(id); }
    __device__ __forceinline__ int32_t page(int32_t id) const {
        const int64_t position = row.columns.position(id);
        return row.columns.visible(position) ? row.page(static_cast<int32_t>(position)) : -1;
    }
    __device__ __forceinline__ uint32_t present(int32_t id, int32_t page) const {
        return row.is_page(page) ? first_of_four(row.columns.n_vis - position(id)) : 0;
    }
    __device__ int32_t position(int32_t id) const {
        return static_cast<int32_t>(row.columns.position(id));
    }
};

// Ids are blocks, whose scores are maxima; the newest is forced in.
struct BlockIds {
    static constexpr int kLine = 128;
    static constexpr bool kForces = true, kAlwaysPresent = true, kBlocks = false;
    const PagedRow& row;

    __device__ int32_t count() const { return row.num_blocks(); }
    __device__ int32_t forced() const {
        return row.columns.n_vis > 0 ? (row.columns.n_vis - 1) / kPoolBlock : -1;
    }
};

struct BlockScores : BlockIds {
    __device__ float maximum(int32_t block) const {
        const int32_t first = block * kPoolBlock;
        if (first >= row.columns.count || !row.is_page(row.page(first)))
            return bits_float(kNanBits);
        float4 a = row.load(first), b = a;
        if (first + 4 < row.columns.count) b = row.load(first + 4);
        if (first + kPoolBlock > row.columns.count) {
            a = only(first_of_four(row.columns.count - first), a);
            b = only(first_of_four(row.columns.count - first - 4), b);
        }
        // fmaxf leaves NaN out.
        return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)),
                     fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
    }
    __device__ float4 load(int32_t id) const {
        return {maximum(id), maximum(id + 1), maximum(id + 2), maximum(id + 3)};
    }
};

// Ids are columns, which are positions; scores of those on no page are NaN. Units are maxima.
struct EntryMaxima {
    static constexpr int kLine = 1024;  // 128 maxima
    static constexpr bool kForces = false, kAlwaysPresent = true, kBlocks = true;
    const PagedRow& row;
    const float* maxima;  // of the row

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ static constexpr bool expands() { return true; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ __forceinline__ float4 load(int32_t block) const {
        return __ldcs(reinterpret_cast<const float4*>(maxima + block));
    }
    __device__ __forceinline__ int32_t page(int32_t id) const { return row.page(id); }
    __device__ __forceinline__ float4 entries(int32_t id) const {
        const int32_t there = count() - id;
        if (there >= 4) return row.load(id);
        float4 unit = {};  // nobody wrote the scores behind the last one
        if (there > 0) unit.x = row.scores[id];
        if (there > 1) unit.y = row.scores[id + 1];
        if (there > 2) unit.z = row.scores[id + 2];
        return only(first_of_four(there), unit);
    }
    __device__ int32_t position(int32_t id) const { return id; }
};

// The same, or blocks, in one piece of code: a block is its first column, its score the maximum,
// and the newest is forced in.
struct EntryOrBlockMaxima : EntryMaxima {
    static constexpr bool kForces = true;
    const bool of_blocks;

    __device__ EntryOrBlockMaxima(const PagedRow& row, const float* maxima, bool blocks)
        : EntryMaxima{row, maxima}, of_blocks(blocks) {}
    __device__ int32_t forced() const {  // among maxima
        return of_blocks && row.columns.n_vis > 0 ? (row.columns.n_vis - 1) / kPoolBlock : -1;
    }
    __device__ bool expands() const { return !of_blocks; }
    __device__ float maximum(int32_t block) const { return maxima[block]; }
};

}  // namespace flash_csa::sm90
