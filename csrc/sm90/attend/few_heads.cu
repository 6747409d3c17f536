// attend for 8, 16 and 32 heads: BF16 output over MainFp4 and WindowFp8 records.
//
//   in   q [R, H, 512], window and main records, lists        out  out, lse
//
// A persistent CTA takes rows in turns, or runs of a row's tiles where rows are cut (`splits`).
// Its four warpgroups meet at barriers in shared memory only. Other head counts are padded to the
// next of 8, 16, 32. Per tile of 64 records (a list starts a new tile)
//
//   copies    (1) find the records, a warp 16 of them, bring each by a bulk copy into the ring
//             of the warps that convert it; between rows, the next query into shared memory
//   convert   (2) each half of the dims, codes -> BF16 fragments in registers: logits^T [64
//   records,
//             heads] += records . q^T; the fragments are also stored in the tile
//   values    (1) softmax over the sum of both halves; out^T [512 dims, heads] += records^T . p^T,
//             the tile MN-major as A; after the last tile of a row, the output
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
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace few_heads {

template <int kHeads>
__device__ __forceinline__ void start(Shared<kHeads>& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        for (int w = 0; w < kWarps; ++w) {
            for (int i = 0; i < kSlots<kHeads>; ++i) {
                shared.slot_full[w][i].init(1);
                shared.slot_empty[w][i].init(kConvertGroups);
            }
        }
        for (int i = 0; i < kTiles; ++i) {
            shared.tile_full[i].init(kConvertGroups * kWarps);
            shared.tile_empty[i].init(kWarps);
            shared.weights_full[i].init(kWarps);
        }
        shared.logits_empty.init(kWarps);
        shared.totals_full.init(1);
        shared.totals_empty.init(kWarps);
        for (int i = 0; i < kQueries<kHeads>; ++i) {
            shared.row_full[i].init(kWarps);
            shared.row_empty[i].init((kConvertGroups + 2) * kWarps);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
}

// Registers of a thread, of 5 * 96 for one of each warpgroup.
inline constexpr uint32_t kLaunchRegisters = 96;
template <int kHeads>
inline constexpr uint32_t kConvertRegisters = kHeads == 32 ? 88 : 112;
template <int kHeads>
inline constexpr uint32_t kSoftmaxRegisters = kHeads == 32 ? 72 : 64;
template <int kHeads>
inline constexpr uint32_t kValuesRegisters = kHeads == 32   ? 168
                                             : kHeads == 16 ? 112
                                                            : 88;
template <int kHeads>
inline constexpr uint32_t kCopyRegisters = kHeads == 32   ? 64
                                           : kHeads == 16 ? 80
                                                          : 88;

template <uint32_t kCount>
__device__ __forceinline__ void set_registers() {
    if constexpr (kCount > kLaunchRegisters)
        cutlass::arch::warpgroup_reg_alloc<kCount>();
    else
        cutlass::arch::warpgroup_reg_dealloc<kCount>();
}

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    few_heads_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    auto& shared = *reinterpret_cast<Shared<kHeads>*>(bytes);
    start(shared);
    const int group = cutlass::canonical_warp_group_idx();
    const int warp = cutlass::canonical_warp_idx_sync() % kWarps;
    const int lane = threadIdx.x % 32;
    if (group < kConvertGroups) {
        set_registers<kConvertRegisters<kHeads>>();
        Converter<kHeads>{shared, group, warp, lane}.work(plan.items);
    } else if (group == kConvertGroups) {
        set_registers<kSoftmaxRegisters<kHeads>>();
        Weigher<kHeads>{shared, p.softmax_scale * (kTileFactor * kLog2e), warp, lane}.work(
            plan.items);
    } else if (group == kConvertGroups + 1) {
        set_registers<kValuesRegisters<kHeads>>();
        Adder<kHeads>{p, plan, shared, warp, lane}.work();
    } else {
        set_registers<kCopyRegisters<kHeads>>();
        Copier<kHeads>{p, plan, shared, warp, lane}.work();
    }
}

template <int kHeads>
cudaError_t launch_few_heads(const AttendParams& p, int num_sms, cudaStream_t stream) {
    static_assert(sizeof(Shared<kHeads>) <= 227 * 1024);
    const int32_t splits = splits_of(p, num_sms, sizeof(Partial<kHeads>));
    const int32_t items = p.rows * splits;
    const Plan plan{splits, items, Places(p.main.pages), Places(p.window.pages)};
    return launch(few_heads_kernel<kHeads>, blocks_for(items < num_sms ? items : num_sms, 1),
                  kThreads, sizeof(Shared<kHeads>), stream, p, plan);
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
    if (p.heads <= 8) return launch_few_heads<8>(p, num_sms, stream);
    if (p.heads <= 16) return launch_few_heads<16>(p, num_sms, stream);
    return launch_few_heads<32>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
