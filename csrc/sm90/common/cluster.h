// Launching kernels in thread block clusters, and the size that suits a number of clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm90/common/per_device.h"
#include "sm90/kernels.h"

namespace flash_csa::sm90 {

inline constexpr int32_t kLargestCluster = 16;

// Lets a kernel have clusters of more than 8 blocks and more than 48 KiB of shared memory.
template <class... Params>
cudaError_t raise_limits(void (*kernel)(Params...), size_t shared) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

inline int32_t floor_log2(int32_t n) {  // of a positive number
    int32_t log = 0;
    while (n >>= 1) ++log;
    return log;
}

struct ClusterLaunch {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    ClusterLaunch(int64_t clusters, int32_t size, int threads, size_t shared) {
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = dim3(static_cast<unsigned>(clusters * size));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = shared;
        config.attrs = attributes;
        config.numAttrs = 1;
    }
    ClusterLaunch(const ClusterLaunch&) = delete;  // the configuration points into it
};

// How many clusters of a kernel are resident at once, by their size in blocks.
struct ResidentClusters {
    int of_size[kLargestCluster + 1] = {};
};

// On the current device, which is asked once for each kernel: threads and shared bytes are always
// the same.
template <auto kKernel>
const ResidentClusters& resident_clusters(int threads, size_t shared) {
    static PerDevice<ResidentClusters> known;
    return known.of_current([&] {
        ResidentClusters found;
        raise_limits(kKernel, shared);
        for (int32_t size = 1; size <= kLargestCluster; ++size) {
            const ClusterLaunch launch(1, size, threads, shared);
            if (cudaOccupancyMaxActiveClusters(&found.of_size[size], kKernel, &launch.config) !=
                cudaSuccess) {
                cudaGetLastError();  // a size that this device does not have
                found.of_size[size] = 0;
            }
        }
        return found;
    });
}

// The largest of the sizes 16, 8, .. 2 of which `clusters` are resident at once; 1 if none is.
template <auto kKernel>
int32_t cluster_size_for(int64_t clusters, int threads, size_t shared) {
    const ResidentClusters& resident = resident_clusters<kKernel>(threads, shared);
    int32_t size = kLargestCluster;
    while (size > 1 && resident.of_size[size] < clusters) size /= 2;
    return size;
}

// `clusters` clusters of `size` blocks of a kernel that starts while the one before it ends, and
// calls wait_for_previous (dependents.cuh).
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), int64_t clusters, int32_t size, int threads,
                            size_t shared, cudaStream_t stream, const Args&... args) {
    if (clusters == 0) return cudaSuccess;
    ClusterLaunch launch(clusters, size, threads, shared);
    launch.config.stream = stream;
    launch.config.numAttrs = 2;
    last_launch = {launch.config.gridDim.x, 1, 1, threads, shared};
    const cudaError_t error = raise_limits(kernel, shared);
    if (error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&launch.config, kernel, static_cast<Params>(args)...);
}

}  // namespace flash_csa::sm90
