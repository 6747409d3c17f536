// Exact top-k of scores and the candidate pool of best blocks; alone, or fused with the scoring.
//
// Rows stream through a TopK a chunk of columns at a time, in ascending position, so scratch does
// not grow with the number of entries. Where there are few rows, their columns are cut into ranges
// for the threads; the results of the ranges stream through a TopK again.
#include <thread>
#include <vector>

#include "cpu/columns.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/score_tile.h"
#include "cpu/simd.h"
#include "cpu/topk.h"
#include "cpu/write_lists.h"

namespace flash_csa::cpu {
namespace {

constexpr int32_t kChunk = 2048;  // columns
constexpr int32_t kChunkBlocks = kChunk / kPoolBlock;
static_assert(kChunkBlocks % kScan == 0, "TopK takes whole scans");
constexpr int32_t kMinRange = 8 * kChunk;  // columns worth a task of their own

inline void order_keys_body(const float* scores, int32_t n, uint32_t* keys) {
    FCSA_VECTORISE for (int32_t i = 0; i < n; ++i) keys[i] = order_key(scores[i]);
}

// Largest key of each block of kPoolBlock.
inline void block_keys_body(const uint32_t* keys, uint32_t* out) {
    for (int32_t b = 0; b < kChunkBlocks; ++b) {
        uint32_t best = 0;
        for (int32_t i = 0; i < kPoolBlock; ++i) best = max_u32(best, keys[b * kPoolBlock + i]);
        out[b] = best;
    }
}

// What one row has seen of its columns.
struct RowState {
    Columns columns;
    TopK entries;             // id: column
    TopK blocks;              // id: block of the pool to build
    uint32_t newest_key = 0;  // of the block that holds the newest position, which is forced in

    void reset(const SelectParams& p, int64_t width, int64_t row) {
        columns = columns_of(p, p.page_size, width, row);
        entries.reset(p.k);
        blocks.reset(p.pool_out.width);
        newest_key = 0;
    }
};

// Takes in the scores of columns [begin, end), at most kChunk, begin a multiple of kPoolBlock.
void take_chunk(const SelectParams& p, const float* scores, int32_t begin, int32_t end,
                RowState* state) {
    uint32_t keys[kChunk];
    const int32_t n = end - begin;
    per_level<order_keys_body>(scores, n, &keys[0]);
    std::fill(keys + n, keys + kChunk, 0u);
    for_each_run(state->columns, begin, end, [&](int32_t column, int32_t length, int32_t slot) {
        if (slot < 0) std::fill_n(keys + (column - begin), length, 0u);
    });
    state->entries.push(keys, kChunk, begin);
    if (!p.pool_out.blocks) return;

    uint32_t block_keys[kChunkBlocks];
    per_level<block_keys_body>(&keys[0], &block_keys[0]);
    const int32_t first = begin / kPoolBlock;
    const int32_t newest = (state->columns.n_vis - 1) / kPoolBlock - first;
    if (newest < kChunkBlocks) {  // not below 0, as the chunk begins in the visible columns
        state->newest_key = block_keys[newest];
        block_keys[newest] = kForcedKey;
    }
    state->blocks.push(block_keys, kChunkBlocks, first);
}

void write_results(const SelectParams& p, int64_t row, RowState* state) {
    state->entries.finish();
    write_selection(p.out, row, p.k, state->entries, state->columns);
    if (!p.pool_out.blocks) return;
    state->blocks.finish();
    write_pool(p.pool_out, row, state->blocks, state->newest_key);
}

// Joins the states of a row's column ranges, parts[..][r], into one.
void join(const std::vector<RowState>* parts, int64_t num_parts, int32_t r, RowState* state) {
    for (int64_t i = 0; i < num_parts; ++i) {
        const RowState& part = parts[i][r];
        for (int32_t j = 0; j < part.entries.size(); ++j) {
            state->entries.push(part.entries.key(j), part.entries.id(j));
        }
        for (int32_t j = 0; j < part.blocks.size(); ++j) {
            state->blocks.push(part.blocks.key(j), part.blocks.id(j));
        }
        state->newest_key = max_u32(state->newest_key, part.newest_key);
    }
}

// Where scores come from: memory ...
class StoredScores {
  public:
    explicit StoredScores(const SelectParams& p) : scores_(p.scores) {}
    void load(const Tile& tile) { first_ = tile.first; }
    void fetch(int32_t, int32_t) {}
    const float* row(int32_t r, int32_t begin) const { return scores_.row(first_ + r) + begin; }

  private:
    Matrix<const float> scores_;
    int32_t first_ = 0;
};

// ... or the queries and keys, a chunk at a time.
class ComputedScores {
  public:
    explicit ComputedScores(const IndexScoresParams& p)
        : scorer_(make_tile_scorer(p)), scores_(static_cast<size_t>(max_tile_rows(p)) * kChunk) {}
    void load(const Tile& tile) { scorer_->load(tile.first, tile.end); }
    void fetch(int32_t begin, int32_t end) { scorer_->score(begin, end, scores_.data(), kChunk); }
    const float* row(int32_t r, int32_t) const { return scores_.data() + int64_t{r} * kChunk; }

  private:
    std::unique_ptr<TileScorer> scorer_;
    std::vector<float> scores_;  // [rows of the tile, kChunk]
};

template <class Source>
void stream(const SelectParams& p, int64_t width, const Tile& tile, Source* source,
            RowState* states) {
    const int32_t rows = tile.end - tile.first;
    for (int32_t r = 0; r < rows; ++r) states[r].reset(p, width, tile.first + r);
    source->load(tile);
    for (int64_t begin = tile.begin; begin < tile.stop; begin += kChunk) {
        const int32_t end = static_cast<int32_t>(std::min<int64_t>(begin + kChunk, tile.stop));
        source->fetch(begin, end);
        for (int32_t r = 0; r < rows; ++r) {
            const int32_t row_end = std::min(end, states[r].columns.count);
            if (begin < row_end) take_chunk(p, source->row(r, begin), begin, row_end, &states[r]);
        }
    }
}

// Columns of a tile: all that there are, unless that would leave threads idle.
int32_t range_columns(const SelectParams& p, int64_t width, int32_t max_rows) {
    int64_t columns = 0;
    for (int32_t row = 0; row < p.batch.rows; ++row) {
        columns = std::max<int64_t>(columns, columns_of(p, p.page_size, width, row).count);
    }
    const int64_t row_tiles = (p.batch.rows + max_rows - 1) / max_rows;
    const int64_t tasks = 2 * int64_t{std::max(1u, std::thread::hardware_concurrency())};
    const int64_t ranges = std::max<int64_t>(1, tasks / std::max<int64_t>(1, row_tiles));
    const int64_t range = std::max<int64_t>(kMinRange, (columns + ranges - 1) / ranges);
    return static_cast<int32_t>(std::min<int64_t>(range, INT32_MAX - kChunk) + kChunk - 1) /
           kChunk * kChunk;
}

// make_source() gives a thread its Source.
template <class MakeSource>
void select_rows(const SelectParams& p, int64_t width, int32_t max_rows,
                 const MakeSource& make_source) {
    const std::vector<Tile> tiles =
        tiles_of(p, p.page_size, width, max_rows, range_columns(p, width, max_rows));
    const int64_t num_tiles = static_cast<int64_t>(tiles.size());
    std::vector<int64_t> cut;  // first tiles of the rows that are cut into ranges
    for (int64_t i = 0; i < num_tiles; ++i) {
        if (tiles[i].begin == 0 && tiles_of_rows(tiles, i) > 1) cut.push_back(i);
    }

    std::vector<std::vector<RowState>> parts(num_tiles);  // what the ranges of those rows gave
    parallel_tasks(num_tiles, [&](const auto& next) {
        auto source = make_source();
        std::vector<RowState> scratch;
        for (int64_t i = next(); i < num_tiles; i = next()) {
            const Tile& tile = tiles[i];
            const bool whole = tile.begin == 0 && tiles_of_rows(tiles, i) == 1;
            std::vector<RowState>& states = whole ? scratch : parts[i];
            states.resize(std::max<size_t>(states.size(), tile.end - tile.first));
            stream(p, width, tile, &source, states.data());
            for (int32_t row = tile.first; row < tile.end; ++row) {
                RowState& state = states[row - tile.first];
                if (whole) {
                    write_results(p, row, &state);
                } else {
                    state.entries.compact();
                    state.blocks.compact();
                }
            }
        }
    });

    const int64_t num_cut = static_cast<int64_t>(cut.size());
    parallel_tasks(num_cut, [&](const auto& next) {
        RowState state;
        for (int64_t i = next(); i < num_cut; i = next()) {
            const int64_t head = cut[i];
            for (int32_t row = tiles[head].first; row < tiles[head].end; ++row) {
                state.reset(p, width, row);
                join(&parts[head], tiles_of_rows(tiles, head), row - tiles[head].first, &state);
                write_results(p, row, &state);
            }
        }
    });
}

}  // namespace

void select(const SelectParams& p) {
    select_rows(p, p.columns, 1, [&] { return StoredScores(p); });
}

void index_select(const IndexSelectParams& p) {
    IndexScoresParams scores = p.scores;
    scores.columns = INT32_MAX;  // no matrix bounds them
    select_rows(p.select, INT32_MAX, max_tile_rows(scores), [&] { return ComputedScores(scores); });
}

}  // namespace flash_csa::cpu
