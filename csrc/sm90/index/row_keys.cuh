// The keys of a warp of score_single.cuh or score_rows.cuh: a ring of chunks in shared memory that
// the warp alone fills, by bulk copies from pages, and reads.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/common/fresh.cuh"
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

// What is in a stage of a ring.
struct alignas(16) ChunkPlace {
    int32_t row, first, count;  // first column of the chunk; columns of the row
    uint32_t present;           // bit i: keys 8 i .. 8 i + 7 are on a page
};

template <int kStages>
struct alignas(128) WarpKeys {
    RowChunk chunks[kStages];
    uint32_t shifts[kChunkKeys];  // a byte for each group: its exponent - the key's lowest, x 16
    float rest[kChunkKeys];       // what is left of the scales; NaN for an entry on no page
    int32_t pages[32];            // that chunks to come have, one a lane: ChunkCopier::find
    ChunkPlace places[kStages];
    Barrier full[kStages];

    // One warp.
    __device__ __forceinline__ void init() {
        const int32_t lane = threadIdx.x % 32;
        if (lane < kStages) full[lane].init(1);
        cutlass::arch::fence_barrier_init();
        __syncwarp();
    }
};

// Which chunk of a unit is the warp's.
__device__ __forceinline__ int32_t chunk_of(int32_t unit) {
    return kUnitKeys / kChunkKeys * unit + static_cast<int32_t>(threadIdx.x / 32 % 4);
}

// ---- Copies

class ChunkCopier {
  public:
    __device__ __forceinline__ explicit ChunkCopier(const IndexScoresParams& p) : p_(p) {}

    // A page holds a chunk: 32 look-ups at once are those of 32 chunks. Else they are of one.
    __device__ __forceinline__ bool has_whole() const { return p_.index.page_size >= kChunkKeys; }

    // One warp. Looks up pages of the lanes' chunks, which are neighbours in pages[]; of pages
    // smaller than a chunk, those of one chunk. Entries of `table` exist for the first `columns`
    // columns.
    template <int kStages>
    __device__ __forceinline__ void find(const int32_t* table, int32_t columns, int32_t chunk,
                                         WarpKeys<kStages>& keys) const {
        keep(entry(table, columns, chunk), keys);
    }
    // The two halves of that: what a lane reads of the table, and what is done when it has come.
    __device__ __forceinline__ int32_t entry(const int32_t* table, int32_t columns,
                                             int32_t chunk) const {
        const int32_t size = fresh(p_.index.page_size);  // so that nothing of it is kept for a loop
        const int32_t lane = threadIdx.x % 32;
        const int32_t key = has_whole() ? 0 : lane * size;
        const int32_t column = chunk * kChunkKeys + key;
        const bool is_there = key < kChunkKeys && column < columns;
        return is_there ? __ldg(table + (column >> (__ffs(size) - 1))) : -1;
    }
    template <int kStages>
    __device__ __forceinline__ void keep(int32_t page, WarpKeys<kStages>& keys) const {
        keys.pages[threadIdx.x % 32] = page < p_.index.num_pages ? page : -1;
        __syncwarp();
    }

    // One warp, its first copy: of a page that is a chunk, the one of lane 0. The count is still to
    // be set.
    template <int kStages>
    __device__ __forceinline__ void copy_first(int32_t page, int32_t chunk,
                                               WarpKeys<kStages>& keys) const {
        page = __shfl_sync(~0u, page, 0);
        const bool copies = page >= 0 && page < p_.index.num_pages;
        if (cute::elect_one_sync()) {
            keys.places[0] = {0, chunk * kChunkKeys, 0, copies ? ~0u : 0u};
            copy_page(page, copies, keys.chunks[0].bytes, keys.full[0]);
        }
        __syncwarp();
    }

    // One warp. The chunk that was there is read. number: of the chunk among those looked up.
    template <int kStages>
    __device__ __forceinline__ void copy(int32_t number, int32_t chunk, int32_t row, int32_t count,
                                         WarpKeys<kStages>& keys, int32_t stage) const {
        const int32_t page = keys.pages[(has_whole() ? number : threadIdx.x) % 32];
        const bool copies = page >= 0;
        uint8_t* to = keys.chunks[stage].bytes;
        Barrier& full = keys.full[stage];
        ChunkPlace place = {row, chunk * kChunkKeys, count, copies ? ~0u : 0u};
        if (p_.index.page_size != kChunkKeys) {
            copy_parts(page, place, copies, to, full, keys.places[stage]);
        } else if (cute::elect_one_sync()) {
            keys.places[stage] = place;
            copy_page(page, copies, to, full);
        }
        __syncwarp();
    }

  private:
    static __device__ __forceinline__ void copy_bytes(const uint8_t* from, uint8_t* to,
                                                      int32_t bytes, Barrier& full) {
        cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&full), to, bytes);
    }
    // One thread. A page that is a chunk.
    __device__ __forceinline__ void copy_page(int32_t page, bool copies, uint8_t* to,
                                              Barrier& full) const {
        full.arrive_and_expect_tx(copies ? kChunkBytes : 0);
        if (!copies) return;
        copy_bytes(p_.index.data + page * p_.index.page_stride, to, kChunkBytes, full);
    }
    // Pages of other sizes than a chunk: codes and scale words apart, a page a lane.
    __device__ __forceinline__ void copy_parts(int32_t page, ChunkPlace place, bool copies,
                                               uint8_t* to, Barrier& full, ChunkPlace& out) const {
        const int32_t lane = threadIdx.x % 32;
        const int32_t size = fresh(p_.index.page_size), keys = min(size, kChunkKeys);
        const int32_t key = lane * keys;  // of the chunk
        copies = copies && key < kChunkKeys;
        const uint32_t eighths = 0xffu >> (8 - keys / 8) << (key / 8 & 7);
        place.present = __reduce_or_sync(~0u, copies ? eighths : 0);
        const int32_t pages = __popc(__ballot_sync(~0u, copies));
        if (lane == 0) {
            out = place;
            full.arrive_and_expect_tx(pages * keys * (kKeyBytes + kScaleBytes));
        }
        __syncwarp();
        if (!copies) return;
        const uint8_t* from = p_.index.data + page * p_.index.page_stride;
        const int32_t first = place.first & (size - 1) & ~(kChunkKeys - 1);  // of the page
        copy_bytes(from + first * kKeyBytes, to + key * kKeyBytes, keys * kKeyBytes, full);
        copy_bytes(from + size * kKeyBytes + first * kScaleBytes,
                   to + kChunkCodes + key * kScaleBytes, keys * kScaleBytes, full);
    }

    const IndexScoresParams& p_;
};

// ---- Exponents

// The key, of a half, whose score a lane hands over.
__device__ __forceinline__ int32_t lane_key() {
    const int32_t lane = threadIdx.x % 32;
    return lane % 4 * 8 + lane / 4;
}

// Of a chunk that has come: shifts, rest. Returns whether all its keys fold.
template <int kStages>
__device__ __forceinline__ bool prepare_chunk(WarpKeys<kStages>& keys, int32_t stage) {
    const RowChunk& chunk = keys.chunks[stage];
    const ChunkPlace place = keys.places[stage];
    const uint32_t present = place.present >> threadIdx.x % 4;
    const int32_t visible = place.count - place.first;
    bool folds = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t key = half * kHalfKeys + lane_key();
        const bool here = present >> (4 * half) & 1;
        const uint32_t scales = here && key < visible ? chunk.scales(key) : kUnitScales;
        const uint32_t pairs = __vminu2(scales & 0x00ff00ffu, __byte_perm(scales, 0, 0x4341));
        const uint32_t lowest = min(pairs & 0xffffu, pairs >> 16);
        const uint32_t above = scales - lowest * 0x01010101u;
        static_assert(kMaxRowFold == 2);
        folds = folds && ((above + 0x01010101u) & 0xfcfcfcfcu) == 0;
        folds = folds && is_plain(odd_key_bits(scales));
        keys.shifts[key] = (above << 4) & 0x30303030u;
        keys.rest[key] = here ? power_of_two(lowest + kFoldedScoreExponent) : bits_float(kNanBits);
    }
    __syncwarp();
    return __all_sync(~0u, folds);
}

// ---- Codes

// A of the K steps of a tile: keys 16 tile .. 16 tile + 15 of the chunk. tables: by shift.
template <int kStages>
__device__ __forceinline__ void load_units(const WarpKeys<kStages>& keys, int32_t stage, int tile,
                                           const OffsetUnits* tables,
                                           uint32_t (&out)[kFoldedSteps][4]) {
    const int32_t lane = threadIdx.x % 32;
    const uint4* codes = reinterpret_cast<const uint4*>(keys.chunks[stage].bytes);
    const uint8_t* shifts = reinterpret_cast<const uint8_t*>(keys.shifts);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int32_t at = 4 * (16 * tile + 8 * row) + lane;  // key and group
        const uint4 raw = codes[at];
        const OffsetUnits table = *reinterpret_cast<const OffsetUnits*>(
            reinterpret_cast<const uint8_t*>(tables) + shifts[at]);
        const uint32_t words[kFoldedSteps] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int step = 0; step < kFoldedSteps; ++step) {
            const IntegerWord both = table.word(words[step]);
            out[step][row] = both.low;
            out[step][2 + row] = both.high;
        }
    }
}

}  // namespace flash_csa::sm90
