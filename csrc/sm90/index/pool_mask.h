// Scans restricted to pools: what lies outside of them is hidden from the selection.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

inline constexpr int64_t kMostMaskedColumns = 1 << 17;

// Maxima of blocks of 8 columns that are not in the row's pool become NaN: f32 [rows, columns / 8],
// aligned to 16 bytes. p: of the scan, at most kMostMaskedColumns of whole index tiles.
cudaError_t mask_maxima(const IndexScoresParams& p, const PoolView& pool,
                        const Matrix<float>& maxima, cudaStream_t stream);

}  // namespace flash_csa::sm90
