// Part of few_heads.cu: the warpgroups that weigh and add values, and write the output.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "sm90/attend/few_heads.cuh"
#include "sm90/attend/few_heads_products.cuh"
#include "sm90/attend/lag.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/common/exp2.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90::few_heads {

__device__ __forceinline__ void load_transposed(const uint8_t* from, uint32_t (&to)[4]) {
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), to[0], to[1],
                                  to[2], to[3]);
}

// A partial result in the workspace: out^T fragments as the threads hold them, then maxima, sums.
template <int kHeads>
struct Partial {
    float4 out[kPanels * kFragment<kHeads> / 4 / kValueGroups<kHeads>][kValueThreads<kHeads>];
    float max[kHeads];
    float sum[kHeads];
};

// A base before any record: every logit is above it by more than that.
inline constexpr float kNone = -0x1p100f;

// What a warp of the softmax says of a tile: its bases are to be raised, from none or from others,
// which the output is rescaled for.
inline constexpr uint8_t kFromNone = 2, kAgain = 1;
inline constexpr uint32_t kAnyAgain = 0x01010101u * kAgain;

// Waits for the next run; its tiles.
template <int kHeads>
__device__ __forceinline__ int32_t next_run(Shared<kHeads>& shared, Turn<kQueries<kHeads>>& at) {
    shared.row_full[at.at].wait(at.parity);
    const int32_t tiles = shared.tiles[at.at];
    shared.row_empty[at.at].arrive();
    at.next();
    return tiles;
}

// Writes the lse of a head and says what makes outputs of its sums. A row without records gives 0
// and +inf.
__device__ __forceinline__ float finish_head(const AttendParams& p, int64_t row, int head,
                                             float top, float total) {
    const float sink = p.sink != nullptr && head < p.heads ? p.sink[head] : -INFINITY;
    const bool empty = top == -INFINITY && total == 0.f;
    const float with_sink = total + exp2f(sink * kLog2e - top);
    if (p.lse && head < p.heads)
        p.lse.row(row)[head] = empty ? INFINITY : (top + log2f(total)) * kLn2;
    return empty ? 0.f : kTileFactor / with_sink;
}

// The softmax, one thread's state: of 8 heads and of kRows blocks of 16 records.
template <int kHeads, bool kWhole>
struct Weigher {
    static constexpr int kRows = kTile / 16 / kRecordGroups<kHeads>;
    static constexpr bool kMeet = kRecordGroups<kHeads> > 1;  // others have the same heads
    using Shared = few_heads::Shared<kHeads>;
    // Of each block records g and g + 8, heads 2 t and 2 t + 1 of the warp's.
    using Logits = float[kRows][4];

    const AttendParams& p;
    Shared& shared;
    const float scale;  // to logits in base 2
    const int warp, lane;
    const int g = lane / 4, t = lane % 4;
    const int heads = warp % kHeadGroups<kHeads>, records = warp / kHeadGroups<kHeads>;
    Turn<kTiles> tile;
    Turn<kQueries<kHeads>> query_at;
    uint32_t totals_parity = 1;
    int present_set = 0;
    float base[2];   // log2 of what weights are relative to
    float sum[2];    // of this thread's records
    float slack[2];  // of a logit above the base

    __device__ __forceinline__ void sync() const {
        cutlass::arch::NamedBarrier::sync(kGroupThreads, 0);
    }
    __device__ __forceinline__ int head_of(int i) const { return 8 * heads + 2 * t + i; }

    __device__ __forceinline__ void work(int32_t items) {
        for (int32_t item = blockIdx.x; item < items; item += gridDim.x) {
            const int32_t tiles = next_run(shared, query_at);
            base[0] = base[1] = kNone;
            sum[0] = sum[1] = 0.f;
            slack[0] = slack[1] = 0.f;
            for (int32_t i = 0; i < tiles; ++i) {
                Logits logits;
                read_logits(logits);
                weigh(logits);
                tile.next();
            }
            put_totals(item);
        }
    }

    __device__ __forceinline__ void read_logits(Logits& logits) {
        shared.tile_full[tile.at].wait(tile.parity);
        bool all = true;
        uint32_t there[kRows];
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
            const int block = kRows * records + b;
            const float4 x = shared.logits[0][heads][32 * block + lane];
            const float4 y = shared.logits[1][heads][32 * block + lane];
            logits[b][0] = x.x + y.x;
            logits[b][1] = x.y + y.y;
            logits[b][2] = x.z + y.z;
            logits[b][3] = x.w + y.w;
            there[b] = shared.present[present_set][block];
            all &= there[b] == kAllRecords;
        }
        present_set = (present_set + 1) % kPresentSets;
        shared.logits_empty.arrive();
        if (all) return;
#pragma unroll
        for (int b = 0; b < kRows; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if ((there[b] >> (g + i / 2 * 8) & 1) == 0) logits[b][i] = -INFINITY;
    }

    // Logits -> weights in shared memory. Where the values' heads are those of several warps, they
    // may go on with weights on the bases as they are, until they see that a logit of any warp is
    // far above its base; then they wait for weights on higher ones.
    __device__ __forceinline__ void weigh(const Logits& logits) {
        Logits x;
        bool over = false;
#pragma unroll
        for (int b = 0; b < kRows; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[b][i] = fmaf(logits[b][i], scale, -base[i % 2]);
                over |= x[b][i] > slack[i % 2];
                x[b][i] = exp2_approx(x[b][i]);
            }
        uint8_t raises = 0;
        if (__any_sync(kAllLanes, over))
            raises =
                __all_sync(kAllLanes, base[0] == kNone && base[1] == kNone) ? kFromNone : kAgain;
        if (!kMeet && raises != 0) raise(logits, x);
        store_weights(x);
        if (lane == 0) reinterpret_cast<uint8_t*>(&shared.over[tile.at])[warp] = raises;
        __syncwarp();
        shared.weights_full[tile.at].arrive();
        if constexpr (kMeet) {
            shared.weights_full[tile.at].wait(tile.parity);
            if (shared.over[tile.at] != 0) {
                raise(logits, x);
                store_weights(x);
                sync();
                shared.raised[tile.at].arrive();
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float more = x[0][i] + x[0][i + 2];
#pragma unroll
            for (int b = 1; b < kRows; ++b) more += x[b][i] + x[b][i + 2];
            sum[i] += more;
        }
        if (!kMeet && raises != 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float total = sum[i];
#pragma unroll
                for (int bit = 4; bit < 32; bit *= 2)
                    total += __shfl_xor_sync(kAllLanes, total, bit);
                slack[i] = slack_of(total);
            }
        }
    }

    // Raises the bases of heads that have grown to the largest logit, and finds how far they may
    // lag from now on.
    __device__ __forceinline__ void raise(const Logits& logits, Logits& x) {
        float top[2], total[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] = fmaxf(logits[0][i], logits[0][i + 2]);
#pragma unroll
            for (int b = 1; b < kRows; ++b)
                top[i] = fmaxf(top[i], fmaxf(logits[b][i], logits[b][i + 2]));
            if constexpr (kMeet) {
                total[i] = sum[i];
#pragma unroll
                for (int b = 0; b < kRows; ++b) total[i] += x[b][i] + x[b][i + 2];
            }
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2) {
                top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], bit));
                if constexpr (kMeet) total[i] += __shfl_xor_sync(kAllLanes, total[i], bit);
            }
            if (kMeet && g == 0) {
                shared.reduce[records][head_of(i)] = top[i];
                shared.sums[records][head_of(i)] = total[i];
            }
        }
        if constexpr (kMeet) {
            sync();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                total[i] = 0.f;
#pragma unroll
                for (int r = 0; r < kRecordGroups<kHeads>; ++r) {
                    top[i] = fmaxf(top[i], shared.reduce[r][head_of(i)]);
                    total[i] += shared.sums[r][head_of(i)];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[i] *= scale;
            float keep = 1.f;
            if (top[i] > base[i]) {
                keep = exp2_approx(base[i] - top[i]);
                base[i] = top[i];
            }
            sum[i] *= keep;
            if constexpr (kMeet)  // on a much lower base, or none, weights overflow
                slack[i] = total[i] < INFINITY ? slack_of(total[i] * keep) : 0.f;
            if (records == 0 && g == 0) shared.keep[tile.at][head_of(i)] = keep;
        }
#pragma unroll
        for (int b = 0; b < kRows; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[b][i] = exp2_approx(fmaf(logits[b][i], scale, -base[i % 2]));
    }

    // Two 8 x 8 blocks of [record][head] per 16 records, transposed on the way.
    __device__ __forceinline__ void store_weights(const Logits& x) {
        uint8_t* to = shared.p[tile.at][8 * heads];
        const int chunk = 2 * kRows * records;
        if constexpr (kRows == 1) {
            cute::SM90_U16x4_STSM_T::copy(pack_bf16(x[0][0], x[0][1]), pack_bf16(x[0][2], x[0][3]),
                                          *reinterpret_cast<cute::uint128_t*>(
                                              to + panel_offset(lane % 8, chunk + lane / 8 % 2)));
        } else {
#pragma unroll
            for (int b = 0; b < kRows; b += 2)
                cute::SM90_U16x8_STSM_T::copy(
                    pack_bf16(x[b][0], x[b][1]), pack_bf16(x[b][2], x[b][3]),
                    pack_bf16(x[b + 1][0], x[b + 1][1]), pack_bf16(x[b + 1][2], x[b + 1][3]),
                    *reinterpret_cast<cute::uint128_t*>(
                        to + panel_offset(lane % 8, chunk + 2 * b + lane / 8)));
        }
    }

    // Maxima and sums of a run; of a whole row what makes outputs of sums, while the values add the
    // last tile.
    __device__ __forceinline__ void put_totals(int32_t item) {
        // All warps, as a run without tiles lets them meet nowhere else: warp 0 may still read what
        // they are about to replace.
        shared.totals_empty.wait(totals_parity);
        totals_parity ^= 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], bit);
            if (g > 0) continue;
            shared.reduce[records][head_of(i)] = sum[i];
            if (records == 0) shared.max[head_of(i)] = base[i] == kNone ? -INFINITY : base[i];
        }
        sync();
        if (warp == 0 && lane < kHeads) {
            float total = 0.f;
#pragma unroll
            for (int r = 0; r < kRecordGroups<kHeads>; ++r) total += shared.reduce[r][lane];
            if (kWhole)
                shared.factor[lane] = finish_head(p, item, lane, shared.max[lane], total);
            else
                shared.sum[lane] = total;
        }
        shared.totals_full.arrive();
    }
};

// The second product and the output, one thread's state.
template <int kHeads, bool kWhole>
struct Adder {
    static constexpr int kCols = kColumns<kHeads>;
    static constexpr int kFrag = kFragment<kHeads>;
    static constexpr int kOwnPanels = kPanels / kValueGroups<kHeads>;
    static constexpr int kSteps =
        kHeads == 32 ? 1 : 4;  // of 16 records at once: fragments need registers
    using Shared = few_heads::Shared<kHeads>;

    const AttendParams& p;
    const Plan<kWhole>& plan;
    Shared& shared;
    const int group, warp, lane;
    Turn<kTiles> tile;
    Turn<kQueries<kHeads>> query_at;
    uint32_t runs = 0;
    uint32_t raised = 0;  // bit t: the parity of that barrier of tile t
    float out[kOwnPanels][kFrag];
    // Fragments of the first records, read while it is looked up whether `out` is rescaled.
    static constexpr int kFirst = kHeads == 32 ? 0 : 4;
    FragmentA first[kFirst + 1];  // there is no array of none

    __device__ __forceinline__ void sync() const {
        cutlass::arch::NamedBarrier::sync(kValueThreads<kHeads>, 1);
    }
    // Computed where they are used: there are few registers beside the output.
    __device__ __forceinline__ int thread() const {
        return kGroupThreads * group + 32 * warp + fresh(lane);
    }
    __device__ __forceinline__ int head_of(int c) const {
        return c / 2 * 8 + 2 * (fresh(lane) % 4) + c % 2;
    }

    __device__ __forceinline__ void work() {
        for (; item() < plan.items; ++runs) {
            int32_t left = next_run(shared, query_at);
            clear();
            for (; left > 0; --left) {
                shared.weights_full[tile.at].wait(tile.parity);
                const uint32_t over = shared.over[tile.at];
                load_first();
                if (over != 0) {
                    if (kRecordGroups<kHeads> > 1) {
                        shared.raised[tile.at].wait(raised >> tile.at & 1);
                        raised ^= 1u << tile.at;
                    }
                    rescale(over);
                }
                add_tile();
                shared.tile_empty[warp / (kWarps / kGivenParts<kHeads>)][tile.at].arrive();
                tile.next();
            }
            shared.totals_full.wait(runs % 2);
            end_run();
            shared.totals_empty.arrive();
        }
    }
    __device__ __forceinline__ int32_t item() const {
        return fresh(static_cast<int>(blockIdx.x + runs * gridDim.x));
    }
    __device__ __forceinline__ int32_t row() const { return item() / plan.splits; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kOwnPanels * kFrag; ++i) out[i / kFrag][i % kFrag] = 0.f;
    }

    __device__ __forceinline__ void rescale(uint32_t over) {
        if ((over & kAnyAgain) == 0) return;
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            // Of 32 heads a warp of the softmax speaks for itself.
            if (kRecordGroups<kHeads> == 1 && (over >> c / 2 * 8 & 1) == 0) continue;
            const float keep = shared.keep[tile.at][head_of(c)];
#pragma unroll
            for (int i = 0; i < 2 * kOwnPanels; ++i)
                out[i / 2][c / 2 * 4 + i % 2 * 2 + c % 2] *= keep;
        }
    }

    // A warp takes 16 dims of every panel, chunks 2 w and 2 w + 1.
    __device__ __forceinline__ const uint8_t* own_chunks() const {
        const int record = lane / 16 * 8 + lane % 8;
        return shared.kv[tile.at][kOwnPanels * group][0] +
               panel_offset(record, 2 * warp + lane / 8 % 2);
    }
    __device__ __forceinline__ void load_first() {
        const uint8_t* kv = own_chunks();
#pragma unroll
        for (int panel = 0; panel < kFirst; ++panel)
            load_transposed(kv + panel * kPanelBytes, first[panel]);
    }
    __device__ __forceinline__ void add_tile() {
        const uint8_t* kv = own_chunks();
#pragma unroll kSteps
        for (int k = 0; k < kTile / 16; ++k) {
            uint32_t b[kHeads / 8][2];
            load_weights(k, b);
#pragma unroll
            for (int panel = 0; panel < kOwnPanels; ++panel) {
                FragmentA a;
                if (k == 0 && panel < kFirst) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[i] = first[panel][i];
                } else {
                    load_transposed(kv + panel * kPanelBytes + 16 * k * kPanelRowBytes, a);
                }
#pragma unroll
                for (int j = 0; j < kHeads / 8; ++j)
                    multiply_step(a, b[j][0], b[j][1], out[panel] + 4 * j);
            }
        }
    }

    // The weights of 16 records as B fragments.
    __device__ __forceinline__ void load_weights(int k, uint32_t (&b)[kHeads / 8][2]) const {
        const int of_lane = kHeads == 32 ? fresh(lane) : lane;
        int at = panel_offset(of_lane % 8, of_lane / 8 % 2);
        if (kHeads == 16) at = fresh(at);  // one address, not one for each k
        const uint8_t* from = shared.p[tile.at][0] + (at ^ k << 5);
        if constexpr (kHeads == 8) {
            load_matrices(from, b[0][0], b[0][1]);
        } else {
            from += of_lane / 16 * 8 * kPanelRowBytes;
#pragma unroll
            for (int j = 0; j < kHeads / 8; j += 2)
                load_matrices(from + j * 8 * kPanelRowBytes, b[j][0], b[j][1], b[j + 1][0],
                              b[j + 1][1]);
        }
    }

    // The output, or a part of it for the CTA that comes last.
    __device__ __forceinline__ void end_run() {
        if constexpr (!kWhole) {
            if (plan.splits > 1 && !merge_partials()) return;
            const int head = thread();
            if (head < kHeads)
                shared.factor[head] =
                    finish_head(p, row(), head, shared.max[head], shared.sum[head]);
            sync();
        }
        finish(row());
    }

    __device__ __forceinline__ void store_partial(Partial<kHeads>& to) const {
        const float* values = out[0];
        float4* place = to.out[0] + thread();
#pragma unroll
        for (int i = 0; i < kOwnPanels * kFrag / 4; ++i)
            place[i * kValueThreads<kHeads>] =
                make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        if (thread() >= kHeads) return;
        to.max[thread()] = shared.max[thread()];
        to.sum[thread()] = shared.sum[thread()];
    }

    __device__ __forceinline__ Partial<kHeads>& partial(int piece) const {
        return reinterpret_cast<Partial<kHeads>*>(p.workspace.data +
                                                  kSyncBytes)[int64_t{row()} * plan.splits + piece];
    }

    // True in the CTA that comes last of a row's; it then has the row's totals.
    __device__ __forceinline__ bool merge_partials() {
        store_partial(partial(item() % plan.splits));
        __threadfence();
        sync();
        if (thread() == 0) {
            auto* counter = reinterpret_cast<unsigned*>(p.workspace.data) + row();
            shared.last = atomicAdd(counter, 1u) == static_cast<unsigned>(plan.splits) - 1;
            if (shared.last) *counter = 0;
        }
        sync();
        if (!shared.last) return false;
        __threadfence();
        if (thread() < kHeads) {
            float top = -INFINITY, total = 0.f;
            for (int i = 0; i < plan.splits; ++i)
                top = fmaxf(top, __ldcg(&partial(i).max[thread()]));
            for (int i = 0; i < plan.splits; ++i)
                total += weight_of(partial(i), top) * __ldcg(&partial(i).sum[thread()]);
            shared.max[thread()] = top;
            shared.sum[thread()] = total;
        }
        clear();
        for (int i = 0; i < plan.splits; ++i) {
            if (thread() < kHeads)
                shared.factor[thread()] = weight_of(partial(i), shared.max[thread()]);
            sync();
            add_partial(partial(i));
            sync();
        }
        return true;
    }

    // What a part counts of this thread's head, whose largest logit is `top`.
    __device__ __forceinline__ float weight_of(const Partial<kHeads>& part, float top) const {
        return exp2_approx(__ldcg(&part.max[thread()]) - (top == -INFINITY ? 0.f : top));
    }

    __device__ __forceinline__ void add_partial(const Partial<kHeads>& part) {
        const float4* from = part.out[0] + thread();
        const float* weights = shared.factor + head_of(0);
        float* values = out[0];
#pragma unroll
        for (int k = 0; k < kOwnPanels * kFrag / 4; ++k) {
            if (k % kSteps == 0) __syncwarp();  // not all at once: there are few registers
            const float4 x = __ldcg(from + k * kValueThreads<kHeads>);
            const float2 weight = *reinterpret_cast<const float2*>(weights + 4 * k % kFrag * 2);
            values[4 * k] = fmaf(weight.x, x.x, values[4 * k]);
            values[4 * k + 1] = fmaf(weight.y, x.y, values[4 * k + 1]);
            values[4 * k + 2] = fmaf(weight.x, x.z, values[4 * k + 2]);
            values[4 * k + 3] = fmaf(weight.y, x.w, values[4 * k + 3]);
        }
    }

    // Normalises, rotates back, writes. Of each column a thread has 4 dims of two units of 8 in
    // each half of the dims; the lane of the other parity of g has the rest, and each takes one
    // unit.
    __device__ __forceinline__ void finish(int64_t row) {
        const float* cos_sin = derotation(p, row);
        const int g = fresh(lane) / 4;
        const bool odd = g % 2 != 0;
        const int unit = 16 * (warp / 2) + 4 * (g / 2) + 2 * (warp % 2) + g % 2;
#pragma unroll
        for (int c = 0; c < kCols; ++c) {
            const int head = head_of(c);
            const float factor = shared.factor[head];
            uint16_t* to = p.out_bf16.at(row, head);
#pragma unroll
            for (int i = 0; i < kOwnPanels / 4; ++i) {
                uint2 part[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int at = c / 2 * 4 + 2 * r + c % 2;
                    const auto value = [&](int at_dim) { return out[4 * i + at_dim][at] * factor; };
                    part[r] =
                        make_uint2(pack_bf16(value(0), value(1)), pack_bf16(value(2), value(3)));
                }
                const uint2 mine = odd ? part[1] : part[0];
                uint2 other = odd ? part[0] : part[1];
                other.x = __shfl_xor_sync(kAllLanes, other.x, 4);
                other.y = __shfl_xor_sync(kAllLanes, other.y, 4);
                const uint4 x = odd ? make_uint4(other.x, other.y, mine.x, mine.y)
                                    : make_uint4(mine.x, mine.y, other.x, other.y);
                if (head >= p.heads) continue;
                const int half = kOwnPanels / 4 * group + i;
                store_group(to, 32 * half + unit, x, half == 0 ? nullptr : cos_sin);
            }
        }
    }
};

}  // namespace flash_csa::sm90::few_heads
