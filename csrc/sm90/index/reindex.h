// Reindex: scores and selection inside a pool, in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

bool reindex_fits(const IndexSelectParams& p);
cudaError_t reindex(const IndexSelectParams& p, cudaStream_t stream);

}  // namespace flash_csa::sm90
