// Parts of few_rows.cu with 32 and 64 heads: how the CTAs of a row add up their outputs.
//
// A warp's output is cut into units, which are dealt out to the CTAs in turns. Each CTA sends its
// own as they are in its registers: with 32 heads scaled by what it weighs in the row, with 64 as
// if it were alone, before it knows that, and the receiver weighs them. The owner of a unit adds to
// its own those of the others, in a fixed order.
#pragma once

#include "sm90/attend/two_tiles_copy.cuh"
#include "sm90/common/cluster_sync.cuh"
#include "sm90/common/exp2.cuh"
#include "sm90/common/remote_store.cuh"

namespace flash_csa::sm90::few_rows::two_tiles {

template <int kHeads, class Rows>
struct Sharing : Rows {
    using Base = Rows;
    using Base::first_head, Base::lane, Base::p, Base::piece, Base::plan, Base::row, Base::shared,
        Base::warp;
    // A unit: 16 values of each lane, of which 24 bits are sent: what a cluster's network moves,
    // pieces of 16 bytes, binds.
    static constexpr int kVectors = 4, kSentVectors = 3;
    static constexpr int kVectorBytes = 32 * sizeof(uint4);
    static constexpr int kSentBytes = kSentVectors * kVectorBytes;
    static constexpr int kUnits = kHeads * kHeadDim / (4 * kVectors * 32) / kWarps;
    static constexpr int kTurn = 1;  // barriers of warpgroups that send one after the other

    using Base::Base;

    // Before the peers hear of this CTA.
    __device__ void expect() {
        shared.levels_there.init(1);
        shared.levels_there.arrive_and_expect_tx(this->pieces() * sizeof shared.levels[0]);
        int before = 0;  // of this CTA's units
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            int units, rest;
            this->by_pieces(units, rest, (g + 1) * kUnits * 4 + this->pieces() - 1 - piece);
            shared.received[g].init(1);
            shared.received[g].arrive_and_expect_tx((units - before) * (this->pieces() - 1) *
                                                    kSentBytes);
            before = units;
        }
    }

    // Tells the CTAs `to`, `to` + step .. the level of a head, which all tiles are in.
    __device__ __forceinline__ void tell(int to, int step, int head, float max, float sum) {
        const uint32_t level = __float_as_uint(max + __log2f(sum));
        const uint32_t at = cute::cast_smem_ptr_to_uint(&shared.levels[piece][head]);
        const uint32_t there = cute::cast_smem_ptr_to_uint(&shared.levels_there);
        for (; to < this->pieces(); to += step) cute::store_shared_remote(level, at, there, to);
    }

    // What all CTAs have told of a head; kLanes neighbours have the head, each of some CTAs.
    template <int kLanes>
    struct Levels {
        static constexpr int kEach = (Rows::Shared::kMostPieces + kLanes - 1) / kLanes;
        float weights[kEach];  // of CTAs lane % kLanes + i * kLanes
        float top, all;        // the highest level; sum of the weights, and that with the sink
        bool empty;            // a row without records gives 0 and +inf
    };
    template <int kLanes>
    __device__ __forceinline__ Levels<kLanes> read_levels(int head) const {
        Levels<kLanes> levels;
        auto& [weights, top, all, empty] = levels;
        shared.levels_there.wait(0);
        top = -INFINITY;
#pragma unroll
        for (int i = 0; i < levels.kEach; ++i) {
            const int from = lane % kLanes + i * kLanes;
            weights[i] = from < this->pieces() ? shared.levels[from][head] : -INFINITY;
            top = fmaxf(top, weights[i]);
        }
#pragma unroll
        for (int h = 1; h < kLanes; h *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, h));
        float total = 0.f;
#pragma unroll
        for (float& weight : weights) {
            weight = weight == -INFINITY ? 0.f : exp2_approx(weight - top);
            total += weight;
        }
#pragma unroll
        for (int h = 1; h < kLanes; h *= 2) total += __shfl_xor_sync(~0u, total, h);
        __syncwarp();  // all have read
        empty = total == 0.f;
        all = total + exp2_approx(fmaf(shared.sink[head], kLog2e, -top));
        if (lane % kLanes == 0 && piece == 0 && p.lse && first_head + head < p.heads)
            p.lse.row(row)[first_head + head] = empty ? INFINITY : (top + __log2f(total)) * kLn2;
        return levels;
    }
    // What this CTA's sums of a head are to be multiplied with, where its level was.
    template <int kLanes>
    __device__ __forceinline__ void find_factor(int head, float max) {
        const Levels<kLanes> levels = read_levels<kLanes>(head);
        if (lane % kLanes != 0) return;
        const float mine = max == -INFINITY ? 0.f : exp2_approx(max - levels.top);
        shared.levels[piece][head] =
            levels.empty ? 0.f : __fdividef(mine * kTileFactor, levels.all);
    }
    // What the CTAs' own outputs of a head weigh in the row, where their levels were.
    template <int kLanes>
    __device__ __forceinline__ void find_weights(int head) {
        const Levels<kLanes> levels = read_levels<kLanes>(head);
#pragma unroll
        for (int i = 0; i < levels.kEach; ++i) {
            const int from = lane % kLanes + i * kLanes;
            if (from < this->pieces())
                shared.levels[from][head] =
                    levels.empty ? 0.f : __fdividef(levels.weights[i], levels.all);
        }
    }

    // Three vectors keep their words, but for the last bytes, which are those of the fourth.
    template <class Out>
    static __device__ __forceinline__ void pack(Out& out, int unit, uint4 (&sent)[kSentVectors]) {
        const float* rest = out.values(unit, kSentVectors);
#pragma unroll
        for (int v = 0; v < kSentVectors; ++v) {
            const float* x = out.values(unit, v);
            const auto word = [&](int i) {
                return __byte_perm(__float_as_uint(x[i]), __float_as_uint(rest[i]), 0x3215 + v);
            };
            sent[v] = make_uint4(word(0), word(1), word(2), word(3));
        }
    }
    template <class Out>
    static __device__ __forceinline__ void add(Out& out, int unit, int piece, const uint4* sent) {
        const auto plus = out.plus(piece);
        uint32_t words[kSentVectors][4];
#pragma unroll
        for (int v = 0; v < kSentVectors; ++v) {
            const uint4 x = sent[v * 32];
            words[v][0] = x.x, words[v][1] = x.y, words[v][2] = x.z, words[v][3] = x.w;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                plus(i, out.values(unit, v)[i], __uint_as_float(words[v][i] & 0xffffff00u));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            plus(i, out.values(unit, kSentVectors)[i],
                 __uint_as_float(__byte_perm(__byte_perm(words[0][i], words[1][i], 0x0400),
                                             words[2][i], 0x4210)));
    }

    // The end of `share` where a row has two CTAs, without a branch between a warp's units: they
    // wait for shared memory at the same time. from: of the warp's units in the inbox.
    template <int kPiece, class Out, class Put, class Take>
    __device__ __forceinline__ void complete_all(Out& out, uint8_t* from, const Put& put,
                                                 const Take& take) {
        const auto place = [&](int j, int piece) {
            return from + (j - kPiece + piece) * kSentBytes;
        };
#pragma unroll
        for (int j = kPiece; j < kUnits; j += 2)
            add(out, j, 1 - kPiece, reinterpret_cast<const uint4*>(place(j, 1 - kPiece)) + lane);
#pragma unroll
        for (int j = kPiece; j < kUnits; j += 2) put(j, place(j, kPiece));
        __syncwarp();
#pragma unroll
        for (int j = kPiece; j < kUnits; j += 2) take(j, place(j, kPiece));
    }

    // Adds up the outputs of all CTAs. Out has the thread's values of unit j as values(j, 0..3). Of
    // the warp's units those from the returned one on, `pieces` apart, are this CTA's; each is
    // handed to `put` when it is, with a place of kSentBytes that is the warp's, and when all lanes
    // have been there to `take`.
    template <class Out, class Put, class Take>
    __device__ __forceinline__ int share(Out& out, const Put& put, const Take& take) {
        const int pieces = this->pieces();
        int at, first;  // of the warp's first unit: its place in the owner's inbox, its owner
        this->by_pieces(at, first, warp * kUnits);
        uint8_t* const inbox = shared.inbox();
        const int group = warp / 4;
        int owner = first, place = at * pieces + piece;
        // One warpgroup after the other: what the first has received is added while others send.
        if (group > 0) cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, kTurn + group);
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            if (owner != piece) {
                const uint32_t to = peer_address(inbox + place * kSentBytes, owner);
                const uint32_t there = peer_address(&shared.received[group], owner);
                uint4 sent[kSentVectors];
                pack(out, j, sent);
#pragma unroll
                for (int v = 0; v < kSentVectors; ++v)
                    store_remote(to + v * kVectorBytes + lane * sizeof(uint4), sent[v], there);
            }
            if (++owner == pieces) owner = 0, place += pieces;
        }
        if (group + 1 < kGroups)
            cutlass::arch::NamedBarrier::arrive(2 * kWarpgroup, kTurn + group + 1);
        out.know_weights();
        out.weigh_own();  // while others send: also what was sent, which is simpler
        shared.received[group].wait(0);
        if constexpr (Rows::kKnownPieces == 2) {
            uint8_t* from = inbox + warp * kUnits * kSentBytes;
            if (piece == 0)
                complete_all<0>(out, from, put, take);
            else
                complete_all<1>(out, from, put, take);
            return piece;
        }
        const int first_mine = piece - first + (piece < first ? pieces : 0);
        uint8_t* from = inbox + (at + (piece < first)) * pieces * kSentBytes;
        int mine = first_mine;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
            if (j != mine) continue;
#pragma unroll 1
            for (int i = 0; i < pieces - 1; ++i) {
                const int other = i + (i >= piece);
                add(out, j, other,
                    reinterpret_cast<const uint4*>(from + other * kSentBytes) + lane);
            }
            put(j, from + piece * kSentBytes);
            __syncwarp();
            take(j, from + piece * kSentBytes);
            mine += pieces, from += pieces * kSentBytes;
        }
        return first_mine;
    }
};

}  // namespace flash_csa::sm90::few_rows::two_tiles
