// attend on tensor cores: blocks of 64 heads, any records, BF16 output.
//
//   in   q, window and main records, lists            out  out, lse, or partial results
//
// A CTA takes pieces (pieces.cuh) of 64 heads, tiles of 64 records. Warpgroups:
//   scores    logits q . k^T, softmax, columns 0..255 of the output
//   values    columns 256..511
//   gather    two: records -> BF16 tile in shared memory, at value * 2^-8, paired order
//
//   tile t   gather   |dequantise t + 1            |
//            scores   |q.k(t)   |softmax|p.v(t)    |q.k(t + 1) ...
//            values                     |p.v(t)    |
//
// Floor of a tile: 2 * 64 * 64 * 512 * 2 FLOP = 2048 cycles of the tensor cores; the softmax is not
// hidden. Bytes: 64 records, read once per block of heads.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "sm90/attend/gather.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/attend/pieces.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/exp2.cuh"
#include "sm90/common/launch.h"
#include "sm90/common/wgmma.cuh"

namespace flash_csa::sm90 {
namespace {

using cutlass::arch::ClusterBarrier;
using cutlass::arch::NamedBarrier;

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kGatherers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kGatherers;
constexpr int kStages = 2;  // BF16 tiles: a third does not fit beside q
constexpr int kTileBytes = kAttendTile * kHeadDim * 2;
constexpr int kPanels = kHeadDim / kPanelColumns;
constexpr int kHalf = kHeadDim / 2;  // output columns of a consumer warpgroup
constexpr int kGatherWarps = kGatherers / 32;
static_assert(kGatherWarps * kWarpRecords == kAttendTile && kAttendTile == 64 && kHeadBlock == 64);

// 64 K registers: 128 a thread at entry. Scores hold 128 + 32 accumulators and 16 probabilities.
constexpr int kScoreRegisters = 208, kValueRegisters = 160, kGatherRegisters = 72;
static_assert(kScoreRegisters + kValueRegisters + 2 * kGatherRegisters == 512);

struct Shared {
    uint8_t q[kTileBytes];
    uint8_t kv[kStages][kTileBytes];
    uint8_t p[kTilePanelBytes];  // probabilities [64 heads, 64 records]
    RawPass raw[kGatherWarps];
    float keep[kHeadBlock];                             // weight of the earlier tiles
    float factor[kHeadBlock];                           // of the finished output
    alignas(8) uint8_t present[kStages][kGatherWarps];  // a bit per record
    ClusterBarrier full[kStages];                       // a tile is there: gather warps
    ClusterBarrier empty[kStages];                      // a tile may be overwritten: consumer warps
};
static_assert(sizeof(Shared) <= 227 * 1024);  // opt-in limit

// A consumer's half of the output, as accumulators of two products of 128 columns: a product of 256
// has more registers than a thread of this block has at entry, which ptxas rejects.
constexpr int kProductPanels = 2;
struct Output {
    float part[2][kHalf / 4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) (*this)[i] = 0.f;
    }
    __device__ float& operator[](int i) { return part[i / (kHalf / 4)][i % (kHalf / 4)]; }
    __device__ float operator[](int i) const { return part[i / (kHalf / 4)][i % (kHalf / 4)]; }
};

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Named barriers of the consumers.
enum : uint32_t { kQueryReady, kProbabilitiesFree, kProbabilitiesReady, kFactorReady };

// Stages in turns; the parity of an mbarrier changes with every round.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        stage ^= 1;
        parity ^= stage == 0;
    }
};

// ---- Gather

// Walks over the tiles of all pieces.
struct Tiles {
    Pieces pieces;
    Piece piece;
    int tile = 0;

    // Record `at` of the next tile.
    __device__ bool next(const AttendParams& p, int at, Listed& listed) {
        while (tile >= piece.end) {
            if (!pieces.next(piece)) return false;
            tile = piece.first;
        }
        listed = piece.at(p, tile, at);
        ++tile;
        return true;
    }
};

// A pass is written while the next one is copied; the slots of the tile after that are read.
__device__ __forceinline__ void gather(const AttendParams& p, const SplitPlan& plan,
                                       const Cuts& cuts, Shared& shared) {
    const int warp = (threadIdx.x - kConsumers) / 32, lane = threadIdx.x % 32;
    RawPass& raw = shared.raw[warp];
    Tiles tiles{Pieces(p, plan, cuts), Piece{}};
    Listed listed;
    Located at;
    uint32_t present = 0, arrived = 0;
    const int row = warp * kWarpRecords;
    const auto find = [&] {
        at = locate(listed.window ? p.window.pages : p.main.pages, listed.get());
    };
    if (!tiles.next(p, row + lane % kWarpRecords, listed)) return;
    find();
    uint32_t following = __ballot_sync(~0u, at.present);
    start_pass(at, following, 0, lane, raw);
    bool follows = tiles.next(p, row + lane % kWarpRecords, listed);
    for (Ring ring;; ring.advance()) {
        const RecordId id = at.id;
        const int each = records_of_pass(id), passes = kWarpRecords / each;
        present = following;
        for (int pass = 0; pass < passes; ++pass) {
            raw.arrived.wait(arrived);
            arrived ^= 1;
            wait_for_copies();  // scales that lie apart
            __syncwarp();
            LaneCodes codes;
            read_pass(id, raw, present, pass, lane, codes);
            __syncwarp();
            if (pass + 1 < passes) {
                start_pass(at, present, pass + 1, lane, raw);
            } else if (follows) {
                find();
                following = __ballot_sync(~0u, at.present);
                start_pass(at, following, 0, lane, raw);
            }
            if (pass == 0) shared.empty[ring.stage].wait(ring.parity ^ 1);
            write_pass(id, codes, pass, lane, shared.kv[ring.stage], row);
        }
        if (lane == 0) shared.present[ring.stage][warp] = static_cast<uint8_t>(present);
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane == 0) shared.full[ring.stage].arrive();
        if (!follows) break;
        follows = tiles.next(p, row + lane % kWarpRecords, listed);
    }
}

// ---- Consumers

// The values warpgroup fetches the queries of a piece, 16 bytes at a time; heads beyond the last
// are zero. f(chunk, head, where it lies in shared memory).
template <class F>
__device__ __forceinline__ void each_query_chunk(Shared& shared, const F& f) {
    constexpr int kChunks = kHeadDim / kGroupDims;
    const int chunk = threadIdx.x % kChunks;
    uint8_t* panel = shared.q + chunk / 8 * kTilePanelBytes;
#pragma unroll 8
    for (int head = threadIdx.x % kWarpgroup / kChunks; head < kHeadBlock;
         head += kWarpgroup / kChunks)
        f(chunk, head, panel + panel_offset(head, chunk % 8));
}

// Nobody reads the queries before any more.
__device__ __forceinline__ void start_queries(const AttendParams& p, const Piece& piece,
                                              Shared& shared) {
    const int first_head = piece.head_block * kHeadBlock;
    const uint16_t* row = p.q.at(piece.row, first_head);
    each_query_chunk(shared, [&](int chunk, int head, uint8_t* to) {
        const bool there = first_head + head < p.heads;
        const uint16_t* from = row + (there ? head * p.q.head_stride : 0) + chunk * kGroupDims;
        copy_16_async(to, from, there);
    });
}

// Puts them into paired order, and takes the sign of the softmax scale into them.
__device__ __forceinline__ void finish_queries(const AttendParams& p, Shared& shared) {
    const uint32_t sign = p.softmax_scale < 0.f ? 0x80008000u : 0;
    wait_for_copies();
    each_query_chunk(shared, [&](int, int, uint8_t* at) {
        uint4& x = *reinterpret_cast<uint4*>(at);
        const uint4 y = paired_order(x);
        x = make_uint4(y.x ^ sign, y.y ^ sign, y.z ^ sign, y.w ^ sign);
    });
    cutlass::arch::fence_view_async_shared();
}

// Rows of the accumulators: a lane has elements of two heads, lane / 4 and 8 more.
struct RowPair {
    int head[2];

    __device__ RowPair() {
        head[0] = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        head[1] = head[0] + 8;
    }
};

// Multiplies accumulators by a factor for each of the two rows.
__device__ __forceinline__ void scale_rows(Output& o, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) o[i] *= i % 4 < 2 ? upper : lower;
}

__device__ __forceinline__ void rescale(Output& o, float upper, float lower) {
    if (!__all_sync(~0u, upper == 1.f && lower == 1.f)) scale_rows(o, upper, lower);
}

// Lane i of four neighbours gets element number lane of each: x[k] of lane i is x[i] of lane k.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t a0 = x[0], a1 = x[1], a2 = x[2], a3 = x[3];
    const auto swap = [](uint32_t& low, uint32_t& high, bool has_high, int distance) {
        const uint32_t got = __shfl_xor_sync(~0u, has_high ? low : high, distance);
        (has_high ? low : high) = got;
    };
    swap(a0, a1, odd, 1);
    swap(a2, a3, odd, 1);
    swap(a0, a2, upper, 2);
    swap(a1, a3, upper, 2);
    return make_uint4(a0, a1, a2, a3);
}

// Normalised output of a whole row's piece: 256 columns from first_group * 8 on.
template <int kFirstGroup>
__device__ __forceinline__ void store_output(const AttendParams& p, const Piece& piece,
                                             const RowPair& rows, const Output& o) {
    const float* cos_sin = derotation(p, piece.row);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = piece.head_block * kHeadBlock + rows.head[h];
        uint16_t* out = p.out_bf16.at(piece.row, head);
#pragma unroll
        for (int j = 0; j < kHalf / kGroupDims; j += 4) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                packed[i] = pack_bf16(o[4 * (j + i) + 2 * h], o[4 * (j + i) + 2 * h + 1]);
            const uint4 x = natural_order(transpose_quad(packed));
            if (head < p.heads) {
                const bool may_rotate = kFirstGroup + j + 3 >= kFirstRotated;
                store_group(out, kFirstGroup + j + threadIdx.x % 4, x,
                            may_rotate ? cos_sin : nullptr);
            }
        }
    }
}

// Partial output of a cut row, FP32 in paired order.
__device__ __forceinline__ void store_partial(const Cuts& cuts, int32_t slot, int block_heads,
                                              int first_group, const RowPair& rows,
                                              const Output& o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (rows.head[h] >= block_heads) continue;
        float* out = cuts.out(slot, rows.head[h]) + first_group * kGroupDims + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHalf / kGroupDims; ++j) {
            *reinterpret_cast<float2*>(out + j * kGroupDims) =
                make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
        }
    }
}

// The end of a piece, for a consumer's 256 columns.
template <int kFirstGroup>
__device__ __forceinline__ void finish(const AttendParams& p, const SplitPlan& plan,
                                       const Cuts& cuts, const Piece& piece, const Shared& shared,
                                       Output& o) {
    const RowPair rows;
    scale_rows(o, shared.factor[rows.head[0]], shared.factor[rows.head[1]]);
    if (cuts.count(piece.row) == 0) {
        store_output<kFirstGroup>(p, piece, rows, o);
    } else {
        store_partial(cuts, cuts.slot(piece.row, piece.head_block, piece.split, piece.first),
                      plan.block_heads, kFirstGroup, rows, o);
    }
}

// Online softmax of two heads per lane. Logits are in units of log 2. A maximum stands until
// another exceeds it by kSlack: weights up to 2^kSlack round as well as those up to 1, and what was
// accumulated need not be scaled at almost every tile.
constexpr float kSlack = 8.f;

struct Softmax {
    float max[2] = {-INFINITY, -INFINITY};  // about the largest logit
    float sum[2] = {0.f, 0.f};              // of this lane's records

    // s: products with the tile. Leaves probabilities in s and the weight of earlier tiles in keep.
    __device__ __forceinline__ void step(float (&s)[32], float scale, uint64_t present,
                                         float (&keep)[2]) {
        const int column = threadIdx.x % 4 * 2;
        if (present != ~uint64_t{0}) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (!(present >> (i / 4 * 8 + column + i % 2) & 1)) s[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = s[2 * h];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                largest = fmaxf(largest, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale;
            // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
            const float before = max[h];
            if (largest > before + kSlack) max[h] = largest;
            const float base = max[h] == -INFINITY ? 0.f : max[h];
            keep[h] = exp2_approx(before - base);
            float total = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int i = 4 * j + 2 * h; i < 4 * j + 2 * h + 2; ++i) {
                    s[i] = exp2_approx(fmaf(s[i], scale, -base));
                    total += s[i];
                }
            }
            sum[h] = fmaf(sum[h], keep[h], total);
        }
    }
};

// Probabilities as the A operand of the products with the values, one fragment per 16 records.
__device__ __forceinline__ void to_fragments(const float (&s)[32], FragmentA (&a)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair =
                __floats2bfloat162_rn(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
            memcpy(&a[k][i], &pair, sizeof pair);
        }
    }
}

// For the other warpgroup: probabilities and the weight of earlier tiles.
__device__ __forceinline__ void share(const FragmentA (&a)[4], const float (&keep)[2],
                                      const RowPair& rows, Shared& shared) {
    const int word = threadIdx.x % 4 * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows 0, 8, then the same of the next 8 records
            const int at = panel_offset(rows.head[i % 2], 2 * k + i / 2);
            *reinterpret_cast<uint32_t*>(shared.p + at + word) = a[k][i];
        }
    }
    if (threadIdx.x % 4 == 0) {
        shared.keep[rows.head[0]] = keep[0];
        shared.keep[rows.head[1]] = keep[1];
    }
}

// q . k^T of a tile: 32 steps of 16 dims.
__device__ __forceinline__ void issue_scores(uint64_t q, uint64_t kv, float (&s)[32]) {
    fence_registers(s);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
        const int at = k / 4 * kTilePanelBytes + k % 4 * 32;
        multiply_64x64(advance(q, at), advance(kv, at), s, k > 0);
    }
    cute::warpgroup_commit_batch();
}

// p . v of a tile, for one half of the columns: 4 steps of 16 records.
template <class Operand>
__device__ __forceinline__ void issue_values(const Operand& operand, uint64_t kv, Output& o) {
    fence_registers(o.part);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kAttendTile / 16; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int at = k * 16 * kPanelRowBytes + n * kProductPanels * kTilePanelBytes;
            multiply_64x128(operand(k), advance(kv, at), o.part[n], true);
        }
    }
    cute::warpgroup_commit_batch();
}

__device__ __forceinline__ void release(ClusterBarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Sums, sink and lse of a piece; factors for both warpgroups.
__device__ __forceinline__ void finish_sums(const AttendParams& p, const Cuts& cuts,
                                            const Piece& piece, const RowPair& rows,
                                            const Softmax& softmax, Shared& shared) {
    const bool whole = cuts.count(piece.row) == 0;
    const int32_t slot =
        whole ? 0 : cuts.slot(piece.row, piece.head_block, piece.split, piece.first);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int head = piece.head_block * kHeadBlock + rows.head[h];
        if (threadIdx.x % 4 != 0) continue;
        const bool there = head < p.heads, empty = sum == 0.f;
        const float sink = whole && there && p.sink != nullptr ? p.sink[head] : -INFINITY;
        const float all = sum + exp2f(fmaf(sink, kLog2e, -softmax.max[h]));
        shared.factor[rows.head[h]] = empty ? 0.f : kTileFactor / all;
        const float lse = fmaf(softmax.max[h], kLn2, logf(sum));
        if (!there) continue;
        if (!whole) {
            *cuts.lse(slot, rows.head[h]) = empty ? -INFINITY : lse;
        } else if (p.lse) {
            p.lse.row(piece.row)[head] = empty ? INFINITY : lse;
        }
    }
}

// What the scores warpgroup keeps of a piece.
struct ScoreState {
    Output o;
    float s[32];  // products, then probabilities of a tile
    FragmentA a[4];
    float keep[2];
    Softmax softmax;
};

__device__ __forceinline__ void start_scores(Shared& shared, const Ring& ring, uint64_t q,
                                             ScoreState& state) {
    shared.full[ring.stage].wait(ring.parity);
    issue_scores(q, advance(k_major(shared.kv[0]), ring.stage * kTileBytes), state.s);
}

// The softmax of a tile whose products are there, and its share for the other warpgroup.
__device__ __forceinline__ void share_probabilities(Shared& shared, const Ring& ring,
                                                    const RowPair& rows, float scale,
                                                    ScoreState& state) {
    const uint64_t present = *reinterpret_cast<const uint64_t*>(shared.present[ring.stage]);
    state.softmax.step(state.s, scale, present, state.keep);
    to_fragments(state.s, state.a);
    NamedBarrier::sync(kConsumers, kProbabilitiesFree);
    share(state.a, state.keep, rows, shared);
    cutlass::arch::fence_view_async_shared();
    NamedBarrier::arrive(kConsumers, kProbabilitiesReady);
}

__device__ __forceinline__ void start_values(Shared& shared, const Ring& ring, ScoreState& state) {
    rescale(state.o, state.keep[0], state.keep[1]);
    issue_values([&](int k) -> const FragmentA& { return state.a[k]; },
                 advance(mn_major(shared.kv[0], kTilePanelBytes), ring.stage * kTileBytes),
                 state.o);
}

// The tiles of a piece; at least one. The products of tile t + 1 are issued behind the values of
// tile t, so that the tensor cores go on while those are waited for.
__device__ __forceinline__ void score_tiles(Shared& shared, int count, const RowPair& rows,
                                            float scale, Ring& ring, ScoreState& state) {
    const uint64_t q = k_major(shared.q);
    start_scores(shared, ring, q, state);
    cute::warpgroup_wait<0>();
    fence_registers(state.s);
    for (int tile = 1; tile < count; ++tile) {
        share_probabilities(shared, ring, rows, scale, state);
        start_values(shared, ring, state);
        Ring next = ring;
        next.advance();
        start_scores(shared, next, q, state);
        cute::warpgroup_wait<1>();
        fence_registers(state.o.part);
        release(shared.empty[ring.stage]);
        cute::warpgroup_wait<0>();
        fence_registers(state.s);
        ring = next;
    }
    share_probabilities(shared, ring, rows, scale, state);
    start_values(shared, ring, state);
    cute::warpgroup_wait<0>();
    fence_registers(state.o.part);
    release(shared.empty[ring.stage]);
    ring.advance();
}

__device__ __forceinline__ void scores(const AttendParams& p, const SplitPlan& plan,
                                       const Cuts& cuts, Shared& shared) {
    const RowPair rows;
    // The sign is in the queries. Not 0: absent records have logit -inf.
    const float scale = fmaxf(fabsf(p.softmax_scale), 1e-30f) * (kTileFactor * kLog2e);
    Pieces pieces(p, plan, cuts);
    Ring ring;
    ScoreState state;
    for (Piece piece; pieces.next(piece);) {
        state.o.clear();
        state.softmax = Softmax();
        NamedBarrier::sync(kConsumers, kQueryReady);  // and the factors before are read
        const int count = piece.end - piece.first;
        if (count > 0) score_tiles(shared, count, rows, scale, ring, state);
        finish_sums(p, cuts, piece, rows, state.softmax, shared);
        NamedBarrier::sync(kConsumers, kFactorReady);
        finish<0>(p, plan, cuts, piece, shared, state.o);
    }
}

__device__ __forceinline__ void values(const AttendParams& p, const SplitPlan& plan,
                                       const Cuts& cuts, Shared& shared) {
    const RowPair rows;
    const uint64_t probabilities = k_major(shared.p);
    const uint64_t columns =
        mn_major(shared.kv[0] + kPanels / 2 * kTilePanelBytes, kTilePanelBytes);
    Pieces pieces(p, plan, cuts);
    Piece piece, next;
    Ring ring;
    Output o;
    bool more = pieces.next(piece);
    if (more) start_queries(p, piece, shared);
    while (more) {
        o.clear();
        finish_queries(p, shared);
        NamedBarrier::sync(kConsumers, kQueryReady);
        for (int tile = piece.first; tile < piece.end; ++tile, ring.advance()) {
            NamedBarrier::arrive(kConsumers, kProbabilitiesFree);
            shared.full[ring.stage].wait(ring.parity);
            NamedBarrier::sync(kConsumers, kProbabilitiesReady);
            rescale(o, shared.keep[rows.head[0]], shared.keep[rows.head[1]]);
            issue_values([&](int k) { return advance(probabilities, k * 32); },
                         advance(columns, ring.stage * kTileBytes), o);
            cute::warpgroup_wait<0>();
            fence_registers(o.part);
            release(shared.empty[ring.stage]);
        }
        more = pieces.next(next);
        if (more) start_queries(p, next, shared);  // behind the last probabilities: not read again
        NamedBarrier::sync(kConsumers, kFactorReady);
        finish<kHalf / kGroupDims>(p, plan, cuts, piece, shared, o);
        piece = next;
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    many_heads_kernel(const __grid_constant__ AttendParams p,
                      const __grid_constant__ SplitPlan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];  // the swizzle counts from multiples of 1024
    Shared& shared = *reinterpret_cast<Shared*>(bytes);
    allow_dependents();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            shared.full[i].init(kGatherWarps);
            shared.empty[i].init(kConsumers / 32);
        }
        for (RawPass& raw : shared.raw) raw.arrived.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const Cuts cuts(p, plan);
    const int role = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
    if (role == 0) {
        cutlass::arch::warpgroup_reg_alloc<kScoreRegisters>();
        scores(p, plan, cuts, shared);
    } else if (role == 1) {
        cutlass::arch::warpgroup_reg_alloc<kValueRegisters>();
        values(p, plan, cuts, shared);
    } else {
        cutlass::arch::warpgroup_reg_dealloc<kGatherRegisters>();
        gather(p, plan, cuts, shared);
    }
}

}  // namespace

cudaError_t attend_many_heads(const AttendParams& p, const SplitPlan& plan, int num_sms,
                              cudaStream_t stream) {
    const int64_t items = int64_t{p.rows} * plan.head_blocks * plan.splits;
    const int64_t blocks = plan.splits > 0 && items < num_sms ? items : num_sms;
    return launch(many_heads_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, sizeof(Shared),
                  stream, p, plan);
}

}  // namespace flash_csa::sm90
