// Parts of few_rows.cu with 32 and 64 heads: shared memory.
//
// A tile is panels of 64 dims; a warpgroup has 128 dims (two panels) of the output.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sm90/attend/few_rows.cuh"
#include "sm90/common/cluster.h"

namespace flash_csa::sm90::few_rows::two_tiles {

inline constexpr int kPanelBytes = kTile * kPanelRowBytes;

// Warps that start copies, and records of each: not those of the warpgroup that multiplies for
// all, whose instructions wait behind its products.
inline constexpr int kCopiers = 8, kFirstCopier = 4;
inline constexpr int kCopierRecords = kTile / kCopiers;

template <int kHeads>
struct Logits {
    float of[kHeads][kLogitPitch];
};
template <>
struct Logits<64> {};  // are nowhere but in registers

// Records of the first tile come to where the second tile will be, those of the others to `raw`:
// two tiles are on their way at the start. With 64 heads a tile of the window takes p as well,
// which is free as long as there are no weights: so it may only be one of the first two.
inline constexpr int kMostWindowTiles = 2;

// CTAs of a row, as many as the shared memory has levels for.
template <int kHeads>
inline constexpr int kMostPieces = kHeads == 64 ? 5 : kLargestCluster;

template <int kHeads>
struct Shared {
    static constexpr int kWindowBytes = kTile * kWindow.bytes();
    static constexpr int kRawBytes = kWindowBytes - (kHeads == 64 ? 64 * kPanelRowBytes : 0);

    // BF16 values * 2^-8 of two tiles in turns, [panel][record][dim]. The last is the first here.
    alignas(1024) uint8_t kv[2][kPanels][kTile][kPanelRowBytes];
    uint8_t q[kPanels][kHeads][kPanelRowBytes];       // [panel][head][dim], paired dims
    alignas(1024) uint8_t raw[kRawBytes];             // records as they are in memory
    alignas(1024) uint8_t p[kHeads][kPanelRowBytes];  // weights [head][record]
    Logits<kHeads> logits;
    float keep[kHeads];  // weight of the earlier tiles
    float sink[kHeads];
    // Maximum + log2 of the sum, of all CTAs; in the end what this CTA's output is multiplied with.
    float levels[kMostPieces<kHeads>][kHeads];
    alignas(8) uint8_t present[4][kCopiers];   // a bit per record, of tiles in turns
    cutlass::arch::ClusterBarrier arrived[2];  // the first tile, the others
    cutlass::arch::ClusterTransactionBarrier levels_there, received;
    cutlass::arch::ClusterBarrier added;  // a tile, to the output of all warps

    // What this CTA adds up, from when the logits of the last tile are known.
    __device__ uint8_t* inbox() { return kv[1][0][0]; }
};
// Units of all CTAs, of 1536 bytes; there may be one more than a CTA's share.
template <int kHeads>
constexpr bool kFits = sizeof(Shared<kHeads>) <= 227 * 1024 &&
                       kHeads * kHeadDim * 3 + (kMostPieces<kHeads> - 1) * 1536 <=
                           offsetof(Shared<kHeads>, p) - sizeof(Shared<kHeads>::kv) / 2;
static_assert(kFits<32> && kFits<64>);

}  // namespace flash_csa::sm90::few_rows::two_tiles
