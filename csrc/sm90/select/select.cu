// select: exact top-k of each row's scores, and the candidate pool of its best blocks.
//
//   in   scores [R, columns], block table, pool       out  positions, slots, lengths; pool
//
// A block of threads takes a row, or a piece of one where there are few rows. The pieces of a row
// leave their best in the workspace; the block that comes last selects from those. Ties go to the
// lower position and pieces are in ascending order, so nothing depends on how a row is cut.
//
// Floor: 4 bytes a column. A row is read three or four times (as often again for a pool), all but
// the first mostly from L2. Limits: none on k; 2^31 columns.
#include "sm90/common/launch.h"
#include "sm90/select/results.cuh"
#include "sm90/select/row_keys.cuh"
#include "sm90/select/select_clusters.h"
#include "sm90/select/split.cuh"

namespace flash_csa::sm90 {
namespace {

struct Shared {
    TopKShared top_k;
    ScoreRow row;
    bool last;
};

// Blocks of columns of a piece; the first piece is never absent.
__device__ BlockRange range_of(int32_t num_blocks, int32_t pieces, int32_t piece) {
    const int32_t each = (num_blocks + pieces - 1) / pieces;
    const int32_t begin = min(piece * each, num_blocks);
    return {begin, min(begin + each, num_blocks)};
}

__device__ int32_t pieces_of(int32_t columns, int32_t split) {
    return min(split, max(1, columns / kMinPieceColumns));
}

template <class Source>
__device__ void keep(const Source& source, int32_t k, const Kept& kept, TopKShared& shared) {
    const int32_t count = top_k(source, k, shared, [&](int32_t i, int32_t id, uint32_t key) {
        kept.pairs[i] = {key, static_cast<uint32_t>(id)};
    });
    if (threadIdx.x == 0) *kept.count = count;
}

// True in the block that comes last of `pieces`, which then sees what the others wrote.
__device__ bool comes_last(uint32_t* counter, int32_t pieces, Shared& shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.last = atomicAdd(counter, 1u) == static_cast<uint32_t>(pieces) - 1;
        if (shared.last) *counter = 0;
    }
    __syncthreads();
    if (shared.last) __threadfence();
    return shared.last;
}

__global__ void __launch_bounds__(kTopKThreads, 2) select_kernel(SelectParams p, int32_t split) {
    __shared__ Shared shared;
    const int64_t row = blockIdx.x / static_cast<uint32_t>(split);
    const int32_t piece = blockIdx.x % static_cast<uint32_t>(split);
    if (threadIdx.x == 0) {
        shared.row = {columns_of(p, p.page_size, p.columns, row), p.scores.row(row)};
    }
    __syncthreads();
    const ScoreRow& keys = shared.row;
    const int32_t pieces = pieces_of(keys.columns.count, split);
    if (piece >= pieces) return;
    const BlockRange blocks = range_of(keys.num_blocks(), pieces, piece);
    const int32_t newest = keys.columns.n_vis > 0 ? (keys.columns.n_vis - 1) / kPoolBlock : -1;
    const uint32_t newest_key = p.pool_out.blocks && newest >= 0 ? keys.block_key(newest) : 0;
    if (pieces == 1) {
        write_selection(p.out, row, p.k, keys.columns, EntryKeys{keys, blocks}, shared.top_k);
        if (p.pool_out.blocks) {
            write_pool(p.pool_out, row, newest_key, BlockKeys{keys, blocks, newest}, shared.top_k);
        }
        return;
    }

    const PieceScratch scratch(p.k, p.pool_out.width);
    uint8_t* of_row = p.workspace.data + kSyncBytes + row * split * scratch.bytes();
    uint8_t* own = of_row + piece * scratch.bytes();
    keep(EntryKeys{keys, blocks}, p.k, scratch.entries(own), shared.top_k);
    if (p.pool_out.blocks) {
        keep(BlockKeys{keys, blocks, newest}, p.pool_out.width, scratch.blocks(own), shared.top_k);
    }
    uint32_t* counter = reinterpret_cast<uint32_t*>(p.workspace.data) + row;
    if (!comes_last(counter, pieces, shared)) return;
    write_selection(p.out, row, p.k, keys.columns,
                    KeptKeys{scratch.entries(of_row), scratch.bytes(), pieces}, shared.top_k);
    if (p.pool_out.blocks) {
        write_pool(p.pool_out, row, newest_key,
                   KeptKeys{scratch.blocks(of_row), scratch.bytes(), pieces}, shared.top_k);
    }
}

}  // namespace

cudaError_t select(const SelectParams& p, cudaStream_t stream) {
    if (select_fits_clusters(p)) return select_clusters(p, stream);
    const int32_t split = split_of(p);
    return launch(select_kernel, blocks_for(int64_t{p.batch.rows} * split, 1), kTopKThreads, 0,
                  stream, p, split);
}

}  // namespace flash_csa::sm90
