// Parts of eight_heads.cu: shared memory, the query, how a lane reads records.
//
// Order of the dims: of every 128 dims (a span) lane 4 g + t of a warp has the 32 from 32 t on, of
// records g and g + 8 of the warp's 16. Dims of K 2 t + b and 8 + 2 t + b of step 8 s + 2 u + h of
// the first product are dims 128 s + 32 t + 8 u + 4 b + 2 h and the one after it: that is how
// shifts leave the codes of a word, and where an A fragment wants them. The query has the same
// order, and so have the rows of out^T.
#pragma once

#include <cstdint>

#include "sm90/attend/few_heads.cuh"

namespace flash_csa::sm90::eight_heads {

using few_heads::kLog2e;
using few_heads::kPanels;
using few_heads::kSlotBytes;
using few_heads::kTile;
using few_heads::Places;
using few_heads::Tiles;

inline constexpr int kHeads = 8;  // N of both products
inline constexpr int kWarps = 4;  // of a CTA: two CTAs an SM
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kCtasPerSm = 2;     // 128 accumulators a lane
inline constexpr int kWarpRecords = 16;  // M of the first product, K of the second
inline constexpr int kSteps = kHeadDim / 16;
inline constexpr int kSpan = 128;  // dims
inline constexpr int kSpans = kHeadDim / kSpan;
inline constexpr int kUnits = kSpan / 32;  // of 8 dims, of a lane's share of a span

inline constexpr int kSlots = 4;      // of a ring: a block of WindowFp8, two of MainFp4
inline constexpr int kScaleSets = 3;  // blocks that have a part in a ring at a time
inline constexpr int kScaleBytes = record(RecordId::MainFp4).scale_bytes;  // the larger one
inline constexpr int kPanelBytes = kWarpRecords * kPanelRowBytes;

// Records on their way into one warp.
struct Ring {
    uint8_t slots[kSlots][kWarpRecords][kSlotBytes];  // chunks of 16 bytes, swizzled
    uint8_t scales[kScaleSets][kWarpRecords][kScaleBytes];
    uint32_t present[kScaleSets];  // of a block, bits r and r + 16: record r is there
    uint32_t padding;
};

struct Shared {
    // A warp's records, BF16 values * 2^-8: [panel][record][dim], swizzled; at the end its sums.
    uint8_t strips[kWarps][kPanels][kWarpRecords][kPanelRowBytes];
    uint4 q[kSteps / 2][32];  // B fragments of two steps
    Ring rings[kWarps];
    float base[kWarps][kHeads];  // log2 of what a warp's weights are relative to
    float sums[kWarps][kHeads];
    float weight[kWarps][kHeads];  // of a warp's sums in those of all
    float max[kHeads], sum[kHeads];
    float sink[kHeads];
    float factor[kHeads];  // from sums to outputs
    Tiles tiles;
    bool last;
};
// 228 KiB an SM, of which the system takes one a CTA.
static_assert(kCtasPerSm * (sizeof(Shared) + 1024) <= 228 * 1024);

// A thread's share of the heads of a row: a unit of 8 dims of every second head.
struct QueryPart {
    static constexpr int kHeadUnits = kHeadDim / 8;
    static constexpr int kEach = kThreads / kHeadUnits;
    static constexpr int kCount = kHeads / kEach;
    uint4 units[kCount];

    __device__ __forceinline__ void load(const AttendParams& p, int64_t row) {
        const int first = threadIdx.x / kHeadUnits, unit = threadIdx.x % kHeadUnits;
        const uint16_t* from = p.q.at(row, first) + 8 * unit;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            units[i] = make_uint4(0, 0, 0, 0);
            if (first + kEach * i < p.heads) units[i] = __ldg(reinterpret_cast<const uint4*>(from));
            from += kEach * p.q.head_stride;
        }
    }

    __device__ __forceinline__ void store(Shared& shared) const {
        const int first = threadIdx.x / kHeadUnits, unit = threadIdx.x % kHeadUnits;
        const int s = unit / 16, t = unit / kUnits % 4, u = unit % kUnits;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            shared.q[kUnits * s + u][(first + kEach * i) * 4 + t] = paired_order(units[i]);
    }
};

// Chunk c of a record in a slot lies at c ^ this: of the two rows that eight lanes read at once,
// chunks 0 .. 3 of MainFp4 and 0 2 4 6 of WindowFp8 lie in different banks.
__device__ __forceinline__ int slot_swizzle(int row) { return row % 2 * 5; }

// How a lane reads its 32 dims of a span from a slot and makes values of 8 of them.
template <RecordId kId>
struct Reader;

template <>
struct Reader<RecordId::MainFp4> {
    static constexpr int kSlotSpans = 2;
    static_assert(record(RecordId::MainFp4).group == 16, "two in a lane's share of a span");
    struct Codes {
        uint4 words;
        uint32_t scales;
    };
    using Factors = uint2;

    static __device__ __forceinline__ Codes read(const uint8_t* slot, const uint8_t* scales,
                                                 int span, int row, int t) {
        const int chunk = (span % kSlotSpans * 4 + t) ^ slot_swizzle(row);
        return {*reinterpret_cast<const uint4*>(slot + row * kSlotBytes + chunk * 16),
                *reinterpret_cast<const uint16_t*>(scales + row * kScaleBytes + 8 * span + 2 * t)};
    }
    static __device__ __forceinline__ Factors factors(const Codes& codes) {
        return e4m3_factors(codes.scales);
    }
    static __device__ __forceinline__ uint4 values(const Codes& codes, const Factors& factors,
                                                   int unit) {
        const uint32_t words[] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
        return e2m1_paired(words[unit], unit < 2 ? factors.x : factors.y);
    }
};

template <>
struct Reader<RecordId::WindowFp8> {
    static constexpr int kSlotSpans = 1;
    static_assert(record(RecordId::WindowFp8).group == 32, "a lane's share of a span");
    struct Codes {
        uint4 words[2];
        uint32_t scale;
    };
    using Factors = uint32_t;

    static __device__ __forceinline__ Codes read(const uint8_t* slot, const uint8_t* scales,
                                                 int span, int row, int t) {
        Codes codes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int chunk = (2 * t + i) ^ slot_swizzle(row);
            codes.words[i] = *reinterpret_cast<const uint4*>(slot + row * kSlotBytes + chunk * 16);
        }
        codes.scale = scales[row * kScaleBytes + 4 * span + t];
        return codes;
    }
    static __device__ __forceinline__ Factors factors(const Codes& codes) {
        return ue8m0_factor(codes.scale);
    }
    static __device__ __forceinline__ uint4 values(const Codes& codes, Factors factor, int unit) {
        const uint4 words = codes.words[unit / 2];
        return unit % 2 == 0 ? e4m3_paired(words.x, words.y, factor)
                             : e4m3_paired(words.z, words.w, factor);
    }
};

}  // namespace flash_csa::sm90::eight_heads
