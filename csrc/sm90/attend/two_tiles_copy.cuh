// Parts of few_rows.cu with 32 and 64 heads: what every block does before its products: slots,
// records into registers or shared memory, the query.
#pragma once

#include "sm90/attend/two_tiles.cuh"
#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/dependents.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/common/prefetch.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

// A CTA's part of a row. kPieces: CTAs of a row, where that is known at compile time; or 0.
template <int kHeads, class SharedMemory, int kPieces = 0>
struct Part {
    using Shared = SharedMemory;
    static constexpr int kKnownPieces = kPieces;

    const AttendParams& p;
    const Plan& plan;
    Shared& shared;
    const int32_t row, first_head, piece;
    const int32_t end;  // tiles, at least one: of the row's those from piece on every pieces-th
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int group = warp / 4;
    int32_t window_length = 0, main_length = 0;
    const float* cos_sin = nullptr;
    float sink = -INFINITY;  // of the thread's head

    __device__ Part(const AttendParams& p, const Plan& plan, Shared& shared, int32_t row,
                    int32_t head_block, int32_t piece)
        : p(p),
          plan(plan),
          shared(shared),
          row(row),
          first_head(head_block * kHeads),
          piece(piece),
          end(plan.run + (piece < plan.longer)) {}

    __device__ int pieces() const { return kPieces > 0 ? kPieces : plan.pieces; }
    __device__ void by_pieces(int& quotient, int& rest, int x) const {
        if constexpr (kPieces > 0) {
            quotient = static_cast<int>(static_cast<unsigned>(x) / kPieces);
            rest = x - quotient * kPieces;
        } else {
            plan.by_pieces(quotient, rest, x);
        }
    }
    __device__ int32_t in_row(int32_t tile) const { return piece + tile * pieces(); }
    __device__ bool in_window(int32_t tile) const { return in_row(tile) < plan.window_tiles; }
    // Of its list: where a tile begins.
    __device__ int32_t first_entry(int32_t tile) const {
        return (in_window(tile) ? in_row(tile) : in_row(tile) - plan.window_tiles) * kTile;
    }
    __device__ bool is_there(int32_t tile, int32_t entry, const Places& places,
                             int32_t slot) const {
        return entry < (in_window(tile) ? window_length : main_length) && places.holds(slot);
    }

    // Has the L2 fetch what lies at known places, whoever may still write it: the L2 is what all
    // SMs see. Before the previous kernel has ended.
    __device__ void prefetch() const {
        if (warp == kWarps - 1) few_heads::prefetch_lists(p, row, lane);
        constexpr int kLines = kHeadDim * 2 / 128;
        const int32_t head = static_cast<int32_t>(threadIdx.x) / kLines;
        if (head < kHeads && first_head + head < p.heads)
            prefetch_l2(p.q.at(row, first_head + head) + threadIdx.x % kLines * 64);
    }

    // Where the slot of an entry of a tile's list is, whether it is within its length or not.
    __device__ __forceinline__ const int32_t* slot_of(int32_t tile, int32_t entry,
                                                      bool asks) const {
        // Copies: parameters have no address to choose from.
        Matrix<const int32_t> slots = p.main.slots;
        int32_t columns = p.main.columns;
        if (in_window(tile)) slots = p.window.slots, columns = p.window.columns;
        return asks && entry < columns ? slots.row(row) + entry : nullptr;
    }
    static __device__ int32_t load_slot(const int32_t* at) { return at != nullptr ? *at : -1; }

    // ---- Records straight into registers: a thread has units of one record of a tile, which are
    // dealt to two warps.

    using Units = Codes[4];
    using Kv = uint8_t[kPanels][kTile][kPanelRowBytes];

    __device__ int unit_record() const { return warp % 8 * 8 + lane % 8; }
    __device__ __forceinline__ const int32_t* slot_of_unit(int32_t tile) const {
        return slot_of(tile, first_entry(tile) + unit_record(), tile < end);
    }
    // Read while the kernel before ends. Slots of the window hardly ever are what it writes: then
    // another record, or none, is asked for in vain.
    __device__ __forceinline__ int32_t early_slot(int32_t tile, const int32_t* at) const {
        return in_window(tile) && at != nullptr ? __ldcg(at) : -1;  // not to the L1: it may change
    }
    // Has the L2 fetch a record of the window.
    __device__ __forceinline__ void prefetch_window_unit(int32_t slot) const {
        const int byte = (lane / 8 * 2 + warp / 8) * 128;
        if (plan.window.holds(slot) && byte < kWindow.bytes())
            prefetch_l2(plan.window.row(slot) + byte);
    }
    __device__ __forceinline__ void load_units(int32_t tile, int32_t slot, Units& units) const {
        Places places = plan.main;
        if (in_window(tile)) places = plan.window;
        const bool there = is_there(tile, first_entry(tile) + unit_record(), places, slot);
        const uint32_t present = __ballot_sync(~0u, there);
        if (warp < kTile / 8 && lane == 0)
            shared.present[tile][warp] = static_cast<uint8_t>(present);
        for (Codes& codes : units) codes = {};
        if (!there) return;
        const uint8_t* from = places.row(slot);
        if (in_window(tile)) {
            // The scales of the record are 16 bytes: loads of scattered records stand in line.
            const uint4 scales = *reinterpret_cast<const uint4*>(from + kWindow.data_bytes);
            const uint32_t words[] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                units[i] = {Reader<RecordId::WindowFp8>::codes(from, i, lane, warp / 8), words[i]};
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                units[i] = Reader<RecordId::MainFp4>::read(from, warp / 8 + 2 * i, lane, 0);
        }
    }
    __device__ __forceinline__ void write_units(int32_t tile, const Units& units, Kv& kv) const {
        const int lane = fresh(this->lane), r = unit_record();
        if (in_window(tile)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                using Window = Reader<RecordId::WindowFp8>;
                const Codes unit = {units[i].codes,
                                    units[i].scales >> Window::scale_bit(lane, warp / 8) & 0xff};
                Window::write(unit, lane, warp / 8, r, kv[kGroupPanels * i][0]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                Reader<RecordId::MainFp4>::write(units[i], lane, 0, r,
                                                 kv[kGroupPanels * (warp / 8 + 2 * i)][0]);
        }
    }

    // A warp asks for the lengths and the position of its row with the slots of its units, as the
    // query holds up what is asked for behind it: lanes from 8 on, whose slots others have as well.
    static constexpr int kWindowLane = 8, kMainLane = 9, kPositionLane = 10;
    __device__ __forceinline__ const int32_t* with_lengths(const int32_t* slot) const {
        if (lane < kWindowLane || lane > kPositionLane) return slot;
        const int32_t* at = lane == kWindowLane ? p.window.lengths : p.main.lengths;
        if (lane == kPositionLane) at = p.derotate_positions;
        return at != nullptr ? at + row : nullptr;  // loads -1: no record is within that
    }
    // Of what was loaded: the slot of the thread's unit.
    __device__ __forceinline__ int32_t take_lengths(int32_t loaded) {
        window_length = __shfl_sync(~0u, loaded, kWindowLane);
        main_length = __shfl_sync(~0u, loaded, kMainLane);
        if (p.derotate_positions != nullptr) {
            const int32_t position = __shfl_sync(~0u, loaded, kPositionLane);
            if (p.derotate.holds(position))
                cos_sin = p.derotate.at(position);
            else  // a padded row
                window_length = main_length = 0;
        }
        return __shfl_sync(~0u, loaded, lane % 8);
    }
    __device__ __forceinline__ void load_lengths() {
        if (p.window.lengths != nullptr) window_length = p.window.lengths[row];
        if (p.main.lengths != nullptr) main_length = p.main.lengths[row];
        cos_sin = derotation(p, row);
        if (p.derotate_positions != nullptr && cos_sin == nullptr)  // a padded row
            window_length = main_length = 0;
    }
    // In front of records, which loads behind them would wait for.
    __device__ __forceinline__ void load_sink() {
        const int32_t head = first_head + static_cast<int32_t>(threadIdx.x);
        if (threadIdx.x < kHeads && p.sink != nullptr && head < p.heads) sink = p.sink[head];
    }
    __device__ __forceinline__ void store_sink() const {
        if (threadIdx.x < kHeads) shared.sink[threadIdx.x] = sink;
    }
};

template <int kHeads>
struct Copies : Part<kHeads, Shared<kHeads>> {
    using Base = Part<kHeads, Shared<kHeads>>;
    using Base::end, Base::first_head, Base::in_window, Base::lane, Base::p, Base::plan, Base::row,
        Base::shared, Base::warp;
    using Loaded = Query<kHeads>;
    static constexpr int kRecords = kCopierRecords;

    const int first_record = (warp - kFirstCopier) * kRecords;  // that the warp copies
    int32_t second_slot, next_slot;  // first lanes: of a record of tile 1, of the next after it

    using Base::Base;

    __device__ void init() const {
        for (auto& barrier : shared.arrived) barrier.init(kCopiers * 32);
        shared.added.init(kThreads);
    }

    __device__ bool copies() const { return first_record >= 0 && first_record < kTile; }
    __device__ int32_t entry_of(int32_t tile) const {
        return this->first_entry(tile) + first_record + lane;
    }

    // Tiles take turns so that the last has the first place.
    __device__ auto& kv_of(int32_t tile) const { return shared.kv[(end - 1 - tile) & 1]; }
    // Its records, as they are in memory.
    __device__ uint8_t* records_of(int32_t tile) const {
        return tile == 0 ? shared.kv[end & 1][0][0] : shared.raw;
    }

    __device__ __forceinline__ const int32_t* slot_of(int32_t tile) const {
        return Base::slot_of(tile, entry_of(tile), copies() && lane < kRecords);
    }

    // Starts the copies of a tile whose slots were asked for: zeros for a record that is not there.
    __device__ __forceinline__ void start_tile(int32_t tile, int32_t slot) {
        if (!copies()) return;
        Places places = plan.main;
        if (in_window(tile)) places = plan.window;
        const bool there = this->is_there(tile, entry_of(tile), places, slot);
        const uint32_t present = __ballot_sync(~0u, there);
        if (lane == 0) shared.present[tile & 3][first_record / kRecords] = present;
        // Four lanes copy a record.
        const uint64_t row = reinterpret_cast<uint64_t>(places.row(there ? slot : 0));
        const uint64_t from = __shfl_sync(~0u, row, lane / 4) + lane % 4 * 16;
        const bool mine_there = present >> lane / 4 & 1;
        if (in_window(tile))
            copy<RecordId::WindowFp8>(tile, from, mine_there);
        else
            copy<RecordId::MainFp4>(tile, from, mine_there);
        cutlass::arch::cpasync_barrier_arrive_noinc(
            reinterpret_cast<uint64_t*>(&shared.arrived[tile > 0]));
    }
    template <RecordId kId>
    __device__ __forceinline__ void copy(int32_t tile, uint64_t from, bool there) const {
        using Read = Reader<kId>;
        constexpr int kChunks = Read::kRecord.bytes() / 16;
        uint8_t* to = records_of(tile) + Read::place(first_record + lane / 4) + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < kChunks; i += 4)
            if (i + lane % 4 < kChunks)
                copy_16_async(to + i * 16, reinterpret_cast<const uint8_t*>(from) + i * 16, there);
    }

    __device__ void ask(Query<kHeads>&) const {}
    // Records of the first tile and the query, behind the copies, for which everything waits. What
    // is known before the previous kernel has ended is found before.
    __device__ __forceinline__ void start(Query<kHeads>& query) {
        const int32_t* const slots[] = {slot_of(0), slot_of(1), slot_of(2)};
        this->prefetch();
        wait_for_previous();
        const int32_t first_slot = this->load_slot(slots[0]);
        second_slot = this->load_slot(slots[1]);
        next_slot = this->load_slot(slots[2]);
        this->load_lengths();
        this->load_sink();
        start_tile(0, first_slot);
        query.load(p, row, first_head);
    }

    // Units of 8 records and 128 dims (FP4) or 64 (FP8), from `unit` on every `step`.
    template <RecordId kId>
    __device__ __forceinline__ void dequantise(int32_t tile, int unit, int step) {
        using Read = Reader<kId>;
        constexpr int kHalves = Read::kSteps / 2;  // panels that a warp writes one by one
        constexpr int kRows = kTile / 8, kUnits = kRows * kGroups * kHalves;
        constexpr int kMost = (kUnits + kWarps - 5) / (kWarps - 4);
        const uint8_t* records = records_of(tile);
        const int lane = fresh(this->lane);
        unit = fresh(unit);
#pragma unroll
        for (int i = 0; i < kMost; ++i, unit += step) {
            if (unit >= kUnits) break;
            const int r = unit % kRows * 8 + lane % 8, part = unit / kRows;
            const int group = part / kHalves;
            const int half = part % kHalves;
            Read::write(Read::read(records + Read::place(r), group, lane, half), lane, half, r,
                        kv_of(tile)[kGroupPanels * group][0]);
        }
    }
    __device__ __forceinline__ void dequantise(int32_t tile, int unit, int step) {
        if (in_window(tile))
            dequantise<RecordId::WindowFp8>(tile, unit, step);
        else
            dequantise<RecordId::MainFp4>(tile, unit, step);
    }
    // The first tile, by all, and the query. The copies of the second do not compete with them.
    __device__ __forceinline__ void make_first(const Query<kHeads>& query) {
        query.store(shared);
        this->store_sink();
        shared.arrived[0].wait(0);
        if (end > 1) start_tile(1, second_slot);
        dequantise(0, warp, kWarps);
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
    }
    // The next tile, while one warpgroup multiplies.
    __device__ __forceinline__ void make_next(int32_t tile) {
        shared.arrived[1].wait((tile - 1) & 1);
        wait_for_values(tile - 2);  // they were in the same place
        dequantise(tile, warp - 4, kWarps - 4);
        cutlass::arch::fence_view_async_shared();
    }
    // All warps have added a tile's values.
    __device__ __forceinline__ void wait_for_values(int32_t tile) {
        if (tile >= 0) shared.added.wait(tile & 1);
    }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
