// Partial results of one query over disjoint sets of records, put together:
//
//   out = sum_w exp(lse_w) * out_w / (sum_w exp(lse_w) + exp(sink)),  lse = log(sum_w exp(lse_w))
//
// taken relative to the largest lse. A part whose lse is infinite is empty and its output is not
// read. The sink enters here and nowhere before.
#include <cmath>
#include <limits>

#include "core/numerics.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/write_output.h"

namespace flash_csa::cpu {
namespace {

constexpr int64_t kHeadsPerTask = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Parts {  // of one row and head
    const MergeParams& p;
    int64_t at;

    float lse(int w) const { return p.lses[w * stride() + at]; }
    bool empty(int w) const { return std::fabs(lse(w)) == kInf; }
    int64_t stride() const { return int64_t{p.rows} * p.heads; }
};

FCSA_HD void add_part(const MergeParams& p, int64_t vector, float weight, float* sum) {
    if (p.outs_f32 != nullptr) {
        const float* out = p.outs_f32 + vector * kHeadDim;
        FCSA_VECTORISE for (int d = 0; d < kHeadDim; ++d) sum[d] = fma_rn(weight, out[d], sum[d]);
        return;
    }
    const uint16_t* out = p.outs_bf16 + vector * kHeadDim;
    FCSA_VECTORISE for (int d = 0; d < kHeadDim; ++d) {
        sum[d] = fma_rn(weight, bf16_to_f32(out[d]), sum[d]);
    }
}

FCSA_HD void merge_head(const MergeParams& p, int64_t row, int64_t head) {
    const Parts parts{p, row * p.heads + head};
    const bool padded = lacks_position(p, row);
    bool empty = true;
    float largest = -kInf;
    for (int w = 0; w < p.parts && !padded; ++w) {
        if (parts.empty(w)) continue;
        empty = false;
        largest = parts.lse(w) > largest ? parts.lse(w) : largest;
    }
    float values[kHeadDim] = {};
    float total = 0.0f;
    for (int w = 0; w < p.parts && !empty; ++w) {
        if (parts.empty(w)) continue;
        const float weight = exp_fma(sub_rn(parts.lse(w), largest));
        total = add_rn(total, weight);
        add_part(p, w * parts.stride() + parts.at, weight, values);
    }
    if (!empty) {
        const float sink = p.sink != nullptr ? p.sink[head] : -kInf;
        const float divisor = add_rn(total, exp_fma(sub_rn(sink, largest)));
        FCSA_VECTORISE for (int d = 0; d < kHeadDim; ++d) values[d] = div_rn(values[d], divisor);
    }
    write_output(p, row, head, values);
    if (p.lse) p.lse.row(row)[head] = empty ? kInf : largest + std::log(total);
}

inline void merge_heads(const MergeParams& p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) merge_head(p, i / p.heads, i % p.heads);
}

}  // namespace

void merge(const MergeParams& p) {
    parallel_for(int64_t{p.rows} * p.heads, kHeadsPerTask,
                 [&](int64_t begin, int64_t end) { per_level<merge_heads>(p, begin, end); });
}

}  // namespace flash_csa::cpu
