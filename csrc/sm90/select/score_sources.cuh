// A row of scores in device memory as sources for ClusterTopK: its entries, those inside a pool,
// and its blocks. Page sizes are powers of two, at least kPoolBlock, and scores are aligned to 16
// bytes: neighbours up to a block lie on one page, and four are one load.
#pragma once

#include <cstdint>

#include "core/columns.h"
#include "core/scoring.h"

namespace flash_csa::sm90 {

struct PagedRow {
    Columns columns;
    const float* scores;
    int32_t page_shift;
    uint32_t last_page;  // with 32-bit slots

    // Whether the entries around a visible position are on a page.
    __device__ bool on_page(int32_t position) const {
        return static_cast<uint32_t>(columns.pages[position >> page_shift]) <= last_page;
    }
    __device__ int32_t slot(int32_t position) const {
        return slot_of(columns.pages[position >> page_shift], columns.page_size,
                       position & (columns.page_size - 1));
    }
    // Four columns; NaN from `count` on, where scores are undefined.
    __device__ __forceinline__ float4 load(int32_t column) const {
        const float* at = scores + column;
        if (column + 4 <= columns.count) return __ldcs(reinterpret_cast<const float4*>(at));
        const float nan = bits_float(kNanBits);
        const int32_t left = columns.count - column;
        return {left > 0 ? at[0] : nan, left > 1 ? at[1] : nan, left > 2 ? at[2] : nan, nan};
    }
};

__device__ inline PagedRow paged_row(const Columns& columns, const float* scores,
                                     int32_t page_shift) {
    return {columns, scores, page_shift, uint32_t{INT32_MAX} >> page_shift};
}

// Ids are columns, which are positions.
struct EntryScores {
    static constexpr bool kForces = false, kAlwaysPresent = false;
    const PagedRow& row;

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ __forceinline__ float4 load(int32_t id) const { return row.load(id); }
    __device__ __forceinline__ uint32_t present(int32_t id) const {
        return row.on_page(id) ? 0xfu : 0u;
    }
    __device__ int32_t position(int32_t id) const { return id; }
};

// Ids are columns of a pool: a unit is half a block.
struct PoolScores {
    static constexpr bool kForces = false, kAlwaysPresent = false;
    const PagedRow& row;

    __device__ static constexpr int32_t forced() { return -1; }
    __device__ int32_t count() const { return row.columns.count; }
    __device__ __forceinline__ float4 load(int32_t id) const { return row.load(id); }
    __device__ __forceinline__ uint32_t present(int32_t id) const {
        const int64_t position = row.columns.position(id);
        if (!row.columns.visible(position)) return 0;
        const int32_t visible = row.columns.n_vis - static_cast<int32_t>(position);
        const uint32_t bits = visible >= 4 ? 0xfu : (1u << visible) - 1;
        return row.on_page(static_cast<int32_t>(position)) ? bits : 0;
    }
    __device__ int32_t position(int32_t id) const {
        return static_cast<int32_t>(row.columns.position(id));
    }
};

// Ids are blocks, whose scores are maxima; the newest is forced in.
struct BlockScores {
    static constexpr bool kForces = true, kAlwaysPresent = true;
    const PagedRow& row;

    __device__ int32_t count() const {
        return row.columns.count / kPoolBlock + (row.columns.count % kPoolBlock != 0);
    }
    __device__ int32_t forced() const {
        return row.columns.n_vis > 0 ? (row.columns.n_vis - 1) / kPoolBlock : -1;
    }
    __device__ float maximum(int32_t block) const {
        const int32_t first = block * kPoolBlock;
        if (first >= row.columns.count || !row.on_page(first)) return bits_float(kNanBits);
        const float4 a = row.load(first), b = row.load(first + 4);
        // fmaxf leaves NaN out.
        return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)),
                     fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
    }
    __device__ float4 load(int32_t id) const {
        return {maximum(id), maximum(id + 1), maximum(id + 2), maximum(id + 3)};
    }
    __device__ static constexpr uint32_t present(int32_t) { return 0xfu; }
};

}  // namespace flash_csa::sm90
