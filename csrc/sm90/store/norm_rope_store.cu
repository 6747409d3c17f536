// rope_store with V4's norm of each head before the rotation: a warp per (row, head), and one per
// row for the window. Floor: 2048 bytes a head, 1024 + one record a row.
#include "sm90/common/launch.h"
#include "sm90/common/warp_norm.cuh"
#include "sm90/store/window.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 4;

// RMS of one head without weight, rounded to BF16. Lane l has values l, l + 32, ...
__device__ void normalize_head(uint16_t* head, float eps, int lane) {
    float x[kHeadDim / 32];
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) x[i] = bf16_to_f32(head[lane + 32 * i]);
    const float factor = warp_rms_factor<kHeadDim>(x, eps);
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) head[lane + 32 * i] = f32_to_bf16(mul_rn(x[i], factor));
    __syncwarp();
}

// One pair a lane.
__device__ void rotate_head(uint16_t* head, const float* cos_sin, int lane) {
    uint32_t* pair = reinterpret_cast<uint32_t*>(head + kHeadDim - kRopeDims) + lane;
    const uint32_t bits = *pair;
    float a, b;
    rope_pair(bf16_to_f32(static_cast<uint16_t>(bits)),
              bf16_to_f32(static_cast<uint16_t>(bits >> 16)), cos_sin[lane],
              cos_sin[kRopeDims / 2 + lane], &a, &b);
    *pair = f32_to_bf16(a) | uint32_t{f32_to_bf16(b)} << 16;
}

template <RecordId kId>
__global__ void __launch_bounds__(32 * kWarps) norm_rope_store_kernel(RopeStoreParams p) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = item / (p.heads + 1);
    const int32_t head = static_cast<int32_t>(item % (p.heads + 1));
    if (row >= p.rows) return;
    if (head == p.heads) return store_window<kId>(p, row, lane);
    if (!p.cos_sin.holds(p.positions[row])) return;
    normalize_head(p.q.at(row, head), p.q_norm_eps, lane);
    rotate_head(p.q.at(row, head), p.cos_sin.at(p.positions[row]), lane);
}

}  // namespace

cudaError_t norm_rope_store(const RopeStoreParams& p, cudaStream_t stream) {
    const dim3 grid = blocks_for(int64_t{p.rows} * (p.heads + 1), kWarps);
    if (p.window.record == RecordId::WindowFp8)
        return launch(norm_rope_store_kernel<RecordId::WindowFp8>, grid, 32 * kWarps, 0, stream, p);
    return launch(norm_rope_store_kernel<RecordId::MixedFp8>, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace flash_csa::sm90
