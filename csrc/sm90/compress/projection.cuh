// The key projection, keys = latents * weight^T, in the one order of this back end: each key is the
// sum of two chains of mma.m16n8k16 from zero, one over the even blocks of 16 channels in ascending
// order, one over the odd ones (two, as a chain's latency is that of a decode step). Rows of the
// instruction are entries, columns keys; no sum depends on its neighbours.
//
// Both operands are rows of BF16 in shared memory, padded so that ldmatrix meets no bank twice.
// Lane 4g + t gets keys 2t and 2t + 1 of its tile for entries g (values 0, 1) and g + 8 (2, 3).
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "core/numerics.h"
#include "core/params.h"
#include "sm90/common/mma.h"

namespace flash_csa::sm90 {

inline constexpr int kMmaChannels = 16;
inline constexpr int kMmaBlocks = kHeadDim / kMmaChannels;
inline constexpr int kMmaChains = 2;  // block b is one of chain b % 2
inline constexpr int kTileKeys = 16;  // two columns' worth: one ldmatrix
inline constexpr int kKeyTiles = kIndexDim / kTileKeys;
inline constexpr int kLatentStride = kHeadDim + 8;  // BF16: rows start 4 banks apart

// The weight in shared memory, copied while the first entries are pooled.
struct KeyWeight {
    alignas(128) uint16_t rows[kIndexDim][kLatentStride];
    alignas(8) uint64_t filled;

    // One thread; the block synchronises before anything else.
    __device__ __forceinline__ void init() {
        cutlass::arch::ClusterTransactionBarrier::init(&filled, 1);
        cutlass::arch::fence_barrier_init();
    }
    // All threads. One lane of a warp issues all its copies: lanes would do so in a loop of 70
    // cycles each. No block ends before it has waited.
    template <int kThreads>
    __device__ __forceinline__ void fill(const CompressParams& p) {
        constexpr int kKeys = kIndexDim / (kThreads / 32);
        const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
        if (warp == 0 && cute::elect_one_sync()) {
            cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(
                &filled, kIndexDim * kHeadDim * sizeof(uint16_t));
        }
        if (!cute::elect_one_sync()) return;
        const uint16_t* from = p.key_weight.row(warp * kKeys);
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            cute::SM90_BULK_COPY_G2S::copy(from + i * p.key_weight.stride, &filled,
                                           rows[warp * kKeys + i], kHeadDim * sizeof(uint16_t));
        }
    }
    __device__ __forceinline__ void wait() const {
        cutlass::arch::ClusterTransactionBarrier::wait(&filled, 0);
    }
};

using KeySums = float[2][kMmaChains][4];  // of two columns of 8 keys

// Where a lane points ldmatrix: at its row and 8 channels of block 0.
__device__ __forceinline__ const uint16_t* latent_row(const uint16_t* latents, int entries,
                                                      int lane) {
    return latents + lane % entries * kLatentStride + lane / 16 * 8;
}
__device__ __forceinline__ const uint16_t* weight_row(const KeyWeight& weight, int tile, int lane) {
    return weight.rows[tile * kTileKeys + lane / 16 * 8 + lane % 8] + lane / 8 % 2 * 8;
}

// Adds block b of a tile of keys. latents: operand of load_matrices.
__device__ __forceinline__ void add_block(KeySums& sums, const uint32_t (&latents)[4],
                                          const uint16_t* weights, int b) {
    uint32_t w[4];
    load_matrices(weights + b * kMmaChannels, w);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float (&acc)[4] = sums[n][b % kMmaChains];
        cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(acc[0], acc[1], acc[2], acc[3], latents[0],
                                                  latents[1], latents[2], latents[3], w[2 * n],
                                                  w[2 * n + 1], acc[0], acc[1], acc[2], acc[3]);
    }
}

// Value i of column n, before it is rounded to BF16.
__device__ __forceinline__ float key_sum(const KeySums& sums, int n, int i) {
    return add_rn(sums[n][0][i], sums[n][1][i]);
}

}  // namespace flash_csa::sm90
