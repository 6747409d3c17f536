// The main loop of every kernel that scores index keys: FP4 keys from pages against the queries of
// a group, final FP32 scores handed to a sink.
//
// Warps: groups of four take units in turn; behind them one warp loads keys and one prepares scales
// (key_ring.cuh). A group's 128 keys are the M rows of two MMA tiles, their codes in registers; a
// block of kHeads queries is N. One K step is one scale group and has an accumulator of its own, so
// every dot is exact, and the sums over groups and heads are those of core/scoring.h, bit for bit:
//
//   dot   = fma(k3, r3, fma(k2, r2, fma(k1, r1, k0)))      r_g: powers of two of the key
//   p_t   = fma(w, dot + |dot|, p_t)                       w: weight and powers of two of the head
//   score = ((p0 + p1) + (p2 + p3)) * 2^e                  t: lane in the quad, e: of the key
//
// Powers of two may leave the sums where no term leaves the normal range: where all scales of the
// unit and of the row are plain. Elsewhere the sums are taken as written in core/scoring.h.
//
// A sink is an object of each consumer thread:
//
//   struct Sink {
//       struct Params {...};                  // passed by value to the kernel
//       static constexpr int kSharedBytes;    // of the block, for the sink alone, 16-byte aligned
//       Sink(const Params&, uint8_t* shared);
//       void begin(const Segment&, int thread, int threads);    // all consumers, before its scores
//       void put(int64_t row, int32_t column, float score, bool visible);
//       void end(const Segment&, int thread, int threads);      // all consumers, after its scores
//   };
//
// A barrier of the consumers separates begin, the scores and end. put is called by whole warps: a
// warp hands over one score a lane, of four blocks of eight columns that start at multiples of
// eight: bits 2, 3 of the lane say which block, bits 1, 0, 4 (most significant first) the column in
// it. Scores are canonical (core/numerics.h); that of an entry on no page is NaN.
// Columns with visible == false have undefined scores. Each visible column of each row of the
// segment is handed over once, in any order.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "sm90/index/key_ring.cuh"
#include "sm90/index/query_tile.cuh"

namespace flash_csa::sm90 {

constexpr int kSmemOptIn = 227 * 1024;
constexpr int kHelperWarps = 4;  // loader, scales; registers move by groups of four
constexpr int kConsumerRegisters = 152, kHelperRegisters = 56;  // of 128 at the launch
constexpr int kGroupThreads = 128;
constexpr int kTileKeys = 64;  // M of an MMA
constexpr int kUnitTiles = kUnitKeys / kTileKeys;

template <int kHeads>
struct Mma;
template <>
struct Mma<8> : cute::SM90::GMMA::MMA_64x8x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Mma<16> : cute::SM90::GMMA::MMA_64x16x32_F32E4M3E4M3_RS_TN<> {};
template <>
struct Mma<32> : cute::SM90::GMMA::MMA_64x32x32_F32E4M3E4M3_RS_TN<> {};

// What the host decides about a launch.
struct ScorePlan {
    int32_t max_rows;      // of a group
    int32_t padded_heads;  // a multiple of kHeads
    int32_t num_stages;
};

template <int kHeads_, int kGroups_, class Sink_>
struct ScoreConfig {
    using Sink = Sink_;
    static constexpr int kHeads = kHeads_;    // N of an MMA
    static constexpr int kGroups = kGroups_;  // of consumer warps
    static constexpr int kConsumers = kGroups * kGroupThreads;
    static constexpr int kThreads = kConsumers + kHelperWarps * 32;
    static constexpr int kSums = kHeads / 2;  // accumulators of a thread, scale group and tile
};

// Dynamic shared memory, the parts whose size only the host knows. All start at multiples of 16.
template <class Config>
struct ScoreShared {
    QueryTile queries;
    int32_t* counts;  // [max_rows] columns of the segment's rows
    KeyRing ring;
    WorkList<Config::kThreads>* work;
    uint8_t* sink;
    int32_t bytes;

    __host__ __device__ ScoreShared(uint8_t* base, const ScorePlan& plan) {
        uint8_t* next = base;
        const auto take = [&](int32_t size) {
            uint8_t* part = next;
            next += (size + 15) / 16 * 16;
            return part;
        };
        const int32_t heads = plan.max_rows * plan.padded_heads;
        queries.codes = take(heads * kQueryBytes);  // the swizzle needs 1024: first
        queries.weights = reinterpret_cast<float*>(take(heads * sizeof(float)));
        queries.plain = reinterpret_cast<uint32_t*>(take(plan.max_rows * sizeof(uint32_t)));
        counts = reinterpret_cast<int32_t*>(take(plan.max_rows * sizeof(int32_t)));
        work = reinterpret_cast<WorkList<Config::kThreads>*>(take(sizeof(*work)));
        sink = take(Config::Sink::kSharedBytes);
        ring.num_stages = plan.num_stages;
        ring.stages = reinterpret_cast<KeyStage*>(take(plan.num_stages * sizeof(KeyStage)));
        ring.full = reinterpret_cast<Barrier*>(take(3 * plan.num_stages * sizeof(Barrier)));
        ring.ready = ring.full + plan.num_stages;
        ring.empty = ring.ready + plan.num_stages;
        bytes = static_cast<int32_t>(next - base);
    }
};

// ---- Consumers

// The codes of 16 keys of a warp, ready as A of four MMA steps.
struct KeyFragment {
    uint32_t a[kIndexGroups][4];
};

// Keys of a lane's two accumulator rows: 4 tile + 2 half + (lane / 16) of its warp's eight in run
// lane / 4 % 4.
__device__ __forceinline__ int32_t unit_key(int32_t warp, int32_t lane, int32_t tile,
                                            int32_t half) {
    return kRunKeys * (lane / 4 % 4) + 8 * warp + 4 * tile + 2 * half + lane / 16;
}

__device__ __forceinline__ void load_fragment(const KeyStage& stage, int32_t warp, int32_t tile,
                                              KeyFragment* out) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t row = lane % 8, group = lane / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t key = 8 * warp + 4 * tile + 2 * half + row / 4;
        const uint8_t* source =
            stage.codes + row % 4 * kRunBytes + key * kKeyBytes + group * (kKeyBytes / 4);
        uint32_t words[kIndexGroups];
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(source), words[0],
                                      words[1], words[2], words[3]);
#pragma unroll
        for (int g = 0; g < kIndexGroups; ++g) {
            const PlacedWord placed = place_codes(words[g]);
            out->a[g][half] = placed.even;
            out->a[g][2 + half] = placed.odd;
        }
    }
}

template <int kHeads, size_t... I>
__device__ __forceinline__ void mma_step(const uint32_t (&a)[4], uint64_t b, float* sums,
                                         std::index_sequence<I...>) {
    Mma<kHeads>::fma(a[0], a[1], a[2], a[3], b, sums[I]..., cute::SM90::GMMA::ScaleOut::Zero);
}

// Starts the dots of a tile with kHeads queries, one accumulator a scale group.
template <class Config>
__device__ __forceinline__ void start_dots(const KeyFragment& keys, uint64_t queries,
                                           float (*sums)[Config::kSums]) {
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kSums; ++i) cute::warpgroup_fence_operand(sums[g][i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
        // A K step is 32 bytes, 2 in units of 16, inside the swizzled 128.
        mma_step<Config::kHeads>(keys.a[g], queries + 2 * g, sums[g],
                                 std::make_index_sequence<Config::kSums>{});
    }
    cute::warpgroup_commit_batch();
}

template <class Config>
__device__ __forceinline__ void finish_dots(float (*sums)[Config::kSums]) {
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kSums; ++i) cute::warpgroup_fence_operand(sums[g][i]);
    }
}

// Descriptor of B: K contiguous, 128-byte swizzle, 8 heads in 1024 bytes.
__device__ __forceinline__ uint64_t query_descriptor(const uint8_t* codes) {
    cute::GmmaDescriptor desc;
    desc.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(codes) >> 4;
    desc.bitfield.leading_byte_offset_ = 1;
    desc.bitfield.stride_byte_offset_ = 8 * kQueryBytes >> 4;
    desc.bitfield.base_offset_ = 0;
    desc.bitfield.layout_type_ = 1;
    return desc;
}

// Adds kHeads heads to the partial sums of a thread's two keys. sums: [group][2 * (head pair) ...]
// as the MMA leaves them: head 8 i + 2 t + c of key `half` is element 4 i + 2 half + c.
template <class Config>
__device__ __forceinline__ void add_plain_heads(const float (*sums)[Config::kSums],
                                                const float* weights, const float4 (&factors)[2],
                                                float (&partials)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kHeads / 8; ++i) {
        const float2 pair = *reinterpret_cast<const float2*>(weights + 8 * i);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = 4 * i + 2 * half + c;
                float dot = fma_rn(sums[1][at], factors[half].x, sums[0][at]);
                dot = fma_rn(sums[2][at], factors[half].y, dot);
                dot = fma_rn(sums[3][at], factors[half].z, dot);
                const float twice = add_rn(dot, fabsf(dot));
                partials[half] = fma_rn(c == 0 ? pair.x : pair.y, twice, partials[half]);
            }
        }
    }
}

// The same as core/scoring.h writes it, from the raw scales and weights. `first` is the first head.
template <class Config>
__device__ __forceinline__ void add_heads(const IndexScoresParams& p, int64_t row, int32_t first,
                                          const float (*accumulators)[Config::kSums],
                                          const uint32_t (&key_scales)[2], float (&partials)[2]) {
    float sums[kIndexGroups][Config::kSums];  // indexed at run time: a copy, in local memory
#pragma unroll
    for (int g = 0; g < kIndexGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Config::kSums; ++i) sums[g][i] = accumulators[g][i];
    }
#pragma unroll 1
    for (int i = 0; i < Config::kHeads / 4; ++i) {
        const int32_t head = first + 8 * (i / 2) + threadIdx.x % 4 * 2 + i % 2;
        if (head >= p.query.heads) break;
        const uint32_t scales = static_cast<uint32_t>(p.query.scales_ue8m0.row(row)[head]);
        const ByteRange range = scale_range(scales);
        const float weight = head_weight(p.weights, row, head);
        for (int half = 0; half < 2; ++half) {
            int32_t quarters[kIndexGroups];
            float products[kIndexGroups];
            for (int g = 0; g < kIndexGroups; ++g) {
                const int32_t fold = head_fold(scales, range, g) + kPlacedExponent;
                const float sum = sums[g][4 * (i / 2) + 2 * half + i % 2];
                quarters[g] = static_cast<int32_t>(sum * power_of_two(127 + 2 - fold));
                products[g] = scale_product(static_cast<uint8_t>(scales >> (8 * g)),
                                            static_cast<uint8_t>(key_scales[half] >> (8 * g)));
            }
            partials[half] =
                accumulate_head(partials[half], weight, combine_groups(quarters, products));
        }
    }
}

// Four keys of a quad, each a partial sum per lane, to one score a lane: lane t gets key t.
__device__ __forceinline__ float reduce_quad(const float (&partials)[kUnitTiles][2]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    float pairs[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const float keep = odd ? partials[tile][1] : partials[tile][0];
        const float give = odd ? partials[tile][0] : partials[tile][1];
        pairs[tile] = add_rn(keep, __shfl_xor_sync(~0u, give, 1));
    }
    const float keep = upper ? pairs[1] : pairs[0];
    const float give = upper ? pairs[0] : pairs[1];
    return add_rn(keep, __shfl_xor_sync(~0u, give, 2));
}

// All rows of the segment against one unit.
template <class Config>
__device__ __forceinline__ void score_unit(const IndexScoresParams& p, const Segment& segment,
                                           int32_t unit, const ScorePlan& plan,
                                           const QueryTile& queries, const int32_t* counts,
                                           const KeyRing& ring, const RingPosition& at,
                                           typename Config::Sink& sink) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
    KeyStage& stage = ring.stages[at.stage];
    ring.full[at.stage].wait(at.phase);
    KeyFragment keys[kUnitTiles];
#pragma unroll
    for (int tile = 0; tile < kUnitTiles; ++tile) load_fragment(stage, warp, tile, &keys[tile]);
    ring.ready[at.stage].wait(at.phase);
    const uint32_t plain_keys = stage.plain;
    // The key whose score this lane hands over.
    const int32_t own = unit_key(warp, lane, t / 2, t % 2);
    const float exponent = stage.factors[own / kRunKeys][own % kRunKeys].w;
    const int32_t column = unit * kUnitKeys + own;
    const uint64_t descriptor = query_descriptor(queries.codes);

    for (int32_t row = 0; row < segment.rows; ++row) {
        const bool plain = plain_keys & queries.plain[row];
        float partials[kUnitTiles][2] = {};
        for (int32_t first = 0; first < plan.padded_heads; first += Config::kHeads) {
            const int32_t head = row * plan.padded_heads + first;
            const uint64_t block = descriptor + head * (kQueryBytes >> 4);
#pragma unroll
            for (int tile = 0; tile < kUnitTiles; ++tile) {
                float sums[kIndexGroups][Config::kSums];
                start_dots<Config>(keys[tile], block, sums);
                const int32_t key = unit_key(warp, lane, tile, 0);  // the other half: key + 2
                const float4* key_factors = &stage.factors[key / kRunKeys][key % kRunKeys];
                const float4 factors[2] = {key_factors[0], key_factors[2]};
                finish_dots<Config>(sums);
                if (plain) {
                    add_plain_heads<Config>(sums, queries.weights + head + 2 * t, factors,
                                            partials[tile]);
                } else {
                    const uint32_t scales[2] = {stage.scales[key], stage.scales[key + 2]};
                    add_heads<Config>(p, segment.first_row + row, first, sums, scales,
                                      partials[tile]);
                }
            }
        }
        float score = reduce_quad(partials);
        score = canonical_nan(plain ? mul_rn(score, exponent) : isnan(exponent) ? exponent : score);
        sink.put(segment.first_row + row, column, score, column < counts[row]);
    }
    __syncwarp();
    if (lane == 0) ring.empty[at.stage].arrive();
}

template <class Config>
__device__ __forceinline__ void consumers_sync() {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers,
                                      cutlass::arch::ReservedNamedBarriers::FirstUserBarrier);
}

// A consumer group's place among the units: every kGroups-th of the block is its own.
template <class Config>
struct Turn {
    RingPosition at;
    int32_t skip;  // units of the next segment before its first

    __device__ explicit Turn(int32_t group) : skip(group) { at.stage = group; }
};

template <class Config>
__device__ __forceinline__ void consume(const IndexScoresParams& p, const Segment& segment,
                                        const ScorePlan& plan, const ScoreShared<Config>& shared,
                                        Turn<Config>& turn, typename Config::Sink& sink) {
    constexpr int kThreads = Config::kConsumers;
    const int32_t thread = threadIdx.x;
    consumers_sync<Config>();  // the last segment's queries are read
    sink.begin(segment, thread, kThreads);
    for (int32_t row = thread; row < segment.rows; row += kThreads) {
        shared.queries.plain[row] = 1;
        const int64_t at = int64_t{segment.first_row} + row;
        shared.counts[row] = columns_of(p, p.index.page_size, p.columns, at).count;
    }
    consumers_sync<Config>();
    load_queries<kThreads>(p, segment, plan.padded_heads, shared.queries, thread);
    cutlass::arch::fence_view_async_shared();
    consumers_sync<Config>();
    const int32_t units = segment.end - segment.begin;
    int32_t unit = turn.skip;
    for (; unit < units; unit += Config::kGroups) {
        score_unit<Config>(p, segment, segment.begin + unit, plan, shared.queries, shared.counts,
                           shared.ring, turn.at, sink);
        turn.at.advance(shared.ring, Config::kGroups);
    }
    turn.skip = unit - units;
    consumers_sync<Config>();
    sink.end(segment, thread, kThreads);
}

// ---- Kernel

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    score_kernel(const __grid_constant__ IndexScoresParams p, const ScorePlan plan,
                 const __grid_constant__ typename Config::Sink::Params sink_params) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const ScoreShared<Config> shared(shared_bytes, plan);
    if (threadIdx.x == 0) shared.ring.init(kGroupThreads / 32);
    __syncthreads();
    const int32_t warp = threadIdx.x / 32;
    constexpr int32_t kLoader = Config::kConsumers / 32;
    if (warp < kLoader) {
        cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
        Turn<Config> turn(warp / 4);
        typename Config::Sink sink(sink_params, shared.sink);
        for_each_segment(p, plan.max_rows, *shared.work, [&](const Segment& segment) {
            consume<Config>(p, segment, plan, shared, turn, sink);
        });
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kHelperRegisters>();
        RingPosition at;
        for_each_segment(p, plan.max_rows, *shared.work, [&](const Segment& segment) {
            if (warp == kLoader) load_keys(p, segment, shared.ring, at);
            if (warp == kLoader + 1) prepare_scales(segment, shared.ring, at);
        });
    }
}

}  // namespace flash_csa::sm90
