// The ids of a row in the lists of several shards, each once with the best of its keys, by
// ascending id: a source for top_k.
//
// Lists may be in any order and share ids. A table in shared memory has the key of every id of a
// window; the windows go up through the ids, from one that is there to the next.
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include "core/scoring.h"
#include "sm90/select/top_k.cuh"

namespace flash_csa::sm90 {

inline constexpr uint32_t kIdWindow = 24576;  // 96 KiB of keys: two blocks fit an SM
inline constexpr uint32_t kNoId = 0xffffffffu;
static_assert(kIdWindow % (8 * kTopKThreads) == 0, "a sweep takes eight ids a thread");

using IdReduce = cub::BlockReduce<uint32_t, kTopKThreads>;

struct ShardShared {
    TopKShared top_k;
    IdReduce::TempStorage reduce;
    uint32_t result;
};

// Largest of a value of each thread, in all threads.
__device__ inline uint32_t block_max(uint32_t value, ShardShared& shared) {
    value = IdReduce(shared.reduce).Reduce(value, [](uint32_t a, uint32_t b) { return max(a, b); });
    if (threadIdx.x == 0) shared.result = value;
    __syncthreads();
    value = shared.result;
    __syncthreads();
    return value;
}

struct ShardKeys {
    const int32_t* ids;   // [parts, rows, n] packed, from this row on; below 0: padding
    const float* scores;  // the same
    int32_t parts;
    int64_t part_stride;
    int32_t n;
    int32_t forced;   // an id that has the forced key, whether a shard has it or not; -1: none
    uint32_t* table;  // [kIdWindow], shared memory
    ShardShared* shared;

    // Calls f(id, key) for every pair of the lists, each in one thread.
    template <class F>
    __device__ void for_each(const F& f) const {
        for (int32_t part = 0; part < parts; ++part) {
            const int64_t at = part * part_stride;
            for (int32_t i = threadIdx.x; i < n; i += kTopKThreads) {
                const int32_t id = ids[at + i];
                if (id >= 0) f(static_cast<uint32_t>(id), order_key(scores[at + i]));
            }
        }
    }

    // Best key of an id, 0 if no shard has it. All threads call.
    __device__ uint32_t key_of(int32_t wanted) const {
        uint32_t best = 0;
        for_each([&](uint32_t id, uint32_t key) {
            if (id == static_cast<uint32_t>(wanted)) best = max(best, key);
        });
        return block_max(best, *shared);
    }

    // Fills the table with the keys of [first, first + kIdWindow); returns the lowest id above.
    __device__ uint32_t fill(uint32_t first) const {
        for (uint32_t i = 4 * threadIdx.x; i < kIdWindow; i += 4 * kTopKThreads) {
            *reinterpret_cast<uint4*>(table + i) = {0, 0, 0, 0};
        }
        __syncthreads();
        uint32_t next = kNoId;
        const auto take = [&](uint32_t id, uint32_t key) {
            if (id < first) return;
            if (id - first < kIdWindow) {
                atomicMax(&table[id - first], key);
            } else {
                next = min(next, id);
            }
        };
        for_each(take);
        if (threadIdx.x == 0 && forced >= 0) take(static_cast<uint32_t>(forced), kForcedKey);
        return ~block_max(~next, *shared);
    }

    // Each thread takes eight neighbouring ids.
    template <class F>
    __device__ void sweep(const F& f) const {
        for (uint32_t first = 0; first != kNoId;) {
            const uint32_t next = fill(first);
            for (uint32_t at = 8 * threadIdx.x; at < kIdWindow; at += 8 * kTopKThreads) {
                const uint4 low = *reinterpret_cast<const uint4*>(table + at);
                const uint4 high = *reinterpret_cast<const uint4*>(table + at + 4);
                const uint32_t keys[8] = {low.x,  low.y,  low.z,  low.w,
                                          high.x, high.y, high.z, high.w};
                f(static_cast<int32_t>(first + at), keys);
            }
            __syncthreads();
            first = next;
        }
    }
};

}  // namespace flash_csa::sm90
