// load: records in pages to BF16 or FP32 rows, a warp per row; an absent slot gives zeros.
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;

template <RecordId kId, class Out>
__global__ void __launch_bounds__(32 * kWarps) load_kernel(LoadParams p, Matrix<Out> out) {
    const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.count) return;
    constexpr Record r = record(kId);
    constexpr int kValues = kLaneValues<r.dims>;
    const int32_t slot = p.slots[row];
    alignas(16) Out values[kValues] = {};
    if (p.pages.holds(slot))
        LaneRecord<kId>::decode(p.pages.row(r, slot), p.pages.scales(r, slot), lane, values);
    copy_bytes<sizeof(Out) * kValues>(values, out.row(row) + lane * kValues);
}

}  // namespace

cudaError_t load(const LoadParams& p, cudaStream_t stream) {
    return with_record(p.pages.record, [&](auto tag) {
        constexpr RecordId kId = decltype(tag)::kRecord;
        const dim3 grid = blocks_for(p.count, kWarps);
        if (p.out_f32)
            return launch(load_kernel<kId, float>, grid, 32 * kWarps, 0, stream, p, p.out_f32);
        return launch(load_kernel<kId, uint16_t>, grid, 32 * kWarps, 0, stream, p, p.out_bf16);
    });
}

}  // namespace flash_csa::sm90
