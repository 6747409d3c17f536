// Barriers of a cluster whose blocks read each other's shared memory.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// Nothing of this thread's is published by it; whole warps call.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What every block has written to its own shared memory can be read by its peers. The barrier of
// the block completes the writes where they lie, so that of the cluster may be relaxed: a release
// would wait for all that the block has on its way to global memory (MEMBAR.ALL.GPU).
__device__ __forceinline__ void cluster_publish() {
    __syncthreads();
    cluster_arrive_relaxed();
    cluster_wait();
}

}  // namespace flash_csa::sm90
