// Parts of few_rows.cu with 32 and 64 heads: 64 heads of a row.
//
// Heads are on M of both products, so that a quad of lanes has the logits of a head: one warpgroup
// multiplies and finds the weights in its registers while the others dequantise the next tile.
#pragma once

#include "sm90/attend/two_tiles_share.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

struct Wide : Sharing<64> {
    // A maximum may lag behind by this much (log2), so that hardly anything is ever rescaled.
    static constexpr float kSlack = 8.f;
    static constexpr int kRecordsRead = 1;  // barrier of the warpgroups that dequantise

    // Of heads head() and head() + 8. Output: of 8 neighbouring dims j in paired order, places
    // 2 (lane % 4) and the next are 4 j and 4 j + 1 of the first head, 4 j + 2 and 4 j + 3 of the
    // other. sum: of the lane's records.
    float out[64];
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};

    using Sharing::Sharing;

    __device__ int head() const { return 16 * (warp % 4) + lane / 4; }

    // d: of head() and of 8 neighbouring records j, those from 2 (lane % 4) on, as in `out`.
    __device__ __forceinline__ void multiply_logits(int32_t tile, float (&d)[32]) const {
        const uint64_t q = k_major(shared.q), kv = k_major(kv_of(tile));
        fence_registers(d);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k)
            multiply_64x64(advance(q, k / 4 * int{sizeof shared.q[0]} + k % 4 * 32),
                           advance(kv, k / 4 * kPanelBytes + k % 4 * 32), d, k > 0);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_registers(d);
    }

    // Logits into weights; true where those of earlier tiles shrink.
    __device__ __forceinline__ bool softmax(int32_t tile, float (&x)[32]) {
        const float scale = p.softmax_scale * (kTileFactor * kLog2e);
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] *= scale;
        const uint2 there = *reinterpret_cast<const uint2*>(shared.present[tile & 3]);
        if ((there.x & there.y) != ~0u) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const uint32_t eight = (i < 16 ? there.x : there.y) >> lane % 4 * 2;
                if ((eight >> (i / 4 % 4 * 8 + i % 2) & 1) == 0) x[i] = -INFINITY;
            }
        }
        bool shrinks = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = x[2 * half];
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i / 2 % 2 == half) largest = fmaxf(largest, x[i]);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // The maximum passes over a NaN logit; its weight does not, and is seen in the output.
            const float before = max[half];
            if (largest > before + kSlack) max[half] = largest;
            const float base = max[half] == -INFINITY ? 0.f : max[half];
            const float keep = exp2_approx(before - base);
            shrinks |= keep != 1.f;
            if (lane % 4 == 0) shared.keep[head() + 8 * half] = keep;
            sum[half] *= keep;
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i / 2 % 2 == half) x[i] = exp2_approx(x[i] - base);
        }
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            sum[0] += x[i] + x[i + 1];
            sum[1] += x[i + 2] + x[i + 3];
        }
        return shrinks;
    }

    __device__ __forceinline__ void store_weights(const float (&x)[32]) const {
        const int lane = fresh(this->lane), first = 16 * warp + lane / 4;
        uint8_t* to = shared.p[0] + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < 32; i += 2)
            *reinterpret_cast<uint32_t*>(to + panel_offset(first + i / 2 % 2 * 8, i / 4)) =
                pack_bf16(x[i], x[i + 1]);
    }

    __device__ __forceinline__ void rescale(const float (&factors)[64]) {
        const float factor[2] = {factors[head()], factors[head() + 8]};
#pragma unroll
        for (int i = 0; i < 64; ++i) out[i] *= factor[i / 2 % 2];
    }

    __device__ __forceinline__ void start_values(int32_t tile) {
        // In a cluster the upper bits of an address name the CTA, and not how far panels are apart.
        const uint64_t kv =
            (mn_major(kv_of(tile)[kGroupPanels * group], 0) & ~uint64_t{0xffffc000}) |
            uint64_t{kPanelBytes >> 4} << 16;
        const uint64_t weights = k_major(shared.p);
        fence_registers(out);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k)
            multiply_64x128(advance(weights, 32 * k), advance(kv, 16 * k * kPanelRowBytes), out,
                            tile > 0 || k > 0);
        cute::warpgroup_commit_batch();
    }

    // All tiles are in. Two lanes have a head each.
    __device__ __forceinline__ void tell_all() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
        }
        const bool second = lane & 2;
        tell(lane % 2, 2, head() + 8 * second, second ? max[1] : max[0], second ? sum[1] : sum[0]);
    }
    __device__ __forceinline__ void find_factors() {
        const int lane = fresh(this->lane);
        const bool second = lane & 2;
        find_factor<2>(16 * warp + lane / 4 + 8 * second, second ? max[1] : max[0]);
    }

    __device__ __forceinline__ void run(const Query<64>& query) {
        make_first(query);
#pragma unroll
        for (float& x : out) x = 0.f;  // not before: the query has the registers
#pragma unroll 1
        for (int32_t tile = 0; tile < end; ++tile) {
            bool shrinks = false;
            const bool last = tile + 1 == end;
            float x[32];
            if (group == 0) {
                multiply_logits(tile, x);
                wait_for_values(tile - 1);  // which read the weights before
                shrinks = softmax(tile, x);
            } else if (!last) {
                make_next(tile + 1);
                cutlass::arch::NamedBarrier::sync(kThreads - kWarpgroup, kRecordsRead);
                if (tile + 2 < end) start_tile(tile + 2, next_slot);
            }
            // Records of the window lie where the weights come to.
            if (!last && in_window(tile + 1)) __syncthreads();
            if (group == 0) {
                store_weights(x);
                cutlass::arch::fence_view_async_shared();
                if (last) tell_all();  // behind the fence, which would wait
            }
            if (__syncthreads_or(shrinks) && tile > 0) rescale(shared.keep);
            if (last) cluster_arrive_relaxed();  // what peers send may come
            start_values(tile);
            if (tile + 3 < end) next_slot = load_slot(slot_of(tile + 3));
            if (last && group == 0) find_factors();
            cute::warpgroup_wait<0>();
            fence_registers(out);
            if (!last) shared.added.arrive();
        }
    }

    __device__ __forceinline__ void finish(const float* cos_sin) {
        __syncthreads();  // nothing reads the tiles any more, and factors are there
        cluster_wait();
        rescale(shared.levels[piece]);
        share(*this, cos_sin);
    }

    // Unit i: 16 heads and 32 dims, of which a vector has eight.
    __device__ float* values(int i, int vector) { return out + 16 * i + 4 * vector; }

    // To rows of eight dims, four for each head.
    __device__ void round(int i, uint8_t* to) {
        to += lane / 4 * 64 + lane % 4 * 4;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const float* x = values(i, v);
            *reinterpret_cast<uint32_t*>(to + 16 * v) = pack_bf16(x[0], x[1]);
            *reinterpret_cast<uint32_t*>(to + 16 * v + 512) = pack_bf16(x[2], x[3]);
        }
    }
    __device__ void locate(int i, int item, int& head, int& eight) const {
        head = 16 * (warp % 4) + item / 4;
        eight = group * 16 + i * 4 + item % 4;
    }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
