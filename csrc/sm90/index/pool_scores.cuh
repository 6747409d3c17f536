// Scores of the entries of a row's pool, computed by the warps of a block into shared memory, with
// the bits of core/scoring.h.
//
// A unit is 16 blocks of the pool, 128 keys of a warpgroup: 4 blocks, 32 keys, a warp. A warp
// fetches its keys itself, kStages units ahead, by asynchronous copies of 16 bytes, and scales by
// plain loads. Codes become the A of two MMA tiles in registers; queries are B in shared memory.
// The sums, and which path a unit takes, are those of score_folded.cuh and score_groups.cuh.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "core/columns.h"
#include "core/scoring.h"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/vote_barrier.cuh"
#include "sm90/index/score_folded.cuh"
#include "sm90/index/score_groups.cuh"
#include "sm90/select/candidates.cuh"

namespace flash_csa::sm90 {

inline constexpr int kPoolThreads = 640;  // that score
inline constexpr int kPoolWarps = kPoolThreads / 32;
inline constexpr int kPoolGroups = kPoolThreads / 128;  // of warps
inline constexpr int kPoolWarpBlocks = 4;               // of a unit
inline constexpr int kPoolWarpKeys = kPoolWarpBlocks * kPoolBlock;
inline constexpr int kPoolUnitBlocks = 4 * kPoolWarpBlocks;
inline constexpr int kPoolStages = 2;  // units in flight: 96 KiB a block of threads
inline constexpr int kPoolHeads = 64;  // most
inline constexpr int kMaxPoolBlocks = 2048;
inline constexpr int kPoolBlockBytes = kPoolBlock * kKeyBytes;
static_assert(kPoolBlockBytes == 32 * 16, "16 bytes a lane");
static_assert(kPoolUnitBlocks * kPoolBlock == kPassKeys);

// Where a block of the pool lies.
struct alignas(8) PoolPlace {
    static constexpr uint32_t kAbsent = ~0u;  // nothing of it is visible, or it is on no page
    static constexpr int kUnit = 16;          // bytes

    int32_t block;
    uint32_t at;  // of the codes, from the first page, in units

    __device__ static PoolPlace of(const ConstPages& pages, int32_t block, int32_t page) {
        const int64_t at = page * pages.page_stride + row_at(pages, block);
        return {block, static_cast<uint32_t>(at / kUnit)};
    }
    __device__ int32_t page(const ConstPages& pages) const {
        const uint32_t stride = static_cast<uint32_t>(pages.page_stride / kUnit);
        return static_cast<int32_t>((at - row_at(pages, block) / kUnit) / stride);
    }
    __device__ static uint32_t offset(const ConstPages& pages, int32_t block) {
        return block * kPoolBlock & (pages.page_size - 1);
    }

  private:
    __device__ static uint32_t row_at(const ConstPages& pages, int32_t block) {
        return offset(pages, block) * kKeyBytes;
    }
};
static_assert(record(RecordId::IndexFp4).order == PageOrder::PageSplit);

// Scores of a block of threads are counted by the leading bits of their keys, two counts a word.
inline constexpr int kPoolBinShift = 19;
inline constexpr int kPoolBins = 1 << (32 - kPoolBinShift);

using PoolShare = Share<kPassKeys>;  // lines are units

// Codes of a warp's part of a unit.
struct alignas(16) WarpKeys {
    uint8_t codes[kPoolWarpBlocks][kPoolBlockBytes];
};

struct PoolRing {
    WarpKeys keys[kPoolWarps][kPoolStages];
    uint32_t bins[kPoolBins / 2];
};

// The scales of a warp's keys, as the path that its unit takes wants them: bytes, a group's
// exponent
// - the lowest, or the exponents; what is left of the scales of a score, or 2^(exponent of group
// 0). NaN where a key is absent.
struct WarpScales {
    uint32_t words[kPoolWarpKeys];
    float rest[kPoolWarpKeys];
};

struct alignas(1024) PoolScoresShared {
    uint8_t codes[kPoolHeads * kQueryBytes];  // of queries, as QueryTile has them
    uint8_t units[kPoolHeads * kQueryBytes];
    uint8_t minus[kPoolHeads * kQueryBytes];
    float weights[kPoolHeads];
    float folded_weights[kPoolHeads];
    WarpScales scales[kPoolWarps];
    uint32_t plain, folds;  // queries
};

inline constexpr int kPoolHeadBlock = 32;  // heads of an MMA of folded codes

// Those of one where groups are apart.
struct PoolDots {
    static constexpr int kGroupHeads = 16, kGroupSums = kGroupHeads / 2;
};

// Where a lane reads folded keys: the 16 bytes of one group of each, so that one table serves four
// words.
struct FoldedKeys {
    const uint4* codes;
    const uint8_t* shifts;

    // From the codes and the shifts of the warp's keys.
    __device__ __forceinline__ FoldedKeys(const void* key_codes, const uint32_t* key_shifts)
        : codes(static_cast<const uint4*>(key_codes) + threadIdx.x % 32),
          shifts(reinterpret_cast<const uint8_t*>(key_shifts) + threadIdx.x % 32) {}
    __device__ __forceinline__ FoldedKeys& operator+=(int32_t keys) {
        codes += keys * kIndexGroups;
        shifts += keys * kIndexGroups;
        return *this;
    }
};

// The codes of a tile, positive and negative ones apart: the latter meet negated queries.
struct SplitFragment {
    uint32_t plus[kFoldedSteps][4], minus[kFoldedSteps][4];
};

// 16 keys of a warp.
__device__ __forceinline__ SplitFragment load_split(const FoldedKeys& keys) {
    SplitFragment out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 raw = keys.codes[32 * half];
        const HalfUnits table(keys.shifts[32 * half]);
        const uint32_t words[kFoldedSteps] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            const IntegerWord plus = positive_units(words[step], table);
            const IntegerWord less = negative_units(words[step], table);
            out.plus[step][half] = plus.low;
            out.plus[step][2 + half] = plus.high;
            out.minus[step][half] = less.low;
            out.minus[step][2 + half] = less.high;
        }
    }
    return out;
}

// Starts the dots of a tile with kColumns query heads.
template <int kColumns>
__device__ __forceinline__ void start_split(const SplitFragment& keys, uint32_t units,
                                            uint32_t minus, uint32_t (&sums)[kColumns / 2]) {
    using Mma = IntegerMma<kColumns>;
    constexpr std::make_index_sequence<kColumns / 2> kAll;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) cute::warpgroup_fence_operand(sums[i]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kFoldedSteps; ++step) {
        const uint32_t at = 32 * step >> 4;
        mma_step<Mma>(keys.plus[step], whole_descriptor(units + at), sums, step > 0, kAll);
        mma_step<Mma>(keys.minus[step], whole_descriptor(minus + at), sums, true, kAll);
    }
    cute::warpgroup_commit_batch();
}

class PoolScorer {
  public:
    // places: those of the units' blocks, in shared memory.
    __device__ PoolScorer(const IndexScoresParams& p, int32_t n_vis, const PoolPlace* places,
                          int32_t units, PoolRing& ring, PoolScoresShared& shared)
        : p_(p),
          n_vis_(n_vis),
          places_(places + threadIdx.x / 32 % 4 * kPoolWarpBlocks),
          units_(units),
          ring_(ring.keys[threadIdx.x / 32]),
          bins_(ring.bins),
          s_(shared),
          scales_(shared.scales[threadIdx.x / 32]),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32),
          data_(p.index.data + 16 * (threadIdx.x % 32)) {}

    // Queries and weights of the row. A barrier comes before, where one thread calls begin, and
    // behind.
    __device__ static void begin(PoolScoresShared& shared) { shared.plain = shared.folds = 1; }
    __device__ static void load_queries(const IndexScoresParams& p, int64_t row,
                                        PoolScoresShared& shared) {
        const QueryTile tile = {shared.codes,          shared.units,  shared.minus, shared.weights,
                                shared.folded_weights, &shared.plain, &shared.folds};
        Segment segment = {};
        segment.first_row = static_cast<int32_t>(row);
        segment.rows = 1;
        sm90::load_queries<kPoolThreads>(p, segment, padded_heads(p), tile, threadIdx.x);
        cutlass::arch::fence_view_async_shared();
    }

    // All threads of the block call. scores: f32 [units, 128].
    __device__ __forceinline__ void run(int64_t row, float* scores) {
        int32_t unit = warp_ / 4;
        for (int i = 0; i < kPoolStages; ++i) fetch(unit + i * kPoolGroups, i);
        KeyScales scales = load_scales(unit);
        const bool plain = s_.plain;
        const bool folds = s_.folds;
        for (int32_t stage = 0; unit < units_; unit += kPoolGroups) {
            const KeyScales own_scales = scales;
            scales = load_scales(unit + kPoolGroups);
            wait_copies<kPoolStages - 1>();
            float score;
            if (folds && fold_scales(own_scales)) {
                score = folded_score(ring_[stage]);
            } else {
                score = groups_score(row, ring_[stage], own_scales, plain);
            }
            write_score(unit, score, scores);
            __syncwarp();
            fetch(unit + kPoolStages * kPoolGroups, stage);
            stage = stage + 1 == kPoolStages ? 0 : stage + 1;
        }
        wait_for_copies();
    }

  private:
    __device__ static int32_t padded_heads(const IndexScoresParams& p) {
        return p.query.heads <= kPoolHeadBlock ? kPoolHeadBlock : kPoolHeads;
    }

    // Starts the copies of the codes of a unit. What is left of former units where a block is
    // absent makes scores that nobody reads.
    __device__ __forceinline__ void fetch(int32_t unit, int32_t stage) {
        if (unit < units_) {
            const uint4* pairs = reinterpret_cast<const uint4*>(places_ + unit * kPoolUnitBlocks);
            const uint4 first = pairs[0], second = pairs[1];
            const uint32_t at[kPoolWarpBlocks] = {first.y, first.w, second.y, second.w};
            uint8_t* to = fresh(ring_[stage].codes[0] + 16 * lane_);
            const uint8_t* from = fresh(data_);
#pragma unroll
            for (int i = 0; i < kPoolWarpBlocks; ++i) {
                if (at[i] == PoolPlace::kAbsent) continue;
                copy_16_async(to + i * kPoolBlockBytes, from + uint64_t{at[i]} * PoolPlace::kUnit,
                              true);
            }
        }
        commit_copies();
    }

    // The scales of key `lane` of a unit; exponents of 0 where it is absent.
    struct KeyScales {
        uint32_t word;
        bool present;
    };
    __device__ __forceinline__ KeyScales load_scales(int32_t unit) const {
        KeyScales scales = {kUnitScales, false};
        if (unit >= units_) return scales;
        const PoolPlace place = places_[unit * kPoolUnitBlocks + lane_ / kPoolBlock];
        const int32_t key = lane_ % kPoolBlock;
        scales.present = place.at != PoolPlace::kAbsent && place.block * kPoolBlock + key < n_vis_;
        if (!scales.present) return scales;
        constexpr Record r = record(RecordId::IndexFp4);
        const int32_t offset = PoolPlace::offset(p_.index, place.block);
        const int64_t skip = r.scale_at(offset + key, p_.index.page_size) - r.data_at(offset);
        const uint8_t* codes = p_.index.data + uint64_t{place.at} * PoolPlace::kUnit;
        scales.word = __ldg(reinterpret_cast<const uint32_t*>(codes + static_cast<int32_t>(skip)));
        return scales;
    }

    // Prepares the scales of the warp's keys for the folded path. False where some of the group's
    // do not fold.
    __device__ __forceinline__ bool fold_scales(const KeyScales& scales) {
        const int32_t lowest = scale_range(scales.word).low;
        const uint32_t shifts = scales.word - lowest * 0x01010101u;
        static_assert(kMaxIntegerFold == 3);
        const bool folds = is_plain(odd_key_bits(scales.word)) && (shifts & 0xfcfcfcfcu) == 0;
        scales_.words[lane_] = shifts;
        scales_.rest[lane_] =
            scales.present ? power_of_two(lowest + kFoldedScoreExponent) : bits_float(kNanBits);
        return vote_barrier(1 + warp_ / 4, 128, folds);
    }

    // Adds up the heads of the warp's keys: row lane / 4 + 8 half of its part of tile t is key
    // lane / 4 of block 2 t + half. Returns the score of key own().
    __device__ __forceinline__ float folded_score(const WarpKeys& keys) const {
        constexpr int kHeads = kPoolHeadBlock;
        const uint32_t units = query_descriptor(s_.units), minus = query_descriptor(s_.minus);
        const int32_t heads = padded_heads(p_);
        FoldedKeys source(keys.codes, scales_.words);
        float partials[kPassTiles][2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            const SplitFragment fragment = load_split(source);
            source += 16;
#pragma unroll 1
            for (int32_t first = 0; first < heads; first += kHeads) {
                uint32_t sums[kHeads / 2] = {};
                const uint32_t at = first * (kQueryBytes >> 4);
                start_split<kHeads>(fragment, units + at, minus + at, sums);
                float2 weights[kHeads / 8];
                const float2* own = reinterpret_cast<const float2*>(s_.folded_weights + first);
#pragma unroll
                for (int i = 0; i < kHeads / 8; ++i) weights[i] = own[4 * i + lane_ % 4];
                finish_folded<0>(sums);
                add_folded_heads<kHeads>(sums, 0, weights, partials[tile]);
            }
        }
        return mul_rn(reduce_quad(partials), scales_.rest[own()]);
    }

    // The warp's 16 keys of a tile as A of four MMA steps. Rows lie 64 bytes apart, so that four of
    // them meet in each bank.
    __device__ __forceinline__ KeyFragment load_keys(const WarpKeys& keys, int32_t tile) const {
        KeyFragment out;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[kIndexGroups];
            load_matrices(
                keys.codes[2 * tile + half] + lane_ % 8 * kKeyBytes + lane_ / 8 * (kKeyBytes / 4),
                words);
#pragma unroll
            for (int g = 0; g < kIndexGroups; ++g) {
                const PlacedWord placed = place_codes(words[g]);
                out.a[g][half] = placed.even;
                out.a[g][2 + half] = placed.odd;
            }
        }
        return out;
    }

    // The same for any scales. Warps of a group may take different branches between MMAs.
    __device__ __forceinline__ float groups_score(int64_t row, const WarpKeys& keys,
                                                  const KeyScales& scales, bool plain) {
        plain = __all_sync(~0u, is_plain(odd_key_bits(scales.word))) && plain;
        scales_.words[lane_] = scales.word;
        scales_.rest[lane_] = bits_float(scales.present ? scales.word << 23 & kInfBits : kNanBits);
        __syncwarp();
        const uint32_t queries = query_descriptor(s_.codes);
        const int32_t heads = padded_heads(p_);
        float partials[kPassTiles][2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            const KeyFragment fragment = load_keys(keys, tile);
            const int32_t key = 16 * tile + lane_ / 4;
            const uint32_t words[2] = {scales_.words[key], scales_.words[key + kPoolBlock]};
#pragma unroll 1
            for (int32_t first = 0; first < heads; first += PoolDots::kGroupHeads) {
                float sums[kIndexGroups][PoolDots::kGroupSums];
                start_dots<PoolDots>(fragment, queries + first * (kQueryBytes >> 4), sums);
                finish_dots<PoolDots, 0>(sums);
                if (plain) {
                    add_plain(sums, words, first, partials[tile]);
                } else {
                    add_heads<PoolDots>(p_, row, first, sums, words, partials[tile]);
                }
            }
        }
        const float score = reduce_quad(partials), exponent = scales_.rest[own()];
        return plain || isnan(exponent) ? mul_rn(score, exponent) : score;
    }

    __device__ __forceinline__ void add_plain(
        const float (&sums)[kIndexGroups][PoolDots::kGroupSums], const uint32_t (&words)[2],
        int32_t first, float (&partials)[2]) const {
        float2 weights[PoolDots::kGroupHeads / 8];
        const float2* own = reinterpret_cast<const float2*>(s_.weights + first) + lane_ % 4;
#pragma unroll
        for (int i = 0; i < PoolDots::kGroupHeads / 8; ++i) weights[i] = own[4 * i];
        const float3 factors[2] = {relative_factors(words[0]), relative_factors(words[1])};
        add_plain_heads<PoolDots>(sums, weights, factors, partials);
    }

    // The key whose score a lane gets, among the warp's.
    __device__ int32_t own() const { return lane_ % 4 * kPoolBlock + lane_ / 4; }

    __device__ __forceinline__ void write_score(int32_t unit, float score, float* scores) {
        scores[unit * kPassKeys + warp_ % 4 * kPoolWarpKeys + own()] = score;
        // The order key, but for zeros and NaN.
        const int32_t bits = __float_as_int(score);
        const uint32_t bin =
            static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN)) >> kPoolBinShift;
        atomicAdd(&bins_[bin / 2], 1u << bin % 2 * 16);
    }

    const IndexScoresParams& p_;
    const int32_t n_vis_;
    const PoolPlace* places_;  // of this warp's blocks in unit 0
    const int32_t units_;
    WarpKeys* ring_;  // [kPoolStages]
    uint32_t* bins_;
    PoolScoresShared& s_;
    WarpScales& scales_;
    const int32_t warp_, lane_;
    const uint8_t* data_;  // what this lane copies, of the first block of the first page
};

}  // namespace flash_csa::sm90
