// The only door to PyTorch: its stable ABI, nothing else. One library serves every PyTorch
// from 2.11.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#pragma GCC diagnostic pop

#include <optional>

namespace flash_csa::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

}  // namespace flash_csa::ops
