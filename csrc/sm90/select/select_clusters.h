// The fast path of select: which calls it takes, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

bool select_fits_clusters(const SelectParams& p);
cudaError_t select_clusters(const SelectParams& p, cudaStream_t stream);

// The same where scores of entries on no page are NaN, and the maxima of blocks are there: f32
// [rows, columns / 8], aligned to 16 bytes; columns a multiple of 32. Not for pools.
cudaError_t select_by_maxima(const SelectParams& p, const Matrix<const float>& maxima,
                             cudaStream_t stream);

}  // namespace flash_csa::sm90
