// probe: does device code of this build run here? `python -m flash_csa info` asks.
#include "ops/torch_abi.h"

#ifdef USE_CUDA
#include "core/records.h"
#include "ops/check.h"
#include "ops/cuda_scope.h"
#include "sm90/kernels.h"

namespace flash_csa::ops {
namespace {

void probe(const Tensor& out) {
    Check check("probe");
    check.bind("words", 1 + kNumRecords);
    check("out", out);
    const CudaScope scope(check.device());
    check_launch(check, sm90::probe(static_cast<int32_t*>(out.data_ptr()), scope.stream()));
}

}  // namespace
}  // namespace flash_csa::ops

STABLE_TORCH_LIBRARY_IMPL(flash_csa, CUDA, m) {
    m.impl("probe", TORCH_BOX(&flash_csa::ops::probe));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(flash_csa, m) { m.def("probe(Tensor(a!) out) -> ()"); }
