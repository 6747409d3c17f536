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

template <int kPieces>
struct Wide : Sharing<64, Part<64, Shared<64>, kPieces>> {
    using Shared = few_rows::two_tiles::Shared<64>;
    using Base = Sharing<64, Part<64, Shared, kPieces>>;
    using Base::cos_sin, Base::end, Base::first_head, Base::group, Base::in_row, Base::lane,
        Base::load_slot, Base::main_length, Base::p, Base::piece, Base::plan, Base::row,
        Base::shared, Base::tell, Base::warp;
    using typename Base::Units;
    static constexpr int kHeads = 64;
    // Of a thread, while the first warpgroup multiplies.
    static constexpr int kRegisters = 65536 / kThreads, kMultiplierRegisters = 200,
                         kMakerRegisters = 104;
    static_assert(kMultiplierRegisters + 3 * kMakerRegisters <= 4 * kRegisters);
    static constexpr float kLeastScale = 1e-30f;
    static constexpr int kUnitDims = 32;  // of a unit of the output
    // A named barrier behind those of `share`: the last tile is added by half of the warpgroups.
    static constexpr int kHalfAdded = Base::kTurn + kGroups, kWeighed = kHalfAdded + 1;
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
    float limit[2] = {-INFINITY, -INFINITY};  // what a logit has to exceed to raise maxima
    int32_t next_slot;  // of the copiers' lanes: of the tile that is copied next

    using Base::Base;

    __device__ void init() const {
        for (auto& barrier : shared.arrived) barrier.init(kCopiers);
        shared.held.init(kWarpgroup);
        shared.weights_there.init(kWarpgroup);
        shared.made.init(kMakers * 32);
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
        uint32_t from = places.distance(slot);
        const uint32_t other = __shfl_sync(~0u, from, __ffs(present) - 1);
        if (!there) from = other;
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
            uint32_t records[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) records[j] = __shfl_sync(~0u, from, i + j);
            if (!elected) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                cute::SM90_BULK_COPY_G2S::copy(places.data + uint64_t{records[j]} * Places::kUnit,
                                               reinterpret_cast<uint64_t*>(&arrived(tile)),
                                               to + Main::place(i + j), kMain.bytes());
        }
    }

    // What is known before the previous kernel has ended is found before.
    __device__ __forceinline__ void ask(Loaded& loaded) const {
        loaded.slot = this->slot_of_unit(0);
        loaded.early_slot = this->early_slot(0, loaded.slot);
        this->prefetch();
        loaded.slot = this->with_lengths(loaded.slot);
    }
    __device__ __forceinline__ void start(Loaded& loaded) {
        const int32_t* slots[] = {loaded.slot, nullptr, nullptr};
        if (copies()) slots[1] = slot_of(1), slots[2] = slot_of(2);
        this->prefetch_window_unit(loaded.early_slot);
        wait_for_previous();
        const int32_t first_slot = load_slot(slots[0]), second_slot = load_slot(slots[1]);
        next_slot = load_slot(slots[2]);
        this->load_sink();
        loaded.query.load(p, row, first_head);  // while slots are on their way
        const int32_t slot = this->take_lengths(first_slot);
        if (threadIdx.x == 0) shared.cos_sin = cos_sin;  // there is no register for it
        this->load_units(0, slot, loaded.units);
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

    // Where a tile is, in units of descriptors from the first of both places on. Loops have it
    // ready for what they wait for.
    static constexpr uint32_t kOtherPlace = sizeof shared.kv[0] >> 4;
    __device__ uint32_t place_of(int32_t tile) const { return (end - 1 - tile & 1) * kOtherPlace; }
    static __device__ uint64_t at_place(uint64_t operand, uint32_t place) {
        const uint32_t low = static_cast<uint32_t>(operand) + place;
        return (operand >> 32 << 32) | low;
    }

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
    __device__ __forceinline__ void start_logits(uint32_t place, const Held& held,
                                                 float (&d)[32]) const {
        const uint64_t q = fresh(k_major(shared.q[kHeldPanels]));
        const uint64_t kv = fresh(at_place(k_major(shared.kv[0]), place));
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

    // Logits into weights; true where those of earlier tiles shrink, for a warp.
    __device__ __forceinline__ bool softmax(uint2 there, float scale, float (&x)[32]) {
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
        const bool over = largest[0] * scale > limit[0] || largest[1] * scale > limit[1];
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
    // For the next tile.
    __device__ __forceinline__ void find_limits() {
#pragma unroll
        for (int half = 0; half < 2; ++half) limit[half] = max[half] + slack_of_quad(sum[half]);
    }
    __device__ __forceinline__ void raise(float (&largest)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int h = 1; h < 4; h *= 2)
                largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], h));
            // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
            const float before = max[half], most = largest[half] * scale;
            if (most > before) max[half] = most;
            const float base = max[half] == -INFINITY ? 0.f : max[half];
            keep[half] = exp2_approx(before - base);
            sum[half] *= keep[half];
        }
    }

    // Of four 8 x 8 blocks (head, record) a lane addresses row lane % 8 of block lane / 8: heads
    // from 0 or 8 on, then the same of the next 8 records.
    __device__ __forceinline__ void store_weights(const float (&x)[32], bool raised) const {
        const int lane = fresh(this->lane);
        const int at = panel_offset(16 * warp + lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            cute::SM90_U32x4_STSM_N::copy(
                pack_bf16(x[8 * k], x[8 * k + 1]), pack_bf16(x[8 * k + 2], x[8 * k + 3]),
                pack_bf16(x[8 * k + 4], x[8 * k + 5]), pack_bf16(x[8 * k + 6], x[8 * k + 7]),
                *reinterpret_cast<cute::uint128_t*>(shared.p[0] + (at ^ 32 * k)));
        if (lane == 0) shared.raised[warp] = raised;
        if (!raised || lane % 4 != 0) return;
        const int first = 16 * warp + lane / 4;
        shared.keep[first] = keep[0];
        shared.keep[first + 8] = keep[1];
    }

    __device__ __forceinline__ void rescale(const float (&factors)[64]) {
        const float factor[2] = {factors[head()], factors[head() + 8]};
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= factor[i / 2 % 2];
    }

    __device__ __forceinline__ void start_values(int32_t tile, uint32_t place) {
        const uint64_t kv =
            at_place(mn_major(shared.kv[0][kGroupPanels * group], kPanelBytes), place);
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
        this->store_sink();
        this->write_units(0, loaded.units, kv_of(0));
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
    }
    // A tile's weights are there.
    __device__ __forceinline__ void wait_for_weights(int32_t tile) {
        shared.weights_there.wait(tile & 1);
        if (tile > 0 && shared.raised[warp % 4]) rescale(shared.keep);
    }
    // The makers have made the next tile, and read its records.
    __device__ __forceinline__ void wait_for_next(int32_t tile) const {
        shared.made.wait(tile & 1);
    }
    // The first warpgroup: values of a tile, logits and weights of the next.
    __device__ __forceinline__ void multiply() {
        const float scale = fmaxf(fabsf(p.softmax_scale), kLeastScale) * (kTileFactor * kLog2e);
        cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
        Held held;
        hold(held);
        float x[32];
        fence_registers(x);
        uint32_t place = place_of(0);
        start_logits(place, held, x);
#pragma unroll 1
        for (int32_t tile = 0;; ++tile) {
            const bool last = tile + 1 == end;
            const uint2 there = *reinterpret_cast<const uint2*>(shared.present[tile & 3]);
            cute::warpgroup_wait<0>();
            fence_registers(x);
            const bool raised = softmax(there, scale, x);
            wait_for_values(tile - 1);  // which read the weights before
            store_weights(x, raised);
            cutlass::arch::fence_view_async_shared();
            if (last) tell_all();  // behind the fence, which would wait
            shared.weights_there.arrive();
            cutlass::arch::NamedBarrier::sync(kWarpgroup, kWeighed);
            if (raised && tile > 0) rescale(shared.keep);
            if (last) break;
            fence_registers(x);
            start_values(tile, place);
            place ^= kOtherPlace;
            wait_for_next(tile);
            start_logits(place, held, x);
            find_limits();
            cute::warpgroup_wait<1>();
            fence_registers(out);
            shared.added.arrive();
        }
        cluster_arrive_relaxed();  // what peers send may come
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
        uint32_t place = place_of(0);
        if (end > 1) {
            read(1, made);
            write(1, made);
            cutlass::arch::fence_view_async_shared();
            shared.made.arrive();
        }
#pragma unroll 1
        for (int32_t tile = 0; tile + 1 < end; ++tile) {
            wait_for_weights(tile);
            start_values(tile, place);
            place ^= kOtherPlace;
            if (copies()) {
                wait_for_next(tile);  // whose records were in the same place
                start_next(tile + 3);
            }
            cute::warpgroup_wait<0>();
            fence_registers(out);
            shared.added.arrive();
            if (tile + 2 >= end) continue;
            read(tile + 2, made);
            wait_for_values(tile);  // they were in the same place
            write(tile + 2, made);
            cutlass::arch::fence_view_async_shared();
            shared.made.arrive();
        }
        wait_for_weights(end - 1);
        cluster_arrive_relaxed();  // what peers send may come
        if (group == 1)
            add_last();
        else
            add_last_later();
        cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    }

    // The last tile, by the first two warpgroups, which can so send while the others add it.
    __device__ __forceinline__ void add_last() {
        start_values(end - 1, 0);
        cute::warpgroup_wait<0>();
        fence_registers(out);
        cutlass::arch::NamedBarrier::arrive(kThreads, kHalfAdded);
    }
    __device__ __forceinline__ void add_last_later() {
        cutlass::arch::NamedBarrier::sync(kThreads, kHalfAdded);
        if (group == 2) {
            start_values(end - 1, 0);
            cute::warpgroup_wait<0>();
        } else {
            start_values(end - 1, 0);
            this->template find_weights<2>(threadIdx.x % kWarpgroup / 2);
            shared.weights_known.arrive();
            cute::warpgroup_wait<0>();
        }
        fence_registers(out);
    }
    __device__ __forceinline__ void start_next(int32_t tile) {
        if (tile >= end) return;
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
        const bool there[2] = {first < p.heads, first + 8 < p.heads};
        // Found before outputs are there, as is what follows: of the lane's dims of the first unit.
        const int lane = fresh_lane(this->lane), eight = (group * Base::kUnits) * 4 + lane % 4;
        uint16_t* to[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to[i] = fresh(p.out_bf16.at(row, first + 8 * i) + eight * kGroupDims);
            __builtin_assume(__isGlobal(to[i]));
        }
        const Trade trade(lane);
        // Known where it matters: the code is fetched for one use.
        constexpr int kFirstTurned = Base::kUnits - kRopeDims / kUnitDims;
        const float* turned = group == kGroups - 1 ? shared.cos_sin : nullptr;
        const auto put = [&](int unit, uint8_t* place) { trade.put(*this, unit, place); };
        const auto take = [&](int unit, const uint8_t* place) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (!there[i]) continue;
                uint4 x = natural_order(trade.take(place, i));
                if (unit >= kFirstTurned && turned != nullptr)
                    x = derotate_group(x, turned, eight + unit * 4);
                *reinterpret_cast<uint4*>(to[i] + unit * kUnitDims) = x;
            }
        };
        this->share(*this, put, take);
    }
    // Of a head's four vectors lane t of a quad has dims t and t + 4 each: lanes trade, so that it
    // has all of vector t. In [head][vector] of BF16, of which a row of two heads has each vector
    // in another group of banks.
    struct Trade {
        int from, to;  // of the first two vectors; of the first head

        static __device__ int at(int head, int vector) {
            return head * kRowBytes + (vector ^ head / 2 % 4) * int{sizeof(uint4)};
        }
        static constexpr int kRowBytes = kUnitDims * 2;
        // Of four matrices lane l addresses row l % 8 of matrix l / 8: heads from 0 or 8 on of a
        // vector, then of the next.
        explicit __device__ Trade(int lane)
            : from(fresh(at(lane % 16, lane / 16))), to(fresh(at(lane / 4, lane % 4))) {}
        __device__ __forceinline__ void put(Wide& wide, int unit, uint8_t* place) const {
#pragma unroll
            for (int v = 0; v < 4; v += 2) {
                const float *x = wide.values(unit, v), *y = wide.values(unit, v + 1);
                cute::SM90_U32x4_STSM_N::copy(
                    pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(y[0], y[1]),
                    pack_bf16(y[2], y[3]),
                    *reinterpret_cast<cute::uint128_t*>(place + (from ^ v * int{sizeof(uint4)})));
            }
        }
        __device__ __forceinline__ uint4 take(const uint8_t* place, int second) const {
            return *reinterpret_cast<const uint4*>(place + to + 8 * kRowBytes * second);
        }
    };

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
    __device__ __forceinline__ void weigh_own() {
        const Plus own = plus(piece);
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= own.weight[i / 2 % 2];
        fence_registers(out);  // not behind what follows
    }

    // Unit i: 16 heads and 32 dims, of which a vector has eight.
    __device__ float* values(int i, int vector) { return out + 16 * i + 4 * vector; }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
