// Pools from foreign lists, and the joining of selections and pools of several shards.
#include <algorithm>
#include <vector>

#include "cpu/columns.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/topk.h"
#include "cpu/write_lists.h"

namespace flash_csa::cpu {
namespace {

// The ids of a row in all shards, each with the best of its keys, by ascending id.
class ShardRow {
  public:
    // ids and scores: [parts, rows, n] packed; ids below 0 are padding.
    void gather(const int32_t* ids, const float* scores, int32_t parts, int64_t rows, int32_t n,
                int64_t row) {
        pairs_.clear();
        for (int32_t part = 0; part < parts; ++part) {
            const int64_t at = (part * rows + row) * n;
            for (int64_t i = at; i < at + n; ++i) {
                if (ids[i] >= 0) add(ids[i], order_key(scores[i]));
            }
        }
    }

    // Best key of an id, 0 if no shard has it.
    uint32_t key_of(int32_t id) const {
        uint32_t key = 0;
        for (const Pair& pair : pairs_) key = pair.id == id ? max_u32(key, pair.key) : key;
        return key;
    }

    void add(int32_t id, uint32_t key) { pairs_.push_back({id, key}); }

    void select(int32_t k, TopK* best) {
        // Within an id by descending key, so that the first is the one to keep.
        std::sort(pairs_.begin(), pairs_.end(), [](const Pair& a, const Pair& b) {
            return a.id != b.id ? a.id < b.id : a.key > b.key;
        });
        best->reset(k);
        int32_t previous = -1;
        for (const Pair& pair : pairs_) {
            if (pair.id != previous) best->push(pair.key, pair.id);
            previous = pair.id;
        }
        best->finish();
    }

  private:
    struct Pair {
        int32_t id;
        uint32_t key;
    };
    std::vector<Pair> pairs_;
};

}  // namespace

void normalize_pool(const NormalizePoolParams& p) {
    parallel_tasks(p.rows, [&](const auto& next) {
        std::vector<int32_t> kept;
        for (int64_t row = next(); row < p.rows; row = next()) {
            const int32_t n_vis = visible_count(p.positions[row], p.ratio, p.strict, p.max_entries);
            const int32_t* blocks = p.blocks.row(row);
            kept.clear();
            for (int32_t i = 0; i < p.n; ++i) {
                if (blocks[i] >= 0 && int64_t{blocks[i]} * kPoolBlock < n_vis) {
                    kept.push_back(blocks[i]);
                }
            }
            std::sort(kept.begin(), kept.end());
            kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
            int32_t* out = p.out.blocks.row(row);
            std::fill(std::copy(kept.begin(), kept.end(), out), out + p.out.width, -1);
            p.out.counts[row] = static_cast<int32_t>(kept.size());
        }
    });
}

void merge_selections(const MergeSelectionsParams& p) {
    parallel_tasks(p.rows, [&](const auto& next) {
        ShardRow shards;
        TopK best;
        for (int64_t row = next(); row < p.rows; row = next()) {
            shards.gather(p.positions, p.scores, p.parts, p.rows, p.k_in, row);
            shards.select(p.k, &best);
            const Columns columns = columns_of(p, row);
            write_selection(p.out, row, p.k, best, columns);
        }
    });
}

void merge_pools(const MergePoolsParams& p) {
    parallel_tasks(p.rows, [&](const auto& next) {
        ShardRow shards;
        TopK best;
        for (int64_t row = next(); row < p.rows; row = next()) {
            shards.gather(p.blocks, p.scores, p.parts, p.rows, p.n, row);
            const int32_t n_vis = visible_count(p.positions[row], p.ratio, p.strict, INT32_MAX);
            uint32_t newest_key = 0;
            if (n_vis > 0) {
                const int32_t newest = (n_vis - 1) / kPoolBlock;
                newest_key = shards.key_of(newest);
                shards.add(newest, kForcedKey);
            }
            shards.select(p.out.width, &best);
            write_pool(p.out, row, best, newest_key);
        }
    });
}

}  // namespace flash_csa::cpu
