// Tails of a call: the last rows of each request's kv and gate, kept for its open group.
//
// After the entries, which read the earlier tail rows. A block per request and slice of rows; the
// request's valid rows come first, so its last row is found by bisection.
#include "core/entry.h"
#include "sm90/common/launch.h"
#include "sm90/kernels.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kSlices = 8;  // blocks of a request

__device__ int64_t end_of_valid(const CompressParams& p, const RowRange& rows, int64_t request) {
    int64_t low = rows.begin, high = rows.end;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (is_row_of(p, middle, request))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(kThreads) tails_kernel(CompressParams p) {
    const int64_t request = blockIdx.x / kSlices;
    if (!has_tail(p, request)) return;
    const RowRange rows = request_rows(p, request);
    const int64_t end = end_of_valid(p, rows, request);
    const int64_t slot = p.batch.tail_slot[request];
    const int64_t kept = end - p.tail.ring > rows.begin ? end - p.tail.ring : rows.begin;
    for (int64_t t = kept + blockIdx.x % kSlices; t < end; t += kSlices) {
        const int64_t position = p.batch.positions[t];
        if (position < first_entry(p, request) * p.ratio) continue;
        for (int c = threadIdx.x; c < p.tail.width; c += kThreads) {
            p.tail.kv(slot, position)[c] = p.kv.row(t)[c];
            p.tail.gate(slot, position)[c] = p.gate.row(t)[c];
        }
    }
}

}  // namespace

cudaError_t compress_tails(const CompressParams& p, cudaStream_t stream) {
    return launch(tails_kernel, blocks_for(p.batch.requests, 1).x * kSlices, kThreads, 0, stream,
                  p);
}

}  // namespace flash_csa::sm90
