// quantize_query for FP4 queries without a rotation: 8 lanes a head, 16 dims each, 4 heads a warp
// at a time, all loads first. Floor: 256 bytes in, a row of codes and a scale word out.
#include "sm90/common/fp4_pairs.cuh"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;
constexpr int kHeadLanes = 8;
constexpr int kHeadsAtOnce = 32 / kHeadLanes;
constexpr int kLoads = 2;  // heads of a lane
constexpr int kWarpHeads = kHeadsAtOnce * kLoads;

// A lane's 16 dims; the last 4 lanes hold those of RoPE, 8 pairs each.
struct LaneDims {
    uint4 x[2];

    __device__ __forceinline__ void rotate(const float* cos_sin, int lane) {
        const int first = lane % kHeadLanes * 8 - (kIndexDim - kRopeDims) / 2;
        if (first < 0) return;
        float cos[8], sin[8];
        copy_bytes<32>(cos_sin + first, cos);
        copy_bytes<32>(cos_sin + kRopeDims / 2 + first, sin);
        uint32_t* pairs = &x[0].x;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float a, b;
            rope_pair(low_bf16(pairs[i]), high_bf16(pairs[i]), cos[i], sin[i], &a, &b);
            pairs[i] = f32_to_bf16(a) | uint32_t{f32_to_bf16(b)} << 16;
        }
    }
    // The scale byte of the lane's group, which its neighbour shares.
    __device__ __forceinline__ uint32_t encode(uint2* codes) const {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, (&x[0].x)[i] & kMagnitudes);
        largest = max_u32(largest & 0xffffu, largest >> 16);
        largest = max_u32(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        const uint32_t byte = index_scale_byte(largest);
        const float factor = ue8m0_reciprocal(static_cast<uint8_t>(byte));
        const uint32_t keep = byte == kNanUE8M0 ? 0 : ~0u;
        *codes = make_uint2(e2m1_codes(x[0], factor, factor) & keep,
                            e2m1_codes(x[1], factor, factor) & keep);
        return byte;
    }
};

__global__ void __launch_bounds__(32 * kWarps)
    quantize_fp4_kernel(QuantizeQueryParams p, int parts) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = item / parts;
    const int first = static_cast<int>(item - row * parts) * kWarpHeads + lane / kHeadLanes;
    if (row >= p.rows) return;
    LaneDims dims[kLoads] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int head = first + i * kHeadsAtOnce;
        if (head < p.heads) copy_bytes<32>(p.q.at(row, head) + lane % kHeadLanes * 16, dims[i].x);
    }
    const int32_t position = p.positions[row];
    const bool padded = !p.cos_sin.holds(position);  // scores 0 everywhere
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        if (!padded) dims[i].rotate(p.cos_sin.at(position), lane);
        uint2 codes;
        uint32_t scales = dims[i].encode(&codes);
        // One word of the head's four groups, gathered in its lanes.
        scales <<= lane % kHeadLanes / 2 * 8;
        scales |= __shfl_xor_sync(kAllLanes, scales, 2);
        scales |= __shfl_xor_sync(kAllLanes, scales, 4);
        if (padded) codes = make_uint2(0, 0), scales = 0;
        const int head = first + i * kHeadsAtOnce;
        if (head >= p.heads) continue;
        constexpr Record r = record(RecordId::IndexFp4);
        reinterpret_cast<uint2*>(p.codes.row(row) + head * r.data_bytes)[lane % kHeadLanes] = codes;
        if (lane % kHeadLanes == 0) p.scales_ue8m0.row(row)[head] = static_cast<int32_t>(scales);
    }
}

}  // namespace

cudaError_t quantize_fp4(const QuantizeQueryParams& p, cudaStream_t stream) {
    const int parts = (p.heads + kWarpHeads - 1) / kWarpHeads;
    return launch(quantize_fp4_kernel, blocks_for(int64_t{p.rows} * parts, kWarps), 32 * kWarps, 0,
                  stream, p, parts);
}

}  // namespace flash_csa::sm90
