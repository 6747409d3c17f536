// probe_gather: how fast records at random places come into shared memory.
//
//   in   MainFp4 records u8 [N, bytes], slots i32 [count]          out  nothing
//
// Each warp keeps kStages batches of 32 bulk copies on their way, one record a lane. Nobody reads
// the bytes. This is the ceiling of attend's loads.
#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/records.h"
#include "sm90/common/launch.h"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;   // H200: 3.8 TB/s; 4 warps 3.0, 2 warps 1.7, however much is in flight
constexpr int kStages = 2;  // 144 KiB
constexpr int kBytes = record(RecordId::MainFp4).bytes();

struct alignas(16) Shared {
    uint8_t bytes[kWarps][kStages][32][kBytes];
    cutlass::arch::ClusterTransactionBarrier full[kWarps][kStages];
};

__global__ void __launch_bounds__(32 * kWarps)
    gather_kernel(const uint8_t* records, int64_t num_records, const int32_t* slots,
                  int64_t count) {
    extern __shared__ __align__(16) uint8_t memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    auto& full = shared.full[warp];
    if (lane == 0) {
        for (auto& barrier : full) barrier.init(1);
        cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    const int64_t stride = int64_t{gridDim.x} * kWarps * 32;
    int64_t batch = 0;
    for (int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * 32; first < count;
         first += stride, ++batch) {
        const int stage = batch % kStages;
        const int32_t slot = first + lane < count ? slots[first + lane] : -1;
        const bool present = slot >= 0 && slot < num_records;
        const uint32_t copies = __popc(__ballot_sync(~0u, present));
        if (batch >= kStages) full[stage].wait((batch / kStages - 1) & 1);
        if (lane == 0) full[stage].arrive_and_expect_tx(copies * kBytes);
        __syncwarp();
        if (present) {
            cute::SM90_BULK_COPY_G2S::copy(records + int64_t{slot} * kBytes,
                                           reinterpret_cast<uint64_t*>(&full[stage]),
                                           shared.bytes[warp][stage][lane], kBytes);
        }
    }
    for (int64_t last = batch > kStages ? batch - kStages : 0; last < batch; ++last) {
        full[last % kStages].wait(last / kStages & 1);
    }
}

}  // namespace

cudaError_t probe_gather(const uint8_t* records, int64_t num_records, const int32_t* slots,
                         int64_t count, cudaStream_t stream) {
    int device = 0, sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    return launch(gather_kernel, dim3(sms), 32 * kWarps, sizeof(Shared), stream, records,
                  num_records, slots, count);
}

}  // namespace flash_csa::sm90
