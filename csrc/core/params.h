// One POD per stage: what an op hands to a back end. Pointers live on one device; nothing here is
// owned. Strides count elements of the pointed-to type, page strides bytes. BF16 is uint16_t.
//
// Names follow the interfaces: R rows, B requests, H heads, K top-k. Optional inputs are null.
// Back ends trust shapes (ops checked them) and no value: a slot outside [0, capacity) is absent,
// a position outside [0, cos_rows) or a request outside [0, B) makes its row a padded row.
#pragma once

#include <cstdint>

#include "core/numerics.h"
#include "core/records.h"

namespace flash_csa {

inline constexpr int32_t kHeadDim = 512;   // K = V, one vector
inline constexpr int32_t kIndexDim = 128;  // index key and query
inline constexpr int32_t kPoolBlock = 8;   // positions of a candidate block
inline constexpr int32_t kMaxRatios = 8;   // ratios of one step

template <class Byte>
struct PagesOf {
    Byte* data = nullptr;
    int64_t page_stride = 0;  // bytes
    int64_t num_pages = 0;
    int32_t page_size = 1;
    RecordId record = RecordId::MainFp4;

    FCSA_HD bool holds(int64_t slot) const { return slot >= 0 && slot < num_pages * page_size; }
    FCSA_HD Byte* row(const Record& r, int32_t slot) const {
        return data + slot / page_size * page_stride + r.data_at(slot % page_size);
    }
    FCSA_HD Byte* scales(const Record& r, int32_t slot) const {
        return data + slot / page_size * page_stride + r.scale_at(slot % page_size, page_size);
    }
};
using Pages = PagesOf<uint8_t>;
using ConstPages = PagesOf<const uint8_t>;

template <class T>
struct Matrix {  // [rows, cols], innermost contiguous
    T* data = nullptr;
    int64_t stride = 0;

    FCSA_HD T* row(int64_t r) const { return data + r * stride; }
    FCSA_HD explicit operator bool() const { return data != nullptr; }
};

template <class T>
struct Heads {  // [rows, heads, dims], innermost contiguous
    T* data = nullptr;
    int64_t row_stride = 0;
    int64_t head_stride = 0;

    FCSA_HD T* at(int64_t r, int64_t h) const { return data + r * row_stride + h * head_stride; }
};

struct CosSin {  // f32 [rows, 64]: 32 cos | 32 sin
    const float* data = nullptr;
    int64_t rows = 0;

    FCSA_HD bool holds(int64_t position) const { return position >= 0 && position < rows; }
    FCSA_HD const float* at(int64_t position) const { return data + position * kRopeDims; }
};

struct BatchView {
    const int32_t* positions = nullptr;    // [R]
    const int32_t* row_request = nullptr;  // [R]
    const int32_t* cu_tokens = nullptr;    // [B + 1]
    const int32_t* start = nullptr;        // [B]
    const int32_t* tail_slot = nullptr;    // [B]
    int32_t rows = 0;
    int32_t requests = 0;
    int32_t max_rows = 0;
};

struct BlockTable {  // i32 [B, columns]; entry j of request r: row(r)[j / P] * P + j % P
    const int32_t* data = nullptr;
    int64_t stride = 0;
    int32_t requests = 0;
    int32_t columns = 0;

    FCSA_HD const int32_t* row(int64_t request) const { return data + request * stride; }
};

struct TailView {  // f32 [slots, 2, ring, width]: kv rows, gate rows; row of position p is p % ring
    float* data = nullptr;
    int64_t slot_stride = 0;
    int32_t slots = 0;
    int32_t ring = 1;
    int32_t width = 0;

    FCSA_HD float* kv(int64_t slot, int64_t position) const {
        return data + slot * slot_stride + int64_t{static_cast<int32_t>(position) % ring} * width;
    }
    FCSA_HD float* gate(int64_t slot, int64_t position) const {
        return kv(slot, position) + int64_t{ring} * width;
    }
};

struct ScheduleView {  // the section of a schedule that the op takes, i32 [size]
    const int32_t* data = nullptr;
    int32_t size = 0;
};

struct Workspace {
    uint8_t* data = nullptr;
    int64_t bytes = 0;
};

struct StoreParams {
    Matrix<const uint16_t> rows;  // bf16 [N, dims]
    Pages pages;
    const int32_t* slots = nullptr;  // [N]
    int64_t count = 0;
};

struct LoadParams {
    ConstPages pages;
    const int32_t* slots = nullptr;  // [N]; absent slots give zeros
    int64_t count = 0;
    Matrix<uint16_t> out_bf16;  // one of the two is set
    Matrix<float> out_f32;
};

struct RopeStoreParams {
    Heads<uint16_t> q;                   // bf16 [R, H, 512], rotated in place
    Matrix<const uint16_t> kv;           // bf16 [R, 512]
    Pages window;                        // WindowFp8 or MixedFp8
    const int32_t* slots = nullptr;      // [R]
    const int32_t* positions = nullptr;  // [R]
    CosSin cos_sin;
    int32_t rows = 0;
    int32_t heads = 0;
    bool q_norm = false;  // V4: per-head RMS without weight, before RoPE
    float q_norm_eps = 0.f;
};

struct QuantizeQueryParams {
    Heads<const uint16_t> q;             // bf16 [R, Hi, 128]
    const int32_t* positions = nullptr;  // [R]; a padded row gives zero codes and zero scales
    CosSin cos_sin;
    RecordId record =
        RecordId::IndexFp4;        // IndexFp4: u8 [.., 64] + i32; IndexFp8: u8 [.., 128] + f32
    bool rotate = false;           // V4: Hadamard after RoPE
    Matrix<uint8_t> codes;         // [R, Hi * row bytes]
    Matrix<int32_t> scales_ue8m0;  // [R, Hi], byte g: group g (IndexFp4)
    Matrix<float> scales_f32;      // [R, Hi] (IndexFp8)
    int32_t rows = 0;
    int32_t heads = 0;
};

struct CompressParams {
    Matrix<const float> kv;          // f32 [R, width]; null at ratio 1
    Matrix<const float> gate;        // f32 [R, width]; null at ratio 1
    Matrix<const uint16_t> kv_bf16;  // bf16 [R, 512] at ratio 1
    BatchView batch;
    const int32_t* entry_slots = nullptr;  // [R]: slot of the entry that row t closes, else -1
    const int32_t* entry_first = nullptr;  // [B], optional: entries already stored
    int32_t ratio = 1;
    int32_t dim = kHeadDim;              // d: 512, or 128 for V4's index compressor
    bool overlap = false;                // width == 2 * dim: previous half, then current half
    const float* norm_weight = nullptr;  // [dim]
    float eps = 0.f;
    CosSin cos_sin;
    Matrix<const float> bias;                // f32 [ratio, width], optional
    TailView tail;                           // optional
    Pages main;                              // optional
    Pages index;                             // optional
    Matrix<const uint16_t> key_weight;       // bf16 [128, 512], optional
    const float* key_norm_weight = nullptr;  // [128]
    bool rotate = false;                     // Hadamard of the index key after RoPE
    Matrix<uint16_t> latent_out;             // bf16 [R, dim], optional; only closing rows written
    Workspace workspace;
};

struct IndexQueryView {
    Matrix<const uint8_t> codes;         // [R, Hi * row bytes]
    Matrix<const int32_t> scales_ue8m0;  // FP4 queries
    Matrix<const float> scales_f32;      // FP8 queries
    int32_t heads = 0;
};

struct Weights {  // f32 or bf16 [R, Hi]
    Matrix<const float> f32;
    Matrix<const uint16_t> bf16;
};

struct PoolView {                     // blocks of kPoolBlock positions, ascending, -1 padded
    Matrix<const int32_t> blocks;     // [R, width]
    const int32_t* counts = nullptr;  // [R]
    int32_t width = 0;
};

struct IndexScoresParams {
    IndexQueryView query;
    ConstPages index;
    Weights weights;
    BatchView batch;
    BlockTable block_table;
    ScheduleView schedule;
    int32_t ratio = 1;
    bool strict = false;
    PoolView pool;  // optional: column c is position 8 * blocks[c / 8] + c % 8
    Workspace workspace;
    Matrix<float> out;  // [R, columns]
    int64_t columns = 0;
};

struct PoolOut {
    Matrix<int32_t> blocks;     // [R, width]
    int32_t* counts = nullptr;  // [R]
    Matrix<float> scores;       // [R, width], optional
    int32_t width = 0;
};

struct SelectionOut {
    Matrix<int32_t> positions;   // [R, K]
    Matrix<int32_t> slots;       // [R, K]
    int32_t* lengths = nullptr;  // [R]
    Matrix<float> scores;        // [R, K], optional
};

struct SelectParams {
    Matrix<const float> scores;  // [R, columns]
    int64_t columns = 0;
    BatchView batch;
    BlockTable block_table;
    ScheduleView schedule;
    int32_t k = 0;
    int32_t ratio = 1;
    int32_t page_size = 1;
    bool strict = false;
    PoolView pool;  // optional: restricts
    Workspace workspace;
    SelectionOut out;
    PoolOut pool_out;  // optional: builds
};

struct IndexSelectParams {
    IndexScoresParams scores;  // out is null: the scores stay in scratch
    SelectParams select;
};

struct NormalizePoolParams {
    Matrix<const int32_t> blocks;  // [R, n], any order, duplicates, -1 anywhere
    int32_t n = 0;
    const int32_t* positions = nullptr;  // [R]
    int32_t rows = 0;
    int32_t ratio = 1;
    int32_t max_entries = 0;
    bool strict = false;
    PoolOut out;
};

struct RecordList {  // one list of records that attention reads
    ConstPages pages;
    Matrix<const int32_t> slots;       // [R, columns]; a -1 inside is skipped
    const int32_t* lengths = nullptr;  // [R] columns to read
    int32_t columns = 0;
};

struct AttendParams {
    Heads<const uint16_t> q;  // bf16 [R, H, 512]
    int32_t rows = 0;
    int32_t heads = 0;
    RecordList window;  // optional
    RecordList main;    // optional
    // Instead of main.slots: all visible entries of a block table (main.pages is set).
    BlockTable contiguous;
    const int32_t* contiguous_request = nullptr;  // [R]
    const int32_t* contiguous_n_vis = nullptr;    // [R]
    const float* sink = nullptr;                  // [H], optional
    float softmax_scale = 0.f;
    const int32_t* derotate_positions = nullptr;  // [R], optional
    CosSin derotate;
    bool batch_invariant = false;
    ScheduleView schedule;
    Workspace workspace;
    Heads<uint16_t> out_bf16;  // one of the two is set
    Heads<float> out_f32;
    Matrix<float> lse;  // [R, H], optional
};

struct MergeParams {
    const uint16_t* outs_bf16 = nullptr;  // [W, R, H, 512] packed, one of the two is set
    const float* outs_f32 = nullptr;
    const float* lses = nullptr;  // [W, R, H] packed
    int32_t parts = 0;
    int32_t rows = 0;
    int32_t heads = 0;
    const float* sink = nullptr;  // [H], optional
    const int32_t* derotate_positions = nullptr;
    CosSin derotate;
    Heads<uint16_t> out_bf16;
    Heads<float> out_f32;
    Matrix<float> lse;  // optional
};

struct MergeSelectionsParams {
    const int32_t* positions = nullptr;  // [W, R, K_in] packed, -1 padded
    const float* scores = nullptr;       // [W, R, K_in] packed
    int32_t parts = 0;
    int32_t rows = 0;
    int32_t k_in = 0;
    int32_t k = 0;
    const int32_t* row_request = nullptr;  // [R]
    BlockTable block_table;
    int32_t page_size = 1;
    SelectionOut out;
};

struct MergePoolsParams {
    const int32_t* blocks = nullptr;  // [W, R, n] packed, -1 padded
    const float* scores = nullptr;    // [W, R, n] packed
    int32_t parts = 0;
    int32_t rows = 0;
    int32_t n = 0;
    const int32_t* positions = nullptr;  // [R]
    int32_t ratio = 1;
    bool strict = false;
    PoolOut out;
};

struct StepSlotsParams {
    BatchView batch;
    BlockTable block_tables[kMaxRatios];
    BlockTable window_table;  // ring: column (p / P) % columns
    int32_t num_ratios = 0;
    int32_t ratios[kMaxRatios] = {};
    int32_t page_sizes[kMaxRatios] = {};
    int32_t window_page_size = 1;
    int32_t window = 128;
    bool strict = false;
    const int32_t* window_first = nullptr;  // [B], optional
    Matrix<const int32_t> entry_first;      // [ratios, B], optional
    int32_t* window_store = nullptr;        // [R]
    Matrix<int32_t> window_slots;           // [R, window]
    int32_t* window_lengths = nullptr;      // [R]
    Matrix<int32_t> entry_slots;            // [ratios, R]
    Matrix<int32_t> n_vis;                  // [ratios, R]
};

struct ScheduleParams {
    BatchView batch;
    int32_t num_ratios = 0;
    int32_t ratios[kMaxRatios] = {};
    int32_t max_entries[kMaxRatios] = {};
    bool contiguous[kMaxRatios] = {};
    int32_t k = 0;
    int32_t heads = 0;
    int32_t index_heads = 0;
    int32_t window = 128;
    const int32_t* window_first = nullptr;  // [B], optional
    int32_t pool_blocks = 0;
    int32_t pool_ratio = 0;
    bool strict = false;
    bool batch_invariant = false;
    int32_t num_sms = 1;
    Matrix<int32_t> out;  // [1 + 4 * ratios, size]
    int32_t size = 0;
};

}  // namespace flash_csa
