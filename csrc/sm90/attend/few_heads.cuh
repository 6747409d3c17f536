// Parts of few_heads.cu: shared memory, the query, records into registers, both products.
//
// Order of the dims: of every 128 dims (a span) lane 4 g + t of a warp has the 32 from 32 t on, of
// records g and g + 8 of the warp's 16. Dims of K 2 t + b and 8 + 2 t + b of step 8 s + 2 u + h of
// the first product are dims 128 s + 32 t + 8 u + 4 b + 2 h and the one after it: that is how
// shifts leave the codes of a word, and where an A fragment wants them. The query has that order.
//
// The BF16 tile is written from the same fragments, but in an order of its own, in which a thread
// of the second product ends up with neighbouring dims: 8 dims (t, b) of (s, u, h, o), o the half
// of a step, are chunk 4 (s % 2) + u of panel 4 (s / 2) + 2 h + o.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/arch/copy.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <type_traits>

#include "core/list.h"
#include "core/schedule.h"
#include "sm90/attend/dequant.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/lane_codec.cuh"
#include "sm90/common/prefetch.cuh"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90::few_heads {

// Warpgroups: two convert, each half of the dims of a tile; then one for the softmax, one or two
// for the values, each a part of the dims, and one for the copies.
inline constexpr int kConvertGroups = 2;
template <int kHeads>
inline constexpr int kValueGroups = kHeads == 16 ? 2 : 1;
template <int kHeads>
inline constexpr int kGroups = kConvertGroups + 1 + kValueGroups<kHeads> + 1;
inline constexpr int kGroupThreads = 128;
template <int kHeads>
inline constexpr int kThreads = kGroups<kHeads> * kGroupThreads;
template <int kHeads>
inline constexpr int kValueThreads = kValueGroups<kHeads> * kGroupThreads;
inline constexpr int kWarps = kGroupThreads / 32;  // of a warpgroup

inline constexpr int kTile = kAttendTile;
inline constexpr int kWarpRecords = kTile / kWarps;
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kPanelBytes = kTile * kPanelRowBytes;
inline constexpr int kTiles = 2;   // that are converted or multiplied at a time
inline constexpr int kSpan = 128;  // dims
inline constexpr int kSpans = kHeadDim / kSpan / kConvertGroups;  // of a warpgroup

// A slot holds 16 records of MainFp4 or 8 of WindowFp8, for one warp of both converting groups.
// Where kBankRows is set, what a quarter of a warp copies is a row of the banks: `cp.async` takes a
// turn of the shared memory for every row and every line of the memory. 8 heads have turns left.
template <int kHeads>
inline constexpr bool kBankRows = kHeads != 8;
template <int kHeads>
inline constexpr int kSlotBytes = kBankRows<kHeads> ? 4608 : 4672;
template <int kHeads>
inline constexpr int kSlots = kHeads == 8    ? 4
                              : kHeads == 16 ? 3
                                             : 2;
// Queries that are there at a time: as many as the shared memory holds.
template <int kHeads>
inline constexpr int kQueries = kHeads == 8 ? 2 : 1;
// Parts in which a tile is given back: what comes of a span of each converting group.
template <int kHeads>
inline constexpr int kGivenParts = kHeads == 8 ? 1 : kSpans;
inline constexpr uint32_t kAllRecords = (1u << kWarpRecords) - 1;
inline constexpr int kPresentSets = 8;  // tiles that are somewhere between copies and softmax

// A warp of the softmax has 8 heads and, of those heads, 1 / kRecordGroups of the records.
template <int kHeads>
inline constexpr int kHeadGroups = kHeads / 8;
template <int kHeads>
inline constexpr int kRecordGroups = kWarps / kHeadGroups<kHeads>;

// With 32 heads registers are scarce: what follows from a lane is computed where it is used.
template <int kHeads>
__device__ __forceinline__ int seldom(int lane) {
    return kHeads == 32 ? fresh(lane) : lane;
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// The tiles of a row, window first. RowList, in few words.
struct Tiles {
    int32_t row, request;
    int32_t window_records, main_records;

    // kSlots: there are no contiguous lists.
    template <bool kSlots>
    __device__ void start(const AttendParams& p, int32_t of_row) {
        const RowList list = kSlots ? slot_lists(p, of_row) : row_list(p, of_row);
        row = of_row;
        request = list.request;
        window_records = static_cast<int32_t>(list.window);
        main_records = static_cast<int32_t>(list.main);
    }
    __device__ int32_t window() const { return (window_records + kTile - 1) / kTile; }
    __device__ int32_t count() const { return window() + (main_records + kTile - 1) / kTile; }
    __device__ bool is_window(int32_t tile) const { return tile < window(); }

    // -1 beyond the lists. The pages are still to be asked.
    __device__ int32_t slot(const AttendParams& p, int32_t tile, int at,
                            const cutlass::FastDivmod& page) const {
        const bool of_window = is_window(tile);
        const int32_t entry = (of_window ? tile : tile - window()) * kTile + at;
        if (entry >= (of_window ? window_records : main_records)) return -1;
        if (of_window) return p.window.slots.row(row)[entry];
        if (p.contiguous.data == nullptr) return p.main.slots.row(row)[entry];
        int column, offset;
        page(column, offset, entry);
        const int64_t number = p.contiguous.row(request)[column];
        const int64_t slot = number < 0 ? -1 : number * page.divisor + offset;
        return slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
    }
};

// Brings a row's lists to the L2 before their lengths are known, for which their loads wait, and
// without looking at them: the kernel before may still write them. A warp calls.
__device__ __forceinline__ void prefetch_list(const RecordList& list, int64_t row, int lane) {
    constexpr int kEach = 128 / sizeof(int32_t);
    if (!list.slots || list.lengths == nullptr) return;
#pragma unroll 1
    for (int at = lane * kEach; at < list.columns; at += 32 * kEach)
        prefetch_l2(list.slots.row(row) + at);
    if (lane == 0) prefetch_l2(list.lengths + row);
}
__device__ __forceinline__ void prefetch_lists(const AttendParams& p, int64_t row, int lane) {
    prefetch_list(p.window, row, lane);
    prefetch_list(p.main, row, lane);
}
__device__ __forceinline__ void prefetch_query(const AttendParams& p, int64_t row, int lane) {
    constexpr int kEach = 128 / sizeof(uint16_t), kLines = kHeadDim / kEach;
#pragma unroll 1
    for (int head = lane / kLines; head < p.heads; head += 32 / kLines)
        prefetch_l2(p.q.at(row, head) + lane % kLines * kEach);
}

// Pages of token-major records, with a division that is a multiplication.
struct Places {
    static constexpr int kUnit = 16;                  // bytes
    static constexpr uint32_t kAbsent = 0xffffffffu;  // no record's distance

    const uint8_t* data;
    int64_t page_stride;
    int64_t slots;
    cutlass::FastDivmod page;
    int32_t bytes;
    uint32_t page_units;

    explicit Places(const ConstPages& pages)
        : data(pages.data),
          page_stride(pages.page_stride),
          slots(pages.num_pages * pages.page_size),
          page(pages.page_size),
          bytes(record(pages.record).bytes()),
          page_units(static_cast<uint32_t>(pages.page_stride / kUnit)) {}

    // Whether all distances are below kAbsent.
    static bool reach(const ConstPages& pages) {
        return pages.num_pages * pages.page_stride <= int64_t{kUnit} * kAbsent;
    }

    __device__ bool holds(int32_t slot) const { return slot >= 0 && slot < slots; }
    __device__ const uint8_t* row(int32_t slot) const {
        int number, offset;
        page(number, offset, slot);
        return data + number * page_stride + offset * bytes;
    }
    // How far from the first record the one of a slot lies, in units.
    __device__ uint32_t distance(int32_t slot) const {
        if (!holds(slot)) return kAbsent;
        int number, offset;
        page(number, offset, slot);
        return number * page_units + static_cast<uint32_t>(offset * (bytes / kUnit));
    }
};

// Brings a record of a row's list to the L2. The list is read as it is: where the kernel before
// still writes it, another record, or none, is asked for in vain.
__device__ __forceinline__ void prefetch_record(const RecordList& list, const Places& places,
                                                int64_t row, int entry) {
    if (!list.slots || entry >= list.columns) return;
    const int32_t slot = __ldcg(list.slots.row(row) + entry);  // not to the L1: it may change
    if (!places.holds(slot)) return;
    const uint8_t* record = places.row(slot);
    for (int at = 0; at < places.bytes; at += 128) prefetch_l2(record + at);
    prefetch_l2(record + places.bytes - 1);
}

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

using Barrier = cutlass::arch::ClusterBarrier;

// A thread's values of head columns: column 2 j + e is head 8 j + 2 t + e.
template <int kHeads>
inline constexpr int kColumns = kHeads / 4;
template <int kHeads>
inline constexpr int kFragment = kHeads / 2;  // [8 j][row][e]

template <int kHeads>
struct Shared {
    static constexpr int kSlots = few_heads::kSlots<kHeads>;
    static constexpr int kQueries = few_heads::kQueries<kHeads>;

    uint8_t kv[kTiles][kPanels][kTile][kPanelRowBytes];    // BF16 values * 2^-8, swizzled
    uint8_t q[kQueries][kPanels][kHeads][kPanelRowBytes];  // [panel][head][dim], swizzled
    uint8_t p[kTiles][kHeads][kPanelRowBytes];             // [head][record], swizzled
    float4 logits[kConvertGroups][kFragment<kHeads> / 4][kGroupThreads];  // over half of the dims
    alignas(128) uint8_t slots[kWarps][kSlots][kSlotBytes<kHeads>];
    float reduce[kRecordGroups<kHeads>][kHeads];
    float sums[kRecordGroups<kHeads>][kHeads];  // of the tiles so far
    float keep[kTiles][kHeads];                 // what older sums are worth where `over` is set
    float max[kHeads], sum[kHeads];
    float factor[kHeads];                       // from sums to outputs
    uint32_t present[kPresentSets][kWarps];     // bit r: the warp's record r is there
    uint32_t over[kTiles];                      // a byte a warp: a logit is far above its base
    int32_t tiles[kQueries], window[kQueries];  // of a row, and how many of them are window
    bool last;
    Barrier slot_full[kWarps][kSlots], slot_empty[kWarps][kSlots];
    Barrier tile_full[kTiles];
    Barrier tile_empty[kGivenParts<kHeads>][kTiles];
    Barrier weights_full[kTiles], raised[kTiles];
    Barrier logits_empty;
    Barrier totals_full, totals_empty;
    Barrier row_full[kQueries], row_empty[kQueries];
};

// The next of kCount places that are used in turns, and the parity of its barrier.
template <int kCount>
struct Turn {
    int at = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == kCount) {
            at = 0;
            parity ^= 1;
        }
    }
};

struct Cuts {
    int32_t splits;
};
struct NoCuts {
    static constexpr int32_t splits = 1;
};
// kWhole: rows are whole and have lists of slots, which makes less code, and no divisions.
template <bool kWhole>
struct Plan : std::conditional_t<kWhole, NoCuts, Cuts> {
    int32_t items;  // runs of tiles of all rows
    Places main, window;

    Plan(const AttendParams& p, int32_t of_splits)
        : items(p.rows * of_splits), main(p.main.pages), window(p.window.pages) {
        if constexpr (!kWhole) this->splits = of_splits;
    }
    __device__ __forceinline__ void know_lists(const AttendParams& p) const {
        if (kWhole) __builtin_assume(p.contiguous.data == nullptr);
    }
};

// The `piece`-th run of a row's tiles.
struct Run {
    Tiles tiles{};
    int32_t begin = 0, end = 0;

    template <bool kWhole>
    __device__ __forceinline__ void start(const Tiles& of_row, const Plan<kWhole>& plan,
                                          int32_t item) {
        tiles = of_row;
        begin = 0;
        end = tiles.count();
        if (plan.splits == 1) return;
        const int32_t piece = item % plan.splits;
        const int64_t count = end;
        begin = static_cast<int32_t>(count * piece / plan.splits);
        end = static_cast<int32_t>(count * (piece + 1) / plan.splits);
    }
};

// ---- Records

// Where chunk c (16 bytes) of record i of a slot lies, how a lane reads its 32 dims of a span, and
// makes values of 8 of them. In rows of the banks scales lie behind the codes of all records, and
// chunks of odd records change places; else records are as they are, odd ones of MainFp4 behind
// all even ones.
template <RecordId kId, bool kBankRows>
struct Reader;

template <bool kBankRows>
struct Reader<RecordId::MainFp4, kBankRows> {
    static constexpr Record kRecord = record(RecordId::MainFp4);
    static constexpr int kSlots = 1, kEach = 16;  // records of a slot
    static_assert(kRecord.group == 16, "two in a lane's share of a span");
    struct Codes {
        uint4 words;
        uint32_t scales;
    };
    using Factors = uint32_t;

    // 64 bytes of records 2 i and 2 i + 1 are read at once: in different banks.
    static __device__ __forceinline__ int chunk(int i, int c) {
        if (kBankRows) return kRecord.data_bytes * i + ((c ^ i % 2 * 4) << 4);
        return i / 2 * kRecord.bytes() + i % 2 * (8 * kRecord.bytes() + 64) + 16 * c;
    }
    static __device__ __forceinline__ int scales(int i) {
        return kBankRows ? kEach * kRecord.data_bytes + 32 * i : chunk(i, 0) + kRecord.data_bytes;
    }
    static __device__ __forceinline__ Codes read(const uint8_t* slot, int i, int span, int t) {
        return {*reinterpret_cast<const uint4*>(slot + chunk(i, 4 * span + t)),
                *reinterpret_cast<const uint16_t*>(slot + scales(i) + 8 * span + 2 * t)};
    }
    static __device__ __forceinline__ Factors factors(const Codes& codes) {
        return e4m3_factor_pair(codes.scales);
    }
    static __device__ __forceinline__ uint4 values(const Codes& codes, const Factors& factors,
                                                   int unit) {
        const uint32_t words[] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
        uint32_t word = words[unit];
        cute::warpgroup_fence_operand(word);
        return e2m1_paired(word, unit < 2 ? twice_half<0>(factors) : twice_half<1>(factors));
    }
};

template <bool kBankRows>
struct Reader<RecordId::WindowFp8, kBankRows> {
    static constexpr Record kRecord = record(RecordId::WindowFp8);
    static constexpr int kSlots = 2, kEach = 8;
    static_assert(kRecord.group == 32, "a lane's share of a span");
    struct Codes {
        uint4 words[2];
        uint32_t scale;
    };
    using Factors = uint32_t;

    // Every second 16 bytes of records 2 i and 2 i + 1 are read at once: in different banks.
    static __device__ __forceinline__ int chunk(int i, int c) {
        return kBankRows ? kRecord.data_bytes * i + ((c ^ i % 2) << 4)
                         : kRecord.bytes() * i + 16 * c;
    }
    static __device__ __forceinline__ int scales(int i) {
        return kBankRows ? kEach * kRecord.data_bytes + 16 * i : chunk(i, 0) + kRecord.data_bytes;
    }
    static __device__ __forceinline__ uint4 words(const uint8_t* slot, int i, int span, int t,
                                                  int c) {
        return *reinterpret_cast<const uint4*>(slot + chunk(i, 8 * span + 2 * t + c));
    }
    static __device__ __forceinline__ uint32_t scale(const uint8_t* slot, int i, int span, int t) {
        return slot[scales(i) + 4 * span + t];
    }
    static __device__ __forceinline__ Codes read(const uint8_t* slot, int i, int span, int t) {
        return {{words(slot, i, span, t, 0), words(slot, i, span, t, 1)}, scale(slot, i, span, t)};
    }
    static __device__ __forceinline__ Factors factors(const Codes& codes) {
        return ue8m0_factor(codes.scale);
    }
    static __device__ __forceinline__ uint4 values(const Codes& codes, Factors factor, int unit) {
        const uint4 words = codes.words[unit / 2];
        uint32_t low = unit % 2 == 0 ? words.x : words.z, high = unit % 2 == 0 ? words.y : words.w;
        cute::warpgroup_fence_operand(low);
        cute::warpgroup_fence_operand(high);
        return e4m3_paired(low, high, factor);
    }
};

}  // namespace flash_csa::sm90::few_heads
