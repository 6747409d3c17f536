// attend for few rows, 32 or 64 heads a CTA: two tiles in shared memory, of which one is made while
// the other is multiplied.
//
// A cluster takes a row and kHeads heads; its CTAs take turns with the row's tiles and send each
// other their outputs. Addresses are found while the kernel in front ends. Per tile of 64 records:
//
//   64 heads, warpgroup 0   logits (t + 1) | weights | barrier | values
//             1-3           copies of t + 3, dequantise t + 2 | barrier | values
//   32 heads, warpgroup 0   logits | barrier | weights, by all | barrier | values
//             1-3           dequantise t + 1 | barrier ..
//
// With 32 heads and no more than two tiles a CTA there is no loop: two_tiles_once.cuh.
#pragma once

#include "sm90/attend/two_tiles_once.cuh"
#include "sm90/attend/two_tiles_wide.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

template <class Worker>
__global__ void __launch_bounds__(kThreads, 1)
    two_tiles_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<typename Worker::Shared*>(bytes);
    const int32_t piece = static_cast<int32_t>(cute::block_rank_in_cluster());
    int32_t row, head_block;
    plan.head_blocks(row, head_block, static_cast<int32_t>(cute::cluster_id_in_grid().x));
    Worker worker(p, plan, shared, row, head_block, piece);
    allow_dependents();
    typename Worker::Loaded loaded;
    worker.ask(loaded);
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
        if (threadIdx.x == 0)
            worker.init();
        else
            worker.expect();
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    cluster_arrive_relaxed();
    worker.start(loaded);
    cluster_wait();  // the barriers of all CTAs are ready
    worker.run(loaded);
    worker.finish();
}

}  // namespace flash_csa::sm90::few_rows::two_tiles
