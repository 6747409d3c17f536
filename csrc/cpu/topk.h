// The k best of a stream of (key, id) pairs that arrives in ascending id: larger key first, then
// lower id. Keys are order keys of scores (core/scoring.h); key 0, a NaN score, is never taken.
//
// The stream is filtered against the k-th best key so far. A later pair has a higher id, so it
// must beat that key strictly: most of a long stream fails one vector compare, and what passes is
// buffered and reduced to k from time to time. Nothing depends on how the stream is cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/scoring.h"
#include "cpu/simd.h"

namespace flash_csa::cpu {

// Largest t such that at least k of the n keys are >= t, bit by bit.
inline void kth_largest_body(const uint32_t* keys, int32_t n, int32_t k, uint32_t* kth) {
    uint32_t t = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        const uint32_t candidate = t | bit;
        int32_t reached = 0;
        for (int32_t i = 0; i < n; ++i) reached += keys[i] >= candidate ? 1 : 0;
        if (reached >= k) t = candidate;
    }
    *kth = t;
}

constexpr int32_t kScan = 16;  // keys that one test passes over: a vector, or a few

struct KeyScan {
    const uint32_t* keys;  // [count]
    int32_t count;         // a multiple of kScan
    int32_t first_id;      // of keys[0]
    uint32_t threshold;
    uint32_t* out_keys;  // those above the threshold, with their ids
    int32_t* out_ids;
    int32_t room;  // stops while less than kScan of it is left

    int32_t done;
    int32_t taken;
};

inline void scan_body(KeyScan* scan) {
    KeyScan s = *scan;
    s.done = s.taken = 0;
    for (; s.done < s.count && s.taken + kScan <= s.room; s.done += kScan) {
        const uint32_t* keys = s.keys + s.done;
        uint32_t any = 0;
        for (int32_t i = 0; i < kScan; ++i) any |= keys[i] > s.threshold ? 1u : 0u;
        if (any == 0) continue;
        for (int32_t i = 0; i < kScan; ++i) {
            s.out_keys[s.taken] = keys[i];
            s.out_ids[s.taken] = s.first_id + s.done + i;
            s.taken += keys[i] > s.threshold ? 1 : 0;
        }
    }
    *scan = s;
}

class TopK {
  public:
    void reset(int32_t k) {
        k_ = k;
        size_ = 0;
        threshold_ = 0;
        // Room for a few thousand pairs between reductions, whatever k is.
        const size_t capacity = static_cast<size_t>(k) + std::max(k, 2048);
        if (keys_.size() < capacity) {
            keys_.resize(capacity);
            ids_.resize(capacity);
        }
    }

    // keys[i] belongs to id first + i; count is a multiple of kScan.
    void push(const uint32_t* keys, int32_t count, int32_t first) {
        while (count > 0) {
            KeyScan scan{keys, count, first, threshold_, &keys_[size_], &ids_[size_], room(), 0, 0};
            per_level<scan_body>(&scan);
            size_ += scan.taken;
            keys += scan.done;
            first += scan.done;
            count -= scan.done;
            if (room() < kScan) reduce();
        }
    }
    void push(uint32_t key, int32_t id) {
        if (key <= threshold_) return;
        keys_[size_] = key;
        ids_[size_++] = id;
        if (room() < kScan) reduce();
    }

    // Leaves the k best, or all if there are fewer.
    void finish() {
        if (size_ > k_) reduce();
    }

    // Gives back the memory that finish() does not need.
    void compact() {
        finish();
        keys_.resize(size_);
        ids_.resize(size_);
        keys_.shrink_to_fit();
        ids_.shrink_to_fit();
    }

    int32_t size() const { return size_; }
    uint32_t key(int32_t i) const { return keys_[i]; }
    int32_t id(int32_t i) const { return ids_[i]; }

  private:
    int32_t room() const { return static_cast<int32_t>(keys_.size()) - size_; }

    void reduce() {
        per_level<kth_largest_body>(keys_.data(), size_, k_, &threshold_);
        int32_t ties = k_;  // pairs at the threshold that are kept, the lowest ids
        for (int32_t i = 0; i < size_; ++i) ties -= keys_[i] > threshold_ ? 1 : 0;
        int32_t kept = 0;
        for (int32_t i = 0; i < size_; ++i) {
            const bool tied = keys_[i] == threshold_ && ties > 0;
            const bool keep = keys_[i] > threshold_ || tied;
            keys_[kept] = keys_[i];
            ids_[kept] = ids_[i];
            kept += keep ? 1 : 0;
            ties -= tied ? 1 : 0;
        }
        size_ = kept;
    }

    std::vector<uint32_t> keys_;
    std::vector<int32_t> ids_;
    int32_t k_ = 0;
    int32_t size_ = 0;
    uint32_t threshold_ = 0;
};

}  // namespace flash_csa::cpu
