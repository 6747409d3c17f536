// attend for batches whose rows do not fill the SMs: BF16 output over MainFp4 and WindowFp8 lists.
//
//   in   q [R, H, 512], window and main records, lists        out  out, lse
//
// Here: 16 heads a CTA; two_tiles_kernel.cuh has the kernel for 32 and 64, and the shape of a call
// is chosen at the end.
//
// A cluster takes a row and kHeads heads; its CTAs take runs of the row's tiles and add up their
// outputs through each other's shared memory. Latency is what counts: nothing is read before the
// slots, all warps do everything, and the code is short, as every line of it is fetched for a few
// uses. Per tile of 64 records (a list starts a new tile):
//
//   warps        dequantise | barrier | logits of a part of the dims | barrier | softmax of a part
//                of the heads | barrier | values of 128 dims | barrier
//   bulk copies  the next tile's records, from the first barrier on
//
// Floor: launch, slots, records, one tile, exchange: docs/attend_few_rows.md has the budget.
#include <cooperative_groups.h>

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>
#include <iterator>

#include "sm90/attend/few_rows.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/attend/two_tiles_kernel.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/cluster.h"
#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/dependents.cuh"
#include "sm90/common/exp2.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90 {
namespace few_rows {

template <int kHeads>
struct Worker {
    static constexpr int kFragment = kHeads / 2;
    static constexpr int kRecords = kTile / kWarps;
    static constexpr int kEachPanels = kPanels / kParts;  // of a warpgroup, in the logits
    // Softmax: of a warpgroup's heads a thread has kEach records of one, kVector in a row.
    static constexpr int kEach = kHeads / 8, kLanes = kTile / kEach;
    static constexpr int kVector = kEach < 4 ? kEach : 4;

    const AttendParams& p;
    const Plan& plan;
    Shared<kHeads>& shared;
    const int32_t row, first_head;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int group = warp / 4;
    const int first_record = warp * kRecords;  // that the warp copies
    int32_t window_length = 0, main_length = 0;
    int32_t next_slot = -1;  // first lanes: of a record of the tile that is copied next
    float out[kGroupPanels][kFragment] = {};
    float max = -INFINITY, sum = 0.f;  // of the thread's head; sum: of its records

    __device__ int softmax_head() const {
        return group * (kHeads / kGroups) + threadIdx.x % kWarpgroup / kLanes;
    }
    __device__ int head_of(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }

    // Asks for the slot of the lane's record of a tile, whether it is within its list or not.
    __device__ __forceinline__ void load_slot(int32_t tile) {
        // Copies: parameters have no address to choose from.
        Matrix<const int32_t> slots = p.main.slots;
        int32_t columns = p.main.columns;
        if (tile < plan.window_tiles) slots = p.window.slots, columns = p.window.columns;
        const int32_t entry = entry_of(tile);
        next_slot = -1;
        if (lane < kRecords && entry < columns) next_slot = slots.row(row)[entry];
    }
    __device__ int32_t entry_of(int32_t tile) const {
        const int32_t in_list = tile < plan.window_tiles ? tile : tile - plan.window_tiles;
        return in_list * kTile + first_record + lane;
    }

    // Starts the copies of a tile whose slots were asked for.
    __device__ __forceinline__ void start_tile(int32_t tile) {
        const bool in_window = tile < plan.window_tiles;
        Places places = plan.main;
        if (in_window) places = plan.window;
        const bool there =
            entry_of(tile) < (in_window ? window_length : main_length) && places.holds(next_slot);
        const uint32_t present = __ballot_sync(~0u, there);
        const uint64_t from = reinterpret_cast<uint64_t>(places.row(there ? next_slot : 0));
        using Window = Reader<RecordId::WindowFp8>;
        using Main = Reader<RecordId::MainFp4>;
        uint8_t* to =
            shared.raw + (in_window ? Window::place(first_record) : Main::place(first_record));
        if (cute::elect_one_sync()) {
            shared.present[tile & 1][first_record / kRecords] = static_cast<uint8_t>(present);
            shared.arrived.arrive_and_expect_tx(__popc(present) * places.bytes);
        }
        // One lane starts them: where each lane starts its own, that is a loop over lanes.
#pragma unroll
        for (int i = 0; i < kRecords; ++i) {
            const uint64_t record = __shfl_sync(~0u, from, i);
            if ((present >> i & 1) != 0 && cute::elect_one_sync())
                cute::SM90_BULK_COPY_G2S::copy(reinterpret_cast<const void*>(record),
                                               reinterpret_cast<uint64_t*>(&shared.arrived),
                                               to + (in_window ? Window::place(i) : Main::place(i)),
                                               places.bytes);
        }
    }

    template <RecordId kId>
    __device__ __forceinline__ void dequantise(int32_t tile) {
        using Read = Reader<kId>;
        const int lane = fresh(this->lane);
        uint8_t* kv = shared.kv[kGroupPanels * group][0];
#pragma unroll
        for (int step = 0; step < Read::kSteps; ++step) {
            const int r = Read::row(warp % 4, lane, step);
            const bool there = shared.present[tile & 1][r / kRecords] >> r % kRecords & 1;
            Codes codes = Read::read(shared.raw + Read::place(r), group, lane, step);
            if (!there) codes = {};
            Read::write(codes, lane, step, r, kv);
        }
    }

    // Records of the thread: kVector neighbours from here on.
    __device__ int record_of(int i) const { return i * kLanes + threadIdx.x % kLanes * kVector; }

    // Weights of the tile, for all warps; true where those of earlier tiles shrink.
    __device__ __forceinline__ bool softmax(int32_t tile) {
        using Vector = std::conditional_t<kVector == 4, float4, float2>;
        const int head = softmax_head();
        float x[kEach];
#pragma unroll
        for (int i = 0; i < kEach; i += kVector) {
            const int r = record_of(i);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const Vector v = *reinterpret_cast<const Vector*>(&shared.logits[part][head][r]);
                const auto* values = reinterpret_cast<const float*>(&v);
#pragma unroll
                for (int e = 0; e < kVector; ++e)
                    x[i + e] = part == 0 ? values[e] : x[i + e] + values[e];
            }
            const uint32_t there = shared.present[tile & 1][r / kRecords] >> r % kRecords;
            const float scale = p.softmax_scale * (kTileFactor * kLog2e);
#pragma unroll
            for (int e = 0; e < kVector; ++e)
                x[i + e] = there >> e & 1 ? x[i + e] * scale : -INFINITY;
        }
        const auto [keep, total] = weigh_head<kLanes, kVector>(
            x, max, [&](int i) { return weight_place(shared.p[0], head, record_of(i)); });
        sum = fmaf(sum, keep, total);
        if (threadIdx.x % kLanes == 0) shared.keep[head] = keep;
        return keep != 1.f;
    }

    __device__ __forceinline__ void rescale() {
#pragma unroll
        for (int c = 0; c < kHeads / 4; ++c) {
            const float keep = shared.keep[head_of(c)];
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m) {
                out[m][c / 2 * 4 + c % 2] *= keep;
                out[m][c / 2 * 4 + c % 2 + 2] *= keep;
            }
        }
    }

    __device__ __forceinline__ void add_values(bool accumulate) {
        const uint64_t kv = mn_major(shared.kv[kGroupPanels * group], 0);
        const uint64_t weights = k_major(shared.p);
        fence_registers(out);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m)
                multiply_values<kHeads>(
                    advance(kv, m * int{sizeof shared.kv[0]} + 16 * k * kPanelRowBytes),
                    advance(weights, 32 * k), out[m], accumulate || k > 0);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_registers(out);
    }

    __device__ __forceinline__ void run(int32_t begin, int32_t end) {
        uint32_t parity = 0;
#pragma unroll 1
        for (int32_t tile = begin; tile < end; ++tile) {
            shared.arrived.wait(parity);
            parity ^= 1;
            if (tile < plan.window_tiles)
                dequantise<RecordId::WindowFp8>(tile);
            else
                dequantise<RecordId::MainFp4>(tile);
            cutlass::arch::fence_view_async_shared();
            __syncthreads();
            float logits[kFragment];
            start_logits<kHeads, kEachPanels>(shared.kv + group * kEachPanels,
                                              shared.q + group * kEachPanels, logits);
            if (tile + 1 < end) start_tile(tile + 1);
            cute::warpgroup_wait<0>();
            fence_registers(logits);
            store_logits(logits, shared.logits[group]);
            __syncthreads();
            const bool shrinks = softmax(tile);
            cutlass::arch::fence_view_async_shared();
            if (__syncthreads_or(shrinks) && tile > begin) rescale();
            if (tile + 2 < end) load_slot(tile + 2);  // here: a fence would wait for it
            add_values(tile > begin);
            __syncthreads();  // the tile may be overwritten
        }
    }

    // Output in its natural order, maxima and sums, for the cluster.
    __device__ __forceinline__ void publish() {
#pragma unroll
        for (int h = 1; h < kLanes; h *= 2) sum += __shfl_xor_sync(~0u, sum, h);
        if (threadIdx.x % kLanes == 0) {
            shared.max[softmax_head()] = max;
            shared.sum[softmax_head()] = sum;
        }
        const int place = lane / 4;  // of paired order: dims 0 4 1 5 2 6 3 7
        float* to = shared.out() + kGroupPanels * kPanelColumns * group + 16 * (warp % 4) +
                    place % 2 * 4 + place / 2;
#pragma unroll
        for (int i = 0; i < kFragment; ++i) {
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m)
                to[head_of(i / 4 * 2 + i % 2) * kOutPitch + m * kPanelColumns + i / 2 % 2 * 8] =
                    out[m][i];
        }
        cluster_publish();
    }

    // Adds up the cluster's outputs, a warp 128 kItems dims of a head: the CTAs take turns. Loads
    // of kAhead pieces are on their way while the weights are found.
    __device__ __forceinline__ void reduce(const float* cos_sin) {
        constexpr int kItems = kHeads / 16, kParts = 4 / kItems, kAhead = 10 / kItems;
        const auto cluster = cooperative_groups::this_cluster();
        const int pieces = plan.pieces, rank = static_cast<int>(cluster.block_rank());
#pragma unroll 1
        for (int i = warp * pieces + rank; i < kHeads * kParts; i += kWarps * pieces) {
            const int head = i / kParts, dim = i % kParts * kItems * 128 + lane * 4;
            if (first_head + head >= p.heads) break;
            float mine = -INFINITY, total = 0.f;
            if (lane < pieces) {
                mine = cluster.map_shared_rank(shared.max, lane)[head];
                total = cluster.map_shared_rank(shared.sum, lane)[head];
            }
            float top = 0.f, weight = 0.f;
            float4 x[kItems] = {};
#pragma unroll 1
            for (int first = 0; first < pieces; first += kAhead) {
                float4 y[kAhead][kItems];
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    if (first + j >= pieces) break;
                    const float* from =
                        cluster.map_shared_rank(shared.out(), first + j) + head * kOutPitch + dim;
#pragma unroll
                    for (int k = 0; k < kItems; ++k)
                        y[j][k] = *reinterpret_cast<const float4*>(from + 128 * k);
                }
                if (first == 0) {
                    top = mine;
#pragma unroll
                    for (int h = 1; h < 32; h *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, h));
                    weight = mine == -INFINITY ? 0.f : exp2_approx(mine - top);
                    total *= weight;
#pragma unroll
                    for (int h = 1; h < 32; h *= 2) total += __shfl_xor_sync(~0u, total, h);
                }
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    if (first + j >= pieces) break;
                    const float w = __shfl_sync(~0u, weight, first + j);
#pragma unroll
                    for (int k = 0; k < kItems; ++k)
                        x[k] = make_float4(fmaf(w, y[j][k].x, x[k].x), fmaf(w, y[j][k].y, x[k].y),
                                           fmaf(w, y[j][k].z, x[k].z), fmaf(w, y[j][k].w, x[k].w));
                }
            }
            // A row without records gives 0 and +inf.
            const bool empty = total == 0.f;
            const float all = total + exp2f(fmaf(shared.sink[head], kLog2e, -top));
            const float factor = empty ? 0.f : kTileFactor / all;
            uint16_t* to = p.out_bf16.at(row, first_head + head);
#pragma unroll
            for (int k = 0; k < kItems; ++k) store(to, dim + 128 * k, x[k], factor, cos_sin);
            if (p.lse && dim == 0)
                p.lse.row(row)[first_head + head] = empty ? INFINITY : (top + log2f(total)) * kLn2;
        }
        cluster_arrive_relaxed();
        cluster_wait();  // a peer may still read
    }

    static __device__ __forceinline__ void store(uint16_t* head, int dim, float4 x, float factor,
                                                 const float* cos_sin) {
        uint2 y = make_uint2(pack_bf16(x.x * factor, x.y * factor),
                             pack_bf16(x.z * factor, x.w * factor));
        if (cos_sin != nullptr && dim >= kHeadDim - kRopeDims) {
            const int pair = (dim - (kHeadDim - kRopeDims)) / 2;
            y.x = derotate_pair(y.x, cos_sin, pair);
            y.y = derotate_pair(y.y, cos_sin, pair + 1);
        }
        *reinterpret_cast<uint2*>(head + dim) = y;
    }
};

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(bytes);
    const int32_t piece = static_cast<int32_t>(cute::block_rank_in_cluster());
    int32_t row, head_block;
    plan.head_blocks(row, head_block, static_cast<int32_t>(cute::cluster_id_in_grid().x));
    Worker<kHeads> worker{p, plan, shared, row, head_block * kHeads};
    const int32_t begin = piece * plan.run + min(piece, plan.longer);
    const int32_t end = begin + plan.run + (piece < plan.longer);
    allow_dependents();
    if (threadIdx.x == 0) {
        shared.arrived.init(kWarps);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous();
    worker.load_slot(begin);
    if (p.window.lengths != nullptr) worker.window_length = p.window.lengths[row];
    if (p.main.lengths != nullptr) worker.main_length = p.main.lengths[row];
    const float* cos_sin = derotation(p, row);
    if (p.derotate_positions != nullptr && cos_sin == nullptr)  // a padded row
        worker.window_length = worker.main_length = 0;
    const int32_t head = worker.first_head + static_cast<int32_t>(threadIdx.x);
    float sink = -INFINITY;
    if (threadIdx.x < kHeads && head < p.heads && p.sink != nullptr) sink = p.sink[head];
    if (begin < end) {
        worker.start_tile(begin);
        Query<kHeads> query;  // behind the copies, for which everything waits
        query.load(p, row, worker.first_head);
        if (begin + 1 < end) worker.load_slot(begin + 1);
        query.store(shared);
    }
    if (threadIdx.x < kHeads) shared.sink[threadIdx.x] = sink;
    worker.run(begin, end);
    worker.publish();
    worker.reduce(cos_sin);
}

// The output of all heads overlays only what no product reads any more.
template <int kHeads>
constexpr bool kFits = sizeof(Shared<kHeads>) <= 227 * 1024 &&
                       kHeads * kOutPitch * sizeof(float) <=
                           offsetof(Shared<kHeads>, logits) - offsetof(Shared<kHeads>, kv);
static_assert(kFits<16>);

// What takes a row with kHeads heads a CTA.
template <class Worker>
struct TwoTiles {
    static constexpr auto kKernel = two_tiles::two_tiles_kernel<Worker>;
    static constexpr size_t kShared = sizeof(typename Worker::Shared);
    static constexpr int32_t kMostPieces = Worker::Shared::kMostPieces;
};
template <int kHeads>
struct KernelOf;
template <>
struct KernelOf<16> {
    static constexpr auto kKernel = few_rows_kernel<16>;
    static constexpr size_t kShared = sizeof(Shared<16>);
    static constexpr int32_t kMostPieces = kLargestCluster;
};
template <>
struct KernelOf<32> : TwoTiles<two_tiles::Narrow<32>> {};
template <>
struct KernelOf<64> : TwoTiles<two_tiles::Wide<0>> {};
struct Pair : TwoTiles<two_tiles::Wide<2>> {};  // of two CTAs, which is known where it is built
struct Once : TwoTiles<two_tiles::Once> {
    static bool takes(const Plan& plan, int32_t tiles) {
        return plan.pieces <= kMostPieces && tiles <= 2 * plan.pieces;
    }
};

template <int kHeads, class Kernel = KernelOf<kHeads>>
cudaError_t launch_few_rows(const AttendParams& p, Plan plan, int32_t tiles, cudaStream_t stream) {
    const int32_t blocks = (p.heads + kHeads - 1) / kHeads;
    plan.head_blocks = cutlass::FastDivmod(blocks);
    plan.by_pieces = cutlass::FastDivmod(plan.pieces);
    plan.run = tiles / plan.pieces;
    plan.longer = tiles % plan.pieces;
    return launch_clusters(Kernel::kKernel, int64_t{p.rows} * blocks, plan.pieces, kThreads,
                           Kernel::kShared, stream, p, plan);
}

// CTAs of a row: as many as are resident at once with those of the other rows, less those which
// would not shorten the longest run of tiles.
template <int kHeads>
int32_t pieces_of(const AttendParams& p, int32_t tiles) {
    using Kernel = KernelOf<kHeads>;
    const auto& resident = resident_clusters<Kernel::kKernel>(kThreads, Kernel::kShared);
    const int64_t clusters = int64_t{p.rows} * ((p.heads + kHeads - 1) / kHeads);
    int32_t pieces = std::clamp(tiles, 1, Kernel::kMostPieces);
    while (pieces > 1 && resident.of_size[pieces] < clusters) --pieces;
    const int32_t run = (tiles + pieces - 1) / pieces;
    return run > 0 ? (tiles + run - 1) / run : 1;
}

struct Shape {
    int32_t heads, pieces;
    int64_t cycles;

    bool operator<(const Shape& other) const { return cycles < other.cycles; }
};

// What a shape costs beside what all cost: the tiles of a CTA and its exchange, at what clock
// stamps said of them.
template <int kHeads>
Shape shape_of(const AttendParams& p, int32_t tiles, int num_sms) {
    constexpr int32_t kTileCycles = 3600 + (kHeads - 16) * 24, kHeadCycles = 190;
    const int32_t pieces = pieces_of<kHeads>(p, tiles);
    const int64_t run = (tiles + pieces - 1) / pieces;
    const int64_t waves =
        (int64_t{p.rows} * ((p.heads + kHeads - 1) / kHeads) * pieces + num_sms - 1) / num_sms;
    return {kHeads, pieces,
            waves * (run * kTileCycles + kHeads * kHeadCycles * (pieces - 1) / pieces)};
}

}  // namespace few_rows

bool takes_few_rows(const AttendParams& p, int num_sms) {
    const auto takes = [](const RecordList& list, RecordId id) {
        return list.pages.data == nullptr || list.pages.record == id;
    };
    const int64_t blocks = (p.heads + kHeadBlock - 1) / kHeadBlock;
    return !p.batch_invariant && p.contiguous.data == nullptr && 2 * p.rows * blocks <= num_sms &&
           takes(p.main, RecordId::MainFp4) && few_rows::Places::reach(p.main.pages) &&
           takes(p.window, RecordId::WindowFp8);
}

cudaError_t attend_few_rows(const AttendParams& p, int num_sms, cudaStream_t stream) {
    using namespace few_rows;
    const auto tiles_of = [](int32_t records) { return (records + kTile - 1) / kTile; };
    Plan plan{
        1, 0, 0, tiles_of(p.window.columns), {}, {}, Places(p.main.pages), Places(p.window.pages)};
    const int32_t tiles = plan.window_tiles + tiles_of(p.main.columns);
    // The shape with the fewest cycles; lists without columns have the first.
    const Shape shapes[] = {shape_of<16>(p, tiles, num_sms), shape_of<32>(p, tiles, num_sms),
                            shape_of<64>(p, tiles, num_sms)};
    // With 64 heads only the first tile of a CTA may be of the window.
    const bool wide = plan.window_tiles <= shapes[2].pieces;
    const Shape& best = *std::min_element(std::begin(shapes), std::end(shapes) - !wide);
    plan.pieces = best.pieces;
    if (best.heads == 16) return launch_few_rows<16>(p, plan, tiles, stream);
    if (best.heads == 32 && Once::takes(plan, tiles))
        return launch_few_rows<32, Once>(p, plan, tiles, stream);
    if (best.heads == 32) return launch_few_rows<32>(p, plan, tiles, stream);
    if (plan.pieces == 2) return launch_few_rows<64, Pair>(p, plan, tiles, stream);
    return launch_few_rows<64>(p, plan, tiles, stream);
}

}  // namespace flash_csa::sm90
