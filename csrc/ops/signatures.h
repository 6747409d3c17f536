// What every tensor argument of every op must be: one table, used by the checks at the op boundary
// (ops/check.h), by the fakes that torch.compile traces (python/flash_csa/_fakes.py), and by the
// tests. A row's label, with '.' for '_', is the argument's name in the op's schema.
//
// Shape: sizes separated by blanks; a number, '*' (any), or a symbol that must have one value in
// the whole call ("B+1": one more than B). Layouts:
//   Packed       contiguous
//   Rows         every dimension but the first packed; any stride between rows
//   AlignedRows  as Rows, with row stride and base multiples of 16 bytes
//   Dense        last dimension contiguous, outer strides and base multiples of 16 bytes
//   Pages        as Dense, [num_pages, page_bytes]
#pragma once

#include <cstdint>

namespace flash_csa::ops {

inline constexpr int64_t kMaxTopK = 1 << 16;
inline constexpr int64_t kMaxPoolBlocks = 1 << 20;
inline constexpr int64_t kMaxIndexHeads = 128;
inline constexpr int64_t kMaxWorkers = 1 << 16;

enum class Layout : int32_t { Packed, Rows, AlignedRows, Dense, Pages };

struct ArgSignature {
    const char* label;
    const char* dtypes;
    const char* shape;
    Layout layout;
    bool written = false;
};

struct OpSignature {
    const char* op;
    const ArgSignature* args;
    int32_t count;
};

// clang-format off
#define FCSA_BATCH_ARGS                                          \
    {"batch.positions", "i32", "R", Layout::Packed},             \
    {"batch.row_request", "i32", "R", Layout::Packed},           \
    {"batch.cu_tokens", "i32", "B+1", Layout::Packed},           \
    {"batch.start", "i32", "B", Layout::Packed},                 \
    {"batch.tail_slot", "i32", "B", Layout::Packed}
#define FCSA_QUERY_ARGS                                          \
    {"query.codes", "u8", "R Hi C", Layout::AlignedRows},        \
    {"query.scales", "i32|f32", "R Hi", Layout::Rows},           \
    {"index.pages", "u8", "* *", Layout::Pages},                 \
    {"weights", "f32|bf16", "R Hi", Layout::Rows}
#define FCSA_POOL_ARGS                                           \
    {"pool.blocks", "i32", "R NB", Layout::Rows},                \
    {"pool.counts", "i32", "R", Layout::Packed}
#define FCSA_SELECTION_OUT_ARGS                                  \
    {"out.positions", "i32", "R K", Layout::Rows, true},         \
    {"out.slots", "i32", "R K", Layout::Rows, true},             \
    {"out.lengths", "i32", "R", Layout::Packed, true},           \
    {"out.scores", "f32", "R K", Layout::Rows, true}
#define FCSA_POOL_OUT_ARGS                                       \
    {"pool_out.blocks", "i32", "R NBo", Layout::Rows, true},     \
    {"pool_out.counts", "i32", "R", Layout::Packed, true}
#define FCSA_POOL_OUT_SCORES                                     \
    {"pool_out.scores", "f32", "R NBo", Layout::Rows, true}

inline constexpr ArgSignature kStoreArgs[] = {
    {"rows", "bf16", "N D", Layout::Dense},
    {"pages", "u8", "* *", Layout::Pages, true},
    {"slots", "i32", "N", Layout::Packed},
};
inline constexpr ArgSignature kLoadArgs[] = {
    {"pages", "u8", "* *", Layout::Pages},
    {"slots", "i32", "N", Layout::Packed},
    {"out", "bf16|f32", "N D", Layout::Dense, true},
};
inline constexpr ArgSignature kRopeStoreArgs[] = {
    {"q", "bf16", "R H 512", Layout::Dense, true},
    {"kv", "bf16", "R 512", Layout::Dense},
    {"window.pages", "u8", "* *", Layout::Pages, true},
    {"slots", "i32", "R", Layout::Packed},
    {"positions", "i32", "R", Layout::Packed},
    {"cos_sin", "f32", "* 64", Layout::Packed},
};
inline constexpr ArgSignature kQuantizeQueryArgs[] = {
    {"q", "bf16", "R Hi 128", Layout::Dense},
    {"positions", "i32", "R", Layout::Packed},
    {"cos_sin", "f32", "* 64", Layout::Packed},
    {"out.codes", "u8", "R Hi C", Layout::AlignedRows, true},
    {"out.scales", "i32|f32", "R Hi", Layout::Rows, true},
};
inline constexpr ArgSignature kCompressArgs[] = {
    {"kv", "f32|bf16", "R W", Layout::Dense},
    FCSA_BATCH_ARGS,
    {"entry_slots", "i32", "R", Layout::Packed},
    {"norm_weight", "f32", "D", Layout::Packed},
    {"cos_sin", "f32", "* 64", Layout::Packed},
    {"gate", "f32", "R W", Layout::Dense},
    {"bias", "f32", "m W", Layout::Dense},
    {"tail.rows", "f32", "* 2 ring W", Layout::Rows, true},
    {"entry_first", "i32", "B", Layout::Packed},
    {"main.pages", "u8", "* *", Layout::Pages, true},
    {"index.pages", "u8", "* *", Layout::Pages, true},
    {"key_weight", "bf16", "128 512", Layout::Dense},
    {"key_norm_weight", "f32", "128", Layout::Packed},
    {"latent_out", "bf16", "R D", Layout::Dense, true},
    {"workspace", "u8", "*", Layout::Packed, true},
};
inline constexpr ArgSignature kIndexScoresArgs[] = {
    FCSA_QUERY_ARGS,
    FCSA_BATCH_ARGS,
    {"block_table", "i32", "B M", Layout::Rows},
    {"schedule", "i32", "*", Layout::Packed},
    FCSA_POOL_ARGS,
    {"workspace", "u8", "*", Layout::Packed, true},
    {"out", "f32", "R LD", Layout::Rows, true},
};
inline constexpr ArgSignature kSelectArgs[] = {
    {"scores", "f32", "R LD", Layout::Rows},
    FCSA_BATCH_ARGS,
    {"schedule", "i32", "*", Layout::Packed},
    {"block_table", "i32", "B M", Layout::Rows},
    FCSA_POOL_ARGS,
    {"workspace", "u8", "*", Layout::Packed, true},
    FCSA_SELECTION_OUT_ARGS,
    FCSA_POOL_OUT_ARGS,
    FCSA_POOL_OUT_SCORES,
};
inline constexpr ArgSignature kIndexSelectArgs[] = {
    FCSA_QUERY_ARGS,
    FCSA_BATCH_ARGS,
    {"block_table", "i32", "B M", Layout::Rows},
    {"schedule", "i32", "*", Layout::Packed},
    FCSA_POOL_ARGS,
    {"workspace", "u8", "*", Layout::Packed, true},
    FCSA_SELECTION_OUT_ARGS,
    FCSA_POOL_OUT_ARGS,
    FCSA_POOL_OUT_SCORES,
};
inline constexpr ArgSignature kNormalizePoolArgs[] = {
    {"blocks", "i32", "R n", Layout::Rows},
    {"positions", "i32", "R", Layout::Packed},
    FCSA_POOL_OUT_ARGS,
};
inline constexpr ArgSignature kAttendArgs[] = {
    {"q", "bf16", "R H 512", Layout::Dense},
    {"main.pages", "u8", "* *", Layout::Pages},
    {"selection.slots", "i32", "R K", Layout::Rows},
    {"selection.lengths", "i32", "R", Layout::Packed},
    {"window.pages", "u8", "* *", Layout::Pages},
    {"window.slots", "i32", "R Wn", Layout::Rows},
    {"window.lengths", "i32", "R", Layout::Packed},
    {"contiguous.block_table", "i32", "B M", Layout::Rows},
    {"contiguous.row_request", "i32", "R", Layout::Packed},
    {"contiguous.n_vis", "i32", "R", Layout::Packed},
    {"sink", "f32", "H", Layout::Packed},
    {"derotate.positions", "i32", "R", Layout::Packed},
    {"derotate.cos_sin", "f32", "* 64", Layout::Packed},
    {"schedule", "i32", "*", Layout::Packed},
    {"workspace", "u8", "*", Layout::Packed, true},
    {"out", "bf16|f32", "R H 512", Layout::Dense, true},
    {"lse", "f32", "R H", Layout::Rows, true},
};
inline constexpr ArgSignature kMergeArgs[] = {
    {"outs", "bf16|f32", "parts R H 512", Layout::Packed},
    {"lses", "f32", "parts R H", Layout::Packed},
    {"sink", "f32", "H", Layout::Packed},
    {"derotate.positions", "i32", "R", Layout::Packed},
    {"derotate.cos_sin", "f32", "* 64", Layout::Packed},
    {"out", "bf16|f32", "R H 512", Layout::Dense, true},
    {"lse", "f32", "R H", Layout::Rows, true},
};
inline constexpr ArgSignature kMergeSelectionsArgs[] = {
    {"positions", "i32", "parts R Kin", Layout::Packed},
    {"scores", "f32", "parts R Kin", Layout::Packed},
    {"row_request", "i32", "R", Layout::Packed},
    {"block_table", "i32", "B M", Layout::Rows},
    FCSA_SELECTION_OUT_ARGS,
};
inline constexpr ArgSignature kMergePoolsArgs[] = {
    {"blocks", "i32", "parts R n", Layout::Packed},
    {"scores", "f32", "parts R n", Layout::Packed},
    {"positions", "i32", "R", Layout::Packed},
    FCSA_POOL_OUT_ARGS,
    FCSA_POOL_OUT_SCORES,
};
inline constexpr ArgSignature kStepSlotsArgs[] = {
    FCSA_BATCH_ARGS,
    {"block_tables", "i32", "B *", Layout::Rows},
    {"window_table", "i32", "B *", Layout::Rows},
    {"window_first", "i32", "B", Layout::Packed},
    {"entry_first", "i32", "ratios B", Layout::Rows},
    {"window_store", "i32", "R", Layout::Packed, true},
    {"lists.slots", "i32", "R window", Layout::Rows, true},
    {"lists.lengths", "i32", "R", Layout::Packed, true},
    {"entry_slots", "i32", "ratios R", Layout::Rows, true},
    {"n_vis", "i32", "ratios R", Layout::Rows, true},
};
inline constexpr ArgSignature kProbeArgs[] = {
    {"out", "i32", "words", Layout::Packed, true},
    {"records", "u8", "N record", Layout::Packed},
    {"slots", "i32", "n", Layout::Packed},
};
inline constexpr ArgSignature kScheduleArgs[] = {
    FCSA_BATCH_ARGS,
    {"window_first", "i32", "B", Layout::Packed},
    {"out", "i32", "sections *", Layout::Rows, true},
};
// clang-format on

#undef FCSA_BATCH_ARGS
#undef FCSA_QUERY_ARGS
#undef FCSA_POOL_ARGS
#undef FCSA_SELECTION_OUT_ARGS
#undef FCSA_POOL_OUT_ARGS
#undef FCSA_POOL_OUT_SCORES

template <int N>
constexpr OpSignature signature(const char* op, const ArgSignature (&args)[N]) {
    return {op, args, N};
}

inline constexpr OpSignature kSignatures[] = {
    signature("store", kStoreArgs),
    signature("load", kLoadArgs),
    signature("rope_store", kRopeStoreArgs),
    signature("quantize_query", kQuantizeQueryArgs),
    signature("compress", kCompressArgs),
    signature("index_scores", kIndexScoresArgs),
    signature("select", kSelectArgs),
    signature("index_select", kIndexSelectArgs),
    signature("normalize_pool", kNormalizePoolArgs),
    signature("attend", kAttendArgs),
    signature("merge", kMergeArgs),
    signature("merge_selections", kMergeSelectionsArgs),
    signature("merge_pools", kMergePoolsArgs),
    signature("step_slots", kStepSlotsArgs),
    signature("schedule", kScheduleArgs),
    signature("probe", kProbeArgs),
};

}  // namespace flash_csa::ops
