// What attend keeps of a tile of 64 records and 64 heads, whichever unit multiplies.
#pragma once

#include <cstdint>

#include "core/numerics.h"
#include "core/records.h"

namespace flash_csa::cpu {

constexpr int kSide = 64;  // dims of a panel, records of a tile, heads of a task: all squares
constexpr int kSquare = kSide * kSide;
constexpr int kPanels = kHeadDim / kSide;
constexpr int kLanes = 16;  // one AVX-512 register, two of AVX2
constexpr int kChain = 16;  // terms of one FMA chain
constexpr int kTerms = 2 * kChain;

// Dims lie in the order of dim_at.
struct alignas(64) TileState {
    float out[kPanels][kSquare];  // [head][dim]
    float logits[kSquare];        // [record][head], then probabilities
    float max[kSide];             // per head
    float sum[kSide];
    float keep[kSide];  // weight of the earlier tiles
};

// Dim at a place of the scratch order: of each 128 dims, the first of every 8, then the second, and
// so on. In this order lane l decodes its 8 dims from one (little-endian) word of FP4, or two of
// FP8, by shifts alone.
constexpr int dim_at(int place) { return place / 128 * 128 + place % 16 * 8 + place % 128 / 16; }

// A probability in BF16, as bits; 0 below 2^-64. Matrix units take subnormals for 0: neither they
// nor sums of them may come up, if every processor is to give the same bits.
FCSA_HD uint32_t probability_bf16(float p) { return p < 0x1p-64f ? 0u : uint32_t{f32_to_bf16(p)}; }

}  // namespace flash_csa::cpu
