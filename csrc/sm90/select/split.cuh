// How select cuts rows into pieces where there are few of them, and what the pieces leave in the
// workspace: the count and the (key, id) pairs of their best entries, then of their best blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "core/schedule.h"

namespace flash_csa::sm90 {

inline constexpr int32_t kMinPieceColumns = 8192;  // one sweep of a block of threads
inline constexpr int32_t kMaxPieces = 128;         // of all rows: about one an SM

// The list that one piece leaves.
struct Kept {
    int32_t* count;
    uint2* pairs;
};

class PieceScratch {
  public:
    FCSA_HD PieceScratch(int32_t k, int32_t pool_blocks) : k_(k), pool_blocks_(pool_blocks) {}
    FCSA_HD int64_t bytes() const { return list_bytes(k_) + list_bytes(pool_blocks_); }
    FCSA_HD Kept entries(uint8_t* piece) const { return list(piece); }
    FCSA_HD Kept blocks(uint8_t* piece) const { return list(piece + list_bytes(k_)); }

  private:
    static FCSA_HD int64_t list_bytes(int64_t pairs) {
        return sizeof(uint2) + pairs * sizeof(uint2);  // the count takes the place of a pair
    }
    static FCSA_HD Kept list(uint8_t* at) {
        return {reinterpret_cast<int32_t*>(at), reinterpret_cast<uint2*>(at) + 1};
    }
    int32_t k_, pool_blocks_;
};

// Pieces of a row at most; a row of fewer columns has fewer.
inline int32_t split_of(const SelectParams& p) {
    constexpr int64_t kCounters = kSyncBytes / sizeof(uint32_t);
    const int64_t rows = p.batch.rows;
    if (rows == 0 || rows > kCounters) return 1;
    const int64_t scratch = p.workspace.bytes - kSyncBytes;
    const int64_t fitting = scratch / PieceScratch(p.k, p.pool_out.width).bytes();
    int64_t pieces = std::min<int64_t>(kMaxPieces, fitting) / rows;
    // The last block has pieces * wanted pairs to go through: no more than a piece has columns.
    const int64_t wanted = int64_t{p.k} + p.pool_out.width;
    while (pieces > 1 && pieces * pieces * wanted > p.columns) --pieces;
    return static_cast<int32_t>(std::max<int64_t>(pieces, 1));
}

}  // namespace flash_csa::sm90
