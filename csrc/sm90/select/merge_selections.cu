// merge_selections: the k best of several shards' selections, by the total order.
//
//   in   positions, scores [parts, R, K_in], block table      out  a Selection
//
// A block of threads takes a row; shard_keys.cuh says how. Floor: 8 * parts * K_in bytes in, 12 * k
// out a row; shared-memory latency binds. Limits: none.
#include "sm90/common/launch.h"
#include "sm90/select/results.cuh"
#include "sm90/select/shard_keys.cuh"

namespace flash_csa::sm90 {
namespace {

__global__ void __launch_bounds__(kTopKThreads, 2)
    merge_selections_kernel(MergeSelectionsParams p) {
    extern __shared__ uint4 shared_bytes[];
    uint32_t* sTable = reinterpret_cast<uint32_t*>(shared_bytes);  // [kIdWindow]
    __shared__ ShardShared shared;
    const int64_t row = blockIdx.x;
    const ShardKeys keys{p.positions + row * p.k_in,
                         p.scores + row * p.k_in,
                         p.parts,
                         int64_t{p.rows} * p.k_in,
                         p.k_in,
                         -1,
                         sTable,
                         &shared};
    write_selection(p.out, row, p.k, columns_of(p, row), keys, shared.top_k);
}

}  // namespace

cudaError_t merge_selections(const MergeSelectionsParams& p, cudaStream_t stream) {
    return launch(merge_selections_kernel, blocks_for(p.rows, 1), kTopKThreads,
                  kIdWindow * sizeof(uint32_t), stream, p);
}

}  // namespace flash_csa::sm90
