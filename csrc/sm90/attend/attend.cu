// attend: which kernel serves a call, and how rows are cut.
#include "core/schedule.h"
#include "sm90/attend/pieces.cuh"
#include "sm90/attend/variants.h"
#include "sm90/kernels.h"

namespace flash_csa::sm90 {
namespace {

constexpr int64_t kPartialBytes = int64_t{kHeadDim + 1} * sizeof(float);  // of one head

// Pieces of a row, 0 for those of the schedule. Lists of bounded length are cut evenly where that
// fills the GPU; a batch of more than half its SMs keeps rows whole, as one turn is a turn.
int32_t splits_of(const AttendParams& p, const SplitPlan& plan, int num_sms) {
    if (p.batch_invariant) return 1;
    if (p.contiguous.data != nullptr) return 0;
    const int64_t items = int64_t{p.rows} * plan.head_blocks;
    const int64_t tiles = (p.window.columns + kAttendTile - 1) / kAttendTile +
                          (p.main.columns + kAttendTile - 1) / kAttendTile;
    const int64_t most = num_sms / items < tiles ? num_sms / items : tiles;
    if (most < 2) return 1;
    const int64_t run = (tiles + most - 1) / most;
    const int64_t splits = (tiles + run - 1) / run;
    const int64_t scratch = items * splits * plan.block_heads * kPartialBytes;
    return kSyncBytes + scratch <= p.workspace.bytes ? static_cast<int32_t>(splits) : 1;
}

}  // namespace

cudaError_t attend(const AttendParams& p, cudaStream_t stream) {
    if (p.out_f32.data != nullptr) return attend_plain(p, stream);
    if (p.rows == 0 || p.heads == 0) return cudaSuccess;
    int device = 0, num_sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    if (takes_few_rows(p, num_sms)) return attend_few_rows(p, num_sms, stream);
    if (takes_few_heads(p)) return attend_few_heads(p, num_sms, stream);
    SplitPlan plan;
    plan.head_blocks = (p.heads + kHeadBlock - 1) / kHeadBlock;
    plan.block_heads = p.heads < kHeadBlock ? p.heads : kHeadBlock;
    plan.splits = splits_of(p, plan, num_sms);
    error = attend_many_heads(p, plan, num_sms, stream);
    if (error != cudaSuccess || plan.splits == 1) return error;
    return attend_reduce(p, plan, stream);
}

}  // namespace flash_csa::sm90
