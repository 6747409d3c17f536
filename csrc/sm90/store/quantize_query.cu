// quantize_query: RoPE, optional Hadamard rotation, quantisation of index queries; a warp per head.
// FP4 queries without a rotation go to quantize_fp4.cu.
// Floor: 256 bytes in, a row of codes and a scale out.
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;

template <RecordId kId>
__global__ void __launch_bounds__(32 * kWarps) quantize_query_kernel(QuantizeQueryParams p) {
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64_t row = item / p.heads;
    const int64_t head = item % p.heads;
    if (row >= p.rows) return;
    constexpr Record r = record(kId);
    uint8_t* codes = p.codes.row(row) + head * r.data_bytes;
    uint8_t* scales = kId == RecordId::IndexFp4
                          ? reinterpret_cast<uint8_t*>(p.scales_ue8m0.row(row) + head)
                          : reinterpret_cast<uint8_t*>(p.scales_f32.row(row) + head);
    if (!p.cos_sin.holds(p.positions[row])) {  // a padded row scores 0 everywhere
        constexpr int kBytes = LaneRecord<kId>::kCodeBytes;
        alignas(16) const uint8_t zeros[kBytes] = {};
        copy_bytes<kBytes>(zeros, codes + lane * kBytes);
        if (lane < r.scale_bytes) scales[lane] = 0;
        return;
    }
    LaneRow<kIndexDim> values;
    values.load(p.q.at(row, head), lane);
    values.rope(p.cos_sin.at(p.positions[row]), lane);
    if (p.rotate) hadamard(values, lane);
    LaneRecord<kId>::encode(values, lane, codes, scales);
}

}  // namespace

cudaError_t quantize_fp4(const QuantizeQueryParams& p, cudaStream_t stream);

cudaError_t quantize_query(const QuantizeQueryParams& p, cudaStream_t stream) {
    if (p.record == RecordId::IndexFp4 && !p.rotate) return quantize_fp4(p, stream);
    const dim3 grid = blocks_for(int64_t{p.rows} * p.heads, kWarps);
    if (p.record == RecordId::IndexFp4)
        return launch(quantize_query_kernel<RecordId::IndexFp4>, grid, 32 * kWarps, 0, stream, p);
    return launch(quantize_query_kernel<RecordId::IndexFp8>, grid, 32 * kWarps, 0, stream, p);
}

}  // namespace flash_csa::sm90
