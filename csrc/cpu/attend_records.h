// The records of a row that are there, and their values.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/list.h"
#include "core/numerics.h"
#include "cpu/attend_tile.h"

namespace flash_csa::cpu {

struct RecordRef {
    const uint8_t* codes;
    const uint8_t* scales;
    RecordId id;

    void prefetch() const {
        for (int at = 0; at < record(id).data_bytes; at += 64) __builtin_prefetch(codes + at);
        __builtin_prefetch(scales);
    }
};

// Walks over the present records of a row in list order.
class RowRecords {
  public:
    RowRecords(const AttendParams& p, int64_t row) : p_(p), list_(row_list(p, row)) {}

    // Takes up to kSide records; fewer only at the end.
    int take(RecordRef* refs) {
        int count = 0;
        for (; count < kSide && at_ < list_.size(); ++at_) {
            const bool window = at_ < list_.window;
            const ConstPages& pages = window ? p_.window.pages : p_.main.pages;
            const int64_t slot =
                window ? list_.window_slots[at_] : list_.main_slot(at_ - list_.window);
            if (!pages.holds(slot) || slot > INT32_MAX) continue;
            const Record record = flash_csa::record(pages.record);
            refs[count++] = {pages.row(record, static_cast<int32_t>(slot)),
                             pages.scales(record, static_cast<int32_t>(slot)), pages.record};
        }
        return count;
    }

  private:
    const AttendParams& p_;
    const RowList list_;
    int64_t at_ = 0;
};

// The codecs of numerics.h, on 32-bit lanes: through uint8_t the compiler goes by way of bytes.
FCSA_HD float value_e2m1(uint32_t x) {
    return bits_float(float_bits(decode_magnitude<1, 127>(x & 7u)) | ((x & 8u) << 28));
}
FCSA_HD float value_e4m3(uint32_t x) {
    const uint32_t magnitude = x & 0x7fu;
    const uint32_t finite = float_bits(decode_magnitude<3, 121>(magnitude)) | ((x & 0x80u) << 24);
    return bits_float(blend(mask_if(magnitude == kNanE4M3), kNanBits, finite));
}
// Below 2^-46, which no encoder writes, a scale is 0, and so is a BF16 value: a product with a
// probability is then a multiple of 2^-126, and no sum of them is subnormal (attend_tile.h).
constexpr uint32_t kLeastExponent = 127 - 46;

FCSA_HD float value_ue8m0(uint32_t x) {
    const uint32_t bits = (x << 23) | (mask_if(x == kNanUE8M0) & 0x400000u);
    return bits_float(bits & mask_if(x >= kLeastExponent));
}
FCSA_HD float value_bf16(uint32_t x) {
    return bits_float((x << 16) & mask_if((x & 0x7f80u) >= kLeastExponent << 7));
}

// The scale bytes of a block of 128 dims, for the lane that decodes dims 8 l to 8 l + 7. From a
// word in a register, as bytes that are spread in memory come back after a long wait.
template <int kGroup>
FCSA_HD void spread_scales(const uint8_t* scales, uint32_t* lanes) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, scales, 128 / kGroup);
    const uint32_t low = static_cast<uint32_t>(bytes), high = static_cast<uint32_t>(bytes >> 32);
    FCSA_VECTORISE for (uint32_t l = 0; l < kLanes; ++l) {
        const uint32_t index = 8 * l / kGroup;
        lanes[l] = (blend(mask_if(index < 4), low, high) >> (index % 4 * 8)) & 0xffu;
    }
}

// A record's 512 values: panels of 64, `stride` apart.
struct Row {
    float* values;
    int stride;

    // Where the 16 values of step n (0..7) of 128-dim block b go.
    FCSA_HD float* lanes_at(int b, int n) const {
        return values + (2 * b + n / 4) * stride + n % 4 * kLanes;
    }
};

FCSA_HD void dequantise_fp4(const RecordRef& ref, const Row& row) {
    for (int b = 0; b < kHeadDim / 128; ++b) {
        uint32_t words[kLanes];
        std::memcpy(words, ref.codes + 64 * b, sizeof words);
        uint32_t bytes[kLanes];
        spread_scales<16>(ref.scales + 8 * b, bytes);
        float scale[kLanes];
        FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) scale[l] = value_e4m3(bytes[l]);
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            float* out = row.lanes_at(b, n);
            FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
                out[l] = mul_rn(value_e2m1(words[l] >> (4 * n)), scale[l]);
            }
        }
    }
}

template <int kGroup>
FCSA_HD void dequantise_fp8(const RecordRef& ref, const Row& row) {
    for (int b = 0; b < kHeadDim / 128; ++b) {
        uint32_t words[2 * kLanes];
        uint32_t halves[2][kLanes];
        std::memcpy(words, ref.codes + 128 * b, sizeof words);
        FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
            halves[0][l] = words[2 * l];
            halves[1][l] = words[2 * l + 1];
        }
        uint32_t bytes[kLanes];
        spread_scales<kGroup>(ref.scales + 128 / kGroup * b, bytes);
        float scale[kLanes];
        FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) scale[l] = value_ue8m0(bytes[l]);
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            float* out = row.lanes_at(b, n);
            FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
                out[l] = mul_rn(value_e4m3(halves[n / 4][l] >> (8 * (n % 4))), scale[l]);
            }
        }
    }
}

// MixedFp8: 448 FP8 values, then 64 in BF16, which replace what the FP8 loop made of their bytes
// and of the padding behind the scales.
FCSA_HD void dequantise_mixed(const RecordRef& ref, const Record& record, const Row& row) {
    dequantise_fp8<64>(ref, row);
    uint16_t tail[kRopeDims];
    std::memcpy(tail, ref.codes + record.coded_dims, sizeof tail);
    for (int n = 0; n < 8; ++n) {
        float* out = row.lanes_at(kHeadDim / 128 - 1, n) + kLanes / 2;
        for (int l = 0; l < kLanes / 2; ++l) out[l] = value_bf16(tail[8 * l + n]);
    }
}

FCSA_HD void dequantise(const RecordRef& ref, const Row& row) {
    switch (ref.id) {
        case RecordId::MainFp4:
            return dequantise_fp4(ref, row);
        case RecordId::WindowFp8:
            return dequantise_fp8<32>(ref, row);
        default:
            return dequantise_mixed(ref, record(ref.id), row);
    }
}

}  // namespace flash_csa::cpu
