// Parts of few_rows.cu with 32 and 64 heads: 32 heads of a row.
//
// Records are on M of both products, heads on N, so that 32 heads are not padded. One warpgroup
// multiplies while the others dequantise the next tile; all have a quarter of the heads in the
// softmax.
#pragma once

#include <type_traits>

#include "sm90/attend/two_tiles_share.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

// The output of 32 heads, of which a warp has 16 dims of each of two panels.
template <int kHeads, class Rows>
struct NarrowOutput : Sharing<kHeads, Rows> {
    using Base = Sharing<kHeads, Rows>;
    using Base::group, Base::lane, Base::shared, Base::warp;
    static constexpr int kFragment = kHeads / 2;
    // Softmax: lanes of a head.
    static constexpr int kLanes = kThreads / kHeads;
    static constexpr int kRoundedBytes = 4 * Base::kVectors * 32 * sizeof(uint16_t);  // of a unit

    float out[kGroupPanels][kFragment];
    float max = -INFINITY, sum = 0.f;  // of the thread's head; sum: of its records

    using Base::Base;

    __device__ int softmax_head() const { return threadIdx.x / kLanes; }
    __device__ int head_of(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }

    __device__ __forceinline__ void rescale(const float (&factors)[kHeads]) {
#pragma unroll
        for (int c = 0; c < kHeads / 4; ++c) {
            const float factor = factors[head_of(c)];
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m) {
                out[m][c / 2 * 4 + c % 2] *= factor;
                out[m][c / 2 * 4 + c % 2 + 2] *= factor;
            }
        }
    }

    __device__ __forceinline__ void tell_all() {
#pragma unroll
        for (int h = 1; h < kLanes; h *= 2) sum += __shfl_xor_sync(~0u, sum, h);
        this->tell(lane % kLanes, kLanes, softmax_head(), max, sum);
    }

    __device__ __forceinline__ void finish() {
        __syncthreads();  // nothing reads the tiles any more, and factors are there
        cluster_wait();
        rescale(shared.levels[this->piece]);
        // BF16, eight dims of a head behind each other, and from there to memory.
        uint8_t* const rounded = shared.kv[0][0][0] + warp * Base::kUnits * kRoundedBytes;
        uint8_t* to = rounded;
        const auto put = [&](int j, const uint8_t*) {
            round(j, to);
            to += kRoundedBytes;
        };
        const int first = this->share(*this, put, [](int, const uint8_t*) {});
        __syncwarp();
        const uint8_t* eight_dims = rounded + lane * sizeof(uint4);
#pragma unroll 1
        for (int j = first; j < Base::kUnits; j += this->pieces()) {
#pragma unroll
            for (int item = lane; item < kRoundedBytes / int{sizeof(uint4)}; item += 32) {
                int head, eight;
                locate(j, item, head, eight);
                head += this->first_head;
                const uint4 x = *reinterpret_cast<const uint4*>(eight_dims);
                if (head < this->p.heads)
                    store_group(this->p.out_bf16.at(this->row, head), eight, natural_order(x),
                                this->cos_sin);
                eight_dims += 32 * sizeof(uint4);
            }
        }
    }

    // Outputs are sent as they weigh in the row.
    __device__ void know_weights() const {}
    __device__ void weigh_own() const {}
    struct Plus {
        __device__ void operator()(int, float& x, float other) const { x += other; }
    };
    __device__ Plus plus(int) const { return {}; }

    // Unit i: 16 heads and 16 dims of both panels; a vector has eight heads of a panel.
    __device__ float* values(int i, int vector) { return out[vector % 2] + 8 * i + vector / 2 * 4; }

    // To rows of eight dims, four for each head. A lane has heads 2 t and 2 t + 1 and, of the dims
    // in paired order, places g and 8 + g. It trades a head for the neighbouring places of the
    // other.
    __device__ void round(int i, uint8_t* to) {
        const int g = lane / 4;
        const bool odd = g & 1;
        to += (lane % 4 * 2 + odd) * 64 + g / 2 * 4;
#pragma unroll
        for (int v = 0; v < Base::kVectors; ++v) {
            const float* x = values(i, v);
            const float low = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 4);
            const float high = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 4);
            auto* words = reinterpret_cast<uint32_t*>(to + v / 2 * 512 + v % 2 * 32);
            words[0] = odd ? pack_bf16(low, x[1]) : pack_bf16(x[0], low);
            words[4] = odd ? pack_bf16(high, x[3]) : pack_bf16(x[2], high);
        }
    }
    __device__ void locate(int i, int item, int& head, int& eight) const {
        head = i * 16 + item / 4;
        eight = group * 16 + item / 2 % 2 * 8 + warp % 4 * 2 + item % 2;
    }
};

template <int kHeads>
struct Narrow : NarrowOutput<kHeads, Copies<kHeads>> {
    using Base = NarrowOutput<kHeads, Copies<kHeads>>;
    using Base::end, Base::group, Base::kFragment, Base::kLanes, Base::lane, Base::max, Base::out,
        Base::p, Base::shared, Base::sum, Base::warp;
    // Softmax: records of the thread, kVector in a row.
    static constexpr int kEach = kTile / kLanes;
    static constexpr int kVector = kEach < 4 ? kEach : 4;

    using Base::Base;

    __device__ __forceinline__ void multiply_logits(int32_t tile) {
        float d[kFragment];
        start_logits<kHeads, kPanels>(this->kv_of(tile), shared.q, d);
        cute::warpgroup_wait<0>();
        fence_registers(d);
        store_logits(d, shared.logits);
    }

    // Records of the thread: kVector neighbours from here on.
    __device__ int record_of(int i) const { return i * kLanes + threadIdx.x % kLanes * kVector; }

    // Weights of the tile, for all warps; true where those of earlier tiles shrink.
    __device__ __forceinline__ bool softmax(int32_t tile) {
        using Vector = std::conditional_t<kVector == 4, float4, float2>;
        const int head = this->softmax_head();
        float x[kEach];
#pragma unroll
        for (int i = 0; i < kEach; i += kVector) {
            const int r = record_of(i);
            const Vector v = *reinterpret_cast<const Vector*>(&shared.logits[head][r]);
            const auto* values = reinterpret_cast<const float*>(&v);
            const uint32_t there =
                shared.present[tile & 3][r / Base::kRecords] >> r % Base::kRecords;
            const float scale = p.softmax_scale * (kTileFactor * kLog2e);
#pragma unroll
            for (int e = 0; e < kVector; ++e)
                x[i + e] = there >> e & 1 ? values[e] * scale : -INFINITY;
        }
        const auto [keep, total] = weigh_head<kLanes, kVector>(
            x, max, [&](int i) { return weight_place(shared.p[0], head, record_of(i)); });
        sum = fmaf(sum, keep, total);
        if (threadIdx.x % kLanes == 0) shared.keep[head] = keep;
        return keep != 1.f;
    }

    __device__ __forceinline__ void start_values(int32_t tile) {
        const uint64_t kv = mn_major(this->kv_of(tile)[kGroupPanels * group], 0);
        const uint64_t weights = k_major(shared.p);
        fence_registers(out);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m)
                multiply_values<kHeads>(advance(kv, m * kPanelBytes + 16 * k * kPanelRowBytes),
                                        advance(weights, 32 * k), out[m], tile > 0 || k > 0);
        }
        cute::warpgroup_commit_batch();
    }

    __device__ __forceinline__ void run(const Query<kHeads>& query) {
        this->make_first(query);
#pragma unroll
        for (auto& panel : out)
            for (float& x : panel) x = 0.f;  // not before: the query has the registers
#pragma unroll 1
        for (int32_t tile = 0; tile < end; ++tile) {
            const bool last = tile + 1 == end;
            if (group == 0)
                multiply_logits(tile);
            else if (!last)
                this->make_next(tile + 1);
            __syncthreads();
            const bool shrinks = softmax(tile);
            cutlass::arch::fence_view_async_shared();
            // Behind the fence, which would wait for all that is on its way.
            if (tile + 2 < end) this->start_tile(tile + 2, this->next_slot);
            if (last) this->tell_all();
            if (__syncthreads_or(shrinks) && tile > 0) this->rescale(shared.keep);
            if (last) cluster_arrive_relaxed();  // what peers send may come
            start_values(tile);
            if (tile + 3 < end) this->next_slot = this->load_slot(this->slot_of(tile + 3));
            if (last) this->template find_factor<kLanes>(this->softmax_head(), max);
            cute::warpgroup_wait<0>();
            fence_registers(out);
            if (!last) shared.added.arrive();
        }
    }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
