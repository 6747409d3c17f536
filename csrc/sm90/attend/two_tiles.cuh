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
struct Shared;

// Records of the first tile come to where the second tile will be, those of the others to `raw`:
// two tiles are on their way at the start.
template <>
struct Shared<32> {
    static constexpr int kHeads = 32;
    static constexpr int32_t kMostPieces = kLargestCluster;

    // BF16 values * 2^-8 of two tiles in turns, [panel][record][dim]. The last is the first here.
    alignas(1024) uint8_t kv[2][kPanels][kTile][kPanelRowBytes];
    uint8_t q[kPanels][kHeads][kPanelRowBytes];          // [panel][head][dim], paired dims
    alignas(1024) uint8_t raw[kTile * kWindow.bytes()];  // records as they are in memory
    alignas(1024) uint8_t p[kHeads][kPanelRowBytes];     // weights [head][record]
    float logits[kHeads][kLogitPitch];
    float keep[kHeads];  // weight of the earlier tiles
    float sink[kHeads];
    // Maximum + log2 of the sum, of all CTAs; in the end what this CTA's output is multiplied with.
    float levels[kMostPieces][kHeads];
    alignas(8) uint8_t present[4][kCopiers];   // a bit per record, of tiles in turns
    cutlass::arch::ClusterBarrier arrived[2];  // the first tile, the others
    cutlass::arch::ClusterTransactionBarrier levels_there, received[kGroups];
    cutlass::arch::ClusterBarrier added;  // a tile, to the output of all warps

    // What this CTA adds up, from when the logits of the last tile are known.
    __device__ uint8_t* inbox() { return kv[1][0][0]; }
};

template <>
struct Shared<64> {
    static constexpr int kHeads = 64, kCopiers = 4;
    static constexpr int32_t kMostPieces = 5;

    alignas(1024) uint8_t kv[2][kPanels][kTile][kPanelRowBytes];
    uint8_t q[kPanels][kHeads][kPanelRowBytes];
    alignas(1024) uint8_t raw[few_rows::Reader<RecordId::MainFp4>::kTileBytes];
    alignas(1024) uint8_t p[kHeads][kPanelRowBytes];
    float keep[kHeads];
    float whole[kHeads];  // what makes this CTA's sums an output
    float sink[kHeads];
    const float* cos_sin;
    float levels[kMostPieces][kHeads];
    alignas(8) uint8_t present[4][kTile / 8];
    cutlass::arch::ClusterTransactionBarrier arrived[2];  // even tiles after the first, odd tiles
    cutlass::arch::ClusterTransactionBarrier levels_there, received[kGroups];
    cutlass::arch::ClusterBarrier added;
    cutlass::arch::ClusterBarrier held;                 // half of the query, in registers
    cutlass::arch::ClusterBarrier weights_there, made;  // of a tile; the next tile
    uint8_t raised[4];  // whether earlier tiles shrink: of 16 heads each
    cutlass::arch::ClusterBarrier weights_known;

    __device__ uint8_t* inbox() { return kv[1][0][0]; }
};

// Units of all CTAs, of 1536 bytes; there may be one more than a CTA's share.
template <class Shared>
constexpr bool kFits = sizeof(Shared) <= 227 * 1024 &&
                       Shared::kHeads * kHeadDim * 3 + (Shared::kMostPieces - 1) * 1536 <=
                           offsetof(Shared, p) - sizeof(Shared::kv) / 2;
static_assert(kFits<Shared<32>> && kFits<Shared<64>>);

}  // namespace flash_csa::sm90::few_rows::two_tiles
