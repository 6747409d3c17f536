// The candidates of a row in a cluster's shared memory, and the lowest of its k best among them.
//
// A candidate is a key and a place, the index of its id in the block's share. As pairs (key, ~id)
// larger is better, and no two are equal. There are two ways to the k-th: every block has all
// candidates sent (exchange.cuh) and looks at them alone (find_fine), or digits of the pairs are
// counted over the cluster (find_cut), which any number of candidates and of ties allows.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "core/params.h"
#include "core/scoring.h"
#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/warp_scan.cuh"
#include "sm90/select/exchange.cuh"

namespace flash_csa::sm90 {

inline constexpr int kClusterThreads = 512;  // of a block
inline constexpr int kUnit = 4;
inline constexpr int kStripe = kClusterThreads * kUnit;  // places of one unit of every thread
inline constexpr int kMaxClusterTopK = 2048;
inline constexpr int kTrigger = 3072;  // candidates from which a block cuts
inline constexpr int kLookUnits = 4;   // of a thread, between two looks at their number
inline constexpr int kCandidates = kTrigger + kLookUnits * kStripe;
inline constexpr int kDigitBins = 2048;
inline constexpr int kFineBits = 13;                   // of a key, below those of find_fine
inline constexpr int kWindow = kClusterThreads * 128;  // places that are emitted at a time
static_assert(kDigitBins == kUnit * kClusterThreads, "a thread owns four bins");
static_assert(kMaxClusterTopK < kTrigger && kClusterThreads == kExchangeThreads);

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
    // Of `of` ids in lines of `line`, those of a block.
    __device__ int32_t own(int32_t rank, int32_t line, int32_t of) const {
        const uint32_t full = static_cast<uint32_t>(of) / line, size = 1u << size_log;
        const uint32_t lines = full + size - 1 - rank >> size_log;
        const uint32_t rest = static_cast<uint32_t>(of) % line;
        return static_cast<int32_t>(lines * line +
                                    ((full & size - 1) == static_cast<uint32_t>(rank) ? rest : 0));
    }
    // kOf: less where places are of blocks of ids.
    template <int kOf = kLine>
    __device__ int32_t id(uint32_t place, int32_t rank) const {
        return static_cast<int32_t>(((place / kOf << size_log) + rank) * kOf + place % kOf);
    }
};

struct alignas(16) CandidateShared {
    uint32_t keys[kCandidates];  // 0: none
    uint32_t places[kCandidates];
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
    // Results of other blocks on each line of the window: of all, and << 16 of lower ones; peers
    // add to them.
    uint32_t lines[kClusterThreads];
    int32_t warp_sums[kClusterThreads / 32];  // of a scan
    int32_t kept;                             // candidates
    int32_t listed;                           // blocks whose entries are to be
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

// Before candidates are looked for; a barrier of the block comes behind.
__device__ __forceinline__ void clear_candidates(CandidateShared& shared) {
    shared.sample[0][threadIdx.x] = shared.sample[1][threadIdx.x] = {0, 0, 0, 0};
    if (threadIdx.x == 0) shared.kept = shared.listed = shared.num_tied = 0;
}

template <bool kCluster, int kLine>
class Candidates {
  protected:
    __device__ Candidates(const Share<kLine>& share, int32_t k, CandidateShared& shared,
                          Exchange<kCluster>& exchange)
        : share_(share), k_(k), s_(shared), thread_(threadIdx.x), exchange_(exchange) {
        if (!kCluster) return;
        rank_ = static_cast<int32_t>(cooperative_groups::this_cluster().block_rank());
        slice_shift_ = kExchangeLog - share.size_log;
    }

    // From the candidates of all blocks, whose keys are at least `base` in this one, to lowest_ and
    // `total`, the number of results. False where there may be better ones than those: there are
    // fewer than k, or the k-th is below the base of a block; base is then one that all blocks may
    // have. Leaves a window clear. kOnce: false as well where candidates do not fit the inboxes, or
    // too many of them are alike; fits: those of this block are there.
    template <bool kOnce>
    __device__ bool cut(uint32_t& base, int32_t& total, bool fits = true) {
        uint32_t low = base, high = base;
        s_.bins[thread_] = {0, 0, 0, 0};
        __syncthreads();
        const int32_t count = fits ? s_.kept : kCandidates + 1;
        alone_ = !kCluster || exchange_.run(s_.keys, s_.places, count, low, high);
        alone_ = alone_ && find_fine(low, high, total);
        if (kOnce && !(alone_ && fits)) return false;
        if (!kOnce && !alone_) {
            const ClusterCut found = find_cut<kCluster>({0, 64, k_, false});
            lowest_ = found.lowest();
            total = lowest_ == kAnyPair ? found.need : k_;
            clear_window();
            if (kCluster) cluster_publish();
        }
        base = total < k_ ? 0 : max(low, static_cast<uint32_t>(lowest_ >> 32));
        return high <= max(base, 1u);
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

    // Counts the results of other blocks on the lines of the window; a barrier comes behind.
    template <bool kOnce>
    __device__ void count_lines(uint32_t window) {
        if (!kCluster) return;
        const auto add = [&](uint32_t place, int32_t rank, uint32_t* lines, int32_t to) {
            const uint32_t at = place - window;
            if (at < kWindow && rank != to)
                atomicAdd(lines + at / kLine, rank < to ? 0x10001u : 1u);
        };
        if (kOnce || alone_) {
            exchange_.for_each([&](uint32_t key, uint32_t place, int32_t rank) {
                if (pair_of(key, place, rank) >= lowest_) add(place, rank, s_.lines, rank_);
            });
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

    // The sum over lower threads; total: over all. A barrier of the block lies between two calls.
    __device__ int32_t sum_before(int32_t value, int32_t& total) {
        const int32_t lane = thread_ % 32, warp = thread_ / 32;
        const int32_t upto = sum_of_lanes_up_to(value, lane);
        if (lane == 31) s_.warp_sums[warp] = upto;
        __syncthreads();
        const int32_t sum = lane < kClusterThreads / 32 ? s_.warp_sums[lane] : 0;
        total = __reduce_add_sync(~0u, sum);
        return upto - value + __reduce_add_sync(~0u, lane < warp ? sum : 0);
    }

    // The key below which no more than some `wanted` of the sample lie above; 0 where it has fewer.
    __device__ uint32_t find_sampled(int32_t wanted) {
        constexpr int kOwn = (1 << (32 - kSampleShift)) / kClusterThreads;
        const uint4* sample = s_.sample[0] + (kClusterThreads - 1 - thread_) * (kOwn / 8);
        uint32_t both = 0;  // thread 0 has the highest bins
#pragma unroll
        for (int i = 0; i < kOwn / 8; ++i) {
            const uint4 own = sample[i];
            both += own.x + own.y + own.z + own.w;
        }
        const auto get = [&](uint32_t (&bins)[kOwn]) {
            const uint32_t* own = reinterpret_cast<const uint32_t*>(sample);
#pragma unroll
            for (int b = 0; b < kOwn; ++b) bins[b] = own[b / 2] >> (b % 2 * 16) & 0xffffu;
        };
        const int32_t sum = static_cast<int32_t>((both & 0xffffu) + (both >> 16));
        const int32_t total = find_bin<kOwn>(sum, wanted, get);
        return total < wanted ? 0 : static_cast<uint32_t>(s_.bin) << kSampleShift;
    }
    static constexpr int kSampleShift = 19;  // of a key, to a bin of the sample

    const Share<kLine> share_;
    const int32_t k_;
    CandidateShared& s_;
    const int32_t thread_;
    Exchange<kCluster>& exchange_;
    int32_t rank_ = 0, slice_shift_ = 0;  // of the block; of the threads that read a peer
    uint64_t lowest_ = 0;                 // of the last cut

  private:
    template <class T>
    __device__ T* of_peer(T* own, int32_t peer) const {
        return cooperative_groups::this_cluster().map_shared_rank(own, static_cast<unsigned>(peer));
    }

    __device__ uint64_t pair_of(uint32_t key, uint32_t place, int32_t rank) const {
        const int32_t id = share_.id(place, rank);
        return uint64_t{key} << 32 | ~static_cast<uint32_t>(id);
    }

    // Calls f(key, place, rank) for this thread's part of all candidates of the cluster.
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
        if (kCluster) {
            exchange_.for_each(f);
            return;
        }
        const int32_t count = s_.kept;
#pragma unroll 1
        for (int32_t i = thread_; i < count; i += kClusterThreads) f(s_.keys[i], s_.places[i], 0);
    }

    // The lowest result, by bins of kFineBits of the keys above `low`, which are clear. False where
    // there are more pairs in a bin than can be compared. Leaves a window clear.
    __device__ bool find_fine(uint32_t low, uint32_t high, int32_t& total) {
        const auto bin_of = [&](uint32_t key) {
            return min(key - low >> kFineBits, uint32_t{kDigitBins - 1});
        };
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
        for_each([&](uint32_t key, uint32_t, int32_t) {
            if (key != 0) atomicAdd(&bins[bin_of(key)], 1u);
        });
        __syncthreads();
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
        // Of up to 32, every warp looks for itself.
        const bool few = inside <= 32;
        const int32_t at = fresh(few ? thread_ % 32 : thread_);
        const uint64_t pair = at < inside ? s_.tied[at] : 0;
        int32_t better = 0;
        for (int32_t i = 0; i < inside; ++i) better += s_.tied[i] > pair ? 1 : 0;
        const bool is_lowest = at < inside && better == need - 1;
        if (few) {
            const uint32_t here = __ballot_sync(~0u, is_lowest);
            lowest_ = __shfl_sync(~0u, pair, __ffs(static_cast<int>(here)) - 1);
            return true;
        }
        if (is_lowest) s_.lowest = pair;
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
        int32_t total, before = sum_before(sum, total);
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

    bool alone_;  // the last cut was found by every block alone
};

}  // namespace flash_csa::sm90
