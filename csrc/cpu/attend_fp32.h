// The two products of attend in FP32, for every processor.
#pragma once

#include <cstring>

#include "core/numerics.h"
#include "core/params.h"
#include "cpu/attend_records.h"
#include "cpu/attend_tile.h"

namespace flash_csa::cpu {

constexpr int kBlock = 4;  // rows of the micro-kernel: two chains of 4 x 32 fill 16 registers

// out[r][c] += sum over kTerms i of a[r * kRow + i * kStep] * b[i][c], for kBlock rows and
// kVectors * kLanes columns of squares. The outermost loop is the one that becomes vectors: its
// body is scalar code whose accumulators stay in registers.
template <int kVectors, int kRow, int kStep>
FCSA_HD void multiply(const float* a, const float* b, float* out) {
#pragma GCC ivdep
    FCSA_VECTORISE for (int l = 0; l < kLanes; ++l) {
        float chains[2][kBlock][kVectors] = {};
        FCSA_VECTORISE for (int i = 0; i < kChain; ++i) {
#pragma GCC unroll 2
            for (int chain = 0; chain < 2; ++chain) {
                const int term = chain * kChain + i;
#pragma GCC unroll 8
                for (int r = 0; r < kBlock; ++r) {
#pragma GCC unroll 2
                    for (int v = 0; v < kVectors; ++v) {
                        float& sum = chains[chain][r][v];
                        sum = fma_rn(a[r * kRow + term * kStep], b[term * kSide + v * kLanes + l],
                                     sum);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kBlock; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                float& cell = out[r * kSide + v * kLanes + l];
                cell = add_rn(cell, add_rn(chains[0][r][v], chains[1][r][v]));
            }
        }
    }
}

struct alignas(64) Fp32Operands {
    float q[kPanels][kSquare];   // [dim][head]
    float kv[kPanels][kSquare];  // [record][dim]

    FCSA_HD void load_query(const AttendParams& p, int64_t row, int first, int heads) {
        const int lanes = (heads + kLanes - 1) / kLanes * kLanes;
        for (int place = 0; place < kHeadDim; ++place) {
            float* to = q[place / kSide] + place % kSide * kSide;
            for (int h = 0; h < heads; ++h) {
                to[h] = bf16_to_f32(p.q.at(row, first + h)[dim_at(place)]);
            }
            for (int h = heads; h < lanes; ++h) to[h] = 0.0f;
        }
    }

    FCSA_HD void put_record(int j, const RecordRef& ref) {
        dequantise(ref, {kv[0] + j * kSide, kSquare});
    }

    FCSA_HD void clear_records(int begin, int end) {
        for (auto& panel : kv) {
            std::memset(panel + begin * kSide, 0, (end - begin) * kSide * sizeof *panel);
        }
    }

    FCSA_HD void make_logits(TileState& s, int records, int lanes) const {
        for (int d = 0; d < kHeadDim; d += kTerms) {
            const float* keys = kv[d / kSide] + d % kSide;
            const float* query = q[d / kSide] + d % kSide * kSide;
            for (int j = 0; j < records; j += kBlock) {
                const float* a = keys + j * kSide;
                float* logits = s.logits + j * kSide;
                int h = 0;
                for (; h + 2 * kLanes <= lanes; h += 2 * kLanes) {
                    multiply<2, kSide, 1>(a, query + h, logits + h);
                }
                if (h < lanes) multiply<1, kSide, 1>(a, query + h, logits + h);
            }
        }
    }

    FCSA_HD void add_values(TileState& s, int records, int heads) const {
        for (int j = 0; j < records; j += kTerms) {
            const float* weights = s.logits + j * kSide;
            for (int panel = 0; panel < kPanels; ++panel) {
                const float* values = kv[panel] + j * kSide;
                for (int h = 0; h < heads; h += kBlock) {
                    for (int c = 0; c < kSide; c += 2 * kLanes) {
                        multiply<2, 1, kSide>(weights + h, values + c,
                                              s.out[panel] + h * kSide + c);
                    }
                }
            }
        }
    }
};

}  // namespace flash_csa::cpu
