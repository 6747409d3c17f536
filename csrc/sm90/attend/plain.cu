// attend, any number of heads, any record and output: the plain kernel. FP32 output takes it, whose
// bound asks for FP32 probabilities.
//
//   in   q, window and main records, lists            out  out, lse
//
// A block takes a row and 8 of its heads, a warp a head. Tiles of 32 present records: every warp
// decodes 4 of them into shared memory (FP32), then
//   logits   lane-wise partial dots, reduced over the warp; lane r keeps the logit of record r
//   softmax  running maximum and sum
//   values   acc = acc * keep + sum over the tile, FP32 (two levels, as on the CPU)
// A record is decoded heads / 8 times. Floor: records * bytes per row; this kernel is bound by
// shared memory (two reads of 2 KiB per record and head).
#include "core/list.h"
#include "sm90/attend/head_out.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;  // heads of a block
constexpr int kTile = 32;  // records: one logit a lane

struct Shared {
    float kv[kTile][kHeadDim];
    bool present[kTile];
};

template <RecordId kId>
__device__ __forceinline__ void decode(const ConstPages& pages, int32_t slot, int lane,
                                       float* values) {
    constexpr Record r = record(kId);
    LaneRecord<kId>::decode(pages.row(r, slot), pages.scales(r, slot), lane, values);
}

// Records [first, first + kTile) of the list; absent ones become zeros that nothing weighs.
__device__ void decode_tile(const AttendParams& p, const RowList& list, int64_t first, int warp,
                            int lane, Shared& shared) {
    for (int r = warp; r < kTile; r += kWarps) {
        const int64_t at = first + r;
        const bool window = at < list.window;
        const ConstPages& pages = window ? p.window.pages : p.main.pages;
        const int64_t slot =
            at >= list.size() ? -1
                              : (window ? list.window_slots[at] : list.main_slot(at - list.window));
        const bool present = slot >= 0 && slot <= INT32_MAX && pages.holds(slot);
        if (lane == 0) shared.present[r] = present;
        alignas(16) float values[kLaneDims] = {};
        if (present) {
            const int32_t s = static_cast<int32_t>(slot);
            switch (pages.record) {
                case RecordId::WindowFp8:
                    decode<RecordId::WindowFp8>(pages, s, lane, values);
                    break;
                case RecordId::MixedFp8:
                    decode<RecordId::MixedFp8>(pages, s, lane, values);
                    break;
                default:
                    decode<RecordId::MainFp4>(pages, s, lane, values);
            }
        }
        copy_bytes<sizeof values>(values, &shared.kv[r][lane * kLaneDims]);
    }
}

struct HeadState {
    float q[kLaneDims];
    float acc[kLaneDims] = {};
    float max = -INFINITY;
    float sum = 0.f;  // same in all lanes
    bool empty = true;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2) x += __shfl_xor_sync(kAllLanes, x, h);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, h));
    return x;
}

__device__ void attend_tile(const Shared& shared, float scale, int lane, HeadState& s) {
    float logit = -INFINITY;
    for (int r = 0; r < kTile; ++r) {
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i) dot = fmaf(s.q[i], shared.kv[r][dim_of(lane, i)], dot);
        dot = warp_sum(dot);
        if (r == lane && shared.present[r]) logit = dot * scale;
    }
    const bool present = shared.present[lane];
    if (!__any_sync(kAllLanes, present)) return;
    // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
    const float largest = fmaxf(s.max, warp_max(logit));
    const float weight = present ? exp_fma(logit - largest) : 0.f;
    const float keep = s.empty ? 0.f : exp_fma(s.max - largest);
    s.empty = false;
    s.sum = fmaf(s.sum, keep, warp_sum(weight));
    s.max = largest;
    float tile[kLaneDims] = {};
    for (int r = 0; r < kTile; ++r) {
        const float w = __shfl_sync(kAllLanes, weight, r);
#pragma unroll
        for (int i = 0; i < kLaneDims; ++i)
            tile[i] = fmaf(w, shared.kv[r][dim_of(lane, i)], tile[i]);
    }
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) s.acc[i] = fmaf(s.acc[i], keep, tile[i]);
}

__device__ void finish(const AttendParams& p, int64_t row, int head, int lane, HeadState& s) {
    const bool empty = s.empty;
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    const float factor = empty ? 0.f : 1.f / (s.sum + exp_fma(sink - s.max));
    float out[kLaneDims];
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) out[i] = empty ? 0.f : s.acc[i] * factor;
    write_head(p, row, head, lane, out);
    if (p.lse && lane == 0) p.lse.row(row)[head] = empty ? INFINITY : s.max + logf(s.sum);
}

__global__ void __launch_bounds__(32 * kWarps) plain_kernel(AttendParams p) {
    extern __shared__ __align__(16) uint8_t bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head_blocks = (p.heads + kWarps - 1) / kWarps;
    const int64_t row = blockIdx.x / head_blocks;
    const int head = static_cast<int>(blockIdx.x % head_blocks) * kWarps + warp;
    const bool active = head < p.heads;
    const RowList list = row_list(p, row);
    HeadState state;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i)
        state.q[i] = active ? bf16_to_f32(p.q.at(row, head)[dim_of(lane, i)]) : 0.f;
    for (int64_t first = 0; first < list.size(); first += kTile) {
        decode_tile(p, list, first, warp, lane, shared);
        __syncthreads();
        if (active) attend_tile(shared, p.softmax_scale, lane, state);
        __syncthreads();
    }
    if (active) finish(p, row, head, lane, state);
}

}  // namespace

cudaError_t attend_plain(const AttendParams& p, cudaStream_t stream) {
    const int64_t head_blocks = (p.heads + kWarps - 1) / kWarps;
    return launch(plain_kernel, blocks_for(p.rows * head_blocks, 1), 32 * kWarps, sizeof(Shared),
                  stream, p);
}

}  // namespace flash_csa::sm90
