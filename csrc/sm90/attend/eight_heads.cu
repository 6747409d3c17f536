// attend for at most 8 heads and many rows: BF16 output over MainFp4 and WindowFp8 records.
//
//   in   q [R, H, 512], window and main records, lists        out  out, lse
//
// A CTA takes a row, or one of the `splits` runs of its tiles. A warp takes 16 records of every
// tile of 64 (a block) and knows nothing of the others until the end: no barriers. Per block it
//
//   convert   reads its records from its ring, codes -> BF16 fragments in registers:
//             logits^T [16 records, 8 heads] += records . q^T; the fragments also go to its strip
//             of shared memory; starts a copy for every ring slot that it has read
//   softmax   weights relative to a base that seldom grows, transposed in registers
//   values    out^T [512 dims, 8 heads] += records^T . p^T, the strip transposed on its way
//
// Heads are N of both products, and both leave a lane the same two heads: what rescales a column
// of out^T is known where it is needed. Floor: the bytes of the records; docs/attend_few_heads.md
// has the budget.
#include <cuda_runtime.h>
#include <cutlass/cutlass.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "sm90/attend/eight_heads.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/exp2.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace eight_heads {

// A maximum may lag behind by this much (log2): weights up to 2^8 lose no precision, and `out` is
// seldom rescaled.
constexpr float kSlack = 8.f;

constexpr int kOwn = kSteps / kWarps;  // fragments of out^T that a warp has of all warps' sum

// A partial result in the workspace.
struct Partial {
    float4 out[kOwn][kThreads];
    float max[kHeads];
    float sum[kHeads];
};

struct Plan {
    int32_t splits;
    Places main, window;
};

// d [16, 8] += a [16, 16] . b [8, 16]^T.
__device__ __forceinline__ void multiply(const FragmentA& a, uint32_t b0, uint32_t b1,
                                         float (&d)[4]) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0,
                                              b1, d[0], d[1], d[2], d[3]);
}

// One warp's state. A lane's columns are heads 2 t and 2 t + 1.
struct Worker {
    const AttendParams& p;
    const Plan& plan;
    Shared& shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    // Slots of records are asked for, and found, two tiles at a time: a lane has record lane % 16
    // of the warp's block of one of them.
    int32_t copy_tile = 0, copy_end = 0;  // the next tile that is not found
    int32_t next_slot = -1;               // in that tile or the one after it
    uint32_t place = 0;                   // of a found record, in 16 bytes
    uint32_t present = 0;                 // of both blocks
    int32_t start_at = 0;                 // tile whose block is started next
    // The block that is being copied: a lane brings chunk lane % 8 of records lane / 8 + 4 i.
    const uint8_t* data = nullptr;
    uint32_t from[4] = {};
    uint32_t there = 0;  // bit 4 i: that record is there
    int left = 0;        // slots of it that are not started
    int copy_set = kScaleSets - 1;
    int get = 0;  // ring slot that is read next
    int set = 0;  // scales of the block that is read
    // Where this lane stores and loads a row of the 8 x 8 blocks (record, dim) of K step i of a
    // panel, in the order of an A fragment with dims on K and on M.
    int to_strip[4], from_strip[4];
    float out[kSteps][4] = {};
    float base[2] = {};
    float limit[2] = {-INFINITY, -INFINITY};  // of a logit above the base before that is raised
    float sum[2] = {};                        // of this lane's records

    __device__ Worker(const AttendParams& params, const Plan& asked, Shared& s)
        : p(params), plan(asked), shared(s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to_strip[i] = panel_offset(lane % 16, 2 * i + lane / 16);
            from_strip[i] = panel_offset(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2);
        }
    }

    __device__ __forceinline__ Ring& ring() const { return shared.rings[warp]; }

    __device__ __forceinline__ int32_t lane_tile() const { return copy_tile + lane / 16; }

    __device__ __forceinline__ void load_slots() {
        const int at = kWarpRecords * warp + lane % kWarpRecords;
        next_slot =
            lane_tile() < copy_end ? shared.tiles.slot(lane_tile(), at, plan.main.page) : -1;
    }

    // Finds the records of the next two blocks; asks for the slots of the two after them.
    __device__ __forceinline__ void find_records() {
        // A copy, not a reference: the two are parameters, which have no address to choose from.
        Places places = plan.main;
        if (shared.tiles.is_window(lane_tile())) places = plan.window;
        const bool mine = places.holds(next_slot);
        place = mine ? static_cast<uint32_t>((places.row(next_slot) - places.data) / 16) : 0;
        present = __ballot_sync(kAllLanes, mine);
        start_at = copy_tile;
        copy_tile += 2;
        load_slots();
    }

    // Goes on to the next block: starts its scales.
    __device__ __forceinline__ void start_block() {
        constexpr Record kMain = record(RecordId::MainFp4), kWindow = record(RecordId::WindowFp8);
        if (start_at == copy_tile) find_records();
        const int first = start_at + 1 == copy_tile ? kWarpRecords : 0;
        const bool window = shared.tiles.is_window(start_at);
        const uint32_t mine = present >> first & 0xffff;
        ++start_at;
        copy_set = copy_set + 1 == kScaleSets ? 0 : copy_set + 1;
        if (lane == 0) ring().present[copy_set] = mine * 0x10001u;
        data = window ? plan.window.data : plan.main.data;
        const int at = lane / 2, part = lane % 2;  // two lanes a record, of the window one
        const uint32_t scales = __shfl_sync(kAllLanes, place, first + at) +
                                (window ? kWindow.data_bytes : kMain.data_bytes) / 16 + part;
        if (part == 0 || !window)
            copy_16_async(ring().scales[copy_set][at] + 16 * part, data + uint64_t{scales} * 16,
                          (mine >> at & 1) != 0);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            from[i] = __shfl_sync(kAllLanes, place, first + lane / 8 + 4 * i) + lane % 8;
        there = mine >> (lane / 8);
        left = (window ? kWindow.data_bytes : kMain.data_bytes) / kSlotBytes;
    }

    // Starts a copy into a ring slot, a group: eight lanes bring 128 bytes of a record.
    __device__ __forceinline__ void copy_slot(int slot) {
        if (left == 0) start_block();
        const int row = lane / 8;
        uint8_t* to = ring().slots[slot][row] + ((lane % 8) ^ slot_swizzle(row)) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            copy_16_async(to + 4 * i * kSlotBytes, data + uint64_t{from[i]} * 16,
                          (there >> (4 * i) & 1) != 0);
            from[i] += kSlotBytes / 16;
        }
        commit_copies();
        --left;
    }

    // A lane's codes of a span, two records.
    template <class Read>
    struct Span {
        typename Read::Codes codes[2];
    };

    // Reads a span; waits for its slot where it is the first one of it.
    template <class Read>
    __device__ __forceinline__ Span<Read> read_span(int span) const {
        if (span % Read::kSlotSpans == 0) {
            wait_copies<kSlots - 1>();
            __syncwarp();
        }
        Span<Read> result;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            result.codes[r] =
                Read::read(ring().slots[get][0], ring().scales[set][0], span, g + 8 * r, t);
        return result;
    }

    // Converts the block that is arriving, multiplies it with the query and stores it; for every
    // slot that was read a later one is started.
    template <RecordId kId>
    __device__ __forceinline__ void convert(float (&logits)[4]) {
        using Read = Reader<kId>;
        float part[2][4] = {};  // of even and odd steps: half as many products in a row
        uint8_t* strip = shared.strips[warp][0][0];
        const uint4* q = shared.q[0] + lane;
        Span<Read> ahead = read_span<Read>(0);
#pragma unroll
        for (int span = 0; span < kSpans; ++span) {
            const Span<Read> mine = ahead;
            const typename Read::Factors factors[2] = {Read::factors(mine.codes[0]),
                                                       Read::factors(mine.codes[1])};
            if (span % Read::kSlotSpans == Read::kSlotSpans - 1) {
                __syncwarp();
                copy_slot(get);
                get = get + 1 == kSlots ? 0 : get + 1;
            }
            if (span + 1 < kSpans) ahead = read_span<Read>(span + 1);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                const uint4 x = Read::values(mine.codes[0], factors[0], u);
                const uint4 y = Read::values(mine.codes[1], factors[1], u);
                const FragmentA a[2] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    store_fragment(
                        a[h], strip + (2 * span + u / 2) * kPanelBytes + to_strip[u % 2 * 2 + h]);
                const uint4 b = q[(kUnits * span + u) * 32];
                multiply(a[0], b.x, b.y, part[0]);
                multiply(a[1], b.z, b.w, part[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[i] = part[0][i] + part[1][i];
    }

    static __device__ __forceinline__ void store_fragment(const FragmentA& a, uint8_t* to) {
        cute::SM90_U32x4_STSM_N::copy(a[0], a[1], a[2], a[3],
                                      *reinterpret_cast<cute::uint128_t*>(to));
    }

    // Logits -> weights as a B fragment of the second product.
    __device__ __forceinline__ void softmax(float (&logits)[4], uint32_t (&weights)[2]) {
        const uint32_t there_now = ring().present[set];
        if (there_now != kAllLanes) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((there_now >> (g + i / 2 * 8) & 1) == 0) logits[i] = -INFINITY;
        }
        const float scale = p.softmax_scale * (kTileFactor * kLog2e);
        float x[4];
        bool over = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = fmaf(logits[i], scale, -base[i % 2]);
            over |= x[i] > limit[i % 2];
        }
        if (__any_sync(kAllLanes, over)) raise(logits, scale, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = exp2_approx(x[i]);
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[e] += x[e] + x[2 + e];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            cute::SM75_U32x1_MOVM_T::copy(pack_bf16(x[2 * r], x[2 * r + 1]), weights[r]);
    }

    // Raises the bases of heads that have grown beyond their limits to the largest logit.
    __device__ __forceinline__ void raise(const float (&logits)[4], float scale, float (&x)[4]) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float top = fmaxf(logits[e], logits[2 + e]);
#pragma unroll
            for (int h = 4; h < 32; h *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, h));
            top *= scale;
            if (top - base[e] > limit[e]) {
                const float keep = limit[e] == -INFINITY ? 0.f : exp2_approx(base[e] - top);
                base[e] = top;
                limit[e] = kSlack;
                sum[e] *= keep;
#pragma unroll
                for (int i = 0; i < kSteps; ++i) {
                    out[i][e] *= keep;
                    out[i][2 + e] *= keep;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) x[2 * r + e] = fmaf(logits[2 * r + e], scale, -base[e]);
        }
    }

    __device__ __forceinline__ void add_values(const uint32_t (&weights)[2]) {
        const uint8_t* strip = shared.strips[warp][0][0];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            FragmentA a;
            cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(
                                              strip + i / 4 * kPanelBytes + from_strip[i % 4]),
                                          a[0], a[1], a[2], a[3]);
            multiply(a, weights[0], weights[1], out[i]);
        }
    }

    // The warp's blocks of the tiles [begin, end).
    __device__ __forceinline__ void run(int32_t begin, int32_t end, const QueryPart& query) {
        copy_tile = start_at = begin;
        copy_end = end;
        load_slots();
#pragma unroll 1
        for (int i = 0; i < kSlots; ++i) copy_slot(i);
        query.store(shared);
        __syncthreads();
        for (int32_t tile = begin; tile < end; ++tile) {
            float logits[4];
            uint32_t weights[2];
            if (shared.tiles.is_window(tile))
                convert<RecordId::WindowFp8>(logits);
            else
                convert<RecordId::MainFp4>(logits);
            softmax(logits, weights);
            __syncwarp();
            add_values(weights);
            set = set + 1 == kScaleSets ? 0 : set + 1;
            __syncwarp();
        }
    }

    // Brings the warps' sums together: shared.max and .sum, and in `own` fragments
    // [kOwn * warp, + kOwn) of out^T.
    __device__ __forceinline__ void reduce(float4 (&own)[kOwn]) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int h = 4; h < 32; h *= 2) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], h);
            if (g > 0) continue;
            shared.sums[warp][2 * t + e] = sum[e];
            shared.base[warp][2 * t + e] = limit[e] == -INFINITY ? -INFINITY : base[e];
        }
        __syncthreads();
        if (threadIdx.x < kHeads) reduce_head(threadIdx.x);
        __syncthreads();
        auto* mine = reinterpret_cast<float4(*)[32]>(shared.strips[warp]);
        const float low = shared.weight[warp][2 * t], high = shared.weight[warp][2 * t + 1];
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            mine[i][lane] =
                make_float4(out[i][0] * low, out[i][1] * high, out[i][2] * low, out[i][3] * high);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            own[k] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float4 x =
                    reinterpret_cast<const float4(*)[32]>(shared.strips[w])[kOwn * warp + k][lane];
                own[k] =
                    make_float4(own[k].x + x.x, own[k].y + x.y, own[k].z + x.z, own[k].w + x.w);
            }
        }
    }

    __device__ __forceinline__ void reduce_head(int head) {
        float top = -INFINITY, total = 0.f;
        for (const auto& of_warp : shared.base) top = fmaxf(top, of_warp[head]);
        const float origin = top == -INFINITY ? 0.f : top;
        for (int w = 0; w < kWarps; ++w) {
            const float weight = exp2_approx(shared.base[w][head] - origin);
            shared.weight[w][head] = weight;
            total += weight * shared.sums[w][head];
        }
        shared.max[head] = top;
        shared.sum[head] = total;
    }

    // True in the CTA that comes last of a row's; it then has the row's totals.
    __device__ __forceinline__ bool merge_partials(int64_t row, int32_t piece, int32_t splits,
                                                   float4 (&own)[kOwn]) {
        auto* counters = reinterpret_cast<unsigned*>(p.workspace.data);
        auto* partials = reinterpret_cast<Partial*>(p.workspace.data + kSyncBytes) + row * splits;
        Partial& mine = partials[piece];
#pragma unroll
        for (int k = 0; k < kOwn; ++k) mine.out[k][threadIdx.x] = own[k];
        if (threadIdx.x < kHeads) {
            mine.max[threadIdx.x] = shared.max[threadIdx.x];
            mine.sum[threadIdx.x] = shared.sum[threadIdx.x];
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.last = atomicAdd(&counters[row], 1u) == static_cast<unsigned>(splits) - 1;
            if (shared.last) counters[row] = 0;
        }
        __syncthreads();
        if (!shared.last) return false;
        __threadfence();
        if (threadIdx.x < kHeads) merge_head(partials, splits, threadIdx.x);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kOwn; ++k) own[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int i = 0; i < splits; ++i) add_partial(partials[i], own);
        return true;
    }

    __device__ __forceinline__ void merge_head(const Partial* partials, int32_t splits, int head) {
        float top = -INFINITY, total = 0.f;
        for (int i = 0; i < splits; ++i) top = fmaxf(top, __ldcg(&partials[i].max[head]));
        const float origin = top == -INFINITY ? 0.f : top;
        for (int i = 0; i < splits; ++i)
            total += exp2_approx(__ldcg(&partials[i].max[head]) - origin) *
                     __ldcg(&partials[i].sum[head]);
        shared.max[head] = top;
        shared.sum[head] = total;
    }

    __device__ __forceinline__ void add_partial(const Partial& part, float4 (&own)[kOwn]) const {
        float weight[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float top = shared.max[2 * t + e];
            weight[e] = exp2_approx(__ldcg(&part.max[2 * t + e]) - (top == -INFINITY ? 0.f : top));
        }
#pragma unroll
        for (int k = 0; k < kOwn; ++k) {
            const float4 x = __ldcg(&part.out[k][threadIdx.x]);
            own[k] = make_float4(fmaf(weight[0], x.x, own[k].x), fmaf(weight[1], x.y, own[k].y),
                                 fmaf(weight[0], x.z, own[k].z), fmaf(weight[1], x.w, own[k].w));
        }
    }

    // Normalises, rotates back, writes. Fragments of steps 2 i and 2 i + 1 are four neighbouring
    // dims of a head.
    __device__ __forceinline__ void finish(int64_t row, const float4 (&own)[kOwn]) {
        if (threadIdx.x < kHeads) finish_head(row, threadIdx.x);
        __syncthreads();
        const float* cos_sin = derotation(p, row);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int head = 2 * t + e;
            if (head >= p.heads) continue;
            const float factor = shared.factor[head];
            uint16_t* to = p.out_bf16.at(row, head);
#pragma unroll
            for (int k = 0; k < kOwn; k += 2) {
                const int unit = (kOwn * warp + k) / 2;
                const int dim =
                    unit / kUnits * kSpan + 32 * (g / 2) + 8 * (unit % kUnits) + 4 * (g % 2);
                const float4 a = own[k], b = own[k + 1];
                uint2 x = e == 0 ? make_uint2(pack_bf16(a.x * factor, a.z * factor),
                                              pack_bf16(b.x * factor, b.z * factor))
                                 : make_uint2(pack_bf16(a.y * factor, a.w * factor),
                                              pack_bf16(b.y * factor, b.w * factor));
                if (cos_sin != nullptr && dim >= kHeadDim - kRopeDims) {
                    const int pair = (dim - (kHeadDim - kRopeDims)) / 2;
                    x.x = derotate_pair(x.x, cos_sin, pair);
                    x.y = derotate_pair(x.y, cos_sin, pair + 1);
                }
                *reinterpret_cast<uint2*>(to + dim) = x;
            }
        }
    }

    // A row without records gives 0 and +inf.
    __device__ __forceinline__ void finish_head(int64_t row, int head) {
        const float top = shared.max[head], total = shared.sum[head];
        const bool empty = top == -INFINITY && total == 0.f;
        const float with_sink = total + exp2f(shared.sink[head] * kLog2e - top);
        shared.factor[head] = empty ? 0.f : kTileFactor / with_sink;
        if (p.lse && head < p.heads)
            p.lse.row(row)[head] = empty ? INFINITY : (top + log2f(total)) * few_heads::kLn2;
    }
};

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    eight_heads_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared*>(bytes);
    const int64_t row = blockIdx.x / plan.splits;
    const int32_t piece = static_cast<int32_t>(blockIdx.x % plan.splits);
    few_heads::prefetch_lists(p, row);
    QueryPart query;
    query.load(p, row);
    if (threadIdx.x == 0) shared.tiles.start(p, row);
    if (threadIdx.x < kHeads)
        shared.sink[threadIdx.x] =
            p.sink != nullptr && threadIdx.x < p.heads ? p.sink[threadIdx.x] : -INFINITY;
    __syncthreads();
    const auto border = [&](int32_t i) {
        return static_cast<int32_t>(int64_t{shared.tiles.count} * i / plan.splits);
    };
    Worker worker(p, plan, shared);
    if (border(piece) < border(piece + 1)) worker.run(border(piece), border(piece + 1), query);
    float4 own[kOwn];
    worker.reduce(own);
    if (plan.splits > 1 && !worker.merge_partials(row, piece, plan.splits, own)) return;
    worker.finish(row, own);
}

}  // namespace eight_heads

// One row takes 1.5 us longer here than in few_heads.cu; the choice may not change a row's bits
// where these are not to depend on the batch. Places of records are counted in 16 bytes, in 32
// bits.
bool takes_eight_heads(const AttendParams& p) {
    const auto holds = [](const RecordList& list) {
        return list.pages.num_pages * list.pages.page_stride <= int64_t{UINT32_MAX} * 16;
    };
    return p.heads <= 8 && (p.rows >= 64 || p.batch_invariant) && holds(p.main) && holds(p.window);
}

cudaError_t attend_eight_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    using namespace eight_heads;
    const int32_t splits = few_heads::splits_of(p, kCtasPerSm * num_sms, sizeof(Partial));
    const Plan plan{splits, Places(p.main.pages), Places(p.window.pages)};
    return launch(eight_heads_kernel, blocks_for(int64_t{p.rows} * plan.splits, 1), kThreads,
                  sizeof(Shared), stream, p, plan);
}

}  // namespace flash_csa::sm90
