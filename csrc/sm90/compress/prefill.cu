// Compression of long steps of ratio 2 to MainFp4 and IndexFp4 records.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// A block works on tiles of 64 entries, in three roles:
//   pool     8 warps pool rows, BF16, 4 entries at a time to a slot of their own
//   finish   slot -> norm -> latent to the tile, RoPE -> main record
//   keys     tile -> wgmma -> norm -> RoPE -> index record; they look up entries as well
// Timeline of two tiles:
//   pool     | 0 | 1 | 2 ...                rows are on their way all the time
//   finish       | 0 | 1 | 2 ...            encodes while the keys of the tile are multiplied
//   keys             | wgmma 0, records 0 | wgmma 1, records 1
// Floor: 8 KiB an entry, and 356 bytes out.
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/compress/finish_units.cuh"
#include "sm90/compress/pool_units.cuh"

namespace flash_csa::sm90 {
namespace {

// Latents go to the tile before they are encoded, so that the key warps multiply meanwhile.
__device__ __forceinline__ void finish_units(const CompressParams& p, const Places& main,
                                             PairsShared& shared, int warp, int lane) {
    float weight[kGroup];
    load_norm_weight(p, lane, weight);
    const int half = warp % 2 * kHalfUnit;  // two warps share a unit
#pragma unroll 1
    for (uint32_t u = warp / 2;; u += kFinishWarps / 2) {
        const uint32_t tile = u / kTileUnits;
        if (!has_table(shared, tile)) return;
        const int first = unit_row(u) + half;
        const Item* items = shared.tables[tile % kTables] + first;
        const TwoRows rows = {{shared.unit(u % kSlots, half), shared.unit(u % kSlots, half + 1)}};
        HalfUnit unit;
        const Item item = items[lane / 16];
        const bool filled = __any_sync(kAllLanes, item.row >= 0);
        Rotation rotation = {};
        if (filled) rotation.load(p, item.rotation, lane);
        wait_full(shared.full[u % kSlots], u / kSlots);
        if (filled) {
            unit.norm(p, rows, weight, lane);
            if (p.latent_out) unit.write_out(p, item.row, lane);
        }
        wait_empty(shared.tile_empty, tile);
        if (filled) unit.write(TilePlaces(shared.latents, first, fresh(lane)));
        cutlass::arch::fence_view_async_shared();
        shared.tile_full.arrive();
        if (filled) unit.rotate(rotation, rows, lane);
        shared.empty[u % kSlots].arrive();
        if (!filled) continue;
        const uint64_t own =
            reinterpret_cast<uint64_t>(main.find(record(RecordId::MainFp4), item.slot));
        const auto place = [&](int e) {
            return reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, own, 16 * e));
        };
        unit.store(place, fresh(lane));
    }
}

__device__ __forceinline__ void key_tiles(const CompressParams& p, const RecordPlaces& places,
                                          PairsShared& shared, int warp, int lane) {
    const int thread = 32 * warp + lane;
    const bool keyed = static_cast<bool>(p.key_weight);
    if (keyed) {
        load_weight<kKeyThreads>(p, shared, 0, thread);
        if (thread < kIndexDim) shared.key_norm_weight[thread] = p.key_norm_weight[thread];
    }
    RowTables tables;
    for (uint32_t tile = 0;; ++tile) {
#pragma unroll 1
        while (tables.number < tile + kTables && tables.more)
            tables.write(p, shared, fresh(thread));
        if (!has_table(shared, tile)) break;
        const Item* own = shared.tables[tile % kTables] + 16 * warp + lane / 4;
        const Item items[2] = {own[0], own[8]};
        Keys<2> keys = {};
        if (keyed) {
            const auto ready = [&](int first) {
                wait_for_weight<kKeyThreads>();
                if (first == 0) wait_full(shared.tile_full, tile);
            };
            const auto done = [&](int first) {
                if (first + kKeyColumns == kIndexDim) shared.tile_empty.arrive();
                cutlass::arch::NamedBarrier::sync(kKeyThreads, kKeyBarrier);
                load_weight<kKeyThreads>(p, shared, kIndexDim / 2 - first, fresh(thread));
            };
            project_tile(shared, keys, ready, done);
        } else {
            wait_full(shared.tile_full, tile);
            shared.tile_empty.arrive();
        }
        const bool any = places.index.holds(items[0].slot) || places.index.holds(items[1].slot);
        if (!keyed || !__any_sync(kAllLanes, any)) continue;
        turn_keys<2>(p, shared.key_norm_weight, items, lane % 4, keys);
        store_keys<2>(places, keys, items, lane % 4);
    }
    wait_for_copies();
}

__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(CompressParams p, const __grid_constant__ RecordPlaces places) {
    extern __shared__ __align__(1024) uint8_t dynamic[];
    auto& shared = *reinterpret_cast<PairsShared*>(dynamic);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    p.ratio = 2;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    allow_dependents();
    if (warp < kPoolWarps) prefetch_first_rows(p, warp, lane);
    if (warp == kPoolWarps) prefetch_first_lists(p, lane);
    wait_for_previous();
    if (warp < kPoolWarps) {
        set_registers<kPoolRegisters, kLaunchRegisters>();
        pool_units(p, shared, warp, lane);
    } else if (warp < kPoolWarps + kFinishWarps) {
        set_registers<kFinishRegisters, kLaunchRegisters>();
        finish_units(p, places.main, shared, warp - kPoolWarps, lane);
    } else {
        set_registers<kKeyRegisters, kLaunchRegisters>();
        key_tiles(p, places, shared, warp - kPoolWarps - kFinishWarps, lane);
    }
}

}  // namespace

cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int tiles = (p.batch.rows + kTileRows - 1) / kTileRows;
    const dim3 grid(static_cast<unsigned>(std::min(tiles, num_sms)));
    return launch_after(prefill_kernel, grid, kThreads, sizeof(PairsShared), stream, p,
                        RecordPlaces{Places(p.main), Places(p.index)});
}

}  // namespace flash_csa::sm90
