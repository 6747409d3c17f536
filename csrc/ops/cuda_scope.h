// The device and the stream on which a CUDA launcher runs.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "ops/torch_abi.h"

// libtorch_cuda has this one, a CPU-only PyTorch does not: weak, so that one library loads in both.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flash_csa::ops {

// Makes a device current and knows PyTorch's current stream there.
class CudaScope {
  public:
    explicit CudaScope(int32_t device) : guard_(device) {
        if (aoti_torch_get_current_cuda_stream == nullptr)
            throw std::runtime_error("flash_csa: this PyTorch was built without CUDA");
        void* stream = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
    cudaStream_t stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    cudaStream_t stream_ = nullptr;
};

inline void check_launch(const char* op, cudaError_t error) {
    if (error != cudaSuccess)
        throw std::runtime_error(std::string("flash_csa.") + op + ": " + cudaGetErrorString(error));
}

}  // namespace flash_csa::ops
