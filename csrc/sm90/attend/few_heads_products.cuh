// Part of few_heads.cu: the first product, and fragments of the second.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "sm90/attend/few_heads.cuh"

namespace flash_csa::sm90::few_heads {

// d [16, 8] += a [16, 16] . b [8, 16]^T.
__device__ __forceinline__ void multiply_step(const FragmentA& a, uint32_t b0, uint32_t b1,
                                              float* d) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0,
                                              b1, d[0], d[1], d[2], d[3]);
}

__device__ __forceinline__ void load_matrices(const uint8_t* from, uint32_t& a, uint32_t& b) {
    cute::SM75_U32x2_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(from), a, b);
}
__device__ __forceinline__ void load_matrices(const uint8_t* from, uint32_t& a, uint32_t& b,
                                              uint32_t& c, uint32_t& d) {
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(from), a, b, c, d);
}

template <int kHeads>
struct Atoms;
#define FCSA_FEW_HEADS_ATOMS(n)                                                               \
    template <>                                                                               \
    struct Atoms<n> {                                                                         \
        using Logits =                                                                        \
            detail::gmma::MMA_64x##n##x16_F32BF16BF16_RS<detail::Major::K, detail::Major::K>; \
    };
FCSA_FEW_HEADS_ATOMS(16)
FCSA_FEW_HEADS_ATOMS(32)
#undef FCSA_FEW_HEADS_ATOMS

// The first product: logits [64 records, heads] += values [64, 16 dims] . q [heads, 16 dims]^T by a
// warpgroup, the query in shared memory.
template <int kHeads>
struct Products {
    using Query = uint8_t[kPanels][kHeads][kPanelRowBytes];
    float logits[kFragment<kHeads>];

    __device__ __forceinline__ void load_query(const Query&, int, int) {}
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& x : logits) x = 0.f;
    }
    // Values are made behind it (Reader::values has a fence for the compiler): the products of two
    // units ago read the registers that they go to.
    __device__ __forceinline__ void before_values() const { cute::warpgroup_wait<1>(); }

    // Unit u of span s of the group's: both halves of its steps.
    __device__ __forceinline__ void multiply(const Query& q, int group, int s, int u,
                                             const FragmentA (&a)[2]) {
        constexpr int kQueryPanel = static_cast<int>(sizeof q[0]);
        const uint64_t of_span = advance(k_major(q), 2 * (kSpans * group + s) * kQueryPanel);
        cute::warpgroup_arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            detail::multiply<typename Atoms<kHeads>::Logits>(
                a[h], advance(of_span, u / 2 * kQueryPanel + 64 * (u % 2) + 32 * h), logits, true,
                std::make_index_sequence<kFragment<kHeads>>{});
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void finish() {
        cute::warpgroup_wait<0>();
        fence_registers(logits);
    }
};

// Of 8 heads by each warp alone, the query in registers: no wgmma of a group takes less than 14
// cycles of the tensor cores, nor reads less than 8 heads from shared memory.
template <>
struct Products<8> {
    using Query = uint8_t[kPanels][8][kPanelRowBytes];
    float logits[4], odd[4];  // sums of even and of odd steps
    uint4 b[kSpans][4];       // fragments of the query, of two steps each

    __device__ __forceinline__ void load_query(const Query& q, int group, int lane) {
#pragma unroll
        for (int s = 0; s < kSpans; ++s)
#pragma unroll
            for (int u = 0; u < 4; ++u)
                load_matrices(q[2 * (kSpans * group + s) + u / 2][0] +
                                  panel_offset(lane % 8, 4 * (u % 2) + lane / 8),
                              b[s][u].x, b[s][u].y, b[s][u].z, b[s][u].w);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[i] = odd[i] = 0.f;
    }
    __device__ __forceinline__ void before_values() const {}
    __device__ __forceinline__ void multiply(const Query&, int, int s, int u,
                                             const FragmentA (&a)[2]) {
        const uint4 of_unit = s == 0 ? b[0][u] : b[1][u];
        multiply_step(a[0], of_unit.x, of_unit.y, logits);
        multiply_step(a[1], of_unit.z, of_unit.w, odd);
    }
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[i] += odd[i];
    }
};

}  // namespace flash_csa::sm90::few_heads
