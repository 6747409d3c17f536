// Pooling of entries in a block of 256 threads: softmax over the rows of a group, channel by
// channel, in the order of the CPU back end (ascending rows: sum, then FMA), to BF16 in shared
// memory. A thread has two channels.
#pragma once

#include "core/entry.h"
#include "sm90/common/approximate.cuh"
#include "sm90/compress/exp.cuh"
#include "sm90/compress/tail.cuh"

namespace flash_csa::sm90 {

enum class Pooling { None, Pair, Overlap, Group };  // ratio 1, 2, 4, 128

inline constexpr int kPoolThreads = 256;
inline constexpr int kPoolEntries = 8;
inline constexpr int kShortSpan = 8;    // rows of an entry, but for Group
inline constexpr int kGroupSpan = 128;  // rows of an entry of ratio 128

// Channels 2 * pair and 2 * pair + 1 of a row.
__device__ __forceinline__ const float2* channel_pair(const float* row, int pair) {
    return reinterpret_cast<const float2*>(row) + pair;
}

// Two channels of all rows of an entry. Of an overlapping request's first entry, only the second
// half is there: the others have a gate of -inf, whose weight is 0.
template <int kSpan>
struct Rows {
    float gate[2][kSpan], kv[2][kSpan];
    bool whole;

    __device__ __forceinline__ bool holds(int row) const { return whole || row >= kSpan / 2; }

    __device__ __forceinline__ void load(const PoolRow* rows, bool is_whole, int pair) {
        whole = is_whole;
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
            float2 g = make_float2(-INFINITY, -INFINITY), x = make_float2(0.f, 0.f);
            if (holds(i)) {
                g = __ldcs(channel_pair(rows[i].gate, pair));
                x = __ldcs(channel_pair(rows[i].kv, pair));
            }
            gate[0][i] = g.x, gate[1][i] = g.y;
            kv[0][i] = x.x, kv[1][i] = x.y;
        }
    }

    __device__ __forceinline__ void add_bias(const PoolRow* rows, int pair) {
        float2 bias[kSpan];
#pragma unroll
        for (int i = 0; i < kSpan; ++i)
            bias[i] = holds(i) ? __ldg(channel_pair(rows[i].bias, pair)) : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
            gate[0][i] = add_rn(gate[0][i], bias[i].x);
            gate[1][i] = add_rn(gate[1][i], bias[i].y);
        }
    }

    __device__ __forceinline__ uint32_t pool() const {
        float lowest = 0.f, delta[2][kSpan];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = -INFINITY;
#pragma unroll
            for (int i = 0; i < kSpan; ++i) top = fmaxf(top, gate[h][i]);  // never NaN
#pragma unroll
            for (int i = 0; i < kSpan; ++i) {
                delta[h][i] = sub_rn(gate[h][i], top);
                lowest = min_or_nan(lowest, delta[h][i]);
            }
        }
        // Almost always: no weight is subnormal.
        return lowest >= -86.0f ? pool_weights([](float x) { return exp_near(x); }, delta)
                                : pool_weights([](float x) { return exp_negative(x); }, delta);
    }

    template <class Exp>
    __device__ __forceinline__ uint32_t pool_weights(const Exp& exp,
                                                     const float (&delta)[2][kSpan]) const {
        uint32_t pooled = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = 0.f, acc = 0.f;
#pragma unroll
            for (int i = 0; i < kSpan; ++i) {
                const float w = exp(delta[h][i]);
                sum = add_rn(sum, w);
                acc = fma_rn(w, kv[h][i], acc);
            }
            pooled |= static_cast<uint32_t>(f32_to_bf16(div_rn(acc, sum))) << 16 * h;
        }
        return pooled;
    }
};

// An entry of 128 rows, two channels a thread, in two passes over its gates. What has index keys
// of its own or by projection: groups.cu has the others.
__device__ __forceinline__ uint32_t pool_group(const PoolRow (&rows)[kGroupSpan], int pair) {
    constexpr int kBatch = 8;
    const auto gates = [&](int first, float2(&gate)[kBatch]) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const PoolRow& row = rows[first + i];
            gate[i] = *channel_pair(row.gate, pair);
            if (row.bias == nullptr) continue;
            const float2 bias = __ldg(channel_pair(row.bias, pair));
            gate[i] = make_float2(add_rn(gate[i].x, bias.x), add_rn(gate[i].y, bias.y));
        }
    };
    float2 gate[kBatch], top = make_float2(-INFINITY, -INFINITY);
    for (int first = 0; first < kGroupSpan; first += kBatch) {
        gates(first, gate);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            top = make_float2(fmaxf(top.x, gate[i].x), fmaxf(top.y, gate[i].y));  // never NaN
    }
    float2 sum = make_float2(0.f, 0.f), acc = make_float2(0.f, 0.f);
    for (int first = 0; first < kGroupSpan; first += kBatch) {
        gates(first, gate);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float2 kv = *channel_pair(rows[first + i].kv, pair);
            const float wx = exp_negative(sub_rn(gate[i].x, top.x));
            const float wy = exp_negative(sub_rn(gate[i].y, top.y));
            sum = make_float2(add_rn(sum.x, wx), add_rn(sum.y, wy));
            acc = make_float2(fma_rn(wx, kv.x, acc.x), fma_rn(wy, kv.y, acc.y));
        }
    }
    return f32_to_bf16(div_rn(acc.x, sum.x)) |
           static_cast<uint32_t>(f32_to_bf16(div_rn(acc.y, sum.y))) << 16;
}

template <Pooling kKind>
inline constexpr int kSpan = kKind == Pooling::Pair ? 2 : kShortSpan;

// Whether all rows of the span are there.
template <Pooling kKind>
__device__ __forceinline__ bool is_whole(const Entry& e) {
    return e.position - e.first == kSpan<kKind> - 1;
}

// Entries of a block, `count` at a time.
struct PoolShared {
    Entry entries[kPoolEntries];
    PoolRow rows[kPoolEntries][kShortSpan];
    PoolRow group[kGroupSpan];
};

// Pooled values of `count` entries to pooled[entry]. The caller's warp w has entry w in `entry`.
template <Pooling kKind, int kDim, int kStride>
__device__ __forceinline__ void pool_entries(const CompressParams& p, int count, const Entry& entry,
                                             PoolShared& shared, uint16_t (*pooled)[kStride]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < count) {
        if (lane == 0) shared.entries[warp] = entry;
        if (kKind == Pooling::Pair || kKind == Pooling::Overlap) {
            const int first = is_whole<kKind>(entry) ? 0 : kSpan<kKind> / 2;
            if (lane >= first && lane < kSpan<kKind>)
                shared.rows[warp][lane] =
                    pool_row(p, entry, entry.position - (kSpan<kKind> - 1) + lane);
        }
    }
    __syncthreads();
    if constexpr (kKind == Pooling::Group) {
        const int thread = static_cast<int>(threadIdx.x);
        for (int i = 0; i < count; ++i) {
            const Entry& e = shared.entries[i];
            if (thread < kGroupSpan) shared.group[thread] = pool_row(p, e, e.first + thread);
            __syncthreads();
            if (thread < kDim / 2)
                reinterpret_cast<uint32_t*>(pooled[i])[thread] = pool_group(shared.group, thread);
            __syncthreads();
        }
        return;
    }
    // Two channels a thread, of one entry after the other.
    constexpr int kPairs = kDim / 2, kTogether = kPoolThreads / kPairs;
    const int pair = static_cast<int>(threadIdx.x) % kPairs;
    int i = static_cast<int>(threadIdx.x) / kPairs;
    const auto put = [&](uint32_t values) {
        reinterpret_cast<uint32_t*>(pooled[i])[pair] = values;
    };
    if constexpr (kKind == Pooling::None) {
        const auto read = [&](int number) {
            return reinterpret_cast<const uint32_t*>(
                p.kv_bf16.row(shared.entries[number].row))[pair];
        };
        uint32_t next = i < count ? read(i) : 0;
        for (; i < count; i += kTogether) {
            const uint32_t values = next;
            if (i + kTogether < count) next = read(i + kTogether);
            put(values);
        }
    } else {
        Rows<kSpan<kKind>> rows, next;
        const auto read = [&](int number) {
            next.load(shared.rows[number], is_whole<kKind>(shared.entries[number]), pair);
        };
        if (i < count) read(i);
#pragma unroll 2
        for (; i < count; i += kTogether) {
            rows = next;
            if (i + kTogether < count) read(i + kTogether);
            if (p.bias) rows.add_bias(shared.rows[i], pair);
            put(rows.pool());
        }
    }
}

}  // namespace flash_csa::sm90
