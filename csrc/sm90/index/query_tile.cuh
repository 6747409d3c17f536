// The queries of a group in shared memory: E4M3 codes as the B operand of the tensor cores, a
// weight per head. Rows of a group follow each other, each with `heads` padded to the block that
// one MMA takes; padded heads have codes and weights of zero, which change no sum.
#pragma once

#include <cstdint>

#include "sm90/index/index_codes.cuh"
#include "sm90/index/score_keys.cuh"
#include "sm90/index/score_work.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kQueryBytes = kIndexDims;  // of a head, in each form

// Rows for which a tile has columns. From kQuadRows on, four rows share blocks of columns.
constexpr int32_t kQuadRows = 3;
__host__ __device__ constexpr int32_t tile_rows(int32_t rows) {
    return rows < kQuadRows ? rows : (rows + 3) / 4 * 4;
}

// Which column of units a head is. With quads, 8 i + 2 t + c of a block is head 2 i + c of row t.
struct UnitColumns {
    int32_t padded_heads;  // of a row
    int32_t quad_heads;    // of a row in a block of quads

    __device__ __forceinline__ int32_t of(int32_t row, int32_t head, bool quads) const {
        if (!quads) return row * padded_heads + head;
        const int32_t block = row / 4 * (padded_heads / quad_heads) + head / quad_heads;
        const int32_t in_block = head % quad_heads;
        return block * 4 * quad_heads + in_block / 2 * 8 + row % 4 * 2 + in_block % 2;
    }
};

// What a thread reads of a group of a head: all four words, or one, and scales and weight of the
// head. Zeros where there is no such head.
template <int kWords>
struct QueryWords {
    uint32_t raw[kWords] = {}, scales = kUnitScales;
    float weight = 0.0f;

    __device__ __forceinline__ void load(const IndexScoresParams& p, int64_t row, int32_t head,
                                         int group, int first) {
        if (head >= p.query.heads) return;
        const uint8_t* codes = p.query.codes.row(row) + head * kKeyBytes;
        if constexpr (kWords == 1) {
            raw[0] = reinterpret_cast<const uint32_t*>(codes)[4 * group + first];
        } else {
            const uint4 words = reinterpret_cast<const uint4*>(codes)[group];
            raw[0] = words.x, raw[1] = words.y, raw[2] = words.z, raw[3] = words.w;
        }
        scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
        weight = head_weight(p.weights, row, head);
    }
};

// [rows, heads] of 128 bytes each, 128-byte swizzle, K contiguous.
struct QueryTile {
    uint8_t* codes;         // E4M3, exponents of a head's groups folded
    uint8_t* units;         // half units, exponents folded, by columns
    uint8_t* minus;         // their negatives, so that keys need no sign; null: not wanted
    float* weights;         // [rows, heads] times what codes leave of the scales, halved
    float* folded_weights;  // by columns, times what units leave of them
    uint32_t* plain;        // [rows], 1 where all scales and weights are plain
    uint32_t* folds;        // 1 where units hold all rows

    __device__ __forceinline__ static void put(uint8_t* tile, int32_t head, int chunk,
                                               const uint4& value) {
        reinterpret_cast<uint4*>(tile + head * kQueryBytes)[chunk ^ (head % 8)] = value;
    }
    // Words of a group: all four, or one.
    __device__ __forceinline__ void put_codes(int32_t head, int group, int,
                                              const uint32_t (&raw)[4], int32_t fold) const {
        PlacedWord w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = fold_codes(raw[i], fold);
        put(codes, head, 2 * group, {w[0].even, w[1].even, w[2].even, w[3].even});
        put(codes, head, 2 * group + 1, {w[0].odd, w[1].odd, w[2].odd, w[3].odd});
    }
    __device__ __forceinline__ void put_codes(int32_t head, int group, int word,
                                              const uint32_t (&raw)[1], int32_t fold) const {
        const PlacedWord placed = fold_codes(raw[0], fold);
        uint32_t* row = reinterpret_cast<uint32_t*>(codes + head * kQueryBytes) + word;
        row[(2 * group ^ head % 8) * 4] = placed.even;
        row[((2 * group + 1) ^ head % 8) * 4] = placed.odd;
    }
    // A K step of units is one word of each group, so that a lane needs a single group of a key.
    __device__ __forceinline__ static void put_units(uint8_t* tile, int32_t column, int group,
                                                     int step, const IntegerWord& word) {
        uint32_t* row = reinterpret_cast<uint32_t*>(tile + column * kQueryBytes) + group;
        row[(2 * step ^ column % 8) * 4] = word.low;
        row[((2 * step + 1) ^ column % 8) * 4] = word.high;
    }
    // Returns their sum.
    template <int kWords>
    __device__ __forceinline__ int32_t put_units(int32_t column, int group, int first,
                                                 const uint32_t (&raw)[kWords],
                                                 uint32_t shift) const {
        const HalfUnits table(shift);
        int32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const IntegerWord a = positive_units(raw[i], table), b = negative_units(raw[i], table);
            const IntegerWord word = signed_units(a, b);
            put_units(units, column, group, first + i, word);
            if (minus != nullptr) put_units(minus, column, group, first + i, signed_units(b, a));
            sum = __dp4a(static_cast<int32_t>(word.low), 0x01010101, sum);
            sum = __dp4a(static_cast<int32_t>(word.high), 0x01010101, sum);
        }
        return sum;
    }

    // head: of all rows; row: of the tile. Returns the sum of the units that it puts.
    template <int kWords>
    __device__ __forceinline__ int32_t put(int32_t head, int32_t column, int32_t row, int group,
                                           int first, const QueryWords<kWords>& words) const {
        const ByteRange range = scale_range(words.scales);
        const int32_t spread = range.high - range.low;
        put_codes(head, group, first, words.raw, head_fold(words.scales, range, group));
        const int32_t sum =
            put_units(column, group, first, words.raw,
                      min(scale_byte(words.scales, group) - range.low, kMaxIntegerFold));
        if (group != 0 || first != 0) return sum;
        // Halved: the epilogue adds a dot and its magnitude instead of taking a maximum.
        weights[head] = mul_rn(words.weight, mul_rn(0.5f, power_of_two(range.high)));
        const bool is_plain =
            is_plain_query(range) && is_plain_weight(words.weight) && spread <= kMaxFold - kMinFold;
        folded_weights[column] =
            mul_rn(words.weight, power_of_two(is_plain ? range.low + kFoldedWeightExponent : 127));
        if (!is_plain) plain[row] = 0;
        if (!is_plain || spread > kMaxIntegerFold) *folds = 0;
        return sum;
    }
};

// kThreads threads fill the tile of a segment; a barrier before and after is the caller's. plain
// and folds are 1 before.
template <int kThreads, int kQuadHeads = 16>
__device__ void load_queries(const IndexScoresParams& p, const Segment& segment,
                             int32_t padded_heads, const QueryTile& tile, int32_t thread) {
    const UnitColumns columns = {padded_heads, kQuadHeads};
    const bool quads = segment.rows >= kQuadRows;
    for (int32_t i = thread; i < segment.rows * padded_heads * kIndexGroups; i += kThreads) {
        const int32_t head = i / kIndexGroups, group = i % kIndexGroups;
        const int32_t row = head / padded_heads, h = head % padded_heads;
        QueryWords<4> words;
        words.load(p, int64_t{segment.first_row} + row, h, group, 0);
        tile.put(head, columns.of(row, h, quads), row, group, 0, words);
    }
}

}  // namespace flash_csa::sm90
