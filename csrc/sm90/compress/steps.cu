// Short steps of ratio 1 and 2 to MainFp4 and IndexFp4 records: a block has one row.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// All of it is latency, so 8 rows share the key weight: a block of their cluster has 16 of the 128
// keys, gets the latents of all 8 rows and gives each row its 16 sums.
//   main warps   pool, two channels a thread -> norm -> latent to 8 blocks | RoPE -> main record
//   key warp     16 keys of the weight                   8 latents * 16 keys -> 128 keys of the row
//                                                          -> norm -> RoPE -> index record
//   helper       lines to the L2 before the step may start; the row that the tail keeps
// Floor: two dependent reads (batch, tail row), two exchanges, 16 products one behind the other.
#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "sm90/common/cluster.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/mma.h"
#include "sm90/common/prefetch.cuh"
#include "sm90/compress/compress.cuh"
#include "sm90/compress/key.cuh"
#include "sm90/compress/pool_two.cuh"
#include "sm90/compress/projection.cuh"
#include "sm90/compress/tail.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {
namespace {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kRows = 8;                     // of a cluster, a block each
constexpr int kMainThreads = kHeadDim / 2;   // two channels each
constexpr int kKeyWarp = kMainThreads / 32;  // in front of the helper
constexpr int kThreads = kMainThreads + 64;
constexpr int kSlice = kIndexDim / kRows;  // keys of a block
static_assert(kSlice == kTileKeys);
constexpr int kMainBarrier = 1;

struct Shared {
    alignas(128) uint16_t weight[kSlice][kLatentStride];
    alignas(128) uint16_t latents[kRows][kLatentStride];
    alignas(16) float key[kIndexDim];
    alignas(16) uint16_t pooled[kHeadDim];
    Barrier weight_filled, latents_filled, key_filled;

    // One thread; the cluster synchronises before anything else.
    __device__ __forceinline__ void init() {
        for (Barrier* barrier : {&weight_filled, &latents_filled, &key_filled}) barrier->init(1);
        cutlass::arch::fence_barrier_init();
        weight_filled.arrive_and_expect_tx(kSlice * kHeadDim * sizeof(uint16_t));
        latents_filled.arrive_and_expect_tx(kRows * kHeadDim * sizeof(uint16_t));
        key_filled.arrive_and_expect_tx(sizeof key);
    }
};

// To the same place of the shared memory of block `rank`.
__device__ __forceinline__ void send(uint32_t value, void* to, const Barrier& filled, int rank) {
    cute::store_shared_remote(value, cute::cast_smem_ptr_to_uint(to),
                              cute::cast_smem_ptr_to_uint(&filled), static_cast<uint32_t>(rank));
}

// The block's row and the entry that it may close.
struct Row {
    Entry entry = {};
    bool closes = false;
    int32_t slot = -1;
    RequestState state = {};
    int32_t tail_slot = -1;

    // A step has mostly one row a request, row r of request r: its state is read beside the row.
    __device__ __forceinline__ Row(const CompressParams& p, int64_t row) {
        if (row >= p.batch.rows || p.batch.requests == 0) return;
        const int64_t likely = min(row, int64_t{p.batch.requests} - 1);
        const int64_t position = p.batch.positions[row], request = p.batch.row_request[row];
        slot = p.entry_slots[row];
        state = request_state(p, likely);
        if (p.tail.data != nullptr) tail_slot = p.batch.tail_slot[likely];
        if (!p.cos_sin.holds(position) || request < 0 || request >= p.batch.requests) return;
        if (request != likely) {
            state = request_state(p, request);
            if (p.tail.data != nullptr) tail_slot = p.batch.tail_slot[request];
        }
        closes = closes_entry(p, row, position, request, state, &entry);
    }
};

// Brings to the L2 what the step will read. Before the kernel in front has ended, so that what it
// reads itself may be old: a hint.
template <int kRatio>
__device__ __forceinline__ void fetch_ahead(const CompressParams& p, int64_t row, int rank,
                                            int lane) {
    const auto fetch = [&](const auto* from, int count) {
        for (int at = lane * 128; at < count * static_cast<int>(sizeof *from); at += 32 * 128)
            prefetch_l2(reinterpret_cast<const uint8_t*>(from) + at);
    };
    if (row < p.batch.rows) {
        const int64_t position = __ldcg(p.batch.positions + row);
        const int64_t request = __ldcg(p.batch.row_request + row);
        if constexpr (kRatio == 1) {
            fetch(p.kv_bf16.row(row), kHeadDim);
        } else {
            fetch(p.kv.row(row), kHeadDim);
            fetch(p.gate.row(row), kHeadDim);
        }
        fetch(p.entry_slots + row, 1);
        if (p.cos_sin.holds(position) && request >= 0 && request < p.batch.requests) {
            fetch(p.batch.start + request, 1);
            fetch(p.cos_sin.at(position / kRatio * kRatio), kRopeDims);
            if (kRatio == 2 && p.tail.data != nullptr && position > 0) {
                const int32_t slot = __ldcg(p.batch.tail_slot + request);
                if (slot >= 0 && slot < p.tail.slots) {
                    fetch(p.tail.kv(slot, position - 1), kHeadDim);
                    fetch(p.tail.gate(slot, position - 1), kHeadDim);
                }
            }
        }
    }
    if (!p.key_weight) return;
    for (int key = 0; key < kSlice; ++key) fetch(p.key_weight.row(rank * kSlice + key), kHeadDim);
}

// Two channels of a row of this call or of the tail.
struct Channels {
    float2 kv, gate;

    __device__ __forceinline__ void load(const float* kv_row, const float* gate_row, int c) {
        kv = *reinterpret_cast<const float2*>(kv_row + c);
        gate = *reinterpret_cast<const float2*>(gate_row + c);
    }
};

// Pooled values of channels c and c + 1 of the row's entry; own: those of the row itself.
__device__ __forceinline__ uint32_t pool_pair(const CompressParams& p, const Row& row,
                                              const Channels& own, int c) {
    const int64_t position = row.entry.position - 1;
    Channels before;
    if (position < row.state.start)
        before.load(p.tail.kv(row.tail_slot, position), p.tail.gate(row.tail_slot, position), c);
    else
        before.load(p.kv.row(row.entry.row - 1), p.gate.row(row.entry.row - 1), c);
    float pooled[2];
    pool_two<2>({before.kv.x, before.kv.y}, {own.kv.x, own.kv.y}, {before.gate.x, before.gate.y},
                {own.gate.x, own.gate.y}, pooled);
    return f32_to_bf16(pooled[0]) | static_cast<uint32_t>(f32_to_bf16(pooled[1])) << 16;
}

// Main record: lanes 8g .. 8g + 7 have the 16 values of a group. All lanes call.
__device__ __forceinline__ void write_main(const CompressParams& p, int32_t slot, int thread,
                                           uint32_t pair) {
    uint32_t largest = max_u32(pair & 0x7fffu, pair >> 16 & 0x7fffu);
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
        largest = max_u32(largest, __shfl_xor_sync(kAllLanes, largest, h));
    if (p.main.data == nullptr || !p.main.holds(slot)) return;
    const MainScales scales = main_scales(largest);
    uint32_t codes = e2m1_codes(make_uint4(pair, 0, 0, 0), scales.low_factor, 1.0f) & 0xffu;
    uint32_t scale = scales.bytes & 0xffu;
    if (largest >= 0x7f80u) {
        codes = 0;
        scale = kNanE4M3;
    }
    constexpr Record r = record(RecordId::MainFp4);
    p.main.row(r, slot)[thread] = static_cast<uint8_t>(codes);
    if (thread % 8 == 0) p.main.scales(r, slot)[thread / 8] = static_cast<uint8_t>(scale);
}

// Rows of the call over the tail row that this thread has read.
__device__ __forceinline__ void replace_row(const CompressParams& p, const Entry& e, int c) {
    replace_read_rows(p, e, [&](float* to_kv, float* to_gate, const float* kv, const float* gate) {
        *reinterpret_cast<float2*>(to_kv + c) = *reinterpret_cast<const float2*>(kv + c);
        *reinterpret_cast<float2*>(to_gate + c) = *reinterpret_cast<const float2*>(gate + c);
    });
}

// Main warps.
template <int kRatio>
__device__ __forceinline__ void make_latent(const CompressParams& p, Shared& shared, int64_t number,
                                            int rank) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, c = 2 * thread;
    Channels own;
    uint32_t pair = 0;
    if (number < p.batch.rows) {
        if constexpr (kRatio == 1)
            pair = *reinterpret_cast<const uint32_t*>(p.kv_bf16.row(number) + c);
        else
            own.load(p.kv.row(number), p.gate.row(number), c);
    }
    const float2 weight = *reinterpret_cast<const float2*>(p.norm_weight + c);
    const Row row(p, number);
    float cos = 0.f, sin = 0.f;
    if (row.closes) {
        if (c >= kHeadDim - kRopeDims) {  // the last warp
            const float* cos_sin = p.cos_sin.at(row.entry.index * kRatio) + lane;
            cos = cos_sin[0], sin = cos_sin[kRopeDims / 2];
        }
        if constexpr (kRatio == 2) pair = pool_pair(p, row, own, c);
        *reinterpret_cast<uint32_t*>(shared.pooled + c) = pair;
        cutlass::arch::NamedBarrier::sync(kMainThreads, kMainBarrier);
        float x[kHeadDim / 32];
#pragma unroll
        for (int i = 0; i < kHeadDim / 32; ++i) x[i] = bf16_to_f32(shared.pooled[lane + 32 * i]);
        const float factor = warp_rms_factor<kHeadDim>(x, p.eps);
        pair = canonical_bf16x2(pack_bf16(mul_rn(mul_rn(low_bf16(pair), factor), weight.x),
                                          mul_rn(mul_rn(high_bf16(pair), factor), weight.y)));
    }
    if (p.key_weight) {  // of a row without an entry: anything
#pragma unroll
        for (int to = 0; to < kRows; ++to)
            send(pair, shared.latents[rank] + c, shared.latents_filled, to);
    }
    if (!row.closes) return;
    if (p.latent_out) *reinterpret_cast<uint32_t*>(p.latent_out.row(number) + c) = pair;
    if (c >= kHeadDim - kRopeDims) {
        float a, b;
        rope_pair(low_bf16(pair), high_bf16(pair), cos, sin, &a, &b);
        pair = pack_bf16(a, b);
    }
    write_main(p, row.slot, thread, pair);
    if (kRatio == 2 && p.tail.data != nullptr) replace_row(p, row.entry, c);
}

// The block's keys of all rows, to the blocks of the rows. Operand rows are keys, columns rows of
// the batch; the order of the sums is that of projection.cuh.
__device__ __forceinline__ void project(Shared& shared, int rank, int lane) {
    const uint16_t* weights = shared.weight[lane % kSlice] + lane / kSlice * 8;
    const uint16_t* latents = shared.latents[lane % kRows] + lane / kRows * 8;
    float sums[kMmaChains][4] = {};
#pragma unroll
    for (int b = 0; b < kMmaBlocks; b += 2) {
        uint32_t x[4];
        load_matrices(latents + b * kMmaChannels, x);
#pragma unroll
        for (int i = 0; i < kMmaChains; ++i) {
            uint32_t w[4];
            load_matrices(weights + (b + i) * kMmaChannels, w);
            float (&acc)[4] = sums[i];
            cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(acc[0], acc[1], acc[2], acc[3], w[0], w[1],
                                                      w[2], w[3], x[2 * i], x[2 * i + 1], acc[0],
                                                      acc[1], acc[2], acc[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float key = round_bf16(add_rn(sums[0][i], sums[1][i]));
        send(float_bits(key), shared.key + rank * kSlice + lane / 4 + i / 2 * 8, shared.key_filled,
             lane % 4 * 2 + i % 2);
    }
}

// Key warp.
template <int kRatio>
__device__ __forceinline__ void make_key(const CompressParams& p, Shared& shared, int64_t number,
                                         int rank, int lane) {
    if (cute::elect_one_sync()) {
        const uint16_t* from = p.key_weight.row(rank * kSlice);
#pragma unroll
        for (int i = 0; i < kSlice; ++i) {
            cute::SM90_BULK_COPY_G2S::copy(from + i * p.key_weight.stride,
                                           reinterpret_cast<uint64_t*>(&shared.weight_filled),
                                           shared.weight[i], kHeadDim * sizeof(uint16_t));
        }
    }
    __syncwarp();
    const float4 weight = *reinterpret_cast<const float4*>(p.key_norm_weight + 4 * lane);
    const Row row(p, number);
    const bool stores = row.closes && p.index.data != nullptr && p.index.holds(row.slot);
    KeyTurn turn;
    if (stores) turn.load(p.cos_sin.at(row.entry.index * kRatio), lane);
    shared.weight_filled.wait(0);
    shared.latents_filled.wait(0);
    project(shared, rank, lane);
    shared.key_filled.wait(0);  // no block ends before all that comes for it
    if (!stores) return;
    write_key(p, row.slot, lane, norm_key(shared.key, weight, p.eps, lane), turn);
}

template <int kRatio>
__global__ void __launch_bounds__(kThreads, 2) steps_kernel(CompressParams p) {
    __shared__ __align__(128) uint8_t bytes[sizeof(Shared)];
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int rank = static_cast<int>(cute::block_rank_in_cluster());
    const int64_t row = blockIdx.x;
    p.ratio = kRatio;
    p.overlap = false;
    allow_dependents();
    if (threadIdx.x == 0) shared.init();
    cute::cluster_arrive_relaxed();
    if (warp > kKeyWarp) fetch_ahead<kRatio>(p, row, rank, lane);
    cute::cluster_wait();
    wait_for_previous();
    if (warp < kKeyWarp) {
        make_latent<kRatio>(p, shared, row, rank);
    } else if (warp == kKeyWarp) {
        if (p.key_weight) make_key<kRatio>(p, shared, row, rank, lane);
    } else if (kRatio == 2 && p.tail.data != nullptr && row < p.batch.rows && keeps_row(p, row)) {
        keep_row(p, row, lane, 32);
    }
}

}  // namespace

cudaError_t compress_steps(const CompressParams& p, cudaStream_t stream) {
    const int64_t clusters = (int64_t{p.batch.rows} + kRows - 1) / kRows;
    return launch_clusters(p.ratio == 1 ? steps_kernel<1> : steps_kernel<2>, clusters, kRows,
                           kThreads, 0, stream, p);
}

}  // namespace flash_csa::sm90
