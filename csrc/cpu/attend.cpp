// Attention of every query row over its window records and its main records.
//
//   for each task = one row and up to 64 of its heads, and each tile of 64 present records:
//     kv      [panel][record][dim]   dequantised once for all heads of the task
//     logits  [record][head]         kv x q, one panel of 64 dims after the other
//     softmax                        running maximum and sum of each head; lanes are heads
//     out     [panel][head][dim]     out * keep + probabilities x kv
//   then normalise, rotate back if asked, round, write.
//
// Absent records (-1, outside the pages, on a -1 page) are left out while a tile is filled, so no
// byte of theirs is read and a list with holes gives the bits of the compacted list. A head's
// arithmetic knows nothing of other heads, rows or threads: results do not depend on them. Sums run
// in two levels (64 products, then panels or tiles), which keeps FP32 within 2^-20 of exact.
//
// The floor is FP32 FMA: 8 rows x 64 heads x 640 records are 336 M of them, 1.9 ms on two AVX-512
// cores at 2.8 GHz. It runs in 2.2: 85 % in `multiply`, 9 % decoding, 6 % softmax, query, output.
#include <cmath>
#include <limits>
#include <memory>

#include "core/list.h"
#include "core/numerics.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/write_output.h"

namespace flash_csa::cpu {
namespace {

constexpr int kSide = 64;  // dims of a panel, records of a tile, heads of a task: all squares
constexpr int kSquare = kSide * kSide;
constexpr int kPanels = kHeadDim / kSide;
constexpr int kLanes = 16;  // one AVX-512 register, two of AVX2
constexpr int kBlock = 8;   // rows of the micro-kernel: 8 x 32 accumulators fill 16 registers
constexpr int kFewTasks = 8;
constexpr float kInf = std::numeric_limits<float>::infinity();

// 401 KiB, in a core's second-level cache. Dims lie in the order of dim_at.
struct alignas(64) Scratch {
    float q[kPanels][kSquare];    // [dim][head]
    float kv[kPanels][kSquare];   // [record][dim]
    float out[kPanels][kSquare];  // [head][dim]
    float logits[kSquare];        // [record][head], then probabilities
    float max[kSide];             // per head
    float sum[kSide];
    float keep[kSide];  // weight of the earlier tiles
};

// Dim at a place of the scratch order: of each 128 dims, the first of every 8, then the second, and
// so on. In this order lane l decodes its 8 dims from one (little-endian) word of FP4, or two of
// FP8, by shifts alone.
constexpr int dim_at(int place) { return place / 128 * 128 + place % 16 * 8 + place % 128 / 16; }

// ---- Records

struct RecordRef {
    const uint8_t* codes;
    const uint8_t* scales;
    RecordId id;
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

// Where the 16 values of step n (0..7) of 128-dim block b go, for a record's row of kv[0].
FCSA_HD float* lanes_at(float* row, int b, int n) {
    return row + (2 * b + n / 4) * kSquare + n % 4 * kLanes;
}

FCSA_HD void dequantise_fp4(const RecordRef& ref, float* row) {
    constexpr int kScales = kHeadDim / 16;
    uint32_t bytes[kScales];
    float scales[kScales];
    FCSA_VECTORISE for (int g = 0; g < kScales; ++g) bytes[g] = ref.scales[g];
    FCSA_VECTORISE for (int g = 0; g < kScales; ++g) scales[g] = value_e4m3(bytes[g]);
    for (int b = 0; b < kHeadDim / 128; ++b) {
        uint32_t words[kLanes];
        std::memcpy(words, ref.codes + 64 * b, sizeof words);
        float scale[kLanes];
        FCSA_VECTORISE for (int g = 0; g < kLanes / 2; ++g) {
            scale[2 * g] = scale[2 * g + 1] = scales[8 * b + g];
        }
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            float* out = lanes_at(row, b, n);
            FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
                out[l] = mul_rn(value_e2m1(words[l] >> (4 * n)), scale[l]);
            }
        }
    }
}

template <int kGroup>
FCSA_HD void dequantise_fp8(const RecordRef& ref, int num_scales, float* row) {
    for (int b = 0; b < kHeadDim / 128; ++b) {
        uint32_t words[2 * kLanes];
        uint32_t halves[2][kLanes];
        std::memcpy(words, ref.codes + 128 * b, sizeof words);
        FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
            halves[0][l] = words[2 * l];
            halves[1][l] = words[2 * l + 1];
        }
        float scale[kLanes];
        for (int g = 0; g < 128 / kGroup; ++g) {
            const int index = 128 / kGroup * b + g;
            const float value = decode_ue8m0(ref.scales[index < num_scales ? index : 0]);
            FCSA_VECTORISE for (int l = 0; l < kGroup / 8; ++l) scale[kGroup / 8 * g + l] = value;
        }
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
            float* out = lanes_at(row, b, n);
            FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
                out[l] = mul_rn(value_e4m3(halves[n / 4][l] >> (8 * (n % 4))), scale[l]);
            }
        }
    }
}

// MixedFp8: 448 FP8 values, then 64 in BF16, which replace what the FP8 loop made of their bytes.
FCSA_HD void dequantise_mixed(const RecordRef& ref, const Record& record, float* row) {
    dequantise_fp8<64>(ref, record.num_scales(), row);
    uint16_t tail[kRopeDims];
    std::memcpy(tail, ref.codes + record.coded_dims, sizeof tail);
    for (int n = 0; n < 8; ++n) {
        float* out = lanes_at(row, kHeadDim / 128 - 1, n) + kLanes / 2;
        for (int l = 0; l < kLanes / 2; ++l) out[l] = bf16_to_f32(tail[8 * l + n]);
    }
}

FCSA_HD void dequantise(const RecordRef& ref, float* row) {
    switch (ref.id) {
        case RecordId::MainFp4:
            return dequantise_fp4(ref, row);
        case RecordId::WindowFp8:
            return dequantise_fp8<32>(ref, record(ref.id).num_scales(), row);
        default:
            return dequantise_mixed(ref, record(ref.id), row);
    }
}

// ---- One tile

// out[r][c] = out[r][c] * keep[r] + sum over i of a[r * kRow + i * kStep] * b[i][c], for kBlock
// rows and kVectors * kLanes columns of squares. The outermost loop is the one that becomes
// vectors: its body is scalar code whose accumulators stay in registers.
template <int kVectors, int kRow, int kStep>
FCSA_HD void multiply(const float* a, const float* b, int steps, const float* keep, float* out) {
#pragma GCC ivdep
    FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
        float sums[kBlock][kVectors] = {};
        int i = 0;
        do {  // a test before the first step would keep the loop around it from being vectorised
#pragma GCC unroll 8
            for (int r = 0; r < kBlock; ++r) {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    sums[r][v] =
                        fma_rn(a[r * kRow + i * kStep], b[i * kSide + v * kLanes + l], sums[r][v]);
                }
            }
        } while (++i < steps);
#pragma GCC unroll 8
        for (int r = 0; r < kBlock; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                float& cell = out[r * kSide + v * kLanes + l];
                cell = fma_rn(cell, keep[r], sums[r][v]);
            }
        }
    }
}

constexpr float kOnes[kBlock] = {1, 1, 1, 1, 1, 1, 1, 1};

// Rows of the last block beyond `records` hold stale values; nothing reads their logits.
FCSA_HD void query_times_keys(Scratch& s, int records, int lanes) {
    std::memset(s.logits, 0, sizeof s.logits);
    for (int panel = 0; panel < kPanels; ++panel) {
        for (int j = 0; j < records; j += kBlock) {
            const float* keys = s.kv[panel] + j * kSide;
            float* logits = s.logits + j * kSide;
            int h = 0;
            for (; h + 2 * kLanes <= lanes; h += 2 * kLanes) {
                multiply<2, kSide, 1>(keys, s.q[panel] + h, kSide, kOnes, logits + h);
            }
            if (h < lanes) multiply<1, kSide, 1>(keys, s.q[panel] + h, kSide, kOnes, logits + h);
        }
    }
}

// exp(x) for x <= 0, bounded below by 2^-125.5: subnormal results would cost a hundred cycles each,
// and the difference is far below the accuracy of a sum that holds exp(0).
FCSA_HD float exp_normal(float x) { return exp_fma(x < -87.0f ? -87.0f : x); }

FCSA_HD void softmax(Scratch& s, int records, int lanes, float scale) {
    float largest[kSide];
    float sum[kSide] = {};
    std::memcpy(largest, s.max, sizeof largest);
    for (int j = 0; j < records; ++j) {
        float* logits = s.logits + j * kSide;
        for (int h = 0; h < lanes; ++h) {
            logits[h] = mul_rn(logits[h], scale);
            largest[h] = logits[h] > largest[h] ? logits[h] : largest[h];
        }
    }
    for (int j = 0; j < records; ++j) {
        float* logits = s.logits + j * kSide;
        for (int h = 0; h < lanes; ++h) {
            logits[h] = exp_normal(sub_rn(logits[h], largest[h]));
            sum[h] = add_rn(sum[h], logits[h]);
        }
    }
    for (int h = 0; h < lanes; ++h) {
        s.keep[h] = exp_normal(sub_rn(s.max[h], largest[h]));
        s.sum[h] = fma_rn(s.sum[h], s.keep[h], sum[h]);
        s.max[h] = largest[h];
    }
}

FCSA_HD void probabilities_times_values(Scratch& s, int records, int heads) {
    for (int panel = 0; panel < kPanels; ++panel) {
        for (int h = 0; h < heads; h += kBlock) {
            for (int c = 0; c < kSide; c += 2 * kLanes) {
                multiply<2, 1, kSide>(s.logits + h, s.kv[panel] + c, records, s.keep + h,
                                      s.out[panel] + h * kSide + c);
            }
        }
    }
}

// ---- One task

FCSA_HD void load_query(const AttendParams& p, int64_t row, int first, int heads, int lanes,
                        Scratch& s) {
    for (int place = 0; place < kHeadDim; ++place) {
        float* q = s.q[place / kSide] + place % kSide * kSide;
        for (int h = 0; h < heads; ++h) q[h] = bf16_to_f32(p.q.at(row, first + h)[dim_at(place)]);
        for (int h = heads; h < lanes; ++h) q[h] = 0.0f;
    }
}

// in is in the scratch order; three perfect shuffles of each 128 values undo it.
FCSA_HD void restore_order(const float* in, float* out) {
    float once[128];
    float twice[128];
    const auto shuffle = [](const float* from, float* to) {
        FCSA_VECTORISE for (int i = 0; i < 64; ++i) {
            to[2 * i] = from[i];
            to[2 * i + 1] = from[64 + i];
        }
    };
    for (int base = 0; base < kHeadDim; base += 128) {
        shuffle(in + base, once);
        shuffle(once, twice);
        shuffle(twice, out + base);
    }
}

// A row without records gives 0 and +inf.
FCSA_HD void finish(const AttendParams& p, int64_t row, int first, int heads, bool empty,
                    const Scratch& s) {
    for (int h = 0; h < heads; ++h) {
        const float sink = p.sink != nullptr ? p.sink[first + h] : -kInf;
        const float total = add_rn(s.sum[h], exp_fma(sub_rn(sink, s.max[h])));
        const float factor = div_rn(1.0f, total);
        float scaled[kHeadDim];
        float values[kHeadDim] = {};
        if (!empty) {
            for (int panel = 0; panel < kPanels; ++panel) {
                const float* out = s.out[panel] + h * kSide;
                FCSA_VECTORISE for (int i = 0; i < kSide; ++i) {
                    scaled[panel * kSide + i] = mul_rn(out[i], factor);
                }
            }
            restore_order(scaled, values);
        }
        write_output(p, row, first + h, values);
        if (p.lse) p.lse.row(row)[first + h] = empty ? kInf : s.max[h] + std::log(s.sum[h]);
    }
}

inline void attend_task(const AttendParams& p, int64_t row, int first, int heads, Scratch& s) {
    const int lanes = (heads + kLanes - 1) / kLanes * kLanes;
    RowRecords list(p, row);
    RecordRef refs[kSide];
    int records = list.take(refs);
    const bool empty = records == 0;
    if (!empty) load_query(p, row, first, heads, lanes, s);
    std::memset(s.out, 0, sizeof s.out);
    for (int h = 0; h < kSide; ++h) {
        s.max[h] = -kInf;
        s.sum[h] = 0.0f;
    }
    for (; records > 0; records = list.take(refs)) {
        for (int j = 0; j < records; ++j) dequantise(refs[j], s.kv[0] + j * kSide);
        query_times_keys(s, records, lanes);
        softmax(s, records, lanes, p.softmax_scale);
        probabilities_times_values(s, records, heads);
    }
    finish(p, row, first, heads, empty, s);
}

Scratch& thread_scratch() {
    static thread_local const std::unique_ptr<Scratch> scratch(new Scratch());
    return *scratch;
}

// A task takes `heads` heads of one row.
inline void attend_tasks(const AttendParams& p, int heads, int64_t begin, int64_t end) {
    Scratch& scratch = thread_scratch();
    const int64_t tasks_per_row = (p.heads + heads - 1) / heads;
    for (int64_t task = begin; task < end; ++task) {
        const int first = static_cast<int>(task % tasks_per_row) * heads;
        const int count = p.heads - first < heads ? p.heads - first : heads;
        attend_task(p, task / tasks_per_row, first, count, scratch);
    }
}

}  // namespace

void attend(const AttendParams& p) {
    // 64 heads at once decode a record once for all of them; 32 where that would leave too few
    // tasks for the threads, at the price of a second decode (a tenth of the time).
    const int64_t tasks = p.rows * int64_t{(p.heads + kSide - 1) / kSide};
    const int heads = tasks < kFewTasks ? kSide / 2 : kSide;
    const int64_t tasks_per_row = (p.heads + heads - 1) / heads;
    parallel_for(p.rows * tasks_per_row, 1, [&](int64_t begin, int64_t end) {
        per_level<attend_tasks>(p, heads, begin, end);
    });
}

}  // namespace flash_csa::cpu
