// compress: tokens -> entries -> main and index records, and the tail rows of open groups.
//
//   kv, gate -> pool -> BF16 -> RMSNorm -> BF16 latent -> RoPE at j * ratio -> BF16 -> main record
//   latent -> key projection -> BF16 -> RMSNorm -> BF16 -> RoPE -> BF16 -> index record
//
// One order of operations, which every back end repeats (FP32, channel by channel):
//   g_i  = gate_i + bias_i          rows i in ascending position; overlapping: the previous group's
//   m    = max_i g_i                four rows first, none for entry 0
//   w_i  = exp_fma(g_i - m)
//   sum  = 0, then sum + w_i        in the order of i
//   acc  = 0, then fma(w_i, kv_i, acc)
//   pooled = acc / sum
// The key projection (project.h) has one order too, but other back ends may sum differently.
//
// An entry depends on its own rows only, so the ranges of parallel_for, the cut of the input into
// calls and the other requests cannot change a byte. Two passes: entries of all requests read the
// tails, then the tails are written.
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/entry.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/project.h"
#include "cpu/row_codec.h"
#include "cpu/simd.h"

namespace flash_csa::cpu {
namespace {

constexpr int64_t kRowGrain = 16;  // rows: at ratio 2 one block of keys, 40 us

// Adding 0 changes no weight, and the loops need no branch.
inline const float* bias_of(const PoolRow& r) {
    static const float kNoBias[kHeadDim] = {};
    return r.bias != nullptr ? r.bias : kNoBias;
}

template <int kDim>
inline void pool(const CompressParams& p, const Entry& e, float* pooled) {
    float largest[kDim];
    float sum[kDim] = {};
    float acc[kDim] = {};
    for (int c = 0; c < kDim; ++c) largest[c] = -std::numeric_limits<float>::infinity();
    for (int64_t position = e.first; position <= e.position; ++position) {
        const PoolRow r = pool_row(p, e, position);
        const float* bias = bias_of(r);
        for (int c = 0; c < kDim; ++c) {
            const float g = add_rn(r.gate[c], bias[c]);
            largest[c] = g > largest[c] ? g : largest[c];
        }
    }
    for (int64_t position = e.first; position <= e.position; ++position) {
        const PoolRow r = pool_row(p, e, position);
        const float* bias = bias_of(r);
        for (int c = 0; c < kDim; ++c) {
            const float w = exp_fma(sub_rn(add_rn(r.gate[c], bias[c]), largest[c]));
            sum[c] = add_rn(sum[c], w);
            acc[c] = fma_rn(w, r.kv[c], acc[c]);
        }
    }
    for (int c = 0; c < kDim; ++c) pooled[c] = round_bf16(div_rn(acc[c], sum[c]));
}

template <int kDim>
inline void make_latent(const CompressParams& p, const Entry& e, uint16_t* latent) {
    float pooled[kDim];
    if (p.kv_bf16) {  // ratio 1: every token is an entry
        const uint16_t* row = p.kv_bf16.row(e.row);
        for (int c = 0; c < kDim; ++c) pooled[c] = bf16_to_f32(row[c]);
    } else {
        pool<kDim>(p, e, pooled);
    }
    rms_norm_row<kDim>(pooled, p.norm_weight, p.eps, latent);
    if (p.latent_out) std::memcpy(p.latent_out.row(e.row), latent, kDim * sizeof *latent);
}

inline void store_main(const CompressParams& p, const Entry& e, const uint16_t* latent) {
    const int32_t slot = p.entry_slots[e.row];
    if (p.main.data == nullptr || !p.main.holds(slot)) return;
    uint16_t row[kHeadDim];
    std::memcpy(row, latent, sizeof row);
    rope_row<kHeadDim>(row, p.cos_sin.at(e.index * p.ratio));
    switch (p.main.record) {
        case RecordId::WindowFp8:
            return write_record<RecordId::WindowFp8>(row, p.main, slot);
        case RecordId::MixedFp8:
            return write_record<RecordId::MixedFp8>(row, p.main, slot);
        default:
            return write_record<RecordId::MainFp4>(row, p.main, slot);
    }
}

// Rotates and stores an index key in place; absent slots have been left out.
inline void store_key(const CompressParams& p, const Entry& e, uint16_t* key) {
    const int32_t slot = p.entry_slots[e.row];
    rotate_index_vector(key, p.cos_sin.at(e.index * p.ratio), p.rotate);
    if (p.index.record == RecordId::IndexFp4) {
        write_record<RecordId::IndexFp4>(key, p.index, slot);
    } else {
        write_record<RecordId::IndexFp8>(key, p.index, slot);
    }
}

bool stores_key(const CompressParams& p, const Entry& e) {
    return p.index.data != nullptr && p.index.holds(p.entry_slots[e.row]);
}

// d = 128: V4's own index compressor. The latent is the key.
inline void compress_index_rows(const CompressParams& p, int64_t begin, int64_t end) {
    Entry e;
    for (int64_t t = begin; t < end; ++t) {
        if (!closes_entry(p, t, &e)) continue;
        uint16_t key[kIndexDim];
        make_latent<kIndexDim>(p, e, key);
        if (stores_key(p, e)) store_key(p, e, key);
    }
}

// Latents whose keys are projected together, so that the weight is read once for all of them.
struct KeyBlock {
    Entry entries[kProjectRows];
    float latents[kProjectRows][kHeadDim];
    int count = 0;

    inline void add(const Entry& e, const uint16_t* latent) {
        entries[count] = e;
        for (int c = 0; c < kHeadDim; ++c) latents[count][c] = bf16_to_f32(latent[c]);
        ++count;
    }

    inline void flush(const CompressParams& p) {
        float keys[kProjectRows][kIndexDim];
        project_keys(latents, count, p.key_weight, keys);
        for (int i = 0; i < count; ++i) {
            uint16_t key[kIndexDim];
            for (int c = 0; c < kIndexDim; ++c) keys[i][c] = round_bf16(keys[i][c]);
            rms_norm_row<kIndexDim>(keys[i], p.key_norm_weight, p.eps, key);
            store_key(p, entries[i], key);
        }
        count = 0;
    }
};

inline void compress_main_rows(const CompressParams& p, int64_t begin, int64_t end) {
    Entry e;
    KeyBlock block;
    for (int64_t t = begin; t < end; ++t) {
        if (!closes_entry(p, t, &e)) continue;
        uint16_t latent[kHeadDim];
        make_latent<kHeadDim>(p, e, latent);
        store_main(p, e, latent);
        if (!p.key_weight || !stores_key(p, e)) continue;
        block.add(e, latent);
        if (block.count == kProjectRows) block.flush(p);
    }
    block.flush(p);
}

// Its valid rows come first.
int64_t end_of_valid(const CompressParams& p, const RowRange& rows, int64_t request) {
    int64_t end = rows.begin;
    while (end < rows.end && is_row_of(p, end, request)) ++end;
    return end;
}

// Keeps the last rows of the step. Rows of entries that are stored already are not the tail's.
void write_tail(const CompressParams& p, int64_t request) {
    if (!has_tail(p, request)) return;
    const RowRange rows = request_rows(p, request);
    const int64_t end = end_of_valid(p, rows, request);
    const int64_t slot = p.batch.tail_slot[request];
    const size_t bytes = sizeof(float) * static_cast<size_t>(p.tail.width);
    const int64_t kept = end - p.tail.ring;
    for (int64_t t = kept < rows.begin ? rows.begin : kept; t < end; ++t) {
        const int64_t position = p.batch.positions[t];
        if (position < first_entry(p, request) * p.ratio) continue;
        std::memcpy(p.tail.kv(slot, position), p.kv.row(t), bytes);
        std::memcpy(p.tail.gate(slot, position), p.gate.row(t), bytes);
    }
}

}  // namespace

void compress(const CompressParams& p) {
    parallel_for(p.batch.rows, kRowGrain, [&](int64_t begin, int64_t end) {
        if (p.dim == kIndexDim) {
            per_level<compress_index_rows>(p, begin, end);
        } else {
            per_level<compress_main_rows>(p, begin, end);
        }
    });
    if (!p.kv) return;  // ratio 1 keeps no group open
    parallel_for(p.batch.requests, 1, [&](int64_t begin, int64_t end) {
        for (int64_t request = begin; request < end; ++request) write_tail(p, request);
    });
}

}  // namespace flash_csa::cpu
