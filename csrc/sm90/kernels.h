// CUDA launchers: plain CUDA, no PyTorch header. Each enqueues on `stream` and returns the launch
// error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_csa::sm90 {

// Writes the architecture that the code was compiled for (900 for sm_90a), then the bytes of every
// record, as device code sees them. out: int32 [1 + kNumRecords].
cudaError_t probe(int32_t* out, cudaStream_t stream);

}  // namespace flash_csa::sm90
