// What the library does when it is loaded: the CPU back end takes PyTorch's threads.
#include "cpu/parallel.h"
#include "ops/torch_abi.h"

namespace flash_csa::ops {
namespace {

void run_on_torch_threads(int64_t n, int64_t grain, cpu::ParallelBody body, const void* context) {
    torch::stable::parallel_for(0, n, grain, [body, context](int64_t begin, int64_t end) {
        if (begin < end) body(context, begin, end);
    });
}

[[maybe_unused]] const bool installed = [] {
    cpu::parallel_run = run_on_torch_threads;
    return true;
}();

}  // namespace
}  // namespace flash_csa::ops
