// Scores of a warp's chunk of keys against one row: what score_single.cuh and score_rows.cuh share.
// Four warps, a group, give 16 keys each to a tile of an MMA; nothing else waits for another warp.
//
//   warp   exponents | convert 0 | convert 1 | heads 0 | convert 2 | heads 1 | convert 3 | heads 2
//   .. MMA                          | 0         | 1       ......      | 2       ......      | 3
//
// A lane has one score of each half of a chunk.
#pragma once

#include "sm90/common/fresh.cuh"
#include "sm90/index/row_apart.cuh"

namespace flash_csa::sm90 {

constexpr int kRowGroups = 4;
constexpr int kRowThreads = kRowGroups * kGroupThreads;

// Four warps.
__device__ __forceinline__ void group_sync() {
    cutlass::arch::NamedBarrier::sync(kGroupThreads, threadIdx.x / kGroupThreads);
}

// ---- Queries

// What a thread of a group reads of a row, to put it.
template <int kHeads>
struct RowHeads {
    static constexpr int kOwn = (kHeads * kIndexGroups + kGroupThreads - 1) / kGroupThreads;
    RowHead own[kOwn];
    int32_t row;

    __device__ __forceinline__ void load(const IndexScoresParams& p, int32_t of_row) {
        row = of_row;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i].load(p, row, head(i), group());
    }
    // Barriers before and after are the caller's.
    __device__ __forceinline__ void put(const IndexScoresParams& p, RowTile<kHeads>& tile) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            own[i].finish(p);
            if (head(i) < kHeads) all = tile.put(own[i], head(i), group()) && all;
        }
        all = __all_sync(~0u, all);
        const int32_t thread = fresh(static_cast<int>(threadIdx.x));
        if (thread % 32 == 0) reinterpret_cast<uint8_t*>(&tile.folds)[thread / 32 % 4] = all;
        if (thread % kGroupThreads == 0) tile.row = row;
        if (thread % kGroupThreads < 32) tile.zeros[thread % 32] = kKeyOffset;
        cutlass::arch::fence_view_async_shared();
    }

  private:
    __device__ __forceinline__ static int32_t head(int i) {
        return (fresh(static_cast<int>(threadIdx.x)) % kGroupThreads + i * kGroupThreads) /
               kIndexGroups;
    }
    __device__ __forceinline__ static int32_t group() {
        return fresh(static_cast<int>(threadIdx.x)) % kIndexGroups;
    }
};

template <int kHeads>
struct OffsetMma;
template <>
struct OffsetMma<8> : cute::SM90::GMMA::MMA_64x8x32_S32S8S8_SS_TN {};
template <>
struct OffsetMma<16> : cute::SM90::GMMA::MMA_64x16x32_S32S8S8_SS_TN {};
template <>
struct OffsetMma<32> : cute::SM90::GMMA::MMA_64x32x32_S32S8S8_SS_TN {};

template <class Mma, class Sum, size_t... I>
__device__ __forceinline__ void offset_step(uint64_t a, uint64_t b, Sum* sums,
                                            std::index_sequence<I...>) {
    Mma::fma(a, b, sums[I]..., cute::SM90::GMMA::ScaleOut::Zero);
}

// The queries of a row: kBlocks blocks of kHeads heads.
template <int kHeads, int kBlocks>
struct RowQuery {
    using Tile = RowTile<kHeads * kBlocks>;
    const Tile& tile;
    static constexpr uint32_t kAddressBits = 0x3fff;  // of a descriptor
    uint32_t units;                                   // lower half of a descriptor, uniform

    __device__ __forceinline__ explicit RowQuery(const Tile& from)
        : tile(from), units(__shfl_sync(~0u, query_descriptor(from.units), 0)) {}

    __device__ __forceinline__ void load_weights(int block, float2 (&weights)[kHeads / 8]) const {
        const float2* source =
            reinterpret_cast<const float2*>(tile.weights + block * kHeads) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i) weights[i] = source[4 * i];
    }
    // Starts the dots of a tile of keys with a block of heads.
    __device__ __forceinline__ void start(const uint32_t (&bytes)[kFoldedSteps][4], int block,
                                          uint32_t (&sums)[kHeads / 2]) const {
        constexpr uint32_t kOffsets = offsetof(Tile, offsets) - offsetof(Tile, units);
        constexpr uint32_t kZeros = offsetof(Tile, zeros) - offsetof(Tile, units);
        const uint32_t at = units + block * (kHeads * kQueryBytes >> 4);
        // Strides of 0, no swizzle: all blocks of 8 keys and 16 bytes are one.
        const uint64_t zeros = (units + (kZeros >> 4)) & kAddressBits;
        constexpr std::make_index_sequence<kHeads / 2> kAll;
#pragma unroll
        for (uint32_t& sum : sums) cute::warpgroup_fence_operand(sum);
        cute::warpgroup_arrive();
        offset_step<OffsetMma<kHeads>>(zeros, whole_descriptor(at + (kOffsets >> 4)), sums, kAll);
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            mma_step<IntegerMma<kHeads>>(bytes[step], whole_descriptor(at + (32 * step >> 4)), sums,
                                         true, kAll);
        }
        cute::warpgroup_commit_batch();
    }
};

// ---- Scores

// Of the chunk in a stage, when it has come. kOnlyRow: there is no other row than 0.
template <bool kOnlyRow, int kHeads, int kBlocks, int kStages, class Sink>
__device__ __forceinline__ void score_chunk(const IndexScoresParams& p,
                                            const RowQuery<kHeads, kBlocks>& query,
                                            const OffsetUnits* tables, WarpKeys<kStages>& keys,
                                            int32_t stage, Sink& sink) {
    constexpr int kTiles = kChunkKeys / 16, kItems = kTiles * kBlocks;  // a block of a tile
    // Of two tiles: the blocks of one lie between those of the other.
    constexpr auto tile_of = [](int item) { return item / (2 * kBlocks) * 2 + item % 2; };
    constexpr auto block_of = [](int item) { return item / 2 % kBlocks; };
    const bool folds = prepare_chunk(keys, stage);
    uint32_t bytes[kPassTiles][kFoldedSteps][4], sums[kPassTiles][kHeads / 2] = {};
    const auto start = [&](int item) {
        const int slot = item % 2;
        if (block_of(item) == 0) load_units(keys, stage, tile_of(item), tables, bytes[slot]);
        query.start(bytes[slot], block_of(item), sums[slot]);
    };
    float scores[2], partials[kPassTiles][2] = {};
    start(0);
    start(1);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        const int slot = item % 2;
        float2 weights[kHeads / 8];
        query.load_weights(block_of(item), weights);
        if (item + 1 < kItems) {
            finish_folded<1>(sums[slot]);
        } else {
            finish_folded<0>(sums[slot]);
        }
        add_folded_heads<kHeads>(sums[slot], 0, weights, partials[slot]);
        if (item + 2 < kItems) start(item + 2);
        if (item % (2 * kBlocks) != 2 * kBlocks - 1) continue;
        const int half = item / (2 * kBlocks);
        scores[half] = mul_rn(reduce_quad(partials), keys.rest[half * kHalfKeys + lane_key()]);
#pragma unroll
        for (auto& both : partials) both[0] = both[1] = 0.0f;
    }
    const ChunkPlace at = keys.places[stage];
    const int32_t row = kOnlyRow ? 0 : at.row;
    const bool row_folds = query.tile.folds == query.tile.kAllFold;
    if (!row_folds || !folds) {
#pragma unroll 1
        for (int32_t half = 0; half < 2; ++half) {
            const int32_t own = half * kHalfKeys + lane_key();
            const LaneKey key = {own, keys.rest[own]};
            const float score = score_apart(p, row, row_folds, keys.chunks[stage], kHalfKeys * half,
                                            at.count - at.first, key);
            (half == 0 ? scores[0] : scores[1]) = score;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t column = at.first + half * kHalfKeys + lane_key();
        sink.put(row, column, canonical_nan(scores[half]), column < at.count);
    }
    __syncwarp();
}

}  // namespace flash_csa::sm90
