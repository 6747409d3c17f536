// The k best of a sequence of (key, id) pairs, by one block: larger key first, then the earlier
// pair; results in the order of the sequence. Key 0, a NaN score, is never taken.
//
// A radix select: histograms of 11, 11 and 10 leading bits find the k-th largest key, whatever the
// keys are; a last pass compacts. Atomics only count, so results do not depend on their order.
//
// A Source is the sequence. All threads of the block call
//     source.sweep(f)    f(id, keys): ids id .. id + kWidth - 1 and their keys, of one thread
// which calls f in all threads at a time, in ascending order of threads and then of calls, with
// keys of 0 where a thread has none. f may hold barriers.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "core/scoring.h"

namespace flash_csa::sm90 {

inline constexpr int kTopKThreads = 512;  // of every block that calls top_k: two fit an SM
inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;

// Keys are taken if their leading bits (all but `shift`) exceed `leading`; of those that equal it,
// the first `ties`.
struct Cut {
    int32_t shift;
    uint32_t leading;
    int32_t ties;
    bool final;
};

using TopKScan = cub::BlockScan<int32_t, kTopKThreads>;

struct TopKShared {
    TopKScan::TempStorage scan;
    int32_t bins[kBins];
    Cut cut;
};

__device__ __forceinline__ uint32_t leading_bits(uint32_t key, int32_t shift) {
    return static_cast<uint32_t>(uint64_t{key} >> shift);
}

// Counts the next digit of a thread's keys that are still tied. Neighbours often share a bin.
template <int kWidth>
__device__ __forceinline__ void count_digits(const uint32_t (&keys)[kWidth], const Cut& cut,
                                             int32_t next_shift, int32_t* bins) {
    const uint32_t base = cut.leading << (cut.shift - next_shift);
    uint32_t bin = 0;
    int32_t run = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        if (keys[i] == 0 || leading_bits(keys[i], cut.shift) != cut.leading) continue;
        const uint32_t digit = leading_bits(keys[i], next_shift) - base;
        if (digit != bin && run > 0) {
            atomicAdd(&bins[bin], run);
            run = 0;
        }
        bin = digit;
        ++run;
    }
    if (run > 0) atomicAdd(&bins[bin], run);
}

// The cut after one more digit, in all threads. Thread t looks at the t-th highest bins.
__device__ inline Cut narrow(const Cut& cut, int32_t next_shift, TopKShared& shared) {
    constexpr int kOwn = kBins / kTopKThreads;
    const int32_t highest = kBins - 1 - kOwn * static_cast<int32_t>(threadIdx.x);
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += shared.bins[highest - i];
    int32_t before, total;
    TopKScan(shared.scan).ExclusiveSum(own, before, total);
    if (total <= cut.ties) return {0, 0, 0, true};  // all of them; only the first digit gets here
    if (before < cut.ties && cut.ties <= before + own) {
        int32_t bin = highest;
        while (before + shared.bins[bin] < cut.ties) before += shared.bins[bin--];
        const uint32_t base = cut.leading << (cut.shift - next_shift);
        const int32_t ties = cut.ties - before;
        shared.cut = {next_shift, base + static_cast<uint32_t>(bin), ties,
                      next_shift == 0 || ties == shared.bins[bin]};
    }
    __syncthreads();
    return shared.cut;
}

template <class Source>
__device__ Cut find_cut(const Source& source, int32_t k, TopKShared& shared) {
    Cut cut{32, 0, k, false};
    while (!cut.final) {
        const int32_t next_shift = cut.shift > kDigitBits ? cut.shift - kDigitBits : 0;
        for (int i = threadIdx.x; i < kBins; i += kTopKThreads) shared.bins[i] = 0;
        __syncthreads();
        source.sweep(
            [&](int32_t, const auto& keys) { count_digits(keys, cut, next_shift, shared.bins); });
        __syncthreads();
        cut = narrow(cut, next_shift, shared);
    }
    return cut;
}

// All threads call. sink(index, id, key) is called once for each result; returns their number.
template <class Source, class Sink>
__device__ int32_t top_k(const Source& source, int32_t k, TopKShared& shared, const Sink& sink) {
    const Cut cut = find_cut(source, k, shared);
    int32_t above = 0, tied = 0;  // in the sequence so far
    source.sweep([&](int32_t id, const auto& keys) {
        constexpr int kWidth = sizeof(keys) / sizeof(keys[0]);
        static_assert(kWidth * kTopKThreads < 1 << 15, "two counts in one word");
        int32_t own = 0;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const uint32_t leading = leading_bits(keys[i], cut.shift);
            own += keys[i] == 0             ? 0
                   : leading > cut.leading  ? 1
                   : leading == cut.leading ? 1 << 16
                                            : 0;
        }
        int32_t before, total;
        __syncthreads();  // the scan before this one
        TopKScan(shared.scan).ExclusiveSum(own, before, total);
        int32_t above_before = above + (before & 0xffff);
        int32_t tied_before = tied + (before >> 16);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const uint32_t leading = leading_bits(keys[i], cut.shift);
            if (keys[i] == 0 || leading < cut.leading) continue;
            const bool tie = leading == cut.leading;
            if (!tie || tied_before < cut.ties) {
                sink(above_before + min(tied_before, cut.ties), id + i, keys[i]);
            }
            above_before += tie ? 0 : 1;
            tied_before += tie ? 1 : 0;
        }
        above += total & 0xffff;
        tied += total >> 16;
    });
    return above + min(tied, cut.ties);
}

}  // namespace flash_csa::sm90
