// Queries of a call as a tensor of which TMA copies boxes: a panel of a block of heads, swizzled as
// WGMMA wants it. Heads beyond the last are zeros. Drivers take strides of any multiple of 16 bytes
// below 2^40, 0 among them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "core/params.h"

namespace flash_csa::sm90 {

namespace detail {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, or nullptr: the library is not linked against the driver.
inline EncodeTensorMap encode_tensor_map() {
    static const auto found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        if (error == cudaSuccess) return reinterpret_cast<EncodeTensorMap>(function);
        cudaGetLastError();  // nobody else's
        return EncodeTensorMap{nullptr};
    }();
    return found;
}

}  // namespace detail

// box: columns (128 bytes of them) and heads of a copy. False where the driver does not map them.
inline bool map_queries(const AttendParams& p, int columns, int heads, CUtensorMap& map) {
    const auto encode = detail::encode_tensor_map();
    // A thread that has launched nothing has no context, which the driver's function asks for.
    int device = 0;
    if (encode == nullptr || cudaGetDevice(&device) != cudaSuccess ||
        cudaSetDevice(device) != cudaSuccess)
        return false;
    constexpr int64_t kBytes = sizeof(uint16_t);
    // A stride that nothing steps over may be any number.
    const int64_t head = p.heads > 1 ? p.q.head_stride : kHeadDim;
    const int64_t row = p.rows > 1 ? p.q.row_stride : p.heads * head;
    const cuuint64_t sizes[] = {kHeadDim, static_cast<cuuint64_t>(p.heads),
                                static_cast<cuuint64_t>(p.rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(head * kBytes),
                                  static_cast<cuuint64_t>(row * kBytes)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(heads), 1};
    const cuuint32_t steps[] = {1, 1, 1};
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<uint16_t*>(p.q.data), sizes,
                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flash_csa::sm90
