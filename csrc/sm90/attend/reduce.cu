// Adds up the partial results of rows that were cut: a warp per row, head and half of
// the dims.
//
//   in   partial results of pieces.cuh                out  out, lse
//
// Floor: 2 KiB read per piece and head, 1 KiB written. Whole rows are left alone.
#include "sm90/attend/output.cuh"
#include "sm90/attend/pieces.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kHalves = kHeadDim / kGroupDims / 32;  // a lane has one group of 8 dims
constexpr int kAhead = 5;                            // pieces read at once

struct Sums {
    float total = 0.f;
    float out[kGroupDims] = {};

    // Adds `count` pieces from slot `first` on. Of an empty piece nothing is taken.
    __device__ __forceinline__ void add(const Cuts& cuts, int32_t first, int count, int at, int dim,
                                        float largest) {
        float weight[kAhead];
        float4 x[kAhead][2];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            weight[i] = -INFINITY;
            if (i >= count) continue;
            weight[i] = *cuts.lse(first + i, at);
            const auto* from = reinterpret_cast<const float4*>(cuts.out(first + i, at) + dim);
            x[i][0] = from[0];
            x[i][1] = from[1];
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (weight[i] == -INFINITY) continue;
            const float w = expf(weight[i] - largest);
            const float values[kGroupDims] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w,
                                              x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
            total += w;
#pragma unroll
            for (int d = 0; d < kGroupDims; ++d) out[d] = fmaf(w, values[d], out[d]);
        }
    }
};

__global__ void __launch_bounds__(32 * kWarps)
    reduce_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ SplitPlan plan) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = static_cast<int>(item % kHalves) * 32 + lane;
    const int head = static_cast<int>(item / kHalves % p.heads);
    const int32_t row = static_cast<int32_t>(item / kHalves / p.heads);
    wait_for_previous();
    if (row >= p.rows) return;
    const Cuts cuts(p, plan);
    const int pieces = cuts.count(row);
    if (pieces == 0) return;
    const int32_t first = cuts.first_slot(row, head / kHeadBlock);
    const int at = head % kHeadBlock;
    float largest = -INFINITY;
    bool empty = true;
    for (int i = lane; i < pieces; i += 32) {
        const float lse = *cuts.lse(first + i, at);
        largest = fmaxf(largest, lse);
        empty = empty && lse == -INFINITY;
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, h));
    empty = __all_sync(~0u, empty);
    Sums sums;
    for (int i = 0; i < pieces; i += kAhead)
        sums.add(cuts, first + i, pieces - i, at, group * kGroupDims, largest);
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    const float factor = empty ? 0.f : 1.f / (sums.total + expf(sink - largest));
    uint32_t x[kGroupDims / 2];
#pragma unroll
    for (int d = 0; d < kGroupDims / 2; ++d)
        x[d] = pack_bf16(sums.out[2 * d] * factor, sums.out[2 * d + 1] * factor);
    store_group(p.out_bf16.at(row, head), group, natural_order(make_uint4(x[0], x[1], x[2], x[3])),
                derotation(p, row));
    if (p.lse && group == 0) p.lse.row(row)[head] = empty ? INFINITY : largest + logf(sums.total);
}

}  // namespace

cudaError_t attend_reduce(const AttendParams& p, const SplitPlan& plan, cudaStream_t stream) {
    const int64_t warps = int64_t{p.rows} * p.heads * kHalves;
    return launch_after(reduce_kernel, blocks_for(warps, kWarps), 32 * kWarps, 0, stream, p, plan);
}

}  // namespace flash_csa::sm90
