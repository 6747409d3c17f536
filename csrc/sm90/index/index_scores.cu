// index_scores: how relevant is each entry to a query row? core/scoring.h has the formula.
//
//   in   index pages, queries, weights, block table      out  scores [R, columns]
//
// The tensor-core kernel of score_tile.cuh with a sink that stores. docs/index.md has its budget.
#include "sm90/index/index_scores.h"
#include "sm90/index/score_launch.h"

namespace flash_csa::sm90 {
namespace {

struct StoreScores {
    struct Params {
        Matrix<float> out;
    };
    static constexpr int kSharedBytes = 0;

    Matrix<float> out;

    __device__ StoreScores(const Params& params, uint8_t*) : out(params.out) {}
    __device__ void begin(const Segment&, int, int) {}
    __device__ void end(const Segment&, int, int) {}
    __device__ __forceinline__ void put(int64_t row, int32_t column, float score, bool visible) {
        if (visible) out.row(row)[column] = score;
    }
    __device__ __forceinline__ void put_four(int64_t row, int32_t column, const float4& scores,
                                             int32_t visible, bool here) {
        if (here) store_four(out, row, column, canonical_nans(scores), visible);
    }
};

}  // namespace

cudaError_t index_scores(const IndexScoresParams& p, cudaStream_t stream) {
    if (p.index.record == RecordId::IndexFp8) return index_scores_fp8(p, stream);
    if (!takes_tiles(p)) return index_scores_plain(p, stream);
    return score_tiles<StoreScores>(p, {p.out}, stream);
}

}  // namespace flash_csa::sm90
