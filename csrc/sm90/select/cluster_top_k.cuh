// The k best of a row of scores, by a cluster of blocks: larger order key first, then lower id;
// results in ascending id. Exact for any scores.
//
// Each block has its part of the ids and keeps candidates, keys and places, in shared memory:
//   1. sample   the best of some ids of each thread make a histogram of leading key bits; its tail
//               says which bound a few more of the part's scores will reach than it has results, if
//               those are spread evenly.
//   2. filter   scores below the bound are dropped by one comparison. Where candidates fill up, a
//               block cuts its own down to its k best, which raises its bound.
//   3. cut      every block is sent all candidates of the cluster and finds the k-th best: one
//               histogram of the keys above the bounds, then the few pairs of one bin are compared.
//   4. emit     a bit per id, counts of the lines of all blocks and a prefix sum give every result
//               its place.
// The bounds are only guesses: where the k-th best is below one of them, it is a bound itself, with
// which the row is filtered again; where there are fewer than k, the row is filtered without one.
// Too many candidates, or many ties, and step 3 counts digits of the pairs over the cluster.
// Atomics only count and collect, so results do not depend on their order, nor on how ids are cut.
//
// A Source gives the scores. Four neighbouring ids, the first a multiple of 4, are a unit:
//     source.count()       ids of the row
//     source.load(id)      scores of a unit, undefined where they are not present
//     source.page(id)      of a unit; -1: none
//     source.present(id, page)  4 bits: those that are visible and on a page; all of the row's,
//                          where kAlwaysPresent
//     source.forced()      where kForces: an id that is first whatever its score, or -1
// Where kBlocks, a unit is the maxima of four blocks of ids, and those are what is sampled and
// filtered: entries of other blocks than the k best by their maxima are not among the k best. NaN
// for those behind the last one.
//     source.load(block)   maxima of four blocks
//     source.entries(id)   scores of four ids; NaN beyond the end
//     source.page(id)      of them
//     source.expands()     false: blocks are the results, each its first id. forced() is a block
#pragma once

#include <cstdint>

#include "sm90/common/fresh.cuh"
#include "sm90/select/candidates.cuh"
#include "sm90/select/unit.cuh"

namespace flash_csa::sm90 {

// kUnits: of a thread in flight, 2 or a multiple of kLookUnits.
template <bool kCluster, int kUnits, class Source>
class ClusterTopK : Candidates<kCluster, Source::kLine> {
    static constexpr int kLine = Source::kLine;
    using Base = Candidates<kCluster, kLine>;
    using Base::exchange_, Base::k_, Base::lowest_, Base::rank_, Base::s_, Base::share_;
    using Base::thread_;

  public:
    __device__ ClusterTopK(const Source& source, int32_t size_log, int32_t k,
                           CandidateShared& shared, Exchange<kCluster>& exchange)
        : Base({source.count(), kCluster ? size_log : 0}, k, shared, exchange),
          source_(source),
          length_(share_.length()),
          id_(share_.template id<kLine / kPer>(kUnit * thread_, rank_)) {
        plan_sample();
    }

    // All threads of the cluster call, candidates cleared, the exchange closed. sink(index, id,
    // key) once for each result; returns their number. units: as load leaves them.
    template <class Sink>
    __device__ int32_t run(float4 (&units)[kUnits], const Sink& sink) {
        const bool whole = span() <= kChunk;
        if constexpr (kOnce) {
            if (whole && (kCluster || span() > kStripe)) {
                const int32_t total = run_once(units, sink);
                if (total >= 0) return total;
                load(units);
            }
        }
        int32_t pages[kUnits];
        if (whole) {
            load_pages(pages);
            if constexpr (!Source::kBlocks) drop_uncounted(units);
            sample(units);
        } else {
            float4 some[kSampleUnits];
            load_sample(some);
            sample(some);
        }
        int32_t total;
        for (bool paged = whole;; paged = false) {
            stream(units);
            if (paged) await(pages);
            verify();
            if constexpr (Source::kBlocks) expand();
            if (finish(total, sink)) return total;
            load(units);
        }
    }

    // What run does where nothing is out of the common, in a straight line: instructions that come
    // from device memory are waited for at every jump. -1 where it does not tell, in all blocks.
    template <class Sink>
    __device__ int32_t run_once(const float4 (&units)[kUnits], const Sink& sink) {
        static_assert(kChunk * kPer <= kWindow);
        sample(units);
#pragma unroll
        for (int u = 0; u < kUnits; u += kSome) {
            if (u > 0 && u * kStripe >= span()) break;
            float4 some[kSome];
#pragma unroll
            for (int i = 0; i < kSome; ++i) some[i] = units[u + i];
            list(u * kStripe + kUnit * thread_, some);
        }
        __syncthreads();
        const bool fits = s_.listed <= kMostListed;
#pragma unroll 1
        for (int32_t i = thread_; fits && i < 2 * s_.listed; i += kClusterThreads) {
            append_entries(s_.blocks[i / 2], i % 2 * kUnit);
        }
        int32_t total;
        uint32_t base = base_;
        const bool told = Base::template cut<true>(base, total, fits);
        if (told) {
            emit<true>(sink);
            return total;
        }
        start_over();
        return -1;
    }

    // The first units, kSome at a time: those beyond the part are left as they are.
    __device__ void load(float4 (&units)[kUnits]) const {
        for_units([&](int u) { units[u] = load_unit(fresh(unit_id(u * kStripe))); });
    }

  private:
    static constexpr int kPer = Source::kBlocks ? kPoolBlock : 1;  // ids of a score in a unit
    static constexpr int kChunk = kUnits * kStripe;
    static constexpr int kSampleUnits = kCluster && kUnits >= 4 ? 4 : 2;  // of longer parts
    static constexpr int kSome = kCluster && kUnits >= 4 ? 4 : 2;         // appended at once
    static constexpr bool kOnce = Source::kBlocks && !Source::kForces;
    static constexpr int kMostListed = kCandidates / kPoolBlock;  // all entries fit
    static_assert(kMostListed <= kMaxClusterTopK);

    // The row's scores in units, and the places of those.
    __device__ int32_t count() const { return (share_.count + kPer - 1) / kPer; }
    __device__ int32_t span() const { return length_ / kPer; }

    __device__ bool is_forced(int32_t id) const {
        return Source::kForces && id == source_.forced();
    }
    // Of this thread's unit in the stripe that begins at a place.
    __device__ int32_t unit_id(int32_t stripe) const { return id_ + (stripe << share_.size_log); }
    __device__ float4 load_unit(int32_t id) const {
        if (id >= count()) return only(0, {});
        const float4 unit = source_.load(id);
        return Source::kAlwaysPresent && !Source::kBlocks ? only_counted(id, unit) : unit;
    }

    __device__ float4 only_counted(int32_t id, const float4& unit) const {
        return id + kUnit <= count() ? unit : only(first_of_four(count() - id), unit);
    }
    // Calls f(u) for units of the part, as load has them.
    template <class F>
    __device__ __forceinline__ void for_units(const F& f) const {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            if (u % kSome == 0 && u * kStripe >= span()) break;
            f(u);
        }
    }
    // The pages of a part, for the sake of the cache: they come while it is filtered.
    __device__ void load_pages(int32_t (&pages)[kUnits]) const {
        if constexpr (!Source::kAlwaysPresent) {
            for_units([&](int u) {
                const int32_t id = unit_id(u * kStripe);
                pages[u] = id < count() ? source_.page(id) : -1;
            });
        }
    }
    __device__ void await(const int32_t (&pages)[kUnits]) const {
        if constexpr (!Source::kAlwaysPresent) {
            for_units([&](int u) { fresh(pages[u]); });
        }
    }
    // Scores behind the last one are undefined; they become NaN.
    __device__ void drop_uncounted(float4 (&units)[kUnits]) const {
        for_units([&](int u) { units[u] = only_counted(unit_id(u * kStripe), units[u]); });
    }

    // Lines evenly spread over the part. Some may be absent: the bound is a guess.
    __device__ void load_sample(float4 (&units)[kSampleUnits]) const {
        constexpr int kLines = kSampleUnits * kClusterThreads / 32;
        const int32_t gap = span() / kLines / 128 * 128;
#pragma unroll
        for (int u = 0; u < kSampleUnits; ++u) {
            const int32_t line = u * (kClusterThreads / 32) + thread_ / 32;
            const int32_t place = line * gap + kUnit * (thread_ % 32);
            const int32_t id = share_.template id<kLine / kPer>(place, rank_);
            units[u] = load_unit(id);
            if constexpr (!Source::kAlwaysPresent) units[u] = only_counted(id, units[u]);
        }
    }

    // How many of the sample reach the bound: of as many results as are expected in it, and some
    // more for its deviation, so many threads have one or more. Known before there are scores.
    __device__ void plan_sample() {
        const bool whole = span() <= kChunk;
        const int32_t own = share_.own(rank_, kLine / kPer, count());
        const int32_t sampled = whole ? kUnits : kSampleUnits;
        float enough = expected(min(sampled * kStripe, own));
        // Bests of threads, or of halves of what they hold: those that are of any.
        const int32_t rest = own - sampled / 2 * kStripe;
        const int32_t ones = whole ? min(kClusterThreads, own / kUnit) : kClusterThreads;
        const int32_t twos =
            ones + (whole ? max(0, min(kClusterThreads, rest / kUnit)) : kClusterThreads);
        bests_ = enough < 0.75f * ones ? 1 : enough < 0.75f * twos ? 2 : 0;
        if (bests_ > 0) {
            const float of = static_cast<float>(bests_ == 1 ? ones : twos);
            enough = of - of * __expf(-__fdividef(enough, of));
        } else {
            const int32_t taken = min(2 * kStripe, own);
            enough = taken < count() ? expected(taken) : static_cast<float>(k_);
        }
        wanted_ = fresh(min(k_, max(1, static_cast<int32_t>(enough))));
    }
    __device__ float expected(int32_t taken) const {
        const float mean = __fdividef(static_cast<float>(k_) * taken, max(count(), 1));
        return mean + 4.f * mean * rsqrtf(fmaxf(mean, 1e-6f)) + 1.f;
    }

    // Sets the bound. kSampled: units of a thread, all of the part or some.
    template <int kSampled>
    __device__ void sample(const float4 (&units)[kSampled]) {
        if (bests_ > 0) {
            count_bests(units);
        } else {
            count_keys(units[0]);
            count_keys(units[1]);
        }
        __syncthreads();
        set_base(Base::find_sampled(wanted_));
    }
    __device__ void count_key(uint32_t key) {
        uint32_t* bins = reinterpret_cast<uint32_t*>(s_.sample);
        const uint32_t bin = key >> Base::kSampleShift;
        if (key != 0) atomicAdd(&bins[bin / 2], bin % 2 ? 0x10000u : 1u);
    }
    template <int kSampled>
    __device__ void count_bests(const float4 (&units)[kSampled]) {
        const float nan = bits_float(kNanBits);
        float bests[2] = {nan, nan};
#pragma unroll
        for (int u = 0; u < kSampled; ++u) {
            if (u % 2 == 0 && u * kStripe >= span()) break;
            float& best = bests[2 * u / kSampled];
            best = fmaxf(best, fmaxf(fmaxf(units[u].x, units[u].y), fmaxf(units[u].z, units[u].w)));
        }
        if (bests_ == 2) count_key(order_key(bests[1]));
        count_key(order_key(bests_ == 2 ? bests[0] : fmaxf(bests[0], bests[1])));
    }
    __device__ void count_keys(const float4& unit) {
        count_key(order_key(unit.x));
        count_key(order_key(unit.y));
        count_key(order_key(unit.z));
        count_key(order_key(unit.w));
    }

    __device__ void set_base(uint32_t base) {
        base_ = least_ = base;
        bound_ = score_from(base);
    }

    // By selections: an index would put the units into memory.
    __device__ __forceinline__ static float4 one_of(const float4 (&units)[1], int32_t) {
        return units[0];
    }
    __device__ __forceinline__ static float4 one_of(const float4 (&units)[2], int32_t u) {
        return u & 1 ? units[1] : units[0];
    }
    __device__ __forceinline__ static float4 one_of(const float4 (&units)[4], int32_t u) {
        const float4 low = u & 1 ? units[1] : units[0], high = u & 1 ? units[3] : units[2];
        return u & 2 ? high : low;
    }

    // A bit for each of those that reach the bound.
    template <int kSome>
    __device__ __forceinline__ uint32_t passing(const float4 (&units)[kSome]) const {
        uint32_t pass = 0;
#pragma unroll
        for (int u = 0; u < kSome; ++u) {
            const float values[kUnit] = {units[u].x, units[u].y, units[u].z, units[u].w};
#pragma unroll
            for (int e = 0; e < kUnit; ++e) {
                if (values[e] >= bound_) pass |= 1u << (kUnit * u + e);
            }
        }
        return pass;
    }

    // Keeps those of some units that reach the bound; the first unit is at this place and id.
    template <int kSome>
    __device__ __forceinline__ void append(int32_t place, int32_t id,
                                           const float4 (&units)[kSome]) {
        uint32_t forced = 0;
        if (Source::kForces) {
#pragma unroll
            for (int e = 0; e < kUnit * kSome; ++e) {
                if (is_forced(id + (e / kUnit * kStripe << share_.size_log) + e % kUnit)) {
                    forced |= 1u << e;
                }
            }
        }
        uint32_t pass = passing(units) | forced;
        if (pass == 0) return;
        int32_t at = atomicAdd(&s_.kept, __popc(pass));
        full_ |= at + __popc(pass) > kTrigger;
        do {
            const uint32_t e = __ffs(static_cast<int>(pass)) - 1;
            const float4 unit = one_of(units, e / kUnit);
            const float2 pair = e & 2 ? float2{unit.z, unit.w} : float2{unit.x, unit.y};
            s_.keys[at] = forced >> e & 1 ? kForcedKey : order_key(e & 1 ? pair.y : pair.x);
            s_.places[at] = static_cast<uint32_t>(place) + e / kUnit * kStripe + e % kUnit;
            ++at;
            pass &= pass - 1;
        } while (pass != 0);
    }

    // Lists the places of blocks that reach the bound.
    __device__ __forceinline__ void list(int32_t place, const float4 (&units)[kSome]) {
        uint32_t pass = passing(units);
        if (pass == 0) return;
        int32_t at = atomicAdd(&s_.listed, __popc(pass));
        do {
            const uint32_t e = __ffs(static_cast<int>(pass)) - 1;
            if (at < kMostListed) s_.blocks[at] = place + e / kUnit * kStripe + e % kUnit;
            ++at;
            pass &= pass - 1;
        } while (pass != 0);
    }

    // Of half a block, which begins at `first`.
    __device__ __forceinline__ void append_entries(uint32_t block, int32_t first) {
        const int32_t place = kPoolBlock * static_cast<int32_t>(block) + first;
        const int32_t id = share_.id(place, rank_);
        const float4 entries[1] = {source_.entries(id)};
        const int32_t page = source_.page(id);  // for the sake of the cache
        append(place, id, entries);
        fresh(page);
    }

    // The whole part; its first units have come. A unit's successor is loaded as soon as it is
    // done with.
    __device__ void stream(float4 (&units)[kUnits]) {
        for (int32_t first = 0; first < span(); first += kChunk) {
#pragma unroll
            for (int u = 0; u < kUnits; u += kSome) {
                const int32_t stripe = first + u * kStripe;
                if (u >= kLookUnits && stripe >= span()) break;
                if (u % kLookUnits == 0 && stripe > 0 && __syncthreads_or(full_)) refine(true);
                const int32_t id = unit_id(stripe);
                if (stripe >= span()) continue;
                float4 some[kSome];
#pragma unroll
                for (int i = 0; i < kSome; ++i) some[i] = units[u + i];
                if (first + kChunk < span()) {
#pragma unroll
                    for (int i = 0; i < kSome; ++i) {
                        units[u + i] = load_unit(id + (i * kStripe + kChunk << share_.size_log));
                    }
                }
                append(stripe + kUnit * thread_, id, some);
            }
        }
    }

    // Makes nothing of candidates that are not present: their scores mean nothing.
    __device__ void verify() {
        if constexpr (!Source::kAlwaysPresent) {
            __syncthreads();
            const int32_t count = s_.kept;
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const int32_t id = id_at(i), unit = id & -kUnit;
                const uint32_t present = source_.present(unit, source_.page(unit));
                if ((present >> id % kUnit & 1) == 0) s_.keys[i] = 0;
            }
        }
    }

    __device__ int32_t id_at(int32_t i) const { return share_.id(s_.places[i], rank_); }

    // Puts the entries of blocks in their stead: of the k best, where there are more than are
    // listed. Or their first ids.
    __device__ void expand() {
        __syncthreads();
        if (!source_.expands()) {
            const int32_t count = s_.kept;
            for (int32_t i = thread_; i < count; i += kClusterThreads) s_.places[i] *= kPoolBlock;
            return;
        }
        if (s_.kept > kMaxClusterTopK) refine(true);
        const int32_t count = s_.kept;
        for (int32_t i = thread_; i < count; i += kClusterThreads) s_.blocks[i] = s_.places[i];
        __syncthreads();
        if (thread_ == 0) s_.kept = 0;
        full_ = false;
        bound_ = score_from(least_);  // entries of equal score may have lower ids
        __syncthreads();
#pragma unroll 1
        for (int32_t first = 0; first < 2 * count; first += kClusterThreads) {
            if (first > 0 && __syncthreads_or(full_)) refine(false);
            const int32_t i = first + thread_;
            if (i >= 2 * count) continue;
            append_entries(s_.blocks[i / 2], i % 2 * kUnit);
        }
    }

    // Cuts this block's candidates down to its k best. ascending: ids to come are higher, so that
    // they lose ties.
    __device__ void refine(bool ascending) {
        verify();
        lowest_ = Base::template find_cut<false>({0, 64, k_, false}).lowest();
        const int32_t count = s_.kept;
        int32_t kept = 0;
#pragma unroll 1
        for (int32_t first = 0; first < count; first += kClusterThreads) {
            const int32_t i = first + thread_;
            const uint32_t key = i < count ? s_.keys[i] : 0, place = i < count ? s_.places[i] : 0;
            const bool stays = i < count && Base::is_result(i);
            int32_t total;
            const int32_t before = Base::sum_before(stays ? 1 : 0, total);
            if (stays) {
                s_.keys[kept + before] = key;
                s_.places[kept + before] = place;
            }
            kept += total;
            __syncthreads();
        }
        if (thread_ == 0) s_.kept = kept;
        full_ = false;
        if (lowest_ > kAnyPair) {
            least_ = static_cast<uint32_t>(lowest_ >> 32);
            bound_ = score_from(least_ + (ascending && static_cast<uint32_t>(lowest_) != 0));
        }
        __syncthreads();
    }

    // From the candidates to the results. False where a bound was too high: it is lowered, and the
    // row is to be filtered again.
    template <class Sink>
    __device__ bool finish(int32_t& total, const Sink& sink) {
        uint32_t base = base_;
        if (Base::template cut<false>(base, total)) {
            emit<false>(sink);
            return true;
        }
        start_over();
        set_base(base);
        return false;
    }
    __device__ void start_over() {
        __syncthreads();
        exchange_.reopen();
        exchange_.close();
        clear_candidates(s_);
        __syncthreads();
        full_ = false;
    }

    // kOnce: there is one window.
    template <bool kOnce, class Sink>
    __device__ void emit(const Sink& sink) {
        const int32_t count = s_.kept;
        uint32_t* mask = reinterpret_cast<uint32_t*>(s_.mask);
        const int32_t* ranks = reinterpret_cast<const int32_t*>(s_.ranks);
        int32_t base = 0, window = 0;
        while (true) {
            const bool last = kOnce || window + kWindow >= length_;
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const uint32_t at = s_.places[i] - static_cast<uint32_t>(window);
                if (at < kWindow && Base::is_result(i)) atomicOr(&mask[at / 32], 1u << at % 32);
            }
            Base::template count_lines<kOnce>(window);
            __syncthreads();
            base += rank_words(base);
            if (last) exchange_.reopen();
            __syncthreads();
#pragma unroll 1
            for (int32_t i = thread_; i < count; i += kClusterThreads) {
                const uint32_t at = s_.places[i] - static_cast<uint32_t>(window);
                if (at >= kWindow || !Base::is_result(i)) continue;
                const uint32_t lower = mask[at / 32] & ((1u << at % 32) - 1);
                sink(ranks[at / 32] + __popc(lower), id_at(i), s_.keys[i]);
            }
            if (last) return;
            window += kWindow;
            Base::next_window();
        }
    }

    // Writes the ranks of this thread's words, counted from base; returns the number of results in
    // the window, of all blocks. The last thread of a line counts those of other blocks on it.
    __device__ int32_t rank_words(int32_t base) {
        const uint4 words = s_.mask[thread_];
        const int32_t x = __popc(words.x), y = __popc(words.y), z = __popc(words.z);
        int32_t sum = x + y + z + __popc(words.w), lower = 0, total;
        if (kCluster) {
            constexpr int kThreads = kLine / 128;  // of a line
            const uint32_t others = s_.lines[thread_ / kThreads];
            if (thread_ % kThreads == kThreads - 1) sum += static_cast<int32_t>(others & 0xffffu);
            lower = static_cast<int32_t>(others >> 16);
        }
        const int32_t before = base + lower + Base::sum_before(sum, total);
        s_.ranks[thread_] = {before, before + x, before + x + y, before + x + y + z};
        return total;
    }

    const Source& source_;
    const int32_t length_;  // places
    const int32_t id_;      // of this thread's first unit
    int32_t bests_;         // of each thread that are the sample; 0: scores of two units
    int32_t wanted_;        // of it
    uint32_t base_ = 0;     // key of the bound
    uint32_t least_ = 0;    // of the last, which may be that of a cut
    float bound_ = 0.f;     // candidates are at least this
    bool full_ = false;
};

}  // namespace flash_csa::sm90
