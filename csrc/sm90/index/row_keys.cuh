// The keys of a warp of score_single.cuh: a ring of chunks in shared memory that the warp alone
// fills, by bulk copies from pages, and reads.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/index/key_ring.cuh"
#include "sm90/index/row_query.cuh"

namespace flash_csa::sm90 {

constexpr int32_t kChunkKeys = 64;  // of a copy: a page of the usual size
constexpr int32_t kChunkCodes = kChunkKeys * kKeyBytes;
constexpr int32_t kChunkBytes = kChunkKeys * (kKeyBytes + kScaleBytes);
constexpr int32_t kHalfKeys = 32;  // of a chunk: one score a lane

struct RowChunk {
    uint8_t bytes[kChunkBytes];  // codes, then scale words

    __device__ __forceinline__ uint32_t scales(int32_t key) const {
        return reinterpret_cast<const uint32_t*>(bytes + kChunkCodes)[key];
    }
};

template <int kStages>
struct alignas(128) WarpKeys {
    RowChunk chunks[kStages];
    uint32_t shifts[kHalfKeys];  // a byte for each group: its exponent - the key's lowest, times 16
    uint32_t present[kStages];   // bit i: keys 8 i .. 8 i + 7 are on a page
    Barrier full[kStages];

    // One warp.
    __device__ __forceinline__ void init() {
        const int32_t lane = threadIdx.x % 32;
        if (lane < kStages) full[lane].init(1);
        cutlass::arch::fence_barrier_init();
        __syncwarp();
    }
};

class ChunkCopier {
  public:
    __device__ __forceinline__ explicit ChunkCopier(const IndexScoresParams& p) : p_(p) {
        page_shift_ = __ffs(p.index.page_size) - 1;
    }

    // The page of a chunk, -1 where there is none; of pages smaller than a chunk one a lane.
    // Entries of `pages` exist for the first `columns` columns.
    __device__ __forceinline__ int32_t find(const int32_t* pages, int32_t columns,
                                            int32_t chunk) const {
        const int32_t lane = threadIdx.x % 32;
        const int32_t key = p_.index.page_size < kChunkKeys ? lane << page_shift_ : 0;
        const int32_t column = chunk * kChunkKeys + key;
        if (key >= kChunkKeys || column >= columns) return -1;
        return __ldg(pages + (column >> page_shift_));
    }

    // One warp. The chunk that was there is read.
    template <int kStages>
    __device__ __forceinline__ void copy(int32_t page, int32_t chunk, WarpKeys<kStages>& keys,
                                         int32_t stage) const {
        const bool copies = page >= 0 && page < p_.index.num_pages;
        uint8_t* to = keys.chunks[stage].bytes;
        Barrier& full = keys.full[stage];
        uint32_t& present = keys.present[stage];
        if (p_.index.page_size != kChunkKeys) {
            copy_parts(p_.index, page, chunk, copies, to, full, present);
        } else if (cute::elect_one_sync()) {
            present = copies ? ~0u : 0u;
            full.arrive_and_expect_tx(copies ? kChunkBytes : 0);
            if (copies) {
                copy_bytes(p_.index.data + page * p_.index.page_stride, to, kChunkBytes, full);
            }
        }
        __syncwarp();
    }

  private:
    static __device__ __forceinline__ void copy_bytes(const uint8_t* from, uint8_t* to,
                                                      int32_t bytes, Barrier& full) {
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&full), to, bytes);
    }
    // Pages of other sizes than a chunk: codes and scale words apart, a page a lane.
    static __device__ __noinline__ void copy_parts(const ConstPages& index, int32_t page_number,
                                                   int32_t chunk, bool copies, uint8_t* to,
                                                   Barrier& full, uint32_t& present) {
        const int32_t lane = threadIdx.x % 32;
        const int32_t size = index.page_size, keys = min(size, kChunkKeys);
        const int32_t key = lane * keys;  // of the chunk
        copies = copies && key < kChunkKeys;
        const uint32_t eighths = 0xffu >> (8 - keys / 8) << (key / 8 & 7);
        const uint32_t all = __reduce_or_sync(~0u, copies ? eighths : 0);
        const int32_t pages = __popc(__ballot_sync(~0u, copies));
        if (lane == 0) {
            present = all;
            full.arrive_and_expect_tx(pages * keys * (kKeyBytes + kScaleBytes));
        }
        __syncwarp();
        if (!copies) return;
        const uint8_t* page = index.data + page_number * index.page_stride;
        const int32_t first = chunk * kChunkKeys & (size - 1) & ~(kChunkKeys - 1);  // of the page
        copy_bytes(page + first * kKeyBytes, to + key * kKeyBytes, keys * kKeyBytes, full);
        copy_bytes(page + size * kKeyBytes + first * kScaleBytes,
                   to + kChunkCodes + key * kScaleBytes, keys * kScaleBytes, full);
    }

    const IndexScoresParams& p_;
    int32_t page_shift_;
};

}  // namespace flash_csa::sm90
