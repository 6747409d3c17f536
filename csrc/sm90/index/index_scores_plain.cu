// index_scores of IndexFp4 keys that the tensor-core kernel does not take: pools, odd page sizes.
//
//   in   index pages, queries, weights, block table      out  scores [R, columns]
//
// A block takes a few consecutive rows, whose queries it holds decoded in shared memory, and every
// `slices`-th tile of columns. A thread takes a column: it decodes the key once into registers for
// all rows of the same request. The products are dp4a on half units, exact.
//
// Floor: 68 bytes a key, far below what this kernel takes: dp4a binds, 32 a key,
// row and head, 64 a cycle and SM. Limits: 1 to 128 heads, any page size.
#include <algorithm>

#include "core/columns.h"
#include "sm90/common/launch.h"
#include "sm90/index/index_scores.h"
#include "sm90/index/score_keys.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 128;           // columns of a tile
constexpr int kMaxRows = 8;             // that share a decoded key
constexpr int kQueryBytes = 48 * 1024;  // of shared memory: several blocks fit an SM
constexpr int64_t kBlocks = 4096;       // a few waves on 132 SMs

struct Plan {
    int32_t rows;    // of a block
    int32_t slices;  // blocks that share a group of rows
};

// Loads the key of a column. False where the entry is on no page.
__device__ __forceinline__ bool load_entry(const ConstPages& index, int32_t slot, Fp4::Key* key) {
    constexpr Record r = record(Fp4::kRecord);
    if (!index.holds(slot)) return false;
    Fp4::load_key(index.row(r, slot), index.scales(r, slot), key);
    return true;
}

__global__ void __launch_bounds__(kThreads, 6)
    index_scores_kernel(const __grid_constant__ IndexScoresParams p, Plan plan) {
    using Head = Fp4::Head;
    extern __shared__ uint4 shared_bytes[];
    Columns* sColumns = reinterpret_cast<Columns*>(shared_bytes);  // [kMaxRows]
    Head* sHeads = reinterpret_cast<Head*>(sColumns + kMaxRows);   // [rows, heads]
    static_assert(kMaxRows * sizeof(Columns) % alignof(Head) == 0);
    const int thread = threadIdx.x;
    const int32_t slice = blockIdx.x % static_cast<uint32_t>(plan.slices);
    const int64_t first_row = int64_t{blockIdx.x / static_cast<uint32_t>(plan.slices)} * plan.rows;
    const int32_t rows = static_cast<int32_t>(min(int64_t{plan.rows}, p.batch.rows - first_row));
    if (thread < rows) {
        sColumns[thread] = columns_of(p, p.index.page_size, p.columns, first_row + thread);
    }
    __syncthreads();
    int32_t count = 0;
    for (int32_t row = 0; row < rows; ++row) count = max(count, sColumns[row].count);
    if (int64_t{slice} * kThreads >= count) return;
    for (int32_t i = thread; i < rows * p.query.heads; i += kThreads) {
        Fp4::load_head(p, first_row + i / p.query.heads, i % p.query.heads, &sHeads[i]);
    }
    __syncthreads();

    for (int64_t tile = slice; tile * kThreads < count; tile += plan.slices) {
        const int32_t column = static_cast<int32_t>(tile * kThreads) + thread;
        Fp4::Key key;
        bool present = false;
        const int32_t* loaded = nullptr;  // pages of the request whose key is in registers
        for (int32_t row = 0; row < rows; ++row) {
            const Columns& columns = sColumns[row];
            if (column >= columns.count) continue;
            if (columns.pages != loaded) {
                const int64_t position = columns.position(column);
                if (!columns.visible(position)) continue;  // only in a pool: one row
                const int32_t slot = columns.slot(static_cast<int32_t>(position));
                present = load_entry(p.index, slot, &key);
                loaded = columns.pages;
            }
            p.out.row(first_row + row)[column] =
                present ? score_of(key, sHeads + row * p.query.heads, p.query.heads)
                        : bits_float(kNanBits);
        }
    }
}

}  // namespace

cudaError_t index_scores_plain(const IndexScoresParams& p, cudaStream_t stream) {
    const int64_t row_bytes = int64_t{p.query.heads} * sizeof(Fp4::Head);
    const int64_t capacity = p.pool.blocks ? int64_t{p.pool.width} * kPoolBlock
                                           : int64_t{p.block_table.columns} * p.index.page_size;
    Plan plan;
    // A row with a pool has its own keys.
    plan.rows = p.pool.blocks ? 1 : std::min(p.batch.max_rows, kMaxRows);
    plan.rows = std::max(1, std::min(plan.rows, static_cast<int32_t>(kQueryBytes / row_bytes)));
    const int64_t groups = (int64_t{p.batch.rows} + plan.rows - 1) / plan.rows;
    const int64_t tiles = (std::min(capacity, p.columns) + kThreads - 1) / kThreads;
    if (groups == 0 || tiles == 0) return cudaSuccess;
    plan.slices = static_cast<int32_t>(std::min(tiles, std::max<int64_t>(1, kBlocks / groups)));
    return launch(index_scores_kernel, blocks_for(groups * plan.slices, 1), kThreads,
                  kMaxRows * sizeof(Columns) + plan.rows * row_bytes, stream, p, plan);
}

}  // namespace flash_csa::sm90
