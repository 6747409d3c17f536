// Ratio 128: groups of 128 rows streamed through an SM, half of their channels at a time.
//
//   in   kv, gate, tail, batch, slots, weights     out  main pages, latent_out, tail
//
// The weights of a softmax need its largest gate, and 128 gates of all channels (256 KiB) are more
// than an SM holds; those of half the channels are 128 KiB. A block takes entries in two halves,
// its warps have roles (stream.cuh has those of all such kernels):
//   gates, kv  halves of rows by bulk copy, 8 rows of 1 KiB a batch
//   tops       gates + bias, back to their slots; the largest ones
//   pool       exponentials and sums, a channel a thread -> pooled values
// Timeline:
//   gates  | half 0    | half 1       | half 2 ...     a slot is free once its batch is pooled
//   kv        | half 0    | half 1       | half 2 ...
//   tops        | half 0    | half 1
//   pool                    | half 0    | half 1       the slots of half 0 fill with half 1
// Floor: 4 KiB a row.
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/approximate.cuh"
#include "sm90/common/dependents.cuh"
#include "sm90/compress/exp.cuh"
#include "sm90/compress/stream.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kGroupRows = 128;
constexpr int kBatch = 8;  // rows of a slot
constexpr int kHalf = kHeadDim / 2;
constexpr int kHalfBatches = kGroupRows / kBatch;
constexpr int kEntryBatches = 2 * kHalfBatches;
constexpr uint32_t kPieceBytes = kHalf * sizeof(float);
constexpr int kGateSlots = 22;  // a whole half, and some of the next one
constexpr int kKvSlots = 5;
constexpr int kPooledSlots = 2;
constexpr int kQueueSlots = 4;

enum Role { kPoolWarps = 8, kTopWarps = 4, kGateWarp = 12, kKvWarp, kScout, kFinish, kKeeper };
constexpr int kThreads = 32 * (kKeeper + 1);
constexpr int kPoolThreads = 32 * kPoolWarps, kTopThreads = 32 * kTopWarps;
static_assert(kPoolThreads == kHalf && 2 * kTopThreads == kHalf);
// Tops of the next half overwrite those of this one once all of its threads have read theirs.
static_assert(kGateSlots < 2 * kHalfBatches);

using Piece = float[kBatch][kHalf];

struct Shared {
    Ring<Piece, kGateSlots> gates;
    Ring<Piece, kKvSlots> kv;
    PooledRing<kPooledSlots> pooled;
    Queue<kQueueSlots> queue;
    alignas(16) float tops[kHalf];
    Barrier topped;

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        gates.init(1, kPoolThreads);
        kv.init(1, kPoolThreads);
        pooled.init(kPoolThreads, 32);
        queue.init(32, 32);
        topped.init(kTopThreads);
        cutlass::arch::fence_barrier_init();
    }
};

// ---- gates, kv

// A warp copies one operand, halves of rows. tail: where it lies in a slot of the tail.
template <int kSlots>
__device__ __forceinline__ void copy_rows(const CompressParams& p, Shared& shared,
                                          Ring<Piece, kSlots>& ring,
                                          const Matrix<const float>& rows, int64_t tail) {
    Cursor<kSlots> at;
    for (Cursor<kQueueSlots> next; shared.queue.wait_filled(next); next.advance()) {
        const UniformWork work(shared.queue.slots[next.slot]);
        for (int batch = 0; batch < kEntryBatches; ++batch, at.advance()) {
            const int first = batch % kHalfBatches * kBatch;
            const int column = batch / kHalfBatches * kHalf;
            const float* from = rows.row(work.row - (kGroupRows - 1) + first) + column;
            Piece& piece = ring.wait_freed(at);
            cutlass::arch::fence_view_async_shared();  // gates were written there
            if (!cute::elect_one_sync()) continue;
            Barrier& filled = ring.filled[at.slot];
            filled.arrive_and_expect_tx(sizeof(Piece));
            const auto copy = [&](int i, const float* source) {
                cute::SM90_BULK_COPY_G2S::copy(source, reinterpret_cast<uint64_t*>(&filled),
                                               piece[i], kPieceBytes);
            };
            if (work.first + first >= work.start) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) copy(i, from + i * rows.stride);
            } else {
#pragma unroll 1
                for (int i = 0; i < kBatch; ++i) {
                    const int position = work.first + first + i;
                    const int64_t slot = int64_t{position % p.tail.ring} * p.tail.width;
                    copy(i, position < work.start ? work.tail + tail + slot + column
                                                  : from + i * rows.stride);
                }
            }
        }
    }
}

// ---- tops

// Two channels a thread: adds the bias to the gates and finds the largest ones.
__device__ __forceinline__ void find_tops(const CompressParams& p, Shared& shared, int thread) {
    constexpr int kAhead = 4;  // batches of biases on their way: 32 KiB
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
    for (Cursor<kQueueSlots> next; shared.queue.wait_filled(next); next.advance()) {
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

// Rows of one channel: how far their gates are below the top, and kv.
struct Batch {
    float delta[kBatch], kv[kBatch];

    // Adds the rows to the sums, in their order.
    template <class Exp>
    __device__ __forceinline__ void add(const Exp& exp, float& sum, float& acc) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float w = exp(delta[i]);
            sum = add_rn(sum, w);
            acc = fma_rn(w, kv[i], acc);
        }
    }
    __device__ __forceinline__ void add(float& sum, float& acc) const {
        float lowest = 0.f;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) lowest = min_or_nan(lowest, delta[i]);
        // Almost always: no weight is subnormal.
        if (lowest >= -86.0f)
            add([](float x) { return exp_near(x); }, sum, acc);
        else
            add([](float x) { return exp_negative(x); }, sum, acc);
    }
};

// One channel a thread. A batch is read while the one before is added.
__device__ __forceinline__ void pool_groups(Shared& shared, int thread) {
    Cursor<kGateSlots> gates;
    Cursor<kKvSlots> kvs;
    Cursor<kPooledSlots> to;
    uint32_t round = 0;  // of the tops
    for (Cursor<kQueueSlots> next; shared.queue.wait_filled(next); next.advance(), to.advance()) {
#pragma unroll 1
        for (int channel = thread; channel < kHeadDim; channel += kHalf, round ^= 1) {
            shared.topped.wait(round);
            const float top = shared.tops[thread];
            const auto read = [&](Batch& batch) {
                const Piece& gate = shared.gates.wait_filled(gates);
                const Piece& kv = shared.kv.wait_filled(kvs);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    batch.delta[i] = sub_rn(gate[i][thread], top);
                    batch.kv[i] = kv[i][thread];
                }
                shared.gates.freed[gates.slot].arrive();
                shared.kv.freed[kvs.slot].arrive();
                gates.advance();
                kvs.advance();
            };
            float sum = 0.f, acc = 0.f;
            Batch even, odd;
            read(even);
#pragma unroll 1
            for (int batch = 0; batch < kHalfBatches; batch += 2) {
                read(odd);
                even.add(sum, acc);
                if (batch + 2 < kHalfBatches) read(even);
                odd.add(sum, acc);
            }
            shared.pooled.wait_freed(to)[channel] = f32_to_bf16(div_rn(acc, sum));
        }
        shared.pooled.filled[to.slot].arrive();
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
    if (warp == kScout) fetch_window(p, windows, lane);
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
        find_entries(p, shared.queue, windows, 1, lane);
    else if (warp == kFinish)
        finish_entries(p, shared.queue, shared.pooled, 0, 1, lane);
    else if (p.tail.data != nullptr)
        keep_rows(p, windows, lane);
}

}  // namespace

cudaError_t compress_groups(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const Windows windows(p.batch.rows, num_sms);
    return launch_after(groups_kernel, windows.grid(p.batch.rows, num_sms), kThreads,
                        sizeof(Shared), stream, p, windows);
}

}  // namespace flash_csa::sm90
