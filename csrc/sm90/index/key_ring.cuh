// The keys of a score kernel: a ring of units in shared memory, filled by bulk copies from pages.
//
//   loader warp   codes and scale words of a unit          full[stage]
//   scale warp    scale words -> exponents of a key        ready[stage]
//   consumers                                              empty[stage]
//
// A unit is 128 consecutive columns of one request: four runs of 32 keys. A run is 16 bytes longer
// than its codes, so that ldmatrix, which reads the same 16 bytes of two neighbouring keys of each
// run at a time, meets every bank once.
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
    // Of each key: 2^(exponents of groups 1, 2, 3 minus that of group 0), 2^(exponent of group 0).
    float4 factors[kUnitRuns][kRunKeys + 1];  // one more: the same key of four runs, four banks
    uint32_t present;                         // bit i: keys 8 i .. 8 i + 7 are on a page
    uint32_t plain;                           // all visible keys have plain scales
    uint32_t unused[2];
};

struct KeyRing {
    KeyStage* stages;
    Barrier* full;   // [num_stages], one arrival
    Barrier* ready;  // [num_stages], one arrival
    Barrier* empty;  // [num_stages], one arrival of each warp of the group that took the unit
    int32_t num_stages;

    // One thread; a barrier of the block follows.
    __device__ void init(int32_t consumer_warps) const {
        for (int32_t i = 0; i < num_stages; ++i) {
            full[i].init(1);
            ready[i].init(1);
            empty[i].init(consumer_warps);
        }
        cutlass::arch::fence_barrier_init();
    }
};

// A role's place in the ring.
struct RingPosition {
    int32_t stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(const KeyRing& ring, int32_t steps = 1) {
        stage += steps;
        if (stage >= ring.num_stages) {
            stage -= ring.num_stages;
            phase ^= 1;
        }
    }
};

// ---- Loader

// Page ids of a request, 32 at a time in the lanes of a warp, the next 32 on their way.
class PageList {
  public:
    __device__ PageList(const int32_t* pages, int32_t first, int32_t count)
        : pages_(pages), base_(first & ~31), count_(count) {
        now_ = fetch(base_);
        next_ = fetch(base_ + 32);
    }
    // Makes pages up to `last` available.
    __device__ __forceinline__ void seek(int32_t last) {
        if (last < base_ + 32) return;
        base_ += 32;
        now_ = next_;
        next_ = fetch(base_ + 32);
    }
    __device__ __forceinline__ int32_t at(int32_t page) const {
        return __shfl_sync(~0u, now_, page - base_);
    }

  private:
    __device__ int32_t fetch(int32_t base) const {
        const int32_t page = base + static_cast<int32_t>(threadIdx.x % 32);
        return page < count_ ? __ldg(pages_ + page) : -1;
    }
    const int32_t* pages_;
    int32_t base_, count_;
    int32_t now_, next_;
};

// One warp. Lanes 0..15 copy codes, lanes 16..31 scale words; a piece lies in one page and, for
// codes, in one run.
__device__ __forceinline__ void load_keys(const IndexScoresParams& p, const Segment& segment,
                                          const KeyRing& ring, RingPosition& at) {
    const int32_t lane = threadIdx.x % 32;
    const ConstPages& index = p.index;
    const int32_t page_shift = __ffs(index.page_size) - 1;
    const bool codes = lane < 16;
    const int32_t piece = min(codes ? kRunKeys : kUnitKeys, index.page_size);
    const int32_t key = (lane % 16) * piece;  // of the unit
    const uint32_t bytes = piece * (codes ? kKeyBytes : kScaleBytes);
    const int32_t target =
        codes ? key / kRunKeys * kRunBytes + key % kRunKeys * kKeyBytes
              : static_cast<int32_t>(offsetof(KeyStage, scales)) + key * kScaleBytes;
    const int32_t* table = p.block_table.row(p.batch.row_request[segment.first_row]);
    PageList pages(table, segment.begin * kUnitKeys >> page_shift,
                   (segment.count + index.page_size - 1) >> page_shift);
    for (int32_t unit = segment.begin; unit < segment.end; ++unit, at.advance(ring)) {
        const int32_t column = unit * kUnitKeys + min(key, kUnitKeys - 1);
        pages.seek((unit * kUnitKeys + kUnitKeys - 1) >> page_shift);
        const int32_t page = pages.at(column >> page_shift);
        const bool copies =
            key < kUnitKeys && column < segment.count && page >= 0 && page < index.num_pages;
        const uint8_t* source = index.data + page * index.page_stride;
        const int32_t offset = column & (index.page_size - 1);
        source += codes ? int64_t{offset} * kKeyBytes
                        : int64_t{index.page_size} * kKeyBytes + offset * kScaleBytes;
        const uint32_t total = __reduce_add_sync(~0u, copies ? bytes : 0);
        // Keys of this lane's piece, in eighths; only code pieces, which cover every key once.
        const uint32_t eighths = codes && copies ? ((1u << piece / 8) - 1) << key / 8 : 0;
        const uint32_t present = __reduce_or_sync(~0u, eighths);
        KeyStage& stage = ring.stages[at.stage];
        ring.empty[at.stage].wait(at.phase ^ 1);
        if (lane == 0) {
            stage.present = present;
            ring.full[at.stage].arrive_and_expect_tx(total);
        }
        __syncwarp();
        if (copies) {
            cute::SM90_BULK_COPY_G2S::copy(
                source, reinterpret_cast<uint64_t*>(&ring.full[at.stage]),
                reinterpret_cast<uint8_t*>(&stage) + target, static_cast<int32_t>(bytes));
        }
    }
}

// ---- Scales

// The factors of a key and whether its scales are plain. An absent key's score becomes NaN.
__device__ __forceinline__ bool key_factors(uint32_t word, bool visible, bool present,
                                            float4* factors) {
    if (!visible || !present) word = kUnitScales;
    const int32_t first = scale_byte(word, 0);
    factors->x = power_of_two(scale_byte(word, 1) - first + 127);
    factors->y = power_of_two(scale_byte(word, 2) - first + 127);
    factors->z = power_of_two(scale_byte(word, 3) - first + 127);
    factors->w = present ? power_of_two(first) : bits_float(kNanBits);
    return is_plain(scale_range(word));
}

// One warp.
__device__ __forceinline__ void prepare_scales(const Segment& segment, const KeyRing& ring,
                                               RingPosition& at) {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t unit = segment.begin; unit < segment.end; ++unit, at.advance(ring)) {
        KeyStage& stage = ring.stages[at.stage];
        ring.full[at.stage].wait(at.phase);
        const uint32_t present = stage.present;
        bool plain = true;
        static_assert(kRunKeys == 32);
#pragma unroll
        for (int i = 0; i < kUnitRuns; ++i) {
            const int32_t key = kRunKeys * i + lane;
            const bool visible = unit * kUnitKeys + key < segment.count;
            plain &= key_factors(stage.scales[key], visible, present >> key / 8 & 1,
                                 &stage.factors[i][lane]);
        }
        plain = __all_sync(~0u, plain);
        if (lane == 0) {
            stage.plain = plain;
            ring.ready[at.stage].arrive();
        }
    }
}

}  // namespace flash_csa::sm90
