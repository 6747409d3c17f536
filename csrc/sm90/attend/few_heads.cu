// attend for 8, 16 and 32 heads: BF16 output over MainFp4 and WindowFp8 records.
//
//   in   q [R, H, 512], window and main records, lists        out  out, lse
//
// A persistent CTA takes rows in turns, or runs of a row's tiles where rows are cut (`splits`).
// Its five or six warpgroups meet at barriers in shared memory, at which all lanes arrive. Other
// head counts are padded to the next of 8, 16, 32. Per tile of 64 records (a list starts a new
// tile)
//
//   copies    (1) find the records, a warp 16 of them, and copy them into the ring of the warps
//             that convert them; between rows, the next query into shared memory
//   convert   (2) each half of the dims, codes -> BF16 fragments in registers: logits^T [64
//             records, heads] += records . q^T; the fragments are also stored in the tile
//   softmax   (1) weights, from the sum of both halves; a warp has 8 heads
//   values    (1; 16 heads: 2, each half of the dims) out^T [512 dims, heads] += records^T . p^T
//             from the tile; after the last tile of a row, the output
//
// Heads are N of both products, and both leave a thread the same heads: what rescales a column of
// out^T is known where it is needed. Floor: the bytes of the records and those of shared memory;
// docs/attend_few_heads.md has the budget.
#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "sm90/attend/few_heads_convert.cuh"
#include "sm90/attend/few_heads_copy.cuh"
#include "sm90/attend/few_heads_values.cuh"
#include "sm90/attend/variants.h"
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace few_heads {

template <int kHeads>
__device__ __forceinline__ void start(Shared<kHeads>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kWarps * kSlots<kHeads>) {
        const int w = thread / kSlots<kHeads>, i = thread % kSlots<kHeads>;
        shared.slot_full[w][i].init(2 * 32);  // copies, and what is stored beside them
        shared.slot_empty[w][i].init(kConvertGroups * 32);
        cutlass::arch::fence_barrier_init();
    } else if (thread == kGroupThreads) {
        for (int i = 0; i < kTiles; ++i) {
            shared.tile_full[i].init(kConvertGroups * kGroupThreads);
            for (int s = 0; s < kGivenParts<kHeads>; ++s)
                shared.tile_empty[s][i].init(kValueThreads<kHeads> / kGivenParts<kHeads>);
            shared.weights_full[i].init(kGroupThreads);
            shared.raised[i].init(kGroupThreads);
        }
        shared.logits_empty.init(kGroupThreads);
        shared.totals_full.init(kGroupThreads);
        shared.totals_empty.init(kValueThreads<kHeads>);
        for (int i = 0; i < kQueries<kHeads>; ++i) {
            shared.row_full[i].init(kGroupThreads);
            shared.row_empty[i].init((kGroups<kHeads> - 1) * kGroupThreads);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
}

// Registers of a thread of each group. At the launch all have the same number, and no more in all.
template <int kHeads>
struct Registers;
template <>
struct Registers<8> {
    static constexpr uint32_t kConvert = 112, kSoftmax = 64, kValues = 88, kCopy = 88;
};
template <>
struct Registers<16> {
    static constexpr uint32_t kConvert = 96, kSoftmax = 48, kValues = 80, kCopy = 80;
};
template <>
struct Registers<32> {
    static constexpr uint32_t kConvert = 88, kSoftmax = 56, kValues = 168, kCopy = 80;
};
template <int kHeads>
inline constexpr uint32_t kLaunchRegisters = kHeads == 16 ? 80 : 96;

template <int kHeads, uint32_t kCount>
__device__ __forceinline__ void set_registers() {
    using R = Registers<kHeads>;
    static_assert(kConvertGroups * R::kConvert + R::kSoftmax + kValueGroups<kHeads> * R::kValues +
                      R::kCopy <=
                  kGroups<kHeads> * kLaunchRegisters<kHeads>);
    if constexpr (kCount > kLaunchRegisters<kHeads>)
        cutlass::arch::warpgroup_reg_alloc<kCount>();
    else
        cutlass::arch::warpgroup_reg_dealloc<kCount>();
}

template <int kHeads, bool kWhole>
__global__ void __launch_bounds__(kThreads<kHeads>, 1)
    few_heads_kernel(const __grid_constant__ AttendParams p,
                     const __grid_constant__ Plan<kWhole> plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(bytes);
    allow_dependents();
    start(shared);
    const int group = cutlass::canonical_warp_group_idx();
    const int warp = cutlass::canonical_warp_idx_sync() % kWarps;
    const int lane = threadIdx.x % 32;
    // While the kernel before ends: what is asked for here is read by nobody.
    const int32_t row = static_cast<int32_t>(blockIdx.x) / plan.splits;
    if (group == kGroups<kHeads> - 1) {
        if (warp == 0) prefetch_lists(p, row, lane);
        if (warp == 1) prefetch_query(p, row, lane);
    } else if (group == kConvertGroups + 1 && plan.splits == 1 && warp < kTile / 32) {
        // No more than the first tile: what is asked for holds up the loads behind it.
        prefetch_record(p.window, plan.window, row, 32 * warp + lane);
    }
    wait_for_previous();
    if (group < kConvertGroups) {
        set_registers<kHeads, Registers<kHeads>::kConvert>();
        Converter<kHeads>{shared, group, warp, lane}.work(plan.items);
    } else if (group == kConvertGroups) {
        set_registers<kHeads, Registers<kHeads>::kSoftmax>();
        Weigher<kHeads, kWhole>{p, shared, p.softmax_scale * (kTileFactor * kLog2e), warp, lane}
            .work(plan.items);
    } else if (group < kGroups<kHeads> - 1) {
        set_registers<kHeads, Registers<kHeads>::kValues>();
        Adder<kHeads, kWhole>{p, plan, shared, group - kConvertGroups - 1, warp, lane}.work();
    } else {
        set_registers<kHeads, Registers<kHeads>::kCopy>();
        Copier<kHeads, kWhole>{p, plan, shared, warp, lane}.work();
    }
}

template <int kHeads, bool kWhole>
cudaError_t launch_plan(const AttendParams& p, int32_t splits, int num_sms, cudaStream_t stream) {
    static_assert(sizeof(Shared<kHeads>) <= 227 * 1024);
    const Plan<kWhole> plan(p, splits);
    return launch_after(few_heads_kernel<kHeads, kWhole>,
                        blocks_for(plan.items < num_sms ? plan.items : num_sms, 1),
                        kThreads<kHeads>, sizeof(Shared<kHeads>), stream, p, plan);
}

template <int kHeads>
cudaError_t launch_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    const int32_t splits = splits_of(p, num_sms, sizeof(Partial<kHeads>));
    return splits == 1 && p.contiguous.data == nullptr
               ? launch_plan<kHeads, true>(p, splits, num_sms, stream)
               : launch_plan<kHeads, false>(p, splits, num_sms, stream);
}

}  // namespace few_heads

bool takes_few_heads(const AttendParams& p) {
    const auto takes = [](const RecordList& list, RecordId id) {
        return list.pages.data == nullptr ||
               (list.pages.record == id && few_heads::Places::reach(list.pages));
    };
    // Maxima are taken before the scale.
    return p.heads <= 32 && p.softmax_scale > 0.f && takes(p.main, RecordId::MainFp4) &&
           takes(p.window, RecordId::WindowFp8);
}

cudaError_t attend_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    using namespace few_heads;
    if (p.heads <= 8) return launch_few_heads<8>(p, num_sms, stream);
    if (p.heads <= 16) return launch_few_heads<16>(p, num_sms, stream);
    return launch_few_heads<32>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
