// compress: which kernel takes a step. Both give the same bytes.
#include <cuda_runtime_api.h>

#include "sm90/kernels.h"

namespace flash_csa::sm90 {

cudaError_t compress_rows(const CompressParams& p, int num_sms, cudaStream_t stream);
cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream);

namespace {

// Long steps of V4.1: enough rows for tiles of 16 entries on every SM.
bool is_prefill(const CompressParams& p) {
    constexpr int32_t kLongStep = 1024;
    return p.ratio <= 2 && p.dim == kHeadDim && p.batch.rows >= kLongStep && !p.bias && !p.rotate &&
           (p.main.data == nullptr || p.main.record == RecordId::MainFp4) &&
           (p.index.data == nullptr || p.index.record == RecordId::IndexFp4);
}

}  // namespace

cudaError_t compress(const CompressParams& p, cudaStream_t stream) {
    int device = 0, num_sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    return is_prefill(p) ? compress_prefill(p, num_sms, stream) : compress_rows(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
