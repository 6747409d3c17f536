// The k best of a row of scores, by a cluster of blocks: larger order key first, then lower id;
// results in ascending id. Exact for any scores.
//
// Each block owns a range of ids and keeps candidates, pairs (key, ~id), in shared memory:
//   1. sample   some ids of all ranges make one histogram of leading key bits; its tail says which
//               bound a few more than k scores of the row will reach.
//   2. filter   scores below the bound are dropped by one comparison. Where candidates fill up, a
//               block cuts its own down to its k best, which raises its bound.
//   3. cut      every block fetches all candidates of the cluster and finds the k-th best: one
//               histogram of the keys above the bound, then the few pairs of one bin are compared.
//   4. emit     a bit per id and a prefix sum give every result its place.
// The bound is only a guess: too high, and the row is filtered again without one; too low, or many
// ties, and step 3 counts digits of the pairs over the cluster instead.
// Atomics only count and collect, so results do not depend on their order, nor on how ids are cut.
//
// A Source gives the scores. Four neighbouring ids, the first a multiple of 4, are a unit:
//     source.count()       ids of the row
//     source.load(id)      scores of a unit; NaN beyond the end
//     source.present(id)   4 bits: those that are visible and on a page
//     source.forced()      where kForces: an id that is first whatever its score, or -1
#pragma once

#include <cstdint>

#include "sm90/select/candidates.cuh"

namespace flash_csa::sm90 {

struct Share {           // of a row's ids
    int32_t begin, end;  // those of this block; begin a multiple of 4
    int32_t longest;     // of all blocks of the cluster, all but the last of that length
};

// kUnits: of a thread in flight, 2 or a multiple of kLookUnits.
template <bool kCluster, int kUnits, class Source>
class ClusterTopK : Candidates<kCluster> {
    using Base = Candidates<kCluster>;
    using Base::clear, Base::id_of, Base::k_, Base::lowest_, Base::s_, Base::thread_;

  public:
    __device__ ClusterTopK(const Source& source, int32_t k, CandidateShared& shared)
        : Base(source.count(), k, shared), source_(source) {}

    // All threads of the cluster call. sink(index, id, key) once for each result; returns their
    // number.
    template <class Sink>
    __device__ int32_t run(const Share& share, const Sink& sink) {
        const bool whole = share.longest <= kChunk;
        float4 units[kUnits], some[kSampleUnits];
        end_ = share.end;
        clear();
        load(share, units);
        if (whole) {
            if constexpr (!Source::kAlwaysPresent) drop_absent(share, units);
            some[0] = units[0];
        } else {
            load_sample(share, some);
        }
        sample(some, share.longest);
        int32_t total;
        for (bool verified = whole;; verified = false) {
            stream(share, units);
            if (!verified) verify();
            __syncthreads();
            if (finish(share, total, sink)) return total;
            load(share, units);
        }
    }

    // The same for `count` candidates, at most kCandidates, that are among the pairs already, by
    // one block. base: below their keys.
    template <class Sink>
    __device__ int32_t run_list(int32_t count, uint32_t base, const Sink& sink) {
        static_assert(!kCluster);
        clear();
        if (thread_ == 0) s_.kept = count;
        base_ = base;
        __syncthreads();
        int32_t total;
        finish({0, source_.count(), source_.count()}, total, sink);
        return total;
    }

    // After a run: scores of higher ids that are below this are not among the k best.
    __device__ float bound() const {
        const uint32_t key = static_cast<uint32_t>(lowest_ >> 32);
        return score_from(static_cast<uint32_t>(lowest_) == 0 ? key : key + 1);
    }

    // After a run: no result has a lower key.
    __device__ uint32_t lowest_key() const { return static_cast<uint32_t>(lowest_ >> 32); }

  private:
    static constexpr int kChunk = kUnits * kStripe;
    static constexpr int kSampleUnits = 2;  // of a thread, where the row is not held whole

    // Among the ids of this block.
    __device__ bool is_forced(int32_t id) const {
        return Source::kForces && id == source_.forced() && id < end_;
    }
    __device__ uint32_t key_of(int32_t id, float score) const {
        return is_forced(id) ? kForcedKey : order_key(score);
    }
    __device__ int32_t unit_id(int32_t first, int u) const {
        return first + u * kStripe + kUnit * thread_;
    }
    __device__ float4 load_unit(int32_t id, int32_t end) const {
        const float nan = bits_float(kNanBits);
        return id < end ? source_.load(id) : float4{nan, nan, nan, nan};
    }

    // Pairs of units that lie beyond the range, all but the first, are left as they are.
    __device__ void load(const Share& share, float4 (&units)[kUnits]) const {
#pragma unroll
        for (int u = 0; u < kUnits; u += 2) {
            if (u > 0 && share.begin + u * kStripe >= share.end) break;
            units[u] = load_unit(unit_id(share.begin, u), share.end);
            units[u + 1] = load_unit(unit_id(share.begin, u + 1), share.end);
        }
    }

    // Scores that are not present become NaN.
    __device__ static void drop_absent(uint32_t present, float4& unit) {
        const float nan = bits_float(kNanBits);
        if ((present & 1) == 0) unit.x = nan;
        if ((present & 2) == 0) unit.y = nan;
        if ((present & 4) == 0) unit.z = nan;
        if ((present & 8) == 0) unit.w = nan;
    }
    __device__ void drop_absent(const Share& share, float4 (&units)[kUnits]) const {
        uint32_t present[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if (share.begin + u * kStripe >= share.end) break;
            const int32_t id = unit_id(share.begin, u);
            present[u] = id < share.end ? source_.present(id) : 0;
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if (share.begin + u * kStripe >= share.end) break;
            drop_absent(present[u], units[u]);
        }
    }

    // Stripes of 128 ids, evenly spread over the range.
    __device__ void load_sample(const Share& share, float4 (&units)[kSampleUnits]) const {
        constexpr int kLines = kSampleUnits * kClusterThreads / 32;
        const int32_t gap = share.longest / kLines / 128 * 128;
#pragma unroll
        for (int u = 0; u < kSampleUnits; ++u) {
            const int32_t line = u * (kClusterThreads / 32) + thread_ / 32;
            const int32_t id = share.begin + line * gap + kUnit * (thread_ % 32);
            units[u] = load_unit(id, share.end);
            drop_absent(id < share.end ? source_.present(id) : 0, units[u]);
        }
    }

    // Sets the bound, from one unit of every thread, or kSampleUnits where ranges are longer.
    __device__ void sample(const float4 (&units)[kSampleUnits], int32_t longest) {
        const bool whole = longest <= kChunk;
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.bins);
#pragma unroll
        for (int u = 0; u < kSampleUnits; ++u) {
            if (u > 0 && whole) break;
            const float values[kUnit] = {units[u].x, units[u].y, units[u].z, units[u].w};
#pragma unroll
            for (int e = 0; e < kUnit; ++e) {
                const uint32_t key = order_key(values[e]);
                if (key != 0) atomicAdd(&bins[key >> 21], 1u);
            }
        }
        // Of k scores so many are expected in the sample, and some more for its deviation.
        const float taken =
            static_cast<float>(min(longest, whole ? kStripe : kSampleUnits * kStripe));
        const float mean = static_cast<float>(k_) * taken / static_cast<float>(max(longest, 1));
        const float enough = mean + 4.5f * sqrtf(mean) + 6.0f;
        const int32_t wanted = longest <= kStripe ? k_ : min(k_, static_cast<int32_t>(enough));
        ClusterCut cut{0, 64, wanted, false};
        Base::template narrow<kCluster>(cut, 53);
        set_base(static_cast<uint32_t>(cut.lowest() >> 32));
    }

    __device__ void set_base(uint32_t base) {
        base_ = base;
        bound_ = score_from(base);
    }

    // Keeps those of two units that reach the bound.
    __device__ __forceinline__ void append(int32_t id, const float4& a, const float4& b) {
        const float values[2 * kUnit] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        uint32_t pass = 0;
#pragma unroll
        for (int e = 0; e < 2 * kUnit; ++e) {
            const bool forced = is_forced(id + e / kUnit * kStripe + e % kUnit);
            if (values[e] >= bound_ || forced) pass |= 1u << e;
        }
        if (pass == 0) return;
        int32_t at = atomicAdd(&s_.kept, __popc(pass));
        full_ |= at + __popc(pass) > kTrigger;
        do {
            const int32_t e = __ffs(static_cast<int>(pass)) - 1;
            pass &= pass - 1;
            const float4 unit = e & 4 ? b : a;
            const float2 pair = e & 2 ? float2{unit.z, unit.w} : float2{unit.x, unit.y};
            const int32_t own = id + (e & 4 ? kStripe : 0) + (e & 3);
            const uint32_t key = key_of(own, e & 1 ? pair.y : pair.x);
            s_.pairs[at++] = uint64_t{key} << 32 | ~static_cast<uint32_t>(own);
        } while (pass != 0);
    }

    // The whole range; its first units have come. A unit's successor is loaded as soon as it is
    // done with.
    __device__ void stream(const Share& share, float4 (&units)[kUnits]) {
        for (int32_t first = share.begin; first < share.end; first += kChunk) {
#pragma unroll
            for (int u = 0; u < kUnits; u += 2) {
                if (u >= kLookUnits && first + u * kStripe >= share.end) break;
                if (u % kLookUnits == 0 && __syncthreads_or(full_)) refine();
                const int32_t id = unit_id(first, u);
                if (id < share.end) append(id, units[u], units[u + 1]);
                units[u] = load_unit(id + kChunk, share.end);
                units[u + 1] = load_unit(id + kStripe + kChunk, share.end);
            }
        }
    }

    // Makes nothing of candidates that are not present: their scores mean nothing.
    __device__ void verify() {
        if (Source::kAlwaysPresent) return;
        __syncthreads();
        const int32_t count = s_.kept;
#pragma unroll 1
        for (int32_t i = thread_; i < count; i += kClusterThreads) {
            const int32_t id = id_of(s_.pairs[i]);
            if (id < 0) continue;  // nothing already
            if ((source_.present(id & -kUnit) >> id % kUnit & 1) == 0) s_.pairs[i] = 0;
        }
    }

    // Cuts this block's candidates down to its k best. Ids to come are higher: they lose ties.
    __device__ void refine() {
        verify();
        lowest_ = Base::template find_cut<false>({0, 64, k_, false});
        const int32_t count = s_.kept;
        int32_t kept = 0;
#pragma unroll 1
        for (int32_t first = 0; first < count; first += kClusterThreads) {
            const int32_t i = first + thread_;
            const uint64_t pair = i < count ? s_.pairs[i] : 0;
            int32_t before, total;
            ClusterScan(s_.scan).ExclusiveSum(pair >= lowest_ ? 1 : 0, before, total);
            if (pair >= lowest_) s_.pairs[kept + before] = pair;
            kept += total;
            __syncthreads();
        }
        if (thread_ == 0) s_.kept = kept;
        full_ = false;
        if (lowest_ > kAnyPair) bound_ = bound();
        __syncthreads();
    }

    // From the candidates to the results. False where the bound was too high: it is gone, and the
    // row is to be filtered again.
    template <class Sink>
    __device__ bool finish(const Share& share, int32_t& total, const Sink& sink) {
        const int32_t before = Base::cut(base_, total);
        if (total < k_ && base_ > 1) {
            clear();
            full_ = false;
            set_base(0);
            return false;
        }
        emit(before, share, sink);
        return true;
    }

    template <class Sink>
    __device__ void emit(int32_t base, const Share& share, const Sink& sink) {
        const int32_t count = s_.kept;
        uint32_t* mask = reinterpret_cast<uint32_t*>(s_.mask);
        const int32_t* ranks = reinterpret_cast<const int32_t*>(s_.ranks);
        for (int32_t first = share.begin; first < share.end; first += 32 * kWindowWords) {
            __syncthreads();
            s_.mask[thread_] = {0, 0, 0, 0};
            __syncthreads();
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const uint32_t at = static_cast<uint32_t>(id_of(s_.pairs[i]) - first);
                if (at < 32 * kWindowWords && s_.pairs[i] >= lowest_) {
                    atomicOr(&mask[at / 32], 1u << at % 32);
                }
            }
            __syncthreads();
            base += rank_words(base);
            __syncthreads();
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const uint64_t pair = s_.pairs[i];
                const uint32_t at = static_cast<uint32_t>(id_of(pair) - first);
                if (at >= 32 * kWindowWords || pair < lowest_) continue;
                const uint32_t lower = mask[at / 32] & ((1u << at % 32) - 1);
                sink(ranks[at / 32] + __popc(lower), id_of(pair),
                     static_cast<uint32_t>(pair >> 32));
            }
        }
        __syncthreads();
    }

    // Writes the ranks of all words, counted from base; returns the number of bits.
    __device__ int32_t rank_words(int32_t base) {
        const uint4 words = s_.mask[thread_];
        const int32_t x = __popc(words.x), y = __popc(words.y), z = __popc(words.z);
        int32_t before, total;
        ClusterScan(s_.scan).ExclusiveSum(x + y + z + __popc(words.w), before, total);
        before += base;
        s_.ranks[thread_] = {before, before + x, before + x + y, before + x + y + z};
        return total;
    }

    const Source& source_;
    uint32_t base_ = 0;  // key of the bound
    float bound_ = 0.f;  // candidates are at least this
    int32_t end_ = 0;    // of the ids of this block
    bool full_ = false;
};

}  // namespace flash_csa::sm90
