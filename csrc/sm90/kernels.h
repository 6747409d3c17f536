// CUDA launchers: plain CUDA, no PyTorch header. Each enqueues its kernels on `stream`, allocates
// nothing, reads nothing on the host, and returns the launch error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/params.h"

namespace flash_csa::sm90 {

struct LaunchShape {
    unsigned x = 0, y = 0, z = 0;
    int threads = 0;
    size_t shared = 0;  // bytes
};
inline thread_local LaunchShape last_launch;  // of this thread, for error texts

// Writes the architecture that the code was compiled for (900 for sm_90a), then the bytes of every
// record, as device code sees them. out: int32 [1 + kNumRecords].
cudaError_t probe(int32_t* out, cudaStream_t stream);
// Reads MainFp4 records [num_records] at `slots` [count] into shared memory, for the benchmark.
cudaError_t probe_gather(const uint8_t* records, int64_t num_records, const int32_t* slots,
                         int64_t count, cudaStream_t stream);

cudaError_t store(const StoreParams& p, cudaStream_t stream);
cudaError_t load(const LoadParams& p, cudaStream_t stream);
cudaError_t rope_store(const RopeStoreParams& p, cudaStream_t stream);
cudaError_t quantize_query(const QuantizeQueryParams& p, cudaStream_t stream);
cudaError_t compress(const CompressParams& p, cudaStream_t stream);
cudaError_t index_scores(const IndexScoresParams& p, cudaStream_t stream);
cudaError_t select(const SelectParams& p, cudaStream_t stream);
cudaError_t index_select(const IndexSelectParams& p, cudaStream_t stream);
cudaError_t normalize_pool(const NormalizePoolParams& p, cudaStream_t stream);
cudaError_t attend(const AttendParams& p, cudaStream_t stream);
cudaError_t merge(const MergeParams& p, cudaStream_t stream);
cudaError_t merge_selections(const MergeSelectionsParams& p, cudaStream_t stream);
cudaError_t merge_pools(const MergePoolsParams& p, cudaStream_t stream);
cudaError_t step_slots(const StepSlotsParams& p, cudaStream_t stream);
cudaError_t schedule(const ScheduleParams& p, cudaStream_t stream);

}  // namespace flash_csa::sm90
