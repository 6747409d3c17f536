// Parts of few_rows.cu: shared memory, products, records into a tile.
//
// Records are on M of both products, heads on N. A warpgroup has 128 dims (two panels of 64) of
// the tile and of the output; each warpgroup has the part of the logits that is the sum
// over its dims.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/schedule.h"
#include "sm90/attend/dequant.cuh"
#include "sm90/attend/few_heads.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/common/exp2.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90::few_rows {

using few_heads::Places;

inline constexpr int kWarpgroup = 128;
inline constexpr int kGroups = 4;
inline constexpr int kThreads = kGroups * kWarpgroup;
inline constexpr int kWarps = kThreads / 32;

inline constexpr int kTile = kAttendTile;
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kGroupPanels = kPanels / kGroups;
static_assert(kGroupPanels == 2);

// Logits: each warpgroup takes a part of the dims.
inline constexpr int kParts = kGroups;

// Floats between the logits of two heads, and between the outputs of two heads: an accumulator
// fragment's two heads and eight rows lie in different banks.
inline constexpr int kLogitPitch = kTile + 4;
inline constexpr int kOutPitch = kHeadDim + 4;

inline constexpr Record kMain = record(RecordId::MainFp4), kWindow = record(RecordId::WindowFp8);

template <int kHeads>
struct Shared {
    float keep[kHeads];              // weight of the earlier tiles
    float max[kHeads], sum[kHeads];  // of all tiles
    float sink[kHeads];
    uint8_t present[2][kWarps];  // a bit per record, of tiles in turns
    cutlass::arch::ClusterTransactionBarrier arrived;
    // After the last tile kv and what follows hold the output: f32 [kHeads][kOutPitch].
    // kv: BF16 values * 2^-8, [panel][record][dim].
    alignas(1024) uint8_t kv[kPanels][kTile][kPanelRowBytes];
    uint8_t q[kPanels][kHeads][kPanelRowBytes];  // [panel][head][dim], paired dims
    uint8_t p[kHeads][kPanelRowBytes];           // weights [head][record]
    float logits[kParts][kHeads][kLogitPitch];
    uint8_t raw[kTile * kWindow.bytes()];  // records as they are in memory

    __device__ float* out() { return reinterpret_cast<float*>(kv); }
};

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Plan {
    int32_t pieces;                   // of a row: CTAs of a cluster
    int32_t run, longer;              // tiles of a piece; so many first pieces have one more
    int32_t window_tiles;             // of a row: of the list's columns, whatever its length
    cutlass::FastDivmod head_blocks;  // of kHeads heads
    cutlass::FastDivmod by_pieces;
    Places main, window;
};

// A thread's share of the queries, in paired order.
template <int kHeads>
struct Query {
    static constexpr int kUnits = kHeadDim / kGroupDims, kEach = kThreads / kUnits;
    uint4 units[kHeads / kEach];

    __device__ __forceinline__ void load(const AttendParams& p, int32_t row, int32_t first_head) {
        const int32_t head = first_head + threadIdx.x / kUnits;
        const uint16_t* from = p.q.at(row, head) + threadIdx.x % kUnits * kGroupDims;
        if (kHeads == 64 && first_head + kHeads <= p.heads) {  // few instructions: all warps wait
            const int64_t step = kEach * p.q.head_stride;
#pragma unroll
            for (int i = 0; i < kHeads / kEach; ++i) {
                units[i] = __ldg(reinterpret_cast<const uint4*>(from));
                from = fresh(from + step);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < kHeads / kEach; ++i) {
            units[i] = make_uint4(0, 0, 0, 0);
            if (head + i * kEach < p.heads)
                units[i] =
                    __ldg(reinterpret_cast<const uint4*>(from + i * kEach * p.q.head_stride));
        }
    }
    __device__ __forceinline__ void negate() {
#pragma unroll
        for (uint4& unit : units)
            unit = make_uint4(unit.x ^ 0x80008000u, unit.y ^ 0x80008000u, unit.z ^ 0x80008000u,
                              unit.w ^ 0x80008000u);
    }
    template <class Shared>
    __device__ __forceinline__ void store(Shared& shared) const {
        const int unit = threadIdx.x % kUnits;
#pragma unroll
        for (int i = 0; i < kHeads / kEach; ++i) {
            const int head = threadIdx.x / kUnits + i * kEach;
            *reinterpret_cast<uint4*>(shared.q[unit / 8][0] + panel_offset(head, unit % 8)) =
                paired_order(units[i]);
        }
    }
};

// ---- Products

template <int kCols>
struct Atoms;
#define FCSA_FEW_ROWS_ATOMS(n)                                                                 \
    template <>                                                                                \
    struct Atoms<n> {                                                                          \
        using Logits =                                                                         \
            detail::gmma::MMA_64x##n##x16_F32BF16BF16_SS<detail::Major::K, detail::Major::K>;  \
        using Values =                                                                         \
            detail::gmma::MMA_64x##n##x16_F32BF16BF16_SS<detail::Major::MN, detail::Major::K>; \
    };
FCSA_FEW_ROWS_ATOMS(16)
FCSA_FEW_ROWS_ATOMS(32)
#undef FCSA_FEW_ROWS_ATOMS

// d [64 records, kCols heads] (+)= kv [64, 16 dims] . q [kCols, 16 dims]^T.
template <int kCols>
__device__ __forceinline__ void multiply_logits(uint64_t kv, uint64_t q, float (&d)[kCols / 2],
                                                bool accumulate) {
    detail::multiply<typename Atoms<kCols>::Logits>(kv, q, d, accumulate,
                                                    std::make_index_sequence<kCols / 2>{});
}

// d [64 records, kHeads heads] = kv . q^T over kCount panels of dims, which are only started.
template <int kHeads, int kCount>
__device__ __forceinline__ void start_logits(const uint8_t (*kv)[kTile][kPanelRowBytes],
                                             const uint8_t (*q)[kHeads][kPanelRowBytes],
                                             float (&d)[kHeads / 2]) {
    const uint64_t a = k_major(kv), b = k_major(q);
    fence_registers(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kCount * 4; ++k)
        multiply_logits<kHeads>(advance(a, k / 4 * int{sizeof kv[0]} + k % 4 * 32),
                                advance(b, k / 4 * int{sizeof q[0]} + k % 4 * 32), d, k > 0);
    cute::warpgroup_commit_batch();
}
// A warpgroup's logits, when they are there, to [head][record].
template <int kPitch, int kCount>
__device__ __forceinline__ void store_logits(const float (&d)[kCount], float (*logits)[kPitch],
                                             int first_record = 0) {
    const int warp = threadIdx.x / 32 % 4, lane = fresh(static_cast<int>(threadIdx.x) % 32);
    float* to = logits[lane % 4 * 2] + first_record + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[(i / 4 * 8 + i % 2) * kPitch + i / 2 % 2 * 8] = d[i];
}

// d [64 dims, kCols heads] (+)= kv [16 records, 64 dims]^T . p [kCols, 16 records]^T.
template <int kCols>
__device__ __forceinline__ void multiply_values(uint64_t kv, uint64_t p, float (&d)[kCols / 2],
                                                bool accumulate) {
    detail::multiply<typename Atoms<kCols>::Values>(kv, p, d, accumulate,
                                                    std::make_index_sequence<kCols / 2>{});
}

// ---- Records

// A unit of a record: 16 bytes of codes with their scales.
struct Codes {
    uint4 codes;
    uint32_t scales;
};

// A warpgroup's 128 dims of a tile's records, in units. Eight lanes of a warp have the same unit of
// eight records: these lie, as read and as written, in different banks.

template <RecordId kId>
struct Reader;

template <>
struct Reader<RecordId::MainFp4> {
    static constexpr Record kRecord = kMain;
    static_assert(kRecord.group == 16, "two scales a unit");
    static constexpr int kSteps = 2;  // of 8 records a warp, all four units of each

    static constexpr int kTileBytes = kTile * kRecord.bytes() + kTile / 4 * 16;

    // 16 bytes on after every four: 8 records' units lie in 8 groups of banks.
    static __device__ __forceinline__ int place(int row) {
        return row * kRecord.bytes() + row / 4 * 16;
    }
    static __device__ __forceinline__ int row(int warp, int lane, int step) {
        return 16 * warp + 8 * step + lane % 8;
    }
    static __device__ __forceinline__ Codes read(const uint8_t* at, int group, int lane, int) {
        const int unit = lane / 8;
        return {*reinterpret_cast<const uint4*>(at + 64 * group + 16 * unit),
                *reinterpret_cast<const uint16_t*>(at + kRecord.data_bytes + 8 * group + 2 * unit)};
    }
    static __device__ __forceinline__ void write(const Codes& from, int lane, int, int row,
                                                 uint8_t* kv) {
        const int unit = lane / 8;
        const uint4& codes = from.codes;
        const uint2 factor = e4m3_factors(from.scales);
        uint8_t* panel = kv + unit / 2 * (kTile * kPanelRowBytes);
        const auto put = [&](int chunk, uint4 values) {
            *reinterpret_cast<uint4*>(panel + panel_offset(row, unit % 2 * 4 + chunk)) = values;
        };
        put(0, e2m1_paired(codes.x, factor.x));
        put(1, e2m1_paired(codes.y, factor.x));
        put(2, e2m1_paired(codes.z, factor.y));
        put(3, e2m1_paired(codes.w, factor.y));
    }
};

template <>
struct Reader<RecordId::WindowFp8> {
    static constexpr Record kRecord = kWindow;
    static_assert(kRecord.group == 32, "a scale for two units");
    static constexpr int kSteps = 4;  // of 8 records a warp, four of eight units of each

    static __device__ __forceinline__ int place(int row) { return row * kRecord.bytes(); }
    static __device__ __forceinline__ int row(int warp, int lane, int step) {
        return 16 * warp + 8 * (step / 2) + lane % 8;
    }
    // Of unit lane / 8 of the panel step % 2.
    static __device__ __forceinline__ uint4 codes(const uint8_t* at, int group, int lane,
                                                  int step) {
        return *reinterpret_cast<const uint4*>(at + 128 * group + 64 * (step % 2) +
                                               16 * (lane / 8));
    }
    // Where its scale is in the word of the group's.
    static __device__ __forceinline__ int scale_bit(int lane, int step) {
        return 8 * (2 * (step % 2) + lane / 16);
    }
    static __device__ __forceinline__ Codes read(const uint8_t* at, int group, int lane, int step) {
        return {codes(at, group, lane, step),
                at[kRecord.data_bytes + 4 * group + scale_bit(lane, step) / 8]};
    }
    static __device__ __forceinline__ void write(const Codes& from, int lane, int step, int row,
                                                 uint8_t* kv) {
        const int unit = lane / 8;
        const uint4& codes = from.codes;
        const uint32_t factor = ue8m0_factor(from.scales);
        uint8_t* panel = kv + step % 2 * (kTile * kPanelRowBytes);
        *reinterpret_cast<uint4*>(panel + panel_offset(row, 2 * unit)) =
            e4m3_paired(codes.x, codes.y, factor);
        *reinterpret_cast<uint4*>(panel + panel_offset(row, 2 * unit + 1)) =
            e4m3_paired(codes.z, codes.w, factor);
    }
};

// Of a record of a tile, in [heads, records].
__device__ __forceinline__ uint8_t* weight_place(uint8_t* weights, int head, int record) {
    return weights + panel_offset(head, record / 8) + record % 8 * 2;
}

// What earlier tiles are worth beside a tile, and the sum of its weights.
struct Weighed {
    float keep, total;
};

// Online softmax of a head: of the tile's logits this lane has kEach, by kVector neighbours from
// x[i] on, and kLanes lanes have them all. Their weights go to place_of(i).
template <int kLanes, int kVector, int kEach, class PlaceOf>
__device__ __forceinline__ Weighed weigh_head(const float (&x)[kEach], float& max,
                                              const PlaceOf& place_of) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) largest = fmaxf(largest, x[i]);
#pragma unroll
    for (int h = 1; h < kLanes; h *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, h));
    // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
    const float before = max;
    if (largest > before) max = largest;
    const float base = max == -INFINITY ? 0.f : max;
    const float keep = exp2_approx(before - base);
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
        uint32_t packed[kVector / 2];
#pragma unroll
        for (int e = 0; e < kVector; e += 2) {
            const float a = exp2_approx(x[i + e] - base), b = exp2_approx(x[i + e + 1] - base);
            total += a + b;
            packed[e / 2] = pack_bf16(a, b);
        }
        uint8_t* to = place_of(i);
        if constexpr (kVector == 4)
            *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
        else
            *reinterpret_cast<uint32_t*>(to) = packed[0];
    }
    return {keep, total};
}

}  // namespace flash_csa::sm90::few_rows
