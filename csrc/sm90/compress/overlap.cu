// Long steps of ratio 4, overlapping: entries of 8 rows streamed through an SM.
//
//   in   kv, gate, tail, batch, slots, weights     out  main pages, latent_out, tail
//
// A slot has an entry's gates and kv: four rows of the group before in the first half of their
// columns, four of its own group in the second one, 32 KiB. Roles, beside those of stream.cuh:
//   gates, kv  halves of rows by bulk copy, 8 of 2 KiB
//   pool       two channels a thread: rows to registers, which frees the slot -> pooled values
// Floor: 32 KiB an entry.
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/dependents.cuh"
#include "sm90/compress/pool.cuh"
#include "sm90/compress/stream.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kGroup = 4;
constexpr int kRows = 2 * kGroup;  // of an entry
constexpr int kSlots = 6;
constexpr int kPooledSlots = 8;
constexpr int kQueueSlots = 16;
constexpr uint32_t kPieceBytes = kHeadDim * sizeof(float);

enum Role { kPoolWarps = 8, kFinishWarps = 4, kGateWarp = 12, kKvWarp, kScout, kKeeper };
constexpr int kThreads = 32 * (kKeeper + 1);
static_assert(32 * kPoolWarps == kPoolThreads && 2 * kPoolThreads == kHeadDim);

struct Piece {
    float gate[kRows][kHeadDim];
    float kv[kRows][kHeadDim];
};

struct Shared {
    Ring<Piece, kSlots> rows;
    PooledRing<kPooledSlots> pooled;
    Queue<kQueueSlots> queue;

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        rows.init(2, kPoolThreads);
        pooled.init(kPoolThreads, 32);
        queue.init(32, 32);
        cutlass::arch::fence_barrier_init();
    }
};

// A request's first entry has no rows of a group before.
__device__ __forceinline__ int first_row(int64_t position, int64_t first) {
    return kRows - 1 - static_cast<int>(position - first);
}

// A warp copies one operand. tail: where it lies in a slot of the tail.
__device__ __forceinline__ void copy_rows(const CompressParams& p, Shared& shared,
                                          float (Piece::*operand)[kRows][kHeadDim],
                                          const Matrix<const float>& rows, int64_t tail) {
    Cursor<kSlots> at;
    for (Cursor<kQueueSlots> next; shared.queue.wait_filled(next); next.advance(), at.advance()) {
        const UniformWork work(shared.queue.slots[next.slot]);
        const int begin = first_row(work.position, work.first);
        const float* from = rows.row(work.row - (kRows - 1));
        Piece& piece = shared.rows.wait_freed(at);
        if (!cute::elect_one_sync()) continue;
        Barrier& filled = shared.rows.filled[at.slot];
        filled.arrive_and_expect_tx((kRows - begin) * kPieceBytes);
        const auto copy = [&](int i, const float* source) {
            cute::SM90_BULK_COPY_G2S::copy(source + i / kGroup * kHeadDim,
                                           reinterpret_cast<uint64_t*>(&filled),
                                           (piece.*operand)[i], kPieceBytes);
        };
        if (begin == 0 && work.first >= work.start) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) copy(i, from + i * rows.stride);
        } else {
#pragma unroll 1
            for (int i = begin; i < kRows; ++i) {
                const int position = work.position - (kRows - 1) + i;
                const int64_t slot = int64_t{position % p.tail.ring} * p.tail.width;
                copy(i, position < work.start ? work.tail + tail + slot : from + i * rows.stride);
            }
        }
    }
}

__device__ __forceinline__ void pool_rows(const CompressParams& p, Shared& shared, int thread) {
    Cursor<kSlots> from;
    Cursor<kPooledSlots> to;
    float2 bias[kRows] = {};
    if (p.bias) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            bias[i] = *channel_pair(p.bias.row(i % kGroup) + i / kGroup * kHeadDim, thread);
    }
    for (Cursor<kQueueSlots> next; shared.queue.wait_filled(next); next.advance()) {
        const Entry& e = shared.queue.slots[next.slot].entry;
        const bool whole = first_row(e.position, e.first) == 0;
        const Piece& piece = shared.rows.wait_filled(from);
        Rows<kRows> rows;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float2 gate = *channel_pair(piece.gate[i], thread);
            float2 kv = *channel_pair(piece.kv[i], thread);
            gate = make_float2(add_rn(gate.x, bias[i].x), add_rn(gate.y, bias[i].y));
            if (i < kGroup && !whole) {
                gate = make_float2(-INFINITY, -INFINITY);
                kv = make_float2(0.f, 0.f);
            }
            rows.gate[0][i] = gate.x, rows.gate[1][i] = gate.y;
            rows.kv[0][i] = kv.x, rows.kv[1][i] = kv.y;
        }
        shared.rows.freed[from.slot].arrive();
        const uint32_t pooled = rows.pool();
        reinterpret_cast<uint32_t*>(shared.pooled.wait_freed(to))[thread] = pooled;
        shared.pooled.filled[to.slot].arrive();
        from.advance();
        to.advance();
    }
}

__global__ void __launch_bounds__(kThreads, 1) overlap_kernel(CompressParams p, Windows windows) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int warp = of_first_lane(static_cast<int>(threadIdx.x) / 32);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    p.ratio = kGroup;
    p.overlap = true;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    allow_dependents();
    wait_for_previous();
    if (warp < kPoolWarps)
        pool_rows(p, shared, static_cast<int>(threadIdx.x));
    else if (warp < kPoolWarps + kFinishWarps)
        finish_entries(p, shared.queue, shared.pooled, warp - kPoolWarps, kFinishWarps, lane);
    else if (warp == kGateWarp)
        copy_rows(p, shared, &Piece::gate, p.gate, int64_t{p.tail.ring} * p.tail.width);
    else if (warp == kKvWarp)
        copy_rows(p, shared, &Piece::kv, p.kv, 0);
    else if (warp == kScout)
        find_entries(p, shared.queue, windows, kFinishWarps, lane);
    else if (p.tail.data != nullptr)
        keep_rows(p, windows, lane);
}

}  // namespace

cudaError_t compress_overlap(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const Windows windows(p.batch.rows, num_sms);
    return launch_after(overlap_kernel, windows.grid(p.batch.rows, num_sms), kThreads,
                        sizeof(Shared), stream, p, windows);
}

}  // namespace flash_csa::sm90
