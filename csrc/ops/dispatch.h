// From a checked parameter block to the back end of the tensors' device.
#pragma once

#include "ops/check.h"

namespace flash_csa::ops {

// The CPU half is always there. A CUDA launcher runs on PyTorch's current stream with the tensors'
// device current; a stage that has none yet says so.
template <class Params>
void run(const Check& check, const Params& params, void (*cpu)(const Params&)) {
    if (check.is_cuda()) check.fail("CUDA tensors are not supported yet, CPU tensors are");
    cpu(params);
}

}  // namespace flash_csa::ops

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
