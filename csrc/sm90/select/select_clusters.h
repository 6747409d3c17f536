// The fast path of select: which calls it takes, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

bool select_fits_clusters(const SelectParams& p);
cudaError_t select_clusters(const SelectParams& p, cudaStream_t stream);

}  // namespace flash_csa::sm90
