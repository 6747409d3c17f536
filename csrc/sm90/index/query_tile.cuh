// The queries of a group in shared memory: E4M3 codes as the B operand of the tensor cores, a
// weight per head. Rows of a group follow each other, each with `heads` padded to the block that
// one MMA takes; padded heads have codes and weights of zero, which change no sum.
#pragma once

#include <cstdint>

#include "sm90/index/index_codes.cuh"
#include "sm90/index/score_keys.cuh"
#include "sm90/index/score_work.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kQueryBytes = kIndexDims;  // of a head, E4M3

struct QueryTile {
    uint8_t* codes;   // [rows, heads] of 128 bytes, 128-byte swizzle, K contiguous
    float* weights;   // [rows, heads], times the powers of two that left the dots of plain rows
    uint32_t* plain;  // [rows], 1 where all scales and weights are plain

    __device__ __forceinline__ void store(int32_t head, int group, const uint4& raw,
                                          int32_t fold) const {
        const PlacedWord w[4] = {fold_codes(raw.x, fold), fold_codes(raw.y, fold),
                                 fold_codes(raw.z, fold), fold_codes(raw.w, fold)};
        uint4* row = reinterpret_cast<uint4*>(codes + head * kQueryBytes);
        row[(2 * group) ^ (head % 8)] = {w[0].even, w[1].even, w[2].even, w[3].even};
        row[(2 * group + 1) ^ (head % 8)] = {w[0].odd, w[1].odd, w[2].odd, w[3].odd};
    }
};

// kThreads threads fill the tile of a segment; a barrier before and after is the caller's.
template <int kThreads>
__device__ void load_queries(const IndexScoresParams& p, const Segment& segment,
                             int32_t padded_heads, const QueryTile& tile, int32_t thread) {
    const int32_t heads = p.query.heads;
    for (int32_t i = thread; i < segment.rows * padded_heads * kIndexGroups; i += kThreads) {
        const int32_t head = i / kIndexGroups, group = i % kIndexGroups;
        const int64_t row = segment.first_row + head / padded_heads;
        const int32_t h = head % padded_heads;
        if (h >= heads) {
            tile.store(head, group, {}, 0);
            if (group == 0) tile.weights[head] = 0.0f;
            continue;
        }
        const uint32_t scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[h]);
        const uint8_t* codes = p.query.codes.row(row) + h * kKeyBytes;
        const ByteRange range = scale_range(scales);
        tile.store(head, group, reinterpret_cast<const uint4*>(codes)[group],
                   head_fold(scales, range, group));
        if (group != 0) continue;
        const float weight = head_weight(p.weights, row, h);
        // Halved: the epilogue adds a dot and its magnitude instead of taking a maximum.
        tile.weights[head] = mul_rn(weight, mul_rn(0.5f, power_of_two(range.high)));
        const bool plain =
            is_plain(range) && is_plain(weight) && range.high - range.low <= kMaxFold - kMinFold;
        if (!plain) atomicAnd(&tile.plain[head / padded_heads], 0u);
    }
}

}  // namespace flash_csa::sm90
