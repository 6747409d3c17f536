// Shows that device code of this build runs and sees the library's record table.
#include "core/records.h"
#include "sm90/kernels.h"

namespace flash_csa::sm90 {
namespace {

__global__ void probe_kernel(int32_t* out) {
#ifdef __CUDA_ARCH__
    const int32_t i = threadIdx.x;
    out[i] = i == 0 ? __CUDA_ARCH__ : record(static_cast<RecordId>(i - 1)).bytes();
#endif
}

}  // namespace

cudaError_t probe(int32_t* out, cudaStream_t stream) {
    probe_kernel<<<1, 1 + kNumRecords, 0, stream>>>(out);
    return cudaGetLastError();
}

}  // namespace flash_csa::sm90
