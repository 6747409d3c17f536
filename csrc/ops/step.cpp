// step_slots and schedule: what all layers of a step share.
#include <algorithm>
#include <vector>

#include "core/schedule.h"
#include "cpu/kernels.h"
#include "ops/dispatch.h"

namespace flash_csa::ops {
namespace {

void check_ratios(const Check& check, const std::vector<int64_t>& ratios) {
    check.in_range("the number of ratios", static_cast<int64_t>(ratios.size()), 0, kMaxRatios);
    for (int64_t r : ratios) check.one_of("ratios", r, {1, 2, 4, 128});
}

void check_length(const Check& check, const char* argument, size_t got, size_t wanted) {
    check.require(got == wanted, std::string(argument) + " must have one value for each of " +
                                     std::to_string(wanted) + " ratios, got " +
                                     std::to_string(got));
}

// Every value must be one of the step's ratios.
void check_known(const Check& check, const char* argument, const std::vector<int64_t>& values,
                 const std::vector<int64_t>& ratios) {
    for (int64_t v : values)
        check.require(std::count(ratios.begin(), ratios.end(), v) > 0,
                      std::string(argument) + " must be among ratios, got " + std::to_string(v));
}

void step_slots(const Tensor& batch_positions, const Tensor& batch_row_request,
                const Tensor& batch_cu_tokens, const Tensor& batch_start,
                const Tensor& batch_tail_slot, int64_t batch_max_rows,
                std::vector<Tensor> block_tables, const Tensor& window_table,
                std::vector<int64_t> ratios, std::vector<int64_t> page_sizes,
                int64_t window_page_size, int64_t window, bool strict,
                const OptTensor& window_first, const OptTensor& entry_first,
                const Tensor& window_store, const Tensor& lists_slots, const Tensor& lists_lengths,
                const Tensor& entry_slots, const Tensor& n_vis) {
    Check check("step_slots");
    StepSlotsParams p;
    p.batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens, batch_start,
                         batch_tail_slot, batch_max_rows);
    check_ratios(check, ratios);
    check_length(check, "block_tables", block_tables.size(), ratios.size());
    check_length(check, "page_sizes", page_sizes.size(), ratios.size());
    check.in_range("window_page_size", window_page_size, 1, kMaxPageSize);
    check.in_range("window", window, 1, INT32_MAX);
    check.bind("ratios", static_cast<int64_t>(ratios.size()));
    check.bind("window", window);
    for (const Tensor& table : block_tables) check("block_tables", table);
    check("window_table", window_table);
    check("window_first", window_first);
    check("entry_first", entry_first);
    check("window_store", window_store);
    check("lists.slots", lists_slots);
    check("lists.lengths", lists_lengths);
    check("entry_slots", entry_slots);
    check("n_vis", n_vis);
    const int64_t ring = window_table.size(1) * window_page_size;
    check.require(p.batch.requests == 0 || ring >= window - 1 + batch_max_rows,
                  "window_table must hold window - 1 + max_rows = " +
                      std::to_string(window - 1 + batch_max_rows) + " positions, got " +
                      std::to_string(ring));
    p.num_ratios = static_cast<int32_t>(ratios.size());
    for (size_t i = 0; i < ratios.size(); ++i) {
        check.in_range("page_sizes", page_sizes[i], 1, kMaxPageSize);
        p.block_tables[i] = block_table(block_tables[i]);
        p.ratios[i] = static_cast<int32_t>(ratios[i]);
        p.page_sizes[i] = static_cast<int32_t>(page_sizes[i]);
    }
    p.window_table = block_table(window_table);
    p.window_page_size = static_cast<int32_t>(window_page_size);
    p.window = static_cast<int32_t>(window);
    p.strict = strict;
    p.window_first = ptr<const int32_t>(window_first);
    p.entry_first = matrix<const int32_t>(entry_first);
    p.window_store = ptr<int32_t>(window_store);
    p.window_slots = matrix<int32_t>(lists_slots);
    p.window_lengths = ptr<int32_t>(lists_lengths);
    p.entry_slots = matrix<int32_t>(entry_slots);
    p.n_vis = matrix<int32_t>(n_vis);
    run(check, p, cpu::step_slots, FLASH_CSA_SM90(step_slots));
}

void schedule(const Tensor& batch_positions, const Tensor& batch_row_request,
              const Tensor& batch_cu_tokens, const Tensor& batch_start,
              const Tensor& batch_tail_slot, int64_t batch_max_rows, std::vector<int64_t> ratios,
              std::vector<int64_t> max_entries, int64_t k, int64_t heads, int64_t index_heads,
              int64_t window, const OptTensor& window_first, int64_t pool_blocks,
              int64_t pool_ratio, std::vector<int64_t> contiguous_ratios, bool strict,
              bool batch_invariant, int64_t num_sms, const Tensor& out) {
    Check check("schedule");
    ScheduleParams p;
    p.batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens, batch_start,
                         batch_tail_slot, batch_max_rows);
    check_ratios(check, ratios);
    check_length(check, "max_entries", max_entries.size(), ratios.size());
    check.in_range("k", k, 0, INT32_MAX);
    check.in_range("heads", heads, 1, INT32_MAX);
    check.in_range("index_heads", index_heads, 0, INT32_MAX);
    check.in_range("window", window, 0, INT32_MAX);
    check.in_range("pool_blocks", pool_blocks, 0, INT32_MAX);
    check.in_range("num_sms", num_sms, 1, kMaxWorkers);
    check("window_first", window_first);
    check_known(check, "contiguous_ratios", contiguous_ratios, ratios);
    if (pool_blocks > 0) check_known(check, "pool_ratio", {pool_ratio}, ratios);
    check.bind("sections", num_sections(static_cast<int32_t>(ratios.size())));
    check("out", out);
    const int64_t size =
        schedule_size(static_cast<int32_t>(num_sms), static_cast<int32_t>(p.batch.rows));
    check.require(out.size(1) >= size, "out must have at least " + std::to_string(size) +
                                           " columns for " + std::to_string(p.batch.rows) +
                                           " rows, got " + std::to_string(out.size(1)));
    p.num_ratios = static_cast<int32_t>(ratios.size());
    for (size_t i = 0; i < ratios.size(); ++i) {
        check.in_range("max_entries", max_entries[i], 0, INT32_MAX);
        p.ratios[i] = static_cast<int32_t>(ratios[i]);
        p.max_entries[i] = static_cast<int32_t>(max_entries[i]);
        for (int64_t c : contiguous_ratios) p.contiguous[i] = p.contiguous[i] || c == ratios[i];
    }
    p.k = static_cast<int32_t>(k);
    p.heads = static_cast<int32_t>(heads);
    p.index_heads = static_cast<int32_t>(index_heads);
    p.window = static_cast<int32_t>(window);
    p.window_first = ptr<const int32_t>(window_first);
    p.pool_blocks = static_cast<int32_t>(pool_blocks);
    p.pool_ratio = static_cast<int32_t>(pool_ratio);
    p.strict = strict;
    p.batch_invariant = batch_invariant;
    p.num_sms = static_cast<int32_t>(num_sms);
    p.out = matrix<int32_t>(out);
    p.size = static_cast<int32_t>(out.size(1));
    run(check, p, cpu::schedule, FLASH_CSA_SM90(schedule));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def("step_slots(" FLASH_CSA_BATCH_SCHEMA
          ", Tensor[] block_tables, Tensor window_table, *, int[] ratios, int[] page_sizes, "
          "int window_page_size, int window=128, bool strict=False, Tensor? window_first=None, "
          "Tensor? entry_first=None, Tensor(a!) window_store, Tensor(b!) lists_slots, "
          "Tensor(c!) lists_lengths, Tensor(d!) entry_slots, Tensor(e!) n_vis) -> ()");
    m.def("schedule(" FLASH_CSA_BATCH_SCHEMA
          ", *, int[] ratios, int[] max_entries, int k, int heads, int index_heads, "
          "int window=128, Tensor? window_first=None, int pool_blocks=0, int pool_ratio=0, "
          "int[] contiguous_ratios=[], bool strict=False, bool batch_invariant=False, "
          "int num_sms, Tensor(a!) out) -> ()");
}

FLASH_CSA_IMPL(m) {
    m.impl("step_slots", TORCH_BOX(&flash_csa::ops::step_slots));
    m.impl("schedule", TORCH_BOX(&flash_csa::ops::schedule));
}
