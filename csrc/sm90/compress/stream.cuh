// Entries streamed through an SM: blocks of warps with roles, and rings in shared memory between
// them. Here: the rings, and the roles that all such kernels have.
//   scout    rows of the batch -> entries, some of them ahead
//   finish   pooled values -> norm -> latent, RoPE -> main record
//   keeper   rows that the tail keeps, one after the other by all blocks
#pragma once

#include <cutlass/arch/barrier.h>

#include "sm90/common/launch.h"
#include "sm90/common/prefetch.cuh"
#include "sm90/compress/compress.cuh"
#include "sm90/compress/tail.cuh"

namespace flash_csa::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Where a role is in a ring: the slot, and the parity of its round.
template <int kSlots>
struct Cursor {
    int slot = 0;
    uint32_t round = 0;

    Cursor() = default;
    __device__ __forceinline__ explicit Cursor(int number)
        : slot(number % kSlots), round(number / kSlots & 1) {}
    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, round ^= 1;
    }
};

template <class Slot, int kCount>
struct Ring {
    static constexpr int kSlots = kCount;
    using At = Cursor<kSlots>;

    alignas(128) Slot slots[kSlots];
    Barrier filled[kSlots], freed[kSlots];

    __device__ __forceinline__ void init(uint32_t fillers, uint32_t readers) {
        for (int i = 0; i < kSlots; ++i) {
            filled[i].init(fillers);
            freed[i].init(readers);
        }
    }
    __device__ __forceinline__ Slot& wait_filled(const At& at) {
        filled[at.slot].wait(at.round);
        return slots[at.slot];
    }
    __device__ __forceinline__ Slot& wait_freed(const At& at) {
        freed[at.slot].wait(at.round ^ 1);
        return slots[at.slot];
    }
};

template <class T>
__device__ __forceinline__ T of_first_lane(T x) {
    return __shfl_sync(kAllLanes, x, 0);
}

// An entry and where its rows lie; row < 0: there are no more.
struct Work {
    Entry entry;
    int64_t start;      // of the request: rows before it are in the tail
    const float* tail;  // kv rows of the request's slot

    __device__ __forceinline__ explicit operator bool() const { return entry.row >= 0; }
};

// The copies of a row that a warp starts need addresses that are the same for all lanes, and known
// to be: lanes would take turns at 70 cycles each.
struct UniformWork {
    int row, position, first, start;
    const float* tail;

    __device__ __forceinline__ explicit UniformWork(const Work& work)
        : row(of_first_lane(static_cast<int>(work.entry.row))),
          position(of_first_lane(static_cast<int>(work.entry.position))),
          first(of_first_lane(static_cast<int>(work.entry.first))),
          start(of_first_lane(static_cast<int>(work.start))),
          tail(reinterpret_cast<const float*>(
              of_first_lane(reinterpret_cast<uint64_t>(work.tail)))) {}
};

template <int kSlots>
using Queue = Ring<Work, kSlots>;  // freed by the finishing warps
template <int kSlots>
using PooledRing = Ring<uint16_t[kHeadDim], kSlots>;

inline constexpr int kWindowRows = 128;

// The rows of a block: windows, a block after the other.
struct Windows {
    int rows;  // of a window

    // Few rows: small windows, so that all SMs look for entries.
    Windows(int32_t batch_rows, int num_sms) : rows(1) {
        while (rows < kWindowRows && int64_t{rows} * 2 * num_sms < batch_rows) rows *= 2;
    }
    dim3 grid(int32_t batch_rows, int num_sms) const {
        dim3 blocks = blocks_for(batch_rows, rows);
        const auto most = static_cast<unsigned>(num_sms);
        if (rows == kWindowRows && blocks.x > most) blocks.x = most;
        return blocks;
    }
    __device__ __forceinline__ int64_t round() const { return int64_t{rows} * gridDim.x; }
};

// Scout, before the kernel in front has ended: the batch at the block's first window, to the L2.
__device__ __forceinline__ void fetch_window(const CompressParams& p, Windows windows, int lane) {
    const int64_t row = int64_t{windows.rows} * blockIdx.x + 32 * lane;
    if (32 * lane >= windows.rows || row >= p.batch.rows) return;
    prefetch_l2(p.batch.positions + row);
    prefetch_l2(p.batch.row_request + row);
}

// Scout. finishers: warps that each wait for the end of the queue.
template <int kSlots>
__device__ __forceinline__ void find_entries(const CompressParams& p, Queue<kSlots>& queue,
                                             Windows windows, int finishers, int lane) {
    constexpr int kLooks = kWindowRows / 32;
    Cursor<kSlots> at;
    const auto put = [&](bool mine, const Work& work) {
        Work& slot = queue.wait_freed(at);
        if (mine) slot = work;
        queue.filled[at.slot].arrive();
        at.advance();
    };
    for (int64_t begin = int64_t{windows.rows} * blockIdx.x; begin < p.batch.rows;
         begin += windows.round()) {
        Work own[kLooks];
        uint32_t closing[kLooks];
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            const int64_t row = begin + 32 * i + lane;
            Entry& e = own[i].entry;
            const bool inside = 32 * i + lane < windows.rows && row < p.batch.rows;
            const bool closes = inside && closes_entry(p, row, &e);
            closing[i] = __ballot_sync(kAllLanes, closes);
            if (!closes) continue;
            own[i].start = p.batch.start[e.request];
            own[i].tail = nullptr;
            if (e.first < own[i].start) own[i].tail = p.tail.kv(p.batch.tail_slot[e.request], 0);
        }
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            for (; closing[i] != 0; closing[i] &= closing[i] - 1)
                put(lane == __ffs(static_cast<int>(closing[i])) - 1, own[i]);
        }
    }
    Work none = {};
    none.entry.row = -1;
    for (int i = 0; i < finishers; ++i) put(lane == 0, none);
}

// Keeper. Rows that lie together are kept by as many blocks.
__device__ __forceinline__ void keep_rows(const CompressParams& p, Windows windows, int lane) {
    for (int64_t begin = blockIdx.x; begin < p.batch.rows; begin += windows.round()) {
        for (int first = 0; first < windows.rows; first += 32) {
            const int64_t row = begin + int64_t{first + lane} * gridDim.x;
            const bool inside = first + lane < windows.rows && row < p.batch.rows;
            uint32_t kept = __ballot_sync(kAllLanes, inside && keeps_row(p, row));
            for (; kept != 0; kept &= kept - 1) {
                const int of = first + __ffs(static_cast<int>(kept)) - 1;
                keep_row(p, begin + int64_t{of} * gridDim.x, lane, 32);
            }
        }
    }
}

// Rows of the call over the tail rows that the entry has read; its channels.
template <int kDim>
__device__ __forceinline__ void replace_tail_rows(const CompressParams& p, const Work& work,
                                                  int lane) {
    if (work.entry.first >= work.start) return;
    replace_read_rows(
        p, work.entry, [&](float* to_kv, float* to_gate, const float* kv, const float* gate) {
            const auto move = [&](float* to, const float* from) {
#pragma unroll
                for (int c = 4 * lane; c < kDim; c += 128)
                    *reinterpret_cast<float4*>(to + c) = *reinterpret_cast<const float4*>(from + c);
            };
            move(to_kv, kv);
            move(to_gate, gate);
        });
}

// What finishing an entry reads, while its rows are on their way.
__device__ __forceinline__ void fetch_finish(const CompressParams& p, const Entry& e, int lane) {
    if (lane == 0) prefetch_l2(p.entry_slots + e.row);
    if (lane < 2) prefetch_l2(p.cos_sin.at(e.index * p.ratio) + 32 * lane);
}

// Finishing warp `number` of `finishers`. Entry n has slot n of both rings.
template <int kSlots, int kPooledSlots>
__device__ __forceinline__ void finish_entries(const CompressParams& p, Queue<kSlots>& queue,
                                               PooledRing<kPooledSlots>& pooled, int number,
                                               int finishers, int lane) {
    for (int n = number;; n += finishers) {
        const Cursor<kSlots> at(n);
        const Cursor<kPooledSlots> from(n);
        const Work work = queue.wait_filled(at);
        if (!work) return;
        fetch_finish(p, work.entry, lane);
        uint16_t* values = pooled.wait_filled(from);
        queue.freed[at.slot].arrive();  // all others are done with it
        finish_entry<kHeadDim>(p, work.entry, lane, values);
        pooled.freed[from.slot].arrive();
        replace_tail_rows<kHeadDim>(p, work, lane);
    }
}

}  // namespace flash_csa::sm90
