// Parts of few_heads.cu: shared memory, the stream of records into registers, both products.
//
// Lanes: lane = 4 g + t of warp w has records 16 w + g and 16 w + g + 8 of a tile (its two rows)
// and, of every 64 dims (a panel), the 16 dims from 16 t on. That is where an A fragment of the
// tensor cores wants them, if the dims of a panel are counted in the order (j, r, t, e) of
// dim 16 t + 8 j + r + 4 e, in the query too: a record goes from global memory through registers
// into the first product, and the same registers are stored once for the second.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/arch/copy.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "core/list.h"
#include "core/schedule.h"
#include "sm90/attend/dequant.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90::few_heads {

// Warpgroups of a CTA, which share its query and take its tiles in turns. The queries of two CTAs
// of 32 heads, two tiles and the rings do not fit an SM.
template <int kHeads>
inline constexpr int kGroups = kHeads == 32 ? 2 : 1;
template <int kHeads>
inline constexpr int kCtasPerSm = 2 / kGroups<kHeads>;

inline constexpr int kGroupThreads = 128;
template <int kHeads>
inline constexpr int kThreads = kGroupThreads * kGroups<kHeads>;
inline constexpr int kWarps = kGroupThreads / 32;  // of a warpgroup

inline constexpr int kTile = kAttendTile;
inline constexpr int kWarpRecords = kTile / kWarps;
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kUnitBytes = 16;  // a swizzled chunk: 8 BF16 values

// Codes arrive in slots of 128 bytes a record, the L2's line.
inline constexpr int kSlotBytes = 128;
// Slots of a ring, as many as the shared memory holds.
template <int kHeads>
inline constexpr int kSlots = kHeads == 8    ? 4
                              : kHeads == 16 ? 3
                                             : 2;
inline constexpr int kScaleBytes = record(RecordId::MainFp4).scale_bytes;  // the larger one
inline constexpr int kScaleSets = 3;  // tiles that have a part in a ring at a time

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The tiles of a row, window first. RowList, in fewer words.
struct Tiles {
    const int32_t* window_slots;
    const int32_t* main_slots;
    const int32_t* table;
    int32_t window_records, main_records;
    int32_t window, count;  // tiles

    __device__ void start(const AttendParams& p, int64_t row) {
        const RowList list = row_list(p, row);
        window_slots = list.window_slots;
        main_slots = list.main_slots;
        table = list.table;
        window_records = static_cast<int32_t>(list.window);
        main_records = static_cast<int32_t>(list.main);
        window = static_cast<int32_t>((list.window + kTile - 1) / kTile);
        count = window + static_cast<int32_t>((list.main + kTile - 1) / kTile);
    }
    __device__ bool is_window(int32_t tile) const { return tile < window; }

    // -1 beyond the lists. The pages are still to be asked.
    __device__ int32_t slot(int32_t tile, int at, const cutlass::FastDivmod& page) const {
        const bool of_window = is_window(tile);
        const int32_t entry = (of_window ? tile : tile - window) * kTile + at;
        if (entry >= (of_window ? window_records : main_records)) return -1;
        if (of_window) return window_slots[entry];
        if (table == nullptr) return main_slots[entry];
        int column, offset;
        page(column, offset, entry);
        const int64_t number = table[column];
        const int64_t slot = number < 0 ? -1 : number * page.divisor + offset;
        return slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
    }
};

// Pages of token-major records, with a division that is a multiplication.
struct Places {
    const uint8_t* data;
    int64_t page_stride;
    int64_t slots;
    cutlass::FastDivmod page;
    int32_t bytes;

    explicit Places(const ConstPages& pages)
        : data(pages.data),
          page_stride(pages.page_stride),
          slots(pages.num_pages * pages.page_size),
          page(pages.page_size),
          bytes(record(pages.record).bytes()) {}

    __device__ bool holds(int32_t slot) const { return slot >= 0 && slot < slots; }
    __device__ const uint8_t* row(int32_t slot) const {
        int number, offset;
        page(number, offset, slot);
        return data + number * page_stride + offset * bytes;
    }
};

// Runs of a row's tiles: as many as fill the places for CTAs and the workspace holds.
inline int32_t splits_of(const AttendParams& p, int64_t places, int64_t partial_bytes) {
    if (p.batch_invariant) return 1;
    const int64_t entries = p.contiguous.data != nullptr
                                ? int64_t{p.contiguous.columns} * p.main.pages.page_size
                                : p.main.columns;
    const int64_t tiles = (p.window.columns + kTile - 1) / kTile + (entries + kTile - 1) / kTile;
    const int64_t held = (p.workspace.bytes - kSyncBytes) / partial_bytes;
    int64_t splits = places / p.rows;
    splits = splits < tiles ? splits : tiles;
    splits = splits < held / p.rows ? splits : held / p.rows;
    return splits > 1 ? static_cast<int32_t>(splits) : 1;
}

// Records on their way into one warp.
template <int kHeads>
struct Ring {
    uint8_t slots[kSlots<kHeads>][kWarpRecords][kSlotBytes];  // chunks of 16 bytes, swizzled
    uint8_t scales[kScaleSets][kWarpRecords][kScaleBytes];
    uint32_t present[kScaleSets];  // of a tile, bits r and r + 16: the warp's record r is there
    uint32_t padding;
};

template <int kHeads>
struct Shared {
    static constexpr int kGroups = few_heads::kGroups<kHeads>;

    // BF16 values * 2^-8: [panel][record][dim], swizzled; after the last tile the output rows.
    uint8_t kv[kGroups][kPanels][kTile][kPanelRowBytes];
    uint8_t q[kPanels][kHeads][kPanelRowBytes];  // [panel][head][dim], paired dims, swizzled
    uint8_t p[kGroups][kHeads][kPanelRowBytes];  // [head][record], swizzled
    Ring<kHeads> rings[kGroups][kWarps];
    float reduce[kGroups][kWarps][kHeads];
    float group_max[kGroups][kHeads];  // of a warpgroup's tiles
    float weight[kGroups][kHeads];     // of its sums in those of all tiles
    float max[kHeads], sum[kHeads];    // of all tiles
    float sink[kHeads];
    float factor[kHeads];  // from sums to outputs
    Tiles tiles;           // here, as registers are scarce
    bool last;
};

// ---- Products. A thread's values of head columns: column 2 j + e is head 8 j + 2 t + e.

template <int kHeads>
inline constexpr int kColumns = kHeads / 4;
template <int kHeads>
inline constexpr int kFragment = kHeads / 2;  // [8 j][row][e]

template <int kHeads>
struct Atoms;
#define FCSA_FEW_HEADS_ATOMS(n)                                                                \
    template <>                                                                                \
    struct Atoms<n> {                                                                          \
        using Logits =                                                                         \
            detail::gmma::MMA_64x##n##x16_F32BF16BF16_RS<detail::Major::K, detail::Major::K>;  \
        using Values =                                                                         \
            detail::gmma::MMA_64x##n##x16_F32BF16BF16_SS<detail::Major::MN, detail::Major::K>; \
    };
FCSA_FEW_HEADS_ATOMS(8)
FCSA_FEW_HEADS_ATOMS(16)
FCSA_FEW_HEADS_ATOMS(32)
#undef FCSA_FEW_HEADS_ATOMS

// logits [64 records, heads] += a [64, 16 dims] . q [heads, 16 dims]^T.
template <int kHeads>
__device__ __forceinline__ void multiply_logits(const FragmentA& a, uint64_t q,
                                                float (&d)[kFragment<kHeads>]) {
    detail::multiply<typename Atoms<kHeads>::Logits>(a, q, d, true,
                                                     std::make_index_sequence<kFragment<kHeads>>{});
}

// out [64 dims, heads] += kv [16 records, 64 dims]^T . p [heads, 16 records]^T.
template <int kHeads>
__device__ __forceinline__ void multiply_values(uint64_t kv, uint64_t p,
                                                float (&d)[kFragment<kHeads>]) {
    detail::multiply<typename Atoms<kHeads>::Values>(kv, p, d, true,
                                                     std::make_index_sequence<kFragment<kHeads>>{});
}

// ---- The query

// A thread's share of the heads of a row: a unit of 8 dims of every few heads.
template <int kHeads>
struct QueryPart {
    static constexpr int kUnits = kHeadDim / 8;  // of a head
    static constexpr int kEach = kThreads<kHeads> / kUnits;
    static constexpr int kCount = kHeads / kEach;
    uint4 units[kCount];

    __device__ __forceinline__ void load(const AttendParams& p, int64_t row) {
        const int first = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
        const uint16_t* from = p.q.at(row, first) + 8 * unit;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            units[i] = make_uint4(0, 0, 0, 0);
            if (first + kEach * i < p.heads) units[i] = __ldg(reinterpret_cast<const uint4*>(from));
            from += kEach * p.q.head_stride;
        }
    }

    // Puts them into shared memory: chunk 4 j + r of a panel holds, for t = 0..3, dim
    // 16 t + 8 j + r and the fourth after it.
    __device__ __forceinline__ void store(Shared<kHeads>& shared) const {
        const int first = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
        const int t = unit % 8 / 2, j = unit % 2;
        uint8_t* to = shared.q[unit / 8][0] + 4 * t;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint4 pairs = paired_order(units[i]);
            const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
                *reinterpret_cast<uint32_t*>(to + panel_offset(first + kEach * i, 4 * j + r)) =
                    words[r];
        }
    }
};

// Asks for a row's lists before their lengths are known, for which their loads wait.
__device__ __forceinline__ void prefetch_lists(const AttendParams& p, int64_t row) {
    const int column = threadIdx.x * (128 / sizeof(int32_t));
    if (column < p.window.columns && p.window.slots)
        cute::prefetch(p.window.slots.row(row) + column);
    if (column < p.main.columns && p.main.slots) cute::prefetch(p.main.slots.row(row) + column);
}

template <int kHeads>
__device__ __forceinline__ void load_sink(const AttendParams& p, Shared<kHeads>& shared) {
    const int head = threadIdx.x;
    if (head < kHeads)
        shared.sink[head] = p.sink != nullptr && head < p.heads ? p.sink[head] : -INFINITY;
}

// Byte offset of a unit of 8 dims of an output row: of every four heads whose units are written
// at once two go to other banks.
__device__ __forceinline__ int out_offset(int head, int unit) {
    return head * kHeadDim * 2 + ((unit ^ (head / 2 % 2)) * kUnitBytes);
}

// ---- Records

// Chunk c of a record in a slot lies at c ^ this: of eight rows that are read at once, the four of
// MainFp4 and the two of WindowFp8 that share a phase lie in different banks.
__device__ __forceinline__ int slot_swizzle(int row) { return row % 2 * 4 + row / 2 % 2 * 2; }

// How a lane reads its 16 dims of a panel from a slot and makes values of them.
template <RecordId kId>
struct Reader;

template <>
struct Reader<RecordId::MainFp4> {
    using Codes = uint2;
    static constexpr int kSlotPanels = 4;
    static_assert(record(RecordId::MainFp4).group == 16, "a lane's share of a panel");

    static __device__ __forceinline__ Codes codes(const uint8_t* slot, int panel, int row, int t) {
        const int chunk = (panel % kSlotPanels * 2 + t / 2) ^ slot_swizzle(row);
        return *reinterpret_cast<const uint2*>(slot + row * kSlotBytes + chunk * 16 + t % 2 * 8);
    }
    static __device__ __forceinline__ uint32_t scale(const uint8_t* scales, int panel, int t) {
        return scales[4 * panel + t];
    }
    static __device__ __forceinline__ uint32_t factor(uint32_t scale) {
        return e4m3_factors(scale).x;
    }
    static __device__ __forceinline__ uint4 values(Codes codes, int unit, uint32_t factor) {
        uint32_t word = unit == 0 ? codes.x : codes.y;
        cute::warpgroup_fence_operand(word);
        return e2m1_paired(word, factor);
    }
};

template <>
struct Reader<RecordId::WindowFp8> {
    using Codes = uint4;
    static constexpr int kSlotPanels = 2;
    static_assert(record(RecordId::WindowFp8).group == 32, "two lanes' share of a panel");

    static __device__ __forceinline__ Codes codes(const uint8_t* slot, int panel, int row, int t) {
        const int chunk = (panel % kSlotPanels * 4 + t) ^ slot_swizzle(row);
        return *reinterpret_cast<const uint4*>(slot + row * kSlotBytes + chunk * 16);
    }
    static __device__ __forceinline__ uint32_t scale(const uint8_t* scales, int panel, int t) {
        return scales[2 * panel + t / 2];
    }
    static __device__ __forceinline__ uint32_t factor(uint32_t scale) {
        return ue8m0_factor(scale);
    }
    static __device__ __forceinline__ uint4 values(Codes codes, int unit, uint32_t factor) {
        uint32_t low = unit == 0 ? codes.x : codes.z, high = unit == 0 ? codes.y : codes.w;
        cute::warpgroup_fence_operand(low);
        cute::warpgroup_fence_operand(high);
        return e4m3_paired(low, high, factor);
    }
};

}  // namespace flash_csa::sm90::few_heads
