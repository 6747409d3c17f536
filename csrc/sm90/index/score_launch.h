// Host side of the score kernels: which shapes they take, and one launch.
#pragma once

#include <algorithm>

#include "sm90/common/launch.h"
#include "sm90/index/score_rows.cuh"
#include "sm90/index/score_single.cuh"
#include "sm90/index/score_tile.cuh"

namespace flash_csa::sm90 {

// FP4 keys and queries of all entries; page sizes that are powers of two, so that a page holds
// whole pieces of a run.
inline bool takes_tiles(const IndexScoresParams& p) {
    const int32_t size = p.index.page_size;
    return p.index.record == RecordId::IndexFp4 && p.query.scales_ue8m0 && !p.pool.blocks &&
           size >= 8 && size <= kMaxPageSize && (size & (size - 1)) == 0;
}

inline ScorePlan plan_scores(const IndexScoresParams& p, int32_t heads_of_mma) {
    ScorePlan plan;
    plan.padded_heads = (p.query.heads + heads_of_mma - 1) / heads_of_mma * heads_of_mma;
    // At most 128 heads: four rows fit.
    const int32_t fit = kQueryTile / (2 * plan.padded_heads * kQueryBytes) / 4 * 4;
    plan.max_rows = std::max(1, std::min({p.batch.max_rows, fit, p.batch.rows, kMaxGroupRows}));
    plan.num_stages = kMaxStages;
    return plan;
}

template <class Config>
cudaError_t launch_score_tiles(const IndexScoresParams& p, ScorePlan plan,
                               const typename Config::Sink::Params& sink, cudaStream_t stream) {
    while (ScoreShared<Config>(nullptr, plan).bytes > kSmemOptIn) plan.num_stages -= kFeeders;
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    return launch_after(score_kernel<Config>, dim3(sms), Config::kThreads,
                        ScoreShared<Config>(nullptr, plan).bytes, stream, p, plan, sink);
}

// A kernel of groups of four warps, each with keys of its own.
template <class Shared, class Sink>
cudaError_t launch_score_rows(void (*kernel)(IndexScoresParams, typename Sink::Params),
                              const IndexScoresParams& p, const typename Sink::Params& sink,
                              cudaStream_t stream) {
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    return launch_after(kernel, dim3(sms), kRowThreads, sizeof(Shared), stream, p, sink);
}

template <int kHeads, class Sink>
cudaError_t launch_score_tiles(const IndexScoresParams& p, const typename Sink::Params& sink,
                               cudaStream_t stream) {
    const ScorePlan plan = plan_scores(p, kHeads);
    if (plan.max_rows == 1 && plan.padded_heads == kHeads) {
        if (p.batch.rows == 1) {
            return launch_score_rows<SingleShared<kHeads>, Sink>(score_single_kernel<kHeads, Sink>,
                                                                 p, sink, stream);
        }
        return launch_score_rows<RowsShared<kHeads, 1>, Sink>(score_rows_kernel<kHeads, 1, Sink>, p,
                                                              sink, stream);
    }
    if constexpr (kHeads == 32) {
        if (plan.max_rows == 1 && plan.padded_heads == 2 * kHeads) {
            return launch_score_rows<RowsShared<kHeads, 2>, Sink>(
                score_rows_kernel<kHeads, 2, Sink>, p, sink, stream);
        }
    }
    return launch_score_tiles<ScoreConfig<kHeads, Sink>>(p, plan, sink, stream);
}

// Scores of every visible entry, handed to a sink (score_tile.cuh). takes_tiles(p) holds.
template <class Sink>
cudaError_t score_tiles(const IndexScoresParams& p, const typename Sink::Params& sink,
                        cudaStream_t stream) {
    if (p.batch.rows == 0) return cudaSuccess;
    if (p.query.heads <= 8) return launch_score_tiles<8, Sink>(p, sink, stream);
    if (p.query.heads <= 16) return launch_score_tiles<16, Sink>(p, sink, stream);
    return launch_score_tiles<32, Sink>(p, sink, stream);
}

}  // namespace flash_csa::sm90
