// Parts of many_heads.cu: shared memory, and who waits for whom.
//
//   slot_full    a slot's records are there             copying warp, bytes  -> converting warp
//   slot_empty   it was read                            converting warp      -> copying warp
//   tile_full    a BF16 tile is there                   converting warps     -> both consumers
//                the first one, if consumers convert it scores               -> both consumers
//   tile_empty   a half of its dims was multiplied      its consumer         -> converting warps
//   peer_empty   that of the peer's tile was            the peer's consumer  -> converting warps
//   piece_full   what the next piece is                 copying warp 0       -> both consumers
//   piece_empty  it is done with                        both consumers       -> copying warp 0,
//                                                                             and scores
//                blocks alone:
//   query_there  the queries of a piece, as they lie    values               -> both consumers
//   query_full   they are in paired order               both consumers       -> scores
//   query_empty  they are multiplied                    scores               -> values
//                pairs:
//   query_there  the queries of a piece, as they lie    tensor copies, bytes -> who orders them
//   query_full   they are in paired order               copying warps        -> scores
//                of a first row that is known           values               -> scores
//   query_empty  they are multiplied                    scores               -> copying warps
//                all:
//   weights_*    probabilities of a tile                scores               -> values, and back
//   ends_full    from sums to outputs                   scores               -> values
//   first_there  the first tile's records, if consumers
//                convert it                             consumers, bytes     -> consumers
//   first_read   their places are free                  consumers            -> converting warps
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include <cstdint>

#include "sm90/attend/many_heads_records.cuh"
#include "sm90/attend/pieces.cuh"
#include "sm90/common/remote_store.cuh"

namespace flash_csa::sm90::many_heads {

using Barrier = cutlass::arch::ClusterBarrier;
using CopyBarrier = cutlass::arch::ClusterTransactionBarrier;

inline constexpr int kWarpgroup = 128;
inline constexpr int kWarps = kWarpgroup / 32;
inline constexpr int kConsumers = 2 * kWarpgroup;
inline constexpr int kThreads = kConsumers + 2 * kWarpgroup;
inline constexpr int kHalves = 2;  // of the dims: a consumer each
inline constexpr int kStages = 2;  // BF16 tiles: a third does not fit beside q
inline constexpr int kTileBytes = kAttendTile * kHeadDim * 2;
inline constexpr int kPanels = kHeadDim / kPanelColumns;
inline constexpr int kValueSteps = kAttendTile / 16;  // of p . v, 16 records each
template <bool kPair>
inline constexpr int kWarpRecords = kAttendTile / kWarps / (kPair ? 2 : 1);  // of a tile
inline constexpr int kWarpSlots = 2;  // a third each does not fit
inline constexpr int kSlots = kWarps * kWarpSlots;
inline constexpr int kPieces = 4;  // that are known at a time: a power of 2
static_assert(kAttendTile == 64 && kHeadBlock == 64);
static_assert(kWarpRecords<false> % kMostRecords == 0 && kWarpRecords<true> % kMostRecords == 0);

// What a slot holds: a bit per record, and of which list.
enum : uint32_t { kOfWindow = 1u << 8, kNoMore = 1u << 9 };

// Of each head at the end of a piece: the factor of its output, and what its lse comes of.
struct Ends {
    float factor[kHeadBlock], max[kHeadBlock], sum[kHeadBlock];
};

struct Shared {
    uint8_t q[kTileBytes];
    uint8_t kv[kStages][kTileBytes];
    uint4 p[kValueSteps][kWarpgroup];  // probabilities: of a step, a lane's
    alignas(16) uint8_t slots[kSlots][kSlotBytes];
    float keep[kHeadBlock];  // weight of the earlier tiles
    Ends ends[2];            // pieces in turns
    // A bit per record: of each half of a tile, the conjunction of what its converting warps say.
    alignas(16) uint32_t present[kStages][2 * kWarps];
    uint32_t holds[kSlots];
    bool next_is_there;     // says a thread of the scores to the others
    Piece pieces[kPieces];  // in turns; row -1: no more
    CopyBarrier slot_full[kSlots];
    Barrier slot_empty[kSlots];
    CopyBarrier tile_full[kStages];
    Barrier tile_empty[kStages][kHalves], peer_empty[kStages][kHalves];
    Barrier piece_full[kPieces], piece_empty[kPieces];
    CopyBarrier query_there;
    Barrier query_full, query_empty;
    Barrier weights_full, weights_empty;
    Barrier ends_full;
    CopyBarrier first_there;
    Barrier first_read;
};
static_assert(sizeof(Shared) <= 227 * 1024);  // opt-in limit

template <bool kPair>
__device__ __forceinline__ void init_barriers(Shared& shared) {
    for (int i = 0; i < kSlots; ++i) {
        shared.slot_full[i].init(32);
        shared.slot_empty[i].init(32);
    }
    for (int i = 0; i < kStages; ++i) {
        shared.tile_full[i].init(kWarpgroup);
        for (int half = 0; half < kHalves; ++half) {
            shared.tile_empty[i][half].init(kWarpgroup);
            shared.peer_empty[i][half].init(kWarps);
        }
    }
    for (int i = 0; i < kPieces; ++i) {
        shared.piece_full[i].init(32);
        shared.piece_empty[i].init(kConsumers);
    }
    shared.query_there.init(kPair ? 1 : kWarpgroup);
    shared.query_full.init(kPair ? kWarpgroup : kConsumers);
    shared.query_empty.init(kWarpgroup);
    shared.weights_full.init(kWarpgroup);
    shared.weights_empty.init(kWarpgroup);
    shared.ends_full.init(kWarpgroup);
    if constexpr (kPair) {
        shared.first_there.init(2 * kWarps);
        shared.first_read.init(kConsumers);
    }
}

// A pair: the CTAs of a cluster, which have neighbouring blocks of heads of the same rows. Each
// converts half of the records of a tile and copies them into the peer's tile, too.
//
// What it sends is counted by the peer's tile_full: of each warp its records, and who is present.
inline constexpr int kSentBytes = kWarpRecords<true> * kHeadDim * 2 + int{sizeof(uint32_t)};

struct Peer {
    uint32_t rank, offset;  // of this CTA; from its shared memory to that of the peer

    __device__ __forceinline__ explicit Peer(const Shared& shared) : rank(blockIdx.x % 2) {
        const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(&shared));
        offset = peer_address(&shared, rank ^ 1) - own;
    }
    template <class T>
    __device__ __forceinline__ uint32_t at(const T& own) const {
        return static_cast<uint32_t>(__cvta_generic_to_shared(&own)) + offset;
    }
};

// The first of a warp's records.
template <bool kPair>
__device__ __forceinline__ int first_record(int warp) {
    const int first = kWarpRecords<kPair> * warp;
    return kPair ? first + static_cast<int>(blockIdx.x % 2) * (kAttendTile / 2) : first;
}

// Records of a tile that are there.
template <bool kPair>
__device__ __forceinline__ uint64_t present_records(const Shared& shared, int stage) {
    const auto* said = reinterpret_cast<const uint4*>(shared.present[stage]);
    const uint4 x = said[0];
    if constexpr (!kPair) return uint64_t{x.z & x.w} << 32 | (x.x & x.y);
    const uint4 y = said[1];
    return uint64_t{y.x & y.y & y.z & y.w} << 32 | (x.x & x.y & x.z & x.w);
}

// A consumer gives its half of a tile back. The peer is told by a lane of each warp.
template <bool kPair, int kHalf>
__device__ __forceinline__ void give_tile_back(Shared& shared, int stage) {
    Barrier& empty = shared.tile_empty[stage][kHalf];
    empty.arrive();
    if constexpr (kPair) {
        const uint32_t there = Peer(shared).at(shared.peer_empty[stage][kHalf]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive_remote(there);
    }
}

// The same after an output was put down there, which copies of the peer may not overtake.
template <bool kPair, int kHalf>
__device__ __forceinline__ void give_output_back(Shared& shared, int stage) {
    if constexpr (kPair) cutlass::arch::fence_view_async_shared();
    give_tile_back<kPair, kHalf>(shared, stage);
}

// Stages in turns; the parity of an mbarrier changes with every round.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        stage ^= 1;
        parity ^= stage == 0;
    }
};

// A warp's slots in turns.
struct SlotTurn {
    int at;
    uint32_t parity = 0;

    __device__ explicit SlotTurn(int warp) : at(kWarpSlots * warp) {}
    __device__ void next() {
        at ^= 1;
        parity ^= at % kWarpSlots == 0;
    }
};
static_assert(kWarpSlots == 2);

// The piece number `number`, in its place.
struct PieceTurn {
    int number = 0;

    __device__ int at() const { return number & (kPieces - 1); }
    __device__ uint32_t parity() const { return number / kPieces & 1; }
};

// Pages of one list, with a division that is a multiplication.
struct Places {
    const uint8_t* data;
    int64_t page_stride;
    int32_t pages;
    int32_t slots;  // that can be named
    cutlass::FastDivmod page;
    RecordId id;

    explicit Places(const ConstPages& from)
        : data(from.data),
          page_stride(from.page_stride),
          pages(at_most_int32(from.num_pages)),
          slots(at_most_int32(from.num_pages * from.page_size)),
          page(from.page_size),
          id(from.record) {}

  private:
    static int32_t at_most_int32(int64_t x) {
        return x < INT32_MAX ? static_cast<int32_t>(x) : INT32_MAX;
    }
};

struct Plan {
    SplitPlan splits;
    Places window, main;
};

// What a kernel knows when it is compiled, so that code for other calls is not in it. Fp4, Mixed:
// rows are whole, no list is contiguous, and records are WindowFp8 and MainFp4, or MixedFp8.
enum class Lists { Any, Fp4, Mixed };

inline Lists lists_of(const AttendParams& p, const SplitPlan& splits) {
    const auto are = [&](RecordId window, RecordId main) {
        return (p.window.columns == 0 || p.window.pages.record == window) &&
               (p.main.columns == 0 || p.main.pages.record == main);
    };
    if (splits.splits != 1 || p.contiguous.data != nullptr) return Lists::Any;
    if (are(RecordId::WindowFp8, RecordId::MainFp4)) return Lists::Fp4;
    return are(RecordId::MixedFp8, RecordId::MixedFp8) ? Lists::Mixed : Lists::Any;
}

// Whether the consumers convert the first tile of a CTA's first row (many_heads_first.cuh).
template <bool kPair, Lists kLists>
inline constexpr bool kConsumersBegin = kPair && kLists == Lists::Fp4;

template <Lists kLists>
__device__ __forceinline__ RecordId record_id(const Plan& plan, bool window) {
    if (kLists == Lists::Fp4) return window ? RecordId::WindowFp8 : RecordId::MainFp4;
    if (kLists == Lists::Mixed) return RecordId::MixedFp8;
    return window ? plan.window.id : plan.main.id;
}

template <Lists kLists>
__device__ __forceinline__ decltype(auto) split_plan(const Plan& plan) {
    if constexpr (kLists == Lists::Any) {
        return (plan.splits);
    } else {
        SplitPlan whole = plan.splits;
        whole.splits = 1;
        return whole;
    }
}

}  // namespace flash_csa::sm90::many_heads
