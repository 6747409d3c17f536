// store: BF16 rows to records in pages, a warp per row. Floor: 2 * dims bytes in, a record out.
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;

template <RecordId kId>
__global__ void __launch_bounds__(32 * kWarps) store_kernel(StoreParams p) {
    const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= p.count) return;
    const int32_t slot = p.slots[row];
    if (!p.pages.holds(slot)) return;
    LaneRow<record(kId).dims> values;
    values.load(p.rows.row(row), lane);
    write_record<kId>(values, lane, p.pages, slot);
}

}  // namespace

cudaError_t store(const StoreParams& p, cudaStream_t stream) {
    return with_record(p.pages.record, [&](auto tag) {
        return launch(store_kernel<decltype(tag)::kRecord>, blocks_for(p.count, kWarps),
                      32 * kWarps, 0, stream, p);
    });
}

}  // namespace flash_csa::sm90
