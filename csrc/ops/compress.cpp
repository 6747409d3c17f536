// compress: projected kv and gate to main records, index records and tail rows.
#include <limits>

#include "cpu/kernels.h"
#include "ops/dispatch.h"

namespace flash_csa::ops {
namespace {

// Earlier rows that a closing entry may need, its own row included.
int64_t tail_span(int64_t ratio, bool overlap) { return overlap ? 2 * ratio : ratio; }

void check_widths(Check& check, int64_t ratio, bool has_gate, bool has_bias) {
    const int64_t dim = check["D"], width = check["W"];
    check.one_of("ratio", ratio, {1, 2, 4, 128});
    if (dim != kHeadDim && dim != kIndexDim)
        check.fail("norm_weight must be float32 [512] or [128], got [" + std::to_string(dim) + "]");
    const int64_t wanted = ratio == 4 ? 2 * dim : dim;
    check.require(width == wanted, "kv must have " + std::to_string(wanted) + " columns at ratio " +
                                       std::to_string(ratio) + " and width " + std::to_string(dim) +
                                       ", got " + std::to_string(width));
    if (ratio == 1) {
        check.require(!has_gate,
                      "gate must be None at ratio 1 (every token is an entry), got a tensor");
        check.require(!has_bias, "bias must be None at ratio 1, got a tensor");
        check.require(dim == kHeadDim, "norm_weight must be float32 [512] at ratio 1, got [128]");
    } else {
        check.require(has_gate,
                      "gate must be float32 at ratio " + std::to_string(ratio) + ", got None");
    }
}

void check_index(const Check& check, bool has_main, bool has_index, bool has_key_weight,
                 bool has_key_norm_weight) {
    check.require(has_key_weight == has_key_norm_weight,
                  "key_weight and key_norm_weight must come together, got one of them");
    if (check["D"] == kIndexDim) {  // V4's own index compressor
        check.require(!has_main, "main must be None at width 128, got pages");
        check.require(!has_key_weight, "key_weight must be None at width 128, got a tensor");
    } else {
        check.require(has_index == has_key_weight,
                      "index and key_weight must come together at width 512, got one of them");
    }
}

void compress(const Tensor& kv, const Tensor& batch_positions, const Tensor& batch_row_request,
              const Tensor& batch_cu_tokens, const Tensor& batch_start,
              const Tensor& batch_tail_slot, int64_t batch_max_rows, const Tensor& entry_slots,
              int64_t ratio, const Tensor& norm_weight, double eps, const Tensor& cos_sin_table,
              const OptTensor& gate, const OptTensor& bias, const OptTensor& tail_rows,
              const OptTensor& entry_first, const OptTensor& main_pages, int64_t main_record,
              int64_t main_page_size, const OptTensor& index_pages, int64_t index_record,
              int64_t index_page_size, const OptTensor& key_weight,
              const OptTensor& key_norm_weight, bool rotate, const OptTensor& latent_out,
              const OptTensor& workspace) {
    Check check("compress");
    CompressParams p;
    p.batch = batch_view(check, batch_positions, batch_row_request, batch_cu_tokens, batch_start,
                         batch_tail_slot, batch_max_rows);
    check.bind("m", ratio);
    check("kv", kv);
    check("norm_weight", norm_weight);
    check_widths(check, ratio, gate.has_value(), bias.has_value());
    check.require(has_dtype(kv, ratio == 1 ? ScalarType::BFloat16 : ScalarType::Float),
                  ratio == 1
                      ? "kv must be bfloat16 at ratio 1, got float32"
                      : "kv must be float32 at ratio " + std::to_string(ratio) + ", got bfloat16");
    check("entry_slots", entry_slots);
    check("cos_sin", cos_sin_table);
    check("gate", gate);
    check("bias", bias);
    check("tail.rows", tail_rows);
    check("entry_first", entry_first);
    check("key_weight", key_weight);
    check("key_norm_weight", key_norm_weight);
    check("latent_out", latent_out);
    check("workspace", workspace);
    check_index(check, main_pages.has_value(), index_pages.has_value(), key_weight.has_value(),
                key_norm_weight.has_value());
    check.not_negative("eps", eps);
    p.overlap = ratio == 4;
    if (tail_rows.has_value()) {
        check.in_range("tail.ring", check["ring"], tail_span(ratio, p.overlap),
                       std::numeric_limits<int32_t>::max());
        p.tail = {ptr<float>(*tail_rows), tail_rows->stride(0),
                  static_cast<int32_t>(tail_rows->size(0)), static_cast<int32_t>(check["ring"]),
                  static_cast<int32_t>(check["W"])};
    }
    if (main_pages.has_value())
        p.main = check.pages("main.pages", *main_pages, main_record, main_page_size,
                             {RecordId::MainFp4, RecordId::WindowFp8, RecordId::MixedFp8});
    if (index_pages.has_value())
        p.index = check.pages("index.pages", *index_pages, index_record, index_page_size,
                              {RecordId::IndexFp4, RecordId::IndexFp8});
    check.require(
        !main_pages.has_value() || !index_pages.has_value() || main_page_size == index_page_size,
        "index.page_size must be " + std::to_string(main_page_size) +
            " (main.page_size: an entry has one slot), got " + std::to_string(index_page_size));
    if (ratio == 1) {
        p.kv_bf16 = matrix<const uint16_t>(kv);
    } else {
        p.kv = matrix<const float>(kv);
        p.gate = matrix<const float>(gate);
    }
    p.entry_slots = ptr<const int32_t>(entry_slots);
    p.entry_first = ptr<const int32_t>(entry_first);
    p.ratio = static_cast<int32_t>(ratio);
    p.dim = static_cast<int32_t>(check["D"]);
    p.norm_weight = ptr<const float>(norm_weight);
    p.eps = static_cast<float>(eps);
    p.cos_sin = cos_sin(cos_sin_table);
    p.bias = matrix<const float>(bias);
    p.key_weight = matrix<const uint16_t>(key_weight);
    p.key_norm_weight = ptr<const float>(key_norm_weight);
    p.rotate = rotate;
    p.latent_out = matrix<uint16_t>(latent_out);
    p.workspace = workspace_view(workspace);
    run(check, p, cpu::compress, FLASH_CSA_SM90(compress));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def("compress(Tensor kv, " FLASH_CSA_BATCH_SCHEMA
          ", Tensor entry_slots, *, int ratio, Tensor norm_weight, float eps, Tensor cos_sin, "
          "Tensor? gate=None, Tensor? bias=None, Tensor(a!)? tail_rows=None, "
          "Tensor? entry_first=None, Tensor(b!)? main_pages=None, int main_record=-1, "
          "int main_page_size=0, Tensor(c!)? index_pages=None, int index_record=-1, "
          "int index_page_size=0, Tensor? key_weight=None, Tensor? key_norm_weight=None, "
          "bool rotate=False, Tensor(d!)? latent_out=None, Tensor(e!)? workspace=None) -> ()");
}

FLASH_CSA_IMPL(m) { m.impl("compress", TORCH_BOX(&flash_csa::ops::compress)); }
