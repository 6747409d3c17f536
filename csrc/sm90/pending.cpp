// Stages without kernels yet; a real definition elsewhere wins over a weak one.
#include "sm90/kernels.h"

namespace flash_csa::sm90 {

#define FCSA_PENDING(stage, Params)                                        \
    __attribute__((weak)) cudaError_t stage(const Params&, cudaStream_t) { \
        return cudaErrorNotSupported;                                      \
    }
FCSA_PENDING(index_scores, IndexScoresParams)
FCSA_PENDING(select, SelectParams)
FCSA_PENDING(index_select, IndexSelectParams)
FCSA_PENDING(normalize_pool, NormalizePoolParams)
FCSA_PENDING(merge_selections, MergeSelectionsParams)
FCSA_PENDING(merge_pools, MergePoolsParams)

}  // namespace flash_csa::sm90
