// The pool warps of prefill.cu: rows to pooled entries and the factors of their norms, 4 entries to
// a slot. Their registers are where rows land, those of the next entries while these are pooled,
// also across tiles.
//
// Squares are summed in octets (octet.cuh). Ratio 1 also reads in octets, 4 entries at a time.
// Ratio 2 reads an entry at a time in whole rows, 512 bytes with an instruction: pieces of 128
// bytes of 16 rows by turns cost a third of the DRAM's rate.
#pragma once

#include "sm90/common/fresh.cuh"
#include "sm90/common/prefetch.cuh"
#include "sm90/compress/octet.cuh"
#include "sm90/compress/pool_two.cuh"
#include "sm90/compress/tail.cuh"
#include "sm90/compress/tile.cuh"

namespace flash_csa::sm90 {

inline constexpr int kPairs = kHeadDim / 64;  // pairs of blocks of a row
inline constexpr int kLineBytes = 128;        // of the L2

// An entry of an octet (ratio 1), or of the warp. Its request is read where it is needed: registers
// are scarce.
struct PoolEntry {
    int32_t row, position, slot;
    int32_t passes;  // tiles of the same rows
    bool active;     // else it repeats another one, or is none, and stores nothing

    template <int kRatio>
    __device__ __forceinline__ Entry entry(const CompressParams& p) const {
        return {row, position, p.batch.row_request[row], position / kRatio,
                position - (kRatio - 1)};
    }
};

// The entries of a pool warp, a step after the other: those that its 16 rows of a tile close, then
// the next tile's. Rows of many short requests close more entries than a chunk holds: the tile
// comes twice.
template <int kRatio>
struct Steps {
    using R = Roles<kRatio>;
    static_assert(R::kChunkRows == 16);
    static constexpr int kStep = kRatio == 1 ? kUnit : 1;  // entries

    const CompressParams& p;
    uint8_t* list;  // lanes whose rows close an entry
    int warp, lane;
    uint32_t tile;  // its first row
    int count = 0;  // of entries
    int from = 0;   // the step's first
    PoolEntry entry = {};

    __device__ __forceinline__ Steps(const CompressParams& p, uint8_t* list, int warp, int lane)
        : p(p), list(list), warp(warp), lane(lane), tile(first_row<kRatio>()) {}

    __device__ __forceinline__ bool filled() const { return from < count; }

    __device__ __forceinline__ bool first() { return in_batch(p, tile) && look(); }

    // Goes to the next step, if there is one.
    __device__ __forceinline__ bool next() {
        from += kStep;
        if (from < entry.passes * R::kChunk) {
            pick();
            return true;
        }
        if (kRatio > 1 && p.tail.data != nullptr) keep_rows();
        tile += row_stride<kRatio>();
        return in_batch(p, tile) && look();
    }

  private:
    __device__ __forceinline__ uint32_t own_row() const {
        return tile + warp * R::kChunkRows + lane;
    }
    __device__ __forceinline__ bool has_row() const {
        return lane < R::kChunkRows && in_batch(p, own_row());
    }

    __device__ __forceinline__ bool look() {
        Entry own;
        const uint32_t closing =
            __ballot_sync(kAllLanes, has_row() && closes_entry(p, own_row(), &own));
        __syncwarp();
        if (closing >> lane & 1)
            list[__popc(closing & ((1u << lane) - 1))] = static_cast<uint8_t>(lane);
        __syncwarp();
        count = __popc(closing);
        from = 0;
        prefetch_lists();
        entry.passes = kRatio == 1 ? 1 : tile_passes();
        pick();
        return true;
    }

    // What `look` and `pick` will read of the next tile.
    __device__ __forceinline__ void prefetch_lists() const {
        const uint32_t row = own_row() - lane + row_stride<kRatio>();
        if (!in_batch(p, row)) return;
        if (lane == 0) prefetch_l2(p.batch.positions + row);
        if (lane == 1) prefetch_l2(p.batch.row_request + row);
        if (lane == 2) prefetch_l2(p.entry_slots + row);
    }

    // Every pool warp finds the same number, from all rows of the tile: no more close entries than
    // have odd positions.
    __device__ __forceinline__ int tile_passes() const {
        bool twice = false;
#pragma unroll
        for (int i = 0; i < kTile * kRatio / 32; ++i) {
            const uint32_t row = tile + 32 * i + lane;
            const uint32_t odd =
                __ballot_sync(kAllLanes, in_batch(p, row) && p.batch.positions[row] % 2 == 1);
            twice = twice || __popc(odd & 0xffffu) > R::kChunk || __popc(odd >> 16) > R::kChunk;
        }
        return twice ? 2 : 1;
    }

    __device__ __forceinline__ void pick() {
        const int number = from + (kRatio == 1 ? lane / 8 : 0);
        entry.active = number < count;
        if (!filled()) return;
        const int source = list[entry.active ? number : count - 1];
        entry.row = static_cast<int32_t>(tile) + warp * R::kChunkRows + source;
        entry.position = p.batch.positions[entry.row];
        entry.slot = p.entry_slots[entry.row];
    }

    __device__ __forceinline__ void keep_rows() const {
        uint32_t kept = __ballot_sync(kAllLanes, has_row() && keeps_row(p, own_row()));
        for (; kept != 0; kept &= kept - 1)
            keep_row(p, own_row() - lane + __ffs(static_cast<int>(kept)) - 1, lane, 32);
    }
};

// The first rows of a pool warp on their way to the L2, while its batch is looked up.
template <int kRatio>
__device__ __forceinline__ void prefetch_first_rows(const CompressParams& p, int warp, int lane) {
    using R = Roles<kRatio>;
    constexpr int kRowBytes = kHeadDim * (kRatio == 1 ? sizeof(uint16_t) : sizeof(float));
    constexpr int kRowLines = kRowBytes / kLineBytes, kBytes = 16 * 1024;
    constexpr int kMatrices = kRatio == 1 ? 1 : 2;
#pragma unroll
    for (int i = lane; i < kBytes / kLineBytes; i += 32) {
        const int64_t row = int64_t{blockIdx.x} * kTile * kRatio + warp * R::kChunkRows +
                            i / (kRowLines * kMatrices);
        if (row >= p.batch.rows) return;
        const void* from = kRatio == 1              ? static_cast<const void*>(p.kv_bf16.row(row))
                           : i / kRowLines % 2 == 0 ? p.gate.row(row)
                                                    : p.kv.row(row);
        prefetch_l2(static_cast<const uint8_t*>(from) + i % kRowLines * kLineBytes);
    }
}

// A lane's place of pair q in the row of its entry; flip: 32 where the row's blocks are swapped.
__device__ __forceinline__ void put_pair(uint16_t* row, int flip, int q, uint4 packed) {
    *reinterpret_cast<uint2*>(row + 64 * q + flip) = make_uint2(packed.x, packed.y);
    *reinterpret_cast<uint2*>(row + 64 * q + (32 - flip)) = make_uint2(packed.z, packed.w);
}

__device__ __forceinline__ void keep_pair(uint16_t* row, int flip, int q, uint4 packed,
                                          float (&chain)[4]) {
    float x[8];
    unpack_blocks(packed, x);
    add_squares(x, chain);
    put_pair(row, flip, q, packed);
}

__device__ __forceinline__ float norm_factor(const CompressParams& p, float sum) {
    return rsqrt_ieee(add_rn(mul_rn(sum, 1.0f / kHeadDim), p.eps));
}

__device__ __forceinline__ Place place_of(const CompressParams& p, const PoolEntry& e) {
    return e.active ? Place{e.row, e.slot, e.position - (p.ratio - 1), 0.f} : Place{-1, -1, 0, 0.f};
}

// A unit of ratio 1 on its way.
struct CopyUnit {
    uint4 pairs[kPairs];
    Place place;
    bool there = false;

    // The entries of the next step, if there is one.
    __device__ __forceinline__ void load(const CompressParams& p, Steps<1>& steps, bool& more) {
        there = more;
        if (!more) return;
        place = place_of(p, steps.entry);
        if (steps.filled()) {
            const uint16_t* from = fresh(p.kv_bf16.row(steps.entry.row) + steps.lane % 8 * 4);
#pragma unroll
            for (int q = 0; q < kPairs; ++q) {
                const uint2 a = __ldcs(reinterpret_cast<const uint2*>(from + 64 * q));
                const uint2 b = __ldcs(reinterpret_cast<const uint2*>(from + 64 * q + 32));
                pairs[q] = make_uint4(a.x, a.y, b.x, b.y);
            }
        }
        more = steps.next();
    }
};

// Ratio 1: copies. Two units are on their way, each to a slot of its own.
__device__ __forceinline__ void pool_units(const CompressParams& p, Steps<1>& steps,
                                           Shared& shared) {
    constexpr int kAhead = Roles<1>::kPoolSlots;
    const int lane = steps.lane, flip = lane / 8 % 2 * 32;
    CopyUnit units[kAhead] = {};
    bool more = steps.first();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) units[i].load(p, steps, more);
#pragma unroll 1
    for (uint32_t n = 0; units[0].there; ++n) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            CopyUnit& unit = units[i];
            if (!unit.there) return;
            const int slot = steps.warp * kAhead + i;
            uint16_t* row = shared.slots[slot].rows[lane / 8] + lane % 8 * 4;
            float chain[4] = {};
            wait_empty(shared.empty[slot], n);
#pragma unroll
            for (int q = 0; q < kPairs; ++q) keep_pair(row, flip, q, unit.pairs[q], chain);
            unit.place.factor = norm_factor(p, sum_chains(chain));
            if (lane % 8 == 0) shared.heads[slot].places[lane / 8] = unit.place;
            shared.full[slot].arrive();
            unit.load(p, steps, more);
        }
    }
}

inline constexpr int kBlock = 128;  // channels of a warp's load of 16 bytes a lane
inline constexpr int kBlocks = kHeadDim / kBlock;

// A lane's channels of a block, of both rows.
struct RowBlock {
    float4 kv[2], gate[2];
};

// The two rows of an entry, from the lane's first channel.
struct RowPair {
    PoolRow row[2];
    bool in_tail;  // the first one

    __device__ __forceinline__ void find(const CompressParams& p, const PoolEntry& entry,
                                         int first) {
        const Entry e = entry.entry<2>(p);
        in_tail = e.first < p.batch.start[e.request];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row[r] = pool_row(p, e, e.first + r);
            row[r].kv += first;
            row[r].gate += first;
        }
    }
    __device__ __forceinline__ void load(int block, RowBlock& to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            to.gate[r] = __ldcs(reinterpret_cast<const float4*>(row[r].gate + kBlock * block));
            to.kv[r] = __ldcs(reinterpret_cast<const float4*>(row[r].kv + kBlock * block));
        }
    }
};

__device__ __forceinline__ void pool_block(const RowBlock& x, uint16_t* to) {
    const auto values = [](const float4& v) -> const float (&)[4] {
        return reinterpret_cast<const float (&)[4]>(v);
    };
    float pooled[4];
    pool_two(values(x.kv[0]), values(x.kv[1]), values(x.gate[0]), values(x.gate[1]), pooled);
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(pooled[0], pooled[1]), pack_bf16(pooled[2], pooled[3]));
}

// Puts new rows into the tail slots that the entry's lanes have read.
__device__ __forceinline__ void replace_rows(const CompressParams& p, const PoolEntry& entry,
                                             int first) {
    replace_read_rows(p, entry.entry<2>(p),
                      [first](float* to_kv, float* to_gate, const float* kv, const float* gate) {
                          for (int c = first; c < kHeadDim; c += kBlock) {
                              *reinterpret_cast<float4*>(to_kv + c) =
                                  *reinterpret_cast<const float4*>(kv + c);
                              *reinterpret_cast<float4*>(to_gate + c) =
                                  *reinterpret_cast<const float4*>(gate + c);
                          }
                      });
}

// The factor of an octet's entry in a slot.
__device__ __forceinline__ float slot_factor(const CompressParams& p, const Slot& slot, int lane) {
    const uint16_t* row = slot.rows[lane / 8] + lane % 8 * 4;
    const int flip = lane / 8 % 2;
    float chain[4] = {};
#pragma unroll 4
    for (int b = 0; b < kHeadDim / 32; ++b) {
        const uint2 packed = *reinterpret_cast<const uint2*>(row + 32 * (b ^ flip));
        const float x[4] = {low_bf16(packed.x), high_bf16(packed.x), low_bf16(packed.y),
                            high_bf16(packed.y)};
#pragma unroll
        for (int i = 0; i < 4; ++i) chain[i] = fma_rn(x[i], x[i], chain[i]);
    }
    return norm_factor(p, sum_chains(chain));
}

// Ratio 2. An entry's rows are on their way, 8 KiB a warp, while the one before is pooled; where
// they lie is known before that.
__device__ __forceinline__ void pool_units(const CompressParams& p, Steps<2>& steps,
                                           Shared& shared) {
    static_assert(Roles<2>::kPoolSlots == 1);
    const int lane = steps.lane, first = 4 * lane;
    Slot& slot = shared.slots[steps.warp];
    Head& head = shared.heads[steps.warp];
    RowBlock blocks[kBlocks] = {};
    RowPair rows = {};  // of `next`
    PoolEntry next = {};
    bool more = steps.first();
    const auto find_next = [&] {
        next = steps.entry;
        next.active = next.active && more;
        if (next.active) rows.find(p, next, first);
    };
    find_next();
    if (next.active) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) rows.load(i, blocks[i]);
    }
    for (uint32_t n = 0; more; ++n) {
        const PoolEntry entry = next;
        const bool in_tail = rows.in_tail;
        more = steps.next();
        find_next();
        const int e = static_cast<int>(n % kUnit);
        if (e == 0) wait_empty(shared.empty[steps.warp], n / kUnit);
        uint16_t* row = slot.rows[e] + (first ^ 32 * (e % 2));
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
            if (entry.active) pool_block(blocks[i], row + kBlock * i);
            if (next.active) rows.load(i, blocks[i]);
        }
        if (entry.active && in_tail) replace_rows(p, entry, first);
        if (lane == 0) {
            head.places[e] = place_of(p, entry);
            head.passes = entry.passes;
        }
        if (e != kUnit - 1) continue;
        __syncwarp();
        const float factor = slot_factor(p, slot, lane);
        if (lane % 8 == 0) head.places[lane / 8].factor = factor;
        shared.full[steps.warp].arrive();
    }
}

}  // namespace flash_csa::sm90
