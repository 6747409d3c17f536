// mask_maxima: of a scan of all entries, what is outside of a row's pool.
//
//   in   pools, maxima of blocks [R, columns / 8]     out  the same, NaN where a block is outside
//
// A block of threads takes a row: a bit per block of columns in shared memory.
#include "core/columns.h"
#include "core/schedule.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/index/pool_mask.h"
#include "sm90/select/unit.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = kMostMaskedColumns / kPoolBlock;

__global__ void __launch_bounds__(kThreads)
    mask_kernel(const __grid_constant__ IndexScoresParams p, PoolView pool, Matrix<float> maxima) {
    __shared__ uint32_t sPool[kMostBlocks / 32];
    wait_for_previous();
    const int64_t row = blockIdx.x;
    // Nobody wrote maxima behind the last tile that counts.
    const int32_t visible = columns_of(p, p.index.page_size, p.columns, row).count;
    const int32_t blocks = (visible + kIndexTile - 1) / kIndexTile * (kIndexTile / kPoolBlock);
    for (int32_t i = threadIdx.x; i < kMostBlocks / 32; i += kThreads) sPool[i] = 0;
    __syncthreads();
    const int32_t count = min(pool.counts[row], static_cast<int32_t>(pool.width));
    const int32_t* listed = pool.blocks.row(row);
    for (int32_t i = threadIdx.x; i < count; i += kThreads) {
        const int32_t block = listed[i];
        if (block >= 0 && block < blocks) atomicOr(&sPool[block / 32], 1u << block % 32);
    }
    __syncthreads();
    float4* fours = reinterpret_cast<float4*>(maxima.row(row));
    for (int32_t i = threadIdx.x; i < blocks / 4; i += kThreads) {
        const uint32_t inside = sPool[i / 8] >> i % 8 * 4 & 0xfu;
        if (inside != 0xfu) fours[i] = only(inside, fours[i]);
    }
}

}  // namespace

cudaError_t mask_maxima(const IndexScoresParams& p, const PoolView& pool,
                        const Matrix<float>& maxima, cudaStream_t stream) {
    return launch_after(mask_kernel, blocks_for(p.batch.rows, 1), kThreads, 0, stream, p, pool,
                        maxima);
}

}  // namespace flash_csa::sm90
