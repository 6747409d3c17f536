// The key projection: BF16-valued rows [n, 512] times a BF16 weight [128, 512], in one order.
#pragma once

#include <cstdint>

#include "core/numerics.h"
#include "core/params.h"

namespace flash_csa::cpu {

// Explicit vectors, as accumulators in arrays of float are spilled: 2.4 us a row against 3.6.
constexpr int kLanes = 8;
typedef float LaneFloats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t LaneBits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t LaneHalves __attribute__((vector_size(2 * kLanes)));

constexpr int kProjectRows = 8;  // 16 KiB of rows stay in L1 while the weight streams past

// keys[r][n] for kRows rows and kKeys keys from first_key on. kRows * kKeys = 8 independent chains
// cover the latency of an addition. Lane l adds the products of k = l, l + 8, ... in ascending
// order, then the lanes are halved 8 -> 4 -> 2 -> 1. A product of two BF16 values is exact, so a
// fused form gives the same sums.
template <int kRows, int kKeys>
inline void project_tile(const float (*x)[kHeadDim], const Matrix<const uint16_t>& weight,
                         int first_key, float (*keys)[kIndexDim]) {
    LaneFloats acc[kRows][kKeys] = {};
    for (int k = 0; k < kHeadDim; k += kLanes) {
        LaneFloats w[kKeys];
        for (int n = 0; n < kKeys; ++n) {
            LaneHalves bf16;
            __builtin_memcpy(&bf16, weight.row(first_key + n) + k, sizeof bf16);
            const LaneBits bits = __builtin_convertvector(bf16, LaneBits) << 16;
            __builtin_memcpy(&w[n], &bits, sizeof bits);
        }
        for (int r = 0; r < kRows; ++r) {
            LaneFloats values;
            __builtin_memcpy(&values, &x[r][k], sizeof values);
            for (int n = 0; n < kKeys; ++n) acc[r][n] += values * w[n];
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int n = 0; n < kKeys; ++n) {
            float lanes[kLanes];
            __builtin_memcpy(lanes, &acc[r][n], sizeof lanes);
            for (int width = kLanes / 2; width > 0; width /= 2) {
                for (int l = 0; l < width; ++l) lanes[l] = add_rn(lanes[l], lanes[l + width]);
            }
            keys[r][first_key + n] = lanes[0];
        }
    }
}

// keys[r] for r < count <= kProjectRows. A row's sums do not depend on its neighbours.
inline void project_keys(const float (*x)[kHeadDim], int count,
                         const Matrix<const uint16_t>& weight, float (*keys)[kIndexDim]) {
    if (count == kProjectRows) {
        for (int n = 0; n < kIndexDim; ++n) project_tile<kProjectRows, 1>(x, weight, n, keys);
        return;
    }
    for (int r = 0; r < count; ++r) {
        for (int n = 0; n < kIndexDim; n += 8) project_tile<1, 8>(x + r, weight, n, keys + r);
    }
}

}  // namespace flash_csa::cpu
