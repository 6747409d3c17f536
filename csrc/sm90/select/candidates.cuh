// The candidates of a row in a cluster's shared memory, and the lowest of its k best among them.
//
// A candidate is a pair (key, ~id) in one word: larger is better, and no two are equal. There are
// two ways to the k-th: every block fetches all pairs and looks at them alone (find_fine), or
// digits are counted over the cluster (find_cut), which any number of pairs and of ties allows.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "core/scoring.h"
#include "sm90/common/cluster_sync.cuh"

namespace flash_csa::sm90 {

inline constexpr int kClusterThreads = 512;  // of a block
inline constexpr int kUnit = 4;
inline constexpr int kStripe = kClusterThreads * kUnit;  // ids of one unit of every thread
inline constexpr int kMaxClusterTopK = 2048;
inline constexpr int kTrigger = 3072;  // candidates from which a block cuts
inline constexpr int kLookUnits = 4;   // of a thread, between two looks at their number
inline constexpr int kCandidates = kTrigger + kLookUnits * kStripe;
inline constexpr int kDigitBins = 2048;
inline constexpr int kFetched = 8;         // pairs of the cluster that a thread fetches
inline constexpr int kFineBits = 12;       // of a key, below those of step 3
inline constexpr int kWindowWords = 2048;  // 65,536 ids are emitted at a time
inline constexpr int kMaxCluster = 16;
static_assert(kDigitBins == kUnit * kClusterThreads, "a thread owns four bins");
static_assert(kMaxClusterTopK < kTrigger);

using ClusterScan = cub::BlockScan<int32_t, kClusterThreads, cub::BLOCK_SCAN_WARP_SCANS>;

struct alignas(16) CandidateShared {
    uint64_t pairs[kCandidates];  // key << 32 | ~id; peers read them
    union {
        struct {
            uint4 bins[kClusterThreads];  // own counts; peers read them
            union {
                uint4 gather[kClusterThreads];   // peers' counts of this block's slice of the bins
                uint64_t tied[kClusterThreads];  // pairs of the bin of the k-th best
            };
        };
        struct {
            uint4 mask[kWindowWords / 4];  // a bit per id
            int4 ranks[kWindowWords / 4];  // results before each word
        };
    };
    uint4 sums[kClusterThreads / 2];  // the cluster's counts of that slice; peers read them
    ClusterScan::TempStorage scan;
    int32_t counts[kMaxCluster];  // results of each block; peers write them
    int32_t kept;                 // candidates; peers read it
    int32_t below;                // results of the blocks before this one
    int32_t num_tied;
    int32_t bin, above, inside;  // of a histogram: where the k-th best lies
    uint64_t lowest;
};

// Results are those pairs whose leading bits exceed `prefix`, and the first `need` of those that
// equal it.
struct ClusterCut {
    uint64_t prefix;
    int32_t shift;
    int32_t need;
    bool final;

    __device__ uint64_t lowest() const { return prefix << shift; }
};

// Below every pair of a score that is a number.
inline constexpr uint64_t kAnyPair = uint64_t{1} << 32;

// The smallest score with at least this key; NaN if there is none.
__device__ __forceinline__ float score_from(uint32_t key) {
    constexpr uint32_t kLowest = 0x007fffffu;  // the key of -Inf
    return score_of_key(key < kLowest ? kLowest : key);
}

template <bool kCluster>
class Candidates {
  protected:
    __device__ Candidates(int32_t num_ids, int32_t k, CandidateShared& shared)
        : num_ids_(num_ids), k_(k), s_(shared), thread_(threadIdx.x) {
        if (!kCluster) return;
        const auto cluster = cooperative_groups::this_cluster();
        size_ = static_cast<int32_t>(cluster.num_blocks());
        rank_ = static_cast<int32_t>(cluster.block_rank());
        slice_shift_ = 31 - __clz(kClusterThreads / size_);
    }

    __device__ void clear() {
        s_.bins[thread_] = {0, 0, 0, 0};
        if (thread_ == 0) s_.kept = s_.below = s_.num_tied = 0;
        __syncthreads();
    }

    // Sets lowest_ and `total`, the number of results; returns the number of those in blocks before
    // this one. All candidates have keys of at least base; fewer than k in all, and base above 1,
    // means that there are others.
    __device__ int32_t cut(uint32_t base, int32_t& total) {
        uint64_t fetched[kFetched];
        bool fits = true;
        if (kCluster) {
            cluster_publish();
            fits = __syncthreads_and(fetch(fetched));
        }
        const bool found = fits && find_fine(base, fetched, total);
        // Nobody leaves, or starts over, while a peer may still read here.
        if (kCluster) {
            if (!fits) cluster_arrive_relaxed();
            cluster_wait();
        }
        if (found) return results_before(fetched);
        lowest_ = find_cut<kCluster>({0, 64, k_, false});
        return count_results(total);
    }

    __device__ static int32_t id_of(uint64_t pair) {
        return static_cast<int32_t>(~static_cast<uint32_t>(pair));
    }

    // The lowest pair of the results among all candidates, digit by digit: of the cluster (kWide)
    // or of this block.
    template <bool kWide>
    __device__ uint64_t find_cut(ClusterCut cut) {
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
        while (!cut.final) {
            if (cut.shift == 32) {  // ids are small: the leading bits of ~id are ones
                const int32_t ones = num_ids_ > 1 ? __clz(num_ids_ - 1) : 31;
                cut.prefix = (cut.prefix + 1 << ones) - 1;
                cut.shift = 32 - ones;
            }
            const int32_t shift = max(cut.shift - 11, cut.shift > 32 ? 32 : 0);
            __syncthreads();
            s_.bins[thread_] = {0, 0, 0, 0};
            __syncthreads();
            const int32_t count = s_.kept;
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const uint64_t pair = s_.pairs[i];
                if (pair == 0 || (cut.shift < 64 && pair >> cut.shift != cut.prefix)) continue;
                const uint32_t mask = (1u << (cut.shift - shift)) - 1;
                atomicAdd(&bins[static_cast<uint32_t>(pair >> shift) & mask], 1u);
            }
            narrow<kWide>(cut, shift);
        }
        return cut.lowest();
    }

    // The cut after one more digit, whose counts are in the bins.
    template <bool kWide>
    __device__ void narrow(ClusterCut& cut, int32_t shift) {
        const int32_t place = kClusterThreads - 1 - thread_;  // thread 0 has the highest bins
        uint4 own;
        if (kWide) {
            own = sum_bins(place);
        } else {
            __syncthreads();
            own = s_.bins[place];
        }
        if (find_bin(own, cut.need) < cut.need) {  // all of them; only the first digit gets here
            cut = {kAnyPair >> 32, 32, 0, true};
            return;
        }
        cut.prefix = cut.prefix << (cut.shift - shift) | static_cast<uint32_t>(s_.bin);
        cut.shift = shift;
        cut.need -= s_.above;
        cut.final = cut.need == s_.inside;
    }

    const int32_t num_ids_, k_;
    CandidateShared& s_;
    const int32_t thread_;
    int32_t size_ = 1, rank_ = 0, slice_shift_ = 0;  // of the cluster; threads that read a peer
    uint64_t lowest_ = 0;                            // of the last cut

  private:
    template <class T>
    __device__ T* of_peer(T* own, int32_t peer) const {
        return cooperative_groups::this_cluster().map_shared_rank(own, static_cast<unsigned>(peer));
    }

    // Calls f(pair) for this thread's part of all candidates of the cluster.
    template <class F>
    __device__ __forceinline__ void for_each(const uint64_t (&fetched)[kFetched],
                                             const F& f) const {
        if (kCluster) {
#pragma unroll
            for (int i = 0; i < kFetched; ++i) f(fetched[i]);
        } else {
            const int32_t count = s_.kept;
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) f(s_.pairs[i]);
        }
    }

    // This thread's part of the candidates of all blocks; false where there are more.
    __device__ bool fetch(uint64_t (&fetched)[kFetched]) const {
        const int32_t slice = 1 << slice_shift_;
        const int32_t peer = thread_ >> slice_shift_, first = thread_ & (slice - 1);
        const int32_t count = *of_peer(&s_.kept, peer);
        const uint64_t* pairs = of_peer(&s_.pairs[first], peer);
#pragma unroll
        for (int i = 0; i < kFetched; ++i) fetched[i] = pairs[i << slice_shift_];
#pragma unroll
        for (int i = 0; i < kFetched; ++i) {
            if (first + (i << slice_shift_) >= count) fetched[i] = 0;
        }
        return count <= kFetched << slice_shift_;
    }

    // The lowest result, by bins of kFineBits of the keys above base. False where there are more
    // pairs in a bin than can be compared, or fewer than k in all.
    __device__ bool find_fine(uint32_t base, const uint64_t (&fetched)[kFetched], int32_t& total) {
        const auto bin_of = [&](uint64_t pair) {
            const uint32_t above = static_cast<uint32_t>(pair >> 32) - base;
            return min(above >> kFineBits, uint32_t{kDigitBins - 1});
        };
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
        s_.bins[thread_] = {0, 0, 0, 0};
        __syncthreads();
        for_each(fetched, [&](uint64_t pair) {
            if (pair != 0) atomicAdd(&bins[bin_of(pair)], 1u);
        });
        __syncthreads();
        if (kCluster) cluster_arrive_relaxed();  // all pairs have come
        total = find_bin(s_.bins[kClusterThreads - 1 - thread_], k_);
        if (total <= k_) {
            lowest_ = kAnyPair;
            return total == k_ || base <= 1;
        }
        total = k_;
        const uint32_t bin = static_cast<uint32_t>(s_.bin);
        const int32_t need = k_ - s_.above, inside = s_.inside;
        lowest_ = uint64_t{base + (bin << kFineBits)} << 32;
        if (inside == need) return true;
        if (inside > kClusterThreads) return false;
        for_each(fetched, [&](uint64_t pair) {
            if (pair != 0 && bin_of(pair) == bin) s_.tied[atomicAdd(&s_.num_tied, 1)] = pair;
        });
        __syncthreads();
        if (thread_ < inside) {
            const uint64_t own = s_.tied[thread_];
            int32_t better = 0;
            for (int32_t i = 0; i < inside; ++i) better += s_.tied[i] > own ? 1 : 0;
            if (better == need - 1) s_.lowest = own;
        }
        __syncthreads();
        lowest_ = s_.lowest;
        return true;
    }

    // Results among the fetched pairs of lower blocks.
    __device__ int32_t results_before(const uint64_t (&fetched)[kFetched]) {
        if (!kCluster) return 0;
        int32_t own = 0;
        if (thread_ >> slice_shift_ < rank_) {
#pragma unroll
            for (int i = 0; i < kFetched; ++i) own += fetched[i] >= lowest_ ? 1 : 0;
        }
        own = __reduce_add_sync(0xffffffffu, own);
        if (thread_ % 32 == 0 && own > 0) atomicAdd(&s_.below, own);
        __syncthreads();
        return s_.below;
    }

    // Four bins of the cluster: each block adds up a slice, then everybody reads the slices.
    __device__ uint4 sum_bins(int32_t place) {
        const int32_t slice = 1 << slice_shift_, first = rank_ << slice_shift_;
        cluster_publish();
        s_.gather[thread_] =
            *of_peer(&s_.bins[first + (thread_ & (slice - 1))], thread_ >> slice_shift_);
        __syncthreads();
        if (thread_ < slice) {
            uint4 sum = {0, 0, 0, 0};
#pragma unroll 4
            for (int32_t i = thread_; i < kClusterThreads; i += slice) {
                const uint4 part = s_.gather[i];
                sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
            }
            s_.sums[thread_] = sum;
        }
        cluster_publish();
        return *of_peer(&s_.sums[place & (slice - 1)], place >> slice_shift_);
    }

    // Finds the bin of the need-th best; `own`: four bins, the highest those of thread 0. Returns
    // the sum of all bins. Ends with a barrier.
    __device__ int32_t find_bin(const uint4& own, int32_t need) {
        const uint32_t bins[kUnit] = {own.w, own.z, own.y, own.x};
        const int32_t place = kClusterThreads - 1 - thread_;
        int32_t before, total;
        const int32_t sum = static_cast<int32_t>(own.x + own.y + own.z + own.w);
        ClusterScan(s_.scan).ExclusiveSum(sum, before, total);
        if (before < need && need <= before + sum) {
#pragma unroll
            for (int b = 0; b < kUnit; ++b) {
                const int32_t inside = static_cast<int32_t>(bins[b]);
                if (before < need && need <= before + inside) {
                    s_.bin = kUnit * place + kUnit - 1 - b;
                    s_.above = before;
                    s_.inside = inside;
                }
                before += inside;
            }
        }
        __syncthreads();
        return total;
    }

    // Results of the blocks before this one, counted by all; `total`: of all blocks.
    __device__ int32_t count_results(int32_t& total) {
        const int32_t count = s_.kept;
        int32_t own = 0;
#pragma unroll 1
        for (int32_t i = thread_; i < count; i += kClusterThreads) {
            own += s_.pairs[i] >= lowest_ ? 1 : 0;
        }
        int32_t before;
        __syncthreads();
        ClusterScan(s_.scan).ExclusiveSum(own, before, total);
        if (!kCluster) return 0;
        if (thread_ < size_) *of_peer(&s_.counts[rank_], thread_) = total;
        cooperative_groups::this_cluster().sync();
        total = 0;
        int32_t base = 0;
        for (int32_t peer = 0; peer < size_; ++peer) {
            if (peer == rank_) base = total;
            total += s_.counts[peer];
        }
        return base;
    }
};

}  // namespace flash_csa::sm90
