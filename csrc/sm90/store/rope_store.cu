// rope_store: rotates q in place; rotates, quantises and stores the window vector of each row.
//
//   in   q, kv, positions, slots, cos_sin      out  q (the last 64 dims of a head), window pages
//
// Without a norm a head is one line of 128 bytes: 8 lanes of 16 bytes, 4 heads a warp at a time,
// all loads of a warp's heads before the first use, cosines and sines once for all of them. One
// more warp per row stores the window vector. With V4's norm a warp has a whole head. Floor: 256
// bytes a head, 1024 + one record a row.
#include "sm90/common/fp4_pairs.cuh"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"
#include "sm90/store/window.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kHeadLanes = 8;            // lanes of a head: 4 pairs each
constexpr int kGroup = 32 / kHeadLanes;  // heads that a warp loads with one instruction
constexpr int kLanePairs = kRopeDims / 2 / kHeadLanes;

struct LaneTurn {
    float cos[kLanePairs], sin[kLanePairs];

    __device__ __forceinline__ LaneTurn(const float* cos_sin, int lane) {
        const int first = lane % kHeadLanes * kLanePairs;
        copy_bytes<sizeof cos>(cos_sin + first, cos);
        copy_bytes<sizeof sin>(cos_sin + kRopeDims / 2 + first, sin);
    }
    __device__ __forceinline__ uint32_t operator()(uint32_t pair, int i) const {
        float a, b;
        rope_pair(low_bf16(pair), high_bf16(pair), cos[i], sin[i], &a, &b);
        return f32_to_bf16(a) | uint32_t{f32_to_bf16(b)} << 16;
    }
};

// Heads [first, first + kGroup * kLoads) of a row.
template <int kLoads>
__device__ __forceinline__ void rotate_heads(const RopeStoreParams& p, int64_t row, int first,
                                             int lane) {
    const int head = first + lane / kHeadLanes;
    const int at = kHeadDim - kRopeDims + lane % kHeadLanes * 2 * kLanePairs;
    uint4 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        if (head + i * kGroup < p.heads)
            x[i] = *reinterpret_cast<const uint4*>(p.q.at(row, head + i * kGroup) + at);
    }
    const int32_t position = p.positions[row];
    if (!p.cos_sin.holds(position)) return;
    const LaneTurn turn(p.cos_sin.at(position), lane);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        if (head + i * kGroup >= p.heads) continue;
        *reinterpret_cast<uint4*>(p.q.at(row, head + i * kGroup) + at) =
            make_uint4(turn(x[i].x, 0), turn(x[i].y, 1), turn(x[i].z, 2), turn(x[i].w, 3));
    }
}

template <RecordId kId, int kLoads>
__global__ void __launch_bounds__(32 * kWarps) rope_store_kernel(RopeStoreParams p, int parts) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = item / (parts + 1);
    const int part = static_cast<int>(item - row * (parts + 1));
    if (row >= p.rows) return;
    if (part < parts)
        rotate_heads<kLoads>(p, row, part * kGroup * kLoads, lane);
    else
        store_window<kId>(p, row, lane);
}

template <RecordId kId, int kLoads>
cudaError_t launch_loads(const RopeStoreParams& p, cudaStream_t stream) {
    const int parts = (p.heads + kGroup * kLoads - 1) / (kGroup * kLoads);
    return launch(rope_store_kernel<kId, kLoads>, blocks_for(int64_t{p.rows} * (parts + 1), kWarps),
                  32 * kWarps, 0, stream, p, parts);
}

template <RecordId kId>
cudaError_t launch_record(const RopeStoreParams& p, cudaStream_t stream) {
    if (p.heads <= 2 * kGroup) return launch_loads<kId, 2>(p, stream);
    return launch_loads<kId, 4>(p, stream);
}

}  // namespace

cudaError_t norm_rope_store(const RopeStoreParams& p, cudaStream_t stream);

cudaError_t rope_store(const RopeStoreParams& p, cudaStream_t stream) {
    if (p.q_norm) return norm_rope_store(p, stream);
    if (p.window.record == RecordId::WindowFp8)
        return launch_record<RecordId::WindowFp8>(p, stream);
    return launch_record<RecordId::MixedFp8>(p, stream);
}

}  // namespace flash_csa::sm90
