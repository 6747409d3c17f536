// How attention is dealt out to CTAs: a piece is a run of tiles of one row and one block of heads.
//
//   whole rows  dealt out in turns
//   splits      every row is cut into the same number of pieces, by the columns of its lists: known
//               without reading anything, so that a small batch starts at once
//   schedule    its ranges are followed, for contiguous lists of any lengths
//
// A piece of a row that is cut leaves a partial result in the workspace; reduce.cu adds them up. A
// tile has kAttendTile records of one list: the window's tiles come first.
#pragma once

#include <cstdint>

#include "core/list.h"
#include "core/schedule.h"

namespace flash_csa::sm90 {

// What all CTAs of a call agree on.
struct SplitPlan {
    int32_t splits = 1;                // pieces of a row; 0: as the schedule says
    int32_t head_blocks = 1;           // of kHeadBlock heads
    int32_t block_heads = kHeadBlock;  // heads of a partial result
};

// Who is cut where, and the partial results behind the workspace's counters: f32 [slots,
// block_heads, 512], then lse f32 [slots, block_heads], -inf for an empty piece.
class Cuts {
  public:
    __device__ Cuts(const AttendParams& p, const SplitPlan& plan)
        : section_{p.schedule.data}, plan_(plan), scratch_(p.workspace.data + kSyncBytes) {
        slots_ = p.rows * plan.head_blocks * plan.splits;
        if (plan.splits > 0) return;
        const auto* header = reinterpret_cast<const ScheduleHeader*>(section_.words);
        total_ = header->partials;
        num_sms_ = header->num_sms;
        workers_ = header->workers < num_sms_ ? header->workers : num_sms_;
        slots_ = total_ * plan.head_blocks;
        const int64_t each = int64_t{plan.block_heads} * (kHeadDim + 1) * sizeof(float);
        if (header->may_cut != 0 && slots_ * each <= p.workspace.bytes - kSyncBytes)
            run_ = header->tiles_per_worker;
    }
    // The schedule's ranges are followed. If not, and there are no splits, rows stay whole.
    __device__ bool scheduled() const { return run_ > 0; }
    __device__ int32_t workers() const { return workers_; }
    __device__ const int32_t* range(int32_t worker) const { return section_.range(worker); }

    // Partial results of a row: none if it is whole.
    __device__ int32_t count(int32_t row) const {
        if (plan_.splits > 1) return plan_.splits;
        if (!scheduled()) return 0;
        const int32_t* partials = section_.partials(num_sms_);
        return partials[row + 1] - partials[row];
    }
    // Slot of the first piece of a cut row, or of the piece that starts at first_tile.
    __device__ int32_t first_slot(int32_t row, int32_t head_block) const {
        if (plan_.splits > 1) return (row * plan_.head_blocks + head_block) * plan_.splits;
        return head_block * total_ + section_.partials(num_sms_)[row];
    }
    __device__ int32_t slot(int32_t row, int32_t head_block, int32_t split,
                            int32_t first_tile) const {
        if (plan_.splits > 1) return first_slot(row, head_block) + split;
        return head_block * total_ + partial_at(section_.partials(num_sms_), row, first_tile, run_);
    }
    __device__ float* out(int32_t slot, int head) const {
        return reinterpret_cast<float*>(scratch_) +
               (int64_t{slot} * plan_.block_heads + head) * kHeadDim;
    }
    __device__ float* lse(int32_t slot, int head) const {
        return out(slots_, 0) + int64_t{slot} * plan_.block_heads + head;
    }

  private:
    Section<const int32_t> section_;
    const SplitPlan& plan_;
    uint8_t* scratch_;
    int32_t slots_, total_ = 0, num_sms_ = 0, workers_ = 0;
    int32_t run_ = 0;  // tiles of a range; 0: none is followed
};

struct Piece {
    int32_t row = 0;
    int32_t head_block = 0;
    int32_t split = 0;             // of the row's splits
    int32_t first = 0, end = 0;    // tiles
    int32_t window_tiles = 0;      // of the row
    int32_t window = 0, main = 0;  // records of the lists
    int32_t request = 0;           // contiguous lists

    static __device__ int32_t tiles(int32_t records) {
        return (records + kAttendTile - 1) / kAttendTile;
    }
    __device__ bool is_window(int32_t tile) const { return tile < window_tiles; }
};

// The row of this CTA's piece number `number`, where it is known before anything is read; beyond
// the call's rows if there is none.
struct PlannedRow {
    bool known;
    int32_t row, head_block;

    __device__ explicit PlannedRow(const SplitPlan& plan, int32_t number = 0)
        : known(plan.splits > 0) {
        const auto item = static_cast<int32_t>(blockIdx.x + number * gridDim.x);
        row = item / plan.head_blocks;
        head_block = item % plan.head_blocks;
        if (known) row /= plan.splits;
    }
};

// The pieces of this CTA, in order.
class Pieces {
  public:
    __device__ Pieces(const AttendParams& p, const SplitPlan& plan, const Cuts& cuts)
        : p_(p), plan_(plan), cuts_(cuts), item_(blockIdx.x) {}

    // kSlots: there are no contiguous lists.
    template <bool kSlots>
    __device__ bool next(Piece& piece) {
        const int32_t each = cuts_.scheduled() ? cuts_.workers() : p_.rows;
        const int32_t splits = plan_.splits > 1 ? plan_.splits : 1;
        while (row_ > end_row_ || (row_ == end_row_ && tile_ >= end_tile_) || row_ >= p_.rows) {
            if (item_ >= each * plan_.head_blocks * splits) return false;
            start_item(splits);
        }
        const RowList list = kSlots ? slot_lists(p_, row_) : row_list(p_, row_);
        piece.row = row_;
        piece.head_block = head_block_;
        piece.split = split_;
        piece.window = static_cast<int32_t>(list.window);
        piece.main = static_cast<int32_t>(list.main);
        piece.request = list.request;
        if (splits > 1) {
            piece.window_tiles = Piece::tiles(p_.window.columns);
            const int32_t all = piece.window_tiles + Piece::tiles(p_.main.columns);
            const int32_t run = (all + splits - 1) / splits;
            piece.first = min(split_ * run, all);
            piece.end = min(piece.first + run, all);
        } else {
            piece.window_tiles = Piece::tiles(piece.window);
            const int32_t all = piece.window_tiles + Piece::tiles(piece.main);
            piece.first = tile_;
            piece.end = row_ < end_row_ || end_tile_ > all ? all : end_tile_;
        }
        piece.end = max(piece.end, piece.first);  // a schedule that foresaw more
        ++row_;
        tile_ = 0;
        return true;
    }

    // Row and block of heads of the next piece, as far as that is known without reading anything.
    __device__ bool peek(int32_t& row, int32_t& head_block) const {
        row = row_;
        head_block = head_block_;
        if (row_ < end_row_) return row_ < p_.rows;
        const int32_t splits = plan_.splits > 1 ? plan_.splits : 1;
        if (cuts_.scheduled() || item_ >= p_.rows * plan_.head_blocks * splits) return false;
        row = item_ / plan_.head_blocks / splits;
        head_block = item_ % plan_.head_blocks;
        return true;
    }

  private:
    __device__ void start_item(int32_t splits) {
        int32_t index = item_ / plan_.head_blocks;
        head_block_ = item_ % plan_.head_blocks;
        split_ = index % splits;
        index /= splits;
        item_ += gridDim.x;
        row_ = index, tile_ = 0, end_row_ = index + 1, end_tile_ = 0;
        if (!cuts_.scheduled()) return;
        const int4 range = *reinterpret_cast<const int4*>(cuts_.range(index));
        row_ = range.x, tile_ = range.y, end_row_ = range.z, end_tile_ = range.w;
    }

    const AttendParams& p_;
    const SplitPlan& plan_;
    const Cuts& cuts_;
    int32_t item_, row_ = 0, end_row_ = 0;
    int32_t head_block_ = 0, split_ = 0, tile_ = 0, end_tile_ = 0;
};

}  // namespace flash_csa::sm90
