// The key warps of prefill.cu, a warpgroup: 64 latents to index records.
//
// keys [64, 128] = latents [64, 512] . weight^T, 64 keys at a time: chains over the even and the
// odd blocks of 16 channels, as in projection.cuh, whose sums these products have bit by bit. Lane
// 4g + t of warp w gets, of entries 16w + g and 16w + g + 8, channels 8j + 2t and 8j + 2t + 1 of
// each block j of 8: a class of the sum of squares belongs to one lane, a pair of RoPE as well, and
// a group of index FP4 is 4 lanes.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/fp4_words.cuh"
#include "sm90/common/fresh.cuh"
#include "sm90/compress/look_up.cuh"
#include "sm90/compress/tile.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {

inline constexpr int kKeyBlocks = kIndexDim / 8;  // blocks of 8 keys
inline constexpr int kKeyColumns = 64;            // of a product

// The weight from key `first` to shared memory, as many keys as there is room for: a thread has one
// chunk of every kStep-th, so that the swizzle repeats.
template <class Shared>
__device__ __forceinline__ void load_weight(const CompressParams& p, Shared& shared, int first,
                                            int thread) {
    constexpr int kChunks = kHeadDim / 8, kStep = kKeyThreads / kChunks;
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
// It is there, from all threads.
__device__ __forceinline__ void wait_for_weight() {
    wait_for_copies();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kKeyThreads, kKeyBarrier);
}

// keys[j][r]: channels 8j + 2t, 8j + 2t + 1 of entry g + 8r, as BF16.
using Keys = uint32_t[kKeyBlocks][2];

// kKeyColumns keys at a time, with as many registers of sums; ready and done stand around each
// product.
template <class Shared, class Ready, class Done>
__device__ __forceinline__ void project_tile(const Shared& shared, Keys& keys, const Ready& ready,
                                             const Done& done) {
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
__device__ __forceinline__ float key_factor(const Keys& keys, int r, float eps) {
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
__device__ __forceinline__ void turn_keys(const CompressParams& p, const float* weight,
                                          const Item (&places)[2], int t, Keys& keys) {
    const float* const tables[2] = {fresh(p.cos_sin.at(places[0].rotation) + t),
                                    fresh(p.cos_sin.at(places[1].rotation) + t)};
    const float factors[2] = {key_factor(keys, 0, p.eps), key_factor(keys, 1, p.eps)};
#pragma unroll
    for (int j = 0; j < kKeyBlocks; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(weight + 8 * j + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
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

// Records of the two entries.
__device__ __forceinline__ void store_keys(const CompressParams& p, const Keys& keys,
                                           const Item (&places)[2], int t) {
    constexpr int kGroups = kIndexDim / record(RecordId::IndexFp4).group;
    uint32_t codes[2][kGroups], scales[2] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const auto words = [&](int r) {
            return make_uint4(keys[4 * g][r], keys[4 * g + 1][r], keys[4 * g + 2][r],
                              keys[4 * g + 3][r]);
        };
        const Magnitudes magnitudes[2] = {Magnitudes(words(0)), Magnitudes(words(1))};
        const uint32_t first = magnitudes[0].largest(), second = magnitudes[1].largest();
        uint32_t largest =
            __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
        largest = __vmaxu2(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = __vmaxu2(largest, __shfl_xor_sync(kAllLanes, largest, 2));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t byte = index_scale_byte(r == 0 ? largest & 0xffffu : largest >> 16);
            const PowerReciprocal reciprocal(ue8m0_reciprocal(static_cast<uint8_t>(byte)));
            const uint32_t own = word_row_codes(magnitudes[r], words(r), reciprocal);
            codes[r][g] = byte == kNanUE8M0 ? 0 : own;
            scales[r] |= byte << 8 * g;
        }
    }
    constexpr Record r = record(RecordId::IndexFp4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        transpose_quad(codes[i], t);  // lane t gets group t of all
        if (!p.index.holds(places[i].slot)) continue;
        *reinterpret_cast<uint4*>(p.index.row(r, places[i].slot) + 16 * t) =
            transpose_bytes(codes[i]);
        if (t == 0) *reinterpret_cast<uint32_t*>(p.index.scales(r, places[i].slot)) = scales[i];
    }
}

template <int kRatio>
__device__ __forceinline__ void key_tiles(const CompressParams& p, Shared<kRatio>& shared, int warp,
                                          int lane) {
    constexpr bool kHalves = Shared<kRatio>::kWeightKeys < kIndexDim;
    const int thread = 32 * warp + lane;
    const bool keyed = static_cast<bool>(p.key_weight);
    if (keyed) {
        load_weight(p, shared, 0, thread);
        if (thread < kIndexDim) shared.key_norm_weight[thread] = p.key_norm_weight[thread];
        if (!kHalves) wait_for_weight();
    }
    RowTables tables;
    for (uint32_t tile = 0;; ++tile) {
        if constexpr (kRatio > 1) {
#pragma unroll 1
            while (tables.number < tile + kTables && tables.more)
                tables.write(p, shared, fresh(thread));
        }
        if (!has_table(shared, tile)) break;
        const Item* items = shared.tables[tile % kTables] + 16 * warp + lane / 4;
        const Item places[2] = {items[0], items[8]};
        Keys keys = {};
        if (keyed) {
            const auto ready = [&](int first) {
                if (kHalves) wait_for_weight();
                if (first == 0) wait_full(shared.tile_full, tile);
            };
            const auto done = [&](int first) {
                if (first + kKeyColumns == kIndexDim) shared.tile_empty.arrive();
                if (!kHalves) return;
                cutlass::arch::NamedBarrier::sync(kKeyThreads, kKeyBarrier);
                load_weight(p, shared, kIndexDim / 2 - first, fresh(thread));
            };
            project_tile(shared, keys, ready, done);
        } else {
            wait_full(shared.tile_full, tile);
            shared.tile_empty.arrive();
        }
        if (kRatio == 1) shared.table_empty[tile % kTables].arrive();
        const bool any = p.index.holds(places[0].slot) || p.index.holds(places[1].slot);
        if (!keyed || !__any_sync(kAllLanes, any)) continue;
        turn_keys(p, shared.key_norm_weight, places, lane % 4, keys);
        store_keys(p, keys, places, lane % 4);
    }
    wait_for_copies();
}

}  // namespace flash_csa::sm90
