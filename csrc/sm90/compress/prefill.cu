// Compression of long steps of ratio 1 and 2 to MainFp4 and IndexFp4 records.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// A block works on tiles of 64 entries, in three roles:
//   feed     ratio 1: one warp copies rows to slots, 4 entries each, two look up what they close
//            ratio 2: 8 warps pool rows, BF16, 4 entries at a time to a slot of their own
//   finish   slot -> norm -> latent to the tile, RoPE -> main record
//   keys     tile -> wgmma -> norm -> RoPE -> index record; ratio 2: they look up entries as well
// Timeline of two tiles:
//   feed     | 0 | 1 | 2 ...                rows are on their way all the time
//   finish       | 0 | 1 | 2 ...            encodes while the keys of the tile are multiplied
//   keys             | wgmma 0, records 0 | wgmma 1, records 1
// Floor: 8 KiB an entry of ratio 2, 1 KiB of ratio 1, and 356 bytes out.
#include <cutlass/arch/reg_reconfig.h>

#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/compress/finish_units.cuh"
#include "sm90/compress/key_tiles.cuh"
#include "sm90/compress/pool_units.cuh"

namespace flash_csa::sm90 {
namespace {

// Takes or gives registers; whole warpgroups call.
template <int kRegisters, int kLaunched>
__device__ __forceinline__ void set_registers() {
    if constexpr (kRegisters > kLaunched)
        cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    else
        cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

template <int kRatio>
__global__ void __launch_bounds__(kThreads<kRatio>, 1) prefill_kernel(CompressParams p) {
    using R = Roles<kRatio>;
    extern __shared__ __align__(1024) uint8_t dynamic[];
    auto& shared = *reinterpret_cast<Shared<kRatio>*>(dynamic);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    p.ratio = kRatio;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    allow_dependents();
    if (warp < R::kFeedWarps) prefetch_first_rows<kRatio>(p, warp, lane);
    if (warp == R::kFeedWarps) prefetch_first_lists<kRatio>(p, lane);
    wait_for_previous();
    if (warp < R::kFeedWarps) {
        set_registers<R::kFeedRegisters, R::kLaunchRegisters>();
        if constexpr (kRatio == 2)
            pool_units(p, shared, warp, lane);
        else if (threadIdx.x == 0)
            copy_units(p, shared);
        else if (warp > 0 && warp <= kTile / 32)
            write_tables(p, shared, static_cast<int>(threadIdx.x) - 32);
    } else if (warp < R::kFeedWarps + R::kFinishWarps) {
        set_registers<R::kFinishRegisters, R::kLaunchRegisters>();
        finish_units<kRatio>(p, shared, warp - R::kFeedWarps, lane);
    } else {
        set_registers<R::kKeyRegisters, R::kLaunchRegisters>();
        key_tiles<kRatio>(p, shared, warp - R::kFeedWarps - R::kFinishWarps, lane);
    }
}

template <int kRatio>
cudaError_t launch_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int tiles = (p.batch.rows + kTile * kRatio - 1) / (kTile * kRatio);
    const dim3 grid(static_cast<unsigned>(tiles < num_sms ? tiles : num_sms));
    return launch_after(prefill_kernel<kRatio>, grid, kThreads<kRatio>, sizeof(Shared<kRatio>),
                        stream, p);
}

}  // namespace

cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    return p.ratio == 1 ? launch_prefill<1>(p, num_sms, stream)
                        : launch_prefill<2>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
