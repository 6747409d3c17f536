// The device and the stream on which a CUDA launcher runs, and its errors.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "ops/check.h"
#include "sm90/kernels.h"

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

// The kernels are machine code for sm_90a alone.
inline void check_capability(const Check& check) {
    constexpr int kMaxDevices = 64;
    static std::atomic<int> known[kMaxDevices] = {};  // major * 10 + minor
    const int32_t device = check.device();
    int capability = device < kMaxDevices ? known[device].load() : 0;
    if (capability == 0) {
        int major = 0, minor = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        capability = major * 10 + minor;
        if (device < kMaxDevices) known[device] = capability;
    }
    check.require(capability == 90, "needs compute capability 9.0 (H100, H200), got " +
                                        std::to_string(capability / 10) + "." +
                                        std::to_string(capability % 10) + "; CPU tensors work");
}

inline void check_launch(const Check& check, cudaError_t error) {
    if (error == cudaSuccess) return;
    const sm90::LaunchShape& shape = sm90::last_launch;
    throw std::runtime_error(
        std::string("flash_csa.") + check.op() + ": launch of (" + std::to_string(shape.x) + ", " +
        std::to_string(shape.y) + ", " + std::to_string(shape.z) + ") blocks of " +
        std::to_string(shape.threads) + " threads with " + std::to_string(shape.shared) +
        " bytes of shared memory failed: " + cudaGetErrorString(error));
}

}  // namespace flash_csa::ops
