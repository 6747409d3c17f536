// The kernels of index_scores beside that of score_tile.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

// IndexFp4 keys of any page size, pools too; the same bits as the other one.
cudaError_t index_scores_plain(const IndexScoresParams& p, cudaStream_t stream);

// IndexFp8 keys of any page size, pools too.
cudaError_t index_scores_fp8(const IndexScoresParams& p, cudaStream_t stream);

}  // namespace flash_csa::sm90
