// How rows and their columns are dealt out to the blocks of a score kernel, on the device.
//
// A group is up to `max_rows` consecutive rows of one request, which share every key that is read;
// a unit is kUnitKeys columns of a group. The units of all groups, in row order, are one sequence
// that is cut into equal runs, one per block, so work follows the lengths on the device. A run is a
// list of segments.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "core/columns.h"
#include "sm90/common/fresh.cuh"
#include "sm90/common/warp_scan.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kUnitKeys = 256;

// Named barriers, as cutlass counts those of users.
constexpr uint32_t kConsumerBarrier = 0, kPlannerBarrier = 1;

struct Segment {
    int32_t request;
    int32_t first_row;
    int32_t rows;
    int32_t begin, end;  // units
    int32_t count;       // columns of the row that has most
};

constexpr int32_t kPlanners = 128;   // threads
constexpr int32_t kPlannerRows = 4;  // of a thread
constexpr int32_t kListRows = kPlanners * kPlannerRows;

// The segments of one block among those of kListRows rows.
struct WorkList {
    Segment segments[kListRows];        // by first row; empty ones have begin == end
    int32_t first, last;                // segments [first, last] are of this block; none: last < 0
    int32_t warp_sums[kPlanners / 32];  // of a scan
};

__device__ __forceinline__ int32_t units_of(int32_t columns) {
    return (columns + kUnitKeys - 1) / kUnitKeys;
}

namespace detail {

// True where a row starts a group: a new request, or as many rows as a group may have.
__device__ __forceinline__ bool starts_group(const BatchView& batch, int32_t row,
                                             int32_t max_rows) {
    return row % max_rows == 0 || batch.row_request[row] != batch.row_request[row - 1];
}

}  // namespace detail

// The group of one row, of which memory says this.
__device__ __forceinline__ Segment group_of(const IndexScoresParams& p, int32_t row,
                                            int32_t request, int32_t position) {
    // Fresh, so that no loop holds it in registers.
    const int64_t capacity = int64_t{p.block_table.columns} * fresh(p.index.page_size);
    Segment group = {request, row, 1, 0, 0, 0};
    // Not `&&`: ptxas would ask for the position behind a branch, when the request has come.
    if ((position >= 0) & (request >= 0) & (request < p.batch.requests)) {
        group.count = visible_count(position, p.ratio, p.strict, min(capacity, p.columns));
    }
    group.end = units_of(group.count);
    return group;
}

__device__ __forceinline__ Segment group_of(const IndexScoresParams& p, int32_t row) {
    return group_of(p, row, p.batch.row_request[row], p.batch.positions[row]);
}

// The group that starts at a row; none where the row continues one.
__device__ __forceinline__ Segment group_at(const IndexScoresParams& p, int32_t row,
                                            int32_t max_rows) {
    Segment group = {};
    if (max_rows == 1 && row < p.batch.rows) return group_of(p, row);
    if (row >= p.batch.rows || !detail::starts_group(p.batch, row, max_rows)) return group;
    group.request = p.batch.row_request[row];
    group.first_row = row;
    int32_t next = row;
    do {
        const int32_t count = columns_of(p, p.index.page_size, p.columns, next).count;
        group.count = max(group.count, count);
        ++next;
    } while (next < p.batch.rows && !detail::starts_group(p.batch, next, max_rows));
    group.rows = next - row;
    group.end = units_of(group.count);
    return group;
}

// Fills the list of a block, one stretch of kListRows rows at a time. kPlanners threads.
class Planner {
  public:
    __device__ Planner(const IndexScoresParams& p, int32_t max_rows, WorkList& list, int32_t thread)
        : p_(p), max_rows_(max_rows), list_(list), thread_(thread), few_(p.batch.rows <= 32) {
        int32_t total = 0;
        do {
            total += few_ ? count_few() : count_stretch();
            first_row_ += kListRows;
        } while (first_row_ < p.batch.rows);
        const int32_t blocks = static_cast<int32_t>(gridDim.x);
        const int32_t run = (total + blocks - 1) / blocks;
        begin_ = min(run * static_cast<int32_t>(blockIdx.x), total);
        end_ = min(begin_ + run, total);
        first_row_ = 0;
    }

    // The next stretch that holds segments of the block; an empty list where there is none.
    // Barriers of all readers of the list come before and after.
    __device__ void next() {
        if (few_) {
            if (thread_ < 32) write_few();
            return;
        }
        list_.last = -1;
        sync();
        for (bool found = false; !found && first_row_ < p_.batch.rows && stretch_begin_ < end_;) {
            const bool single = p_.batch.rows <= kListRows;
            const int32_t stretch_end =
                stretch_begin_ + (single ? stretch_units_ : count_stretch());
            found = begin_ < stretch_end;
            if (found) write(stretch_end);
            stretch_begin_ = stretch_end;
            first_row_ += kListRows;
        }
    }

  private:
    __device__ static void sync() { cutlass::arch::NamedBarrier::sync(kPlanners, kPlannerBarrier); }

    // Units of at most 32 rows, one a lane: every warp for itself, so that nobody waits.
    __device__ int32_t count_few() {
        group_ = group_at(p_, thread_ % 32, max_rows_);
        const int32_t upto = sum_of_lanes_up_to(group_.end, threadIdx.x % 32);
        before_ = upto - group_.end;
        return __shfl_sync(~0u, upto, 31);
    }

    // Once; an empty list then.
    __device__ void write_few() {
        const int32_t units = group_.end, after = before_ + units;
        group_.begin = min(max(begin_ - before_, 0), units);
        group_.end = max(min(end_ - before_, units), group_.begin);
        list_.segments[thread_] = group_;
        if (before_ <= begin_ && begin_ < after) list_.first = thread_;
        const uint32_t last = __ballot_sync(~0u, before_ < end_ && end_ <= after);
        if (thread_ == 0) list_.last = begin_ < end_ ? __ffs(last) - 1 : -1;
        begin_ = end_;
    }

    // Units of the stretch; in before_ those before this thread's rows.
    __device__ int32_t count_stretch() {
        int32_t own = 0;
#pragma unroll
        for (int i = 0; i < kPlannerRows; ++i) {
            const int32_t at = thread_ * kPlannerRows + i;
            const Segment group = group_at(p_, first_row_ + at, max_rows_);
            list_.segments[at] = group;
            own += group.end;
        }
        const int32_t lane = thread_ % 32, warp = thread_ / 32;
        const int32_t upto = sum_of_lanes_up_to(own, lane);
        sync();  // the last scan's sums are read
        if (lane == 31) list_.warp_sums[warp] = upto;
        sync();
        before_ = upto - own;
        stretch_units_ = 0;
#pragma unroll
        for (int i = 0; i < kPlanners / 32; ++i) {
            if (i < warp) before_ += list_.warp_sums[i];
            stretch_units_ += list_.warp_sums[i];
        }
        return stretch_units_;
    }

    __device__ void write(int32_t stretch_end) {
        const int32_t from = max(begin_, stretch_begin_), to = min(end_, stretch_end);
        int32_t before = stretch_begin_ + before_;
        for (int i = 0; i < kPlannerRows; ++i) {
            const int32_t at = thread_ * kPlannerRows + i;
            Segment& segment = list_.segments[at];
            const int32_t units = segment.end, after = before + units;
            segment.begin = min(max(from - before, 0), units);
            segment.end = max(min(to - before, units), segment.begin);
            if (before <= from && from < after) list_.first = at;
            if (before < to && to <= after) list_.last = at;
            before = after;
        }
    }

    const IndexScoresParams& p_;
    const int32_t max_rows_;
    WorkList& list_;
    const int32_t thread_;
    const bool few_;             // rows: a lane has one
    Segment group_;              // where few
    int32_t begin_, end_;        // units of the block
    int32_t first_row_ = 0;      // of the stretch
    int32_t stretch_begin_ = 0;  // units before it
    int32_t stretch_units_ = 0;
    int32_t before_ = 0;  // units before this thread's rows
};

// A worker's place among the units of a block, of which every `step`-th is its own; it goes from
// list to list. Ring: what a unit lies in, with advance(steps).
template <class Ring>
struct Turn {
    Ring at;
    int32_t step;
    int32_t skip;  // units before its next

    __device__ Turn(const Ring& first, int32_t number, int32_t workers)
        : at(first), step(workers), skip(number) {
        if (number > 0) at.advance(number);
    }
};

// The worker's units in a list, one after another.
template <class Ring>
class Units {
  public:
    Segment segment;
    int32_t unit;

    __device__ __forceinline__ Units(const WorkList& list, Turn<Ring>& turn)
        : list_(list), turn_(turn), next_(list.first) {
        enter();
    }
    __device__ __forceinline__ bool valid() const { return valid_; }
    __device__ __forceinline__ const Ring& at() const { return turn_.at; }
    // True where the next unit is of another segment.
    __device__ __forceinline__ bool advance() {
        turn_.at.advance(turn_.step);
        unit += turn_.step;
        if (unit < segment.end) return false;
        turn_.skip = unit - segment.end;
        enter();
        return true;
    }

  private:
    // The first segment from next_ on that has a unit of this worker.
    __device__ __forceinline__ void enter() {
        for (valid_ = false; !valid_ && next_ <= list_.last; ++next_) {
            segment = list_.segments[next_];
            unit = segment.begin + turn_.skip;
            valid_ = unit < segment.end;
            if (!valid_) turn_.skip = unit - segment.end;
        }
    }
    const WorkList& list_;
    Turn<Ring>& turn_;
    int32_t next_;
    bool valid_;
};

}  // namespace flash_csa::sm90
