// The portable back end: one entry point per op. Runs on PyTorch's threads; gives the same bits for
// any number of threads and at every instruction level.
#pragma once

#include "core/params.h"

namespace flash_csa::cpu {

void store(const StoreParams& p);
void load(const LoadParams& p);
void rope_store(const RopeStoreParams& p);
void quantize_query(const QuantizeQueryParams& p);
void compress(const CompressParams& p);
void index_scores(const IndexScoresParams& p);
void select(const SelectParams& p);
void index_select(const IndexSelectParams& p);
void normalize_pool(const NormalizePoolParams& p);
void attend(const AttendParams& p);
void merge(const MergeParams& p);
void merge_selections(const MergeSelectionsParams& p);
void merge_pools(const MergePoolsParams& p);
void step_slots(const StepSlotsParams& p);
void schedule(const ScheduleParams& p);

}  // namespace flash_csa::cpu
