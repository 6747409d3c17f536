// The kernels between which attend.cu chooses.
#pragma once

#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_csa::sm90 {

struct SplitPlan;

// Any output, any heads; FP32 probabilities.
cudaError_t attend_plain(const AttendParams& p, cudaStream_t stream);
// BF16 output, on tensor cores.
cudaError_t attend_many_heads(const AttendParams& p, const SplitPlan& plan, int num_sms,
                              cudaStream_t stream);
// The same for at most 32 heads, padded to 8, 16 or 32, and the records that takes_few_heads names.
bool takes_few_heads(const AttendParams& p);
cudaError_t attend_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream);
// Rows that do not fill the SMs, in clusters, of bounded lists of the same records.
bool takes_few_rows(const AttendParams& p, int num_sms);
cudaError_t attend_few_rows(const AttendParams& p, int num_sms, cudaStream_t stream);
// Adds up the partial results of the rows that were cut.
cudaError_t attend_reduce(const AttendParams& p, const SplitPlan& plan, cudaStream_t stream);

}  // namespace flash_csa::sm90
