// Entries of a call: projected kv and gate to main and index records.
//
//   in   kv, gate, tail, batch, slots, weights      out  main and index pages, latent_out
//
// A warp owns `ratio` consecutive rows, which close about one entry. Block after block of entries,
// one a warp:
//   warps    pool -> BF16 -> norm -> latent (shared) -> RoPE -> main record
//   block    key projection: a thread per channel, latents broadcast from shared memory
//   warps    key norm -> RoPE -> Hadamard -> index record
// The projection adds in the CPU's order (8 strided lanes, then halving), so that even its bits
// are equal. Floor: 8 bytes a channel and token read, a record written; the weight comes from L2.
#include "sm90/common/launch.h"
#include "sm90/compress/compress.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kAccumulators = 8;  // strided partial sums of the projection, as on the CPU
constexpr int kEach = kWarps * kIndexDim / kThreads;  // entries whose channel a thread projects

template <int kDim>
struct Shared {
    alignas(16) uint16_t latent[kWarps][kDim];
    float key[kWarps][kIndexDim];
    alignas(16) uint16_t key_row[kWarps][kIndexDim];
};

// The warp's next closing row at or after `row`, `end` if there is none.
__device__ int64_t next_closing(const CompressParams& p, int64_t row, int64_t end, int lane,
                                Entry* entry) {
    for (; row < end; row += 32) {
        Entry own;
        const bool closes = row + lane < end && closes_entry(p, row + lane, &own);
        const uint32_t mask = __ballot_sync(kAllLanes, closes);
        if (mask == 0) continue;
        const int64_t found = row + __ffs(static_cast<int>(mask)) - 1;
        closes_entry(p, found, entry);
        return found;
    }
    return end;
}

template <int kDim>
__device__ void project_keys(const CompressParams& p, Shared<kDim>& shared) {
    const int channel = threadIdx.x % kIndexDim;
    const int first = threadIdx.x / kIndexDim * kEach;
    const uint16_t* weight = p.key_weight.row(channel);
    float acc[kEach][kAccumulators] = {};
    for (int k = 0; k < kDim; k += kAccumulators) {
        alignas(16) uint16_t w[kAccumulators];
        copy_bytes<2 * kAccumulators>(weight + k, w);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            alignas(16) uint16_t x[kAccumulators];
            copy_bytes<2 * kAccumulators>(&shared.latent[first + e][k], x);
#pragma unroll
            for (int l = 0; l < kAccumulators; ++l)
                acc[e][l] = fma_rn(bf16_to_f32(x[l]), bf16_to_f32(w[l]), acc[e][l]);
        }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
        for (int l = 0; l < 4; ++l) acc[e][l] = add_rn(acc[e][l], acc[e][l + 4]);
        const float even = add_rn(acc[e][0], acc[e][2]), odd = add_rn(acc[e][1], acc[e][3]);
        shared.key[first + e][channel] = round_bf16(add_rn(even, odd));
    }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) entries_kernel(CompressParams p) {
    __shared__ Shared<kDim> shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t row = (int64_t{blockIdx.x} * kWarps + warp) * p.ratio;
    const int64_t end = row + p.ratio < p.batch.rows ? row + p.ratio : p.batch.rows;
    for (;;) {
        Entry e;
        row = next_closing(p, row, end, lane, &e);
        const bool active = row < end;
        if (!__syncthreads_or(active)) return;
        if (active) make_latent<kDim>(p, e, lane, shared.latent[warp]);
        const bool keyed = active && stores_key(p, e);
        if constexpr (kDim == kHeadDim) {
            if (active) store_main(p, e, lane, shared.latent[warp]);
            if (__syncthreads_or(keyed)) {
                project_keys<kDim>(p, shared);
                __syncthreads();
            }
            if (keyed) {
                float key[kIndexDim / 32];
#pragma unroll
                for (int i = 0; i < kIndexDim / 32; ++i) key[i] = shared.key[warp][lane + 32 * i];
                norm_row<kIndexDim>(key, p.key_norm_weight, p.eps, lane, shared.key_row[warp]);
                store_key(p, e, lane, shared.key_row[warp]);
            }
        } else if (keyed) {  // V4's index compressor: the latent is the key
            store_key(p, e, lane, shared.latent[warp]);
        }
        row += active;
    }
}

}  // namespace

cudaError_t compress_entries(const CompressParams& p, cudaStream_t stream) {
    const dim3 grid = blocks_for(p.batch.rows, int64_t{kWarps} * p.ratio);
    if (p.dim == kIndexDim) return launch(entries_kernel<kIndexDim>, grid, kThreads, 0, stream, p);
    return launch(entries_kernel<kHeadDim>, grid, kThreads, 0, stream, p);
}

}  // namespace flash_csa::sm90
