// Pooling of entries in a block of 256 threads: softmax over the rows of a group, channel by
// channel, in the order of the CPU back end (ascending rows: sum, then FMA), to BF16 in shared
// memory. A thread has two channels.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

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

// What a block keeps of the one group that it pools: as many of its gates as there is room for.
template <int kDim, int kHeld>
struct GroupShared {
    static constexpr int kWaves = 8, kWave = kHeld / kWaves;  // that are waited for apart
    static constexpr uint32_t kRowBytes = kDim * sizeof(float);

    float2 gate[kHeld][kDim / 2];  // with their bias, once they are there
    PoolRow rows[kGroupSpan];
    cutlass::arch::ClusterTransactionBarrier filled[kWaves];
    uint32_t round;  // parity of the barriers

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        for (auto& barrier : filled) barrier.init(1);
        cutlass::arch::fence_barrier_init();
        round = 0;
    }
    // Starts the copies of the held gates, a wave a warp. The rows are known to the block.
    __device__ __forceinline__ void fill() {
        static_assert(kWaves == kPoolThreads / 32);
        const int wave = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
        if (!cute::elect_one_sync()) return;
        filled[wave].arrive_and_expect_tx(kWave * kRowBytes);
#pragma unroll
        for (int i = wave * kWave; i < (wave + 1) * kWave; ++i)
            cute::SM90_BULK_COPY_G2S::copy(rows[i].gate, reinterpret_cast<uint64_t*>(&filled[wave]),
                                           gate[i], kRowBytes);
    }
};

// One entry of 128 rows, two channels a thread: no thread waits for another one, and rows are read
// whole (pieces of 128 bytes that lie 2 KiB apart come at a fifth of the memory's rate). The first
// pass finds the largest gates while they arrive; the second one goes through the rows again, their
// kv half a pass of registers ahead. Gates that shared memory does not hold come again, from the
// L2.
template <int kDim, int kHeld>
__device__ __forceinline__ void pool_group(const CompressParams& p, const Entry& e,
                                           GroupShared<kDim, kHeld>& shared, uint16_t* pooled) {
    using Shared = GroupShared<kDim, kHeld>;
    constexpr int kBatch = 32, kPart = 8, kWaves = Shared::kWaves, kWave = Shared::kWave;
    constexpr int kFarWave = (kGroupSpan - kHeld) / kWaves, kFar = 4;
    static_assert(kHeld % kPart == 0 && kFarWave % kFar == 0);
    const int pair = static_cast<int>(threadIdx.x);
    cutlass::arch::fence_view_async_shared();  // gates of the entry before were written
    __syncthreads();
    if (threadIdx.x < kGroupSpan) shared.rows[threadIdx.x] = pool_row(p, e, e.first + threadIdx.x);
    const uint32_t round = shared.round;
    __syncthreads();
    shared.fill();
    if (threadIdx.x == 0) shared.round = round ^ 1;
    if (pair >= kDim / 2) return;
    // A batch of them, as each would be waited for by itself.
    const auto read_bias = [&](int first, auto& bias) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof bias / sizeof *bias); ++i) {
            bias[i] = make_float2(0.f, 0.f);
            if (p.bias) bias[i] = __ldcg(channel_pair(shared.rows[first + i].bias, pair));
        }
    };
    const auto add = [](float2 gate, float2 bias) {
        return make_float2(add_rn(gate.x, bias.x), add_rn(gate.y, bias.y));
    };
    float2 kv[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) kv[i] = __ldcs(channel_pair(shared.rows[i].kv, pair));

    float2 top = make_float2(-INFINITY, -INFINITY);
    const auto raise = [&](float2 gate) {
        top = make_float2(fmaxf(top.x, gate.x), fmaxf(top.y, gate.y));  // never NaN
    };
#pragma unroll 1
    for (int wave = 0; wave < kWaves; ++wave) {
        float2 bias[kWave], far[kFar], far_bias[kFar];
        const auto read_far = [&](int first) {
#pragma unroll
            for (int i = 0; i < kFar; ++i)
                far[i] = __ldcg(channel_pair(shared.rows[first + i].gate, pair));
            read_bias(first, far_bias);
        };
        read_bias(wave * kWave, bias);
        int first = kHeld + wave * kFarWave;
        if (kFarWave > 0) read_far(first);
        shared.filled[wave].wait(round);
#pragma unroll
        for (int i = 0; i < kWave; ++i) {
            float2& gate = shared.gate[wave * kWave + i][pair];
            gate = add(gate, bias[i]);
            raise(gate);
        }
#pragma unroll 1
        for (const int end = first + kFarWave; first < end; first += kFar) {
            if (first != end - kFarWave) read_far(first);
#pragma unroll
            for (int i = 0; i < kFar; ++i) raise(add(far[i], far_bias[i]));
        }
    }

    float2 sum = make_float2(0.f, 0.f), acc = make_float2(0.f, 0.f);
    const auto add_rows = [&](int first, float2* kv) {
        float2 gate[kPart];
        if (first < kHeld) {
#pragma unroll
            for (int i = 0; i < kPart; ++i) gate[i] = shared.gate[first + i][pair];
        } else {
            float2 bias[kPart];
#pragma unroll
            for (int i = 0; i < kPart; ++i)
                gate[i] = __ldcg(channel_pair(shared.rows[first + i].gate, pair));
            read_bias(first, bias);
#pragma unroll
            for (int i = 0; i < kPart; ++i) gate[i] = add(gate[i], bias[i]);
        }
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            const float wx = exp_negative(sub_rn(gate[i].x, top.x));
            const float wy = exp_negative(sub_rn(gate[i].y, top.y));
            sum = make_float2(add_rn(sum.x, wx), add_rn(sum.y, wy));
            acc = make_float2(fma_rn(wx, kv[i].x, acc.x), fma_rn(wy, kv[i].y, acc.y));
            if (first + kBatch < kGroupSpan)
                kv[i] = __ldcs(channel_pair(shared.rows[first + kBatch + i].kv, pair));
        }
    };
#pragma unroll 1
    for (int first = 0; first < kGroupSpan; first += kBatch) {
#pragma unroll
        for (int part = 0; part < kBatch; part += kPart) add_rows(first + part, kv + part);
    }
    reinterpret_cast<uint32_t*>(pooled)[pair] =
        f32_to_bf16(div_rn(acc.x, sum.x)) | static_cast<uint32_t>(f32_to_bf16(div_rn(acc.y, sum.y)))
                                                << 16;
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
};

// Pooled values of `count` entries to pooled[entry]. The caller's warp w has entry w in `entry`.
template <Pooling kKind, int kDim, int kStride, class Group>
__device__ __forceinline__ void pool_entries(const CompressParams& p, int count, const Entry& entry,
                                             PoolShared& shared, Group& group,
                                             uint16_t (*pooled)[kStride]) {
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
        for (int i = 0; i < count; ++i) pool_group(p, shared.entries[i], group, pooled[i]);
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
