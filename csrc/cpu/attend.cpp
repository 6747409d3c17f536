// Attention of every query row over its window records and its main records.
//
//   for each task = one row and up to 64 of its heads, and each tile of 64 present records:
//     operands  dequantised once for all heads of the task
//     logits    [record][head]     keys x q
//     softmax                      running maximum and sum of each head; lanes are heads
//     out       [panel][head][dim] out * keep + probabilities x values
//   then normalise, rotate back if asked, round, write.
//
// Absent records (-1, outside the pages, on a -1 page) are left out while a tile is filled, so no
// byte of theirs is read and a list with holes gives the bits of the compacted list. A head's
// arithmetic knows nothing of other heads, rows or threads: results do not depend on them.
//
// Both products add in one order, that of the matrix units of attend_amx.h: of 32 terms, the first
// 16 in one FMA chain and the other 16 in a second, then their sum to the total. FP32 output has
// FP32 probabilities and keeps within 2^-20 of exact; BF16 output has them rounded to BF16 (their
// sum is not), which is what tensor cores and matrix units take.
#include <cmath>
#include <limits>
#include <memory>

#include "core/numerics.h"
#include "cpu/attend_amx.h"
#include "cpu/attend_fp32.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/write_output.h"

namespace flash_csa::cpu {
namespace {

constexpr int kFewTasks = 8;
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- One tile

// exp(x) for x <= 0, bounded below by 2^-125.5: subnormal results would cost a hundred cycles each,
// and the difference is far below the accuracy of a sum that holds exp(0).
FCSA_HD float exp_normal(float x) { return exp_fma(x < -87.0f ? -87.0f : x); }

FCSA_HD void softmax(TileState& s, int records, int lanes, float scale) {
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

// BF16 output has BF16 probabilities.
FCSA_HD void round_probabilities(TileState& s, int records, int lanes) {
    for (int j = 0; j < records; ++j) {
        float* weights = s.logits + j * kSide;
        for (int h = 0; h < lanes; ++h) {
            weights[h] = bits_float(probability_bf16(weights[h]) << 16);
        }
    }
}

FCSA_HD void rescale(TileState& s, int heads) {
    for (int h = 0; h < heads; ++h) {
        const float keep = s.keep[h];
        if (keep == 1.0f) continue;
        for (auto& panel : s.out) {
            float* out = panel + h * kSide;
            FCSA_VECTORISE for (int c = 0; c < kSide; ++c) out[c] = mul_rn(out[c], keep);
        }
    }
}

// ---- One task

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
                    const TileState& s) {
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

// 0.4 MB, in a core's second-level cache.
template <class Operands>
struct Scratch {
    TileState state;
    Operands operands;
};

template <class Operands>
inline void attend_task(const AttendParams& p, int64_t row, int first, int heads,
                        Scratch<Operands>& scratch) {
    TileState& s = scratch.state;
    Operands& operands = scratch.operands;
    const int lanes = (heads + kLanes - 1) / kLanes * kLanes;
    RowRecords list(p, row);
    RecordRef refs[2][kSide];  // of this tile and the next
    int tile = 0;
    int records = list.take(refs[tile]);
    const bool empty = records == 0;
    for (int j = 0; j < records; ++j) refs[tile][j].prefetch();
    if (!empty) operands.load_query(p, row, first, heads);
    std::memset(s.out, 0, sizeof s.out);
    for (int h = 0; h < kSide; ++h) {
        s.max[h] = -kInf;
        s.sum[h] = 0.0f;
    }
    while (records > 0) {
        const int padded = (records + kTerms - 1) / kTerms * kTerms;
        const int next = list.take(refs[1 - tile]);
        for (int j = 0; j < records; ++j) {
            if (j < next) refs[1 - tile][j].prefetch();
            operands.put_record(j, refs[tile][j]);
        }
        operands.clear_records(records, padded);
        std::memset(s.logits, 0, sizeof s.logits);
        operands.make_logits(s, padded, lanes);
        softmax(s, records, lanes, p.softmax_scale);
        if (p.out_bf16.data != nullptr) round_probabilities(s, records, lanes);
        rescale(s, heads);
        operands.add_values(s, padded, heads);
        records = next;
        tile = 1 - tile;
    }
    finish(p, row, first, heads, empty, s);
}

template <class Operands>
Scratch<Operands>& thread_scratch() {
    static thread_local const std::unique_ptr<Scratch<Operands>> scratch(new Scratch<Operands>());
    return *scratch;
}

// A task takes `heads` heads of one row.
template <class Operands>
inline void attend_tasks(const AttendParams& p, int heads, int64_t begin, int64_t end) {
    Scratch<Operands>& scratch = thread_scratch<Operands>();
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
    // tasks for the threads, at the price of a second decode.
    const int64_t tasks = p.rows * int64_t{(p.heads + kSide - 1) / kSide};
    const int heads = tasks < kFewTasks ? kSide / 2 : kSide;
    const int64_t tasks_per_row = (p.heads + heads - 1) / heads;
    parallel_for(p.rows * tasks_per_row, 1, [&](int64_t begin, int64_t end) {
#ifdef FCSA_HAS_AMX
        if (current_level == Level::Amx && p.out_bf16.data != nullptr) {
            const AmxTiles tiles;
            return per_level<attend_tasks<AmxOperands>>(p, heads, begin, end);
        }
#endif
        per_level<attend_tasks<Fp32Operands>>(p, heads, begin, end);
    });
}

}  // namespace flash_csa::cpu
