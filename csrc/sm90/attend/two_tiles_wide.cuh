// Parts of few_rows.cu with 64 heads: 64 heads of a row.
//
// Heads are on M of both products, so that a quad of lanes has the logits of a head: one warpgroup
// multiplies and finds the weights in its registers while the others dequantise the next tile but
// one. It holds half of the query in registers, which the others leave to it: in that half's place
// records of every other tile arrive, so that the copies of two tiles are on their way.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90.hpp>

#include "sm90/attend/lag.cuh"
#include "sm90/attend/two_tiles_share.cuh"
#include "sm90/common/mma.h"

namespace flash_csa::sm90::few_rows::two_tiles {

struct Wide : Sharing<64, Part<64, Shared<64>>> {
    static constexpr int kHeads = 64;
    // Of a thread, while the first warpgroup multiplies.
    static constexpr int kRegisters = 65536 / kThreads, kMultiplierRegisters = 200,
                         kMakerRegisters = 104;
    static_assert(kMultiplierRegisters + 3 * kMakerRegisters <= 4 * kRegisters);
    static constexpr float kLeastScale = 1e-30f;
    static constexpr int kUnitDims = 32;  // of a unit of the output
    // A named barrier behind those of `share`: the last tile is added by half of the warpgroups.
    static constexpr int kHalfAdded = kTurn + kGroups;
    static constexpr int kMakers = kWarps - 4;  // warps that do
    // The last of them start copies, as they have fewer units.
    static constexpr int kCopiers = Shared::kCopiers, kFirstCopier = kWarps - kCopiers;
    static constexpr int kRecords = kTile / kCopiers;

    using Main = Reader<RecordId::MainFp4>;
    // Units of a tile of 8 records and 128 dims (FP4): those of a warp.
    static constexpr int kUnits = kTile / 8 * kGroups,
                         kEachUnits = (kUnits + kMakers - 1) / kMakers;
    static_assert(kUnits - (kEachUnits - 1) * kMakers <= kMakers - kCopiers);

    struct Loaded {
        Query<kHeads> query;
        Units units;
        const int32_t* slot;  // of the thread's record of the first tile
        int32_t early_slot;
    };

    // Of heads head() and head() + 8. Output: of 8 neighbouring dims j in paired order, places
    // 2 (lane % 4) and the next are 4 j and 4 j + 1 of the first head, 4 j + 2 and 4 j + 3 of the
    // other. sum: of the lane's records.
    float out[64];
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, keep[2];
    int32_t next_slot;  // of the copiers' lanes: of the tile that is copied next

    using Sharing::Sharing;

    __device__ void init() const {
        for (auto& barrier : shared.arrived) barrier.init(kCopiers);
        shared.held.init(kWarpgroup);
        shared.weights_known.init(kWarpgroup);
        shared.added.init(kThreads);
    }

    // ---- Tiles

    __device__ auto& kv_of(int32_t tile) const { return shared.kv[(end - 1 - tile) & 1]; }
    __device__ bool copies() const { return warp >= kFirstCopier; }
    // Of the main list: only the first tile may be of the window.
    __device__ int32_t entry_of(int32_t tile) const {
        return (in_row(tile) - plan.window_tiles) * kTile + (warp - kFirstCopier) * kRecords + lane;
    }
    __device__ __forceinline__ const int32_t* slot_of(int32_t tile) const {
        const int32_t entry = entry_of(tile);
        const bool asks = tile < end && lane < kRecords && entry < p.main.columns;
        return asks ? p.main.slots.row(row) + entry : nullptr;
    }

    // Records of tiles after the first, as they are in memory, in two places in turns.
    __device__ uint8_t* raw(int32_t tile) const { return tile & 1 ? shared.raw : shared.q[0][0]; }
    __device__ auto& arrived(int32_t tile) const { return shared.arrived[tile & 1]; }
    __device__ __forceinline__ void wait_for_records(int32_t tile) const {
        arrived(tile).wait((tile - 1) / 2 & 1);
    }
    // Starts the copies of a tile after the first; for what is not there, of another record.
    __device__ __forceinline__ void start_tile(int32_t tile, int32_t slot) const {
        const Places& places = plan.main;
        const bool there = entry_of(tile) < main_length && places.holds(slot);
        const uint32_t present = __ballot_sync(~0u, there && lane < kRecords);
        const int32_t other = __shfl_sync(~0u, slot, __ffs(present) - 1);
        const uint64_t from = reinterpret_cast<uint64_t>(places.row(there ? slot : other));
        const int first = (warp - kFirstCopier) * kRecords;
        uint8_t* to = raw(tile) + Main::place(first);
        const bool elected = cute::elect_one_sync();
        if (elected) {
            *reinterpret_cast<uint16_t*>(&shared.present[tile & 3][first / 8]) =
                static_cast<uint16_t>(present);
            arrived(tile).arrive_and_expect_tx(present == 0 ? 0 : kRecords * kMain.bytes());
        }
        if (present == 0) return;
#pragma unroll
        for (int i = 0; i < kRecords; i += 4) {
            uint64_t records[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) records[j] = __shfl_sync(~0u, from, i + j);
            if (!elected) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                cute::SM90_BULK_COPY_G2S::copy(reinterpret_cast<const void*>(records[j]),
                                               reinterpret_cast<uint64_t*>(&arrived(tile)),
                                               to + Main::place(i + j), kMain.bytes());
        }
    }

    // What is known before the previous kernel has ended is found before.
    __device__ __forceinline__ void ask(Loaded& loaded) const {
        prefetch();
        loaded.slot = slot_of_unit(0);
        loaded.early_slot = early_slot(0, loaded.slot);
    }
    __device__ __forceinline__ void start(Loaded& loaded) {
        const int32_t* slots[] = {loaded.slot, nullptr, nullptr};
        if (copies()) slots[1] = slot_of(1), slots[2] = slot_of(2);
        prefetch_window_unit(loaded.early_slot);
        wait_for_previous();
        const int32_t first_slot = load_slot(slots[0]), second_slot = load_slot(slots[1]);
        next_slot = load_slot(slots[2]);
        load_sink();
        loaded.query.load(p, row, first_head);  // while slots are on their way
        load_lengths();
        if (threadIdx.x == 0) shared.cos_sin = cos_sin;  // there is no register for it
        load_units(0, first_slot, loaded.units);
        if (end > 1 && copies()) start_tile(1, second_slot);
    }

    // A maker's codes of a tile.
    using Made = Codes[kEachUnits];
    __device__ int unit(int i) const { return fresh(warp) - 4 + i * kMakers; }
    __device__ int record(int unit) const { return unit % (kTile / 8) * 8 + fresh(lane) % 8; }
    __device__ bool is_present(int32_t tile, int record) const {
        return shared.present[tile & 3][record / 8] >> record % 8 & 1;
    }
    __device__ __forceinline__ void read(int32_t tile, Made& made) const {
        wait_for_records(tile);
#pragma unroll
        for (int i = 0; i < kEachUnits; ++i) {
            if (unit(i) >= kUnits) break;
            const int r = record(unit(i));
            made[i] = Main::read(raw(tile) + Main::place(r), unit(i) / (kTile / 8), lane, 0);
            if (!is_present(tile, r)) made[i] = {};
        }
    }
    __device__ __forceinline__ void write(int32_t tile, const Made& made) const {
#pragma unroll
        for (int i = 0; i < kEachUnits; ++i) {
            if (unit(i) >= kUnits) break;
            Main::write(made[i], lane, 0, record(unit(i)),
                        kv_of(tile)[kGroupPanels * (unit(i) / (kTile / 8))][0]);
        }
    }
    // All warps have added a tile's values.
    __device__ __forceinline__ void wait_for_values(int32_t tile) const {
        if (tile >= 0) shared.added.wait(tile & 1);
    }

    // ---- Products

    __device__ int head() const { return 16 * (warp % 4) + lane / 4; }

    // The first half of the query, which is not read again for each tile: records come to its
    // place.
    static constexpr int kHeldPanels = kPanels / 2;
    using Held = FragmentA[kHeldPanels * 4];
    static_assert(Main::kTileBytes <= kHeldPanels * kHeads * kPanelRowBytes);
    __device__ __forceinline__ void hold(Held& held) const {
        const int row = 16 * warp + lane % 16;
#pragma unroll
        for (int k = 0; k < kHeldPanels * 4; ++k)
            load_matrices(shared.q[k / 4][0] + panel_offset(row, k % 4 * 2 + lane / 16), held[k]);
        cutlass::arch::fence_view_async_shared();
        shared.held.arrive();
    }
    // d: of head() and of 8 neighbouring records j, those from 2 (lane % 4) on, as in `out`.
    __device__ __forceinline__ void start_logits(int32_t tile, const Held& held,
                                                 float (&d)[32]) const {
        const uint64_t q = fresh(k_major(shared.q[kHeldPanels]));
        const uint64_t kv = fresh(k_major(kv_of(tile)));
        cute::warpgroup_arrive();
        // In turns: every other product reads half as much of the shared memory.
#pragma unroll
        for (int k = 0; k < kHeldPanels * 4; ++k) {
            const int at = k / 4 * kPanelBytes + k % 4 * 32;
            multiply_64x64(held[k], advance(kv, at), d, k > 0);
            multiply_64x64(advance(q, k / 4 * int{sizeof shared.q[0]} + k % 4 * 32),
                           advance(kv, kHeldPanels * kPanelBytes + at), d, true);
        }
        cute::warpgroup_commit_batch();
    }

    // Logits into weights; true where those of earlier tiles shrink.
    __device__ __forceinline__ bool softmax(int32_t tile, float scale, float (&x)[32]) {
        const uint2 there = *reinterpret_cast<const uint2*>(shared.present[tile & 3]);
        if ((there.x & there.y) != ~0u) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const uint32_t eight = (i < 16 ? there.x : there.y) >> lane % 4 * 2;
                if ((eight >> (i / 4 % 4 * 8 + i % 2) & 1) == 0) x[i] = -INFINITY;
            }
        }
        float largest[2] = {x[0], x[2]};
#pragma unroll
        for (int i = 1; i < 32; ++i)
            if (i != 2) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i]);
        // A head's logits are in one warp.
        const bool over =
            largest[0] * scale > max[0] + kSlack || largest[1] * scale > max[1] + kSlack;
        const bool raised = __any_sync(~0u, over);
        keep[0] = keep[1] = 1.f;
        if (raised) raise(largest, scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = max[half] == -INFINITY ? 0.f : max[half];
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i / 2 % 2 == half) x[i] = exp2_approx(__fmaf_rn(x[i], scale, -base));
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            sum[0] += x[i] + x[i + 1];
            sum[1] += x[i + 2] + x[i + 3];
        }
        return raised;
    }
    __device__ __forceinline__ void raise(float (&largest)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int h = 1; h < 4; h *= 2)
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], h));
            // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
            const float before = max[half], most = largest[half] * scale;
            if (most > before + kSlack) max[half] = most;
            const float base = max[half] == -INFINITY ? 0.f : max[half];
            keep[half] = exp2_approx(before - base);
            sum[half] *= keep[half];
        }
    }

    // Of four 8 x 8 blocks (head, record) a lane addresses row lane % 8 of block lane / 8: heads
    // from 0 or 8 on, then the same of the next 8 records.
    __device__ __forceinline__ void store_weights(const float (&x)[32]) const {
        const int lane = fresh(this->lane);
        const int at = panel_offset(16 * warp + lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            cute::SM90_U32x4_STSM_N::copy(
                pack_bf16(x[8 * k], x[8 * k + 1]), pack_bf16(x[8 * k + 2], x[8 * k + 3]),
                pack_bf16(x[8 * k + 4], x[8 * k + 5]), pack_bf16(x[8 * k + 6], x[8 * k + 7]),
                *reinterpret_cast<cute::uint128_t*>(shared.p[0] + (at ^ 32 * k)));
        if (lane % 4 != 0) return;
        const int first = 16 * warp + lane / 4;
        shared.keep[first] = keep[0];
        shared.keep[first + 8] = keep[1];
    }

    __device__ __forceinline__ void rescale(const float (&factors)[64]) {
        const float factor[2] = {factors[head()], factors[head() + 8]};
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= factor[i / 2 % 2];
    }

    __device__ __forceinline__ void start_values(int32_t tile) {
        // In a cluster the upper bits of an address name the CTA, and not how far panels are apart.
        const uint64_t kv =
            (mn_major(kv_of(tile)[kGroupPanels * group], 0) & ~uint64_t{0xffffc000}) |
            uint64_t{kPanelBytes >> 4} << 16;
        const uint64_t weights = k_major(shared.p);
        fence_registers(out);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k)
            multiply_64x128(advance(weights, 32 * k), advance(kv, 16 * k * kPanelRowBytes), out,
                            tile > 0 || k > 0);
        cute::warpgroup_commit_batch();
    }

    // All tiles are in. Two lanes have a head each.
    __device__ __forceinline__ void tell_all() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        }
        if (lane % 4 == 0) {
            shared.whole[head()] = sum[0] == 0.f ? 0.f : __fdividef(kTileFactor, sum[0]);
            shared.whole[head() + 8] = sum[1] == 0.f ? 0.f : __fdividef(kTileFactor, sum[1]);
        }
        const bool second = lane & 2;
        tell(lane % 2, 2, head() + 8 * second, second ? max[1] : max[0], second ? sum[1] : sum[0]);
    }
    // The first tile, by all, and the query.
    __device__ __forceinline__ void make_first(Loaded& loaded) {
        if (p.softmax_scale < 0.f) loaded.query.negate();
        loaded.query.store(shared);
        store_sink();
        write_units(0, loaded.units, kv_of(0));
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
    }
    // All have a tile's weights, and the makers have made the next tile.
    __device__ __forceinline__ void meet(int32_t tile, bool shrinks) {
        if (__syncthreads_or(shrinks) && tile > 0) rescale(shared.keep);
        if (tile + 1 == end) cluster_arrive_relaxed();  // what peers send may come
    }
    // The first warpgroup: values of a tile, logits and weights of the next.
    __device__ __forceinline__ void multiply() {
        const float scale = fmaxf(fabsf(p.softmax_scale), kLeastScale) * (kTileFactor * kLog2e);
        cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
        Held held;
        hold(held);
        float x[32];
        fence_registers(x);
        start_logits(0, held, x);
#pragma unroll 1
        for (int32_t tile = 0;; ++tile) {
            const bool last = tile + 1 == end;
            cute::warpgroup_wait<0>();
            fence_registers(x);
            const bool shrinks = softmax(tile, scale, x);
            wait_for_values(tile - 1);  // which read the weights before
            store_weights(x);
            cutlass::arch::fence_view_async_shared();
            if (last) tell_all();  // behind the fence, which would wait
            meet(tile, shrinks);
            if (last) break;
            fence_registers(x);
            start_values(tile);
            start_logits(tile + 1, held, x);
            cute::warpgroup_wait<1>();
            fence_registers(out);
            shared.added.arrive();
        }
        add_last();
        cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
    }

    // The others: values of a tile, and beside them copies of the third behind it; then the second.
    __device__ __forceinline__ void make() {
        cutlass::arch::warpgroup_reg_dealloc<kMakerRegisters>();
        if (copies()) {
            shared.held.wait(0);
            start_next(2);
        }
        Made made;
        if (end > 1) {
            read(1, made);
            write(1, made);
            cutlass::arch::fence_view_async_shared();
        }
#pragma unroll 1
        for (int32_t tile = 0; tile + 1 < end; ++tile) {
            meet(tile, false);
            start_values(tile);
            start_next(tile + 3);  // where the next tile's were
            cute::warpgroup_wait<0>();
            fence_registers(out);
            shared.added.arrive();
            if (tile + 2 >= end) continue;
            read(tile + 2, made);
            wait_for_values(tile);  // they were in the same place
            write(tile + 2, made);
            cutlass::arch::fence_view_async_shared();
        }
        meet(end - 1, false);
        if (group == 1)
            add_last();
        else
            add_last_later();
        cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    }

    // The last tile, by the first two warpgroups, which can so send while the others add it.
    __device__ __forceinline__ void add_last() {
        start_values(end - 1);
        cute::warpgroup_wait<0>();
        fence_registers(out);
        cutlass::arch::NamedBarrier::arrive(kThreads, kHalfAdded);
    }
    __device__ __forceinline__ void add_last_later() {
        cutlass::arch::NamedBarrier::sync(kThreads, kHalfAdded);
        if (group == 2) {
            start_values(end - 1);
            cute::warpgroup_wait<0>();
        } else {
            start_values(end - 1);
            find_weights<2>(threadIdx.x % kWarpgroup / 2);
            shared.weights_known.arrive();
            cute::warpgroup_wait<0>();
        }
        fence_registers(out);
    }
    __device__ __forceinline__ void start_next(int32_t tile) {
        if (tile >= end || !copies()) return;
        start_tile(tile, next_slot);
        next_slot = load_slot(slot_of(tile + 1));
    }

    __device__ __forceinline__ void run(Loaded& loaded) {
        make_first(loaded);
#pragma unroll
        for (float& x : out) x = 0.f;  // not before: the query has the registers
        if (group == 0)
            multiply();
        else
            make();
    }

    __device__ __forceinline__ void finish() {
        cluster_wait();
        rescale(shared.whole);
        const int first = first_head + head();
        uint16_t* const to[2] = {p.out_bf16.at(row, first), p.out_bf16.at(row, first + 8)};
        const bool there[2] = {first < p.heads, first + 8 < p.heads};
        // Known where it matters: the code is fetched for one use.
        constexpr int kFirstTurned = Sharing::kUnits - kRopeDims / kUnitDims;
        const float* turned = group == kGroups - 1 ? shared.cos_sin : nullptr;
        share(*this, [&](int unit) {
            const int eight = (group * Sharing::kUnits + unit) * 4 + lane % 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 dims = natural_order(eight_dims(unit, i));
                if (there[i])
                    store_group(to[i], eight, dims, unit < kFirstTurned ? nullptr : turned);
            }
        });
    }
    // Of a head's four vectors lane t of a quad has dims t and t + 4 each: they trade, so that it
    // has all of vector t.
    __device__ __forceinline__ uint4 eight_dims(int unit, int second) {
        uint32_t w[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const float* x = values(unit, v) + 2 * second;
            w[v] = pack_bf16(x[0], x[1]);
        }
#pragma unroll
        for (int h = 1; h < 4; h *= 2) {
            const bool upper = (lane & h) != 0;
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                if (v & h) continue;
                const uint32_t other = __shfl_xor_sync(~0u, upper ? w[v] : w[v + h], h);
                w[v] = upper ? other : w[v];
                w[v + h] = upper ? w[v + h] : other;
            }
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    }

    __device__ __forceinline__ void know_weights() const { shared.weights_known.wait(0); }
    struct Plus {
        float weight[2];

        __device__ void operator()(int i, float& x, float other) const {
            x = __fmaf_rn(other, weight[i / 2], x);
        }
    };
    __device__ __forceinline__ Plus plus(int from) const {
        return {{shared.levels[from][head()], shared.levels[from][head() + 8]}};
    }
    __device__ __forceinline__ void weigh_own(int unit) {
        const Plus own = plus(piece);
#pragma unroll
        for (int i = 0; i < 16; ++i) values(unit, 0)[i] *= own.weight[i / 2 % 2];
    }

    // Unit i: 16 heads and 32 dims, of which a vector has eight.
    __device__ float* values(int i, int vector) { return out + 16 * i + 4 * vector; }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
