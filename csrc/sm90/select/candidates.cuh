// The candidates of a row in a cluster's shared memory, and the lowest of its k best among them.
//
// A candidate is a key and a place, the index of its id in the block's share. As pairs (key, ~id)
// larger is better, and no two are equal. There are two ways to the k-th: every block fetches all
// candidates and looks at them alone (find_fine), or digits of the pairs are counted over the
// cluster (find_cut), which any number of candidates and of ties allows.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "core/params.h"
#include "core/scoring.h"
#include "sm90/common/cluster_sync.cuh"

namespace flash_csa::sm90 {

inline constexpr int kClusterThreads = 512;  // of a block
inline constexpr int kUnit = 4;
inline constexpr int kStripe = kClusterThreads * kUnit;  // places of one unit of every thread
inline constexpr int kMaxClusterTopK = 2048;
inline constexpr int kTrigger = 3072;  // candidates from which a block cuts
inline constexpr int kLookUnits = 4;   // of a thread, between two looks at their number
inline constexpr int kCandidates = kTrigger + kLookUnits * kStripe;
inline constexpr int kDigitBins = 2048;
inline constexpr int kFetched = 8;    // candidates of the cluster that a thread fetches
inline constexpr int kFineBits = 14;  // of a key, below those of find_fine
inline constexpr int kWindow = kClusterThreads * 128;  // places that are emitted at a time
static_assert(kDigitBins == kUnit * kClusterThreads, "a thread owns four bins");
static_assert(kMaxClusterTopK < kTrigger);

using ClusterScan = cub::BlockScan<int32_t, kClusterThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// A block's part of a row's ids: of its lines, kLine neighbours, every size-th. So every block has
// its part of each stretch of the row, however long the row is. A place is the index of an id in
// the part. kLine: 128 to 2048, a power of two; reading DRAM is slower in short lines.
template <int kLine>
struct Share {
    int32_t count;     // ids of the row
    int32_t size_log;  // of the cluster

    // Places of the block that has most.
    __device__ int32_t length() const {
        const int32_t lines = (count + kLine - 1) / kLine;
        return (lines + (1 << size_log) - 1 >> size_log) * kLine;
    }
    // kOf: less where places are of blocks of ids.
    template <int kOf = kLine>
    __device__ int32_t id(int32_t place, int32_t rank) const {
        return ((place / kOf << size_log) + rank) * kOf + place % kOf;
    }
};

struct alignas(16) CandidateShared {
    uint32_t keys[kCandidates];    // 0: none; peers read them
    uint32_t places[kCandidates];  // peers read them
    union {
        struct {
            uint4 bins[kClusterThreads];  // own counts; peers read them
            union {
                uint4 gather[kClusterThreads];   // peers' counts of this block's slice of the bins
                uint64_t tied[kClusterThreads];  // pairs of the bin of the k-th best
                uint32_t blocks[kMaxClusterTopK];  // places of those whose entries are candidates
            };
        };
        uint4 sample[2][kClusterThreads];  // counts of 16 bits
        struct {
            uint4 mask[kClusterThreads];  // a bit per place, 128 of them each
            int4 ranks[kClusterThreads];  // results before each word
        };
    };
    uint4 sums[kClusterThreads / 2];  // the cluster's counts of that slice; peers read them
    // Results on each line of the window: in all blocks, and << 16 in lower ones; peers add to
    // them.
    uint32_t lines[kClusterThreads];
    ClusterScan::TempStorage scan;
    int32_t kept;   // candidates; peers read it
    uint32_t base;  // lowest key of a candidate; peers read it
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

template <bool kCluster, int kLine>
class Candidates {
  protected:
    struct Fetched {
        uint32_t keys[kFetched], places[kFetched];
    };

    __device__ Candidates(const Share<kLine>& share, int32_t k, CandidateShared& shared)
        : share_(share), k_(k), s_(shared), thread_(threadIdx.x) {
        if (!kCluster) return;
        rank_ = static_cast<int32_t>(cooperative_groups::this_cluster().block_rank());
        slice_shift_ = 31 - __clz(kClusterThreads) - share.size_log;
    }

    __device__ void clear() {
        s_.sample[0][thread_] = s_.sample[1][thread_] = {0, 0, 0, 0};
        if (thread_ == 0) s_.kept = s_.num_tied = 0;
        __syncthreads();
    }

    // From the candidates of all blocks, whose keys are at least `base` in this one, to lowest_ and
    // `total`, the number of results. False where there may be better ones than those: there are
    // fewer than k, or the k-th is below the base of a block; base is then one that all blocks may
    // have. Leaves a window clear, and a barrier of the cluster open (leave).
    __device__ bool cut(uint32_t& base, int32_t& total) {
        uint32_t low = base, high = base;
        alone_ = true;
        s_.bins[thread_] = {0, 0, 0, 0};
        if (kCluster) {
            if (thread_ == 0) s_.base = base;
            cluster_publish();
            alone_ = fetch(low, high);
        }
        alone_ = find_fine(low, high, total);
        if (!alone_) {
            const ClusterCut found = find_cut<kCluster>({0, 64, k_, false});
            lowest_ = found.lowest();
            total = lowest_ == kAnyPair ? found.need : k_;
            clear_window();
            if (kCluster) cluster_publish();
        }
        base = total < k_ ? 0 : max(low, static_cast<uint32_t>(lowest_ >> 32));
        return high <= max(base, 1u);
    }

    // Nobody goes on while a peer may still read here.
    __device__ static void leave() {
        if (!kCluster) return;
        cluster_arrive_relaxed();
        cluster_wait();
    }

    __device__ uint64_t pair_at(int32_t i) const {
        return pair_of(s_.keys[i], s_.places[i], rank_);
    }
    __device__ bool is_result(int32_t i) const { return pair_at(i) >= lowest_; }

    __device__ void clear_window() {
        __syncthreads();
        s_.mask[thread_] = {0, 0, 0, 0};
        s_.lines[thread_] = 0;
        __syncthreads();
    }

    __device__ void next_window() {
        clear_window();
        if (kCluster && !alone_) cluster_publish();
    }

    // Counts the results on the lines of the window; a barrier comes behind.
    __device__ void count_lines(uint32_t window) {
        const auto add = [&](uint32_t place, int32_t rank, uint32_t* lines, int32_t to) {
            const uint32_t at = place - window;
            if (at < kWindow) atomicAdd(lines + at / kLine, rank < to ? 0x10001u : 1u);
        };
        if (!kCluster) return;
        if (alone_) {
            const int32_t peer = thread_ >> slice_shift_;
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                if (pair_of(fetched_.keys[i], fetched_.places[i], peer) < lowest_) continue;
                add(fetched_.places[i], peer, s_.lines, rank_);
            }
            return;
        }
        const int32_t count = s_.kept;
#pragma unroll 1
        for (int32_t i = thread_; i < count; i += kClusterThreads) {
            if (!is_result(i)) continue;
            for (int32_t peer = 0; peer < 1 << share_.size_log; ++peer) {
                add(s_.places[i], rank_, of_peer(s_.lines, peer), peer);
            }
        }
        cooperative_groups::this_cluster().sync();
    }

    // Where the results end among all candidates, digit by digit: of the cluster (kWide) or of this
    // block. Fewer than wanted: kAnyPair, and `need` is their number.
    template <bool kWide>
    __device__ ClusterCut find_cut(ClusterCut cut) {
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
        while (!cut.final) {
            if (cut.shift == 32) {  // ids are small: the leading bits of ~id are ones
                const int32_t ones = share_.count > 1 ? __clz(share_.count - 1) : 31;
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
                const uint64_t pair = pair_at(i);
                if (pair < kAnyPair || (cut.shift < 64 && pair >> cut.shift != cut.prefix))
                    continue;
                const uint32_t mask = (1u << (cut.shift - shift)) - 1;
                atomicAdd(&bins[static_cast<uint32_t>(pair >> shift) & mask], 1u);
            }
            narrow<kWide>(cut, shift);
        }
        return cut;
    }

    // The key below which no more than some `wanted` of the sample lie above; 0 where it has fewer.
    __device__ uint32_t find_sampled(int32_t wanted) {
        constexpr int kOwn = (1 << (32 - kSampleShift)) / kClusterThreads;
        const int32_t place = kClusterThreads - 1 - thread_;  // thread 0 has the highest bins
        const uint32_t* own = reinterpret_cast<const uint32_t*>(s_.sample) + place * kOwn / 2;
        uint32_t both = 0;
#pragma unroll
        for (int i = 0; i < kOwn / 2; ++i) both += own[i];
        const int32_t total = find_bin<kOwn>(static_cast<int32_t>((both & 0xffffu) + (both >> 16)),
                                             wanted, [&](uint32_t (&bins)[kOwn]) {
#pragma unroll
                                                 for (int b = 0; b < kOwn; ++b) {
                                                     bins[b] = own[b / 2] >> (b % 2 * 16) & 0xffffu;
                                                 }
                                             });
        if (total < wanted) return 0;
        return static_cast<uint32_t>(s_.bin) << kSampleShift;
    }
    static constexpr int kSampleShift = kCluster ? 19 : 20;  // of a key, to a bin of the sample

    const Share<kLine> share_;
    const int32_t k_;
    CandidateShared& s_;
    const int32_t thread_;
    int32_t rank_ = 0, slice_shift_ = 0;  // of the block; of the threads that read a peer
    uint64_t lowest_ = 0;                 // of the last cut

  private:
    template <class T>
    __device__ T* of_peer(T* own, int32_t peer) const {
        return cooperative_groups::this_cluster().map_shared_rank(own, static_cast<unsigned>(peer));
    }

    __device__ uint64_t pair_of(uint32_t key, uint32_t place, int32_t rank) const {
        const int32_t id = share_.id(static_cast<int32_t>(place), rank);
        return uint64_t{key} << 32 | ~static_cast<uint32_t>(id);
    }

    // Calls f(key, place, rank) for this thread's part of all candidates of the cluster.
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
        if (kCluster) {
            const int32_t peer = thread_ >> slice_shift_;
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                f(fetched_.keys[i], fetched_.places[i], peer);
            }
        } else {
            const int32_t count = s_.kept;
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                f(s_.keys[i], s_.places[i], 0);
            }
        }
    }

    // This thread's part of the candidates of all blocks; false where there are more. The lowest
    // and the highest base of all blocks.
    __device__ bool fetch(uint32_t& low, uint32_t& high) {
        const int32_t peer = thread_ >> slice_shift_;
        const int32_t first = kUnit * (thread_ & ((1 << slice_shift_) - 1));
        const int32_t count = *of_peer(&s_.kept, peer);
        const uint32_t base = *of_peer(&s_.base, thread_ & ((1 << share_.size_log) - 1));
        const uint4* keys = of_peer(reinterpret_cast<const uint4*>(s_.keys + first), peer);
        const uint4* places = of_peer(reinterpret_cast<const uint4*>(s_.places + first), peer);
#pragma unroll
        for (int i = 0; i < kFetched; i += kUnit) {
            const uint4 four = keys[i / kUnit << slice_shift_];
            const uint4 at = places[i / kUnit << slice_shift_];
            const int32_t left = count - first - (i << slice_shift_);
            fetched_.keys[i] = left > 0 ? four.x : 0;
            fetched_.keys[i + 1] = left > 1 ? four.y : 0;
            fetched_.keys[i + 2] = left > 2 ? four.z : 0;
            fetched_.keys[i + 3] = left > 3 ? four.w : 0;
            fetched_.places[i] = at.x;
            fetched_.places[i + 1] = at.y;
            fetched_.places[i + 2] = at.z;
            fetched_.places[i + 3] = at.w;
        }
        low = __reduce_min_sync(0xffffffffu, base);
        high = __reduce_max_sync(0xffffffffu, base);
        return count <= kFetched << slice_shift_;
    }

    // The lowest result, by bins of kFineBits of the keys above `low`, which are clear; alone_:
    // this thread has all candidates of its peer. False where there are more pairs in a bin than
    // can be compared. Leaves a window clear.
    __device__ bool find_fine(uint32_t low, uint32_t high, int32_t& total) {
        const auto bin_of = [&](uint32_t key) {
            return min(key - low >> kFineBits, uint32_t{kDigitBins - 1});
        };
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
        if (!kCluster) __syncthreads();
        for_each([&](uint32_t key, uint32_t, int32_t) {
            if (key != 0) atomicAdd(&bins[bin_of(key)], 1u);
        });
        if (!__syncthreads_and(alone_)) return false;
        const uint4 own = s_.bins[kClusterThreads - 1 - thread_];
        total = find_bin_of(own, k_);
        s_.mask[thread_] = {0, 0, 0, 0};
        s_.lines[thread_] = 0;
        const uint32_t bin = static_cast<uint32_t>(s_.bin);
        const int32_t need = k_ - s_.above, inside = s_.inside;
        lowest_ = total <= k_ ? kAnyPair : uint64_t{low + (bin << kFineBits)} << 32;
        if (total <= k_ || (inside == need && lowest_ >> 32 >= high)) {
            total = min(total, k_);
            __syncthreads();
            return true;
        }
        if (inside > kClusterThreads) return false;
        total = k_;
        for_each([&](uint32_t key, uint32_t place, int32_t rank) {
            if (key == 0 || bin_of(key) != bin) return;
            s_.tied[atomicAdd(&s_.num_tied, 1)] = pair_of(key, place, rank);
        });
        __syncthreads();
        if (thread_ < inside) {
            const uint64_t pair = s_.tied[thread_];
            int32_t better = 0;
            for (int32_t i = 0; i < inside; ++i) better += s_.tied[i] > pair ? 1 : 0;
            if (better == need - 1) s_.lowest = pair;
        }
        __syncthreads();
        lowest_ = s_.lowest;
        return true;
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
        const int32_t total = find_bin_of(own, cut.need);
        if (total < cut.need) {  // only the first digit gets here
            cut = {kAnyPair >> 32, 32, total, true};
            return;
        }
        cut.prefix = cut.prefix << (cut.shift - shift) | static_cast<uint32_t>(s_.bin);
        cut.shift = shift;
        cut.need -= s_.above;
        cut.final = cut.need == s_.inside;
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

    // Finds the bin of the need-th best. A thread has kOwn bins of this sum, which get(bins) gives;
    // the highest are those of thread 0. Returns the sum of all bins. Ends with a barrier.
    template <int kOwn, class Get>
    __device__ int32_t find_bin(int32_t sum, int32_t need, const Get& get) {
        int32_t before, total;
        ClusterScan(s_.scan).ExclusiveSum(sum, before, total);
        if (before < need && need <= before + sum) {
            uint32_t bins[kOwn];
            get(bins);
            int32_t bin = 0, above = 0, inside = 0;
#pragma unroll
            for (int b = kOwn - 1; b >= 0; --b) {
                const int32_t own = static_cast<int32_t>(bins[b]);
                const bool here = before < need && need <= before + own;
                bin = here ? b : bin;
                above = here ? before : above;
                inside = here ? own : inside;
                before += own;
            }
            s_.bin = kOwn * (kClusterThreads - 1 - thread_) + bin;
            s_.above = above;
            s_.inside = inside;
        }
        __syncthreads();
        return total;
    }
    __device__ int32_t find_bin_of(const uint4& own, int32_t need) {
        const int32_t sum = static_cast<int32_t>(own.x + own.y + own.z + own.w);
        return find_bin<kUnit>(sum, need, [&](uint32_t (&bins)[kUnit]) {
            bins[0] = own.x, bins[1] = own.y, bins[2] = own.z, bins[3] = own.w;
        });
    }

    Fetched fetched_;
    bool alone_;  // the last cut was found by every block alone
};

}  // namespace flash_csa::sm90
