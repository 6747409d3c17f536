// Index scores: how relevant is each entry to a query row? core/scoring.h has the formula.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/score_keys.h"
#include "cpu/score_keys_vnni.h"
#include "cpu/score_tile.h"

namespace flash_csa::cpu {
namespace {

constexpr int32_t kTileColumns = 4096;  // a millisecond of work for 16 rows of 32 heads

template <class Format>
class TileScorerOf final : public TileScorer {
  public:
    explicit TileScorerOf(const IndexScoresParams& params) : p_(params) {}

    void load(int32_t first, int32_t end) override {
        const int32_t heads = p_.query.heads;
        queries_.resize(static_cast<size_t>(end - first) * heads);
        counts_.clear();
        widest_ = {};
        for (int32_t row = first; row < end; ++row) {
            const Columns columns = columns_of(p_, p_.index.page_size, p_.columns, row);
            counts_.push_back(columns.count);
            if (columns.count > widest_.count) widest_ = columns;
            for (int32_t h = 0; h < heads && columns.count > 0; ++h) {
                Format::load_head(p_, row, h, &queries_[(row - first) * heads + h]);
            }
        }
    }

    void score(int32_t begin, int32_t end, float* out, int64_t stride) override {
        out_ = {out, stride};
        begin_ = begin;
        for_each_run(widest_, begin, std::min(end, widest_.count),
                     [&](int32_t column, int32_t length, int32_t slot) {
                         if (p_.index.holds(slot)) {
                             add_keys(column, length, slot);
                         } else if (slot != kHidden) {
                             put_absent(column, length);
                         }
                     });
        flush();
    }

  private:
    // A run of keys of one page. Index records are page-split: their rows are adjacent.
    void add_keys(int32_t column, int32_t length, int32_t slot) {
        const Record r = record(p_.index.record);
        const uint8_t* row = p_.index.row(r, slot);
        const uint8_t* scales = p_.index.scales(r, slot);
        for (int32_t i = 0; i < length; ++i, row += r.data_bytes, scales += r.scale_bytes) {
            lane_columns_[lanes_] = column + i;
            pointers_.rows[lanes_] = row;
            pointers_.scales[lanes_] = scales;
            if (++lanes_ == kLanes) flush();
        }
    }

    // Scores the collected keys.
    void flush() {
        if (lanes_ == 0) return;
        for (int i = lanes_; i < kLanes; ++i) {  // idle lanes repeat a key
            pointers_.rows[i] = pointers_.rows[0];
            pointers_.scales[i] = pointers_.scales[0];
        }
        Format::load_keys(pointers_, &keys_);
        for (size_t row = 0; row < counts_.size(); ++row) {
            int visible = lanes_;  // columns ascend
            while (visible > 0 && lane_columns_[visible - 1] >= counts_[row]) --visible;
            if (visible == 0) continue;
            float scores[kLanes];
            Format::score_row(keys_, queries_.data() + row * p_.query.heads, p_.query.heads,
                              scores);
            float* out = out_.row(row);
            for (int i = 0; i < visible; ++i) out[lane_columns_[i] - begin_] = scores[i];
        }
        lanes_ = 0;
    }

    void put_absent(int32_t column, int32_t length) {
        for (size_t row = 0; row < counts_.size(); ++row) {
            const int32_t end = std::min(column + length, counts_[row]);
            for (int32_t c = column; c < end; ++c) out_.row(row)[c - begin_] = bits_float(kNanBits);
        }
    }

    const IndexScoresParams& p_;
    std::vector<typename Format::Head> queries_;  // [rows of the tile, heads]
    std::vector<int32_t> counts_;                 // columns of each row
    Columns widest_;                              // of the row that has most
    Matrix<float> out_;
    int32_t begin_ = 0;  // column of out_'s first
    // The keys at hand.
    typename Format::Keys keys_;
    KeyPointers pointers_;
    int32_t lane_columns_[kLanes];
    int lanes_ = 0;
};

}  // namespace

std::unique_ptr<TileScorer> make_tile_scorer(const IndexScoresParams& p) {
    if (p.index.record == RecordId::IndexFp8) {
        return std::make_unique<TileScorerOf<Portable<Fp8>>>(p);
    }
#ifdef FCSA_HAS_VNNI
    if (current_level >= Level::Avx512Vnni) return std::make_unique<TileScorerOf<Fp4Vnni>>(p);
#endif
    return std::make_unique<TileScorerOf<Portable<Fp4>>>(p);
}

void index_scores(const IndexScoresParams& p) {
    const std::vector<Tile> tiles =
        tiles_of(p, p.index.page_size, p.columns, max_tile_rows(p), kTileColumns);
    const int64_t num_tiles = static_cast<int64_t>(tiles.size());
    parallel_tasks(num_tiles, [&](const auto& next) {
        const std::unique_ptr<TileScorer> scorer = make_tile_scorer(p);
        for (int64_t i = next(); i < num_tiles; i = next()) {
            const Tile& tile = tiles[i];
            scorer->load(tile.first, tile.end);
            scorer->score(tile.begin, tile.stop, p.out.row(tile.first) + tile.begin, p.out.stride);
        }
    });
}

}  // namespace flash_csa::cpu
