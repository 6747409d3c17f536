// The keys of a score kernel: a ring of units in shared memory, filled by bulk copies from pages.
//
//   feeder warps   copies of codes and scale words, some units ahead     full[stage]
//                  scale words -> factors of each key                    ready[stage]
//   consumers                                                            empty[stage]
//
// Feeders take units in turn: one warp alone starts copies too slowly (70 cycles each) to keep up
// with HBM. A unit is 128 consecutive columns of one request: four runs of 32 keys. A run is 16
// bytes longer than its codes, so that ldmatrix, which reads the same 16 bytes of two neighbouring
// keys of each run at a time, meets every bank once.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/columns.h"
#include "core/records.h"
#include "sm90/index/index_codes.cuh"
#include "sm90/index/score_work.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kRunKeys = 32;
constexpr int32_t kUnitRuns = kUnitKeys / kRunKeys;
constexpr int32_t kKeyBytes = record(RecordId::IndexFp4).data_bytes;
constexpr int32_t kScaleBytes = record(RecordId::IndexFp4).scale_bytes;
constexpr int32_t kRunBytes = kRunKeys * kKeyBytes + 16;

using Barrier = cutlass::arch::ClusterTransactionBarrier;

struct alignas(16) KeyStage {
    uint8_t codes[kUnitRuns * kRunBytes];
    uint32_t scales[kUnitKeys];
    // Of each key: floats 2^(exponents of groups 1, 2, 3 - that of group 0); bytes 2^(exponent of a
    // group - lowest) where the unit folds. One more a run: the same key of four runs lies in four
    // banks.
    uint4 factors[kUnitRuns][kRunKeys + 1];
    uint32_t present;  // bit i: keys 8 i .. 8 i + 7 are on a page
    uint32_t plain;    // all visible keys have plain scales
    uint32_t folds;    // and exponents that differ by at most kMaxIntegerFold
    uint32_t unused;
};

struct KeyRing {
    KeyStage* stages;  // [num_stages]
    Barrier* full;     // one arrival
    Barrier* ready;    // an arrival of each lane of the feeder
    Barrier* empty;    // an arrival of each thread of the group that took the unit
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

// What a lane copies of each unit: lanes 0..15 codes, lanes 16..31 scale words. A piece lies in one
// page and, for codes, in one run.
class Copier {
  public:
    __device__ explicit Copier(const IndexScoresParams& p) : p_(p) {
        const int32_t lane = threadIdx.x % 32;
        const int32_t size = p.index.page_size;
        codes_ = lane < 16;
        page_shift_ = __ffs(size) - 1;
        const int32_t piece = min(codes_ ? kRunKeys : kUnitKeys, size);
        key_ = lane % 16 * piece;
        bytes_ = piece * (codes_ ? kKeyBytes : kScaleBytes);
        target_ = codes_ ? key_ / kRunKeys * kRunBytes + key_ % kRunKeys * kKeyBytes
                         : static_cast<int32_t>(offsetof(KeyStage, scales)) + key_ * kScaleBytes;
        eighths_ = codes_ && key_ < kUnitKeys ? ((1u << piece / 8) - 1) << key_ / 8 : 0;
    }

    // The lane's page of a unit; -1 where it copies nothing.
    __device__ __forceinline__ int32_t page_of(const Segment& segment, int32_t unit) const {
        const int32_t column = unit * kUnitKeys + key_;
        if (key_ >= kUnitKeys || column >= segment.count) return -1;
        return __ldg(p_.block_table.row(segment.request) + (column >> page_shift_));
    }

    __device__ __forceinline__ void copy(int32_t unit, int32_t page, const KeyRing& ring,
                                         const RingPosition& at) const {
        const ConstPages& index = p_.index;
        const bool copies = page >= 0 && page < index.num_pages;
        const int32_t offset = (unit * kUnitKeys + key_) & (index.page_size - 1);
        const int32_t in_page =
            codes_ ? offset * kKeyBytes : index.page_size * kKeyBytes + offset * kScaleBytes;
        const uint8_t* source = index.data + page * index.page_stride + in_page;
        const uint32_t lanes = __ballot_sync(~0u, copies);
        const uint32_t total = __popc(lanes & 0xffffu) * __shfl_sync(~0u, bytes_, 0) +
                               __popc(lanes >> 16) * __shfl_sync(~0u, bytes_, 16);
        const uint32_t present = __reduce_or_sync(~0u, copies ? eighths_ : 0);
        KeyStage& stage = ring.stages[at.stage];
        Barrier& full = ring.full[at.stage];
        ring.empty[at.stage].wait(at.phase ^ 1);
        if (threadIdx.x % 32 == 0) {
            stage.present = present;
            full.arrive_and_expect_tx(total);
        }
        __syncwarp();
        if (copies) {
            cute::SM90_BULK_COPY_G2S::copy(source, reinterpret_cast<uint64_t*>(&full),
                                           reinterpret_cast<uint8_t*>(&stage) + target_, bytes_);
        }
    }

  private:
    const IndexScoresParams& p_;
    int32_t key_;  // first of the piece, in the unit; lanes without a piece lie behind it
    int32_t bytes_, target_, page_shift_;
    uint32_t eighths_;  // bit i: the piece covers keys 8 i .. 8 i + 7
    bool codes_;
};

// ---- Scales

__device__ __forceinline__ uint4 key_factors(uint32_t word, int32_t lowest) {
    const uint32_t relative = word + (kUnitScales - (word & 0xffu) * 0x01010101u);  // if plain
    // 1 << (0 .. 3) in every byte that folds: bits 0 and 1 of a difference d give (1 + b0)(1 + 3
    // b1).
    const uint32_t d = word - lowest * 0x01010101u;
    const uint32_t b0 = d & 0x01010101u, b1 = d >> 1 & 0x01010101u;
    const uint32_t powers = (0x01010101u + b0) + b1 * 3 + 3 * (b0 & b1);
    return {relative << 15 & kInfBits, relative << 7 & kInfBits, relative >> 1 & kInfBits, powers};
}

// One warp; the copies of the unit are on their way.
__device__ __forceinline__ void prepare_scales(const Segment& segment, int32_t unit,
                                               const KeyRing& ring, const RingPosition& at) {
    const int32_t lane = threadIdx.x % 32;
    KeyStage& stage = ring.stages[at.stage];
    ring.full[at.stage].wait(at.phase);
    const uint32_t present = stage.present;
    const int32_t visible = segment.count - unit * kUnitKeys;
    static_assert(kRunKeys == 32);
    uint32_t words[kUnitRuns];
    int32_t lowest[kUnitRuns];
    bool plain = true, folds = true;
#pragma unroll
    for (int i = 0; i < kUnitRuns; ++i) {
        const int32_t key = kRunKeys * i + lane;
        const bool counts = key < visible && (present >> key / 8 & 1) != 0;
        words[i] = counts ? stage.scales[key] : kUnitScales;
    }
#pragma unroll
    for (int i = 0; i < kUnitRuns; ++i) {
        const ByteRange range = scale_range(words[i]);
        lowest[i] = range.low;
        plain &= is_plain_key(words[i]);
        folds &= range.high - range.low <= kMaxIntegerFold;
    }
    plain = __all_sync(~0u, plain);
    folds = __all_sync(~0u, folds) && plain;
#pragma unroll
    for (int i = 0; i < kUnitRuns; ++i) {
        stage.factors[i][lane] = key_factors(words[i], lowest[i]);
    }
    if (lane == 0) {
        stage.plain = plain;
        stage.folds = folds;
    }
    __syncwarp();
    ring.ready[at.stage].arrive();
}

// ---- Feeder

constexpr int kFeeders = 4;  // warps

// One warp: all its units of a list. Copies run ahead, less than the feeder's share of the ring:
// the consumers must get the scales that the unit in the way of a copy waits for.
__device__ __forceinline__ void feed_keys(const IndexScoresParams& p, const WorkList& list,
                                          const KeyRing& ring, UnitTurn& copy_turn,
                                          UnitTurn& scale_turn) {
    const Copier copier(p);
    const int32_t most = max(2, ring.num_stages / kFeeders - 1);
    Units<RingPosition> copies(list, copy_turn);
    int32_t page = copies.valid() ? copier.page_of(copies.segment, copies.unit) : -1;
    int32_t ahead = 0;  // units copied that have no scales yet
    for (Units<RingPosition> scales(list, scale_turn); scales.valid(); scales.advance(), --ahead) {
        for (; copies.valid() && ahead < most; ++ahead) {
            copier.copy(copies.unit, page, ring, copies.at());
            copies.advance();
            // Here, so that nothing waits for it before the next copy.
            if (copies.valid()) page = copier.page_of(copies.segment, copies.unit);
        }
        prepare_scales(scales.segment, scales.unit, ring, scales.at());
    }
}

}  // namespace flash_csa::sm90
