// compress: which kernel takes a step. All give the same bytes.
#include <cuda_runtime_api.h>

#include "sm90/kernels.h"

namespace flash_csa::sm90 {

cudaError_t compress_rows(const CompressParams& p, int num_sms, cudaStream_t stream);
cudaError_t compress_steps(const CompressParams& p, cudaStream_t stream);
cudaError_t compress_groups(const CompressParams& p, int num_sms, cudaStream_t stream);
cudaError_t compress_overlap(const CompressParams& p, int num_sms, cudaStream_t stream);
cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream);
cudaError_t compress_tokens(const CompressParams& p, int num_sms, cudaStream_t stream);

namespace {

// V4.1: ratio 1 and 2 with its records.
bool is_v41(const CompressParams& p) {
    return p.ratio <= 2 && p.dim == kHeadDim && !p.bias && !p.rotate &&
           (p.main.data == nullptr || p.main.record == RecordId::MainFp4) &&
           (p.index.data == nullptr || p.index.record == RecordId::IndexFp4);
}

}  // namespace

cudaError_t compress(const CompressParams& p, cudaStream_t stream) {
    // Rows from which on the kernels of long steps take less time (docs/compress.md): of ratio 2,
    // later where all requests have few, whose tails keep most of them.
    constexpr int32_t kLongTokens = 400, kLongPairs = 1408, kLongOverlap = 2048;
    constexpr int32_t kFewRows = 16, kLongFew = 6144;
    int device = 0, num_sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const int32_t rows = p.batch.rows;
    if (is_v41(p)) {
        const int32_t pairs = p.batch.max_rows < kFewRows ? kLongFew : kLongPairs;
        if (rows < (p.ratio == 1 ? kLongTokens : pairs)) return compress_steps(p, stream);
        return p.ratio == 1 ? compress_tokens(p, num_sms, stream)
                            : compress_prefill(p, num_sms, stream);
    }
    if (!p.key_weight && p.ratio == 128 && p.dim == kHeadDim)
        return compress_groups(p, num_sms, stream);
    if (!p.key_weight && p.overlap && rows >= kLongOverlap)
        return compress_overlap(p, num_sms, stream);
    return compress_rows(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
