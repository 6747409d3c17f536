// The keys of a score kernel: a ring of units in shared memory, filled by bulk copies from pages.
//
//   feeder warps   copies of codes and scale words, some units ahead     full[stage]
//                  scale words -> how each group folds                   ready[stage]
//   consumers                                                            empty[stage]
//
// Feeders take units in turn: one warp alone starts copies too slowly (70 cycles each) to keep up
// with HBM. A unit is kUnitKeys consecutive columns of one request, as they lie in pages.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/columns.h"
#include "core/records.h"
#include "sm90/index/index_codes.cuh"
#include "sm90/index/score_work.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kKeyBytes = record(RecordId::IndexFp4).data_bytes;
constexpr int32_t kScaleBytes = record(RecordId::IndexFp4).scale_bytes;

using Barrier = cutlass::arch::ClusterTransactionBarrier;

struct alignas(16) KeyStage {
    // As in pages: the codes of a piece (class Pieces), then its scale words.
    uint8_t pieces[kUnitKeys * (kKeyBytes + kScaleBytes)];
    // Of keys of a unit that folds: bytes, a group's exponent - the lowest; what is left of the
    // scales of a score, NaN for an entry on no page.
    uint32_t shifts[kUnitKeys];
    float rest[kUnitKeys];
    uint32_t present;  // bit i: keys 8 i .. 8 i + 7 are on a page
    uint32_t plain;    // all visible keys have plain scales
    uint32_t folds;    // and exponents that differ by at most kMaxIntegerFold
    uint32_t unused;
};
static_assert(kUnitKeys / 8 == 32);  // bits of `present`

// Where a key of a unit lies in a stage. A piece is a page, or smaller ones that are the keys of a
// warp in a pass.
struct Pieces {
    static constexpr int32_t kLeast = 32;
    int32_t in_piece;  // bits of a key that say which one of its piece

    __device__ __forceinline__ explicit Pieces(const ConstPages& index)
        : in_piece(max(index.page_size, kLeast) - 1) {}
    __device__ __forceinline__ int32_t code_at(int32_t key) const {
        return kKeyBytes * key + kScaleBytes * (key & ~in_piece);
    }
    __device__ __forceinline__ int32_t scale_at(int32_t key) const {
        return kKeyBytes * ((key | in_piece) + 1) + kScaleBytes * key;
    }
};

struct KeyRing {
    KeyStage* stages;  // [num_stages]
    Barrier* full;     // one arrival
    Barrier* ready;    // an arrival of each lane of the feeder
    Barrier* empty;    // an arrival of each thread of the groups that took the unit
    int32_t num_stages;

    // One thread; a barrier of the block follows.
    __device__ void init(int32_t consumers) const {
        for (int32_t i = 0; i < num_stages; ++i) {
            full[i].init(1);
            ready[i].init(32);
            empty[i].init(consumers);
        }
        cutlass::arch::fence_barrier_init();
    }
};

struct RingPosition {
    int32_t num_stages;
    int32_t stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int32_t steps) {  // at most num_stages
        stage += steps;
        if (stage >= num_stages) {
            stage -= num_stages;
            phase ^= 1;
        }
    }
};

using UnitTurn = Turn<RingPosition>;

// ---- Copies

// A lane copies one piece of each unit, codes and scale words: what a page holds of it.
class Copier {
  public:
    __device__ explicit Copier(const IndexScoresParams& p) : p_(p), pieces_(p.index) {
        const int32_t size = p.index.page_size;
        page_shift_ = __ffs(size) - 1;
        key_ = static_cast<int32_t>(threadIdx.x % 32) << page_shift_;
        eighths_ = ~0u >> (32 - size / 8) << (key_ / 8 & 31);
    }

    // Column of the lane's first key of a unit.
    __device__ __forceinline__ int32_t column_of(int32_t unit) const {
        return unit * kUnitKeys + key_;
    }
    // The lane's page of a unit; -1 where it copies nothing.
    __device__ __forceinline__ int32_t page_of(const Segment& segment, int32_t unit) const {
        const int32_t column = column_of(unit);
        if (key_ >= kUnitKeys || column >= segment.count) return -1;
        return __ldg(p_.block_table.row(segment.request) + (column >> page_shift_));
    }
    __device__ __forceinline__ void copy(int32_t page, const KeyRing& ring,
                                         const RingPosition& at) const {
        const ConstPages& index = p_.index;
        const bool copies = page >= 0 && page < index.num_pages;
        const int32_t piece = index.page_size * (kKeyBytes + kScaleBytes);
        const uint32_t pages = __popc(__ballot_sync(~0u, copies));
        const uint32_t present = __reduce_or_sync(~0u, copies ? eighths_ : 0);
        KeyStage& stage = ring.stages[at.stage];
        Barrier& full = ring.full[at.stage];
        ring.empty[at.stage].wait(at.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            stage.present = present;
            full.arrive_and_expect_tx(pages * piece);
        }
        __syncwarp();
        if (index.page_size >= kUnitKeys / kFewPieces) {
            // One lane starts all copies: several lanes would take turns, 70 cycles each.
            const bool elected = cute::elect_one_sync();
#pragma unroll
            for (int i = 0; i < kFewPieces; ++i) {
                const int32_t other = __shfl_sync(~0u, copies ? page : -1, i);
                if (elected && other >= 0) copy_page(other, i * index.page_size, stage, full);
            }
        } else if (copies) {
            copy_part(page, stage, full);
        }
    }

  private:
    static constexpr int kFewPieces = 4;

    // A page that is a piece, from key `key` of the unit on.
    __device__ __forceinline__ void copy_page(int32_t page, int32_t key, KeyStage& stage,
                                              Barrier& full) const {
        constexpr int32_t kBytes = kKeyBytes + kScaleBytes;
        copy_bytes(page, 0, stage.pieces + key * kBytes, p_.index.page_size * kBytes, full);
    }
    // A page that is part of a piece.
    __device__ __forceinline__ void copy_part(int32_t page, KeyStage& stage, Barrier& full) const {
        const int32_t codes = p_.index.page_size * kKeyBytes;
        copy_bytes(page, 0, stage.pieces + pieces_.code_at(key_), codes, full);
        copy_bytes(page, codes, stage.pieces + pieces_.scale_at(key_),
                   p_.index.page_size * kScaleBytes, full);
    }
    __device__ __forceinline__ void copy_bytes(int32_t page, int32_t at, uint8_t* to, int32_t bytes,
                                               Barrier& full) const {
        cute::SM90_BULK_COPY_G2S::copy(p_.index.data + page * p_.index.page_stride + at,
                                       reinterpret_cast<uint64_t*>(&full), to, bytes);
    }

    const IndexScoresParams& p_;
    const Pieces pieces_;
    int32_t key_;  // first of the piece, in the unit; lanes without a piece lie behind it
    int32_t page_shift_;
    uint32_t eighths_;  // bit i: the piece covers keys 8 i .. 8 i + 7
};

// ---- Scales

// One warp; the copies of the unit are on their way. A lane takes four neighbouring keys at a time.
__device__ __forceinline__ void prepare_scales(const Pieces& pieces, const Segment& segment,
                                               int32_t unit, const KeyRing& ring,
                                               const RingPosition& at) {
    constexpr int kLaneKeys = 4, kSteps = kUnitKeys / (32 * kLaneKeys);
    const int32_t lane = threadIdx.x % 32;
    KeyStage& stage = ring.stages[at.stage];
    ring.full[at.stage].wait(at.phase);
    const uint32_t present = stage.present;
    const int32_t visible = segment.count - unit * kUnitKeys;
    uint32_t odd = 0, spread = 0;  // bits that are set where a key is not plain, does not fold
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int32_t four = 32 * step + lane;
        const bool here = present >> (four / 2) & 1;
        const uint8_t* source = stage.pieces + pieces.scale_at(kLaneKeys * four);
        const uint4 raw = *reinterpret_cast<const uint4*>(source);
        uint32_t words[kLaneKeys] = {raw.x, raw.y, raw.z, raw.w};
        float rest[kLaneKeys];
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
            uint32_t& word = words[i];
            if (!here || kLaneKeys * four + i >= visible) word = kUnitScales;
            const int32_t lowest = scale_range(word).low;
            odd |= odd_key_bits(word);
            word -= lowest * 0x01010101u;
            spread |= word;
            rest[i] = here ? power_of_two(lowest + kFoldedScoreExponent) : bits_float(kNanBits);
        }
        reinterpret_cast<uint4*>(stage.shifts)[four] = {words[0], words[1], words[2], words[3]};
        reinterpret_cast<float4*>(stage.rest)[four] = {rest[0], rest[1], rest[2], rest[3]};
    }
    static_assert(kMaxIntegerFold == 3);
    const bool plain = __all_sync(~0u, is_plain(odd));
    const bool folds = __all_sync(~0u, (spread & 0xfcfcfcfcu) == 0) && plain;
    if (lane == 0) {
        stage.plain = plain;
        stage.folds = folds;
    }
    __syncwarp();
    ring.ready[at.stage].arrive();
}

// ---- Feeder

constexpr int kFeeders = 3;  // warps

// One warp: all its units of a list. The ring holds as many of each feeder, so that one waits for
// stages in the order in which it filled them. There are as many feeders as groups of consumers, so
// that a stage always has the same groups: one that had no part in a stage's last unit would take
// that one's phase for its own unit's. Copies run ahead, by no more than the feeder's share
// of the ring: before a copy waits for a stage, the scales of the unit in it must be ready.
__device__ __forceinline__ void feed_keys(const IndexScoresParams& p, const WorkList& list,
                                          const KeyRing& ring, UnitTurn& copy_turn,
                                          UnitTurn& scale_turn) {
    const Copier copier(p);
    const Pieces pieces(p.index);
    const int32_t most = max(1, ring.num_stages / kFeeders);
    Units<RingPosition> copies(list, copy_turn);
    int32_t page = copies.valid() ? copier.page_of(copies.segment, copies.unit) : -1;
    int32_t ahead = 0;  // units copied that have no scales yet
    for (Units<RingPosition> scales(list, scale_turn); scales.valid(); scales.advance(), --ahead) {
        for (; copies.valid() && ahead < most; ++ahead) {
            copier.copy(page, ring, copies.at());
            copies.advance();
            // Here, so that nothing waits for it before the next copy.
            if (copies.valid()) page = copier.page_of(copies.segment, copies.unit);
        }
        prepare_scales(pieces, scales.segment, scales.unit, ring, scales.at());
    }
}

}  // namespace flash_csa::sm90
