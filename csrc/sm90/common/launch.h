// One way to launch a kernel: keeps the shape of the launch for the error text.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/kernels.h"

namespace flash_csa::sm90 {

namespace detail {

// Dynamic shared memory above 48 KiB needs the attribute.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, size_t shared) {
    if (shared <= 48 * 1024) return cudaSuccess;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(shared));
}

}  // namespace detail

// grid blocks of `threads` threads.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared,
                   cudaStream_t stream, const Args&... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    last_launch = {grid.x, grid.y, grid.z, threads, shared};
    const cudaError_t error = detail::allow_shared(kernel, shared);
    if (error != cudaSuccess) return error;
    kernel<<<grid, threads, shared, stream>>>(args...);
    return cudaGetLastError();
}

// Launches a kernel that starts while the one before it ends, and calls wait_for_previous
// (dependents.cuh).
template <class... Params, class... Args>
cudaError_t launch_after(void (*kernel)(Params...), dim3 grid, int threads, size_t shared,
                         cudaStream_t stream, const Args&... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    last_launch = {grid.x, grid.y, grid.z, threads, shared};
    const cudaError_t error = detail::allow_shared(kernel, shared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

// Blocks along x for `items` of which a block takes `each`: x alone goes beyond 65,535.
inline dim3 blocks_for(int64_t items, int64_t each) {
    return dim3(static_cast<unsigned>((items + each - 1) / each));
}

}  // namespace flash_csa::sm90
