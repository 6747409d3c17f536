// merge: attention over the union of several parts' records, a warp per row and head.
//
//   in   outs [W, R, H, 512], lses [W, R, H]          out  out, lse
//
// Floor: W * R * H * 512 values read, one in W written.
#include "sm90/attend/head_out.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;

__device__ __forceinline__ float value(const MergeParams& p, int64_t at) {
    return p.outs_f32 != nullptr ? p.outs_f32[at] : bf16_to_f32(p.outs_bf16[at]);
}

// Both infinities stand for a part without records.
__device__ __forceinline__ bool is_empty(float lse) { return isinf(lse); }

__global__ void __launch_bounds__(32 * kWarps) merge_kernel(MergeParams p) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = item / p.heads;
    const int head = static_cast<int>(item % p.heads);
    if (row >= p.rows) return;
    const int64_t part_stride = int64_t{p.rows} * p.heads;
    // A row whose de-rotation position is out of range is padded.
    const bool padded =
        p.derotate_positions != nullptr && !p.derotate.holds(p.derotate_positions[row]);
    const int parts = padded ? 0 : p.parts;
    float largest = -INFINITY;
    for (int w = 0; w < parts; ++w) {
        const float lse = p.lses[w * part_stride + item];
        if (!is_empty(lse)) largest = fmaxf(largest, lse);
    }
    bool empty = true;
    float sum = 0.f;
    float acc[kLaneDims] = {};
    for (int w = 0; w < parts; ++w) {
        const float lse = p.lses[w * part_stride + item];
        if (is_empty(lse)) continue;
        empty = false;
        const float weight = exp_fma(lse - largest);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i)
            acc[i] = fmaf(weight, value(p, (w * part_stride + item) * kHeadDim + dim_of(lane, i)),
                          acc[i]);
    }
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    const float factor = empty ? 0.f : 1.f / (sum + exp_fma(sink - largest));
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) acc[i] = empty ? 0.f : acc[i] * factor;
    write_head(p, row, head, lane, acc);
    if (p.lse && lane == 0) p.lse.row(row)[head] = empty ? INFINITY : largest + logf(sum);
}

}  // namespace

cudaError_t merge(const MergeParams& p, cudaStream_t stream) {
    return launch(merge_kernel, blocks_for(int64_t{p.rows} * p.heads, kWarps), 32 * kWarps, 0,
                  stream, p);
}

}  // namespace flash_csa::sm90
