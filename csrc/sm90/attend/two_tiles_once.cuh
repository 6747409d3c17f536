// Parts of few_rows.cu with 32 heads: CTAs that have no more than two tiles take them at once.
//
// Records come straight into registers, and every step is done once, by all warps, on up to 128
// records: dequantised | logits, a warpgroup half the dims of a tile | softmax | values of 128
// dims.
#pragma once

#include "sm90/attend/two_tiles_narrow.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

struct SharedOnce {
    static constexpr int kHeads = 32, kTiles = 2, kHalves = 2;
    static constexpr int32_t kMostPieces = 11;  // that the inbox has room for

    alignas(1024) uint8_t kv[kTiles][kPanels][kTile][kPanelRowBytes];  // as in Shared
    uint8_t q[kPanels][kHeads][kPanelRowBytes];
    float logits[kHalves][kHeads][kTiles * kTile + 4];  // over half the dims
    alignas(1024) uint8_t p[kTiles][kHeads][kPanelRowBytes];
    float sink[kHeads];
    float levels[kMostPieces][kHeads];   // as in Shared
    uint8_t present[kTiles][kTile / 8];  // a bit per record
    cutlass::arch::ClusterTransactionBarrier levels_there, received[kGroups];

    // What this CTA adds up, from when the logits have been read.
    __device__ uint8_t* inbox() { return q[0][0]; }
};
static_assert(sizeof(SharedOnce) <= 227 * 1024);
static_assert(SharedOnce::kHeads * kHeadDim * 3 + (SharedOnce::kMostPieces - 1) * 1536 <=
              offsetof(SharedOnce, p) - offsetof(SharedOnce, q));

struct Once : NarrowOutput<32, Part<32, SharedOnce>> {
    static constexpr int kHeads = 32, kTiles = SharedOnce::kTiles, kHalves = SharedOnce::kHalves;
    static constexpr int kEach = kTiles * kTile / kLanes;  // records of a thread in the softmax
    static constexpr int kVector = 4;                      // of them in a row
    static_assert(kTiles * kHalves == kGroups && kTile == kLanes * kVector);

    struct Loaded {
        Query<kHeads> query;
        Units units[kTiles];
        const int32_t* slots[kTiles];  // of the thread's records
        int32_t early_slots[kTiles];
    };

    using NarrowOutput::NarrowOutput;

    __device__ void init() const {}

    // What is known before the previous kernel has ended is found before.
    __device__ __forceinline__ void ask(Loaded& loaded) const {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            loaded.slots[t] = slot_of_unit(t);
            loaded.early_slots[t] = early_slot(t, loaded.slots[t]);
        }
        prefetch();
        loaded.slots[0] = with_lengths(loaded.slots[0]);
    }
    __device__ __forceinline__ void start(Loaded& loaded) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) prefetch_window_unit(loaded.early_slots[t]);
        wait_for_previous();
        int32_t slot[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) slot[t] = load_slot(loaded.slots[t]);
        load_sink();
        loaded.query.load(p, row, first_head);  // while slots are on their way
        slot[0] = take_lengths(slot[0]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) load_units(t, slot[t], loaded.units[t]);
    }

    __device__ __forceinline__ void multiply_logits() {
        const int tile = group % kTiles, half = group / kTiles;
        if (tile >= end) return;
        constexpr int kEachPanels = kPanels / kHalves;
        float d[kFragment];
        start_logits<kHeads, kEachPanels>(shared.kv[tile] + half * kEachPanels,
                                          shared.q + half * kEachPanels, d);
        cute::warpgroup_wait<0>();
        fence_registers(d);
        store_logits(d, shared.logits[half], tile * kTile);
    }

    // Weights of all records, for all warps.
    __device__ __forceinline__ void softmax() {
        const int head = softmax_head(), first = lane % kLanes * kVector;  // record of each tile
        const float scale = p.softmax_scale * (kTileFactor * kLog2e);
        float x[kEach];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const auto part = [&](int half) {
                return *reinterpret_cast<const float4*>(
                    &shared.logits[half][head][t * kTile + first]);
            };
            const float4 a = part(0), b = part(1);
            const float logits[] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
            const uint32_t there = shared.present[t][first / 8] >> first % 8;
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                x[t * kVector + i] = there >> i & 1 ? logits[i] * scale : -INFINITY;
        }
        sum = weigh_head<kLanes, kVector>(x, max, [&](int i) {
                  return weight_place(shared.p[i / kVector][0], head, first);
              }).total;
    }

    __device__ __forceinline__ void start_values() {
        const uint64_t kv = mn_major(shared.kv[0][kGroupPanels * group], 0);
        const uint64_t weights = k_major(shared.p);
        fence_registers(out);
        cute::warpgroup_arrive();
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if (t >= end) break;
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
                for (int m = 0; m < kGroupPanels; ++m)
                    multiply_values<kHeads>(
                        advance(kv, t * int{sizeof shared.kv[0]} + m * kPanelBytes +
                                        16 * k * kPanelRowBytes),
                        advance(weights, t * int{sizeof shared.p[0]} + 32 * k), out[m],
                        t > 0 || k > 0);
            }
        }
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void run(const Loaded& loaded) {
        loaded.query.store(shared);
        store_sink();
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            if (t < end) write_units(t, loaded.units[t], shared.kv[t]);
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
        multiply_logits();
        __syncthreads();
        softmax();
        cutlass::arch::fence_view_async_shared();
        tell_all();  // behind the fence, which would wait
        __syncthreads();
        cluster_arrive_relaxed();  // what peers send may come
#pragma unroll
        for (auto& panel : out)
            for (float& x : panel) x = 0.f;
        start_values();
        find_factor<kLanes>(softmax_head(), max);
        cute::warpgroup_wait<0>();
        fence_registers(out);
    }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
