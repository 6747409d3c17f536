// Pooling of entries in a block of 256 threads: softmax over the rows of a group, channel by
// channel, in the order of the CPU back end (ascending rows: sum, then FMA), to BF16 in shared
// memory.
#pragma once

#include "core/entry.h"
#include "sm90/compress/exp.cuh"
#include "sm90/compress/tail.cuh"

namespace flash_csa::sm90 {

enum class Pooling { None, Pair, Overlap, Group };  // ratio 1, 2, 4, 128

inline constexpr int kPoolThreads = 256;
inline constexpr int kPoolEntries = 8;
inline constexpr int kShortSpan = 8;    // rows of an entry, but for Group
inline constexpr int kGroupSpan = 128;  // rows of an entry of ratio 128

// A channel of all rows of an entry. The first rows of an overlapping request's first entry are not
// there: a gate of -inf, whose weight is 0.
template <int kSpan>
struct Rows {
    float gate[kSpan], kv[kSpan], bias[kSpan];

    // row(i): the PoolRow of row i.
    template <class RowOf>
    __device__ __forceinline__ void load(const RowOf& row, int absent, bool biased, int c) {
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
            gate[i] = i < absent ? -INFINITY : __ldcs(row(i).gate + c);
            kv[i] = i < absent ? 0.f : __ldcs(row(i).kv + c);
            bias[i] = 0.f;
        }
        if (!biased) return;
#pragma unroll
        for (int i = 0; i < kSpan; ++i)
            if (i >= absent) bias[i] = row(i).bias[c];
    }

    __device__ __forceinline__ uint16_t pool() {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
            gate[i] = add_rn(gate[i], bias[i]);
            top = gate[i] > top ? gate[i] : top;
        }
        float sum = 0.f, acc = 0.f;
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
            const float w = exp_negative(sub_rn(gate[i], top));
            sum = add_rn(sum, w);
            acc = fma_rn(w, kv[i], acc);
        }
        return f32_to_bf16(div_rn(acc, sum));
    }
};

// What a block keeps of the one group that it pools.
struct GroupShared {
    PoolRow rows[kGroupSpan];
    float top[kPoolEntries][32];
    float weight[kGroupSpan][32];
    float kv[kGroupSpan][32];
};

// One entry of 128 rows, 32 channels after the other: a warp has 16 rows in registers, and makes
// their weights; the sums are one chain of 128 steps in a warp, another one for each slice.
template <int kDim>
__device__ void pool_group(const CompressParams& p, const Entry& e, GroupShared& shared,
                           uint16_t* pooled) {
    constexpr int kWarpRows = kGroupSpan / kPoolEntries;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // the rows of the entry before
    if (threadIdx.x < kGroupSpan) shared.rows[threadIdx.x] = pool_row(p, e, e.first + threadIdx.x);
    __syncthreads();
    Rows<kWarpRows> rows;
    const PoolRow first = shared.rows[warp * kWarpRows];
    const bool together = e.first >= p.batch.start[e.request];  // all rows in the call
    const auto load = [&](int c) {
        if (together) {
            rows.load(
                [&](int i) {
                    return PoolRow{first.kv + i * p.kv.stride, first.gate + i * p.gate.stride,
                                   nullptr};
                },
                0, false, c);
        } else {
            rows.load([&](int i) { return shared.rows[warp * kWarpRows + i]; }, 0, false, c);
        }
    };
    load(lane);
    for (int slice = 0; slice < kDim / 32; ++slice) {
        const int c = 32 * slice + lane;
        if (p.bias) {  // in the L2 for all groups
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i) rows.bias[i] = first.bias[i * p.bias.stride + c];
        }
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            rows.gate[i] = add_rn(rows.gate[i], rows.bias[i]);
            top = rows.gate[i] > top ? rows.gate[i] : top;
        }
        shared.top[warp][lane] = top;
        __syncthreads();  // and the chain of the slice before has read its rows
#pragma unroll
        for (int i = 0; i < kPoolEntries; ++i) {
            const float other = shared.top[i][lane];
            top = other > top ? other : top;
        }
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
            shared.weight[warp * kWarpRows + i][lane] = exp_negative(sub_rn(rows.gate[i], top));
            shared.kv[warp * kWarpRows + i][lane] = rows.kv[i];
        }
        if (slice + 1 < kDim / 32) load(c + 32);
        __syncthreads();
        if (warp == slice % kPoolEntries) {
            float sum = 0.f, acc = 0.f;
#pragma unroll 8
            for (int i = 0; i < kGroupSpan; ++i) {
                const float w = shared.weight[i][lane];
                sum = add_rn(sum, w);
                acc = fma_rn(w, shared.kv[i][lane], acc);
            }
            pooled[c] = f32_to_bf16(div_rn(acc, sum));
        }
    }
}

template <Pooling kKind>
inline constexpr int kSpan = kKind == Pooling::Pair ? 2 : kShortSpan;

template <Pooling kKind>
__device__ __forceinline__ int absent_rows(const Entry& e) {
    return kSpan<kKind> - 1 - static_cast<int>(e.position - e.first);
}

// Entries of a block, `count` at a time.
struct PoolShared {
    Entry entries[kPoolEntries];
    PoolRow rows[kPoolEntries][kShortSpan];
};

// Pooled values of `count` entries to pooled[entry]. The caller's warp w has entry w in `entry`.
template <Pooling kKind, int kDim, int kStride>
__device__ __forceinline__ void pool_entries(const CompressParams& p, int count, const Entry& entry,
                                             PoolShared& shared, GroupShared* group,
                                             uint16_t (*pooled)[kStride]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < count) {
        if (lane == 0) shared.entries[warp] = entry;
        if (kKind == Pooling::Pair || kKind == Pooling::Overlap) {
            if (lane < kSpan<kKind> && lane >= absent_rows<kKind>(entry))
                shared.rows[warp][lane] =
                    pool_row(p, entry, entry.position - (kSpan<kKind> - 1) + lane);
        }
    }
    __syncthreads();
    if constexpr (kKind == Pooling::Group) {
        for (int i = 0; i < count; ++i) pool_group<kDim>(p, shared.entries[i], *group, pooled[i]);
        return;
    }
    // A channel a thread: number n is channel n % kDim of entry n / kDim.
    const int channels = count * kDim;
    int n = static_cast<int>(threadIdx.x);
    if constexpr (kKind == Pooling::None) {
        const auto read = [&](int i) {
            return p.kv_bf16.row(shared.entries[i / kDim].row)[i % kDim];
        };
        uint16_t next = n < channels ? read(n) : 0;
        for (; n < channels; n += kPoolThreads) {
            pooled[n / kDim][n % kDim] = next;
            if (n + kPoolThreads < channels) next = read(n + kPoolThreads);
        }
    } else {
        Rows<kSpan<kKind>> rows, next;
        const auto read = [&](int i) {
            const int entry = i / kDim;
            next.load([&](int r) { return shared.rows[entry][r]; },
                      absent_rows<kKind>(shared.entries[entry]), static_cast<bool>(p.bias),
                      i % kDim);
        };
        if (n < channels) read(n);
#pragma unroll 1
        for (; n < channels; n += kPoolThreads) {
            rows = next;
            if (n + kPoolThreads < channels) read(n + kPoolThreads);
            pooled[n / kDim][n % kDim] = rows.pool();
        }
    }
}

}  // namespace flash_csa::sm90
