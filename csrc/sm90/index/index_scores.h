// The two kernels of index_scores. They give the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

// Any page size and record, pools too.
cudaError_t index_scores_plain(const IndexScoresParams& p, cudaStream_t stream);

}  // namespace flash_csa::sm90
