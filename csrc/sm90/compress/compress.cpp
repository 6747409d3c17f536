// compress: entries read the tails, then the tails take the rows of the call.
#include "sm90/kernels.h"

namespace flash_csa::sm90 {

cudaError_t compress_entries(const CompressParams& p, cudaStream_t stream);
cudaError_t compress_tails(const CompressParams& p, cudaStream_t stream);

cudaError_t compress(const CompressParams& p, cudaStream_t stream) {
    const cudaError_t error = compress_entries(p, stream);
    // Ratio 1 keeps no group open.
    if (error != cudaSuccess || !p.kv || p.tail.data == nullptr) return error;
    return compress_tails(p, stream);
}

}  // namespace flash_csa::sm90
