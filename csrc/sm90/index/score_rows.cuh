// Scores of rows that share no keys: groups of four warps that need nobody else. The units (256
// keys) of all rows are one sequence, cut into an equal run for each group of the launch. Each warp
// of a group brings its chunk of a unit itself; the queries of a row are put by its group.
#pragma once

#include "sm90/common/dependents.cuh"
#include "sm90/common/prefetch.cuh"
#include "sm90/common/warp_scan.cuh"
#include "sm90/index/row_scores.cuh"

namespace flash_csa::sm90 {

constexpr int kRowsStages = 2;

// ---- Work

// A place in the sequence. Pages are looked up for 32 units of a row at once, from `base` on.
struct alignas(16) RowsPlace {
    int32_t row, unit, count, base;

    __device__ __forceinline__ int32_t rest() const { return units_of(count) - unit; }

    // There is a next unit. True where its pages are to be looked up.
    __device__ __forceinline__ bool advance(const IndexScoresParams& p) {
        ++unit;
        if (unit * kUnitKeys < count) {
            if (unit - base < 32) return false;
            base = unit;
            return true;
        }
#pragma unroll 1
        do {
            count = group_of(p, ++row).count;
        } while (count == 0);
        unit = base = 0;
        return true;
    }
};

// A warp's keys, and how far its copies are: registers are scarce where scores are taken.
struct RowsWarp {
    WarpKeys<kRowsStages> keys;
    RowsPlace place;
    // How many units are left, with the one that is scored, and below it the number of that, in two
    // bits: its stage, and the phase of the stage.
    int32_t state;

    __device__ __forceinline__ int32_t stage() const { return state & 1; }
    __device__ __forceinline__ int32_t left() const { return state >> 2; }
    // One warp. False where there is no next unit.
    __device__ __forceinline__ bool next() {
        const int32_t last = state;
        __syncwarp();
        if (threadIdx.x % 32 == 0) state = (last & ~3) - 4 + ((last + 1) & 3);
        __syncwarp();
        return last >= 4 * 2;
    }

    // One warp, these three. With the first copy.
    __device__ __forceinline__ void start(const IndexScoresParams& p, const RowsPlace& at) {
        look_up(p, at);
        set(at);
        copy(p, 0);
        if (at.rest() <= kPrefetched) prefetch_row(p, at.row + 1);
    }
    // There is a next unit.
    __device__ __forceinline__ void advance(const IndexScoresParams& p) {
        RowsPlace next = place;
        const int32_t last_row = next.row;
        const bool looks_up = next.advance(p);
        __syncwarp();
        if (looks_up || !ChunkCopier(p).has_whole()) look_up(p, next);
        const bool short_row = next.row != last_row && next.rest() < kPrefetched;
        if (short_row || next.rest() == kPrefetched) prefetch_row(p, next.row + 1);
        set(next);
    }
    __device__ __forceinline__ void copy(const IndexScoresParams& p, int32_t stage) {
        const RowsPlace at = place;
        ChunkCopier(p).copy(at.unit - at.base, chunk_of(at.unit), at.row, at.count, keys, stage);
    }

  private:
    static constexpr int32_t kPrefetched = 4;  // units before a row

    __device__ __forceinline__ void look_up(const IndexScoresParams& p, const RowsPlace& at) {
        const ChunkCopier copier(p);
        const int32_t unit = at.unit + (copier.has_whole() ? threadIdx.x % 32 : 0);
        const int32_t* table = p.block_table.row(p.batch.row_request[at.row]);
        copier.find(table, at.count, chunk_of(unit), keys);
        const int32_t later = chunk_of(unit + 32) * kChunkKeys;
        const int32_t shift = __ffs(fresh(p.index.page_size)) - 1;
        if (later < at.count) prefetch_l2(table + (later >> shift));
    }
    // What a group waits for where it comes to a row: its first pages, its queries.
    static __device__ __forceinline__ void prefetch_row(const IndexScoresParams& p, int32_t row) {
        if (row >= p.batch.rows) return;
        const int32_t request = p.batch.row_request[row];
        if (request < 0 || request >= p.batch.requests) return;
        const int32_t thread = threadIdx.x % kGroupThreads;
        const int32_t column = min(p.block_table.columns - 1, thread);
        prefetch_l2(p.block_table.row(request) + column);
        const int32_t head = min(p.query.heads - 1, thread / 2);
        prefetch_l2(p.query.codes.row(row) + head * kKeyBytes);
        prefetch_l2(p.query.scales_ue8m0.row(row) + head);
        if (p.weights.f32) prefetch_l2(p.weights.f32.row(row) + head);
    }
    __device__ __forceinline__ void set(const RowsPlace& at) {
        if (threadIdx.x % 32 == 0) place = at;
        __syncwarp();
    }
};

// Rows have up to kHeads * kBlocks heads.
template <int kHeads, int kBlocks>
struct alignas(1024) RowsShared {
    RowTile<kHeads * kBlocks> tiles[kRowGroups];
    RowsWarp warps[kRowThreads / 32];
    OffsetUnits tables[kMaxRowFold + 2];  // by shift
    int32_t warp_units[kRowThreads / 32];
    RowsPlace starts[kRowGroups];
};
static_assert(sizeof(RowsShared<32, 1>) <= kSmemOptIn && sizeof(RowsShared<32, 2>) <= kSmemOptIn);

// All threads. Returns how many units the thread's group has, which start at `starts`.
template <class Shared>
__device__ __forceinline__ int32_t divide_rows(const IndexScoresParams& p, Shared& shared) {
    const int32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int32_t each = (p.batch.rows + kRowThreads - 1) / kRowThreads;
    const int32_t first = min(thread * each, p.batch.rows);
    const int32_t last = min(first + each, p.batch.rows);
    int32_t own = 0;
    Segment last_segment = {};
#pragma unroll 1
    for (int32_t row = first; row < last; ++row) {
        last_segment = group_of(p, row);
        own += last_segment.end;
    }
    const int32_t upto = sum_of_lanes_up_to(own, lane);
    if (lane == 31) shared.warp_units[warp] = upto;
    __syncthreads();
    int32_t total = 0, before = upto - own;
#pragma unroll
    for (int i = 0; i < kRowThreads / 32; ++i) {
        if (i < warp) before += shared.warp_units[i];
        total += shared.warp_units[i];
    }
    const int32_t groups = gridDim.x * kRowGroups;
    const int32_t run = total / groups, longer = total % groups;  // groups with one unit more
    const auto number_of = [](int32_t group) {
        return group * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
    };
#pragma unroll 1
    for (int32_t group = 0; group < kRowGroups; ++group) {
        const int32_t number = number_of(group);
        int32_t unit = number * run + min(number, longer) - before;
        if (unit < 0 || unit >= own) continue;
        int32_t row = first;
        Segment segment = last_segment;
#pragma unroll 1
        for (; each > 1; ++row) {
            segment = group_of(p, row);
            if (unit < segment.end) break;
            unit -= segment.end;
        }
        shared.starts[group] = {row, unit, segment.count, unit};
    }
    __syncthreads();
    return run + (number_of(warp / 4) < longer);
}

// ---- Scores

template <int kHeads, int kBlocks, class Sink>
__device__ __forceinline__ void score_rows(const IndexScoresParams& p,
                                           RowsShared<kHeads, kBlocks>& shared, Sink& sink) {
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    RowsWarp& own = shared.warps[warp];
    const int32_t units = divide_rows(p, shared);
    if (units == 0) return;
    RowTile<kHeads * kBlocks>& tile = shared.tiles[group];
    RowHeads<kHeads * kBlocks> heads;
    heads.load(p, shared.starts[group].row);
    own.start(p, shared.starts[group]);
    static_assert(kRowsStages == 2);
    if (units > 1) {
        own.advance(p);
        own.copy(p, 1);
    }
    heads.put(p, tile);
    group_sync();
    const RowQuery<kHeads, kBlocks> query(tile);
    if (threadIdx.x % 32 == 0) own.state = 4 * units;
    __syncwarp();
    while (true) {
        const int32_t stage = own.stage();
        own.keys.full[stage].wait(own.state >> 1 & 1);
        const int32_t row = own.keys.places[stage].row;
        if (row != tile.row) {
            RowHeads<kHeads * kBlocks> next;
            next.load(p, row);
            group_sync();  // the last row's queries are read
            next.put(p, tile);
            group_sync();
        }
        score_chunk<false>(p, query, shared.tables, own.keys, stage, sink);
        if (own.left() > kRowsStages) {
            own.advance(p);
            own.copy(p, own.stage());
        }
        if (!own.next()) return;
    }
}

template <int kHeads, int kBlocks, class Sink>
__global__ void __launch_bounds__(kRowThreads, 1)
    score_rows_kernel(const __grid_constant__ IndexScoresParams p,
                      const __grid_constant__ typename Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    using Shared = RowsShared<kHeads, kBlocks>;
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    shared.warps[__shfl_sync(~0u, threadIdx.x / 32, 0)].keys.init();
    if (threadIdx.x <= kMaxRowFold) shared.tables[threadIdx.x] = OffsetUnits::of(threadIdx.x);
    wait_for_previous();
    allow_dependents();
    Sink sink(sink_params, nullptr);
    score_rows<kHeads, kBlocks>(p, shared, sink);
}

}  // namespace flash_csa::sm90
