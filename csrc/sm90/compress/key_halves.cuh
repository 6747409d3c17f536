// The products of tokens.cu: keys^T [128, 32] = weight [128, 512] . latents [32, 512]^T, 64 keys at
// a time, in the two chains of projection.cuh. Keys are rows of the instruction and entries
// columns, so that 32 entries fill it.
//
// Lane 4g + t of warp w gets rows 16w + g and 16w + 8 + g: the weight lies in such an order that
// these are keys 2(8w + g) and the next one, a word of BF16. The words change hands where the
// latents were: lane 4g + t gets, of entry 8w + g, channels 8j + 2t and 8j + 2t + 1 of each j.
#pragma once

#include "sm90/compress/key_tiles.cuh"

namespace flash_csa::sm90 {

inline constexpr int kHalfTile = 32;  // entries

// d [64, 32] (+)= a [64, 16] . b [32, 16]^T, both K-major.
__device__ __forceinline__ void multiply_64x32(uint64_t a, uint64_t b, float (&d)[16],
                                               bool accumulate) {
    using Atom = detail::gmma::MMA_64x32x16_F32BF16BF16_SS<detail::Major::K, detail::Major::K>;
    detail::multiply<Atom>(a, b, d, accumulate, std::make_index_sequence<16>{});
}

// Row of the instruction that a key is.
__device__ __forceinline__ int weight_row(int key) {
    return key / 16 * 16 + key % 2 * 8 + key % 16 / 2;
}

// The whole weight, by kThreads threads.
template <int kThreads>
__device__ __forceinline__ void load_rows(const CompressParams& p,
                                          uint8_t (*weight)[kIndexDim * kPanelRowBytes],
                                          int thread) {
    constexpr int kChunks = kHeadDim / 8, kStep = kThreads / kChunks;
    const int chunk = thread % kChunks;
    uint8_t* panel = weight[chunk / 8];
    for (int key = thread / kChunks; key < kIndexDim; key += kStep)
        copy_16_async(panel + panel_offset(weight_row(key), chunk % 8),
                      p.key_weight.row(key) + 8 * chunk, true);
}

// Entries lie so far apart that neither writing nor reading meets a bank twice.
inline constexpr int kKeyStride = kIndexDim / 2 + 4;  // words
static_assert(kHalfTile * kKeyStride * sizeof(uint32_t) <= kHalfTile * kPanelRowBytes * kPanels);

// `barrier`: of the warpgroup's own. All its threads have read the latents at the end.
__device__ __forceinline__ void project_half(const uint8_t (*weight)[kIndexDim * kPanelRowBytes],
                                             uint8_t (*latents)[kHalfTile * kPanelRowBytes],
                                             uint32_t barrier, int thread, Keys<1>& keys) {
    constexpr int kRows = 64, kBlocks = kHalfTile / 8;
    const uint64_t entries = k_major(latents);
    uint32_t words[2][2 * kBlocks] = {};  // of 64 keys each: entries 8j + 2t, 8j + 2t + 1
    // Rolled: ptxas of CUDA 13.0 took the products of a second half for those of the first.
#pragma unroll 1
    for (int first = 0; first < kIndexDim; first += kRows) {
        const uint64_t rows = k_major(weight[0] + first * kPanelRowBytes);
        float sums[2][4 * kBlocks];
        fence_registers(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int b = 0; b < kHeadDim / 16; ++b) {
            const uint64_t w = advance(rows, b / 4 * kIndexDim * kPanelRowBytes + b % 4 * 32);
            const uint64_t x = advance(entries, b / 4 * kHalfTile * kPanelRowBytes + b % 4 * 32);
            multiply_64x32(w, x, sums[b % 2], b >= 2);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_registers(sums);
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
            const int even = i / 2 * 4 + i % 2, odd = even + 2;
            words[0][i] = words[1][i];
            words[1][i] =
                pack_bf16(add_rn(sums[0][even], sums[1][even]), add_rn(sums[0][odd], sums[1][odd]));
        }
    }
    const int g = thread % 32 / 4, t = thread % 4, pair = thread / 32 * 8 + g;
    uint32_t* scratch = reinterpret_cast<uint32_t*>(latents);
    cutlass::arch::NamedBarrier::sync(kKeyThreads, barrier);  // all warps have multiplied
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        uint32_t* entry = scratch + (i / 2 * 8 + 2 * t + i % 2) * kKeyStride + pair;
        entry[0] = words[0][i];
        entry[kRows / 2] = words[1][i];
    }
    cutlass::arch::NamedBarrier::sync(kKeyThreads, barrier);
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) keys[j][0] = scratch[pair * kKeyStride + 4 * j + t];
}

}  // namespace flash_csa::sm90
