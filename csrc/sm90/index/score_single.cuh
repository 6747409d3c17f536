// Scores of the only row of a launch, with at most 32 heads: groups of four warps that need nobody
// else. A group takes units of 256 keys in turn, each of its warps a chunk of 64 that it brings
// itself. Of a tile of an MMA every warp gives 16 keys.
#pragma once

#include "sm90/common/dependents.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/index/row_apart.cuh"

namespace flash_csa::sm90 {

constexpr int kRowGroups = 4;
constexpr int kRowThreads = kRowGroups * kGroupThreads;
constexpr int kRowStages = 3;

template <int kHeads>
struct alignas(1024) RowQueries {
    RowTile<kHeads> tile;
    OffsetUnits tables[kMaxRowFold + 2];  // by shift
    uint32_t folds;                       // of the row

    __device__ __forceinline__ void init(int32_t thread) {
        if (thread <= kMaxRowFold) tables[thread] = OffsetUnits::of(thread);
        if (thread == 0) folds = 1;
    }
};

template <int kHeads>
struct SingleShared {
    RowQueries<kHeads> queries;
    WarpKeys<kRowStages> warps[kRowThreads / 32];
};

// ---- Keys

// visible: keys of the chunk that are.
template <int kStages>
__device__ __forceinline__ LaneKey prepare_keys(WarpKeys<kStages>& keys, int32_t stage,
                                                int32_t half, int32_t visible) {
    const int32_t lane = threadIdx.x % 32, in_half = lane % 4 * 8 + lane / 4;
    LaneKey out;
    out.key = half * kHalfKeys + in_half;
    const bool here = keys.present[stage] >> (4 * half + lane % 4) & 1;
    uint32_t scales = keys.chunks[stage].scales(out.key);
    if (!here || out.key >= visible) scales = kUnitScales;
    const int32_t lowest = lowest_scale(scales);
    const uint32_t shifts = scales - lowest * 0x01010101u;
    static_assert(kMaxRowFold == 2);
    const bool folds = ((shifts + 0x01010101u) & 0xfcfcfcfcu) == 0;
    keys.shifts[in_half] = (shifts << 4) & 0x30303030u;
    out.rest = here ? power_of_two(lowest + kFoldedScoreExponent) : bits_float(kNanBits);
    out.folds = __all_sync(~0u, folds && is_plain(odd_key_bits(scales)));
    return out;
}

// A of the K steps of a tile: 16 keys of the warp, of half `half` of its chunk.
template <int kStages>
__device__ __forceinline__ void load_offset_units(const WarpKeys<kStages>& keys, int32_t stage,
                                                  int32_t half, int tile, const OffsetUnits* tables,
                                                  uint32_t (&out)[kFoldedSteps][4]) {
    const int32_t lane = threadIdx.x % 32;
    const uint4* codes = reinterpret_cast<const uint4*>(keys.chunks[stage].bytes);
    const uint8_t* shifts = reinterpret_cast<const uint8_t*>(keys.shifts);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int32_t at = 4 * (16 * tile + 8 * row) + lane;  // key of the half, and group
        const uint4 raw = codes[4 * kHalfKeys * half + at];
        const OffsetUnits table = *reinterpret_cast<const OffsetUnits*>(
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

// ---- Dots

// Starts those of a tile with all heads. zeros: keys of 0.
template <int kHeads>
__device__ __forceinline__ void start_row(const uint32_t (&keys)[kFoldedSteps][4],
                                          const uint32_t (&zeros)[4], uint32_t units,
                                          uint32_t offsets, uint32_t (&sums)[kHeads / 2]) {
    using Mma = IntegerMma<kHeads>;
    constexpr std::make_index_sequence<kHeads / 2> kAll;
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) cute::warpgroup_fence_operand(sums[i]);
    cute::warpgroup_arrive();
    mma_step<Mma>(zeros, whole_descriptor(offsets), sums, false, kAll);
#pragma unroll
    for (int step = 0; step < kFoldedSteps; ++step) {
        mma_step<Mma>(keys[step], whole_descriptor(units + (32 * step >> 4)), sums, true, kAll);
    }
    cute::warpgroup_commit_batch();
}

// ---- Units

// Which chunk of a unit is the warp's.
__device__ __forceinline__ int32_t chunk_of(int32_t unit) {
    return kUnitKeys / kChunkKeys * unit + static_cast<int32_t>(threadIdx.x / 32 % 4);
}

// What a lane knows of the queries.
template <int kHeads>
struct RowQuery {
    const RowQueries<kHeads>& shared;
    uint32_t units, offsets;  // descriptors, uniform

    __device__ __forceinline__ explicit RowQuery(const RowQueries<kHeads>& from)
        : shared(from),
          units(__shfl_sync(~0u, query_descriptor(from.tile.units), 0)),
          offsets(__shfl_sync(~0u, query_descriptor(from.tile.offsets), 0)) {}

    __device__ __forceinline__ void load_weights(float2 (&weights)[kHeads / 8]) const {
        const float2* source =
            reinterpret_cast<const float2*>(shared.tile.weights) + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i) weights[i] = source[4 * i];
    }
};

// Scores of half a chunk, whose first column is `first`.
template <int kHeads, int kStages, class Sink>
__device__ __forceinline__ void score_half(const IndexScoresParams& p,
                                           const RowQuery<kHeads>& query, WarpKeys<kStages>& keys,
                                           int32_t stage, int32_t half, int32_t row, int32_t first,
                                           int32_t count, Sink& sink) {
    const LaneKey own = prepare_keys(keys, stage, half, count - first);
    __syncwarp();
    uint32_t bytes[kPassTiles][kFoldedSteps][4], sums[kPassTiles][kHeads / 2] = {};
    uint32_t zeros[4];
#pragma unroll
    for (uint32_t& zero : zeros) zero = fresh(static_cast<int>(kKeyOffset));
#pragma unroll
    for (int tile = 0; tile < kPassTiles; ++tile) {
        load_offset_units(keys, stage, half, tile, query.shared.tables, bytes[tile]);
        start_row<kHeads>(bytes[tile], zeros, query.units, query.offsets, sums[tile]);
    }
    float2 weights[kHeads / 8];
    query.load_weights(weights);
    float partials[kPassTiles][2] = {};
    finish_folded<1>(sums[0]);
    add_folded_heads<kHeads>(sums[0], 0, weights, partials[0]);
    finish_folded<0>(sums[1]);
    add_folded_heads<kHeads>(sums[1], 0, weights, partials[1]);
    float score = mul_rn(reduce_quad(partials), own.rest);
    const bool row_folds = query.shared.folds;
    if (!own.folds || !row_folds) {
        score = score_apart(p, row, row_folds, keys.chunks[stage], kHalfKeys * half, count - first,
                            own);
    }
    const int32_t column = first + own.key;
    sink.put(row, column, canonical_nan(score), column < count);
    __syncwarp();
}

// A thread puts its part of the queries; a barrier before and after is the caller's.
template <int kHeads>
__device__ __forceinline__ void put_row(RowQueries<kHeads>& queries, const RowHead& head,
                                        int32_t thread) {
    if (thread < kHeads * kIndexGroups &&
        !queries.tile.put(head, thread / kIndexGroups, thread % kIndexGroups)) {
        queries.folds = 0;
    }
    cutlass::arch::fence_view_async_shared();
}

// Units are dealt out in turn, so that a group knows where the first ones lie before it knows how
// many there are.
template <int kHeads, class Sink>
__device__ __forceinline__ void score_single(const IndexScoresParams& p,
                                             RowQueries<kHeads>& queries,
                                             WarpKeys<kRowStages>& keys, Sink& sink) {
    const ChunkCopier copier(p);
    const int32_t first = blockIdx.x + gridDim.x * (threadIdx.x / kGroupThreads);
    const int32_t step = gridDim.x * kRowGroups;
    const bool guesses = p.batch.requests == 1;
    int32_t pages[kRowStages];
    if (guesses) {
        const int64_t capacity = int64_t{p.block_table.columns} * p.index.page_size;
        const int32_t columns = static_cast<int32_t>(min(capacity, p.columns));
#pragma unroll
        for (int i = 0; i < kRowStages; ++i) {
            pages[i] = copier.find(p.block_table.data, columns, chunk_of(first + i * step));
        }
    }
    RowHead head;
    head.load(p, 0, threadIdx.x / kIndexGroups, threadIdx.x % kIndexGroups);
    const Segment row = group_of(p, 0);
    if (row.end == 0) return;
    const int32_t* table = p.block_table.row(row.request);
    if (!guesses) {
#pragma unroll
        for (int i = 0; i < kRowStages; ++i) {
            pages[i] = copier.find(table, row.count, chunk_of(first + i * step));
        }
    }
#pragma unroll
    for (int i = 0; i < kRowStages; ++i) {
        const int32_t unit = first + i * step;
        if (unit < row.end) copier.copy(pages[i], chunk_of(unit), keys, i);
    }
    put_row(queries, head, threadIdx.x);
    __syncthreads();
    const RowQuery<kHeads> query(queries);
    int32_t stage = 0;
    uint32_t phase = 0;
    for (int32_t unit = first; unit < row.end; unit += step) {
        const int32_t ahead = chunk_of(unit + kRowStages * step);
        const bool more = unit + kRowStages * step < row.end;
        const int32_t page = more ? copier.find(table, row.count, ahead) : -1;
        keys.full[stage].wait(phase);
#pragma unroll 1
        for (int32_t half = 0; half < 2; ++half) {
            score_half(p, query, keys, stage, half, row.first_row, chunk_of(unit) * kChunkKeys,
                       row.count, sink);
        }
        if (more) copier.copy(page, ahead, keys, stage);
        stage = stage + 1 == kRowStages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
}

template <int kHeads, class Sink>
__global__ void __launch_bounds__(kRowThreads, 1)
    score_single_kernel(const __grid_constant__ IndexScoresParams p,
                        const __grid_constant__ typename Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SingleShared<kHeads>& shared = *reinterpret_cast<SingleShared<kHeads>*>(shared_bytes);
    auto& keys = shared.warps[__shfl_sync(~0u, threadIdx.x / 32, 0)];
    keys.init();
    shared.queries.init(threadIdx.x);
    __syncthreads();
    wait_for_previous();
    allow_dependents();
    Sink sink(sink_params, nullptr);
    score_single(p, shared.queries, keys, sink);
}

}  // namespace flash_csa::sm90
