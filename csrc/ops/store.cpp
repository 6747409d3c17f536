// store, load, rope_store: records in and out of pages.
#include "cpu/kernels.h"
#include "ops/dispatch.h"

namespace flash_csa::ops {
namespace {

constexpr std::initializer_list<RecordId> kAnyRecord = {RecordId::MainFp4, RecordId::WindowFp8,
                                                        RecordId::IndexFp4, RecordId::MixedFp8,
                                                        RecordId::IndexFp8};

void store(const Tensor& rows, const Tensor& pages, int64_t pages_record, int64_t pages_page_size,
           const Tensor& slots) {
    Check check("store");
    const Pages view = check.pages("pages", pages, pages_record, pages_page_size, kAnyRecord);
    check.bind("D", record(view.record).dims);
    check("rows", rows);
    check("slots", slots);
    run(check,
        StoreParams{matrix<const uint16_t>(rows), view, ptr<const int32_t>(slots), check["N"]},
        cpu::store, FLASH_CSA_SM90(store));
}

void load(const Tensor& pages, int64_t pages_record, int64_t pages_page_size, const Tensor& slots,
          const Tensor& out) {
    Check check("load");
    const Pages view = check.pages("pages", pages, pages_record, pages_page_size, kAnyRecord);
    check.bind("D", record(view.record).dims);
    check("slots", slots);
    check("out", out);
    const bool f32 = has_dtype(out, ScalarType::Float);
    check.require(f32 || view.record != RecordId::IndexFp8,
                  "out must be float32 for IndexFp8 records, got bfloat16");
    LoadParams p{const_pages(view), ptr<const int32_t>(slots), check["N"], {}, {}};
    if (f32)
        p.out_f32 = matrix<float>(out);
    else
        p.out_bf16 = matrix<uint16_t>(out);
    run(check, p, cpu::load, FLASH_CSA_SM90(load));
}

void rope_store(const Tensor& q, const Tensor& kv, const Tensor& window_pages,
                int64_t window_record, int64_t window_page_size, const Tensor& slots,
                const Tensor& positions, const Tensor& cos_sin_table,
                std::optional<double> q_norm_eps) {
    Check check("rope_store");
    check("q", q);
    check("kv", kv);
    check("slots", slots);
    check("positions", positions);
    check("cos_sin", cos_sin_table);
    check.not_negative("q_norm_eps", q_norm_eps.value_or(0.0));
    RopeStoreParams p;
    p.q = heads<uint16_t>(q);
    p.kv = matrix<const uint16_t>(kv);
    p.window = check.pages("window.pages", window_pages, window_record, window_page_size,
                           {RecordId::WindowFp8, RecordId::MixedFp8});
    p.slots = ptr<const int32_t>(slots);
    p.positions = ptr<const int32_t>(positions);
    p.cos_sin = cos_sin(cos_sin_table);
    p.rows = static_cast<int32_t>(check["R"]);
    p.heads = static_cast<int32_t>(check["H"]);
    p.q_norm = q_norm_eps.has_value();
    p.q_norm_eps = static_cast<float>(q_norm_eps.value_or(0.0));
    run(check, p, cpu::rope_store, FLASH_CSA_SM90(rope_store));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def(
        "store(Tensor rows, Tensor(a!) pages, int pages_record, int pages_page_size, Tensor slots) "
        "-> ()");
    m.def(
        "load(Tensor pages, int pages_record, int pages_page_size, Tensor slots, Tensor(a!) out) "
        "-> ()");
    m.def(
        "rope_store(Tensor(a!) q, Tensor kv, Tensor(b!) window_pages, int window_record, "
        "int window_page_size, Tensor slots, Tensor positions, Tensor cos_sin, *, "
        "float? q_norm_eps=None) -> ()");
}

FLASH_CSA_IMPL(m) {
    m.impl("store", TORCH_BOX(&flash_csa::ops::store));
    m.impl("load", TORCH_BOX(&flash_csa::ops::load));
    m.impl("rope_store", TORCH_BOX(&flash_csa::ops::rope_store));
}
