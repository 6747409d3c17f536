// Compression of long steps of ratio 1, where every token is an entry, to MainFp4 and IndexFp4
// records.
//
//   in   kv, batch, slots, weights     out  main and index pages, latent_out
//
// A block works on tiles of 64 latents. Each half of them has key warps of its own:
//   look up  2 warps: what the rows of a half close, a row a lane
//   finish   16 warps copy two rows each -> norm -> latents to a half, RoPE -> main records
//   keys     2 x 4 warps: half -> wgmma -> norm -> RoPE -> index records
// Timeline:
//   finish   | 0 | 1 | 2 | 3 ...            rows of the next half come while one is encoded
//   keys 0       | wgmma 0, records 0   | wgmma 2, records 2
//   keys 1           | wgmma 1, records 1   | wgmma 3 ...
// Floor: 1 KiB an entry, and 356 bytes out.
#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/prefetch.cuh"
#include "sm90/compress/finish_units.cuh"
#include "sm90/compress/key_halves.cuh"
#include "sm90/compress/look_up.cuh"
#include "sm90/compress/places.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kHalves = 2;
constexpr int kTables = 2 * kHalves;
constexpr int kRowBytes = kHeadDim * sizeof(uint16_t);

// Warps, and registers of a thread. None spills.
constexpr int kKeyWarps = kHalves * kKeyThreads / 32, kFinishWarps = kHalfTile / kHalfUnit;
constexpr int kLookUpWarps = kHalves, kFeedWarps = 4;  // a warpgroup gives its registers
constexpr int kKeyRegisters = 96, kFinishRegisters = 72, kFeedRegisters = 24;
constexpr int kLaunchRegisters = 72;
constexpr int kThreads = 32 * (kKeyWarps + kFinishWarps + kFeedWarps);

// An entry of a half, and the place of its main record.
struct alignas(16) Token {
    uint8_t* main;  // null: none
    int32_t slot;
    int32_t rotation;  // its position; -1: none, nothing is stored
};

struct TokensShared {
    alignas(1024) uint8_t weight[kPanels][kIndexDim * kPanelRowBytes];
    alignas(1024) uint8_t latents[kHalves][kPanels][kHalfTile * kPanelRowBytes];
    PairedRows<kHalfTile> rows;  // of the finish warps
    Token tables[kTables][kHalfTile];
    alignas(16) float key_norm_weight[kIndexDim];
    ClusterTransactionBarrier full[kFinishWarps];  // rows of a finish warp
    ClusterTransactionBarrier table_full[kTables], table_empty[kTables];
    ClusterTransactionBarrier half_full[kHalves];   // latents are there
    ClusterTransactionBarrier half_empty[kHalves];  // multiplied

    // All threads of a warp arrive, each behind its own accesses.
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kFinishWarps; ++i) full[i].init(1);
        for (int i = 0; i < kTables; ++i) {
            table_full[i].init(kHalfTile);
            table_empty[i].init(32 * kFinishWarps + kKeyThreads);
        }
        for (int i = 0; i < kHalves; ++i) {
            half_full[i].init(32 * kFinishWarps);
            half_empty[i].init(kKeyThreads);
        }
        cutlass::arch::fence_barrier_init();
    }
};
static_assert(sizeof(TokensShared) <= 227 * 1024);

// The first row of the block's half number n.
__device__ __forceinline__ uint32_t half_row(uint32_t n) {
    return (blockIdx.x + n * gridDim.x) * kHalfTile;
}

// What the first halves need, on its way to the L2.
__device__ __forceinline__ void prefetch_first(const CompressParams& p, int thread) {
    constexpr int kLine = 128, kRowLines = kRowBytes / kLine;
    const int n = thread / (kHalfTile * kRowLines);
    if (n < kHalves) {
        const uint32_t row = half_row(n) + thread / kRowLines % kHalfTile;
        if (!in_batch(p, row)) return;
        prefetch_l2(p.kv_bf16.row(row) + thread % kRowLines * (kLine / sizeof(uint16_t)));
    } else if (in_batch(p, half_row(thread % kHalves))) {
        const uint32_t row = half_row(thread % kHalves);
        const int list = thread / kHalves % 4;
        if (list == 0) prefetch_l2(p.batch.positions + row);
        if (list == 1) prefetch_l2(p.batch.row_request + row);
        if (list == 2) prefetch_l2(p.entry_slots + row);
        if (list == 3) prefetch_l2(p.batch.start);
    }
}

// One warp, every second half.
__device__ __forceinline__ void look_up(const CompressParams& p, const Places& main,
                                        TokensShared& shared, int number, int lane) {
    for (uint32_t n = number; in_batch(p, half_row(n)); n += kLookUpWarps) {
        const uint32_t buffer = n % kTables;
        const Item item = find_item(p, half_row(n) + lane);
        const Token token = {main.find(record(RecordId::MainFp4), item.slot), item.slot,
                             item.row < 0 ? -1 : item.rotation};
        wait_empty(shared.table_empty[buffer], n / kTables);
        shared.tables[buffer][lane] = token;
        shared.table_full[buffer].arrive();
    }
}

// Starts the copies of a finish warp's rows, from `row` on; none behind the last one.
__device__ __forceinline__ void copy_rows(const CompressParams& p, TokensShared& shared, int warp,
                                          uint32_t row) {
    if (!cute::elect_one_sync()) return;
    const int there = min(max(p.batch.rows - static_cast<int>(row), 0), kHalfUnit);
    auto& full = shared.full[warp];
    full.arrive_and_expect_tx(there * kRowBytes);
    auto* const bar = reinterpret_cast<uint64_t*>(&full);
#pragma unroll
    for (int e = 0; e < kHalfUnit; ++e) {
        if (e < there)
            cute::SM90_BULK_COPY_G2S::copy(p.kv_bf16.row(row + e), bar,
                                           shared.rows.row(kHalfUnit * warp + e), kRowBytes);
    }
}

__device__ __forceinline__ void finish_rows(const CompressParams& p, TokensShared& shared, int warp,
                                            int lane) {
    float weight[kGroup];
    load_norm_weight(p, lane, weight);
    const int own = kHalfUnit * warp;
    const TwoRows rows = {{shared.rows.row(own), shared.rows.row(own + 1)}};
    uint32_t row = half_row(0) + own;
    copy_rows(p, shared, warp, row);
#pragma unroll 1
    for (uint32_t n = 0; in_batch(p, row - own); ++n) {
        const uint32_t half = n % kHalves;
        wait_full(shared.table_full[n % kTables], n / kTables);
        const Token* tokens = shared.tables[n % kTables] + own;
        HalfUnit unit;
        const int32_t position = tokens[lane / 16].rotation;
        const bool filled = __any_sync(kAllLanes, position >= 0);
        Rotation rotation = {};
        if (filled) rotation.load(p, max(position, 0), lane);
        wait_full(shared.full[warp], n);
        if (filled) {
            unit.norm(p, rows, weight, lane);
            if (p.latent_out) {
                const int32_t closing = static_cast<int32_t>(row) + lane / 16;
                unit.write_out(p, position < 0 ? -1 : closing, lane);
            }
        }
        wait_empty(shared.half_empty[half], n / kHalves);
        if (filled) {
            unit.write(TilePlaces(shared.latents[half], own, lane));
            unit.rotate(rotation, rows, lane);
        }
        cutlass::arch::fence_view_async_shared();  // products read, and rows are copied
        shared.half_full[half].arrive();
        __syncwarp();
        row += gridDim.x * kHalfTile;
        copy_rows(p, shared, warp, row);
        if (filled) unit.store([&](int e) { return tokens[e].main; }, fresh(lane));
        shared.table_empty[n % kTables].arrive();
    }
}

// A warpgroup: every second half, number `half` first.
__device__ __forceinline__ void key_halves(const CompressParams& p, const RecordPlaces& places,
                                           TokensShared& shared, uint32_t half, int thread) {
    const bool keyed = static_cast<bool>(p.key_weight);
    if (keyed) {
        constexpr int kLoaders = 32 * kKeyWarps;
        load_rows<kLoaders>(p, shared.weight, static_cast<int>(half) * kKeyThreads + thread);
        shared.key_norm_weight[thread] = p.key_norm_weight[thread];
        wait_for_weight<kLoaders>();
    }
    const int lane = thread % 32;
#pragma unroll 1
    for (uint32_t n = half; in_batch(p, half_row(n)); n += kHalves) {
        Keys<1> keys = {};
        wait_full(shared.half_full[half], n / kHalves);
        if (keyed)
            project_half(shared.weight, shared.latents[half], kKeyBarrier + 1 + half, thread, keys);
        shared.half_empty[half].arrive();
        const Token token = shared.tables[n % kTables][thread / 32 * kCoreRows + lane / 4];
        const Item items[1] = {{0, token.slot, max(token.rotation, 0), 0}};
        shared.table_empty[n % kTables].arrive();
        if (!keyed || !__any_sync(kAllLanes, places.index.holds(items[0].slot))) continue;
        turn_keys<1>(p, shared.key_norm_weight, items, lane % 4, keys);
        store_keys<1>(places, keys, items, lane % 4);
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    tokens_kernel(CompressParams p, const __grid_constant__ RecordPlaces places) {
    extern __shared__ __align__(1024) uint8_t dynamic[];
    auto& shared = *reinterpret_cast<TokensShared*>(dynamic);
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = __shfl_sync(kAllLanes, thread / 32, 0), lane = thread % 32;
    p.ratio = 1;
    if (thread == 0) shared.init();
    __syncthreads();
    allow_dependents();
    prefetch_first(p, thread);
    wait_for_previous();
    if (warp < kKeyWarps) {
        set_registers<kKeyRegisters, kLaunchRegisters>();
        key_halves(p, places, shared, warp / 4, thread % kKeyThreads);
    } else if (warp < kKeyWarps + kFinishWarps) {
        set_registers<kFinishRegisters, kLaunchRegisters>();
        finish_rows(p, shared, warp - kKeyWarps, lane);
    } else {
        set_registers<kFeedRegisters, kLaunchRegisters>();
        const int number = warp - kKeyWarps - kFinishWarps;
        if (number < kLookUpWarps) look_up(p, places.main, shared, number, lane);
    }
}

}  // namespace

cudaError_t compress_tokens(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int halves = (p.batch.rows + kHalfTile - 1) / kHalfTile;
    const dim3 grid(static_cast<unsigned>(std::min(halves, num_sms)));
    return launch_after(tokens_kernel, grid, kThreads, sizeof(TokensShared), stream, p,
                        RecordPlaces{Places(p.main), Places(p.index)});
}

}  // namespace flash_csa::sm90
