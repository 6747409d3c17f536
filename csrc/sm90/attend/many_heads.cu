// attend on tensor cores: blocks of 64 heads, any records, BF16 output.
//
//   in   q, window and main records, lists            out  out, lse, or partial results
//
// A CTA takes pieces (pieces.cuh) of 64 heads, tiles of 64 records. Warpgroups:
//   scores    logits q . k^T, softmax, columns 0..255 of the output
//   values    columns 256..511
//   convert   records -> BF16 tile in shared memory (many_heads_convert.cuh)
//   copy      finds the records, starts their copies (many_heads_copy.cuh)
// Queries are brought by the values, or in a pair by the copying warps (many_heads_query.cuh).
// Where a CTA of a pair begins, the consumers convert a tile of WindowFp8 records, too
// (many_heads_first.cuh).
//
// Blocks of heads that are even in number go in pairs: a cluster of two CTAs takes the same pieces
// of two blocks. Each finds, copies and converts half of the records of a tile, and copies the BF16
// rows into the peer's tile.
//
//   tile t   copy     |t + 2                       |t + 3      |
//            convert  |t + 1                       |t + 2      |
//            scores   |softmax(t)|p.v(t)           |q.k(t + 1) |softmax(t + 1) ...
//            values              |p.v(t)           |
//
// Half of softmax(t) is under the own p.v(t). In blocks alone the first steps of q.k(t + 1) are
// queued behind it, or, where main records are MixedFp8, q.k pauses for conversion (kPauses).
//
// Kernels: pairs and blocks alone, each for lists that are known when it is compiled and for any
// (Lists).
//
// Floor of a tile: 2 * 64 * 64 * 512 * 2 FLOP = 2048 cycles of the tensor cores. Bytes: 64 records,
// read once per block of heads, or pair of blocks.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "sm90/attend/many_heads_convert.cuh"
#include "sm90/attend/many_heads_copy.cuh"
#include "sm90/attend/many_heads_first.cuh"
#include "sm90/attend/many_heads_output.cuh"
#include "sm90/attend/many_heads_query.cuh"
#include "sm90/attend/many_heads_softmax.cuh"
#include "sm90/attend/query_map.h"
#include "sm90/attend/variants.h"
#include "sm90/common/cluster.h"
#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {
namespace many_heads {

using cutlass::arch::NamedBarrier;

// 64 K registers: 128 a thread at entry. Scores hold 128 + 32 accumulators and 16 probabilities.
template <bool kPauses>
struct Registers {
    static constexpr int kScores = 208, kCopy = kPauses ? 56 : 48, kConvert = kPauses ? 72 : 80;
    static constexpr int kValues = 512 - kScores - kCopy - kConvert;
};

// Probabilities of a tile as the A operand of the products with the values.
using Weights = FragmentA[kValueSteps];

__device__ __forceinline__ void to_fragment(const float (&s)[32], int k, FragmentA& a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        memcpy(&a[i], &pair, sizeof pair);
    }
}

// For the other warpgroup: probabilities, as the same lane there takes them, and the weight of
// earlier tiles.
__device__ __forceinline__ void share(const Weights& a, const float (&keep)[2], const RowPair& rows,
                                      Shared& shared) {
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k)
        shared.p[k][threadIdx.x % kWarpgroup] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
    if (threadIdx.x % 4 == 0) {
        shared.keep[rows.head[0]] = keep[0];
        shared.keep[rows.head[1]] = keep[1];
    }
}

// The same descriptor, known to be the same in all lanes.
__device__ __forceinline__ uint64_t uniform(uint64_t operand) {
    const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(operand), 0);
    return (operand >> 32 << 32) | low;
}

// q . k^T of a tile: steps of 16 dims.
inline constexpr int kScoreSteps = kHeadDim / 16;

__device__ __forceinline__ void issue_score_steps(uint64_t q, uint64_t kv, float (&s)[32],
                                                  int first, int end) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = first; k < end; ++k) {
        const int at = k / 4 * kTilePanelBytes + k % 4 * 32;
        multiply_64x64(advance(q, at), advance(kv, at), s, k > 0);
    }
    cute::warpgroup_commit_batch();
}

// All of them. While they run, nobody else gets at shared memory: where conversion binds, pauses
// let it in.
template <bool kPauses>
__device__ __forceinline__ void issue_scores(uint64_t q, uint64_t kv, float (&s)[32]) {
    constexpr int kTogether = kPauses ? 2 : kScoreSteps;
    kv = uniform(kv);
#pragma unroll
    for (int first = 0; first < kScoreSteps; first += kTogether) {
        if (first > 0) cute::warpgroup_wait<0>();
        fence_registers(s);
        issue_score_steps(q, kv, s, first, first + kTogether);
    }
}

// p . v of a tile, for one half of the columns: steps kFirst .. kEnd of 16 records.
template <int kFirst, int kEnd>
__device__ __forceinline__ void issue_values(Weights& a, uint64_t kv, Output& o) {
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k) fence_registers(a[k]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int at = k * 16 * kPanelRowBytes + n * kProductPanels * kTilePanelBytes;
            multiply_64x128(a[k], advance(kv, at), o.part[n], true);
        }
    }
    cute::warpgroup_commit_batch();
}

// The sinks of a piece that is a whole row: two heads a lane.
struct Sinks {
    float of[2];

    __device__ __forceinline__ Sinks(const AttendParams& p, const Cuts& cuts, const Piece& piece,
                                     const RowPair& rows) {
        const bool whole = cuts.count(piece.row) == 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head = piece.head_block * kHeadBlock + rows.head[h];
            const bool there = head < p.heads;
            of[h] = whole && there && p.sink != nullptr ? p.sink[head] : -INFINITY;
        }
    }
};

// The end of a piece's sums, for both warpgroups: each fourth lane speaks.
__device__ __forceinline__ void finish_sums(const Sinks& sinks, const Softmax& softmax,
                                            const RowPair& rows, Ends& ends) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float all = softmax.sum[h];
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        const float sum = all + exp2f(fmaf(sinks.of[h], kLog2e, -softmax.max[h]));
        if (threadIdx.x % 4 != 0) continue;
        ends.factor[rows.head[h]] = all == 0.f ? 0.f : kTileFactor / sum;
        ends.max[rows.head[h]] = softmax.max[h];
        ends.sum[rows.head[h]] = all;
    }
}

// A thread for each head.
__device__ __forceinline__ void store_lse(const AttendParams& p, const Cuts& cuts,
                                          const Piece& piece, const Ends& ends) {
    const int mine = threadIdx.x % kWarpgroup, head = piece.head_block * kHeadBlock + mine;
    if (mine >= kHeadBlock || head >= p.heads) return;
    const float sum = ends.sum[mine];
    const bool empty = sum == 0.f;
    const float lse = fmaf(ends.max[mine], kLn2, logf(sum));
    if (cuts.count(piece.row) != 0) {
        *cuts.lse(cuts.slot(piece.row, piece.head_block, piece.split, piece.first), mine) =
            empty ? -INFINITY : lse;
    } else if (p.lse) {
        p.lse.row(piece.row)[head] = empty ? INFINITY : lse;
    }
}

// What the scores warpgroup keeps of a piece.
struct ScoreState {
    Output o;
    float s[32];  // products, then probabilities of a tile
    Weights a;
    float keep[2];
    bool all_present;  // in the tile
    Softmax softmax;
    uint32_t weights_parity = 1;
};

// Who is present is read before the products are issued: while they run, shared memory answers
// late.
template <bool kPair, bool kPauses>
__device__ __forceinline__ void start_scores(Shared& shared, const Ring& ring, uint64_t q,
                                             ScoreState& state) {
    shared.tile_full[ring.stage].wait(ring.parity);
    const uint64_t present = present_records<kPair>(shared, ring.stage);
    issue_scores<kPauses>(q, advance(k_major(shared.kv[0]), ring.stage * kTileBytes), state.s);
    state.all_present = present == ~uint64_t{0};
}

// The other warpgroup's share of it.
__device__ __forceinline__ void share_weights(Shared& shared, const RowPair& rows,
                                              ScoreState& state) {
    shared.weights_empty.wait(state.weights_parity);
    state.weights_parity ^= 1;
    share(state.a, state.keep, rows, shared);
    shared.weights_full.arrive();
}

// The softmax of a tile whose products are there, and the own half of p . v: the second half of the
// probabilities is computed under the products with the first, and put down for the other warpgroup
// before the last ones, which hold up the warp.
template <bool kPair>
__device__ __forceinline__ void weigh(Shared& shared, const Ring& ring, const RowPair& rows,
                                      float scale, ScoreState& state) {
    const uint64_t kv =
        uniform(advance(mn_major(shared.kv[0], kTilePanelBytes), ring.stage * kTileBytes));
    if (!state.all_present)
        Softmax::drop_absent(state.s, present_records<kPair>(shared, ring.stage));
    float largest[2], before[2];
    state.keep[0] = state.keep[1] = 1.f;
    if (state.softmax.exceeds(state.s, scale, largest)) {
        if (!state.softmax.raise(largest, before)) {
            state.softmax.shrink(before, state.keep);
            scale_rows(state.o, state.keep[0], state.keep[1]);
        }
    }
    state.softmax.weigh(state.s, scale, 0);
    to_fragment(state.s, 0, state.a[0]);
    to_fragment(state.s, 1, state.a[1]);
    fence_registers(state.o.part);
    issue_values<0, 2>(state.a, kv, state.o);
    state.softmax.find_limits();
    state.softmax.weigh(state.s, scale, 1);
    to_fragment(state.s, 2, state.a[2]);
    to_fragment(state.s, 3, state.a[3]);
    share_weights(shared, rows, state);
    issue_values<2, 4>(state.a, kv, state.o);
}

// The tiles of a piece; `started`, in a pair: the first one has its products. A tile is given back
// before the products of the next one are issued, so that the tile after that is converted under
// them. A tile has one copy of the code: the fewer instructions there are, the more of them stay in
// the cache.
template <bool kPair, bool kPauses>
__device__ __forceinline__ void score_tiles(Shared& shared, int count, bool started,
                                            const RowPair& rows, uint64_t q, float scale,
                                            Ring& ring, ScoreState& state) {
    for (int tile = 0; tile < count; ++tile) {
        if (tile > 0) ring.advance();
        if (tile > 0 || !started) {
            start_scores<kPair, kPauses>(shared, ring, q, state);
            cute::warpgroup_wait<0>();
            fence_registers(state.s);
        }
        if (tile + 1 == count) shared.query_empty.arrive();
        weigh<kPair>(shared, ring, rows, scale, state);
        cute::warpgroup_wait<0>();
        fence_registers(state.o.part);
        if (tile + 1 < count) give_tile_back<kPair, 0>(shared, ring.stage);
    }
    if (count == 0) shared.query_empty.arrive();
}

// The same with another copy for the last tile, where the code is short enough: in a pair it is
// faster where rows are many. Blocks alone queue the first products of the next tile behind the own
// p . v.
template <bool kPair>
__device__ __forceinline__ void score_tiles_and_last(Shared& shared, int count, bool started,
                                                     const RowPair& rows, uint64_t q, float scale,
                                                     Ring& ring, ScoreState& state) {
    constexpr int kQueued = 4;  // steps
    if (count > 0 && !started) {
        start_scores<kPair, false>(shared, ring, q, state);
        cute::warpgroup_wait<0>();
        fence_registers(state.s);
    }
    for (int tile = 1; tile < count; ++tile) {
        Ring next = ring;
        next.advance();
        weigh<kPair>(shared, ring, rows, scale, state);
        if constexpr (kPair) {
            cute::warpgroup_wait<0>();
            fence_registers(state.o.part);
            give_tile_back<kPair, 0>(shared, ring.stage);
            start_scores<kPair, false>(shared, next, q, state);
        } else {
            const uint64_t kv = uniform(advance(k_major(shared.kv[0]), next.stage * kTileBytes));
            shared.tile_full[next.stage].wait(next.parity);
            const uint64_t present = present_records<kPair>(shared, next.stage);
            fence_registers(state.s);
            issue_score_steps(q, kv, state.s, 0, kQueued);
            cute::warpgroup_wait<1>();
            fence_registers(state.o.part);
            give_tile_back<kPair, 0>(shared, ring.stage);
            issue_score_steps(q, kv, state.s, kQueued, kScoreSteps);
            state.all_present = present == ~uint64_t{0};
        }
        cute::warpgroup_wait<0>();
        fence_registers(state.s);
        ring = next;
    }
    shared.query_empty.arrive();
    if (count == 0) return;
    weigh<kPair>(shared, ring, rows, scale, state);
    cute::warpgroup_wait<0>();
    fence_registers(state.o.part);
}

// All warps of a consumer have multiplied the last tile: they put their output down there.
__device__ __forceinline__ void sync_warpgroup(int id) {
    NamedBarrier::sync(kWarpgroup, static_cast<uint32_t>(id));
}

// The next piece is known, its queries and its first tile are there: the same for all warps.
__device__ __forceinline__ bool next_is_there(Shared& shared, PieceTurn turn, const Ring& ring) {
    ++turn.number;
    if (threadIdx.x == 0) {
        bool there = shared.piece_full[turn.at()].test_wait(turn.parity());
        if (there) {
            const Piece& piece = shared.pieces[turn.at()];
            there = piece.row >= 0 && piece.first < piece.end &&
                    shared.query_full.test_wait(turn.number & 1) &&
                    shared.tile_full[ring.stage].test_wait(ring.parity);
        }
        shared.next_is_there = there;
    }
    sync_warpgroup(0);
    if (!shared.next_is_there) return false;
    shared.query_full.wait(turn.number & 1);
    return true;
}

template <bool kPair, bool kPauses, Lists kLists>
__device__ __forceinline__ void scores(const AttendParams& p, const SplitPlan& plan,
                                       const Cuts& cuts, Shared& shared) {
    const RowPair rows;
    // The sign is in the queries. Not 0: absent records have logit -inf.
    const float scale = fmaxf(fabsf(p.softmax_scale), 1e-30f) * (kTileFactor * kLog2e);
    Ring ring;
    ScoreState state;
    const uint64_t q = uniform(k_major(shared.q));
    bool started = false;  // the products of the first tile
    for (PieceTurn turn;; ++turn.number) {
        state.o.clear();
        state.softmax = Softmax();
        shared.piece_full[turn.at()].wait(turn.parity());
        const Piece& piece = shared.pieces[turn.at()];
        if (piece.row < 0) break;
        const int count = piece.end - piece.first;
        order_half<kPair>(p, piece, turn, shared);
        shared.query_full.wait(turn.number & 1);
        const Sinks sinks(p, cuts, piece, rows);
        Ends& ends = shared.ends[turn.number & 1];
        if constexpr (kPauses || (kPair && kLists != Lists::Fp4))
            score_tiles<kPair, kPauses>(shared, count, started, rows, q, scale, ring, state);
        else
            score_tiles_and_last<kPair>(shared, count, started, rows, q, scale, ring, state);
        // The values are done with the piece before, however short both are: two ahead, the parity
        // that they wait for would be the old one again.
        if (turn.number > 0) {
            const PieceTurn before{turn.number - 1};
            shared.piece_empty[before.at()].wait(before.parity());
        }
        finish_sums(sinks, state.softmax, rows, ends);
        shared.ends_full.arrive();
        sync_warpgroup(0);
        const Ring last = ring;
        if (count > 0) ring.advance();
        uint8_t* tile = shared.kv[last.stage];
        const Finished finished =
            stage<0>(cuts, plan, piece, ends.factor, count > 0 ? tile : nullptr, state.o);
        if constexpr (kPair) started = next_is_there(shared, turn, ring);
        if (started) {
            start_scores<kPair, kPauses>(shared, ring, q, state);
            store<0>(p, piece, finished, tile);
            cute::warpgroup_wait<0>();
            fence_registers(state.s);
        } else {
            store<0>(p, piece, finished, tile);
        }
        if (count > 0) give_output_back<kPair, 0>(shared, last.stage);
        shared.piece_empty[turn.at()].arrive();
    }
}

__device__ __forceinline__ void take_weights(const Shared& shared, Weights& a) {
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
        const uint4 x = shared.p[k][threadIdx.x % kWarpgroup];
        a[k][0] = x.x, a[k][1] = x.y, a[k][2] = x.z, a[k][3] = x.w;
    }
}

template <bool kPair, Lists kLists>
__device__ __forceinline__ void values(const AttendParams& p, const SplitPlan& plan,
                                       const CUtensorMap& map, const Cuts& cuts, Shared& shared) {
    const uint64_t columns =
        mn_major(shared.kv[0] + kPanels / 2 * kTilePanelBytes, kTilePanelBytes);
    Ring ring;
    uint32_t weights_parity = 0;
    Output o;
    const QueryBringer<kPair, kLists> queries{p, plan, map, shared};
    queries.first();
    for (PieceTurn turn;; ++turn.number) {
        o.clear();
        shared.piece_full[turn.at()].wait(turn.parity());
        const Piece& piece = shared.pieces[turn.at()];
        const int count = piece.end - piece.first;
        if (piece.row >= 0) order_half<kPair>(p, piece, turn, shared);
        // The scores wait for queries, nobody for these.
        if (turn.number > 0) {
            const PieceTurn before{turn.number - 1};
            store_lse(p, cuts, shared.pieces[before.at()], shared.ends[before.number & 1]);
            shared.piece_empty[before.at()].arrive();
        }
        if (piece.row < 0) break;
        if (count == 0) queries.next(turn);
        for (int tile = 0; tile < count; ++tile) {
            if (tile > 0) ring.advance();
            shared.tile_full[ring.stage].wait(ring.parity);
            if (tile + 1 == count) queries.next(turn);  // while the weights are waited for
            shared.weights_full.wait(weights_parity);
            weights_parity ^= 1;
            Weights a;
            take_weights(shared, a);
            const RowPair rows;
            rescale(o, shared.keep[rows.head[0]], shared.keep[rows.head[1]]);
            fence_registers(o.part);
            issue_values<0, kValueSteps>(a, uniform(advance(columns, ring.stage * kTileBytes)), o);
            shared.weights_empty.arrive();
            cute::warpgroup_wait<0>();
            fence_registers(o.part);
            if (tile + 1 < count) give_tile_back<kPair, 1>(shared, ring.stage);
        }
        shared.ends_full.wait(turn.number & 1);
        sync_warpgroup(1);
        const Finished finished =
            stage<kHalf / kGroupDims>(cuts, plan, piece, shared.ends[turn.number & 1].factor,
                                      count > 0 ? shared.kv[ring.stage] : nullptr, o);
        store<kHalf / kGroupDims>(p, piece, finished, shared.kv[ring.stage]);
        if (count > 0) {
            give_output_back<kPair, 1>(shared, ring.stage);
            ring.advance();
        }
    }
}

// While the kernel before ends: what is asked for here is read by nobody.
template <bool kPair, Lists kLists>
__device__ __forceinline__ void prefetch_first(const AttendParams& p, const Plan& plan,
                                               const PlannedRow& first, int role, int warp,
                                               int lane) {
    if (!first.known) return;
    const int thread = 32 * warp + lane;
    if (role == 1)
        prefetch_queries(p, first.row, first.head_block, thread);
    else if (role == 3)
        prefetch_lists(p, first.row, thread);
    else if (lane < kWarpRecords<kPair>)  // of the first tile
        prefetch_record(p.window, plan.window, record_id<kLists>(plan, true), first.row,
                        first_record<kPair>(warp) + lane);
}

template <bool kPair, bool kPauses, Lists kLists>
__global__ void __launch_bounds__(kThreads, 1)
    many_heads_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan,
                      const __grid_constant__ CUtensorMap queries) {
    extern __shared__ __align__(1024) uint8_t bytes[];  // the swizzle counts from multiples of 1024
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    allow_dependents();
    const int role = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % kWarps, 0), lane = threadIdx.x % 32;
    const PlannedRow first(split_plan<kLists>(plan));
    if (role != 0) prefetch_first<kPair, kLists>(p, plan, first, role, warp, lane);
    if (threadIdx.x == 0) {
        init_barriers<kPair>(shared);
        cutlass::arch::fence_barrier_init();
    }
    if constexpr (kPair) {
        cluster_publish();  // the peer's barriers are there, too
    } else {
        __syncthreads();
    }
    wait_for_previous();
    const SplitPlan& splits = split_plan<kLists>(plan);
    bool begun = false;  // the first tile, by the consumers
    if constexpr (kConsumersBegin<kPair, kLists>) {
        if (role < 2)
            begin_pair(p, plan, queries, first, role * kWarps + warp, lane, shared);
        else if (role == 2)
            begun = FirstTile::is_there(p, first);
    }
    if (role == 0) {
        cutlass::arch::warpgroup_reg_alloc<Registers<kPauses>::kScores>();
        scores<kPair, kPauses, kLists>(p, splits, Cuts(p, splits), shared);
    } else if (role == 1) {
        cutlass::arch::warpgroup_reg_alloc<Registers<kPauses>::kValues>();
        values<kPair, kLists>(p, splits, queries, Cuts(p, splits), shared);
    } else if (role == 2) {
        cutlass::arch::warpgroup_reg_dealloc<Registers<kPauses>::kConvert>();
        Converter<kPair, kLists>(p, plan, shared, warp, lane).work(begun);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<Registers<kPauses>::kCopy>();
        const Cuts cuts(p, splits);
        Copier<kPair, kLists>(p, plan, splits, queries, cuts, shared, warp, lane).work(first);
    }
}

}  // namespace many_heads

cudaError_t attend_many_heads(const AttendParams& p, const SplitPlan& splits, int num_sms,
                              cudaStream_t stream) {
    using namespace many_heads;
    const int64_t items = int64_t{p.rows} * splits.head_blocks * splits.splits;
    int64_t blocks = splits.splits > 0 && items < num_sms ? items : num_sms;
    const Plan plan{splits, Places(p.window.pages), Places(p.main.pages)};
    const Lists lists = lists_of(p, splits);
    CUtensorMap queries{};  // of pairs
    if (splits.head_blocks % 2 == 0 && num_sms > 1 &&
        map_queries(p, kPanelColumns, kHeadBlock, queries)) {
        const auto kernel = lists == Lists::Fp4     ? many_heads_kernel<true, false, Lists::Fp4>
                            : lists == Lists::Mixed ? many_heads_kernel<true, false, Lists::Mixed>
                                                    : many_heads_kernel<true, false, Lists::Any>;
        return launch_clusters(kernel, blocks / 2, 2, kThreads, sizeof(Shared), stream, p, plan,
                               queries);
    }
    const auto any = p.main.pages.record == RecordId::MixedFp8
                         ? many_heads_kernel<false, true, Lists::Any>
                         : many_heads_kernel<false, false, Lists::Any>;
    const auto kernel = lists == Lists::Fp4     ? many_heads_kernel<false, false, Lists::Fp4>
                        : lists == Lists::Mixed ? many_heads_kernel<false, true, Lists::Mixed>
                                                : any;
    return launch_after(kernel, blocks_for(blocks, 1), kThreads, sizeof(Shared), stream, p, plan,
                        queries);
}

}  // namespace flash_csa::sm90
