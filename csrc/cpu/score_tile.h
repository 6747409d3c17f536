// Scores of a tile of rows, a few columns at a time: what index_scores writes out and index_select
// consumes on the spot.
#pragma once

#include <cstdint>
#include <memory>

#include "core/params.h"
#include "cpu/columns.h"

namespace flash_csa::cpu {

class TileScorer {
  public:
    virtual ~TileScorer() = default;

    // Takes up rows [first, end): of one request, at most max_tile_rows.
    virtual void load(int32_t first, int32_t end) = 0;

    // Column c of row first + r goes to out[r * stride + c - begin], for the columns c of
    // [begin, end) that are visible in that row; NaN where the entry is absent. Other columns are
    // left alone.
    virtual void score(int32_t begin, int32_t end, float* out, int64_t stride) = 0;
};

// One per thread. Picks the code for the record and the processor.
std::unique_ptr<TileScorer> make_tile_scorer(const IndexScoresParams& p);

// Rows share decoded keys: enough of them to make decoding cheap, few enough that their queries
// stay in the L2 cache. A row with a pool has its own keys.
inline int32_t max_tile_rows(const IndexScoresParams& p) { return p.pool.blocks ? 1 : 16; }

}  // namespace flash_csa::cpu
