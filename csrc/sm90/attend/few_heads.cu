// attend for 8, 16 and 32 heads: BF16 output over MainFp4 and WindowFp8 records.
//
//   in   q [R, H, 512], window and main records, lists        out  out, lse
//
// A CTA takes a row, or one of the `splits` runs of its tiles. Two warpgroups share an SM (two
// CTAs, or one of 32 heads, whose warpgroups take the tiles in turns), so that one converts while
// the other multiplies. Other head counts are padded to the next of 8, 16, 32. Per tile of 64
// records (a list starts a new tile) every warp of a warpgroup
//
//   convert   reads its 16 records from its ring, codes -> BF16 in registers;
//             logits^T [64 records, heads] += records . q^T with these registers as A, which are
//             also stored in shared memory; starts a copy for every ring slot that it has read
//   softmax   over the records: lanes, then warps through shared memory
//   values    out^T [512 dims, heads] += records^T . p^T, the stored tile MN-major as A
//
// Heads are N of both products, and both leave a thread the same heads: what rescales a column of
// out^T is known where it is needed. Floor: the bytes of the records; docs/attend_few_heads.md has
// the budget.
#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include "sm90/attend/few_heads.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/exp2.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace few_heads {

// A partial result in the workspace: out^T fragments as the threads hold them, then maxima, sums.
template <int kHeads>
struct Partial {
    float4 out[kPanels * kFragment<kHeads> / 4][kGroupThreads];
    float max[kHeads];
    float sum[kHeads];
};

// A maximum may lag behind by this much (log2): weights up to 2^8 lose no precision, and `out` is
// seldom rescaled.
constexpr float kSlack = 8.f;

struct Plan {
    int32_t splits;
    Places main, window;
};

// One warpgroup's state. Rows, units and columns as in few_heads.cuh.
template <int kHeads>
struct Worker {
    static constexpr int kCols = kColumns<kHeads>;
    static constexpr int kFrag = kFragment<kHeads>;
    // Panels: 13 % at 8 heads, none at 32, where the code leaves the instruction cache.
    static constexpr int kUnroll = kHeads == 32 ? 1 : 4;

    const AttendParams& p;
    const Plan& plan;
    Shared<kHeads>& shared;
    const int group = kGroups<kHeads> > 1 ? cutlass::canonical_warp_group_idx() : 0;
    const int thread = threadIdx.x % kGroupThreads;
    const int warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    // The tile that is being copied; a lane knows where record lane % 16 lies.
    int32_t copy_tile = 0, copy_end = 0;
    int32_t next_slot = -1;  // of the lane's record of the tile after it
    const uint8_t* from = nullptr;
    uint32_t present = 0;  // as in the ring
    int left = 0;          // slots of it that are not started
    int copy_set = kScaleSets - 1;
    int get = 0;  // ring slot that is read next
    int set = 0;  // scales of the tile that is read
    float out[kPanels][kFrag] = {};
    float max[kCols];
    float sum[kCols] = {};  // of this thread's records

    __device__ Worker(const AttendParams& params, const Plan& asked, Shared<kHeads>& s)
        : p(params), plan(asked), shared(s) {
#pragma unroll
        for (float& x : max) x = -INFINITY;
    }

    __device__ __forceinline__ Ring<kHeads>& ring() const { return shared.rings[group][warp]; }

    __device__ __forceinline__ void sync() const {
        if constexpr (kGroups<kHeads> == 1)
            __syncthreads();
        else
            cutlass::arch::NamedBarrier::sync(kGroupThreads, group);
    }

    __device__ __forceinline__ void load_slot() {
        const int at = kWarpRecords * warp + lane % kWarpRecords;
        next_slot = copy_tile < copy_end ? shared.tiles.slot(copy_tile, at, plan.main.page) : -1;
    }

    __device__ __forceinline__ const uint8_t* record_of(int at) const {
        return reinterpret_cast<const uint8_t*>(
            __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(from), at));
    }

    // Goes on to the next tile: finds the records, starts their scales, asks for the slots of the
    // tile after it.
    __device__ __forceinline__ void start_tile() {
        constexpr Record kMain = record(RecordId::MainFp4), kWindow = record(RecordId::WindowFp8);
        const bool window = shared.tiles.is_window(copy_tile);
        // A copy, not a reference: the two are parameters, which have no address to choose from.
        Places places = plan.main;
        if (window) places = plan.window;
        const bool there = places.holds(next_slot);
        from = there ? places.row(next_slot) : places.data;
        present = __ballot_sync(kAllLanes, there);
        copy_tile += kGroups<kHeads>;
        load_slot();
        copy_set = copy_set + 1 == kScaleSets ? 0 : copy_set + 1;
        if (lane == 0) ring().present[copy_set] = present;
        const int at = lane / 2, part = lane % 2;  // two lanes a record, of the window one
        const uint8_t* scales =
            record_of(at) + (window ? kWindow.data_bytes : kMain.data_bytes) + 16 * part;
        if (part == 0 || !window)
            copy_16_async(ring().scales[copy_set][at] + 16 * part, scales,
                          (present >> at & 1) != 0);
        left = (window ? kWindow.data_bytes : kMain.data_bytes) / kSlotBytes;
    }

    // Starts a copy into a ring slot, a group: eight lanes bring 128 bytes of a record.
    __device__ __forceinline__ void copy_slot(int slot) {
        constexpr int kLanes = kSlotBytes / 16;
        if (left == 0) start_tile();
#pragma unroll
        for (int i = 0; i < kWarpRecords * kLanes / 32; ++i) {
            const int at = lane / kLanes + 32 / kLanes * i, chunk = lane % kLanes;
            copy_16_async(ring().slots[slot][at] + (chunk ^ slot_swizzle(at)) * 16,
                          record_of(at) + 16 * chunk, (present >> at & 1) != 0);
        }
        commit_copies();
        from += kSlotBytes;
        --left;
    }

    // A lane's codes and scales of a panel, two records.
    template <class Read>
    struct Panel {
        typename Read::Codes codes[2];
        uint32_t scale[2];
    };

    // Reads a panel; waits for its slot where it is the first one of it.
    template <class Read>
    __device__ __forceinline__ Panel<Read> read_panel(int panel) const {
        if (panel % Read::kSlotPanels == 0) {
            wait_copies<kSlots<kHeads> - 1>();
            __syncwarp();
        }
        Panel<Read> result;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            result.codes[r] = Read::codes(ring().slots[get][0], panel, g + 8 * r, t);
            result.scale[r] = Read::scale(ring().scales[set][g + 8 * r], panel, t);
        }
        return result;
    }

    // Converts the tile that is arriving, multiplies it with the query and stores it; for every
    // slot that was read a later one is started.
    template <RecordId kId>
    __device__ __forceinline__ void convert(float (&logits)[kFrag]) {
        using Read = Reader<kId>;
        // Of a fragment's four 8 x 8 blocks (record, dim) this lane addresses row lane % 8 of
        // block lane / 8: records from 0 or 8 on, dims from 0 or 8 on.
        uint8_t* to = shared.kv[group][0][kWarpRecords * warp + lane % 16];
        uint64_t q = k_major(shared.q);
        FragmentA a[2][2];  // of two units, so that one is read while the other is made
#pragma unroll
        for (float& x : logits) x = 0.f;
        Panel<Read> ahead = read_panel<Read>(0);
#pragma unroll kUnroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const Panel<Read> mine = ahead;
            const uint32_t factor[2] = {Read::factor(mine.scale[0]), Read::factor(mine.scale[1])};
            if (panel % Read::kSlotPanels == Read::kSlotPanels - 1) {
                __syncwarp();
                copy_slot(get);
                get = get + 1 == kSlots<kHeads> ? 0 : get + 1;
            }
            if (panel + 1 < kPanels) ahead = read_panel<Read>(panel + 1);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // Values are made after the wait (Reader::values has a fence for the compiler):
                // the product of two units ago reads the registers that they go to.
                cute::warpgroup_wait<1>();
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint4 x = Read::values(mine.codes[r], j, factor[r]);
                    a[j][0][r] = x.x;
                    a[j][0][2 + r] = x.y;
                    a[j][1][r] = x.z;
                    a[j][1][2 + r] = x.w;
                }
                store_unit(a[j], j, to);
                cute::warpgroup_arrive();
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    multiply_logits<kHeads>(a[j][h], advance(q, 64 * j + 32 * h), logits);
                cute::warpgroup_commit_batch();
            }
            to += sizeof shared.kv[0][0];
            q = advance(q, sizeof shared.q[0]);
        }
        cute::warpgroup_wait<0>();
    }

    __device__ __forceinline__ void store_unit(const FragmentA (&a)[2], int j, uint8_t* to) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int chunk = (4 * j + 2 * h + lane / 16) ^ (lane % 8);
            cute::SM90_U32x4_STSM_N::copy(
                a[h][0], a[h][1], a[h][2], a[h][3],
                *reinterpret_cast<cute::uint128_t*>(to + chunk * kUnitBytes));
        }
    }

    // Logits -> weights in shared memory; rescales `out` and `sum` where a maximum grew by much.
    __device__ __forceinline__ void softmax(float (&logits)[kFrag]) {
        const uint32_t there = ring().present[set];
        if (there != kAllLanes) {
#pragma unroll
            for (int i = 0; i < kFrag; ++i)
                if ((there >> (g + i / 2 % 2 * 8) & 1) == 0) logits[i] = -INFINITY;
        }
        store_maxima(logits);
        cutlass::arch::fence_view_async_shared();  // the tile
        sync();
        const float scale = p.softmax_scale * (kTileFactor * kLog2e);
        bool same = true;
        float keep[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            float top = shared.reduce[group][0][head_of(c)];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) top = fmaxf(top, shared.reduce[group][w][head_of(c)]);
            top *= scale;
            const float before = max[c];
            if (top > before + kSlack) {
                max[c] = top;
                same = false;
            }
            const float base = max[c] == -INFINITY ? 0.f : max[c];  // no record so far
            keep[c] = exp2_approx(before - base);
            float* column = logits + c / 2 * 4 + c % 2;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                column[2 * r] = exp2_approx(fmaf(column[2 * r], scale, -base));
            sum[c] = fmaf(sum[c], keep[c], column[0] + column[2]);
        }
        store_weights(logits);
        if (!__all_sync(kAllLanes, same)) {
#pragma unroll
            for (int i = 0; i < kPanels * kFrag; ++i)
                out[i / kFrag][i % kFrag] *= keep[i % kFrag / 4 * 2 + i % 2];
        }
        cutlass::arch::fence_view_async_shared();  // the weights
        sync();
    }

    // The largest logit of each head over the warp's records. While there is more than one column
    // a lane hands half of them to its partner and takes the other half.
    __device__ __forceinline__ void store_maxima(const float (&logits)[kFrag]) {
        float largest[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c)
            largest[c] = fmaxf(logits[c / 2 * 4 + c % 2], logits[c / 2 * 4 + c % 2 + 2]);
        int column = 0;
#pragma unroll
        for (int bit = 16, count = kCols; bit >= 4; bit /= 2) {
            const bool upper = (lane & bit) != 0;
            if (count == 1) {
                largest[0] = fmaxf(largest[0], __shfl_xor_sync(kAllLanes, largest[0], bit));
                continue;
            }
            count /= 2;
            if (upper) column += count;
#pragma unroll
            for (int c = 0; c < kCols / 2; ++c) {
                if (c >= count) break;
                const float mine = upper ? largest[c + count] : largest[c];
                const float other = upper ? largest[c] : largest[c + count];
                largest[c] = fmaxf(mine, __shfl_xor_sync(kAllLanes, other, bit));
            }
        }
        shared.reduce[group][warp][head_of(column)] = largest[0];
    }

    // Two 8 x 8 blocks of [record][head] per 8 heads, transposed on the way.
    __device__ __forceinline__ void store_weights(const float (&weights)[kFrag]) {
        const int head = lane % 8, block = lane / 8 % 2;
        uint8_t* to = shared.p[group][0] + panel_offset(head, 2 * warp + block);
#pragma unroll
        for (int j = 0; j < kHeads / 8; ++j) {
            uint32_t packed[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const __nv_bfloat162 x =
                    __floats2bfloat162_rn(weights[4 * j + 2 * r], weights[4 * j + 2 * r + 1]);
                packed[r] = reinterpret_cast<const uint32_t&>(x);
            }
            cute::SM90_U16x4_STSM_T::copy(
                packed[0], packed[1],
                *reinterpret_cast<cute::uint128_t*>(to + j * 8 * kPanelRowBytes));
        }
    }

    // Starts the second product.
    __device__ __forceinline__ void add_values() {
        const uint64_t kv = mn_major(shared.kv[group], 0);
        const uint64_t weights = k_major(shared.p[group]);
        cute::warpgroup_arrive();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k)
                multiply_values<kHeads>(
                    advance(kv, panel * static_cast<int>(sizeof shared.kv[0][0]) +
                                    16 * k * kPanelRowBytes),
                    advance(weights, 32 * k), out[panel]);
        }
        cute::warpgroup_commit_batch();
    }

    // Every kGroups-th of the tiles [begin, end).
    __device__ __forceinline__ void run(int32_t begin, int32_t end,
                                        const QueryPart<kHeads>& query) {
        constexpr int kStep = kGroups<kHeads>;
        copy_tile = begin + group;
        copy_end = end;
        load_slot();
#pragma unroll 1
        for (int i = 0; i < kSlots<kHeads>; ++i) copy_slot(i);
        query.store(shared);
        cutlass::arch::fence_view_async_shared();
        __syncthreads();
        for (int32_t tile = begin + group; tile < end; tile += kStep) {
            float logits[kFrag];
            if (shared.tiles.is_window(tile))
                convert<RecordId::WindowFp8>(logits);
            else
                convert<RecordId::MainFp4>(logits);
            softmax(logits);
            add_values();
            set = set + 1 == kScaleSets ? 0 : set + 1;
            cute::warpgroup_wait<0>();
            sync();
        }
    }

    __device__ __forceinline__ int head_of(int c) const { return c / 2 * 8 + 2 * t + c % 2; }

    // Brings the warps' and warpgroups' sums together: shared.max and .sum, and, in the first
    // warpgroup, `out`. The others end here.
    __device__ __forceinline__ void reduce() {
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
#pragma unroll
            for (int h = 4; h < 32; h *= 2) sum[c] += __shfl_xor_sync(kAllLanes, sum[c], h);
            if (g == 0) shared.reduce[group][warp][head_of(c)] = sum[c];
            if (g == 0 && warp == 0) shared.group_max[group][head_of(c)] = max[c];
        }
        __syncthreads();
        if (threadIdx.x < kHeads) reduce_head(threadIdx.x);
        __syncthreads();
        if constexpr (kGroups<kHeads> > 1) add_groups();
    }

    __device__ __forceinline__ void reduce_head(int head) {
        float top = -INFINITY, total = 0.f;
        for (const auto& of_group : shared.group_max) top = fmaxf(top, of_group[head]);
        const float base = top == -INFINITY ? 0.f : top;
        for (int i = 0; i < kGroups<kHeads>; ++i) {
            const float weight = exp2_approx(shared.group_max[i][head] - base);
            shared.weight[i][head] = weight;
            for (const auto& of_warp : shared.reduce[i]) total += weight * of_warp[head];
        }
        shared.max[head] = top;
        shared.sum[head] = total;
    }

    // Adds the second warpgroup's sums to the first's, by way of its tile.
    __device__ __forceinline__ void add_groups() {
        auto* values = reinterpret_cast<float4(*)[kGroupThreads]>(shared.kv[1]);
        float* mine = out[0];
#pragma unroll
        for (int i = 0; i < kPanels * kFrag; ++i)
            mine[i] *= shared.weight[group][head_of(i % kFrag / 4 * 2 + i % 2)];
        if (group == 1) {
#pragma unroll
            for (int i = 0; i < kPanels * kFrag / 4; ++i)
                values[i][thread] =
                    make_float4(mine[4 * i], mine[4 * i + 1], mine[4 * i + 2], mine[4 * i + 3]);
        }
        __syncthreads();
        if (group == 1) return;
#pragma unroll
        for (int i = 0; i < kPanels * kFrag / 4; ++i) {
            const float4 x = values[i][thread];
            mine[4 * i] += x.x;
            mine[4 * i + 1] += x.y;
            mine[4 * i + 2] += x.z;
            mine[4 * i + 3] += x.w;
        }
    }

    __device__ __forceinline__ void store_partial(Partial<kHeads>& to) const {
        const float* values = out[0];
#pragma unroll
        for (int i = 0; i < kPanels * kFrag / 4; ++i)
            to.out[i][thread] =
                make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        if (threadIdx.x >= kHeads) return;
        to.max[threadIdx.x] = shared.max[threadIdx.x];
        to.sum[threadIdx.x] = shared.sum[threadIdx.x];
    }

    // True in the CTA that comes last of a row's; it then has the row's totals.
    __device__ __forceinline__ bool merge_partials(int64_t row, int32_t piece, int32_t splits) {
        auto* counters = reinterpret_cast<unsigned*>(p.workspace.data);
        auto* partials =
            reinterpret_cast<Partial<kHeads>*>(p.workspace.data + kSyncBytes) + row * splits;
        store_partial(partials[piece]);
        __threadfence();
        sync();
        if (threadIdx.x == 0) {
            shared.last = atomicAdd(&counters[row], 1u) == static_cast<unsigned>(splits) - 1;
            if (shared.last) counters[row] = 0;
        }
        sync();
        if (!shared.last) return false;
        __threadfence();
        if (threadIdx.x < kHeads) {
            float top = -INFINITY, total = 0.f;
            for (int i = 0; i < splits; ++i)
                top = fmaxf(top, __ldcg(&partials[i].max[threadIdx.x]));
            const float base = top == -INFINITY ? 0.f : top;
            for (int i = 0; i < splits; ++i)
                total += exp2_approx(__ldcg(&partials[i].max[threadIdx.x]) - base) *
                         __ldcg(&partials[i].sum[threadIdx.x]);
            shared.max[threadIdx.x] = top;
            shared.sum[threadIdx.x] = total;
        }
        sync();
        float* values = out[0];
#pragma unroll
        for (int i = 0; i < kPanels * kFrag; ++i) values[i] = 0.f;
        for (int i = 0; i < splits; ++i) add_partial(partials[i]);
        return true;
    }

    __device__ __forceinline__ void add_partial(const Partial<kHeads>& part) {
        float weight[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const float top = shared.max[head_of(c)];
            weight[c] = exp2_approx(__ldcg(&part.max[head_of(c)]) - (top == -INFINITY ? 0.f : top));
        }
        float* values = out[0];
#pragma unroll
        for (int k = 0; k < kPanels * kFrag / 4; ++k) {
            const float4 x = __ldcg(&part.out[k][thread]);
            const int c = 4 * k % kFrag / 4 * 2;
            values[4 * k] = fmaf(weight[c], x.x, values[4 * k]);
            values[4 * k + 1] = fmaf(weight[c + 1], x.y, values[4 * k + 1]);
            values[4 * k + 2] = fmaf(weight[c], x.z, values[4 * k + 2]);
            values[4 * k + 3] = fmaf(weight[c + 1], x.w, values[4 * k + 3]);
        }
    }

    // Normalises; through shared memory into rows; rotates back; writes.
    __device__ __forceinline__ void finish(int64_t row) {
        if (threadIdx.x < kHeads) finish_head(row, threadIdx.x);
        sync();
        uint8_t* rows = shared.kv[0][0][0];
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const float factor = shared.factor[head_of(c)];
            // Rows 16 w + g and 8 more of a panel are two neighbouring dims.
            const int unit = 2 * (g / 2) + warp / 2, within = 2 * (g % 2) + warp % 2;
            uint8_t* to = rows + out_offset(head_of(c), unit) + 4 * within;
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                const float* pair = out[panel] + c / 2 * 4 + c % 2;
                *reinterpret_cast<__nv_bfloat162*>(to + panel * kPanelRowBytes) =
                    __floats2bfloat162_rn(pair[0] * factor, pair[2] * factor);
            }
        }
        sync();
        const float* cos_sin = derotation(p, row);
        constexpr int kUnits = kHeadDim / kGroupDims;
        for (int i = thread; i < p.heads * kUnits; i += kGroupThreads) {
            const int head = i / kUnits, unit = i % kUnits;
            const auto* x = reinterpret_cast<const uint4*>(rows + out_offset(head, unit));
            store_group(p.out_bf16.at(row, head), unit, *x, cos_sin);
        }
    }

    // A row without records gives 0 and +inf.
    __device__ __forceinline__ void finish_head(int64_t row, int head) {
        const float top = shared.max[head], total = shared.sum[head];
        const bool empty = top == -INFINITY && total == 0.f;
        const float with_sink = total + exp2f(shared.sink[head] * kLog2e - top);
        shared.factor[head] = empty ? 0.f : kTileFactor / with_sink;
        if (p.lse && head < p.heads)
            p.lse.row(row)[head] = empty ? INFINITY : (top + log2f(total)) * kLn2;
    }
};

// 228 KiB an SM, of which the system takes one a CTA.
template <int kHeads>
constexpr bool kFitsSm = kCtasPerSm<kHeads> * (sizeof(Shared<kHeads>) + 1024) <= 228 * 1024;
static_assert(kFitsSm<8> && kFitsSm<16> && kFitsSm<32>);

template <int kHeads>
__global__ void __launch_bounds__(kThreads<kHeads>, kCtasPerSm<kHeads>)
    few_heads_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(bytes);
    const int64_t row = blockIdx.x / plan.splits;
    const int32_t piece = static_cast<int32_t>(blockIdx.x % plan.splits);
    prefetch_lists(p, row);
    QueryPart<kHeads> query;
    query.load(p, row);
    if (threadIdx.x == 0) shared.tiles.start(p, row);
    load_sink(p, shared);
    __syncthreads();
    const Tiles& tiles = shared.tiles;
    const auto border = [&](int32_t i) {
        return static_cast<int32_t>(int64_t{tiles.count} * i / plan.splits);
    };
    Worker<kHeads> worker(p, plan, shared);
    if (border(piece) < border(piece + 1)) worker.run(border(piece), border(piece + 1), query);
    worker.reduce();
    if (worker.group > 0) return;
    if (plan.splits > 1 && !worker.merge_partials(row, piece, plan.splits)) return;
    worker.finish(row);
}

template <int kHeads>
cudaError_t launch_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    const int32_t splits = splits_of(p, kCtasPerSm<kHeads> * num_sms, sizeof(Partial<kHeads>));
    const Plan plan{splits, Places(p.main.pages), Places(p.window.pages)};
    return launch(few_heads_kernel<kHeads>, blocks_for(int64_t{p.rows} * plan.splits, 1),
                  kThreads<kHeads>, sizeof(Shared<kHeads>), stream, p, plan);
}

}  // namespace few_heads

bool takes_few_heads(const AttendParams& p) {
    const auto takes = [](const RecordList& list, RecordId id) {
        return list.pages.data == nullptr || list.pages.record == id;
    };
    // Maxima are taken before the scale.
    return p.heads <= 32 && p.softmax_scale > 0.f && takes(p.main, RecordId::MainFp4) &&
           takes(p.window, RecordId::WindowFp8);
}

cudaError_t attend_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    using namespace few_heads;
    if (takes_eight_heads(p)) return attend_eight_heads(p, num_sms, stream);
    if (p.heads <= 8) return launch_few_heads<8>(p, num_sms, stream);
    if (p.heads <= 16) return launch_few_heads<16>(p, num_sms, stream);
    return launch_few_heads<32>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
