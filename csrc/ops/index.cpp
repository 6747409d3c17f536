// quantize_query, index_scores and the fused index_select.
#include "cpu/kernels.h"
#include "ops/select_args.h"

namespace flash_csa::ops {
namespace {

constexpr std::initializer_list<RecordId> kIndexed = {RecordId::IndexFp4, RecordId::IndexFp8};

void quantize_query(const Tensor& q, const Tensor& positions, const Tensor& cos_sin_table,
                    int64_t record_id, bool rotate, const Tensor& out_codes,
                    const Tensor& out_scales) {
    Check check("quantize_query");
    QuantizeQueryParams p;
    p.record = check.record_id("record", record_id, kIndexed);
    check("q", q);
    check("positions", positions);
    check("cos_sin", cos_sin_table);
    check.bind("C", record(p.record).data_bytes);
    check("out.codes", out_codes);
    check("out.scales", out_scales);
    const bool fp4 = p.record == RecordId::IndexFp4;
    check.require(has_dtype(out_scales, fp4 ? ScalarType::Int : ScalarType::Float),
                  fp4 ? "out.scales must be int32 for IndexFp4, got float32"
                      : "out.scales must be float32 for IndexFp8, got int32");
    p.q = heads<const uint16_t>(q);
    p.positions = ptr<const int32_t>(positions);
    p.cos_sin = cos_sin(cos_sin_table);
    p.rotate = rotate;
    p.codes = matrix<uint8_t>(out_codes);
    if (fp4)
        p.scales_ue8m0 = matrix<int32_t>(out_scales);
    else
        p.scales_f32 = matrix<float>(out_scales);
    p.rows = static_cast<int32_t>(check["R"]);
    p.heads = static_cast<int32_t>(check["Hi"]);
    run(check, p, cpu::quantize_query, FLASH_CSA_SM90(quantize_query));
}

// The arguments that index_scores and index_select share.
IndexScoresParams index_params(Check& check, const Tensor& query_codes, const Tensor& query_scales,
                               const Tensor& index_pages, int64_t index_record,
                               int64_t index_page_size, const Tensor& weights,
                               const BatchView& batch, const Tensor& table, const Tensor& schedule,
                               int64_t ratio, bool strict, const OptTensor& pool_blocks,
                               const OptTensor& pool_counts) {
    check("query.codes", query_codes);
    check("query.scales", query_scales);
    check("weights", weights);
    check("block_table", table);
    check.schedule(schedule, batch.rows);
    check_ratio(check, ratio);
    IndexScoresParams p;
    p.index = const_pages(
        check.pages("index.pages", index_pages, index_record, index_page_size, kIndexed));
    const bool fp4 = has_dtype(query_scales, ScalarType::Int);
    const int64_t row = record(fp4 ? RecordId::IndexFp4 : RecordId::IndexFp8).data_bytes;
    check.require(query_codes.size(2) == row, "query.codes must have " + std::to_string(row) +
                                                  " bytes a head with " +
                                                  (fp4 ? "int32" : "float32") + " scales, got " +
                                                  std::to_string(query_codes.size(2)));
    check.require(fp4 || p.index.record == RecordId::IndexFp8,
                  "query.scales must be int32 (FP4) for IndexFp4 keys, got float32 (FP8)");
    check.in_range("query heads", check["Hi"], 1, kMaxIndexHeads);
    p.query.codes = matrix<const uint8_t>(query_codes);
    if (fp4)
        p.query.scales_ue8m0 = matrix<const int32_t>(query_scales);
    else
        p.query.scales_f32 = matrix<const float>(query_scales);
    p.query.heads = static_cast<int32_t>(check["Hi"]);
    if (has_dtype(weights, ScalarType::Float))
        p.weights.f32 = matrix<const float>(weights);
    else
        p.weights.bf16 = matrix<const uint16_t>(weights);
    p.batch = batch;
    p.block_table = block_table(table);
    p.schedule = schedule_view(schedule);
    p.ratio = static_cast<int32_t>(ratio);
    p.strict = strict;
    p.pool = pool_view(check, pool_blocks, pool_counts);
    return p;
}

void index_scores(const Tensor& query_codes, const Tensor& query_scales, const Tensor& index_pages,
                  int64_t index_record, int64_t index_page_size, const Tensor& weights,
                  const Tensor& batch_positions, const Tensor& batch_row_request,
                  const Tensor& batch_cu_tokens, const Tensor& batch_start,
                  const Tensor& batch_tail_slot, int64_t batch_max_rows, const Tensor& table,
                  const Tensor& schedule, int64_t ratio, bool strict, const OptTensor& pool_blocks,
                  const OptTensor& pool_counts, const Tensor& workspace, const Tensor& out) {
    Check check("index_scores");
    const BatchView batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens,
                                       batch_start, batch_tail_slot, batch_max_rows);
    IndexScoresParams p =
        index_params(check, query_codes, query_scales, index_pages, index_record, index_page_size,
                     weights, batch, table, schedule, ratio, strict, pool_blocks, pool_counts);
    check("workspace", workspace);
    check("out", out);
    check_columns(check, "out", out, p.pool, p.block_table, p.index.page_size);
    check.workspace(workspace, kSyncBytes);
    p.workspace = workspace_view(workspace);
    p.out = matrix<float>(out);
    p.columns = out.size(1);
    run(check, p, cpu::index_scores, FLASH_CSA_SM90(index_scores));
}

void index_select(const Tensor& query_codes, const Tensor& query_scales, const Tensor& index_pages,
                  int64_t index_record, int64_t index_page_size, const Tensor& weights,
                  const Tensor& batch_positions, const Tensor& batch_row_request,
                  const Tensor& batch_cu_tokens, const Tensor& batch_start,
                  const Tensor& batch_tail_slot, int64_t batch_max_rows, const Tensor& table,
                  const Tensor& schedule, int64_t k, int64_t ratio, bool strict,
                  const OptTensor& pool_blocks, const OptTensor& pool_counts,
                  const Tensor& workspace, const Tensor& out_positions, const Tensor& out_slots,
                  const Tensor& out_lengths, const OptTensor& out_scores,
                  const OptTensor& pool_out_blocks, const OptTensor& pool_out_counts,
                  const OptTensor& pool_out_scores) {
    Check check("index_select");
    const BatchView batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens,
                                       batch_start, batch_tail_slot, batch_max_rows);
    check.in_range("k", k, 1, kMaxTopK);
    check.bind("K", k);
    IndexSelectParams p;
    p.scores =
        index_params(check, query_codes, query_scales, index_pages, index_record, index_page_size,
                     weights, batch, table, schedule, ratio, strict, pool_blocks, pool_counts);
    check("workspace", workspace);
    // The least: scores of one row at a time.
    const int64_t capacity = int64_t{p.scores.block_table.columns} * p.scores.index.page_size;
    check.workspace(workspace, workspace_bytes(WorkspaceOp::IndexSelect, batch.rows > 0 ? 1 : 0, 0,
                                               0, capacity, 0, 0));
    p.scores.workspace = workspace_view(workspace);
    p.select.batch = batch;
    p.select.block_table = p.scores.block_table;
    p.select.schedule = p.scores.schedule;
    p.select.k = static_cast<int32_t>(k);
    p.select.ratio = static_cast<int32_t>(ratio);
    p.select.page_size = p.scores.index.page_size;
    p.select.strict = strict;
    p.select.pool = p.scores.pool;
    p.select.workspace = p.scores.workspace;
    p.select.out = selection_out(check, out_positions, out_slots, out_lengths, out_scores);
    p.select.pool_out = pool_out(check, pool_out_blocks, pool_out_counts, pool_out_scores);
    check_pools_apart(check, p.select);
    run(check, p, cpu::index_select, FLASH_CSA_SM90(index_select));
}

}  // namespace
}  // namespace flash_csa::ops

#define FLASH_CSA_INDEX_SCHEMA                                                        \
    "Tensor query_codes, Tensor query_scales, Tensor index_pages, int index_record, " \
    "int index_page_size, Tensor weights, " FLASH_CSA_BATCH_SCHEMA                    \
    ", Tensor block_table, Tensor schedule"

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def(
        "quantize_query(Tensor q, Tensor positions, Tensor cos_sin, *, int record, "
        "bool rotate=False, Tensor(a!) out_codes, Tensor(b!) out_scales) -> ()");
    m.def("index_scores(" FLASH_CSA_INDEX_SCHEMA
          ", *, int ratio, bool strict=False, Tensor? pool_blocks=None, Tensor? pool_counts=None, "
          "Tensor(a!) workspace, Tensor(b!) out) -> ()");
    m.def("index_select(" FLASH_CSA_INDEX_SCHEMA
          ", int k, *, int ratio, bool strict=False, Tensor? pool_blocks=None, "
          "Tensor? pool_counts=None, " FLASH_CSA_SELECT_OUT_SCHEMA ") -> ()");
}

FLASH_CSA_IMPL(m) {
    m.impl("quantize_query", TORCH_BOX(&flash_csa::ops::quantize_query));
    m.impl("index_scores", TORCH_BOX(&flash_csa::ops::index_scores));
    m.impl("index_select", TORCH_BOX(&flash_csa::ops::index_select));
}
