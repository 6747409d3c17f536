// The schedule: how the rows of a step are dealt out to workers (SMs), once per step, on the
// device.
//
// One section per kind of work: 0 window only; ratio number i: 1 + 4i index, 2 + 4i reindex,
// 3 + 4i attend, 4 + 4i contiguous. A section, in int32 words:
//
//   ScheduleHeader                8 words
//   WorkRange [num_sms]           4 words each; workers beyond the header's count are empty
//   partials  [rows + 1]          partial results before row r; a row that is not cut has none
//
// Words behind these are undefined.
//
// A row's work is counted in tiles. The tiles of all rows, in row order, are one sequence that is
// cut into equal runs, so a row may be cut, at tile borders only. The ranges partition every row,
// those without work included: the worker whose range holds (r, 0) owns row r and, where it has
// nothing to do, still writes its empty result. The last range that reaches a row runs to the end
// of that row's lists, so lists may be shorter or longer than the schedule foresaw.
//
// A kernel computes tiles in parallel, scans them, and calls write_row for its row: all arithmetic
// is in the functions below, in integers, so that CPU and CUDA write the same words.
#pragma once

#include <cstdint>

#include "core/causal.h"
#include "core/params.h"
#include "core/platform.h"

namespace flash_csa {

inline constexpr int32_t kAttendTile = 64;  // records
inline constexpr int32_t kIndexTile = 256;  // entries, or columns of a pool
inline constexpr int32_t kHeadBlock = 64;   // attention heads that one worker takes

enum class SectionKind : int32_t { Window, Index, Reindex, Attend, Contiguous };

FCSA_HD constexpr int32_t num_sections(int32_t num_ratios) { return 1 + 4 * num_ratios; }

struct ScheduleHeader {
    int32_t rows_with_work;
    int32_t total_tiles;       // saturates
    int32_t tiles_per_worker;  // a run; at least 1
    int32_t tile;              // records or entries
    int32_t workers;           // that share the work: num_sms / blocks of heads
    int32_t partials;          // of all rows
    int32_t may_cut;           // 0: every row has one worker (batch_invariant)
    int32_t num_sms;           // length of the table of ranges
};

struct WorkRange {  // from (first_row, first_tile) up to, not including, (end_row, end_tile)
    int32_t first_row, first_tile, end_row, end_tile;
};

inline constexpr int32_t kHeaderWords = sizeof(ScheduleHeader) / sizeof(int32_t);
inline constexpr int32_t kRangeWords = sizeof(WorkRange) / sizeof(int32_t);

// Words of one section, a multiple of 4 so that sections and ranges are 16-byte aligned.
FCSA_HD constexpr int32_t schedule_size(int32_t num_sms, int32_t max_rows_total) {
    return (kHeaderWords + kRangeWords * num_sms + max_rows_total + 1 + 3) / 4 * 4;
}

template <class Word>  // int32_t or const int32_t
struct Section {
    Word* words;

    FCSA_HD Word* range(int32_t worker) const {
        return words + kHeaderWords + int64_t{kRangeWords} * worker;
    }
    FCSA_HD Word* partials(int32_t num_sms) const { return range(num_sms); }
};

// Where the partial result of the piece of row r that starts at first_tile lies, counted in
// partials: every piece but the first starts a run, and all runs but the last are full.
FCSA_HD int32_t partial_at(const int32_t* partials, int32_t row, int32_t first_tile,
                           int32_t tiles_per_worker) {
    return partials[row] + (first_tile + tiles_per_worker - 1) / tiles_per_worker;
}

namespace detail {

FCSA_HD constexpr int64_t tiles_of(int64_t count, int32_t tile) {
    return (count + tile - 1) / tile;
}

}  // namespace detail

// Tiles of one row in a section; a padded row has none. A list starts a new tile, so that a tile
// holds records of one format.
FCSA_HD int32_t row_tiles(const ScheduleParams& p, int32_t section, int32_t row) {
    using detail::tiles_of;
    const int32_t position = p.batch.positions[row];
    const int32_t request = p.batch.row_request[row];
    if (position < 0 || request < 0 || request >= p.batch.requests) return 0;
    const int32_t first = p.window_first ? p.window_first[request] : 0;
    const int64_t window = tiles_of(window_length(position, p.window, first), kAttendTile);
    if (section == 0) return static_cast<int32_t>(window);

    const int32_t i = (section - 1) / 4;
    int64_t visible = n_vis(position, p.ratios[i], p.strict);
    if (visible > p.max_entries[i]) visible = p.max_entries[i];
    const int64_t blocks = tiles_of(visible, kPoolBlock);
    int64_t tiles = 0;
    switch (static_cast<SectionKind>(section - 4 * i)) {
        case SectionKind::Index:
            tiles = p.contiguous[i] ? 0 : tiles_of(visible, kIndexTile);
            break;
        case SectionKind::Reindex:
            if (p.ratios[i] != p.pool_ratio) break;
            tiles = tiles_of((blocks < p.pool_blocks ? blocks : p.pool_blocks) * kPoolBlock,
                             kIndexTile);
            break;
        case SectionKind::Attend:
            if (p.contiguous[i]) break;
            tiles = window + tiles_of(visible < p.k ? visible : p.k, kAttendTile);
            break;
        case SectionKind::Contiguous:
            tiles = p.contiguous[i] ? window + tiles_of(visible, kAttendTile) : 0;
            break;
        case SectionKind::Window:
            break;
    }
    return static_cast<int32_t>(tiles);
}

// The header of a section, from the sums over its rows. `partials` is filled in last.
FCSA_HD ScheduleHeader plan_section(const ScheduleParams& p, int32_t section, int64_t total_tiles,
                                    int32_t rows_with_work) {
    const int32_t kind = section == 0 ? 0 : (section - 1) % 4 + 1;
    const bool index = kind == static_cast<int32_t>(SectionKind::Index) ||
                       kind == static_cast<int32_t>(SectionKind::Reindex);
    const int32_t head_blocks = index ? 1 : (p.heads + kHeadBlock - 1) / kHeadBlock;
    int32_t workers = head_blocks > 1 ? p.num_sms / head_blocks : p.num_sms;
    if (workers < 1) workers = 1;
    const int64_t run = (total_tiles + workers - 1) / workers;
    ScheduleHeader header;
    header.rows_with_work = rows_with_work;
    header.total_tiles = static_cast<int32_t>(total_tiles < INT32_MAX ? total_tiles : INT32_MAX);
    header.tiles_per_worker = static_cast<int32_t>(run < 1 ? 1 : run < INT32_MAX ? run : INT32_MAX);
    header.tile = index ? kIndexTile : kAttendTile;
    header.workers = workers;
    header.partials = 0;
    // Scores are exact however rows are cut; only attention has to stay whole to be invariant.
    header.may_cut = index || !p.batch_invariant ? 1 : 0;
    header.num_sms = p.num_sms;
    return header;
}

// Partial results of a row whose tiles follow `before` others: one per worker, none if it has one.
FCSA_HD int32_t row_partials(const ScheduleHeader& header, int64_t before, int32_t tiles) {
    if (tiles == 0 || header.may_cut == 0) return 0;
    const int64_t run = header.tiles_per_worker;
    const int64_t pieces = (before + tiles - 1) / run - before / run + 1;
    return pieces > 1 ? static_cast<int32_t>(pieces) : 0;
}

namespace detail {

// Range `worker` starts, and the one before it ends, at (row, tile).
FCSA_HD void write_border(Section<int32_t> section, const ScheduleHeader& header, int64_t worker,
                          int32_t row, int32_t tile) {
    if (worker < header.num_sms) {
        int32_t* range = section.range(static_cast<int32_t>(worker));
        range[0] = row;
        range[1] = tile;
    }
    if (worker > 0 && worker <= header.num_sms) {
        int32_t* range = section.range(static_cast<int32_t>(worker) - 1);
        range[2] = row;
        range[3] = tile;
    }
}

}  // namespace detail

// Writes the borders that fall into a row. A row that may not be cut goes to the worker in whose
// run it starts, so a border inside it moves to its end.
FCSA_HD void write_row(Section<int32_t> section, const ScheduleHeader& header, int32_t row,
                       int64_t before, int32_t tiles) {
    const int64_t run = header.tiles_per_worker;
    for (int64_t worker = (before + run - 1) / run; worker * run < before + tiles; ++worker) {
        const int32_t tile = static_cast<int32_t>(worker * run - before);
        const bool inside = tile > 0 && header.may_cut == 0;
        if (worker > 0) {
            detail::write_border(section, header, worker, inside ? row + 1 : row,
                                 inside ? 0 : tile);
        }
    }
}

// The border before the first row, and those behind the last.
FCSA_HD void write_ends(Section<int32_t> section, const ScheduleHeader& header, int32_t rows,
                        int64_t total_tiles) {
    const int64_t run = header.tiles_per_worker;
    const int64_t used = (total_tiles + run - 1) / run;
    detail::write_border(section, header, 0, 0, 0);
    for (int64_t worker = used > 0 ? used : 1; worker <= header.num_sms; ++worker) {
        detail::write_border(section, header, worker, rows, 0);
    }
}

// One section, row after row.
FCSA_HD void build_section(const ScheduleParams& p, int32_t index) {
    const int32_t rows = p.batch.rows;
    int64_t total = 0;
    int32_t with_work = 0;
    for (int32_t row = 0; row < rows; ++row) {
        const int32_t tiles = row_tiles(p, index, row);
        total += tiles;
        with_work += tiles > 0 ? 1 : 0;
    }
    const Section<int32_t> section{p.out.row(index)};
    ScheduleHeader header = plan_section(p, index, total, with_work);
    int32_t* partials = section.partials(p.num_sms);
    int64_t before = 0;
    for (int32_t row = 0; row < rows; ++row) {
        const int32_t tiles = row_tiles(p, index, row);
        partials[row] = header.partials;
        header.partials += row_partials(header, before, tiles);
        write_row(section, header, row, before, tiles);
        before += tiles;
    }
    partials[rows] = header.partials;
    write_ends(section, header, rows, total);
    __builtin_memcpy(section.words, &header, sizeof header);
}

// ---- Workspace. Bytes [0, kSyncBytes) are counters, zero on entry and on exit of every op; the
// ---- rest is scratch. One buffer serves all ops of a stream.

inline constexpr int64_t kSyncBytes = 16384;  // 4096 counters: one per row in flight

enum class WorkspaceOp : int32_t { Attend, IndexScores, Select, IndexSelect, Compress };

namespace detail {

inline constexpr int64_t kScoreScratch = int64_t{240} << 20;  // prefill streams rows through it
inline constexpr int64_t kHistogramBytes = 16384;             // 4096 bins of one row in flight

// A cut row has one border per piece but the first, and there is a border between any two workers:
// with at least two pieces per cut row, fewer than two partials per worker. FP32 [512] and lse.
FCSA_HD constexpr int64_t attend_scratch(int64_t heads, int64_t num_sms) {
    return 2 * num_sms * (heads < kHeadBlock ? heads : kHeadBlock) * (kHeadDim + 1) * 4;
}

FCSA_HD constexpr int64_t select_scratch(int64_t num_sms, int64_t k, int64_t pool_blocks) {
    return num_sms * (kHistogramBytes + 8 * (k + pool_blocks));  // one (score, position) per winner
}

// FP32 scores and block maxima of as many rows as fit, at least one.
FCSA_HD constexpr int64_t score_scratch(int64_t max_rows, int64_t max_entries) {
    const int64_t columns = (max_entries + kIndexTile - 1) / kIndexTile * kIndexTile;
    const int64_t row = 4 * (columns + columns / kPoolBlock);
    const int64_t all = max_rows * row;
    return all < kScoreScratch ? all : kScoreScratch > row ? kScoreScratch : row;
}

}  // namespace detail

// Bytes that an op needs for any batch within these bounds, a multiple of 256.
FCSA_HD constexpr int64_t workspace_bytes(WorkspaceOp op, int64_t max_rows, int64_t heads,
                                          int64_t k, int64_t max_entries, int64_t pool_blocks,
                                          int64_t num_sms) {
    int64_t scratch = 0;
    switch (op) {
        case WorkspaceOp::Attend:
            scratch = detail::attend_scratch(heads, num_sms);
            break;
        case WorkspaceOp::Select:
            scratch = detail::select_scratch(num_sms, k, pool_blocks);
            break;
        case WorkspaceOp::IndexSelect:
            scratch = detail::select_scratch(num_sms, k, pool_blocks) +
                      detail::score_scratch(max_rows, max_entries);
            break;
        case WorkspaceOp::IndexScores:
        case WorkspaceOp::Compress:
            break;
    }
    return (kSyncBytes + scratch + 255) / 256 * 256;
}

}  // namespace flash_csa
