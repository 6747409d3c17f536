// The key warps of prefill.cu and tokens.cu, a warpgroup: 64 latents to index records.
//
// keys [64, 128] = latents [64, 512] . weight^T, 64 keys at a time: chains over the even and the
// odd blocks of 16 channels, as in projection.cuh, whose sums these products have bit by bit. Lane
// 4g + t of warp w gets, of entries 16w + g and 16w + g + 8, channels 8j + 2t and 8j + 2t + 1 of
// each block j of 8: a class of the sum of squares belongs to one lane, a pair of RoPE as well, and
// a group of index FP4 is 4 lanes. tokens.cu takes the first of the two alone.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/fp4_words.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/compress/places.cuh"
#include "sm90/compress/tile.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {

inline constexpr int kKeyBlocks = kIndexDim / 8;  // blocks of 8 keys
inline constexpr int kKeyColumns = 64;            // of a product
inline constexpr int kKeyBarrier = 1;             // of the key warps

// The weight from key `first` to shared memory, as many keys as there is room for, by kThreads
// threads: each has one chunk of every kStep-th, so that the swizzle repeats.
template <int kThreads, class Shared>
__device__ __forceinline__ void load_weight(const CompressParams& p, Shared& shared, int first,
                                            int thread) {
    constexpr int kChunks = kHeadDim / 8, kStep = kThreads / kChunks;
    const int chunk = thread % kChunks, key = thread / kChunks;
    uint8_t* to = shared.weight[chunk / 8];
    const uint16_t* from = p.key_weight.row(first + key) + 8 * chunk;
    for (int k = 0; k < Shared::kWeightKeys; k += kCoreRows) {
#pragma unroll
        for (int i = 0; i < kCoreRows; i += kStep) {
            copy_16_async(to + panel_offset(key + i, chunk % 8), from, true);
            from += kStep * p.key_weight.stride;
        }
        to += kCoreRows * kPanelRowBytes;
    }
}
// It is there, from all kThreads threads.
template <int kThreads>
__device__ __forceinline__ void wait_for_weight() {
    wait_for_copies();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kThreads, kKeyBarrier);
}

// keys[j][r]: channels 8j + 2t, 8j + 2t + 1 of entry g + 8r, as BF16.
template <int kRows>
using Keys = uint32_t[kKeyBlocks][kRows];

// kKeyColumns keys at a time, with as many registers of sums; ready and done stand around each
// product.
template <class Shared, class Ready, class Done>
__device__ __forceinline__ void project_tile(const Shared& shared, Keys<2>& keys,
                                             const Ready& ready, const Done& done) {
    constexpr int kColumnBlocks = kKeyColumns / 8, kHeld = Shared::kWeightKeys;
    const uint64_t latents = k_major(shared.latents);
    // Rolled: ptxas of CUDA 13.0 took the products of a second half for those of the first.
#pragma unroll 1
    for (int first = 0; first < kIndexDim; first += kKeyColumns) {
        const uint64_t weight = k_major(shared.weight[0] + first % kHeld * kPanelRowBytes);
        float sums[2][kKeyColumns / 2];
        ready(first);
        fence_registers(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int b = 0; b < kHeadDim / 16; ++b) {
            const uint64_t a = advance(latents, b / 4 * kTile * kPanelRowBytes + b % 4 * 32);
            const uint64_t w = advance(weight, b / 4 * kHeld * kPanelRowBytes + b % 4 * 32);
            multiply_64x64(a, w, sums[b % 2], b >= 2);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_registers(sums);
        done(first);
#pragma unroll
        for (int j = 0; j < kKeyBlocks; ++j) {
            const int own = 4 * (j - (kKeyBlocks - kColumnBlocks));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own + 2 * r;
                keys[j][r] = own < 0 ? keys[(j + kColumnBlocks) % kKeyBlocks][r]
                                     : pack_bf16(add_rn(sums[0][i], sums[1][i]),
                                                 add_rn(sums[0][i + 1], sums[1][i + 1]));
            }
        }
    }
}

// Factor of the norm of entry g + 8r; all four lanes get it.
template <int kRows>
__device__ __forceinline__ float key_factor(const Keys<kRows>& keys, int r, float eps) {
    float chain[4][2] = {};  // classes 8i + 2t + x
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) {
        const float low = low_bf16(keys[j][r]), high = high_bf16(keys[j][r]);
        chain[j % 4][0] = fma_rn(low, low, chain[j % 4][0]);
        chain[j % 4][1] = fma_rn(high, high, chain[j % 4][1]);
    }
    float sum[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        sum[x] = add_rn(add_rn(chain[0][x], chain[2][x]), add_rn(chain[1][x], chain[3][x]));
        sum[x] = add_rn(sum[x], __shfl_xor_sync(kAllLanes, sum[x], 2));
        sum[x] = add_rn(sum[x], __shfl_xor_sync(kAllLanes, sum[x], 1));
    }
    return rsqrt_ieee(add_rn(mul_rn(add_rn(sum[0], sum[1]), 1.0f / kIndexDim), eps));
}

// Norm and RoPE.
template <int kRows>
__device__ __forceinline__ void turn_keys(const CompressParams& p, const float* weight,
                                          const Item (&items)[kRows], int t, Keys<kRows>& keys) {
    const float* tables[kRows];
    float factors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        tables[r] = fresh(p.cos_sin.at(items[r].rotation) + t);
        factors[r] = key_factor<kRows>(keys, r, p.eps);
    }
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(weight + 8 * j + 2 * t);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            uint32_t& pair = keys[j][r];
            pair = pack_bf16(mul_rn(mul_rn(low_bf16(pair), factors[r]), w.x),
                             mul_rn(mul_rn(high_bf16(pair), factors[r]), w.y));
            if (j < kKeyBlocks - kRopeDims / 8) continue;
            const float* table = tables[r] + 4 * (j - (kKeyBlocks - kRopeDims / 8));
            float a, b;
            rope_pair(low_bf16(pair), high_bf16(pair), __ldg(table), __ldg(table + kRopeDims / 2),
                      &a, &b);
            pair = pack_bf16(a, b);
        }
    }
}

// Bytes i of four words, in the order of the words, to word i.
__device__ __forceinline__ uint4 transpose_bytes(const uint32_t (&w)[4]) {
    const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
    const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362),
                   high23 = __byte_perm(w[2], w[3], 0x7362);
    return make_uint4(__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                      __byte_perm(high01, high23, 0x5410), __byte_perm(high01, high23, 0x7632));
}

// Records of the entries.
template <int kRows>
__device__ __forceinline__ void store_keys(const RecordPlaces& p, const Keys<kRows>& keys,
                                           const Item (&places)[kRows], int t) {
    constexpr int kGroups = kIndexDim / record(RecordId::IndexFp4).group;
    uint32_t codes[kRows][kGroups], scales[kRows] = {};
    const auto group = [&](int g, int r) {
        return make_uint4(keys[4 * g][r], keys[4 * g + 1][r], keys[4 * g + 2][r],
                          keys[4 * g + 3][r]);
    };
    // Two groups at a time.
#pragma unroll
    for (int i = 0; i < kGroups * kRows; i += 2) {
        const Magnitudes magnitudes[2] = {Magnitudes(group(i / kRows, i % kRows)),
                                          Magnitudes(group((i + 1) / kRows, (i + 1) % kRows))};
        const uint32_t first = magnitudes[0].largest(), second = magnitudes[1].largest();
        uint32_t largest =
            __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
        largest = __vmaxu2(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = __vmaxu2(largest, __shfl_xor_sync(kAllLanes, largest, 2));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int g = (i + n) / kRows, r = (i + n) % kRows;
            const uint32_t byte = index_scale_byte(n == 0 ? largest & 0xffffu : largest >> 16);
            const PowerReciprocal reciprocal(ue8m0_reciprocal(static_cast<uint8_t>(byte)));
            const uint32_t own = word_row_codes(magnitudes[n], group(g, r), reciprocal);
            codes[r][g] = byte == kNanUE8M0 ? 0 : own;
            scales[r] |= byte << 8 * g;
        }
    }
    constexpr Record r = record(RecordId::IndexFp4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        transpose_quad(codes[i], t);  // lane t gets group t of all
        if (!p.index.holds(places[i].slot)) continue;
        *reinterpret_cast<uint4*>(p.index.row(r, places[i].slot) + 16 * t) =
            transpose_bytes(codes[i]);
        if (t == 0) *reinterpret_cast<uint32_t*>(p.index.scales(r, places[i].slot)) = scales[i];
    }
}

}  // namespace flash_csa::sm90
