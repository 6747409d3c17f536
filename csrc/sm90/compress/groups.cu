// Ratio 128: groups of 128 rows streamed through an SM, half of their channels at a time.
//
//   in   kv, gate, tail, batch, slots, weights     out  main pages, latent_out, tail
//
// The weights of a softmax need its largest gate, and 128 gates of all channels (256 KiB) are more
// than an SM holds; those of half the channels are 128 KiB. A block takes entries in two halves,
// its warps have roles, and everything between them is a ring in shared memory:
//   scout      rows of the batch -> entries, four of them ahead
//   gates, kv  halves of rows by bulk copy, 8 rows of 1 KiB a batch
//   tops       gates + bias, back to their slots; the largest ones
//   pool       exponentials and sums, a channel a thread -> pooled values
//   finish     norm -> latent, RoPE -> main record
//   keeper     rows that the tail keeps, one after the other by all blocks
// Timeline:
//   gates  | half 0    | half 1       | half 2 ...     a slot is free once its batch is pooled
//   kv        | half 0    | half 1       | half 2 ...
//   tops        | half 0    | half 1
//   pool                    | half 0    | half 1       the slots of half 0 fill with half 1
// Floor: 4 KiB a row.
#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/approximate.cuh"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/compress/compress.cuh"
#include "sm90/compress/exp.cuh"
#include "sm90/compress/tail.cuh"

namespace flash_csa::sm90 {
namespace {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kGroupRows = 128;
constexpr int kBatch = 8;  // rows of a slot
constexpr int kHalf = kHeadDim / 2;
constexpr int kHalfBatches = kGroupRows / kBatch;
constexpr int kEntryBatches = 2 * kHalfBatches;
constexpr uint32_t kPieceBytes = kHalf * sizeof(float);
constexpr int kGateSlots = 17;  // a whole half, and one to come
constexpr int kKvSlots = 10;
constexpr int kQueue = 4;

enum Role { kPoolWarps = 8, kTopWarps = 4, kGateWarp = 12, kKvWarp, kScout, kFinish, kKeeper };
constexpr int kThreads = 32 * (kKeeper + 1);
constexpr int kPoolThreads = 32 * kPoolWarps, kTopThreads = 32 * kTopWarps;
static_assert(kPoolThreads == kHalf && 2 * kTopThreads == kHalf);
// Tops of the next half overwrite those of this one once all of its threads have read theirs.
static_assert(kGateSlots < 2 * kHalfBatches);

// Where a role is in a ring: the slot, and the parity of its round.
template <int kSlots>
struct Cursor {
    int slot = 0;
    uint32_t round = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) slot = 0, round ^= 1;
    }
};

template <class Slot, int kSlots>
struct Ring {
    alignas(128) Slot slots[kSlots];
    Barrier filled[kSlots], freed[kSlots];

    __device__ __forceinline__ void init(uint32_t fillers, uint32_t readers) {
        for (int i = 0; i < kSlots; ++i) {
            filled[i].init(fillers);
            freed[i].init(readers);
        }
    }
    __device__ __forceinline__ Slot& wait_filled(const Cursor<kSlots>& at) {
        filled[at.slot].wait(at.round);
        return slots[at.slot];
    }
    __device__ __forceinline__ Slot& wait_freed(const Cursor<kSlots>& at) {
        freed[at.slot].wait(at.round ^ 1);
        return slots[at.slot];
    }
};

using Piece = float[kBatch][kHalf];
using Pooled = uint16_t[kHeadDim];

// An entry and where its rows lie; row < 0: there are no more.
struct Group {
    Entry entry;
    int64_t start;      // of the request: rows before it are in the tail
    const float* tail;  // kv rows of the request's slot
};

struct Shared {
    Ring<Piece, kGateSlots> gates;
    Ring<Piece, kKvSlots> kv;
    Ring<Pooled, 2> pooled;
    Ring<Group, kQueue> queue;
    alignas(16) float tops[kHalf];
    Barrier topped;

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        gates.init(1, kPoolThreads);
        kv.init(1, kPoolThreads);
        pooled.init(kPoolThreads, 32);
        queue.init(32, 32);  // read for the last time by the finishing warp
        topped.init(kTopThreads);
        cutlass::arch::fence_barrier_init();
    }
    __device__ __forceinline__ bool has_group(const Cursor<kQueue>& at) {
        return queue.wait_filled(at).entry.row >= 0;
    }
};

template <class T>
__device__ __forceinline__ T of_first_lane(T x) {
    return __shfl_sync(kAllLanes, x, 0);
}

// ---- scout, keeper

struct Windows {  // rows of a block: windows of `rows`, a block after the other
    int rows;

    __device__ __forceinline__ int64_t round() const { return int64_t{rows} * gridDim.x; }
};

__device__ void find_groups(const CompressParams& p, Shared& shared, Windows windows, int lane) {
    constexpr int kLooks = kGroupRows / 32;
    Cursor<kQueue> at;
    const auto put = [&](bool mine, const Group& group) {
        Group& slot = shared.queue.wait_freed(at);
        if (mine) slot = group;
        shared.queue.filled[at.slot].arrive();
        at.advance();
    };
    for (int64_t begin = int64_t{windows.rows} * blockIdx.x; begin < p.batch.rows;
         begin += windows.round()) {
        Group own[kLooks];
        uint32_t closing[kLooks];
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            const int64_t row = begin + 32 * i + lane;
            Entry& e = own[i].entry;
            const bool closes =
                32 * i + lane < windows.rows && row < p.batch.rows && closes_entry(p, row, &e);
            closing[i] = __ballot_sync(kAllLanes, closes);
            if (!closes) continue;
            own[i].start = p.batch.start[e.request];
            own[i].tail =
                e.first < own[i].start ? p.tail.kv(p.batch.tail_slot[e.request], 0) : nullptr;
        }
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            for (; closing[i] != 0; closing[i] &= closing[i] - 1)
                put(lane == __ffs(static_cast<int>(closing[i])) - 1, own[i]);
        }
    }
    Group none = {};
    none.entry.row = -1;
    put(lane == 0, none);
}

// Rows that lie together are kept by as many blocks.
__device__ void keep_rows(const CompressParams& p, Windows windows, int lane) {
    for (int64_t begin = blockIdx.x; begin < p.batch.rows; begin += windows.round()) {
        for (int first = 0; first < windows.rows; first += 32) {
            const int64_t row = begin + int64_t{first + lane} * gridDim.x;
            uint32_t kept = __ballot_sync(
                kAllLanes, first + lane < windows.rows && row < p.batch.rows && keeps_row(p, row));
            for (; kept != 0; kept &= kept - 1) {
                const int of = __ffs(static_cast<int>(kept)) - 1;
                keep_row(p, begin + int64_t{first + of} * gridDim.x, lane, 32);
            }
        }
    }
}

// ---- gates, kv

// A warp copies one operand, halves of rows. tail: where it lies in a slot of the tail.
template <int kSlots>
__device__ __forceinline__ void copy_rows(const CompressParams& p, Shared& shared,
                                          Ring<Piece, kSlots>& ring,
                                          const Matrix<const float>& rows, int64_t tail) {
    Cursor<kSlots> at;
    for (Cursor<kQueue> next; shared.has_group(next); next.advance()) {
        // Uniform addresses: copies of one lane, one behind the other.
        const Group& group = shared.queue.slots[next.slot];
        const int row = of_first_lane(static_cast<int>(group.entry.row));
        const int position = of_first_lane(static_cast<int>(group.entry.first));
        const int start = of_first_lane(static_cast<int>(group.start));
        const float* in_tail =
            reinterpret_cast<const float*>(of_first_lane(reinterpret_cast<uint64_t>(group.tail)));
        for (int batch = 0; batch < kEntryBatches; ++batch, at.advance()) {
            const int first = batch % kHalfBatches * kBatch;
            const int column = batch / kHalfBatches * kHalf;
            const float* from = rows.row(row - (kGroupRows - 1) + first) + column;
            Piece& piece = ring.wait_freed(at);
            cutlass::arch::fence_view_async_shared();  // gates were written there
            if (!cute::elect_one_sync()) continue;
            Barrier& filled = ring.filled[at.slot];
            filled.arrive_and_expect_tx(sizeof(Piece));
            const auto copy = [&](int i, const float* source) {
                cute::SM90_BULK_COPY_G2S::copy(source, reinterpret_cast<uint64_t*>(&filled),
                                               piece[i], kPieceBytes);
            };
            if (position + first >= start) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) copy(i, from + i * rows.stride);
            } else {
#pragma unroll 1
                for (int i = 0; i < kBatch; ++i) {
                    const int old = position + first + i;
                    const int64_t slot = int64_t{old % p.tail.ring} * p.tail.width;
                    copy(i, old < start ? in_tail + tail + slot + column : from + i * rows.stride);
                }
            }
        }
    }
}

// ---- tops

// Two channels a thread: adds the bias to the gates and finds the largest ones.
__device__ __forceinline__ void find_tops(const CompressParams& p, Shared& shared, int thread) {
    constexpr int kAhead = 2;  // batches of biases on their way
    Cursor<kGateSlots> at;
    float2 bias[kAhead][kBatch] = {};
    const auto read_bias = [&](int batch, float2(&to)[kBatch]) {
        if (!p.bias) return;
        const float* from = p.bias.row(batch % kHalfBatches * kBatch) +
                            batch / kHalfBatches % 2 * kHalf + 2 * thread;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            to[i] = __ldcg(reinterpret_cast<const float2*>(from + i * p.bias.stride));
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) read_bias(i, bias[i]);
    for (Cursor<kQueue> next; shared.has_group(next); next.advance()) {
        float2 top = make_float2(-INFINITY, -INFINITY);
        const auto raise = [&](const float2(&bias)[kBatch]) {
            Piece& piece = shared.gates.wait_filled(at);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float2& gate = reinterpret_cast<float2*>(piece[i])[thread];
                gate = make_float2(add_rn(gate.x, bias[i].x), add_rn(gate.y, bias[i].y));
                top = make_float2(fmaxf(top.x, gate.x), fmaxf(top.y, gate.y));  // never NaN
            }
            at.advance();
        };
#pragma unroll 1
        for (int batch = 0; batch < kEntryBatches; batch += kAhead) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                raise(bias[i]);
                read_bias(batch + i + kAhead, bias[i]);
            }
            if ((batch + kAhead) % kHalfBatches != 0) continue;
            reinterpret_cast<float2*>(shared.tops)[thread] = top;
            shared.topped.arrive();
            top = make_float2(-INFINITY, -INFINITY);
        }
    }
}

// ---- pool

// Adds a batch of rows to the sums of a channel, in their order.
template <class Exp>
__device__ __forceinline__ void add_rows(const Exp& exp, const float (&delta)[kBatch],
                                         const float (&kv)[kBatch], float& sum, float& acc) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const float w = exp(delta[i]);
        sum = add_rn(sum, w);
        acc = fma_rn(w, kv[i], acc);
    }
}

// One channel a thread.
__device__ __forceinline__ void pool_groups(Shared& shared, int thread) {
    Cursor<kGateSlots> gates;
    Cursor<kKvSlots> kvs;
    Cursor<2> to;
    uint32_t round = 0;  // of the tops
    for (Cursor<kQueue> next; shared.has_group(next); next.advance(), to.advance()) {
#pragma unroll 1
        for (int channel = thread; channel < kHeadDim; channel += kHalf, round ^= 1) {
            shared.topped.wait(round);
            const float top = shared.tops[thread];
            float sum = 0.f, acc = 0.f;
#pragma unroll 1
            for (int batch = 0; batch < kHalfBatches; ++batch) {
                const Piece& gate = shared.gates.wait_filled(gates);
                float delta[kBatch], kv[kBatch], lowest = 0.f;
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    delta[i] = sub_rn(gate[i][thread], top);
                    lowest = min_or_nan(lowest, delta[i]);
                }
                const Piece& rows = shared.kv.wait_filled(kvs);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) kv[i] = rows[i][thread];
                // Almost always: no weight is subnormal.
                if (lowest >= -86.0f)
                    add_rows([](float x) { return exp_near(x); }, delta, kv, sum, acc);
                else
                    add_rows([](float x) { return exp_negative(x); }, delta, kv, sum, acc);
                shared.gates.freed[gates.slot].arrive();
                shared.kv.freed[kvs.slot].arrive();
                gates.advance();
                kvs.advance();
            }
            shared.pooled.wait_freed(to)[channel] = f32_to_bf16(div_rn(acc, sum));
        }
        shared.pooled.filled[to.slot].arrive();
    }
}

// ---- finish

__device__ __forceinline__ void finish_groups(const CompressParams& p, Shared& shared, int lane) {
    Cursor<2> from;
    for (Cursor<kQueue> next; shared.has_group(next); next.advance(), from.advance()) {
        const Entry e = shared.queue.slots[next.slot].entry;
        Pooled& pooled = shared.pooled.wait_filled(from);
        shared.queue.freed[next.slot].arrive();  // all others are done with it
        finish_entry<kHeadDim>(p, e, lane, pooled);
        shared.pooled.freed[from.slot].arrive();
        if (p.tail.data == nullptr) continue;
        replace_read_rows(p, e,
                          [&](float* to_kv, float* to_gate, const float* kv, const float* gate) {
                              for (int c = 4 * lane; c < kHeadDim; c += 128) {
                                  const auto move = [&](float* to, const float* from) {
                                      *reinterpret_cast<float4*>(to + c) =
                                          *reinterpret_cast<const float4*>(from + c);
                                  };
                                  move(to_kv, kv);
                                  move(to_gate, gate);
                              }
                          });
    }
}

__global__ void __launch_bounds__(kThreads, 1) groups_kernel(CompressParams p, Windows windows) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int warp = of_first_lane(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    p.ratio = kGroupRows;
    p.overlap = false;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    allow_dependents();
    wait_for_previous();
    if (warp < kPoolWarps)
        pool_groups(shared, static_cast<int>(threadIdx.x));
    else if (warp < kPoolWarps + kTopWarps)
        find_tops(p, shared, static_cast<int>(threadIdx.x) - kPoolThreads);
    else if (warp == kGateWarp)
        copy_rows(p, shared, shared.gates, p.gate, int64_t{p.tail.ring} * p.tail.width);
    else if (warp == kKvWarp)
        copy_rows(p, shared, shared.kv, p.kv, 0);
    else if (warp == kScout)
        find_groups(p, shared, windows, lane);
    else if (warp == kFinish)
        finish_groups(p, shared, lane);
    else if (p.tail.data != nullptr)
        keep_rows(p, windows, lane);
}

}  // namespace

// Few rows: windows of less than a group, so that all SMs look for entries.
cudaError_t compress_groups(const CompressParams& p, int num_sms, cudaStream_t stream) {
    Windows windows = {1};
    while (windows.rows < kGroupRows && int64_t{windows.rows} * 2 * num_sms < p.batch.rows)
        windows.rows *= 2;
    dim3 grid = blocks_for(p.batch.rows, windows.rows);
    if (windows.rows == kGroupRows && grid.x > static_cast<unsigned>(num_sms))
        grid.x = static_cast<unsigned>(num_sms);
    return launch_after(groups_kernel, grid, kThreads, sizeof(Shared), stream, p, windows);
}

}  // namespace flash_csa::sm90
