// index_select: index_scores and select in one op, with the same bits.
//
//   in   as the two                                   out  a Selection; a Pool
//
// Tiles of rows stream through scores in the workspace, two launches a tile. The workspace:
// counters, what pieces of rows leave (sm90/select/split.cuh), scores, maxima of their blocks.
// Prefill has as many rows in a tile as fit, at least one, and tiles of equal size. The score
// kernel leaves the maxima, so that selection reads an eighth of what it would, and the scores of
// the best blocks.
//
// Pools have a kernel of their own (reindex.h). Where many rows share few entries, scores of all of
// them take less time; blocks outside of a row's pool are then hidden from the selection.
#include <algorithm>

#include "core/schedule.h"
#include "sm90/index/pool_mask.h"
#include "sm90/index/reindex.h"
#include "sm90/index/score_launch.h"
#include "sm90/kernels.h"
#include "sm90/select/cluster_top_k.cuh"
#include "sm90/select/select_clusters.h"
#include "sm90/select/split.cuh"

namespace flash_csa::sm90 {
namespace {

// Scores, and the maxima of their blocks. The workspace holds whole index tiles, so that all of a
// unit is stored: scores behind a row's last one mean nothing, maxima leave them out. One index for
// both, of 32 bits: addresses cost as much as maxima.
struct StoreMaxima {
    struct Params {
        float *out, *maxima;  // [rows, columns], [rows, columns / 8]: NaN where there is no number
        uint32_t columns;     // a multiple of kIndexTile
    };
    static constexpr int kSharedBytes = 0;

    const Params& to;

    __device__ StoreMaxima(const Params& params, uint8_t*) : to(params) {}
    __device__ void begin(const Segment&, int, int) {}
    __device__ void end(const Segment&, int, int) {}
    __device__ __forceinline__ void put(int64_t row, int32_t column, float score, bool visible) {
        const uint32_t at = index(row, column);
        to.out[at] = score;
        float best = visible ? score : bits_float(kNanBits);
        // Bits 2 .. 4 of a lane say which column of a block it has.
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        if (column % kPoolBlock == 0) to.maxima[at / kPoolBlock] = best;
    }
    __device__ __forceinline__ void put_four(int64_t row, int32_t column, const float4& scores,
                                             int32_t visible, bool here) {
        float best = bits_float(kNanBits);
        if (visible > 0) best = scores.x;
        if (visible > 1) best = fmaxf(best, scores.y);
        if (visible > 2) best = fmaxf(best, scores.z);
        if (visible > 3) best = fmaxf(best, scores.w);
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
        if (!here) return;
        const uint32_t at = index(row, column);
        // Those of prefill are more than the cache holds, and few are read: maxima stay there.
        __stcs(reinterpret_cast<float4*>(to.out + at), scores);
        if (column % kPoolBlock == 0) to.maxima[at / kPoolBlock] = best;
    }

  private:
    __device__ __forceinline__ uint32_t index(int64_t row, int32_t column) const {
        return static_cast<uint32_t>(row) * to.columns + static_cast<uint32_t>(column);
    }
};
constexpr int64_t kMostScores = UINT32_MAX;  // of a tile, by that index

// Whether pools are selected from a scan of all entries. docs/reindex.md has the crossover: so many
// rows of a request at least, and so many entries at most, by those of the pool.
constexpr int64_t kScanRows = 256;
constexpr float kScanEntries = 1.75f;

constexpr int64_t kTileGroup = 16;  // rows that share keys, with 32 heads

int64_t capacity_of(const IndexSelectParams& p) {
    return int64_t{p.scores.block_table.columns} * p.scores.index.page_size;
}

bool scans_pools(const IndexSelectParams& p) {
    IndexScoresParams all = p.scores;
    all.pool = {};
    const float most = kScanEntries * static_cast<float>(p.scores.pool.width * kPoolBlock);
    return p.scores.pool.blocks && p.scores.batch.max_rows >= kScanRows &&
           static_cast<float>(capacity_of(p)) <= most && capacity_of(p) <= kMostMaskedColumns &&
           takes_tiles(all) && p.select.k <= kMaxClusterTopK &&
           reinterpret_cast<uintptr_t>(p.scores.workspace.data) % sizeof(float4) == 0;
}

// How the workspace is used.
struct Plan {
    bool scans;            // pools
    int64_t columns;       // of a row of scores
    int64_t select_bytes;  // counters and pieces
    int64_t rows;          // that fit a tile; 0 where not even one does
};

Plan plan_of(const IndexSelectParams& p) {
    Plan plan;
    plan.scans = scans_pools(p);
    // Blocks of a pool are unique and ascending: what lies beyond the capacity is not visible.
    plan.columns = (capacity_of(p) + kIndexTile - 1) / kIndexTile * kIndexTile;
    if (p.scores.pool.blocks && !plan.scans) {
        plan.columns = std::min(plan.columns, int64_t{p.scores.pool.width} * kPoolBlock);
    }
    const int64_t blocks = plan.columns / kPoolBlock;
    const int64_t row_bytes = std::max<int64_t>(1, (plan.columns + blocks) * sizeof(float));
    const int64_t scratch = p.scores.workspace.bytes - kSyncBytes;
    const int64_t piece_bytes = PieceScratch(p.select.k, p.select.pool_out.width).bytes();
    const int64_t pieces = std::max<int64_t>(
        0, std::min<int64_t>(kMaxPieces, (scratch - row_bytes - 15) / piece_bytes));
    plan.select_bytes = kSyncBytes + (pieces * piece_bytes + 15) / 16 * 16;
    plan.rows = std::max<int64_t>(0, p.scores.workspace.bytes - plan.select_bytes) / row_bytes;
    plan.rows = std::min(plan.rows, kMostScores / std::max<int64_t>(1, plan.columns));
    return plan;
}

// Rows of each tile: as equal as whole groups let them be, of no more than fit.
int64_t tile_rows_of(int64_t all, int64_t fit) {
    const int64_t tiles = (all + fit - 1) / fit;
    const int64_t each = (all + tiles - 1) / tiles;
    return std::min(fit, (each + kTileGroup - 1) / kTileGroup * kTileGroup);
}

BatchView rows_of(BatchView batch, int64_t first, int64_t rows) {
    batch.positions += first;
    batch.row_request += first;
    batch.rows = static_cast<int32_t>(rows);
    return batch;
}

template <class T>
Matrix<T> rows_of(Matrix<T> matrix, int64_t first) {
    if (matrix) matrix.data = matrix.row(first);
    return matrix;
}

PoolView rows_of(PoolView pool, int64_t first) {
    pool.blocks = rows_of(pool.blocks, first);
    if (pool.counts) pool.counts += first;
    return pool;
}

// The same op for `rows` rows from `first` on, its scores in the workspace.
IndexSelectParams tile_of(const IndexSelectParams& p, const Plan& plan, int64_t first,
                          int64_t rows) {
    IndexSelectParams tile = p;
    IndexScoresParams& scores = tile.scores;
    scores.batch = rows_of(p.scores.batch, first, rows);
    scores.query.codes = rows_of(p.scores.query.codes, first);
    scores.query.scales_ue8m0 = rows_of(p.scores.query.scales_ue8m0, first);
    scores.query.scales_f32 = rows_of(p.scores.query.scales_f32, first);
    scores.weights.f32 = rows_of(p.scores.weights.f32, first);
    scores.weights.bf16 = rows_of(p.scores.weights.bf16, first);
    scores.pool = plan.scans ? PoolView{} : rows_of(p.scores.pool, first);
    scores.out = {reinterpret_cast<float*>(scores.workspace.data + plan.select_bytes),
                  plan.columns};
    scores.columns = plan.columns;

    SelectParams& select = tile.select;
    select.scores = {scores.out.data, plan.columns};
    select.columns = plan.columns;
    select.batch = scores.batch;
    select.pool = scores.pool;
    select.workspace.bytes = plan.select_bytes;
    select.out.positions = rows_of(p.select.out.positions, first);
    select.out.slots = rows_of(p.select.out.slots, first);
    select.out.lengths += first;
    select.out.scores = rows_of(p.select.out.scores, first);
    select.pool_out.blocks = rows_of(p.select.pool_out.blocks, first);
    if (select.pool_out.counts) select.pool_out.counts += first;
    select.pool_out.scores = rows_of(p.select.pool_out.scores, first);
    return tile;
}

// mask: the pools of a scan.
cudaError_t select_tile(const IndexSelectParams& tile, const PoolView& mask, cudaStream_t stream) {
    if (!takes_tiles(tile.scores) || !select_fits_clusters(tile.select)) {
        const cudaError_t error = index_scores(tile.scores, stream);
        return error != cudaSuccess ? error : select(tile.select, stream);
    }
    const Matrix<float>& out = tile.scores.out;
    const int64_t blocks = tile.scores.columns / kPoolBlock;
    const Matrix<float> maxima = {out.data + tile.scores.batch.rows * out.stride, blocks};
    cudaError_t error = score_tiles<StoreMaxima>(
        tile.scores, {out.data, maxima.data, static_cast<uint32_t>(out.stride)}, stream);
    if (error == cudaSuccess && mask.blocks) {
        error = mask_maxima(tile.scores, mask, maxima, stream);
    }
    if (error != cudaSuccess) return error;
    return select_by_maxima(tile.select, {maxima.data, blocks}, stream);
}

}  // namespace

cudaError_t index_select(const IndexSelectParams& p, cudaStream_t stream) {
    const Plan plan = plan_of(p);
    if (!plan.scans && reindex_fits(p)) return reindex(p, stream);
    const int64_t all = p.scores.batch.rows;
    if (all == 0) return cudaSuccess;
    if (plan.rows == 0) return cudaErrorInvalidValue;
    const int64_t rows = tile_rows_of(all, plan.rows);
    for (int64_t first = 0; first < all; first += rows) {
        const IndexSelectParams tile = tile_of(p, plan, first, std::min(rows, all - first));
        const PoolView mask = plan.scans ? rows_of(p.scores.pool, first) : PoolView{};
        const cudaError_t error = select_tile(tile, mask, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace flash_csa::sm90
