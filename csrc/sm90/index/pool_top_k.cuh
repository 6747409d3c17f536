// The k best of the scores of a pool that lie in the shared memory of a cluster, in one exchange:
// larger order key first, then lower column; results in ascending column.
//
//   1. bound    each block has counted the leading bits of its scores' keys; the tail of the counts
//               says which bound a few more of them reach than it has results, if those are spread
//               evenly
//   2. send     scores that reach it go to the first block, with what becomes of them: position and
//               slot
//   3. k-th     the first block alone: one histogram of the keys above the lowest bound, then the
//               few pairs of one bin are compared
//   4. emit     a bit per column and a prefix sum give every result its place
//
// The bounds are guesses. Where they do not hold, where more reach them than there is room for or
// than can be compared, nothing is written and cluster_top_k.cuh selects: all blocks are told.
// Atomics only count and collect, so results do not depend on their order.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "core/scoring.h"
#include "sm90/common/remote_store.cuh"
#include "sm90/common/warp_scan.cuh"
#include "sm90/index/pool_scores.cuh"
#include "sm90/select/candidates.cuh"
#include "sm90/select/score_sources.cuh"

namespace flash_csa::sm90 {

inline constexpr int kSentLog = 11;
inline constexpr int kSent = 1 << kSentLog;  // candidates of a cluster
inline constexpr int kPoolColumns = kMaxPoolBlocks * kPoolBlock;
inline constexpr int kLargestPoolCluster = 16;

// What the blocks send to the first.
struct SentShared {
    uint4 candidates[kSent];             // key, column, position, slot; an equal part of each block
    uint4 headers[kLargestPoolCluster];  // candidates that a block has, its bound
};

// Used once scores are there.
struct PoolFinalShared {
    uint4 bins[kClusterThreads];
    uint64_t tied[kClusterThreads];
    uint32_t mask[kPoolColumns / 32];
    int32_t ranks[kPoolColumns / 32];
    int32_t listed[kSent];  // places of scores that reach the bound
    SentShared sent;        // where the first block is the only one
};
static_assert(kPoolColumns / 32 == kClusterThreads, "a thread has a word");

struct PoolTopKShared {
    Barrier sent;     // of the first block: an arrival of each block
    Barrier decided;  // a word that the first block sends
    uint32_t verdict;
    int32_t sums[kClusterThreads / 32];
    int32_t wanted;  // scores of this block above its bound
    int32_t kept, num_tied;
    int32_t bin, above, inside;
    uint64_t lowest;
};

template <bool kCluster>
class PoolTopK {
  public:
    __device__ PoolTopK(const ConstPages& pages, const PoolShare& share, int32_t rank, int32_t k,
                        PoolTopKShared& shared, PoolFinalShared& final, SentShared& sent)
        : pages_(pages),
          share_(share),
          rank_(rank),
          k_(k),
          s_(shared),
          f_(final),
          sent_(kCluster ? sent : final.sent),
          thread_(threadIdx.x),
          warp_(threadIdx.x / 32),
          lane_(threadIdx.x % 32) {}

    // One thread, before a barrier of the block and one of the cluster.
    __device__ static void begin(int32_t size_log, PoolTopKShared& shared) {
        shared.kept = shared.num_tied = 0;
        if (!kCluster) return;
        shared.sent.init(1 << size_log);
        shared.decided.init(1);
        cutlass::arch::fence_barrier_init();
        shared.decided.arrive_and_expect_tx(sizeof(shared.verdict));
    }

    // One thread, before a barrier of the block: so many results are expected of this block, and
    // some more for their deviation.
    __device__ static void expect(const PoolShare& share, int32_t rank, int32_t k,
                                  PoolTopKShared& shared) {
        const int32_t lines = (share.count + kPassKeys - 1) / kPassKeys;
        const int32_t own = (lines - rank + (1 << share.size_log) - 1) >> share.size_log;
        const float mean =
            static_cast<float>(k) * static_cast<float>(own) / static_cast<float>(max(lines, 1));
        const float most = kCluster ? mean + 4.f * sqrtf(mean) + 1.f : mean;
        shared.wanted = max(min(k, static_cast<int32_t>(most)), 1);
    }

    // kClusterThreads of each block call, when the first block has begun; a barrier comes before.
    // Writes the row's Selection, or returns false in all of them.
    __device__ bool run(const float* scores, const PoolPlaces& places, const uint32_t* bins,
                        const SelectionOut& out, int64_t row) {
        const uint32_t base = find_base(bins);
        list(scores, base);
        f_.bins[thread_] = {0, 0, 0, 0};
        f_.mask[thread_] = 0;
        __syncthreads();
        send(scores, places, base);
        if (kCluster && rank_ != 0) {
            s_.decided.wait(0);
            return s_.verdict != 0;
        }
        if (kCluster) {
            s_.sent.wait(0);
        } else {
            __syncthreads();
        }
        uint4 own[kOwnSent];
        const bool found = find_lowest(own);
        if (kCluster && thread_ > 0 && thread_ < 1 << share_.size_log) {
            cute::store_shared_remote(found, cute::cast_smem_ptr_to_uint(&s_.verdict),
                                      cute::cast_smem_ptr_to_uint(&s_.decided), thread_);
        }
        if (found) emit(own, out, row);
        return found;
    }

  private:
    static constexpr int kOwnSent = kSent / kClusterThreads;
    static constexpr int kDigitBits = 11;
    static_assert(1 << kDigitBits == kDigitBins);

    // Finds the bin of the need-th best. A thread has kOwn neighbouring bins; the highest are those
    // of thread 0. Returns the sum of all. Ends with a barrier.
    template <int kOwn>
    __device__ __forceinline__ int32_t find_bin(const int32_t (&own)[kOwn], int32_t need) {
        int32_t sum = 0;
#pragma unroll
        for (int b = 0; b < kOwn; ++b) sum += own[b];
        const int32_t upto = scan(sum);
        int32_t total, before = upto - sum + before_warp(total);
        if (before < need && need <= before + sum) {
            int32_t bin = 0, above = 0, inside = 0;
#pragma unroll
            for (int b = kOwn - 1; b >= 0; --b) {
                const bool here = before < need && need <= before + own[b];
                bin = here ? b : bin;
                above = here ? before : above;
                inside = here ? own[b] : inside;
                before += own[b];
            }
            s_.bin = kOwn * (kClusterThreads - 1 - thread_) + bin;
            s_.above = above;
            s_.inside = inside;
        }
        __syncthreads();
        return total;
    }

    // The sum over the lanes up to this one; the last lane leaves it for the other warps.
    __device__ __forceinline__ int32_t scan(int32_t value) {
        value = sum_of_lanes_up_to(value, lane_);
        if (lane_ == 31) s_.sums[warp_] = value;
        return value;
    }
    // Behind a barrier: the sums of all warps and of those before this one.
    __device__ __forceinline__ int32_t before_warp(int32_t& total) const {
        __syncthreads();
        const int32_t sum = lane_ < kClusterThreads / 32 ? s_.sums[lane_] : 0;
        total = __reduce_add_sync(~0u, sum);
        return __reduce_add_sync(~0u, lane_ < warp_ ? sum : 0);
    }

    // The key from which this block's scores are sent; 0: all. A warp looks at neighbouring bins, a
    // lane at four of each 128: the highest first.
    __device__ __forceinline__ uint32_t find_base(const uint32_t* bins) {
        constexpr int kOwn = kPoolBins / kClusterThreads / kUnit;
        const int32_t need = s_.wanted;
        const int32_t last = kPoolBins / kUnit - 1 - (warp_ * kOwn * 32 + lane_);
        const uint4* source = reinterpret_cast<const uint4*>(bins) + last;
        uint4 own[kOwn];
        int32_t sums[kOwn], sum = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i] = source[-32 * i];
        if (thread_ < 3) own[0] = {0, 0, 0, 0};  // above infinity: NaN
        if (thread_ == 3) own[0].y = own[0].z = own[0].w = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            sums[i] = static_cast<int32_t>(own[i].x + own[i].y + own[i].z + own[i].w);
            sum += sums[i];
        }
        sum = __reduce_add_sync(~0u, sum);
        if (lane_ == 0) s_.sums[warp_] = sum;
        int32_t total, before = before_warp(total);
        if (before < need && need <= before + sum) {
#pragma unroll 1
            for (int i = 0; i < kOwn; ++i) {
                int32_t here = sums[0];
                uint4 four = own[0];
#pragma unroll
                for (int j = 1; j < kOwn; ++j) {
                    if (i == j) here = sums[j], four = own[j];
                }
                const int32_t all = __reduce_add_sync(~0u, here);
                if (need > before + all) {
                    before += all;
                    continue;
                }
                int32_t above = before + sum_of_lanes_up_to(here, lane_) - here;
                const uint32_t counts[kUnit] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int b = kUnit - 1; b >= 0; --b) {
                    const int32_t upto = above + static_cast<int32_t>(counts[b]);
                    if (above < need && need <= upto) s_.bin = kUnit * (last - 32 * i) + b;
                    above = upto;
                }
                break;
            }
        }
        __syncthreads();
        return total < need ? 0 : static_cast<uint32_t>(s_.bin) << kPoolBinShift;
    }

    __device__ int32_t room() const { return kSent >> share_.size_log; }

    __device__ __forceinline__ void put(uint4* to, const uint4& value) {
        if (kCluster) {
            store_remote(peer_address(to, 0), value, peer_address(&s_.sent, 0));
        } else {
            *to = value;
        }
    }

    // Collects the places of scores that reach the bound.
    __device__ __forceinline__ void list(const float* scores, uint32_t base) {
        constexpr int kLook = 4;  // units of a thread, for one addition to their number
        const float bound = score_from(base);
        const int32_t length = share_.length();
#pragma unroll 1
        for (int32_t first = kUnit * thread_; first < length; first += kLook * kStripe) {
            uint32_t pass = 0;
#pragma unroll
            for (int u = 0; u < kLook; ++u) {
                const int32_t at = first + u * kStripe;
                if (at >= length) break;
                const float4 four = *reinterpret_cast<const float4*>(scores + at);
                const float values[kUnit] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < kUnit; ++e) {
                    if (values[e] >= bound) pass |= 1u << (kUnit * u + e);
                }
            }
            if (pass == 0) continue;
            int32_t to = atomicAdd(&s_.kept, __popc(pass));
            do {
                const int32_t e = __ffs(static_cast<int>(pass)) - 1;
                if (to < room()) f_.listed[to] = first + e / kUnit * kStripe + e % kUnit;
                ++to;
                pass &= pass - 1;
            } while (pass != 0);
        }
    }

    // Sends them to the first block, and how many there are.
    __device__ __forceinline__ void send(const float* scores, const PoolPlaces& places,
                                         uint32_t base) {
        uint4* own = sent_.candidates + rank_ * room();
        const int32_t count = min(s_.kept, room());
        for (int32_t i = thread_; i < count; i += kClusterThreads) {
            const int32_t at = f_.listed[i];
            const int32_t place = at / kPoolBlock;
            const int32_t position = places.blocks[place] * kPoolBlock + at % kPoolBlock;
            const int32_t slot = slot_of(places.page(place, pages_), pages_.page_size,
                                         position & (pages_.page_size - 1));
            put(own + i, {order_key(scores[at]), static_cast<uint32_t>(share_.id(at, rank_)),
                          static_cast<uint32_t>(position), static_cast<uint32_t>(slot)});
        }
        if (thread_ != 0) return;
        put(sent_.headers + rank_, {static_cast<uint32_t>(s_.kept), base, 0, 0});
        if (kCluster) {
            s_.sent.arrive_and_expect_tx((count + 1) * static_cast<uint32_t>(sizeof(uint4)), 0u);
        }
    }

    __device__ static uint64_t pair_of(const uint4& candidate) {
        return uint64_t{candidate.x} << 32 | ~candidate.y;
    }

    // This thread's part of the candidates; key 0: none.
    __device__ __forceinline__ void load(uint4 (&own)[kOwnSent]) const {
        const int32_t shift = kSentLog - share_.size_log;
#pragma unroll
        for (int j = 0; j < kOwnSent; ++j) {
            const int32_t at = thread_ + j * kClusterThreads;
            const uint32_t count = sent_.headers[at >> shift].x;
            own[j] = sent_.candidates[at];
            if (static_cast<uint32_t>(at & ((1 << shift) - 1)) >= count) own[j].x = 0;
        }
    }

    // The lowest pair of a result. False where the candidates do not tell.
    __device__ __forceinline__ bool find_lowest(uint4 (&own)[kOwnSent]) {
        load(own);
        const int32_t size = 1 << share_.size_log;
        const uint4 header = sent_.headers[lane_ & (size - 1)];
        const uint32_t low = __reduce_min_sync(~0u, header.y);
        const uint32_t high = __reduce_max_sync(~0u, header.y);
        if (__any_sync(~0u, header.x > static_cast<uint32_t>(room()))) return false;
        // Bins of keys [from, to], narrower ones where too many share one: bounds near zero, say,
        // where keys of scores like 2^-9 and 2^3 are far apart.
        uint32_t from = low, to = UINT32_MAX;
        int32_t shift = kFineBits, need = k_, inside;
        uint32_t* bins = reinterpret_cast<uint32_t*>(f_.bins);
        lowest_ = kAnyPair;
#pragma unroll 1
        while (true) {
#pragma unroll
            for (const uint4& candidate : own) {
                if (candidate.x == 0 || candidate.x - from > to - from) continue;
                atomicAdd(&bins[min(candidate.x - from >> shift, uint32_t{kDigitBins - 1})], 1u);
            }
            __syncthreads();
            uint4& four = f_.bins[kClusterThreads - 1 - thread_];
            const int32_t counts[kUnit] = {
                static_cast<int32_t>(four.x), static_cast<int32_t>(four.y),
                static_cast<int32_t>(four.z), static_cast<int32_t>(four.w)};
            four = {0, 0, 0, 0};
            const int32_t total = find_bin(counts, need);
            if (total <= k_ && need == k_) {
                total_ = total;
                return high <= (total < k_ ? 1 : max(low, 1u));
            }
            const uint32_t bin = static_cast<uint32_t>(s_.bin);
            need -= s_.above;
            inside = s_.inside;
            from += bin << shift;
            if (bin < kDigitBins - 1) to = from + (1u << shift) - 1;
            if (inside <= kClusterThreads || inside == need || shift == 0) break;
            shift = max(32 - __clz(static_cast<int>(to - from)) - kDigitBits, 0);
        }
        total_ = k_;
        lowest_ = uint64_t{from} << 32;
        if (inside == need && from >= high) return true;
        if (inside > kClusterThreads) return false;
#pragma unroll
        for (const uint4& candidate : own) {
            if (candidate.x == 0 || candidate.x - from > to - from) continue;
            f_.tied[atomicAdd(&s_.num_tied, 1)] = pair_of(candidate);
        }
        __syncthreads();
        if (thread_ < inside) {
            const uint64_t pair = f_.tied[thread_];
            int32_t better = 0;
#pragma unroll 4
            for (int32_t i = 0; i < inside; ++i) better += f_.tied[i] > pair ? 1 : 0;
            if (better == need - 1) s_.lowest = pair;
        }
        __syncthreads();
        lowest_ = s_.lowest;
        return lowest_ >> 32 >= high;
    }

    __device__ __forceinline__ void emit(const uint4 (&own)[kOwnSent], const SelectionOut& out,
                                         int64_t row) {
#pragma unroll
        for (const uint4& candidate : own) {
            if (pair_of(candidate) < lowest_) continue;
            atomicOr(&f_.mask[candidate.y / 32], 1u << candidate.y % 32);
        }
        __syncthreads();
        const int32_t ones = __popc(f_.mask[thread_]);
        const int32_t upto = scan(ones);
        int32_t total;
        const int32_t before = before_warp(total);
        f_.ranks[thread_] = before + upto - ones;
        __syncthreads();
        int32_t* positions = out.positions.row(row);
        int32_t* slots = out.slots.row(row);
#pragma unroll
        for (const uint4& candidate : own) {
            if (pair_of(candidate) < lowest_) continue;
            const uint32_t word = candidate.y / 32;
            const uint32_t lower = f_.mask[word] & ((1u << candidate.y % 32) - 1);
            const int32_t at = f_.ranks[word] + __popc(lower);
            positions[at] = static_cast<int32_t>(candidate.z);
            slots[at] = static_cast<int32_t>(candidate.w);
            if (out.scores) out.scores.row(row)[at] = score_of_key(candidate.x);
        }
        for (int32_t i = total_ + thread_; i < k_; i += kClusterThreads) {
            positions[i] = slots[i] = -1;
            if (out.scores) out.scores.row(row)[i] = score_of_key(0);
        }
        if (thread_ == 0) out.lengths[row] = total_;
    }

    const ConstPages& pages_;
    const PoolShare share_;
    const int32_t rank_, k_;
    PoolTopKShared& s_;
    PoolFinalShared& f_;
    SentShared& sent_;
    const int32_t thread_, warp_, lane_;
    uint64_t lowest_;
    int32_t total_;
};

}  // namespace flash_csa::sm90
