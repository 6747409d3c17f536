// normalize_pool: the blocks of a foreign list that have a visible position, ascending and unique.
//
//   in   blocks [R, n], positions                     out  blocks [R, width], counts
//
// A block of threads takes a row: it marks the blocks in a bitmap in shared memory and reads the
// bitmap out in order. Where blocks lie beyond the bitmap it starts over, further up.
// Floor: 4 (n + width) bytes a row. Limits: none on n; a sweep of the list for each 2,097,152
// visible entries.
#include <cub/block/block_scan.cuh>

#include "core/columns.h"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 512;
constexpr int kWords = 8192;  // of the bitmap: 32 KiB
constexpr int kWindow = 32 * kWords;
using Scan = cub::BlockScan<int32_t, kThreads>;

struct Shared {
    uint32_t bitmap[kWords];
    Scan::TempStorage scan;
};

// Marks those blocks of the list that lie in [first, end).
__device__ void mark(const int32_t* blocks, int32_t n, int32_t first, int32_t end,
                     uint32_t* bitmap) {
    const int thread = threadIdx.x;
    for (int i = thread; i < kWords; i += kThreads) bitmap[i] = 0;
    __syncthreads();
    for (int32_t i = thread; i < n; i += kThreads) {
        const int32_t block = blocks[i];
        if (block < first || block >= end) continue;
        atomicOr(&bitmap[(block - first) / 32], 1u << (block - first) % 32);
    }
    __syncthreads();
}

// Appends the marked blocks to out, which has `count`; returns the new count.
__device__ int32_t append(int32_t first, int32_t end, int32_t count, int32_t* out, Shared& shared) {
    const int32_t words = (end - first + 31) / 32;
    for (int32_t begin = 0; begin < words; begin += kThreads) {
        const int32_t word = begin + static_cast<int32_t>(threadIdx.x);
        uint32_t bits = word < words ? shared.bitmap[word] : 0;
        int32_t before, total;
        Scan(shared.scan).ExclusiveSum(__popc(bits), before, total);
        for (int32_t at = count + before; bits != 0; bits &= bits - 1) {
            out[at++] = first + 32 * word + __ffs(static_cast<int>(bits)) - 1;
        }
        count += total;
        __syncthreads();
    }
    return count;
}

__global__ void __launch_bounds__(kThreads) normalize_pool_kernel(NormalizePoolParams p) {
    __shared__ Shared shared;
    const int64_t row = blockIdx.x;
    const int32_t n_vis = visible_count(p.positions[row], p.ratio, p.strict, p.max_entries);
    const int32_t visible = n_vis / kPoolBlock + (n_vis % kPoolBlock != 0);  // blocks
    int32_t* out = p.out.blocks.row(row);
    int32_t count = 0;
    for (int32_t first = 0; first < visible; first += kWindow) {
        const int32_t end = min(first + kWindow, visible);
        mark(p.blocks.row(row), p.n, first, end, shared.bitmap);
        count = append(first, end, count, out, shared);
    }
    for (int32_t i = count + threadIdx.x; i < p.out.width; i += kThreads) out[i] = -1;
    if (threadIdx.x == 0) p.out.counts[row] = count;
}

}  // namespace

cudaError_t normalize_pool(const NormalizePoolParams& p, cudaStream_t stream) {
    return launch(normalize_pool_kernel, blocks_for(p.rows, 1), kThreads, 0, stream, p);
}

}  // namespace flash_csa::sm90
