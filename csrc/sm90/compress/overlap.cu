// Long steps of ratio 4, overlapping: entries of 8 rows streamed through an SM.
//
//   in   kv, gate, tail, batch, slots, weights     out  main or index pages, latent_out, tail
//
// A slot has an entry's gates and kv: four rows of the group before in the first half of their
// columns, four of its own group in the second one. Roles, beside those of stream.cuh:
//   gates, kv  halves of rows by bulk copy, 8 pieces of 2 KiB or, of index keys, 512 bytes
//   pool       rows to registers, which frees the slot -> pooled values; two channels a thread
//   whole      index keys: pool and finish, an entry a warp
// Floor: 32 KiB an entry, 8 KiB an index key.
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/dependents.cuh"
#include "sm90/compress/pool.cuh"
#include "sm90/compress/stream.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kGroup = 4;
constexpr int kRows = 2 * kGroup;  // of an entry
constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
enum Role { kGateWarp = 12, kKvWarp, kScout, kKeeper };  // behind the others

template <int kDim>
struct Piece {
    float gate[kRows][kDim];
    float kv[kRows][kDim];
};

// Entries of width 512: warps that pool, warps that finish.
struct EntryShared {
    static constexpr int kDim = kHeadDim;
    static constexpr int kPoolWarps = kPoolThreads / 32, kFinishers = kGateWarp - kPoolWarps;

    Ring<Piece<kDim>, 6> rows;
    Queue<16> queue;
    PooledRing<8> pooled;

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        rows.init(2, kPoolThreads);
        queue.init(32, 32);
        pooled.init(kPoolThreads, 32);
        cutlass::arch::fence_barrier_init();
    }
};

// Index keys: warps that do both.
struct KeyShared {
    static constexpr int kDim = kIndexDim;
    static constexpr int kFinishers = kGateWarp;

    Ring<Piece<kDim>, 24> rows;
    Queue<32> queue;
    alignas(16) uint16_t pooled[kFinishers][kDim];

    __device__ __forceinline__ void init() {
        rows.init(2, 32);
        queue.init(32, 32);
        cutlass::arch::fence_barrier_init();
    }
};

// A request's first entry has no rows of a group before.
__device__ __forceinline__ int first_row(int64_t position, int64_t first) {
    return kRows - 1 - static_cast<int>(position - first);
}

// A warp copies one operand. tail: where it lies in a slot of the tail.
template <class Shared, int kDim = Shared::kDim>
__device__ __forceinline__ void copy_rows(const CompressParams& p, Shared& shared,
                                          float (Piece<kDim>::*operand)[kRows][kDim],
                                          const Matrix<const float>& rows, int64_t tail) {
    constexpr uint32_t kPieceBytes = kDim * sizeof(float);
    typename decltype(shared.rows)::At at;
    for (typename decltype(shared.queue)::At next; shared.queue.wait_filled(next);
         next.advance(), at.advance()) {
        const UniformWork work(shared.queue.slots[next.slot]);
        const int begin = first_row(work.position, work.first);
        const float* from = rows.row(work.row - (kRows - 1));
        Piece<kDim>& piece = shared.rows.wait_freed(at);
        if (!cute::elect_one_sync()) continue;
        Barrier& filled = shared.rows.filled[at.slot];
        filled.arrive_and_expect_tx((kRows - begin) * kPieceBytes);
        const auto copy = [&](int i, const float* source) {
            cute::SM90_BULK_COPY_G2S::copy(source + i / kGroup * kDim,
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

using Biases = float2[kRows];

// Those of a pair of channels, for the rows of an entry.
template <int kDim>
__device__ __forceinline__ void read_biases(const CompressParams& p, int pair, Biases& biases) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        biases[i] = make_float2(0.f, 0.f);
        if (p.bias) biases[i] = *channel_pair(p.bias.row(i % kGroup) + i / kGroup * kDim, pair);
    }
}

template <int kDim>
__device__ __forceinline__ Rows<kRows> read_rows(const Piece<kDim>& piece, const Biases& biases,
                                                 bool whole, int pair) {
    Rows<kRows> rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        float2 gate = *channel_pair(piece.gate[i], pair);
        float2 kv = *channel_pair(piece.kv[i], pair);
        gate = make_float2(add_rn(gate.x, biases[i].x), add_rn(gate.y, biases[i].y));
        if (i < kGroup && !whole) {
            gate = make_float2(-INFINITY, -INFINITY);
            kv = make_float2(0.f, 0.f);
        }
        rows.gate[0][i] = gate.x, rows.gate[1][i] = gate.y;
        rows.kv[0][i] = kv.x, rows.kv[1][i] = kv.y;
    }
    return rows;
}

__device__ __forceinline__ bool is_whole(const Entry& e) {
    return first_row(e.position, e.first) == 0;
}

__device__ __forceinline__ void pool_rows(const CompressParams& p, EntryShared& shared,
                                          int thread) {
    decltype(shared.rows)::At from;
    decltype(shared.pooled)::At to;
    Biases biases;
    read_biases<kHeadDim>(p, thread, biases);
    for (decltype(shared.queue)::At next; shared.queue.wait_filled(next);
         next.advance(), from.advance(), to.advance()) {
        const bool whole = is_whole(shared.queue.slots[next.slot].entry);
        const Rows<kRows> rows =
            read_rows<kHeadDim>(shared.rows.wait_filled(from), biases, whole, thread);
        shared.rows.freed[from.slot].arrive();
        const uint32_t pooled = rows.pool();
        reinterpret_cast<uint32_t*>(shared.pooled.wait_freed(to))[thread] = pooled;
        shared.pooled.filled[to.slot].arrive();
    }
}

// Warps that pool or finish, by their number.
__device__ __forceinline__ void make_entries(const CompressParams& p, EntryShared& shared, int warp,
                                             int lane) {
    constexpr int kPoolWarps = EntryShared::kPoolWarps;
    if (warp < kPoolWarps)
        pool_rows(p, shared, 32 * warp + lane);
    else
        finish_entries(p, shared.queue, shared.pooled, warp - kPoolWarps, EntryShared::kFinishers,
                       lane);
}

__device__ __forceinline__ void make_entries(const CompressParams& p, KeyShared& shared, int warp,
                                             int lane) {
    constexpr int kPairs = kIndexDim / 64;  // of a lane
    Biases biases[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) read_biases<kIndexDim>(p, lane + 32 * i, biases[i]);
    for (int n = warp;; n += KeyShared::kFinishers) {
        const decltype(shared.queue)::At at(n);
        const decltype(shared.rows)::At from(n);
        const Work work = shared.queue.wait_filled(at);
        if (!work) return;
        fetch_finish(p, work.entry, lane);
        const Piece<kIndexDim>& piece = shared.rows.wait_filled(from);
        shared.queue.freed[at.slot].arrive();  // the copying warps are done with it
        uint16_t* pooled = shared.pooled[warp];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            const int pair = lane + 32 * i;
            reinterpret_cast<uint32_t*>(pooled)[pair] =
                read_rows<kIndexDim>(piece, biases[i], is_whole(work.entry), pair).pool();
        }
        shared.rows.freed[from.slot].arrive();
        __syncwarp();
        finish_entry<kIndexDim>(p, work.entry, lane, pooled);
        __syncwarp();
        replace_tail_rows<kIndexDim>(p, work, lane);
    }
}

template <class Shared>
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
    if (warp == kScout) fetch_window(p, windows, lane);
    wait_for_previous();
    if (warp < kGateWarp)
        make_entries(p, shared, warp, lane);
    else if (warp == kGateWarp)
        copy_rows(p, shared, &Piece<Shared::kDim>::gate, p.gate,
                  int64_t{p.tail.ring} * p.tail.width);
    else if (warp == kKvWarp)
        copy_rows(p, shared, &Piece<Shared::kDim>::kv, p.kv, 0);
    else if (warp == kScout)
        find_entries(p, shared.queue, windows, Shared::kFinishers, lane);
    else if (p.tail.data != nullptr)
        keep_rows(p, windows, lane);
}

template <class Shared>
cudaError_t launch_overlap(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const Windows windows(p.batch.rows, num_sms);
    return launch_after(overlap_kernel<Shared>, windows.grid(p.batch.rows, num_sms), kThreads,
                        sizeof(Shared), stream, p, windows);
}

}  // namespace

cudaError_t compress_overlap(const CompressParams& p, int num_sms, cudaStream_t stream) {
    return p.dim == kHeadDim ? launch_overlap<EntryShared>(p, num_sms, stream)
                             : launch_overlap<KeyShared>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
