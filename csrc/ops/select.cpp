// select, normalize_pool, merge_selections, merge_pools: from scores to positions, slots and pools.
#include "cpu/kernels.h"
#include "ops/select_args.h"

namespace flash_csa::ops {
namespace {

void select(const Tensor& scores, const Tensor& batch_positions, const Tensor& batch_row_request,
            const Tensor& batch_cu_tokens, const Tensor& batch_start, const Tensor& batch_tail_slot,
            int64_t batch_max_rows, int64_t k, const Tensor& schedule, const Tensor& table,
            int64_t ratio, int64_t page_size, bool strict, const OptTensor& pool_blocks,
            const OptTensor& pool_counts, const Tensor& workspace, const Tensor& out_positions,
            const Tensor& out_slots, const Tensor& out_lengths, const OptTensor& out_scores,
            const OptTensor& pool_out_blocks, const OptTensor& pool_out_counts,
            const OptTensor& pool_out_scores) {
    Check check("select");
    SelectParams p;
    p.batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens, batch_start,
                         batch_tail_slot, batch_max_rows);
    check("scores", scores);
    check.in_range("k", k, 1, kMaxTopK);
    check.bind("K", k);
    check_ratio(check, ratio);
    check.in_range("page_size", page_size, 1, kMaxPageSize);
    check.schedule(schedule, p.batch.rows);
    check("block_table", table);
    check("workspace", workspace);
    check.workspace(workspace, kSyncBytes);
    p.scores = matrix<const float>(scores);
    p.columns = scores.size(1);
    p.block_table = block_table(table);
    p.schedule = schedule_view(schedule);
    p.k = static_cast<int32_t>(k);
    p.ratio = static_cast<int32_t>(ratio);
    p.page_size = static_cast<int32_t>(page_size);
    p.strict = strict;
    p.pool = pool_view(check, pool_blocks, pool_counts);
    check_columns(check, "scores", scores, p.pool, p.block_table, page_size);
    p.workspace = workspace_view(workspace);
    p.out = selection_out(check, out_positions, out_slots, out_lengths, out_scores);
    p.pool_out = pool_out(check, pool_out_blocks, pool_out_counts, pool_out_scores);
    check_pools_apart(check, p);
    run(check, p, cpu::select, FLASH_CSA_SM90(select));
}

void normalize_pool(const Tensor& blocks, const Tensor& positions, int64_t ratio,
                    int64_t max_entries, bool strict, const Tensor& pool_out_blocks,
                    const Tensor& pool_out_counts) {
    Check check("normalize_pool");
    check("blocks", blocks);
    check("positions", positions);
    check_ratio(check, ratio);
    check.in_range("max_entries", max_entries, 0, INT32_MAX);
    NormalizePoolParams p;
    p.out = pool_out(check, pool_out_blocks, pool_out_counts, std::nullopt);
    check.require(check["n"] <= p.out.width,
                  "blocks must have at most " + std::to_string(p.out.width) +
                      " columns (the width of out), got " + std::to_string(check["n"]));
    p.blocks = matrix<const int32_t>(blocks);
    p.n = static_cast<int32_t>(check["n"]);
    p.positions = ptr<const int32_t>(positions);
    p.rows = static_cast<int32_t>(check["R"]);
    p.ratio = static_cast<int32_t>(ratio);
    p.max_entries = static_cast<int32_t>(max_entries);
    p.strict = strict;
    run(check, p, cpu::normalize_pool, FLASH_CSA_SM90(normalize_pool));
}

void merge_selections(const Tensor& positions, const Tensor& scores, int64_t k,
                      const Tensor& row_request, const Tensor& table, int64_t page_size,
                      const Tensor& out_positions, const Tensor& out_slots,
                      const Tensor& out_lengths, const OptTensor& out_scores) {
    Check check("merge_selections");
    check("positions", positions);
    check("scores", scores);
    check.in_range("k", k, 1, kMaxTopK);
    check.bind("K", k);
    check("row_request", row_request);
    check("block_table", table);
    check.in_range("page_size", page_size, 1, kMaxPageSize);
    MergeSelectionsParams p;
    p.positions = ptr<const int32_t>(positions);
    p.scores = ptr<const float>(scores);
    p.parts = static_cast<int32_t>(check["parts"]);
    p.rows = static_cast<int32_t>(check["R"]);
    p.k_in = static_cast<int32_t>(check["Kin"]);
    p.k = static_cast<int32_t>(k);
    p.row_request = ptr<const int32_t>(row_request);
    p.block_table = block_table(table);
    p.page_size = static_cast<int32_t>(page_size);
    p.out = selection_out(check, out_positions, out_slots, out_lengths, out_scores);
    run(check, p, cpu::merge_selections, FLASH_CSA_SM90(merge_selections));
}

void merge_pools(const Tensor& blocks, const Tensor& scores, const Tensor& positions, int64_t ratio,
                 bool strict, const Tensor& pool_out_blocks, const Tensor& pool_out_counts,
                 const OptTensor& pool_out_scores) {
    Check check("merge_pools");
    check("blocks", blocks);
    check("scores", scores);
    check("positions", positions);
    check_ratio(check, ratio);
    MergePoolsParams p;
    p.blocks = ptr<const int32_t>(blocks);
    p.scores = ptr<const float>(scores);
    p.parts = static_cast<int32_t>(check["parts"]);
    p.rows = static_cast<int32_t>(check["R"]);
    p.n = static_cast<int32_t>(check["n"]);
    p.positions = ptr<const int32_t>(positions);
    p.ratio = static_cast<int32_t>(ratio);
    p.strict = strict;
    p.out = pool_out(check, pool_out_blocks, pool_out_counts, pool_out_scores);
    run(check, p, cpu::merge_pools, FLASH_CSA_SM90(merge_pools));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def("select(Tensor scores, " FLASH_CSA_BATCH_SCHEMA
          ", int k, Tensor schedule, *, Tensor block_table, int ratio, int page_size, "
          "bool strict=False, Tensor? pool_blocks=None, Tensor? "
          "pool_counts=None, " FLASH_CSA_SELECT_OUT_SCHEMA ") -> ()");
    m.def(
        "normalize_pool(Tensor blocks, Tensor positions, *, int ratio, int max_entries, "
        "bool strict=False, Tensor(a!) pool_out_blocks, Tensor(b!) pool_out_counts) -> ()");
    m.def(
        "merge_selections(Tensor positions, Tensor scores, int k, *, Tensor row_request, "
        "Tensor block_table, int page_size, Tensor(a!) out_positions, Tensor(b!) out_slots, "
        "Tensor(c!) out_lengths, Tensor(d!)? out_scores=None) -> ()");
    m.def(
        "merge_pools(Tensor blocks, Tensor scores, Tensor positions, *, int ratio, "
        "bool strict=False, Tensor(a!) pool_out_blocks, Tensor(b!) pool_out_counts, "
        "Tensor(c!)? pool_out_scores=None) -> ()");
}

FLASH_CSA_IMPL(m) {
    m.impl("select", TORCH_BOX(&flash_csa::ops::select));
    m.impl("normalize_pool", TORCH_BOX(&flash_csa::ops::normalize_pool));
    m.impl("merge_selections", TORCH_BOX(&flash_csa::ops::merge_selections));
    m.impl("merge_pools", TORCH_BOX(&flash_csa::ops::merge_pools));
}
