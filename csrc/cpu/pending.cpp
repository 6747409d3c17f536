// Stages that have not landed yet; a real definition elsewhere wins over a weak one.
#include <stdexcept>

#include "cpu/kernels.h"

namespace flash_csa::cpu {

#define FCSA_PENDING(stage, Params)                                             \
    __attribute__((weak)) void stage(const Params&) {                           \
        throw std::invalid_argument("flash_csa." #stage ": not supported yet"); \
    }
FCSA_PENDING(index_scores, IndexScoresParams)
FCSA_PENDING(select, SelectParams)
FCSA_PENDING(index_select, IndexSelectParams)
FCSA_PENDING(normalize_pool, NormalizePoolParams)
FCSA_PENDING(merge_selections, MergeSelectionsParams)
FCSA_PENDING(merge_pools, MergePoolsParams)

}  // namespace flash_csa::cpu
