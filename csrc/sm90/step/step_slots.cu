// step_slots: slots, window lists and visible counts of a step, in one launch.
//
//   in   batch, block tables, window ring          out  window_store, lists, entry_slots, n_vis
//
// A warp takes a row, its lanes the columns of the window list. Floor: 4 * (window + 2 + 2 ratios)
// bytes written a row; latency binds at decode sizes.
#include "core/step.h"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(32 * kWarps) step_slots_kernel(StepSlotsParams p) {
    const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int32_t lane = threadIdx.x % 32;
    if (row >= p.batch.rows) return;
    const int32_t position = p.batch.positions[row];
    const int32_t request = p.batch.row_request[row];
    const bool valid = valid_row(p.batch, position, request);
    const int32_t first = valid ? window_begin(p, request, position) : 0;
    const int32_t length = valid && first <= position ? position - first + 1 : 0;
    for (int32_t column = lane; column < p.window; column += 32) {
        p.window_slots.row(row)[column] =
            column < length ? window_slot(p, request, first + column) : -1;
    }
    if (lane == 0) {
        p.window_store[row] = valid ? window_slot(p, request, position) : -1;
        p.window_lengths[row] = length;
    }
    for (int32_t i = lane; i < p.num_ratios; i += 32) {
        p.entry_slots.row(i)[row] = valid ? entry_slot(p, i, request, position) : -1;
        p.n_vis.row(i)[row] = valid ? visible_entries(p, i, position) : 0;
    }
}

}  // namespace

cudaError_t step_slots(const StepSlotsParams& p, cudaStream_t stream) {
    return launch(step_slots_kernel, blocks_for(p.batch.rows, kWarps), 32 * kWarps, 0, stream, p);
}

}  // namespace flash_csa::sm90
