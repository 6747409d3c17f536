// merge_pools: the best blocks of several shards' pools; the newest block is forced in once.
//
//   in   blocks, scores [parts, R, n], positions      out  a Pool
//
// A block of threads takes a row; shard_keys.cuh says how. Floor: 8 * parts * n bytes in, 8 * width
// out a row; shared-memory latency binds. Limits: none.
#include "sm90/common/launch.h"
#include "sm90/select/results.cuh"
#include "sm90/select/shard_keys.cuh"

namespace flash_csa::sm90 {
namespace {

__global__ void __launch_bounds__(kTopKThreads, 2) merge_pools_kernel(MergePoolsParams p) {
    extern __shared__ uint4 shared_bytes[];
    uint32_t* sTable = reinterpret_cast<uint32_t*>(shared_bytes);  // [kIdWindow]
    __shared__ ShardShared shared;
    const int64_t row = blockIdx.x;
    const int32_t n_vis = visible_count(p.positions[row], p.ratio, p.strict, INT32_MAX);
    const ShardKeys keys{p.blocks + row * p.n,
                         p.scores + row * p.n,
                         p.parts,
                         int64_t{p.rows} * p.n,
                         p.n,
                         n_vis > 0 ? (n_vis - 1) / kPoolBlock : -1,
                         sTable,
                         &shared};
    const uint32_t newest_key = keys.forced >= 0 ? keys.key_of(keys.forced) : 0;
    write_pool(p.out, row, newest_key, keys, shared.top_k);
}

}  // namespace

cudaError_t merge_pools(const MergePoolsParams& p, cudaStream_t stream) {
    return launch(merge_pools_kernel, blocks_for(p.rows, 1), kTopKThreads,
                  kIdWindow * sizeof(uint32_t), stream, p);
}

}  // namespace flash_csa::sm90
