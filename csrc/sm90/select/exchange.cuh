// How the blocks of a cluster let each other know their candidates: everybody sends its own to all,
// and waits for what they send. So candidates are on their way for the time of one remote write,
// where a barrier and remote reads behind it take three.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/remote_store.cuh"

namespace flash_csa::sm90 {

inline constexpr int kExchangeLog = 9, kExchangeThreads = 1 << kExchangeLog;  // of a block
inline constexpr int kMostPeers = 16;

// What the blocks of the cluster have sent to this one; the candidates lie behind it.
struct alignas(16) Inbox {
    uint4 heads[kMostPeers];  // of each: candidates, lowest key
    cutlass::arch::ClusterTransactionBarrier full;

    __device__ __forceinline__ uint2* pairs() { return reinterpret_cast<uint2*>(this + 1); }
};
template <int kPairs>
struct InboxOf {
    Inbox inbox;
    alignas(16) uint2 pairs[kPairs];  // (key, place); an equal part for each block
};

// A barrier of the cluster is open from the start, and between two exchanges: each block has
// arrived when its inbox may be written to.
template <bool kCluster>
class Exchange {
  public:
    // All threads of a block call. inbox: null where it is alone; pairs: that it takes.
    __device__ Exchange(Inbox* inbox, int32_t pairs, int32_t size_log)
        : inbox_(inbox),
          capacity_(static_cast<uint32_t>(pairs) >> size_log),
          size_log_(size_log),
          shift_(kExchangeLog - size_log),
          peer_(static_cast<int32_t>(threadIdx.x) >> shift_),
          first_(static_cast<int32_t>(threadIdx.x) & ((1 << shift_) - 1)) {
        if (!kCluster) return;
        if (threadIdx.x == 0) {
            inbox_->full.init(1u << size_log);
            cutlass::arch::fence_barrier_init();
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }

    // Sends candidates, of keys and places in shared memory, and waits for those of all blocks.
    // False where there are more than an inbox takes. low, high: of the lowest keys that the blocks
    // kept, low of those that have candidates; that of this one before.
    __device__ bool run(const uint32_t* keys, const uint32_t* places, int32_t count, uint32_t& low,
                        uint32_t& high) {
        send(keys, places, count, low);
        inbox_->full.wait(phase_);
        phase_ ^= 1;
        const uint4 head = inbox_->heads[threadIdx.x & ((1u << size_log_) - 1)];
        count_ = static_cast<int32_t>(inbox_->heads[peer_].x);
        low = __reduce_min_sync(~0u, head.x > 0 ? head.y : ~0u);
        high = __reduce_max_sync(~0u, head.y);
        return __reduce_max_sync(~0u, head.x) <= capacity_;
    }

    // Calls f(key, place, rank) for this thread's part of all candidates of the cluster.
    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
        const uint2* pairs = inbox_->pairs() + peer_ * capacity_;
#pragma unroll 1
        for (int32_t i = first_; i < count_; i += 1 << shift_) {
            const uint2 pair = pairs[i];
            f(pair.x, pair.y, peer_);
        }
    }

    // A barrier of the block is behind the last for_each.
    __device__ static void reopen() {
        if (kCluster) cluster_arrive_relaxed();
    }

    // Before the next exchange, and before a block leaves: peers may be written to, and write and
    // read here no more.
    __device__ static void close() {
        if (kCluster) cluster_wait();
    }

  private:
    // A part of the threads for each peer; two pairs a thread at a time.
    __device__ void send(const uint32_t* keys, const uint32_t* places, int32_t count,
                         uint32_t base) const {
        const uint32_t rank = cute::block_rank_in_cluster();
        const bool fits = static_cast<uint32_t>(count) <= capacity_;
        const int32_t fours = fits ? (count + 1) / 2 : 0;
        const uint32_t full = peer_address(&inbox_->full, peer_);
        if (first_ == 0) {
            inbox_->full.arrive_and_expect_tx(sizeof(uint4) * (1 + fours), peer_);
            store_remote(peer_address(&inbox_->heads[rank], peer_),
                         {static_cast<uint32_t>(count), base, 0, 0}, full);
        }
        const uint32_t to = peer_address(inbox_->pairs() + rank * capacity_, peer_);
#pragma unroll 1
        for (int32_t i = first_; i < fours; i += 1 << shift_) {
            const uint2 key = reinterpret_cast<const uint2*>(keys)[i];
            const uint2 place = reinterpret_cast<const uint2*>(places)[i];
            store_remote(to + sizeof(uint4) * i, {key.x, place.x, key.y, place.y}, full);
        }
    }

    Inbox* inbox_;
    const uint32_t capacity_;         // for each block
    const int32_t size_log_, shift_;  // of the cluster; of the threads of a peer
    const int32_t peer_, first_;      // of this thread; its first candidate
    int32_t count_ = 0;               // that the peer has sent
    uint32_t phase_ = 0;
};

}  // namespace flash_csa::sm90
