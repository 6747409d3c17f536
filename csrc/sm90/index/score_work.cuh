// How rows and their columns are dealt out to the blocks of a score kernel, on the device.
//
// A group is up to `max_rows` consecutive rows of one request, which share every key that is read;
// a unit is kUnitKeys columns of a group. The units of all groups, in row order, are one sequence
// that is cut into equal runs, one per block, so work follows the lengths on the device. A run is a
// list of segments.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "core/columns.h"

namespace flash_csa::sm90 {

constexpr int32_t kUnitKeys = 128;

struct Segment {
    int32_t first_row;
    int32_t rows;        // of one request
    int32_t begin, end;  // units
    int32_t count;       // columns of the row that has most
};

// The segments of one block among those of kThreads rows. Empty ones have begin == end.
template <int kThreads>
struct WorkList {
    using Scan = cub::BlockScan<int32_t, kThreads>;

    typename Scan::TempStorage scan;
    Segment segments[kThreads];
    int32_t first, last;  // segments [first, last]
};

namespace detail {

// True where a row starts a group: a new request, or as many rows as a group may have.
__device__ __forceinline__ bool starts_group(const BatchView& batch, int32_t row,
                                             int32_t max_rows) {
    return row % max_rows == 0 || batch.row_request[row] != batch.row_request[row - 1];
}

}  // namespace detail

// The group that starts at a row; none where the row continues one.
__device__ __forceinline__ Segment group_at(const IndexScoresParams& p, int32_t row,
                                            int32_t max_rows) {
    Segment group = {row, 0, 0, 0, 0};
    if (row >= p.batch.rows || !detail::starts_group(p.batch, row, max_rows)) return group;
    int32_t next = row;
    do {
        const int32_t count = columns_of(p, p.index.page_size, p.columns, next).count;
        group.count = max(group.count, count);
        ++next;
    } while (next < p.batch.rows && !detail::starts_group(p.batch, next, max_rows));
    group.rows = next - row;
    group.end = (group.count + kUnitKeys - 1) / kUnitKeys;
    return group;
}

// Calls f(segment) for the segments of this block, in order. All threads of the block call it, and
// run through the segments at their own pace, one stretch of kThreads rows at a time.
template <int kThreads, class F>
__device__ __forceinline__ void for_each_segment(const IndexScoresParams& p, int32_t max_rows,
                                                 WorkList<kThreads>& list, const F& f) {
    using Scan = typename WorkList<kThreads>::Scan;
    const int32_t chunks = (p.batch.rows + kThreads - 1) / kThreads;
    Segment group;
    int32_t total = 0, before = 0, chunk_units = 0;  // before: of the chunk, before the group
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        group = group_at(p, chunk * kThreads + threadIdx.x, max_rows);
        Scan(list.scan).ExclusiveSum(group.end, before, chunk_units);
        total += chunk_units;
        __syncthreads();
    }
    const int32_t run = (total + gridDim.x - 1) / gridDim.x;
    const int32_t begin = min(run * static_cast<int32_t>(blockIdx.x), total);
    const int32_t end = min(begin + run, total);
    int32_t chunk_begin = 0;
    for (int32_t chunk = 0; chunk < chunks && chunk_begin < end; ++chunk) {
        if (chunks > 1) {
            group = group_at(p, chunk * kThreads + threadIdx.x, max_rows);
            Scan(list.scan).ExclusiveSum(group.end, before, chunk_units);
        }
        before += chunk_begin;
        const int32_t after = before + group.end;
        const int32_t from = max(begin, chunk_begin);
        const int32_t to = min(end, chunk_begin + chunk_units);
        if (before <= from && from < after) list.first = threadIdx.x;
        if (before < to && to <= after) list.last = threadIdx.x;
        group.begin = min(max(from - before, 0), group.end);
        group.end = max(min(to - before, group.end), group.begin);
        list.segments[threadIdx.x] = group;
        __syncthreads();
        for (int32_t i = from < to ? list.first : kThreads; i < kThreads && i <= list.last; ++i) {
            const Segment segment = list.segments[i];
            if (segment.begin < segment.end) f(segment);
        }
        __syncthreads();
        chunk_begin += chunk_units;
    }
}

}  // namespace flash_csa::sm90
