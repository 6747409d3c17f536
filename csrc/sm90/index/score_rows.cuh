// Scores of rows that share no keys: groups of four warps that need nobody else. The units (256
// keys) of all rows are one sequence, cut into an equal run for each group of the launch. Each warp
// of a group brings its chunk of a unit itself; the queries of a row are put by its group.
#pragma once

#include "sm90/common/dependents.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/index/row_apart.cuh"
#include "sm90/index/score_single.cuh"

namespace flash_csa::sm90 {

constexpr int kRowsStages = 2;

// Bytes 64 + v and 64 - v for v = 0, 1, 2, 3 and 4, 6, 8, 12 half units times a power of two. No
// top bit is set, so a permutation gives 0 where that of its selector is.
struct alignas(16) SignedUnits {
    uint32_t plus_low, plus_high, minus_low, minus_high;

    __device__ __forceinline__ static SignedUnits of(uint32_t shift) {
        const uint32_t low = 0x03020100u << shift, high = 0x0c080604u << shift;
        return {kKeyOffset + low, kKeyOffset + high, kKeyOffset - low, kKeyOffset - high};
    }
    // Four codes in the low 16 bits, and the same with their signs changed.
    __device__ __forceinline__ uint32_t bytes(uint32_t codes, uint32_t opposite) const {
        return permute(plus_low, plus_high, codes) + permute(minus_low, minus_high, opposite);
    }
};

// The ring of a warp.
struct alignas(128) RowsKeys {
    RowChunk chunks[kRowsStages];
    uint32_t
        shifts[kChunkKeys];  // a byte for each group: its exponent - the key's lowest, times 16
    uint32_t present[kRowsStages];  // bit i: keys 8 i .. 8 i + 7 are on a page
    Barrier full[kRowsStages];

    // One warp.
    __device__ __forceinline__ void init() {
        const int32_t lane = threadIdx.x % 32;
        if (lane < kRowsStages) full[lane].init(1);
        cutlass::arch::fence_barrier_init();
        __syncwarp();
    }
};

class RowsCopier {
  public:
    __device__ __forceinline__ explicit RowsCopier(const IndexScoresParams& p) : p_(p) {}

    // One warp. The chunk that was there is read.
    __device__ __forceinline__ void copy(int32_t page, int32_t chunk, RowsKeys& keys,
                                         int32_t stage) const {
        const bool copies = page >= 0 && page < p_.index.num_pages;
        uint8_t* to = keys.chunks[stage].bytes;
        Barrier& full = keys.full[stage];
        uint32_t& present = keys.present[stage];
        if (p_.index.page_size != kChunkKeys) {
            copy_parts(p_.index, page, chunk, copies, to, full, present);
        } else if (cute::elect_one_sync()) {
            present = copies ? ~0u : 0u;
            full.arrive_and_expect_tx(copies ? kChunkBytes : 0);
            if (copies) {
                copy_bytes(p_.index.data + page * p_.index.page_stride, to, kChunkBytes, full);
            }
        }
        __syncwarp();
    }

  private:
    static __device__ __forceinline__ void copy_bytes(const uint8_t* from, uint8_t* to,
                                                      int32_t bytes, Barrier& full) {
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&full), to, bytes);
    }
    // Pages of other sizes than a chunk: codes and scale words apart, a page a lane.
    static __device__ __noinline__ void copy_parts(const ConstPages& index, int32_t page_number,
                                                   int32_t chunk, bool copies, uint8_t* to,
                                                   Barrier& full, uint32_t& present) {
        const int32_t lane = threadIdx.x % 32;
        const int32_t size = index.page_size, keys = min(size, kChunkKeys);
        const int32_t key = lane * keys;  // of the chunk
        copies = copies && key < kChunkKeys;
        const uint32_t eighths = 0xffu >> (8 - keys / 8) << (key / 8 & 7);
        const uint32_t all = __reduce_or_sync(~0u, copies ? eighths : 0);
        const int32_t pages = __popc(__ballot_sync(~0u, copies));
        if (lane == 0) {
            present = all;
            full.arrive_and_expect_tx(pages * keys * (kKeyBytes + kScaleBytes));
        }
        __syncwarp();
        if (!copies) return;
        const uint8_t* page = index.data + page_number * index.page_stride;
        const int32_t first = chunk * kChunkKeys & (size - 1) & ~(kChunkKeys - 1);  // of the page
        copy_bytes(page + first * kKeyBytes, to + key * kKeyBytes, keys * kKeyBytes, full);
        copy_bytes(page + size * kKeyBytes + first * kScaleBytes,
                   to + kChunkCodes + key * kScaleBytes, keys * kScaleBytes, full);
    }

    const IndexScoresParams& p_;
};

// Rows have up to kHeads * kBlocks heads.
template <int kHeads, int kBlocks>
struct alignas(1024) RowsShared {
    RowTile<kHeads * kBlocks> tiles[kRowGroups];
    RowsKeys warps[kRowThreads / 32];
    SignedUnits tables[kMaxRowFold + 2];  // by shift
    uint32_t folds[kRowGroups];           // of the row: a byte 1 of each warp that has put its part
    int32_t warp_units[kRowThreads / 32];
    int2 starts[kRowGroups];  // row, unit of it
};
static_assert(sizeof(RowsShared<32, 1>) <= kSmemOptIn && sizeof(RowsShared<32, 2>) <= kSmemOptIn);

// ---- Work

// A place in the sequence.
struct RowsPlace {
    int32_t row, unit, count;

    __device__ __forceinline__ RowsPlace(const IndexScoresParams& p, int2 start)
        : row(start.x), unit(start.y), count(group_of(p, start.x).count) {}
    // There is a next unit. True where it is of another row.
    __device__ __forceinline__ bool advance(const IndexScoresParams& p) {
        ++unit;
        if (unit * kUnitKeys < count) return false;
#pragma unroll 1
        do {
            count = group_of(p, ++row).count;
        } while (count == 0);
        unit = 0;
        return true;
    }
};

// The pages of a warp's chunks of the 32 units around a place, one a lane; of pages smaller than a
// chunk those of the place alone.
struct RowsPages {
    int32_t pages;

    __device__ __forceinline__ void look_up(const IndexScoresParams& p, const RowsPlace& at) {
        const int32_t lane = threadIdx.x % 32, size = p.index.page_size;
        const int32_t unit = size < kChunkKeys ? at.unit : (at.unit & ~31) + lane;
        const int32_t key = size < kChunkKeys ? lane * size : 0;
        const int32_t column = chunk_of(unit) * kChunkKeys + key;
        pages = -1;
        if (key >= kChunkKeys || column >= at.count) return;
        const int32_t* table = p.block_table.row(p.batch.row_request[at.row]);
        pages = __ldg(table + (column >> (__ffs(size) - 1)));
    }
    // Another look-up is due at a place that follows in the row.
    __device__ __forceinline__ bool end_at(const IndexScoresParams& p, const RowsPlace& at) const {
        return p.index.page_size < kChunkKeys || at.unit % 32 == 0;
    }
    __device__ __forceinline__ int32_t of(const IndexScoresParams& p, const RowsPlace& at) const {
        return p.index.page_size < kChunkKeys ? pages : __shfl_sync(~0u, pages, at.unit % 32);
    }
};

// All threads. Returns how many units the thread's group has, which start at `starts`.
template <class Shared>
__device__ __forceinline__ int32_t divide_rows(const IndexScoresParams& p, Shared& shared) {
    const int32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int32_t each = (p.batch.rows + kRowThreads - 1) / kRowThreads;
    const int32_t first = min(thread * each, p.batch.rows);
    const int32_t last = min(first + each, p.batch.rows);
    int32_t own = 0;
#pragma unroll 1
    for (int32_t row = first; row < last; ++row) own += group_of(p, row).end;
    int32_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) shared.warp_units[warp] = upto;
    __syncthreads();
    int32_t total = 0, before = upto - own;
#pragma unroll
    for (int i = 0; i < kRowThreads / 32; ++i) {
        if (i < warp) before += shared.warp_units[i];
        total += shared.warp_units[i];
    }
    const int32_t groups = gridDim.x * kRowGroups;
    const int32_t run = total / groups, longer = total % groups;  // groups with one unit more
    const auto number_of = [](int32_t group) {
        return group * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
    };
#pragma unroll 1
    for (int32_t group = 0; group < kRowGroups; ++group) {
        const int32_t number = number_of(group);
        int32_t unit = number * run + min(number, longer) - before;
        if (unit < 0 || unit >= own) continue;
        int32_t row = first;
#pragma unroll 1
        for (; each > 1; ++row) {
            const int32_t units = group_of(p, row).end;
            if (unit < units) break;
            unit -= units;
        }
        shared.starts[group] = {row, unit};
    }
    __syncthreads();
    return run + (number_of(warp / 4) < longer);
}

// ---- Keys

// What a lane knows of a chunk: of the keys whose scores it hands over, one of each half.
struct LaneKeys {
    float rest[2];   // what is left of their scales; NaN for an entry on no page
    uint32_t apart;  // bit i: not all keys of half i fold
};

// Its key, of a half.
__device__ __forceinline__ int32_t rows_lane_key() {
    const int32_t lane = threadIdx.x % 32;
    return lane % 4 * 8 + lane / 4;
}

// visible: keys of the chunk that are. A warp calls.
__device__ __forceinline__ LaneKeys prepare_chunk(RowsKeys& keys, int32_t stage, int32_t visible) {
    const RowChunk& chunk = keys.chunks[stage];
    const uint32_t present = keys.present[stage] >> threadIdx.x % 4;
    LaneKeys out = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t key = half * kHalfKeys + rows_lane_key();
        const bool here = present >> (4 * half) & 1;
        const uint32_t scales = here && key < visible ? chunk.scales(key) : kUnitScales;
        const int32_t lowest = lowest_scale(scales);
        const uint32_t above = scales - lowest * 0x01010101u;
        static_assert(kMaxRowFold == 2);
        const bool folds = ((above + 0x01010101u) & 0xfcfcfcfcu) == 0;
        keys.shifts[key] = (above << 4) & 0x30303030u;
        out.rest[half] = here ? power_of_two(lowest + kFoldedScoreExponent) : bits_float(kNanBits);
        out.apart |= !__all_sync(~0u, folds && is_plain(odd_key_bits(scales))) << half;
    }
    return out;
}

// A of the K steps of a tile: 16 keys of the warp, of half `half` of its chunk.
__device__ __forceinline__ void load_units(const RowChunk& chunk, const uint32_t* chunk_shifts,
                                           int32_t half, int tile, const SignedUnits* tables,
                                           uint32_t (&out)[kFoldedSteps][4]) {
    const int32_t lane = threadIdx.x % 32;
    const uint4* codes = reinterpret_cast<const uint4*>(chunk.bytes);
    const uint8_t* shifts = reinterpret_cast<const uint8_t*>(chunk_shifts);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int32_t at = 4 * (kHalfKeys * half + 16 * tile + 8 * row) + lane;  // key and group
        const uint4 raw = codes[at];
        const SignedUnits table = *reinterpret_cast<const SignedUnits*>(
            reinterpret_cast<const uint8_t*>(tables) + shifts[at]);
        const uint32_t words[kFoldedSteps] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            const uint32_t word = words[step], opposite = word ^ 0x88888888u;
            out[step][row] = table.bytes(word, opposite);
            out[step][2 + row] = table.bytes(word >> 16, opposite >> 16);
        }
    }
}

// ---- Scores

// Four warps.
__device__ __forceinline__ void group_sync() {
    cutlass::arch::NamedBarrier::sync(kGroupThreads, threadIdx.x / kGroupThreads);
}

// What a thread reads of a row, to put it.
template <int kHeads>
struct RowHeads {
    static constexpr int kOwn = (kHeads * kIndexGroups + kGroupThreads - 1) / kGroupThreads;
    RowHead own[kOwn];

    __device__ __forceinline__ void load(const IndexScoresParams& p, int64_t row) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i].load(p, row, head(i), group());
    }
    // Barriers of the group before and after are the caller's.
    __device__ __forceinline__ void put(RowTile<kHeads>& tile, uint32_t& folds) const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (head(i) < kHeads) all = tile.put(own[i], head(i), group()) && all;
        }
        all = __all_sync(~0u, all);
        const int32_t thread = fresh(static_cast<int>(threadIdx.x));
        if (thread % 32 == 0) reinterpret_cast<uint8_t*>(&folds)[thread / 32 % 4] = all;
        cutlass::arch::fence_view_async_shared();
    }

  private:
    __device__ __forceinline__ static int32_t head(int i) {
        return (fresh(static_cast<int>(threadIdx.x)) % kGroupThreads + i * kGroupThreads) /
               kIndexGroups;
    }
    __device__ __forceinline__ static int32_t group() {
        return fresh(static_cast<int>(threadIdx.x)) % kIndexGroups;
    }
};

// The queries of a row: kBlocks blocks of kHeads heads.
template <int kHeads, int kBlocks>
struct RowsQuery {
    using Tile = RowTile<kHeads * kBlocks>;
    const Tile& tile;
    uint32_t units;  // lower half of a descriptor, uniform

    __device__ __forceinline__ explicit RowsQuery(const Tile& from)
        : tile(from), units(__shfl_sync(~0u, query_descriptor(from.units), 0)) {}

    __device__ __forceinline__ void load_weights(int block, float2 (&weights)[kHeads / 8]) const {
        const float2* source =
            reinterpret_cast<const float2*>(tile.weights + block * kHeads) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i) weights[i] = source[4 * i];
    }
    // Starts the dots of a tile of keys with a block of heads.
    __device__ __forceinline__ void start(const uint32_t (&bytes)[kFoldedSteps][4],
                                          const uint32_t (&zeros)[4], int block,
                                          uint32_t (&sums)[kHeads / 2]) const {
        constexpr uint32_t kOffsets = offsetof(Tile, offsets) - offsetof(Tile, units);
        const uint32_t at = units + block * (kHeads * kQueryBytes >> 4);
        constexpr std::make_index_sequence<kHeads / 2> kAll;
#pragma unroll
        for (uint32_t& sum : sums) cute::warpgroup_fence_operand(sum);
        cute::warpgroup_arrive();
        mma_step<IntegerMma<kHeads>>(zeros, whole_descriptor(at + (kOffsets >> 4)), sums, false,
                                     kAll);
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            mma_step<IntegerMma<kHeads>>(bytes[step], whole_descriptor(at + (32 * step >> 4)), sums,
                                         true, kAll);
        }
        cute::warpgroup_commit_batch();
    }
};

// Scores of half a chunk, whose first column is `first`. The MMAs of a tile run while the other one
// is converted, or its heads are added.
template <int kHeads, int kBlocks, class Sink>
__device__ __forceinline__ void score_rows_half(const IndexScoresParams& p,
                                                RowsShared<kHeads, kBlocks>& shared,
                                                const RowsQuery<kHeads, kBlocks>& query,
                                                const RowChunk& chunk, const uint32_t* shifts,
                                                const LaneKeys& own, int32_t half, int32_t row,
                                                int32_t first, int32_t count, Sink& sink) {
    uint32_t bytes[kPassTiles][kFoldedSteps][4], sums[kPassTiles][kHeads / 2] = {};
    uint32_t zeros[4];
#pragma unroll
    for (uint32_t& zero : zeros) zero = fresh(static_cast<int>(kKeyOffset));
    float partials[kPassTiles][2] = {};
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        load_units(chunk, shifts, half, tile, shared.tables, bytes[tile]);
        query.start(bytes[tile], zeros, 0, sums[tile]);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        float2 weights[kHeads / 8];
        query.load_weights(block, weights);
#pragma unroll
        for (int tile = 0; tile < kPassTiles; ++tile) {
            if (block + 1 < kBlocks || tile == 0) {
                finish_folded<1>(sums[tile]);
            } else {
                finish_folded<0>(sums[tile]);
            }
            add_folded_heads<kHeads>(sums[tile], 0, weights, partials[tile]);
            if (block + 1 < kBlocks) query.start(bytes[tile], zeros, block + 1, sums[tile]);
        }
    }
    LaneKey key = {};
    key.key = half * kHalfKeys + rows_lane_key();
    key.rest = half == 0 ? own.rest[0] : own.rest[1];
    float score = mul_rn(reduce_quad(partials), key.rest);
    const bool row_folds =
        shared.folds[fresh(static_cast<int>(threadIdx.x)) / kGroupThreads] == 0x01010101u;
    if (!row_folds || (own.apart >> half & 1)) {
        score = score_apart(p, row, row_folds, chunk, kHalfKeys * half, count - first, key);
    }
    const int32_t column = first + key.key;
    sink.put(row, column, canonical_nan(score), column < count);
}

template <int kHeads, int kBlocks, class Sink>
__device__ __forceinline__ void score_rows(const IndexScoresParams& p,
                                           RowsShared<kHeads, kBlocks>& shared, Sink& sink) {
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    RowsKeys& keys = shared.warps[warp];
    const int32_t units = divide_rows(p, shared);
    if (units == 0) return;
    RowsPlace at(p, shared.starts[group]);
    RowsPlace ahead = at;
    RowsPages pages;
    const RowsCopier copier(p);
    const auto copy = [&](int32_t stage) {
        copier.copy(pages.of(p, ahead), chunk_of(ahead.unit), keys, stage);
    };
    const auto copy_next = [&](int32_t stage) {
        if (ahead.advance(p) || pages.end_at(p, ahead)) pages.look_up(p, ahead);
        copy(stage);
    };
    RowHeads<kHeads * kBlocks> heads;
    heads.load(p, at.row);
    pages.look_up(p, at);
    copy(0);
    static_assert(kRowsStages == 2);
    if (units > 1) copy_next(1);
    heads.put(shared.tiles[group], shared.folds[group]);
    group_sync();
    const RowsQuery<kHeads, kBlocks> query(shared.tiles[group]);
    // How many units are left, and below it the number of this one, in two bits: its stage, and the
    // phase of that. One register.
    for (int32_t state = 4 * units;; state = (state & ~3) - 4 + ((state + 1) & 3)) {
        const int32_t stage = state & 1;
        keys.full[stage].wait(state >> 1 & 1);
        const int32_t first = chunk_of(at.unit) * kChunkKeys;
        const LaneKeys own = prepare_chunk(keys, stage, at.count - first);
        __syncwarp();
#pragma unroll 1
        for (int32_t half = 0; half < 2; ++half) {
            score_rows_half(p, shared, query, keys.chunks[stage], keys.shifts, own, half, at.row,
                            first, at.count, sink);
        }
        __syncwarp();
        if (state >= 4 * 3) copy_next(stage);
        if (state < 4 * 2) return;
        if (at.advance(p)) {
            RowHeads<kHeads * kBlocks> next;
            next.load(p, at.row);
            group_sync();  // the last row's queries are read
            next.put(shared.tiles[group], shared.folds[group]);
            group_sync();
        }
    }
}

template <int kHeads, int kBlocks, class Sink>
__global__ void __launch_bounds__(kRowThreads, 1)
    score_rows_kernel(const __grid_constant__ IndexScoresParams p,
                      const __grid_constant__ typename Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    using Shared = RowsShared<kHeads, kBlocks>;
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    shared.warps[__shfl_sync(~0u, threadIdx.x / 32, 0)].init();
    if (threadIdx.x <= kMaxRowFold) shared.tables[threadIdx.x] = SignedUnits::of(threadIdx.x);
    wait_for_previous();
    allow_dependents();
    Sink sink(sink_params, nullptr);
    score_rows<kHeads, kBlocks>(p, shared, sink);
}

}  // namespace flash_csa::sm90
