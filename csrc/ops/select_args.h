// Arguments that several ops of index and select share: pools, selections, score columns.
#pragma once

#include <algorithm>

#include "core/schedule.h"
#include "ops/dispatch.h"

namespace flash_csa::ops {

inline void check_ratio(const Check& check, int64_t ratio) {
    check.one_of("ratio", ratio, {1, 2, 4, 128});
}

inline PoolView pool_view(Check& check, const OptTensor& blocks, const OptTensor& counts) {
    check("pool.blocks", blocks);
    check("pool.counts", counts);
    check.require(blocks.has_value() == counts.has_value(),
                  "pool.blocks and pool.counts must come together, got one of them");
    if (!blocks.has_value()) return {};
    check.in_range("pool.blocks columns", blocks->size(1), 1, kMaxPoolBlocks);
    return {matrix<const int32_t>(blocks), ptr<const int32_t>(counts),
            static_cast<int32_t>(blocks->size(1))};
}

inline SelectionOut selection_out(Check& check, const Tensor& positions, const Tensor& slots,
                                  const Tensor& lengths, const OptTensor& scores) {
    check("out.positions", positions);
    check("out.slots", slots);
    check("out.lengths", lengths);
    check("out.scores", scores);
    return {matrix<int32_t>(positions), matrix<int32_t>(slots), ptr<int32_t>(lengths),
            matrix<float>(scores)};
}

inline PoolOut pool_out(Check& check, const OptTensor& blocks, const OptTensor& counts,
                        const OptTensor& scores) {
    check("pool_out.blocks", blocks);
    check("pool_out.counts", counts);
    if (scores.has_value()) check("pool_out.scores", *scores);  // not every op has them
    check.require(
        blocks.has_value() == counts.has_value() && (blocks.has_value() || !scores.has_value()),
        "pool_out.blocks and pool_out.counts must come together, got one of them");
    if (!blocks.has_value()) return {};
    check.in_range("pool_out.blocks columns", blocks->size(1), 1, kMaxPoolBlocks);
    return {matrix<int32_t>(blocks), ptr<int32_t>(counts), matrix<float>(scores),
            static_cast<int32_t>(blocks->size(1))};
}

inline void check_pools_apart(const Check& check, const SelectParams& p) {
    check.require(!(p.pool.blocks && p.pool_out.blocks),
                  "pool and pool_blocks must not be given together (restrict or build), got both");
}

// A row has a column for every position that the table, or the pool, can name.
inline void check_columns(const Check& check, const char* label, const Tensor& t,
                          const PoolView& pool, const BlockTable& table, int64_t page_size) {
    const bool in_pool = pool.width > 0;  // also where there are no rows, and so no blocks
    const int64_t needed =
        in_pool ? int64_t{pool.width} * kPoolBlock : int64_t{table.columns} * page_size;
    check.require(t.size(1) >= needed,
                  std::string(label) + " must have at least " + std::to_string(needed) +
                      " columns (" +
                      (in_pool ? "8 * pool blocks" : "block_table columns * page size") +
                      "), got " + std::to_string(t.size(1)));
}

}  // namespace flash_csa::ops

#define FLASH_CSA_SELECT_OUT_SCHEMA                                                           \
    "Tensor(a!) workspace, Tensor(b!) out_positions, Tensor(c!) out_slots, "                  \
    "Tensor(d!) out_lengths, Tensor(e!)? out_scores=None, Tensor(f!)? pool_out_blocks=None, " \
    "Tensor(g!)? pool_out_counts=None, Tensor(h!)? pool_out_scores=None"
