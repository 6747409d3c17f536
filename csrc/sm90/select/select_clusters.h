// The fast path of select: which calls it takes, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

bool select_fits_clusters(const SelectParams& p);
// early: starts while the kernel in front of it, which writes the scores, is ending.
cudaError_t select_clusters(const SelectParams& p, bool early, cudaStream_t stream);

}  // namespace flash_csa::sm90
