// Shows that device code of this build runs and sees the library's record table.
#include "core/records.h"
#include "sm90/kernels.h"

namespace flash_csa::sm90 {
namespace {

template <int32_t kId = 0>
__device__ void write_bytes(int32_t* out) {
    if constexpr (kId < kNumRecords) {
        out[kId] = record(static_cast<RecordId>(kId)).bytes();
        write_bytes<kId + 1>(out);
    }
}

__global__ void probe_kernel(int32_t* out) {
#ifdef __CUDA_ARCH__
    out[0] = __CUDA_ARCH__;
#endif
    write_bytes(out + 1);
}

}  // namespace

cudaError_t probe(int32_t* out, cudaStream_t stream) {
    probe_kernel<<<1, 1, 0, stream>>>(out);
    return cudaGetLastError();
}

}  // namespace flash_csa::sm90
