// Compression of any batch, for what has no kernel of its own: other records, a bias of V4.1, short
// steps of ratio 4, and index keys of every other kind. A block owns consecutive rows and computes
// the entries that they close.
//
//   in   kv, gate, tail, batch, slots, weights     out  main and index pages, latent_out, tail
//
// Up to 8 entries at a time:
//   block    pool, two channels a thread -> BF16 in shared memory
//   warps    an entry each: norm -> latent -> RoPE -> main record
//   block    key projection, 16 keys a warp, the weight copied to shared memory meanwhile
//   warps    key norm -> RoPE -> Hadamard -> index record
// Floor of a short step: three dependent reads (batch, request, rows) of about 0.7 us each.
#include "sm90/common/dependents.cuh"
#include "sm90/common/launch.h"
#include "sm90/compress/compress.cuh"
#include "sm90/compress/key.cuh"
#include "sm90/compress/pool.cuh"
#include "sm90/compress/projection.cuh"
#include "sm90/compress/tail.cuh"
#include "sm90/compress/words.cuh"

namespace flash_csa::sm90 {
namespace {

constexpr int kThreads = kPoolThreads;
constexpr int kWarps = kPoolEntries;  // an entry each
static_assert(kThreads == 32 * kWarps);
constexpr int kWindow = 32;  // rows that a warp looks at together
static_assert(kWarps == kKeyTiles);

template <int kDim>
struct alignas(16) Shared {
    alignas(16) uint16_t latent[kWarps][kDim + kLatentStride - kHeadDim];  // pooled values before
    PoolShared pool;
    alignas(16) float key[kWarps][kIndexDim];
    alignas(16) uint16_t key_row[kWarps][kIndexDim];
};

constexpr int ratio_of(Pooling kind) {
    return kind == Pooling::None      ? 1
           : kind == Pooling::Pair    ? 2
           : kind == Pooling::Overlap ? 4
                                      : kGroupSpan;
}

// As many as registers without spills allow.
constexpr int blocks_per_sm(Pooling kind) { return kind <= Pooling::Pair ? 3 : 2; }

template <int kDim>
__device__ void project_keys(Shared<kDim>& shared, const KeyWeight& weight, int warp, int lane) {
    KeySums sums = {};
    const uint16_t* latents = latent_row(shared.latent[0], kWarps, lane);
    const uint16_t* weights = weight_row(weight, warp, lane);
#pragma unroll
    for (int b = 0; b < kMmaBlocks; ++b) {
        uint32_t x[4];
        load_matrices(latents + b * kMmaChannels, x);
        add_block(sums, x, weights, b);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        *reinterpret_cast<float2*>(&shared.key[lane / 4][warp * kTileKeys + n * 8 + lane % 4 * 2]) =
            make_float2(round_bf16(key_sum(sums, n, 0)), round_bf16(key_sum(sums, n, 1)));
    }
}

// Norm, RoPE and record of a projected key in a warp: lane l has channels 4l .. 4l + 3.
__device__ void finish_key(const CompressParams& p, const Entry& e, int lane, const float* key,
                           uint16_t* row) {
    const float4 weight = *reinterpret_cast<const float4*>(p.key_norm_weight + 4 * lane);
    const uint2 pairs = norm_key(key, weight, p.eps, lane);
    if (p.rotate || p.index.record != RecordId::IndexFp4) {
        *reinterpret_cast<uint2*>(row + 4 * lane) =
            make_uint2(canonical_bf16x2(pairs.x), canonical_bf16x2(pairs.y));
        __syncwarp();
        return store_key(p, e, lane, row);
    }
    KeyTurn turn;
    turn.load(p.cos_sin.at(e.index * p.ratio), lane);
    write_key(p, p.entry_slots[e.row], lane, pairs, turn);
}

// Tail rows that entries have read. Not the first warp's work: it may have the only key.
__device__ void replace_rows(const CompressParams& p, const Entry* entries, int count) {
    const int thread = static_cast<int>(threadIdx.x) - 32;
    if (thread < 0) return;
    for (int i = 0; i < count; ++i) {
        replace_read_rows(p, entries[i],
                          [&](float* to_kv, float* to_gate, const float* kv, const float* gate) {
                              for (int c = thread; c < p.dim; c += kThreads - 32) {
                                  to_kv[c] = kv[c];
                                  to_gate[c] = gate[c];
                              }
                          });
    }
}

// The rows of a window that are to be kept. Not the first warp's work either.
__device__ void keep_rows(const CompressParams& p, int64_t window, int64_t end, int lane) {
    const int thread = static_cast<int>(threadIdx.x) - 32;
    if (thread < 0) return;
    uint32_t kept = __ballot_sync(kAllLanes, window + lane < end && keeps_row(p, window + lane));
    for (; kept != 0; kept &= kept - 1)
        keep_row(p, window + __ffs(static_cast<int>(kept)) - 1, thread, kThreads - 32);
}

// A decode step's row, while the batch is looked up.
__device__ __forceinline__ void prefetch_row(const CompressParams& p, int64_t row) {
    using Prefetch = cute::SM90_BULK_COPY_G2S::PREFETCH;
    if (p.kv_bf16) {
        Prefetch::copy(p.kv_bf16.row(row), kHeadDim * sizeof(uint16_t));
    } else {
        const int bytes = p.dim * (p.overlap ? 2 : 1) * static_cast<int>(sizeof(float));
        Prefetch::copy(p.kv.row(row), bytes);
        Prefetch::copy(p.gate.row(row), bytes);
    }
}

__device__ __forceinline__ Entry entry_of_lane(const Entry& own, int lane) {
    Entry e;
    e.row = __shfl_sync(kAllLanes, own.row, lane);
    e.position = __shfl_sync(kAllLanes, static_cast<int>(own.position), lane);
    e.request = __shfl_sync(kAllLanes, static_cast<int>(own.request), lane);
    e.index = __shfl_sync(kAllLanes, static_cast<int>(own.index), lane);
    e.first = __shfl_sync(kAllLanes, static_cast<int>(own.first), lane);
    return e;
}

// kKind: how entries are pooled. kKeyed: with a key projection.
template <Pooling kKind, int kDim, bool kKeyed>
__global__ void __launch_bounds__(kThreads, kKeyed ? 1 : blocks_per_sm(kKind))
    rows_kernel(CompressParams p, int rows_per_block) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    Shared<kDim>& shared =
        *reinterpret_cast<Shared<kDim>*>(dynamic + (kKeyed ? sizeof(KeyWeight) : 0));
    p.ratio = ratio_of(kKind);
    p.overlap = kKind == Pooling::Overlap;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KeyWeight& weight = *reinterpret_cast<KeyWeight*>(dynamic);  // with kKeyed alone
    if (kKeyed && threadIdx.x == 0) weight.init();
    if (kKeyed) __syncthreads();
    allow_dependents();
    wait_for_previous();
    if (kKeyed) weight.fill<kThreads>(p);
    const int64_t begin = int64_t{blockIdx.x} * rows_per_block;
    const int64_t end = min(begin + rows_per_block, int64_t{p.batch.rows});
    if (threadIdx.x == kThreads - 1 && rows_per_block == 1) prefetch_row(p, begin);
    for (int64_t window = begin; window < end; window += kWindow) {
        Entry own = {};
        const bool closes = window + lane < end && closes_entry(p, window + lane, &own);
        uint32_t mask = __ballot_sync(kAllLanes, closes);
        while (mask != 0) {
            __syncthreads();  // the entries before are done with
            // Every warp takes the same entries off the mask, and its own by number.
            const int count = min(__popc(mask), kWarps);
            int from = 0;
            for (int i = 0; i < count; ++i) {
                if (i <= warp) from = __ffs(static_cast<int>(mask)) - 1;
                mask &= mask - 1;
            }
            const Entry entry = entry_of_lane(own, from);
            const bool active = warp < count;
            pool_entries<kKind, kDim>(p, count, entry, shared.pool, shared.latent);
            __syncthreads();
            if (active) finish_entry<kDim>(p, entry, lane, shared.latent[warp]);
            if constexpr (kKeyed) {
                __syncthreads();
                weight.wait();
                project_keys<kDim>(shared, weight, warp, lane);
                __syncthreads();
                if (active && stores_key(p, entry))
                    finish_key(p, entry, lane, shared.key[warp], shared.key_row[warp]);
            }
            if (kKind != Pooling::None && p.tail.data != nullptr)
                replace_rows(p, shared.pool.entries, count);
        }
        if (kKind != Pooling::None && p.tail.data != nullptr) keep_rows(p, window, end, lane);
    }
    if constexpr (kKeyed) {  // no block ends before its copies
        weight.wait();
    }
}

// Rows of a block: one in a decode step; in long ones as many as its entries at a time close.
int rows_per_block(const CompressParams& p, int num_sms) {
    int rows = 1;
    while (rows < kWindow && int64_t{rows} * 2 * num_sms < p.batch.rows) rows *= 2;
    return rows;
}

template <Pooling kKind, int kDim, bool kKeyed>
cudaError_t launch_rows(const CompressParams& p, int num_sms, cudaStream_t stream) {
    const int rows = rows_per_block(p, num_sms);
    const size_t shared = sizeof(Shared<kDim>) + (kKeyed ? sizeof(KeyWeight) : 0);
    return launch_after(rows_kernel<kKind, kDim, kKeyed>, blocks_for(p.batch.rows, rows), kThreads,
                        shared, stream, p, rows);
}

template <Pooling kKind>
cudaError_t launch_kind(const CompressParams& p, int num_sms, cudaStream_t stream) {
    if (p.dim == kIndexDim) {
        if constexpr (kKind != Pooling::None)
            return launch_rows<kKind, kIndexDim, false>(p, num_sms, stream);
    }
    if (p.key_weight) return launch_rows<kKind, kHeadDim, true>(p, num_sms, stream);
    return launch_rows<kKind, kHeadDim, false>(p, num_sms, stream);
}

}  // namespace

cudaError_t compress_rows(const CompressParams& p, int num_sms, cudaStream_t stream) {
    switch (p.ratio) {
        case 1:
            return launch_kind<Pooling::None>(p, num_sms, stream);
        case 2:
            return launch_kind<Pooling::Pair>(p, num_sms, stream);
        case 4:
            return launch_kind<Pooling::Overlap>(p, num_sms, stream);
        default:
            return launch_kind<Pooling::Group>(p, num_sms, stream);
    }
}

}  // namespace flash_csa::sm90
