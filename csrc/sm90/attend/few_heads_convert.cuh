// Part of few_heads.cu: the warpgroups that convert records and multiply them with the query.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "sm90/attend/few_heads.cuh"
#include "sm90/attend/few_heads_products.cuh"

namespace flash_csa::sm90::few_heads {

// One thread's state.
template <int kHeads>
struct Converter {
    static constexpr int kFrag = kFragment<kHeads>;
    using Shared = few_heads::Shared<kHeads>;
    Shared& shared;
    const int group, warp, lane;
    Turn<kSlots<kHeads>> slot;
    Turn<kTiles> tile;
    Turn<kQueries<kHeads>> query_at;
    Products<kHeads> products;
    uint32_t logits_parity = 1;

    __device__ __forceinline__ void work(int32_t items) {
        for (int32_t item = blockIdx.x; item < items; item += gridDim.x) {
            shared.row_full[query_at.at].wait(query_at.parity);
            products.load_query(shared.q[query_at.at], group, lane);
            int32_t tiles = shared.tiles[query_at.at], window = shared.window[query_at.at];
            for (int32_t k = 0; k < tiles; ++k) {
                if (kHeads == 32) {  // read again for each tile: registers are scarce
                    tiles = shared.tiles[query_at.at];
                    window = shared.window[query_at.at];
                }
                if (k < window)
                    convert<RecordId::WindowFp8>();
                else
                    convert<RecordId::MainFp4>();
            }
            shared.row_empty[query_at.at].arrive();
            query_at.next();
        }
    }

    // A lane's codes of a span, of records g and g + 8 of the warp's.
    template <class Read>
    struct Span {
        typename Read::Codes codes[2];
    };

    template <RecordId kId>
    __device__ __forceinline__ void convert() {
        using Read = Reader<kId, kBankRows<kHeads>>;
        const int of_lane = seldom<kHeads>(lane), g = of_lane / 4, t = of_lane % 4;
        const uint8_t* at[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i < Read::kSlots) {
                if (i > 0) slot.next();
                shared.slot_full[warp][slot.at].wait(slot.parity);
            }
            at[i] = shared.slots[warp][slot.at];
        }
        const auto read = [&](int s) {
            return Span<Read>{
                Read::read(at[0], g, kSpans * group + s, t),
                Read::read(at[1], Read::kSlots == 1 ? g + 8 : g, kSpans * group + s, t)};
        };
        products.clear();
        if constexpr (Read::kSlots == 1) {
            const Span<Read> low = read(0), high = read(1);
            release_slots<Read>();
            shared.tile_empty[0][tile.at].wait(tile.parity ^ 1);
            convert_span(low, 0);
            if (kGivenParts<kHeads> > 1) shared.tile_empty[1][tile.at].wait(tile.parity ^ 1);
            convert_span(high, 1);
        } else if constexpr (kHeads < 32) {
            // The second span takes the registers of the first, half of it at a time: loads do not
            // overtake stores, so they stand where there is time until their values are needed.
            const int second = kSpans * group + 1;
            Span<Read> low = read(0), high;
            shared.tile_empty[0][tile.at].wait(tile.parity ^ 1);
            convert_span(low, 0, [&] {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    high.codes[i].words[0] = Read::words(at[i], g, second, t, 0);
                    high.codes[i].scale = Read::scale(at[i], g, second, t);
                }
            });
#pragma unroll
            for (int i = 0; i < 2; ++i)
                high.codes[i].words[1] = Read::words(at[i], g, second, t, 1);
            release_slots<Read>();
            if (kGivenParts<kHeads> > 1) shared.tile_empty[1][tile.at].wait(tile.parity ^ 1);
            convert_span(high, 1);
        } else {
#pragma unroll 1
            for (int s = 0; s < kSpans; ++s) {
                if (s < kGivenParts<kHeads>) shared.tile_empty[s][tile.at].wait(tile.parity ^ 1);
                const Span<Read> span = read(s);
                if (s == kSpans - 1) release_slots<Read>();
                convert_span(span, s);
            }
        }
        shared.logits_empty.wait(logits_parity);
        logits_parity ^= 1;
        products.finish();
        hand_over(products.logits);
    }

    // Gives back the slots of the tile that was read.
    template <class Read>
    __device__ __forceinline__ void release_slots() {
        shared.slot_empty[warp][slot.at].arrive();
        if (Read::kSlots > 1)
            shared.slot_empty[warp][slot.at == 0 ? kSlots<kHeads> - 1 : slot.at - 1].arrive();
        slot.next();
    }

    struct Nothing {
        __device__ __forceinline__ void operator()() const {}
    };

    // Converts span s of this group's and multiplies it with the query; `between` its halves.
    template <class Read, class Between = Nothing>
    __device__ __forceinline__ void convert_span(const Span<Read>& span, int s,
                                                 const Between& between = {}) {
        // Of a fragment's four 8 x 8 blocks (record, dim) this lane addresses row lane % 8 of
        // block lane / 8: records from 0 or 8 on, half 0 or 1 of the step.
        uint8_t* to = shared.kv[tile.at][4 * group + lane / 16][kWarpRecords * warp + lane % 16];
        const typename Read::Factors factors[2] = {Read::factors(span.codes[0]),
                                                   Read::factors(span.codes[1])};
        FragmentA a[2][2];  // of two units: one may be read while the other is made
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            products.before_values();
            const int chunk = 4 * s + u;
            const uint4 x = Read::values(span.codes[0], factors[0], u);
            const uint4 y = Read::values(span.codes[1], factors[1], u);
            const uint32_t words[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[u % 2][h][i] = words[h][i];
                cute::SM90_U32x4_STSM_N::copy(
                    words[h][0], words[h][1], words[h][2], words[h][3],
                    *reinterpret_cast<cute::uint128_t*>(to + 2 * h * kPanelBytes +
                                                        ((chunk ^ lane % 8) << 4)));
            }
            products.multiply(shared.q[query_at.at], group, s, u, a[u % 2]);
            if (u == 1) between();
        }
    }

    // Gives the tile and its logits to the values.
    __device__ __forceinline__ void hand_over(const float (&logits)[kFrag]) {
#pragma unroll
        for (int i = 0; i < kFrag / 4; ++i)
            shared.logits[group][i][32 * warp + lane] =
                make_float4(logits[4 * i], logits[4 * i + 1], logits[4 * i + 2], logits[4 * i + 3]);
        shared.tile_full[tile.at].arrive();
        tile.next();
    }
};

}  // namespace flash_csa::sm90::few_heads
