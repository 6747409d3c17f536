// Part of many_heads.cu: the softmax of a tile, which is in the scores' chain from its products to
// its weights.
#pragma once

#include <cmath>
#include <cstdint>

#include "sm90/attend/lag.cuh"
#include "sm90/common/exp2.cuh"

namespace flash_csa::sm90::many_heads {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Online softmax of two heads per lane. Logits are in units of log 2.
struct Softmax {
    float max[2] = {-INFINITY, -INFINITY};    // about the largest logit
    float sum[2] = {0.f, 0.f};                // of this lane's records
    float limit[2] = {-INFINITY, -INFINITY};  // what a logit has to exceed to be the maximum
    float base[2] = {0.f, 0.f};               // the maximum, if there is one

    // Those that are not present. A lane has two columns of each eight.
    static __device__ __forceinline__ void drop_absent(float (&s)[32], uint64_t present) {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (!(present >> (i / 4 * 8 + column + i % 2) & 1)) s[i] = -INFINITY;
    }

    // s: products with the tile. Finds the lane's largest logits, and whether one of the warp's
    // exceeds its limit: where none does, no shuffle stands before the exponentials.
    __device__ __forceinline__ bool exceeds(const float (&s)[32], float scale,
                                            float (&largest)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most[4];  // short chains
#pragma unroll
            for (int j = 0; j < 4; ++j)
                most[j] = fmaxf(fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]),
                                fmaxf(s[4 * j + 16 + 2 * h], s[4 * j + 17 + 2 * h]));
            largest[h] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) * scale;
        }
        return __any_sync(~0u, largest[0] > limit[0] || largest[1] > limit[1]);
    }

    // The maxima of lanes that share a head; before: those of earlier tiles. True where none of the
    // warp's that there were before has moved.
    __device__ __forceinline__ bool raise(const float (&largest)[2], float (&before)[2]) {
        bool stands = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x = largest[h];
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
            before[h] = max[h];
            if (x > limit[h]) {
                max[h] = x;
                stands &= before[h] == -INFINITY;
            }
            base[h] = max[h] == -INFINITY ? 0.f : max[h];
        }
        return __all_sync(~0u, stands);
    }

    // The weight of earlier tiles.
    __device__ __forceinline__ void shrink(const float (&before)[2], float (&keep)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            keep[h] = exp2_approx(before[h] - base[h]);
            sum[h] *= keep[h];
        }
    }

    // For the next tile, of what is weighed so far: beside the second half's exponentials, as under
    // q . k no shuffle gets through.
    __device__ __forceinline__ void find_limits() {
#pragma unroll
        for (int h = 0; h < 2; ++h) limit[h] = max[h] + slack_of_quad(sum[h]);
    }

    // Probabilities of one half of the tile's records, in place.
    __device__ __forceinline__ void weigh(float (&s)[32], float scale, int half) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total[2];
#pragma unroll
            for (int j = 4 * half; j < 4 * half + 4; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[4 * j + 2 * h + i];
                    x = exp2_approx(fmaf(x, scale, -base[h]));
                    total[i] = j > 4 * half ? total[i] + x : x;
                }
            }
            sum[h] += total[0] + total[1];
        }
    }
};

}  // namespace flash_csa::sm90::many_heads
