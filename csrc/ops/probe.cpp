// probe: does device code of this build run here? `python -m flash_csa info` asks. Or, with records
// and slots: gathers these MainFp4 records into shared memory, which `bench` times.
#include "ops/torch_abi.h"

#ifdef USE_CUDA
#include "core/records.h"
#include "ops/check.h"
#include "ops/cuda_scope.h"
#include "sm90/kernels.h"

namespace flash_csa::ops {
namespace {

void probe(const Tensor& out, const OptTensor& records, const OptTensor& slots) {
    Check check("probe");
    check.bind("words", 1 + kNumRecords);
    check.bind("record", record(RecordId::MainFp4).bytes());
    check("out", out);
    check("records", records);
    check("slots", slots);
    check.require(records.has_value() == slots.has_value(),
                  "records and slots must come together, got one of them");
    const CudaScope scope(check.device());
    check_launch(check,
                 records.has_value()
                     ? sm90::probe_gather(ptr<const uint8_t>(records), records->size(0),
                                          ptr<const int32_t>(slots), slots->size(0), scope.stream())
                     : sm90::probe(static_cast<int32_t*>(out.data_ptr()), scope.stream()));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_IMPL(flash_csa, CUDA, m) {
    m.impl("probe", TORCH_BOX(&flash_csa::ops::probe));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) {
    m.def("probe(Tensor(a!) out, *, Tensor? records=None, Tensor? slots=None) -> ()");
}
