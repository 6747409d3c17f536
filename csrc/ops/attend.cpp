// attend and merge: from records and lists to outputs.
#include <cmath>

#include "core/schedule.h"
#include "cpu/kernels.h"
#include "ops/dispatch.h"

namespace flash_csa::ops {
namespace {

constexpr std::initializer_list<RecordId> kAttended = {RecordId::MainFp4, RecordId::WindowFp8,
                                                       RecordId::MixedFp8};

// The de-rotation comes whole or not at all.
void check_derotate(Check& check, const OptTensor& positions, const OptTensor& table) {
    check("derotate.positions", positions);
    check("derotate.cos_sin", table);
    check.require(positions.has_value() == table.has_value(),
                  "derotate.positions and derotate.cos_sin must come together, got one of them");
}

template <class Params>
void set_out(Params& p, const Tensor& out) {
    if (has_dtype(out, ScalarType::Float))
        p.out_f32 = heads<float>(out);
    else
        p.out_bf16 = heads<uint16_t>(out);
}

// Pages, where they are given, and the lists of slots in them, where there are such.
RecordList record_list(Check& check, const char* label, const OptTensor& pages, int64_t record_id,
                       int64_t page_size, const OptTensor& slots, const OptTensor& lengths) {
    RecordList list;
    if (!pages.has_value()) return list;
    list.pages = const_pages(check.pages(label, *pages, record_id, page_size, kAttended));
    if (!slots.has_value()) return list;
    list.slots = matrix<const int32_t>(slots);
    list.lengths = ptr<const int32_t>(lengths);
    list.columns = static_cast<int32_t>(slots->size(1));
    return list;
}

void check_lists(const Check& check, bool selection, bool selection_lengths, bool window,
                 bool window_lengths, bool contiguous, bool contiguous_request,
                 bool contiguous_n_vis, bool main, bool window_pages) {
    check.require(selection == selection_lengths,
                  "selection.slots and selection.lengths must come together, got one of them");
    check.require(window == window_lengths,
                  "window.slots and window.lengths must come together, got one of them");
    check.require(contiguous == contiguous_request && contiguous == contiguous_n_vis,
                  "contiguous must be (block_table, row_request, n_vis), got a part of it");
    check.require(selection || window || contiguous,
                  "selection, contiguous or window must be given, got none of them");
    check.require(!(selection && contiguous),
                  "selection and contiguous must not be given together, got both");
    check.require(main == (selection || contiguous),
                  main ? "main must come with selection or contiguous, got neither"
                       : "main must be given with selection or contiguous, got None");
    check.require(window_pages == window,
                  "window_pages and window must come together, got one of them");
}

void attend(const Tensor& q, const OptTensor& main_pages, int64_t main_record,
            int64_t main_page_size, const OptTensor& selection_slots,
            const OptTensor& selection_lengths, const OptTensor& window_pages,
            int64_t window_record, int64_t window_page_size, const OptTensor& window_slots,
            const OptTensor& window_lengths, const OptTensor& contiguous_block_table,
            const OptTensor& contiguous_row_request, const OptTensor& contiguous_n_vis,
            const OptTensor& sink, double softmax_scale, const OptTensor& derotate_positions,
            const OptTensor& derotate_cos_sin, bool batch_invariant, const Tensor& schedule,
            const Tensor& workspace, const Tensor& out, const OptTensor& lse) {
    Check check("attend");
    check("q", q);
    check_lists(check, selection_slots.has_value(), selection_lengths.has_value(),
                window_slots.has_value(), window_lengths.has_value(),
                contiguous_block_table.has_value(), contiguous_row_request.has_value(),
                contiguous_n_vis.has_value(), main_pages.has_value(), window_pages.has_value());
    check("selection.slots", selection_slots);
    check("selection.lengths", selection_lengths);
    check("window.slots", window_slots);
    check("window.lengths", window_lengths);
    check("contiguous.block_table", contiguous_block_table);
    check("contiguous.row_request", contiguous_row_request);
    check("contiguous.n_vis", contiguous_n_vis);
    check("sink", sink);
    check_derotate(check, derotate_positions, derotate_cos_sin);
    check.schedule(schedule, check["R"]);
    check("workspace", workspace);
    check("out", out);
    check("lse", lse);
    check.workspace(workspace, kSyncBytes);
    check.require(std::isfinite(static_cast<float>(softmax_scale)),
                  "softmax_scale must be finite in FP32, got " + number(softmax_scale));

    AttendParams p;
    p.q = heads<const uint16_t>(q);
    p.rows = static_cast<int32_t>(check["R"]);
    p.heads = static_cast<int32_t>(check["H"]);
    p.window = record_list(check, "window.pages", window_pages, window_record, window_page_size,
                           window_slots, window_lengths);
    p.main = record_list(check, "main.pages", main_pages, main_record, main_page_size,
                         selection_slots, selection_lengths);
    if (contiguous_block_table.has_value()) {
        p.contiguous = block_table(*contiguous_block_table);
        p.contiguous_request = ptr<const int32_t>(contiguous_row_request);
        p.contiguous_n_vis = ptr<const int32_t>(contiguous_n_vis);
    }
    p.sink = ptr<const float>(sink);
    p.softmax_scale = static_cast<float>(softmax_scale);
    p.derotate_positions = ptr<const int32_t>(derotate_positions);
    if (derotate_cos_sin.has_value()) p.derotate = cos_sin(*derotate_cos_sin);
    p.batch_invariant = batch_invariant;
    p.schedule = schedule_view(schedule);
    p.workspace = workspace_view(workspace);
    set_out(p, out);
    p.lse = matrix<float>(lse);
    run(check, p, cpu::attend, FLASH_CSA_SM90(attend));
}

void merge(const Tensor& outs, const Tensor& lses, const OptTensor& sink,
           const OptTensor& derotate_positions, const OptTensor& derotate_cos_sin,
           const Tensor& out, const OptTensor& lse) {
    Check check("merge");
    check("outs", outs);
    check("lses", lses);
    check("sink", sink);
    check_derotate(check, derotate_positions, derotate_cos_sin);
    check("out", out);
    check("lse", lse);
    MergeParams p;
    if (has_dtype(outs, ScalarType::Float))
        p.outs_f32 = ptr<const float>(outs);
    else
        p.outs_bf16 = ptr<const uint16_t>(outs);
    p.lses = ptr<const float>(lses);
    p.parts = static_cast<int32_t>(check["parts"]);
    p.rows = static_cast<int32_t>(check["R"]);
    p.heads = static_cast<int32_t>(check["H"]);
    p.sink = ptr<const float>(sink);
    p.derotate_positions = ptr<const int32_t>(derotate_positions);
    if (derotate_cos_sin.has_value()) p.derotate = cos_sin(*derotate_cos_sin);
    set_out(p, out);
    p.lse = matrix<float>(lse);
    run(check, p, cpu::merge, FLASH_CSA_SM90(merge));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    // softmax_scale: 512 ** -0.5.
    m.def(
        "attend(Tensor q, *, Tensor? main_pages=None, int main_record=-1, int main_page_size=0, "
        "Tensor? selection_slots=None, Tensor? selection_lengths=None, Tensor? window_pages=None, "
        "int window_record=-1, int window_page_size=0, Tensor? window_slots=None, "
        "Tensor? window_lengths=None, Tensor? contiguous_block_table=None, "
        "Tensor? contiguous_row_request=None, Tensor? contiguous_n_vis=None, Tensor? sink=None, "
        "float softmax_scale=0.04419417382415922, Tensor? derotate_positions=None, "
        "Tensor? derotate_cos_sin=None, bool batch_invariant=False, Tensor schedule, "
        "Tensor(a!) workspace, Tensor(b!) out, Tensor(c!)? lse=None) -> ()");
    m.def(
        "merge(Tensor outs, Tensor lses, *, Tensor? sink=None, Tensor? derotate_positions=None, "
        "Tensor? derotate_cos_sin=None, Tensor(a!) out, Tensor(b!)? lse=None) -> ()");
}

FLASH_CSA_IMPL(m) {
    m.impl("attend", TORCH_BOX(&flash_csa::ops::attend));
    m.impl("merge", TORCH_BOX(&flash_csa::ops::merge));
}
