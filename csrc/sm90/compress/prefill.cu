// Compression of long steps of ratio 1 and 2 to MainFp4 and IndexFp4 records.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// A group of 4 warps works on 16 entries at a time, 4 a warp in octets (octet.cuh). Two barriers of
// the group in a tile; the 4 groups of an SM drift apart, so that one encodes while others load:
//   warp     read rows, pool -> BF16 -> shared memory (the lane's own place), sums of squares
//            norm -> latent -> RoPE -> codes -> main record
//   group    keys: 32 a warp, both operands from shared memory
//   warp     norm -> RoPE -> index record
// Floor: 8 KiB an entry of ratio 2, 1 KiB of ratio 1, and 356 bytes out.
#include "sm90/common/launch.h"
#include "sm90/compress/octet.cuh"
#include "sm90/compress/pool_two.cuh"
#include "sm90/compress/projection.cuh"
#include "sm90/compress/tail.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kGroups = 4;  // 128 registers a thread
constexpr int kWarps = kGroups * kGroupWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpEntries = 4;
constexpr int kTile = kGroupWarps * kWarpEntries;              // entries of a tile
constexpr int kPairs = kHeadDim / 64;                          // pairs of blocks of a row
constexpr int kWarpTiles = kKeyTiles / kGroupWarps;            // of keys
constexpr int kSlotBytes = record(RecordId::MainFp4).bytes();  // 72 words: entries 8 banks apart
static_assert(kTile == kMmaEntries);

struct Group {
    alignas(16) uint16_t latent[kTile][kLatentStride];  // pooled values before
    alignas(16) uint8_t slot[kTile][kSlotBytes];        // an entry's main record, then its key
    uint8_t list[kGroupWarps][32];                      // lanes whose rows close an entry
};

struct Shared {
    KeyWeight weight;
    Group groups[kGroups];
    alignas(16) float norm_weight[kHeadDim];
    float key_norm_weight[kIndexDim];
};
static_assert(sizeof(Shared) <= 227 * 1024);

// An octet's entry.
struct OctetEntry {
    Entry e;
    int32_t slot;
    bool active;  // else it repeats another one and stores nothing
};

struct RowPair {
    float4 kv[2][2];  // [row][block of the pair]
    float4 gate[2][2];
};

__device__ __forceinline__ void load_pair(const PoolRow (&rows)[2], int pair, RowPair& to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int c = 64 * pair + 32 * b;
            to.gate[r][b] = __ldcs(reinterpret_cast<const float4*>(rows[r].gate + c));
            to.kv[r][b] = __ldcs(reinterpret_cast<const float4*>(rows[r].kv + c));
        }
    }
}

__device__ __forceinline__ void spread(float4 x, float* to) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

__device__ __forceinline__ uint4 pool_pair(const RowPair& x) {
    float kv0[8], kv1[8], gate0[8], gate1[8], pooled[8];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        spread(x.kv[0][b], kv0 + 4 * b);
        spread(x.kv[1][b], kv1 + 4 * b);
        spread(x.gate[0][b], gate0 + 4 * b);
        spread(x.gate[1][b], gate1 + 4 * b);
    }
    pool_two(kv0, kv1, gate0, gate1, pooled);
    return pack_blocks(pooled);
}

// A lane's place of pair q in the row of its entry, which begins at the lane's first channel.
__device__ __forceinline__ void put_pair(uint16_t* row, int q, uint4 packed) {
    *reinterpret_cast<uint2*>(row + 64 * q) = make_uint2(packed.x, packed.y);
    *reinterpret_cast<uint2*>(row + 64 * q + 32) = make_uint2(packed.z, packed.w);
}
__device__ __forceinline__ uint4 get_pair(const uint16_t* row, int q) {
    const uint2 a = *reinterpret_cast<const uint2*>(row + 64 * q);
    const uint2 b = *reinterpret_cast<const uint2*>(row + 64 * q + 32);
    return make_uint4(a.x, a.y, b.x, b.y);
}

// Pools an octet's entry into its row, which begins at the lane's first channel; returns the sum of
// squares.
__device__ __forceinline__ float copy_entry(const CompressParams& p, const OctetEntry& octet,
                                            int first, uint16_t* row) {
    const uint16_t* from = p.kv_bf16.row(octet.e.row) + first;
    uint4 pairs[kPairs];
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
        const uint2 a = __ldcs(reinterpret_cast<const uint2*>(from + 64 * q));
        const uint2 b = __ldcs(reinterpret_cast<const uint2*>(from + 64 * q + 32));
        pairs[q] = make_uint4(a.x, a.y, b.x, b.y);
    }
    float chain[4] = {};
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
        float x[8];
        unpack_blocks(pairs[q], x);
        add_squares(x, chain);
        put_pair(row, q, pairs[q]);
    }
    return sum_chains(chain);
}

__device__ __forceinline__ float pool_entry(const CompressParams& p, const OctetEntry& octet,
                                            int first, uint16_t* row) {
    PoolRow rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows[r] = pool_row(p, octet.e, octet.e.position - 1 + r);
        rows[r].kv += first;
        rows[r].gate += first;
    }
    float chain[4] = {};
    const auto keep = [&](int q, uint4 packed) {
        float x[8];
        unpack_blocks(packed, x);
        add_squares(x, chain);
        put_pair(row, q, packed);
    };
    RowPair even, odd;
    load_pair(rows, 0, even);
    load_pair(rows, 1, odd);
#pragma unroll 1
    for (int q = 0; q < kPairs; q += 2) {
        const uint4 a = pool_pair(even);
        if (q + 2 < kPairs) load_pair(rows, q + 2, even);
        keep(q, a);
        const uint4 b = pool_pair(odd);
        if (q + 2 < kPairs) load_pair(rows, q + 3, odd);
        keep(q + 1, b);
    }
    if (octet.active) {
        replace_read_rows(
            p, octet.e, [first](float* to_kv, float* to_gate, const float* kv, const float* gate) {
                for (int c = first; c < kHeadDim; c += 32) {
                    *reinterpret_cast<float4*>(to_kv + c) =
                        *reinterpret_cast<const float4*>(kv + c);
                    *reinterpret_cast<float4*>(to_gate + c) =
                        *reinterpret_cast<const float4*>(gate + c);
                }
            });
    }
    return sum_chains(chain);
}

// Pooled values to latents, and the main record to the entry's slot.
__device__ __forceinline__ void finish_pairs(int octet, float factor, const float* norm_weight,
                                             const float* cos_sin, uint16_t* latent_out,
                                             uint16_t* row, uint8_t* slot) {
#pragma unroll 2
    for (int q = 0; q < kPairs; ++q) {
        float x[8];
        unpack_blocks(get_pair(row, q), x);
        uint4 packed = norm_pair(x, factor, norm_weight, q, octet);
        put_pair(row, q, packed);
        if (latent_out != nullptr) {
            put_pair(latent_out, q,
                     make_uint4(canonical_bf16x2(packed.x), canonical_bf16x2(packed.y),
                                canonical_bf16x2(packed.z), canonical_bf16x2(packed.w)));
        }
        if (q == kPairs - 1) packed = rotate_last_pair(packed, cos_sin, octet);
        PairCodes pair = encode_main_pair(packed);
        if (pair.bad != 0) pair.spoil();
        uint16_t* codes = reinterpret_cast<uint16_t*>(slot + 32 * q) + octet;
        codes[0] = static_cast<uint16_t>(pair.codes);
        codes[8] = static_cast<uint16_t>(pair.codes >> 16);
        if (octet % 4 == 0) {
            uint8_t* scales = slot + record(RecordId::MainFp4).data_bytes + 4 * q + octet / 4;
            scales[0] = static_cast<uint8_t>(pair.scales);
            scales[2] = static_cast<uint8_t>(pair.scales >> 8);
        }
    }
}

__device__ __forceinline__ void finish_entry(const CompressParams& p, const OctetEntry& octet,
                                             float sum, const float* norm_weight, int lane,
                                             uint16_t* row, uint8_t* slot) {
    const int o = lane % 8;
    const float factor = rsqrt_ieee(add_rn(mul_rn(sum, 1.0f / kHeadDim), p.eps));
    uint16_t* latent_out =
        octet.active && p.latent_out ? p.latent_out.row(octet.e.row) + 4 * o : nullptr;
    finish_pairs(o, factor, norm_weight, p.cos_sin.at(octet.e.index * p.ratio), latent_out, row,
                 slot);
    __syncwarp();
    if (!octet.active || p.main.data == nullptr || !p.main.holds(octet.slot)) return;
    constexpr Record r = record(RecordId::MainFp4);
    static_assert(r.order == PageOrder::TokenMajor && r.bytes() % 16 == 0);
    uint4* to = reinterpret_cast<uint4*>(p.main.row(r, octet.slot));
    for (int i = o; i < r.bytes() / 16; i += 8) to[i] = reinterpret_cast<const uint4*>(slot)[i];
}

// Keys of a warp, as BF16 rows in the slots of the tile's entries.
__device__ __forceinline__ void project_keys(const KeyWeight& weight, Group& group, int warp,
                                             int lane) {
    KeySums sums[kWarpTiles] = {};
    const uint16_t* latents = latent_row(group.latent[0], kMmaEntries, lane);
    const uint16_t* weights = weight_row(weight, warp * kWarpTiles, lane);
#pragma unroll 8
    for (int b = 0; b < kMmaBlocks; ++b) {
        uint32_t x[4];
        load_matrices(latents + b * kMmaChannels, x);
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
            add_block(sums[m], x, weights + m * kTileKeys * kLatentStride, b);
    }
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int word = (warp * kWarpTiles + m) * kTileKeys / 2 + n * 4 + lane % 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                reinterpret_cast<uint32_t*>(group.slot[lane / 4 + 8 * i])[word] =
                    pack_bf16(key_sum(sums[m], n, 2 * i), key_sum(sums[m], n, 2 * i + 1));
            }
        }
    }
}

// Norm, RoPE and record of an octet's key.
__device__ __forceinline__ void finish_key(const CompressParams& p, const OctetEntry& octet,
                                           const float* norm_weight, const uint16_t* row,
                                           int lane) {
    const int o = lane % 8;
    float x[2][8], chain[4] = {};
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        unpack_blocks(get_pair(row, q), x[q]);
        add_squares(x[q], chain);
    }
    const float mean = mul_rn(sum_chains(chain), 1.0f / kIndexDim);
    const float factor = rsqrt_ieee(add_rn(mean, p.eps));
    const uint4 low = norm_pair(x[0], factor, norm_weight, 0, o);
    const uint4 high = rotate_last_pair(norm_pair(x[1], factor, norm_weight, 1, o),
                                        p.cos_sin.at(octet.e.index * p.ratio), o);
    const PairCodes a = encode_index_pair(low), b = encode_index_pair(high);
    // Lane t of 4 gets block t from all: 8 bytes.
    uint32_t codes[4] = {a.codes, a.codes >> 16, b.codes, b.codes >> 16};
    transpose_quad(codes, o);
    if (!octet.active || !p.index.holds(octet.slot)) return;
    constexpr Record r = record(RecordId::IndexFp4);
    *reinterpret_cast<uint2*>(p.index.row(r, octet.slot) + o % 4 * 16 + o / 4 * 8) = make_uint2(
        __byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410));
    if (o == 0)
        *reinterpret_cast<uint32_t*>(p.index.scales(r, octet.slot)) = a.scales | b.scales << 16;
}

// Entry `number` of the window's closing rows; own: what the lane knows of its row.
template <int kRatio>
__device__ __forceinline__ OctetEntry octet_entry(const CompressParams& p, const uint8_t* list,
                                                  int64_t window, const Entry& own, int number,
                                                  int count) {
    OctetEntry octet;
    octet.active = number < count;
    const int from = list[octet.active ? number : count - 1];
    octet.e.row = window + from;
    octet.e.position = __shfl_sync(kAllLanes, static_cast<int>(own.position), from);
    octet.e.request = __shfl_sync(kAllLanes, static_cast<int>(own.request), from);
    octet.e.index = octet.e.position / kRatio;
    octet.e.first = octet.e.position - (kRatio - 1);
    octet.slot = p.entry_slots[octet.e.row];
    return octet;
}

__device__ __forceinline__ void sync_group(int group) {
    cutlass::arch::NamedBarrier::sync(kGroupThreads, group);
}

template <int kRatio>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(CompressParams p) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kGroupWarps;
    const int number = threadIdx.x / kGroupThreads;
    p.ratio = kRatio;
    if (p.key_weight) {
        if (threadIdx.x == 0) shared.weight.init();
        if (threadIdx.x < kIndexDim)
            shared.key_norm_weight[threadIdx.x] = p.key_norm_weight[threadIdx.x];
    }
    shared.norm_weight[threadIdx.x] = p.norm_weight[threadIdx.x];
    static_assert(kThreads == kHeadDim);
    __syncthreads();
    if (p.key_weight) shared.weight.fill(p, kThreads);
    Group& group = shared.groups[number];
    const int place = warp * kWarpEntries + lane / 8, first = lane % 8 * 4;
    uint16_t* latent = group.latent[place] + first;
    constexpr int kWindow = kTile * kRatio;
    const int64_t stride = int64_t{gridDim.x} * kGroups * kWindow;
    int64_t window = (int64_t{number} * gridDim.x + blockIdx.x) * kWindow;
    for (; window < p.batch.rows; window += stride) {
        const int64_t row = window + lane;
        const bool mine = lane < kWindow && row < p.batch.rows;
        Entry own = {};
        const uint32_t closing = __ballot_sync(kAllLanes, mine && closes_entry(p, row, &own));
        __syncwarp();
        if (closing >> lane & 1)
            group.list[warp][__popc(closing & ((1u << lane) - 1))] = static_cast<uint8_t>(lane);
        __syncwarp();
        const int count = __popc(closing);
        for (int from = 0; from < count; from += kTile) {
            const OctetEntry octet =
                octet_entry<kRatio>(p, group.list[warp], window, own, from + place, count);
            if (kRatio == 1 && lane % 8 == 7) {  // needed at the row's end, which comes soon
                cute::SM90_BULK_COPY_G2S::PREFETCH::copy(p.cos_sin.at(octet.e.index * kRatio),
                                                         kRopeDims * sizeof(float));
            }
            const float sum = kRatio == 1 ? copy_entry(p, octet, first, latent)
                                          : pool_entry(p, octet, first, latent);
            finish_entry(p, octet, sum, shared.norm_weight, lane, latent, group.slot[place]);
            if (!p.key_weight) continue;
            sync_group(number);  // latents are there, records have left their slots
            shared.weight.wait();
            project_keys(shared.weight, group, warp, lane);
            sync_group(number);  // keys are there, latents may go
            finish_key(p, octet, shared.key_norm_weight,
                       reinterpret_cast<const uint16_t*>(group.slot[place]) + first, lane);
            __syncwarp();  // before the next records
        }
        if (kRatio == 1 || p.tail.data == nullptr) continue;
        uint32_t kept = __ballot_sync(kAllLanes, mine && keeps_row(p, row));
        for (; kept != 0; kept &= kept - 1)
            keep_row(p, window + __ffs(static_cast<int>(kept)) - 1,
                     static_cast<int>(threadIdx.x) % kGroupThreads, kGroupThreads);
    }
    if (p.key_weight) shared.weight.wait();  // also a block without entries
}

template <int kRatio>
cudaError_t launch_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int tiles = (p.batch.rows + kTile * kRatio - 1) / (kTile * kRatio);
    const dim3 grid(static_cast<unsigned>(tiles < num_sms ? tiles : num_sms));
    return launch(prefill_kernel<kRatio>, grid, kThreads, sizeof(Shared), stream, p);
}

}  // namespace

cudaError_t compress_prefill(const CompressParams& p, int num_sms, cudaStream_t stream) {
    return p.ratio == 1 ? launch_prefill<1>(p, num_sms, stream)
                        : launch_prefill<2>(p, num_sms, stream);
}

}  // namespace flash_csa::sm90
