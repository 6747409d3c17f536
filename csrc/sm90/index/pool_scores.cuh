// Scores of the entries of a row's pool, computed by the warps of a block into shared memory, with
// the bits of core/scoring.h.
//
// A unit is 16 blocks of the pool, 128 keys of a warpgroup: 4 blocks, 32 keys, a warp. A warp
// fetches the codes of its keys itself, kPoolStages units ahead, by asynchronous copies of 16
// bytes. Scales come to where the scores will be, a round of units ahead, and are prepared there.
// Codes become the A of two MMA tiles in registers; queries are B in shared memory. The sums, and
// which path a unit takes, are those of score_folded.cuh and score_groups.cuh. MMAs of one tile run
// while the other is converted, or added up.
//
//   warp      scales 0 | codes 0, scales 1 | codes 1 | fold 0 | score 0 | score 1 | .. fold 1 | ..
//   barriers                                           block |             of 4 warps |
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "core/columns.h"
#include "core/scoring.h"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/index/score_folded.cuh"
#include "sm90/index/score_groups.cuh"
#include "sm90/select/candidates.cuh"

namespace flash_csa::sm90 {

inline constexpr int kPoolThreads = 512;  // that score
inline constexpr int kPoolWarps = kPoolThreads / 32;
inline constexpr int kPoolGroups = kPoolThreads / 128;  // of warps
inline constexpr int kPoolWarpBlocks = 4;               // of a unit
inline constexpr int kPoolWarpKeys = kPoolWarpBlocks * kPoolBlock;
inline constexpr int kPoolUnitBlocks = 4 * kPoolWarpBlocks;
inline constexpr int kPoolStages = 2;  // units in flight: 64 KiB a block of threads
inline constexpr int kPoolHeads = 64;  // most
inline constexpr int kMaxPoolBlocks = 2048;
inline constexpr int kPoolBlockBytes = kPoolBlock * kKeyBytes;
static_assert(kPoolBlockBytes == 32 * 16, "16 bytes a lane");
static_assert(kPoolUnitBlocks * kPoolBlock == kPassKeys);

// Where the blocks of a pool lie.
struct PoolPlaces {
    static constexpr int kUnit = 16;                            // bytes
    static constexpr int kBytes = 2 * sizeof(uint32_t);         // of a block
    static constexpr int32_t kAbsent = INT32_MAX / kPoolBlock;  // a block that is not visible

    uint32_t* at;  // of the codes, from the first page, in units
    int32_t* blocks;

    // For `count` blocks.
    __device__ PoolPlaces(void* bytes, int32_t count)
        : at(static_cast<uint32_t*>(bytes)), blocks(static_cast<int32_t*>(bytes) + count) {}

    __device__ void set(int32_t i, const ConstPages& pages, int32_t block, int32_t page) const {
        at[i] = static_cast<uint32_t>((page * pages.page_stride + row_at(pages, block)) / kUnit);
        blocks[i] = block;
    }
    // Nothing of it is visible, or it is on no page. Its codes may be read.
    __device__ void set_absent(int32_t i) const {
        at[i] = 0;
        blocks[i] = kAbsent;
    }
    // Of its keys.
    __device__ int32_t visible(int32_t i, int32_t n_vis) const {
        return n_vis - blocks[i] * kPoolBlock;
    }
    __device__ int32_t page(int32_t i, const ConstPages& pages) const {
        const uint32_t stride = static_cast<uint32_t>(pages.page_stride / kUnit);
        return static_cast<int32_t>((at[i] - row_at(pages, blocks[i]) / kUnit) / stride);
    }
    __device__ static int32_t offset(const ConstPages& pages, int32_t block) {
        return block * kPoolBlock & (pages.page_size - 1);
    }

  private:
    __device__ static uint32_t row_at(const ConstPages& pages, int32_t block) {
        return static_cast<uint32_t>(offset(pages, block)) * kKeyBytes;
    }
};
static_assert(record(RecordId::IndexFp4).order == PageOrder::PageSplit);

// Scores of a block of threads are counted by the leading bits of their keys.
inline constexpr int kPoolBinShift = 19;
inline constexpr int kPoolBins = 1 << (32 - kPoolBinShift);

using PoolShare = Share<kPassKeys>;  // lines are units

// Codes of a warp's part of a unit.
struct alignas(16) PoolKeys {
    uint8_t codes[kPoolWarpBlocks][kPoolBlockBytes];
};

struct PoolRing {
    PoolKeys keys[kPoolWarps][kPoolStages];
    uint32_t bins[kPoolBins];
};

// The scales of a key that folds, as a word: the power of two that is left for its score, in whose
// mantissa lie the shifts of its groups. NaN where the key is absent.
struct FoldedScales {
    static constexpr int kShiftBits = 5;  // of a group: what a shift of a word looks at

    // Of four keys. Whether they fold: all are plain, and no shift exceeds kMaxIntegerFold.
    __device__ __forceinline__ static bool fold(const uint32_t (&scales)[4], uint32_t (&words)[4]) {
        static_assert(kMaxIntegerFold == 3);
        uint32_t lowest[2];  // of two keys each, in halves
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t a = lower_pairs(scales[2 * i]), b = lower_pairs(scales[2 * i + 1]);
            lowest[i] = __vminu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
        }
        uint32_t shifts = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const uint32_t low = e % 2 == 0 ? lowest[e / 2] & 0xffffu : lowest[e / 2] >> 16;
            const uint32_t own = scales[e] - low * 0x01010101u;
            shifts |= own;
            const uint32_t rest = (low << 23) + (uint32_t{kFoldedScoreExponent} << 23);
            // Bytes to kShiftBits. Multiplications: their pipe has room.
            const uint32_t upper = __dp4a(own, 0x20010000u, 0u);
            words[e] = (upper << 2 * kShiftBits) + __dp4a(own, 0x00002001u, rest);
        }
        const uint32_t least = __vminu2(__vminu2(lowest[0], lowest[1]), kLeastPlain * 0x10001u);
        const uint32_t most =
            __vmaxu2(__vmaxu2(lowest[0], lowest[1]), (kMostPlain - kMaxIntegerFold) * 0x10001u);
        return least == kLeastPlain * 0x10001u &&
               most == (kMostPlain - kMaxIntegerFold) * 0x10001u && (shifts & 0xfcfcfcfcu) == 0;
    }
    // The table of a group; from: its first bit.
    __device__ __forceinline__ static HalfUnits units(uint32_t word, int32_t from) {
        HalfUnits units(0);
        units.low = __funnelshift_l(0, units.low, word >> from);  // by the lower five bits
        units.high = __funnelshift_l(0, units.high, word >> from);
        return units;
    }
    __device__ __forceinline__ static float rest(uint32_t word) {
        return bits_float(word & kNanBits);
    }

  private:
    static constexpr uint32_t kLeastPlain = 0x60, kMostPlain = 0x9f;  // as odd_key_bits has it

    // The lower of bytes 0 and 1, and of bytes 2 and 3, as halves.
    __device__ __forceinline__ static uint32_t lower_pairs(uint32_t scales) {
        return __vminu2(scales & 0x00ff00ffu, __byte_perm(scales, 0, 0x4341));
    }
};
static_assert(4 * FoldedScales::kShiftBits <= 22 && kNanBits == 0x7fc00000u);

struct alignas(1024) PoolScoresShared {
    uint8_t codes[kPoolHeads * kQueryBytes];  // of queries, as QueryTile has them
    uint8_t units[kPoolHeads * kQueryBytes];
    int4 starts[kPoolHeads / 2];  // of sums (OffsetTile), those of two heads twice
    float weights[kPoolHeads];
    float folded_weights[kPoolHeads];
    uint8_t unit_folds[kMaxPoolBlocks / kPoolUnitBlocks];  // keys and queries
    uint32_t plain, folds;                                 // queries
    int32_t row;
};

inline constexpr int kPoolHeadBlock = 32;  // heads of an MMA of folded codes

// Those of one where groups are apart.
struct PoolDots {
    static constexpr int kGroupHeads = 16, kGroupSums = kGroupHeads / 2;
};

// The upper half of a word, by a dot product: that pipe has room, the one of shifts has none.
__device__ __forceinline__ uint32_t upper_half(uint32_t word) {
    return __dp2a_lo(word, 0x0100u, 0u);
}

// A tile's keys as bytes kOffset + v, v their half units with the powers of two of their groups:
// one MMA a K step takes them. What the offset adds to a dot is a constant of the head, which sums
// start without.
struct OffsetTile {
    static constexpr int32_t kOffset = 128;
    static_assert(12 << kMaxIntegerFold < kOffset, "no borrow between bytes");
    uint32_t units[kFoldedSteps][4];

    // words: of row lane / 4 + 8 half of the tile. Bytes are 2 max(v, 0) and kOffset - |v|, which a
    // multiplication by two adds: that pipe has room, the one of additions has none.
    __device__ __forceinline__ void set(int half, const uint4& words, const HalfUnits& sizes) {
        const uint32_t of_step[kFoldedSteps] = {words.x, words.y, words.z, words.w};
        const uint32_t low = kOffset * 0x01010101u - sizes.low;
        const uint32_t high = kOffset * 0x01010101u - sizes.high;
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            const uint32_t codes = of_step[step], unsigned_codes = codes & 0x77777777u;
            units[step][half] = sizes.positive(codes) * 2 + permute(low, high, unsigned_codes);
            units[step][2 + half] = sizes.positive(upper_half(codes)) * 2 +
                                    permute(low, high, upper_half(unsigned_codes));
        }
    }

    // Starts the dots with kPoolHeadBlock query heads.
    __device__ __forceinline__ void start(uint32_t queries, const int4* starts,
                                          uint32_t (&sums)[kPoolHeadBlock / 2]) const {
        using Mma = cute::SM90::GMMA::MMA_64x32x32_S32U8S8_RS_TN;
        constexpr std::make_index_sequence<kPoolHeadBlock / 2> kAll;
#pragma unroll
        for (int i = 0; i < kPoolHeadBlock / 8; ++i) {
            const int4 four = starts[4 * i];
            sums[4 * i] = four.x, sums[4 * i + 1] = four.y;
            sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
        }
#pragma unroll
        for (uint32_t& sum : sums) cute::warpgroup_fence_operand(sum);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            mma_step<Mma>(units[step], whole_descriptor(queries + (32 * step >> 4)), sums, true,
                          kAll);
        }
        cute::warpgroup_commit_batch();
    }
};

class PoolScorer {
  public:
    // n_vis, places: those of the units' blocks, scores: f32 [units, 128]; all in shared memory.
    __device__ PoolScorer(const IndexScoresParams& p, const int32_t& n_vis,
                          const PoolPlaces& places, int32_t units, float* scores, PoolRing& ring,
                          PoolScoresShared& shared)
        : p_(p),
          n_vis_(n_vis),
          places_(places),
          units_(units),
          scores_(scores),
          ring_(ring.keys[0][0].codes[0]),
          bins_(ring.bins),
          s_(shared),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32),
          data_(p.index.data + 16 * (threadIdx.x % 32)) {}

    // One thread, before anything else.
    __device__ static void begin(int64_t row, PoolScoresShared& shared) {
        shared.plain = shared.folds = 1;
        shared.row = static_cast<int32_t>(row);
    }

    // Queries and weights of the row: words of a thread, asked for first and put when they have
    // come. A barrier lies between begin and put, and behind.
    class Queries {
      public:
        __device__ __forceinline__ Queries(const IndexScoresParams& p, int64_t row) : p_(p) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) words_[i].load(p, row, head(i), group(), word());
        }
        __device__ __forceinline__ void put(PoolScoresShared& shared) const {
            const QueryTile tile = {shared.codes,   shared.units,          nullptr,
                                    shared.weights, shared.folded_weights, &shared.plain,
                                    &shared.folds};
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                if (head(i) >= padded_heads(p_)) break;
                int32_t sum = tile.put(head(i), head(i), 0, group(), word(), words_[i]);
#pragma unroll
                for (int step = 1; step < kHeadWords; step *= 2) {
                    sum += __shfl_xor_sync(~0u, sum, step);
                }
                if (threadIdx.x % kHeadWords < 2) {
                    int32_t* starts = &shared.starts[head(i) / 2].x + threadIdx.x % 2 * 2;
                    starts[head(i) % 2] = -OffsetTile::kOffset * sum;
                }
            }
            cutlass::arch::fence_view_async_shared();
        }

      private:
        static constexpr int kHeadWords = kKeyBytes / 4, kHeads = kPoolThreads / kHeadWords;
        static constexpr int kOwn = (kPoolHeads + kHeads - 1) / kHeads;
        __device__ static int32_t head(int i) { return threadIdx.x / kHeadWords + i * kHeads; }
        __device__ static int group() { return threadIdx.x / 4 % kIndexGroups; }
        __device__ static int word() { return threadIdx.x % 4; }

        const IndexScoresParams& p_;
        QueryWords<1> words_[kOwn];
    };

    // All threads of the block call, places are there: the first copies.
    __device__ __forceinline__ void start() {
        const int32_t own = prepared_unit();
        copy_scales(own);  // before keys, which take long to come
        commit_copies();
        const WarpWork work(warp_, lane_);
        fetch(work.unit, work.codes);
        copy_scales(own + kPoolWarps);
        commit_copies();
        fetch(work.unit + kPoolGroups, work.codes ^ sizeof(PoolKeys));
        commit_copies();
    }
    // Queries are there, too; a barrier comes behind.
    __device__ __forceinline__ void prepare() {
        wait_copies<kPoolStages>();
        fold_scales(prepared_unit());
    }

    // All threads of the block call. A round is a unit for each warp to prepare the scales of,
    // while those of the round before are scored. Groups of warps wait for nobody else.
    __device__ __forceinline__ void run() {
        float2 weights[kPoolHeadBlock / 8];
        load_weights(0, weights);
        int32_t round_end = kPoolWarps;
        for (WarpWork work(warp_, lane_); work.unit < units_; work.advance()) {
            wait_copies<kPoolStages - 1>();
            __syncwarp();
            float score;
            if (s_.unit_folds[work.unit] != 0) {
                score = folded_score(work, weights);
            } else {
                score = groups_score(work);
                fetch_behind(work);
            }
            write_score(score, work.own);
            if (work.unit + kPoolGroups >= round_end && round_end < units_) {
                fold_scales(prepared_unit() + round_end);
                round_end += kPoolWarps;
                copy_scales(prepared_unit() + round_end);
                cutlass::arch::NamedBarrier::sync(kGroupThreads, warp_ / 4);
            }
            commit_copies();
        }
        wait_for_copies();
    }

  private:
    static constexpr int kLaneKeys = 4;  // of a unit whose scales a warp prepares

    // That unit, of a round: one that the warp's group scores.
    __device__ __forceinline__ int32_t prepared_unit() const {
        return warp_ % 4 * kPoolGroups + warp_ / 4;
    }

    // The key whose score a lane gets, among the warp's.
    __device__ static int32_t own_key(int32_t lane) { return lane % 4 * kPoolBlock + lane / 4; }

    // A warp's unit, and where a lane reads and writes: bytes from the first score and from the
    // first code of the ring. Kept in registers, though it could be computed anew each time.
    struct WarpWork {
        int32_t unit, words, own, codes, group;

        __device__ __forceinline__ WarpWork(int32_t warp, int32_t lane) {
            unit = warp / 4;
            const int32_t first = unit * kPassKeys + warp % 4 * kPoolWarpKeys;
            words = fresh(4 * (first + lane / 4));
            own = fresh(4 * (first + own_key(lane)));
            codes = fresh(warp * kPoolStages * int32_t{sizeof(PoolKeys)} + 16 * lane);
            group = fresh(lane % 4 * FoldedScales::kShiftBits);
        }
        __device__ __forceinline__ void advance() {
            unit += kPoolGroups;
            words += 4 * kPoolGroups * kPassKeys;
            own += 4 * kPoolGroups * kPassKeys;
            codes ^= sizeof(PoolKeys);
        }
    };
    static_assert(kPoolStages == 2 && (sizeof(PoolKeys) & (sizeof(PoolKeys) - 1)) == 0);

    // Of the scores, which are scales before.
    template <class T>
    __device__ __forceinline__ T& at(int32_t bytes) const {
        return *reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(scores_) + bytes);
    }

    __device__ static int32_t padded_heads(const IndexScoresParams& p) {
        return p.query.heads <= kPoolHeadBlock ? kPoolHeadBlock : kPoolHeads;
    }

    // Starts the copies of the codes of a unit, if there is one.
    __device__ __forceinline__ void fetch(int32_t unit, int32_t codes) {
        if (unit < units_) {
            const uint4 four = *reinterpret_cast<const uint4*>(places_.at + unit * kPoolUnitBlocks +
                                                               warp_ % 4 * kPoolWarpBlocks);
            const uint32_t places[kPoolWarpBlocks] = {four.x, four.y, four.z, four.w};
            const uint8_t* from = fresh(data_);
#pragma unroll
            for (int i = 0; i < kPoolWarpBlocks; ++i) {
                copy_16_async(ring_ + codes + i * kPoolBlockBytes,
                              from + uint64_t{places[i]} * PoolPlaces::kUnit, true);
            }
        }
    }

    // Starts the copies of the scales of a unit to where the scores will be.
    __device__ __forceinline__ void copy_scales(int32_t unit) const {
        const int32_t place = unit * kPoolUnitBlocks + lane_ / 2;
        if (unit >= units_ || places_.visible(place, n_vis_) <= 0) return;
        constexpr Record r = record(RecordId::IndexFp4);
        const int32_t offset = PoolPlaces::offset(p_.index, places_.blocks[place]);
        const int64_t skip = r.scale_at(offset, p_.index.page_size) - r.data_at(offset);
        const uint8_t* codes = p_.index.data + uint64_t{places_.at[place]} * PoolPlaces::kUnit;
        copy_16_async(scores_ + unit * kPassKeys + kLaneKeys * lane_,
                      codes + skip + lane_ % 2 * sizeof(uint4), true);
    }

    // Makes of them what the path of the unit wants: folded, where all of the unit's fold. A lane
    // has those that it has copied.
    __device__ __forceinline__ void fold_scales(int32_t unit) {
        if (unit >= units_) return;
        uint4& four = reinterpret_cast<uint4*>(scores_ + unit * kPassKeys)[lane_];
        const int32_t keys =
            places_.visible(unit * kPoolUnitBlocks + lane_ / 2, n_vis_) - lane_ % 2 * kLaneKeys;
        uint32_t words[kLaneKeys] = {four.x, four.y, four.z, four.w};
        uint32_t folded[kLaneKeys];
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) {
            if (e >= keys) words[e] = kUnitScales;
        }
        bool folds = FoldedScales::fold(words, folded);
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) {
            if (e >= keys) folded[e] = kNanBits;
        }
        folds = __all_sync(~0u, folds) && s_.folds != 0;
        if (lane_ == 0) s_.unit_folds[unit] = folds;
        four = folds ? uint4{folded[0], folded[1], folded[2], folded[3]}
                     : uint4{words[0], words[1], words[2], words[3]};
    }

    __device__ __forceinline__ void load_weights(int32_t head,
                                                 float2 (&weights)[kPoolHeadBlock / 8]) const {
        const float2* source = reinterpret_cast<const float2*>(s_.folded_weights + head);
#pragma unroll
        for (int i = 0; i < kPoolHeadBlock / 8; ++i) weights[i] = source[4 * i + lane_ % 4];
    }

    // Once all lanes have read the keys and scales of a unit.
    __device__ __forceinline__ void fetch_behind(const WarpWork& work) {
        __syncwarp();
        fetch(work.unit + kPoolStages * kPoolGroups, work.codes);
    }

    // Adds up the heads of the warp's keys: row lane / 4 + 8 half of its part of tile t is key
    // lane / 4 of block 2 t + half. Returns the score of the lane's own key. weights: of the first
    // heads. MMAs of one tile run while the next is converted.
    __device__ __forceinline__ float folded_score(const WarpWork& work,
                                                  const float2 (&weights)[kPoolHeadBlock / 8]) {
        OffsetTile tiles[kPassTiles];
        uint32_t sums[kPassTiles][kPoolHeadBlock / 2];
        float partials[kPassTiles][2] = {};
        const uint32_t queries = __shfl_sync(~0u, query_descriptor(s_.units), 0);  // uniform
        const int4* starts = s_.starts + lane_ % 4;
        set_tile(work, 0, tiles[0]);
        tiles[0].start(queries, starts, sums[0]);
        set_tile(work, 1, tiles[1]);
        tiles[1].start(queries, starts + fresh(0), sums[1]);
        add_tiles(weights, sums, partials, [&] { fetch_behind(work); });
        const int32_t heads = padded_heads(p_);
#pragma unroll 1
        for (int32_t first = kPoolHeadBlock; first < heads; first += kPoolHeadBlock) {
            float2 more[kPoolHeadBlock / 8];
            load_weights(first, more);
            const uint32_t at = __shfl_sync(~0u, queries + first * (kQueryBytes >> 4), 0);
#pragma unroll
            for (int t = 0; t < kPassTiles; ++t) tiles[t].start(at, starts + first / 2, sums[t]);
            add_tiles(more, sums, partials, [] {});
        }
        return mul_rn(reduce_quad(partials), FoldedScales::rest(at<uint32_t>(work.own)));
    }

    // Of some heads, when their MMAs are done. The first tile's and `between` while the second's
    // run.
    template <class Between>
    __device__ __forceinline__ static void add_tiles(
        const float2 (&weights)[kPoolHeadBlock / 8],
        uint32_t (&sums)[kPassTiles][kPoolHeadBlock / 2], float (&partials)[kPassTiles][2],
        const Between& between) {
        finish_folded<1>(sums[0]);
        add_folded_heads<kPoolHeadBlock>(sums[0], 0, weights, partials[0]);
        between();
        finish_folded<0>(sums[1]);
        add_folded_heads<kPoolHeadBlock>(sums[1], 0, weights, partials[1]);
    }

    // A lane has 16 bytes of one group of two rows, so that one table serves four words.
    __device__ __forceinline__ void set_tile(const WarpWork& work, int t, OffsetTile& tile) const {
        const uint4 words[2] = {codes(work, 2 * t), codes(work, 2 * t + 1)};
        const HalfUnits tables[2] = {units(work, 2 * t), units(work, 2 * t + 1)};
        tile.set(0, words[0], tables[0]);
        tile.set(1, words[1], tables[1]);
    }
    // Of key lane / 4 of a block.
    __device__ __forceinline__ uint4 codes(const WarpWork& work, int block) const {
        return *reinterpret_cast<const uint4*>(ring_ + work.codes + block * kPoolBlockBytes);
    }
    __device__ __forceinline__ HalfUnits units(const WarpWork& work, int block) const {
        return FoldedScales::units(at<uint32_t>(work.words + 4 * kPoolBlock * block), work.group);
    }

    // The warp's 16 keys of a tile as A of four MMA steps. Rows lie 64 bytes apart, so that four of
    // them meet in each bank.
    __device__ __forceinline__ KeyFragment load_keys(const PoolKeys& keys, int32_t tile) const {
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
    __device__ __forceinline__ float groups_score(const WarpWork& work) {
        const uint32_t word = at<uint32_t>(work.own);
        const bool plain = __all_sync(~0u, is_plain(odd_key_bits(word))) && s_.plain != 0;
        const PoolKeys& keys = *reinterpret_cast<const PoolKeys*>(ring_ + work.codes - 16 * lane_);
        const uint32_t queries = query_descriptor(s_.codes);
        const int32_t heads = padded_heads(p_);
        float partials[kPassTiles][2] = {};
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            const KeyFragment fragment = load_keys(keys, tile);
            const uint32_t words[2] = {
                at<uint32_t>(work.words + 8 * kPoolBlock * tile),
                at<uint32_t>(work.words + 8 * kPoolBlock * tile + 4 * kPoolBlock)};
#pragma unroll 1
            for (int32_t first = 0; first < heads; first += PoolDots::kGroupHeads) {
                float sums[kIndexGroups][PoolDots::kGroupSums];
                start_dots<PoolDots>(fragment, queries + first * (kQueryBytes >> 4), sums);
                finish_dots<PoolDots, 0>(sums);
                if (plain) {
                    add_plain(sums, words, first, partials[tile]);
                } else {
                    add_heads<PoolDots>(p_, s_.row, first, sums, words, partials[tile]);
                }
            }
        }
        const int32_t place = work.own / 4 / kPoolBlock;
        const float score = reduce_quad(partials);
        if (lane_ / 4 >= places_.visible(place, n_vis_)) return bits_float(kNanBits);
        return plain ? mul_rn(score, bits_float(word << 23 & kInfBits)) : score;
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

    __device__ __forceinline__ void write_score(float score, int32_t to) {
        at<float>(to) = score;
        // The order key, but for zeros and NaN.
        const int32_t bits = __float_as_int(score);
        atomicAdd(&bins_[static_cast<uint32_t>(bits ^ (bits >> 31 | INT32_MIN)) >> kPoolBinShift],
                  1u);
    }

    const IndexScoresParams& p_;
    const int32_t& n_vis_;
    const PoolPlaces places_;
    const int32_t units_;
    float* scores_;
    uint8_t* ring_;
    uint32_t* bins_;
    PoolScoresShared& s_;
    const int32_t warp_, lane_;
    const uint8_t* data_;  // what this lane copies, of the first block of the first page
};

}  // namespace flash_csa::sm90
