// Sizes of the score kernels: what is known at compile time, what the host decides, shared memory.
#pragma once

#include "sm90/index/key_ring.cuh"
#include "sm90/index/query_tile.cuh"

namespace flash_csa::sm90 {

constexpr int kSmemOptIn = 227 * 1024;
static_assert(kPlanners >= 32 * kFeeders);
constexpr int kConsumerRegisters = 144, kFeederRegisters = 80;  // 128 at the launch
constexpr int kGroupThreads = 128;
constexpr int kTileKeys = 64;  // M of an MMA
constexpr int kPassTiles = 2;  // that a group takes in its turn: the end waits for a whole pass
constexpr int kPassKeys = kPassTiles * kTileKeys;
constexpr int kPasses = kUnitKeys / kPassKeys;

// What the host decides about a launch.
struct ScorePlan {
    int32_t max_rows;      // of a group
    int32_t padded_heads;  // a multiple of kHeads
    int32_t num_stages;
};

template <int kHeads_, class Sink_>
struct ScoreConfig {
    using Sink = Sink_;
    static constexpr int kHeads = kHeads_;  // a block of a row: heads are padded to it
    static constexpr int kGroups = 3;       // of consumer warps
    static_assert(kGroups == kFeeders, "a group has a part in every unit of a stage, or in none");
    static constexpr int kConsumers = kGroups * kGroupThreads;
    static constexpr int kThreads = kConsumers + kPlanners;
    // N of an MMA with groups apart: two blocks of four accumulators are in flight.
    static constexpr int kGroupHeads = kHeads < 16 ? kHeads : 16;
    static constexpr int kColumns = 2 * kHeads;                   // N of an MMA on folded codes
    static constexpr int kQuadHeads = kHeads < 16 ? kHeads : 16;  // of each of four rows
    static constexpr int kGroupSums = kGroupHeads / 2;            // of a thread and tile
};

constexpr int32_t kMaxStages = 12;
constexpr int32_t kMaxGroupRows = 128;
constexpr int32_t kQueryTile = 128 << 10;  // bytes of query codes: 3 stages fit beside them

// Dynamic shared memory: what has a size of its own, then [query codes | weights | stages].
template <class Config>
struct ScoreFixed {
    WorkList work;
    int32_t counts[kMaxGroupRows];  // columns of the segment's rows
    uint32_t plain[kMaxGroupRows];
    uint32_t folds;
    Barrier list_full, list_empty;  // of the work list: an arrival of each planner, of each thread
    Barrier full[kMaxStages], ready[kMaxStages], empty[kMaxStages];
    alignas(16) uint8_t sink[Config::Sink::kSharedBytes + 16];
};

template <class Config>
struct ScoreShared {
    using Fixed = ScoreFixed<Config>;
    static constexpr int32_t kFixedBytes = (sizeof(Fixed) + 1023) / 1024 * 1024;  // the swizzle's

    Fixed* fixed;
    QueryTile queries;
    KeyRing ring;
    int32_t bytes;

    __host__ __device__ ScoreShared(uint8_t* base, const ScorePlan& plan) {
        const int32_t rows_heads = tile_rows(plan.max_rows) * plan.padded_heads;
        const int32_t heads =
            (rows_heads + Config::kColumns - 1) / Config::kColumns * Config::kColumns;
        const int32_t tile = heads * kQueryBytes;
        const int32_t weights_at = kFixedBytes + 2 * tile;
        const int32_t stages_at = weights_at + 2 * heads * static_cast<int32_t>(sizeof(float));
        fixed = reinterpret_cast<Fixed*>(base);
        queries.codes = base + kFixedBytes;
        queries.units = queries.codes + tile;
        queries.minus = nullptr;
        queries.weights = reinterpret_cast<float*>(base + weights_at);
        queries.folded_weights = queries.weights + heads;
        queries.plain = fixed->plain;
        queries.folds = &fixed->folds;
        ring = {reinterpret_cast<KeyStage*>(base + stages_at), fixed->full, fixed->ready,
                fixed->empty, plan.num_stages};
        bytes = stages_at + plan.num_stages * static_cast<int32_t>(sizeof(KeyStage));
    }
};

}  // namespace flash_csa::sm90
