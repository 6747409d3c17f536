// Compression of long steps of ratio 1 and 2 to MainFp4 and IndexFp4 records.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// A block of 16 warps works on tiles of 64 entries, in three roles:
//   pool     rows -> pooled entries, BF16, 4 at a time to a slot       4 warps of ratio 1, 8 of 2
//   finish   slot -> norm -> latent to the tile, RoPE -> main record   8 warps of ratio 1, 4 of 2
//   keys     tile -> wgmma -> norm -> RoPE -> index record             4 warps
// Timeline of two tiles:
//   pool     | 0 | 1 | 2 ...                rows are on their way all the time
//   finish       | 0 | 1 | 2 ...            latents stay in registers until the tile is free
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
template <int kRegisters>
__device__ __forceinline__ void set_registers() {
    if constexpr (kRegisters > 128)
        cutlass::arch::warpgroup_reg_alloc<kRegisters>();
    else
        cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

template <int kRatio>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(CompressParams p) {
    using R = Roles<kRatio>;
    extern __shared__ __align__(1024) uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    p.ratio = kRatio;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    allow_dependents();
    if (warp < R::kPoolWarps) prefetch_first_rows<kRatio>(p, warp, lane);
    wait_for_previous();
    if (warp < R::kPoolWarps) {
        set_registers<R::kPoolRegisters>();
        Steps<kRatio> steps(p, shared.closing[warp], warp, lane);
        pool_units(p, steps, shared);
    } else if (warp < kRoleWarps) {
        set_registers<R::kFinishRegisters>();
        finish_units<kRatio>(p, shared, warp - R::kPoolWarps, lane);
    } else {
        set_registers<R::kKeyRegisters>();
        key_tiles<kRatio>(p, shared, warp - kRoleWarps, lane);
    }
}

template <int kRatio>
cudaError_t launch_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int tiles = (p.batch.rows + kTile * kRatio - 1) / (kTile * kRatio);
    const dim3 grid(static_cast<unsigned>(tiles < num_sms ? tiles : num_sms));
    return launch_after(prefill_kernel<kRatio>, grid, kThreads, sizeof(Shared), stream, p);
}

}  // namespace

cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    return p.ratio == 1 ? launch_prefill<1>(p, num_sms, stream)
                        : launch_prefill<2>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
