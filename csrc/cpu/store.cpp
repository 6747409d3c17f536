// store, load, rope_store and quantize_query: rows that become records without being compressed.
//
// A row is independent of every other row, so the ranges of parallel_for cannot change a byte.
// Slots that repeat within one call are the caller's error: which row wins is then undefined.
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/row_codec.h"
#include "cpu/simd.h"

namespace flash_csa::cpu {
namespace {

constexpr int64_t kRowGrain = 16;    // rows: one takes about 0.6 us
constexpr int64_t kHeadGrain = 128;  // heads: one takes 0.1 to 0.2 us

template <RecordId kId>
inline void store_rows(const StoreParams& p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        if (p.pages.holds(p.slots[i])) write_record<kId>(p.rows.row(i), p.pages, p.slots[i]);
    }
}

template <RecordId kId, class Out>
inline void load_rows(const ConstPages& pages, const int32_t* slots, const Matrix<Out>& out,
                      int64_t begin, int64_t end) {
    constexpr int32_t dims = record(kId).dims;
    for (int64_t i = begin; i < end; ++i) {
        Out values[dims] = {};  // an absent slot reads as zeros
        if (pages.holds(slots[i])) read_record<kId>(pages, slots[i], values);
        std::memcpy(out.row(i), values, sizeof values);
    }
}

template <RecordId kId>
inline void store_window_rows(const RopeStoreParams& p, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        if (!p.cos_sin.holds(p.positions[t]) || !p.window.holds(p.slots[t])) continue;
        uint16_t row[kHeadDim];
        std::memcpy(row, p.kv.row(t), sizeof row);
        rope_row<kHeadDim>(row, p.cos_sin.at(p.positions[t]));
        write_record<kId>(row, p.window, p.slots[t]);
    }
}

// RMS of one head without weight, rounded to BF16.
inline void normalize_head(uint16_t* head, float eps) {
    float x[kHeadDim];
    for (int i = 0; i < kHeadDim; ++i) x[i] = bf16_to_f32(head[i]);
    const float factor = rms_factor<kHeadDim>(x, eps);
    for (int i = 0; i < kHeadDim; ++i) head[i] = f32_to_bf16(mul_rn(x[i], factor));
}

// Ranges count heads: a decode step has too few rows to share out.
inline void rotate_heads(const RopeStoreParams& p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i / p.heads;
        if (!p.cos_sin.holds(p.positions[t])) continue;
        uint16_t* head = p.q.at(t, i % p.heads);
        if (p.q_norm) normalize_head(head, p.q_norm_eps);
        rope_row<kHeadDim>(head, p.cos_sin.at(p.positions[t]));
    }
}

template <RecordId kId>
inline void quantize_heads(const QuantizeQueryParams& p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i / p.heads;
        const int64_t h = i % p.heads;
        RecordBytes<kId> bytes = {};  // a padded row scores 0 everywhere
        if (p.cos_sin.holds(p.positions[t])) {
            uint16_t head[kIndexDim];
            std::memcpy(head, p.q.at(t, h), sizeof head);
            rotate_index_vector(head, p.cos_sin.at(p.positions[t]), p.rotate);
            encode_row<kId>(head, &bytes);
        }
        std::memcpy(p.codes.row(t) + h * int64_t{sizeof bytes.row}, bytes.row, sizeof bytes.row);
        void* scale = p.record == RecordId::IndexFp4 ? static_cast<void*>(p.scales_ue8m0.row(t) + h)
                                                     : p.scales_f32.row(t) + h;
        std::memcpy(scale, bytes.scales, sizeof bytes.scales);
    }
}

}  // namespace

void store(const StoreParams& p) {
    with_record(p.pages.record, [&](auto tag) {
        parallel_for(p.count, kRowGrain, [&](int64_t begin, int64_t end) {
            per_level<store_rows<decltype(tag)::kRecord>>(p, begin, end);
        });
    });
}

void load(const LoadParams& p) {
    with_record(p.pages.record, [&](auto tag) {
        parallel_for(p.count, kRowGrain, [&](int64_t begin, int64_t end) {
            if (p.out_f32) {
                per_level<load_rows<decltype(tag)::kRecord, float>>(p.pages, p.slots, p.out_f32,
                                                                    begin, end);
            } else {
                per_level<load_rows<decltype(tag)::kRecord, uint16_t>>(p.pages, p.slots, p.out_bf16,
                                                                       begin, end);
            }
        });
    });
}

void rope_store(const RopeStoreParams& p) {
    parallel_for(p.rows, kRowGrain, [&](int64_t begin, int64_t end) {
        if (p.window.record == RecordId::WindowFp8) {
            per_level<store_window_rows<RecordId::WindowFp8>>(p, begin, end);
        } else {
            per_level<store_window_rows<RecordId::MixedFp8>>(p, begin, end);
        }
    });
    parallel_for(int64_t{p.rows} * p.heads, kHeadGrain,
                 [&](int64_t begin, int64_t end) { per_level<rotate_heads>(p, begin, end); });
}

void quantize_query(const QuantizeQueryParams& p) {
    parallel_for(int64_t{p.rows} * p.heads, kHeadGrain, [&](int64_t begin, int64_t end) {
        if (p.record == RecordId::IndexFp4) {
            per_level<quantize_heads<RecordId::IndexFp4>>(p, begin, end);
        } else {
            per_level<quantize_heads<RecordId::IndexFp8>>(p, begin, end);
        }
    });
}

}  // namespace flash_csa::cpu
