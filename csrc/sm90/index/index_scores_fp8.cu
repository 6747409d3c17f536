// index_scores of IndexFp8 keys: 128 E4M3 codes and one FP32 scale, on FP16 tensor cores.
//
//   in   index pages, queries (FP8 or FP4), weights, block table, pool      out  scores [R,
//   columns]
//
// E4M3 values are exact in FP16, so are their products in FP32: the dot errs by FP32 sums alone,
// where FP8 tensor cores would keep 13 bits behind the largest product (docs/index.md). Keys are M,
// codes in registers straight from pages; queries are N in shared memory; K is dealt so that a lane
// reads 32 neighbouring bytes of a key, on both sides alike. A score depends on its key and its
// query row alone, so that every page size, pool and way of cutting a batch gives the same bits.
//
// A block, one warpgroup, takes a few rows and every `slices`-th tile of 64 columns; keys of a tile
// are decoded once for all rows of their request. While a tile is scored the codes of the next one
// come, and the pages of the one after it.
//
// Floor: 132 bytes a key, 470 cycles of an SM for a tile; its products take 128 a row of 32 heads.
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include <algorithm>
#include <utility>

#include "core/columns.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/wgmma.cuh"
#include "sm90/index/index_scores.h"
#include "sm90/index/score_keys.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = 128, kBlocksPerSm = 4;
constexpr int kTileKeys = 64, kWarpKeys = 16;
constexpr int kSteps = kIndexDims / 16;  // of K
constexpr int kMaxRows = 8;              // that share decoded keys
constexpr int kTileBytes = 48 * 1024;    // of queries: kBlocksPerSm fit
constexpr int kQueryBytes = 2 * kIndexDims;

struct Plan {
    int32_t rows;    // of a block
    int32_t slices;  // blocks that share a group of rows
    int32_t heads;   // of a row, padded
    cutlass::FastDivmod page_size;
};

template <int kHeads>
struct HalfMma;
template <>
struct HalfMma<8> : detail::gmma::MMA_64x8x16_F32F16F16_RS<detail::Major::K, detail::Major::K> {};
template <>
struct HalfMma<16> : detail::gmma::MMA_64x16x16_F32F16F16_RS<detail::Major::K, detail::Major::K> {};
template <>
struct HalfMma<32> : detail::gmma::MMA_64x32x16_F32F16F16_RS<detail::Major::K, detail::Major::K> {};

// Two E4M3 codes as FP16, exact.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    return uint32_t{pair.y} << 16 | pair.x;
}

// ---- Queries

// Exponents of an FP4 head are those of its largest group times this: its values are at most
// 6 * 2^10, and exact where a group's exponent is at most 33 below; smaller ones are rounded.
constexpr int kTopExponent = 10;

// Powers of two that take the groups of a head to their values in FP16, and what is left of its
// scales.
struct HeadScales {
    float groups[kIndexGroups];
    float rest;

    __device__ __forceinline__ explicit HeadScales(uint32_t word) {
        uint32_t top = 0;
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) top = max(top, word >> 8 * g & 0xffu);
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            const int below = static_cast<int>(top - (word >> 8 * g & 0xffu));
            groups[g] = bits_float(static_cast<uint32_t>(max(127 + kTopExponent - below, 0)) << 23);
        }
        rest = mul_rn(decode_ue8m0(static_cast<uint8_t>(top)), 1.0f / (1 << kTopExponent));
    }
};

// Panels of 64 columns of K, 128-byte swizzle: column h of N is a head. Position 16 s + 8 i + 2 t +
// j of K is channel 32 t + 4 s + 2 i + j.
struct QueryTile {
    uint8_t* codes;
    float* weights;  // halved: a dot and its magnitude are added instead of taking a maximum
    int32_t columns;

    __device__ __forceinline__ QueryTile(uint8_t* base, int32_t heads)
        : codes(base),
          weights(reinterpret_cast<float*>(base + heads * kQueryBytes)),
          columns(heads) {}
    static constexpr int64_t bytes(int64_t heads) { return heads * (kQueryBytes + 4); }

    __device__ __forceinline__ uint64_t step(int32_t column, int s) const {
        return advance(k_major(codes),
                       s / 4 * columns * kPanelRowBytes + s % 4 * 32 + column * kPanelRowBytes);
    }
    // Channels of chunk 2 s + i of a head: two of each quarter.
    __device__ __forceinline__ void put(int32_t column, int chunk, const uint32_t (&pairs)[4]) {
        uint8_t* panel = codes + chunk / 8 * columns * kPanelRowBytes;
        *reinterpret_cast<uint4*>(panel + panel_offset(column, chunk % 8)) = {pairs[0], pairs[1],
                                                                              pairs[2], pairs[3]};
    }
};

__device__ __forceinline__ void load_chunk(const IndexScoresParams& p, int64_t row, int32_t head,
                                           int chunk, uint32_t (&pairs)[4], float* weight) {
    const uint8_t* codes = p.query.codes.row(row);
    *weight = mul_rn(0.5f, head_weight(p.weights, row, head));
    if (p.query.scales_f32) {
        codes += int64_t{head} * kIndexDims + 2 * chunk;
#pragma unroll
        for (int t = 0; t < 4; ++t)
            pairs[t] = halves_of(*reinterpret_cast<const uint16_t*>(codes + 32 * t));
        *weight = mul_rn(*weight, p.query.scales_f32.row(row)[head]);
        return;
    }
    codes += int64_t{head} * (kIndexDims / 2) + chunk;
    const HeadScales scales(static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]));
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const uint8_t both = codes[16 * t];
        const __half2 pair = __floats2half2_rn(decode_e2m1(both & 0xf) * scales.groups[t],
                                               decode_e2m1(both >> 4) * scales.groups[t]);
        pairs[t] = reinterpret_cast<const uint32_t&>(pair);
    }
    *weight = mul_rn(*weight, scales.rest);
}

// Rows [first, first + rows) of the batch.
__device__ __forceinline__ void load_queries(const IndexScoresParams& p, const Plan& plan,
                                             int64_t first, int32_t rows, QueryTile tile) {
    constexpr int kChunks = kIndexDims / 8;
    for (int32_t i = threadIdx.x; i < rows * plan.heads * kChunks; i += kThreads) {
        const int32_t column = i / kChunks, head = column % plan.heads;
        uint32_t pairs[4] = {};
        float weight = 0.0f;
        if (head < p.query.heads)
            load_chunk(p, first + column / plan.heads, head, i % kChunks, pairs, &weight);
        tile.put(column, i % kChunks, pairs);
        if (i % kChunks == 0) tile.weights[column] = weight;
    }
}

// ---- Keys

// Where the keys of a warp's columns lie: lane % 16 knows of one. What the block table says is on
// its way and not waited for.
struct KeyPlace {
    int32_t page = -1, at = 0;  // -1: on none
    bool shown;                 // the column is not hidden

    __device__ __forceinline__ KeyPlace(const Columns& columns, const Plan& plan, int32_t column) {
        shown = column < columns.count;
        if (!shown) return;
        const int64_t position = columns.position(column);
        shown = columns.visible(position);
        if (!shown) return;
        int number;
        plan.page_size(number, at, static_cast<int>(position));
        page = __ldg(columns.pages + number);
    }
};

// Lane 4g + t has bytes 32t .. 32t + 31 of keys g and g + 8; lane % 16 a scale, NaN where there is
// no key.
struct RawKeys {
    uint4 codes[2][2];
    float scale;

    __device__ __forceinline__ void load(const IndexScoresParams& p, const KeyPlace& place) {
        constexpr Record r = record(RecordId::IndexFp8);
        static_assert(r.data_bytes == kIndexDims && r.scale_bytes == sizeof(float));
        const ConstPages& index = p.index;
        const bool present = place.page >= 0 && place.page < index.num_pages;
        const uint8_t* page = index.data + place.page * index.page_stride;
        const uint8_t* row = present ? page + r.data_at(place.at) : nullptr;
        scale = bits_float(kNanBits);
        if (present) {
            const int64_t scale_at = r.scale_at(place.at, index.page_size);
            scale = __ldg(reinterpret_cast<const float*>(page + scale_at));
        }
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint64_t other =
                __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), 8 * half + lane / 4);
            const uint4* from = reinterpret_cast<const uint4*>(other) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) codes[half][i] = other == 0 ? uint4{} : __ldg(from + i);
        }
    }
};

// The keys of a tile as A of kSteps MMAs.
struct KeyFragments {
    FragmentA a[kSteps];

    __device__ __forceinline__ explicit KeyFragments(const RawKeys& keys) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 low = keys.codes[half][0], high = keys.codes[half][1];
            const uint32_t words[kSteps] = {low.x,  low.y,  low.z,  low.w,
                                            high.x, high.y, high.z, high.w};
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                a[s][half] = halves_of(words[s] & 0xffffu);
                a[s][2 + half] = halves_of(words[s] >> 16);
            }
        }
    }
};

// Score of key lane % 16 of the warp, without its scale: the MMA leaves head 8i + 2t + c of key g +
// 8 half in element 4i + 2 half + c.
template <int kHeads>
__device__ __forceinline__ float score_row(const KeyFragments& keys, const QueryTile& tile,
                                           int32_t first, int32_t end) {
    const int lane = threadIdx.x % 32;
    float partials[2] = {};
    for (int32_t column = first; column < end; column += kHeads) {
        float sums[kHeads / 2];
        fence_registers(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            detail::multiply<HalfMma<kHeads>>(keys.a[s], tile.step(column, s), sums, s > 0,
                                              std::make_index_sequence<kHeads / 2>{});
        }
        cute::warpgroup_commit_batch();
        const float2* weights = reinterpret_cast<const float2*>(tile.weights + column) + lane % 4;
        float2 weight[kHeads / 8];
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i) weight[i] = weights[4 * i];
        cute::warpgroup_wait<0>();
        fence_registers(sums);
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& sum = partials[half];
                const float low = sums[4 * i + 2 * half], high = sums[4 * i + 2 * half + 1];
                sum = fma_rn(weight[i].x, add_rn(low, fabsf(low)), sum);
                sum = fma_rn(weight[i].y, add_rn(high, fabsf(high)), sum);
            }
        }
    }
    // Lane 4g + t: key g + 8 (t % 2); then to lane % 16.
    const bool odd = lane & 1;
    const float given = odd ? partials[0] : partials[1];
    float score = add_rn(odd ? partials[1] : partials[0], __shfl_xor_sync(~0u, given, 1));
    score = add_rn(score, __shfl_xor_sync(~0u, score, 2));
    return __shfl_sync(~0u, score, lane % 8 * 4 + lane / 8 % 2);
}

// ---- Kernel

template <int kHeads>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    fp8_scores_kernel(const __grid_constant__ IndexScoresParams p,
                      const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    __shared__ Columns columns[kMaxRows];
    allow_dependents();
    wait_for_previous();
    const int64_t first_row = int64_t{blockIdx.x} / plan.slices * plan.rows;
    const int32_t slice = static_cast<int32_t>(blockIdx.x) % plan.slices;
    const int32_t rows = static_cast<int32_t>(min(int64_t{plan.rows}, p.batch.rows - first_row));
    if (threadIdx.x < rows)
        columns[threadIdx.x] = columns_of(p, p.index.page_size, p.columns, first_row + threadIdx.x);
    QueryTile tile(shared_bytes, plan.rows * plan.heads);
    load_queries(p, plan, first_row, rows, tile);
    cutlass::arch::fence_view_async_shared();
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int32_t begin = 0, end; begin < rows; begin = end) {
        // Rows of a request; the widest of them knows all their keys.
        int32_t widest = begin;
        for (end = begin; end < rows && columns[end].pages == columns[begin].pages; ++end)
            if (columns[end].count > columns[widest].count) widest = end;
        const Columns all = columns[widest];
        const int32_t stride = plan.slices * kTileKeys;
        int32_t column = slice * kTileKeys + warp * kWarpKeys + lane % kWarpKeys;
        KeyPlace place(all, plan, column), next(all, plan, column + stride);
        RawKeys raw;
        raw.load(p, place);
        for (int32_t at = slice * kTileKeys; at < all.count; at += stride, column += stride) {
            const KeyFragments keys(raw);
            const float scale = raw.scale;
            const bool shown = place.shown;
            place = next;
            raw.load(p, place);
            next = KeyPlace(all, plan, column + 2 * stride);
            for (int32_t row = begin; row < end; ++row) {
                const float score =
                    score_row<kHeads>(keys, tile, row * plan.heads, (row + 1) * plan.heads);
                if (shown && lane < kWarpKeys && column < columns[row].count)
                    p.out.row(first_row + row)[column] = canonical_nan(mul_rn(score, scale));
            }
        }
    }
}

template <int kHeads>
cudaError_t launch_fp8(const IndexScoresParams& p, int32_t sms, cudaStream_t stream) {
    Plan plan;
    plan.page_size = cutlass::FastDivmod(p.index.page_size);
    plan.heads = (p.query.heads + kHeads - 1) / kHeads * kHeads;
    const int64_t capacity = p.pool.blocks ? int64_t{p.pool.width} * kPoolBlock
                                           : int64_t{p.block_table.columns} * p.index.page_size;
    // A row with a pool has its own keys.
    plan.rows = p.pool.blocks ? 1 : std::min(p.batch.max_rows, kMaxRows);
    const int32_t fit = static_cast<int32_t>(kTileBytes / QueryTile::bytes(plan.heads));
    plan.rows = std::max(1, std::min(plan.rows, fit));
    const int64_t groups = (int64_t{p.batch.rows} + plan.rows - 1) / plan.rows;
    const int64_t tiles = (std::min(capacity, p.columns) + kTileKeys - 1) / kTileKeys;
    if (groups == 0 || tiles == 0) return cudaSuccess;
    const int64_t blocks = int64_t{sms} * kBlocksPerSm;
    plan.slices = static_cast<int32_t>(std::min(tiles, std::max<int64_t>(1, blocks / groups)));
    return launch_after(fp8_scores_kernel<kHeads>, blocks_for(groups * plan.slices, 1), kThreads,
                        QueryTile::bytes(int64_t{plan.rows} * plan.heads), stream, p, plan);
}

}  // namespace

cudaError_t index_scores_fp8(const IndexScoresParams& p, cudaStream_t stream) {
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    if (p.query.heads <= 8) return launch_fp8<8>(p, sms, stream);
    if (p.query.heads <= 16) return launch_fp8<16>(p, sms, stream);
    return launch_fp8<32>(p, sms, stream);
}

}  // namespace flash_csa::sm90
