// Part of many_heads.cu: the accumulated output, and its way out.
//
// A warp has 256 columns of 16 heads. It puts them down in its part of the tile that was multiplied
// last, and stores 512 bytes of a head at a time.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "sm90/attend/many_heads.cuh"
#include "sm90/attend/output.cuh"
#include "sm90/common/fresh.cuh"

namespace flash_csa::sm90::many_heads {

inline constexpr int kHalf = kHeadDim / 2;  // output columns of a consumer warpgroup

// A consumer's half of the output, as accumulators of two products of 128 columns: a product of 256
// has more registers than a thread of this block has at entry, which ptxas rejects.
constexpr int kProductPanels = 2;
struct Output {
    float part[2][kHalf / 4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) (*this)[i] = 0.f;
    }
    __device__ float& operator[](int i) { return part[i / (kHalf / 4)][i % (kHalf / 4)]; }
    __device__ float operator[](int i) const { return part[i / (kHalf / 4)][i % (kHalf / 4)]; }
};

// Rows of the accumulators: a lane has elements of two heads, lane / 4 and 8 more.
struct RowPair {
    int head[2];

    __device__ RowPair() {
        const int thread = fresh_lane(static_cast<int>(threadIdx.x));
        head[0] = thread / 32 % 4 * 16 + thread % 32 / 4;
        head[1] = head[0] + 8;
    }
};

// Multiplies accumulators by a factor for each of the two rows.
__device__ __forceinline__ void scale_rows(Output& o, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) o[i] *= i % 4 < 2 ? upper : lower;
}

__device__ __forceinline__ void rescale(Output& o, float upper, float lower) {
    if (!__all_sync(~0u, upper == 1.f && lower == 1.f)) scale_rows(o, upper, lower);
}

// Partial output of a cut row, FP32 in paired order.
__device__ __forceinline__ void store_partial(const Cuts& cuts, int32_t slot, int block_heads,
                                              int first_group, const RowPair& rows,
                                              const Output& o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (rows.head[h] >= block_heads) continue;
        float* out = cuts.out(slot, rows.head[h]) + first_group * kGroupDims + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < kHalf / kGroupDims; ++j) {
            *reinterpret_cast<float2*>(out + j * kGroupDims) =
                make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
        }
    }
}

// A warp's 16 heads of 256 columns, in shared memory: rows of 512 bytes, of which 16-byte chunk c
// of row r lies at c ^ r % 8.
inline constexpr int kStagedRowBytes = kHalf * 2;
inline constexpr int kStagedBytes = 16 * kStagedRowBytes;

__device__ __forceinline__ void stage_output(const Output& o, float upper, float lower,
                                             uint8_t* to) {
    const int lane = fresh_lane(static_cast<int>(threadIdx.x % 32));
    // Of four 8 x 8 blocks this lane addresses row lane % 8 of block lane / 8: heads from 0 or 8
    // on, then the same of the next 8 columns.
    uint8_t* row = to + (lane % 16) * kStagedRowBytes;
    const int first = (lane / 16 ^ lane % 8) << 4;
#pragma unroll
    for (int j = 0; j < kHalf / kGroupDims; j += 2) {
        const int at = (first ^ j % 8 << 4) + j / 8 * 128;
        cute::SM90_U32x4_STSM_N::copy(pack_bf16(o[4 * j] * upper, o[4 * j + 1] * upper),
                                      pack_bf16(o[4 * j + 2] * lower, o[4 * j + 3] * lower),
                                      pack_bf16(o[4 * j + 4] * upper, o[4 * j + 5] * upper),
                                      pack_bf16(o[4 * j + 6] * lower, o[4 * j + 7] * lower),
                                      *reinterpret_cast<cute::uint128_t*>(row + at));
    }
}

// Stores a warp's 16 heads. from: staged; null: zeros.
template <int kFirstGroup>
__device__ __forceinline__ void store_rows(const AttendParams& p, const Piece& piece,
                                           const uint8_t* from) {
    const int lane = fresh_lane(static_cast<int>(threadIdx.x % 32));
    const int first = piece.head_block * kHeadBlock + threadIdx.x / 32 % kWarps * 16;
    const float* cos_sin = kFirstGroup + 31 >= kFirstRotated ? derotation(p, piece.row) : nullptr;
    uint16_t* out = p.out_bf16.at(piece.row, first);
    const auto staged = [&](int r) {
        return *reinterpret_cast<const uint4*>(from + r * kStagedRowBytes + 16 * (lane ^ r % 8));
    };
    if (from != nullptr && cos_sin == nullptr && first + 16 <= p.heads) {
        constexpr int kAtATime = 4;
#pragma unroll 1
        for (int r = 0; r < 16; r += kAtATime) {
            uint4 x[kAtATime];
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) x[i] = staged(r + i);
#pragma unroll
            for (int i = 0; i < kAtATime; ++i, out += p.out_bf16.head_stride)
                store_group(out, kFirstGroup + lane, natural_order(x[i]), nullptr);
        }
        return;
    }
#pragma unroll 1
    for (int r = 0; r < 16 && first + r < p.heads; ++r, out += p.out_bf16.head_stride) {
        const uint4 x = from != nullptr ? natural_order(staged(r)) : make_uint4(0, 0, 0, 0);
        store_group(out, kFirstGroup + lane, x, cos_sin);
    }
}

enum class Finished { Partial, Empty, Staged };

// A warp's place in the tile that was multiplied last: nobody reads these columns of it any more.
template <int kFirstGroup>
__device__ __forceinline__ uint8_t* staging(uint8_t* tile) {
    return tile + kFirstGroup / 8 * kTilePanelBytes + threadIdx.x / 32 % kWarps * kStagedBytes;
}

// The end of a piece, for a consumer's 256 columns: a partial result goes out at once, a finished
// one is put down, if there is one. tile: null if none was multiplied.
template <int kFirstGroup>
__device__ __forceinline__ Finished stage(const Cuts& cuts, const SplitPlan& plan,
                                          const Piece& piece, const float* factor, uint8_t* tile,
                                          Output& o) {
    const RowPair rows;
    if (cuts.count(piece.row) != 0) {
        scale_rows(o, factor[rows.head[0]], factor[rows.head[1]]);
        store_partial(cuts, cuts.slot(piece.row, piece.head_block, piece.split, piece.first),
                      plan.block_heads, kFirstGroup, rows, o);
        return Finished::Partial;
    }
    if (tile == nullptr) return Finished::Empty;
    stage_output(o, factor[rows.head[0]], factor[rows.head[1]], staging<kFirstGroup>(tile));
    __syncwarp();
    return Finished::Staged;
}

template <int kFirstGroup>
__device__ __forceinline__ void store(const AttendParams& p, const Piece& piece, Finished what,
                                      uint8_t* tile) {
    if (what == Finished::Partial) return;
    store_rows<kFirstGroup>(p, piece,
                            what == Finished::Empty ? nullptr : staging<kFirstGroup>(tile));
}

}  // namespace flash_csa::sm90::many_heads
