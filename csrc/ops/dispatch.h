// From a checked parameter block to the back end of the tensors' device.
#pragma once

#include "ops/check.h"

#ifdef USE_CUDA
#include "ops/cuda_scope.h"
#include "sm90/kernels.h"
#define FLASH_CSA_SM90(stage) flash_csa::sm90::stage
#else
#define FLASH_CSA_SM90(stage) nullptr
#endif

namespace flash_csa::ops {

// The CPU half is always there. A CUDA launcher runs on PyTorch's current stream with the tensors'
// device current. Nothing to do is decided by the back ends.
template <class Params, class Launcher>
void run(const Check& check, const Params& params, void (*cpu)(const Params&), Launcher sm90) {
    if (!check.is_cuda()) return cpu(params);
#ifdef USE_CUDA
    const CudaScope scope(check.device());
    check_capability(check);
    check_launch(check, sm90(params, scope.stream()));
#else
    static_cast<void>(sm90);
    check.fail("this build has no CUDA kernels (no toolkit was there); CPU tensors work");
#endif
}

// Registers the same functions for CPU and CUDA tensors: the checks are common, `run` divides.
#define FLASH_CSA_IMPL(m)                                                                      \
    static void flash_csa_impl(torch::stable::detail::StableLibrary& m);                       \
    STABLE_TORCH_LIBRARY_IMPL(flash_csa, CPU, cpu_library) { flash_csa_impl(cpu_library); }    \
    STABLE_TORCH_LIBRARY_IMPL(flash_csa, CUDA, cuda_library) { flash_csa_impl(cuda_library); } \
    static void flash_csa_impl(torch::stable::detail::StableLibrary& m)

// The five tensors of a Batch and its host bound, flattened.
#define FLASH_CSA_BATCH_SCHEMA                                                   \
    "Tensor batch_positions, Tensor batch_row_request, Tensor batch_cu_tokens, " \
    "Tensor batch_start, Tensor batch_tail_slot, SymInt batch_max_rows"

}  // namespace flash_csa::ops
