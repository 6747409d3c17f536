// Python module `flash_csa_core`: csrc/core for pytest, numpy in and out.
//
// Scalar functions are vectorised over arrays; row functions take [n, width] and loop over n. BF16
// and codes are bit patterns (uint16, uint8).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "core/causal.h"
#include "core/numerics.h"
#include "core/scoring.h"
#include "head_scores.h"

namespace py = pybind11;

namespace flash_csa {
namespace {

// No lossy conversion: a test that passes another dtype is wrong.
template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
Array<T> make(py::ssize_t rows, py::ssize_t width) {
    return Array<T>({rows, width});
}

template <class T>
py::ssize_t rows_of(const Array<T>& x, py::ssize_t width) {
    if (x.ndim() != 2 || x.shape(1) != width) throw std::invalid_argument("wrong row width");
    return x.shape(0);
}

// Encoder of rows of kWidth BF16 values into (codes [n, kCodes], scales [n, kScales]).
template <int kWidth, int kCodes, int kScales, class Scale, auto kEncode>
py::tuple encode(const Array<uint16_t>& x) {
    const py::ssize_t n = rows_of(x, kWidth);
    auto codes = make<uint8_t>(n, kCodes);
    auto scales = make<Scale>(n, kScales);
    for (py::ssize_t i = 0; i < n; ++i) {
        kEncode(x.data() + i * kWidth, codes.mutable_data() + i * kCodes,
                scales.mutable_data() + i * kScales);
    }
    return py::make_tuple(codes, scales);
}

// Decoder of (codes [n, kCodes], scales [n, 1]) into [n, kWidth] of Out.
template <int kWidth, int kCodes, class Scale, class Out, auto kDecode>
Array<Out> decode(const Array<uint8_t>& codes, const Array<Scale>& scales) {
    const py::ssize_t n = rows_of(codes, kCodes);
    if (rows_of(scales, 1) != n) throw std::invalid_argument("codes and scales differ in rows");
    auto out = make<Out>(n, kWidth);
    for (py::ssize_t i = 0; i < n; ++i) {
        kDecode(codes.data() + i * kCodes, scales.data()[i], out.mutable_data() + i * kWidth);
    }
    return out;
}

template <class Out>
void decode_group_main(const uint8_t* codes, uint8_t scale, Out* out) {
    decode_groups_main<1>(codes, &scale, out);
}

template <int kWidth>
Array<uint16_t> rms_norm(const Array<float>& x, const Array<float>& w, float eps) {
    const py::ssize_t n = rows_of(x, kWidth);
    if (rows_of(w, kWidth) != 1) throw std::invalid_argument("one row of weights");
    auto out = make<uint16_t>(n, kWidth);
    for (py::ssize_t i = 0; i < n; ++i) {
        rms_norm_row<kWidth>(x.data() + i * kWidth, w.data(), eps, out.mutable_data() + i * kWidth);
    }
    return out;
}

template <int kWidth, auto kReduce>
Array<float> reduce(const Array<float>& x) {
    Array<float> out(rows_of(x, kWidth));
    for (py::ssize_t i = 0; i < x.shape(0); ++i) {
        out.mutable_data()[i] = kReduce(x.data() + i * kWidth);
    }
    return out;
}

template <int kWidth, auto kRotate>
Array<uint16_t> rotate(const Array<uint16_t>& x, const Array<float>& cos_sin) {
    const py::ssize_t n = rows_of(x, kWidth);
    if (rows_of(cos_sin, kRopeDims) != n) throw std::invalid_argument("one angle row per row");
    auto out = make<uint16_t>(n, kWidth);
    std::copy_n(x.data(), x.size(), out.mutable_data());
    for (py::ssize_t i = 0; i < n; ++i) {
        kRotate(out.mutable_data() + i * kWidth, cos_sin.data() + i * kRopeDims);
    }
    return out;
}

Array<float> hadamard(const Array<float>& x) {
    auto out = make<float>(rows_of(x, 128), 128);
    std::copy_n(x.data(), x.size(), out.mutable_data());
    for (py::ssize_t i = 0; i < x.shape(0); ++i) hadamard_128(out.mutable_data() + i * 128);
    return out;
}

// Scores [n] of one query (codes [heads, 64], scales [heads, 4], weights [heads]) against n keys.
Array<float> index_scores(const Array<uint8_t>& q_codes, const Array<uint8_t>& q_scales,
                          const Array<float>& weights, const Array<uint8_t>& k_codes,
                          const Array<uint8_t>& k_scales) {
    const py::ssize_t heads = rows_of(q_codes, kIndexDims / 2);
    const py::ssize_t n = rows_of(k_codes, kIndexDims / 2);
    if (rows_of(q_scales, kIndexGroups) != heads || weights.size() != heads ||
        rows_of(k_scales, kIndexGroups) != n) {
        throw std::invalid_argument("index_scores: shapes disagree");
    }
    std::vector<int8_t> q_units(heads * kIndexDims);
    for (py::ssize_t h = 0; h < heads; ++h) {
        half_units_row(q_codes.data() + h * kIndexDims / 2, &q_units[h * kIndexDims]);
    }
    Array<float> out(n);
    std::vector<float> dots(heads);
    for (py::ssize_t j = 0; j < n; ++j) {
        int8_t k_units[kIndexDims];
        half_units_row(k_codes.data() + j * kIndexDims / 2, k_units);
        for (py::ssize_t h = 0; h < heads; ++h) {
            dots[h] = head_dot(&q_units[h * kIndexDims], q_scales.data() + h * kIndexGroups,
                               k_units, k_scales.data() + j * kIndexGroups);
        }
        out.mutable_data()[j] = sum_heads(dots.data(), weights.data(), static_cast<int>(heads));
    }
    return out;
}

void define_scalars(py::module_& m) {
    m.def("bf16_to_f32", py::vectorize(bf16_to_f32));
    m.def("f32_to_bf16", py::vectorize(f32_to_bf16));
    m.def("round_bf16", py::vectorize(round_bf16));
    m.def("encode_e4m3", py::vectorize(encode_e4m3));
    m.def("decode_e4m3", py::vectorize(decode_e4m3));
    m.def("encode_e2m1", py::vectorize(encode_e2m1));
    m.def("decode_e2m1", py::vectorize(decode_e2m1));
    m.def("encode_ue8m0_ceil", py::vectorize(encode_ue8m0_ceil));
    m.def("decode_ue8m0", py::vectorize(decode_ue8m0));
    m.def("exp_fma", py::vectorize(exp_fma));
    m.def("rsqrt_ieee", py::vectorize(rsqrt_ieee));

    m.def("order_key", py::vectorize([](float score) { return order_key(score); }));
    m.def("order_key_at",
          py::vectorize([](float score, int32_t position) { return order_key(score, position); }));
    m.def("scale_product", py::vectorize(scale_product));
    m.def("e2m1_half_units", py::vectorize(e2m1_half_units));
    m.def("head_lane", py::vectorize(head_lane));

    m.def("n_vis", py::vectorize(n_vis));
    m.def("closes", py::vectorize(closes));
    m.def("entry_of", py::vectorize(entry_of));
    m.def("window_first", py::vectorize(window_first));
    m.def("window_length", py::vectorize(window_length));
}

void define_rows(py::module_& m) {
    m.def("encode_group_main", &encode<16, 8, 1, uint8_t, encode_groups_main<1>>);
    m.def("encode_row_main", &encode<512, 256, 32, uint8_t, encode_groups_main<32>>);
    m.def("encode_group_index", &encode<32, 16, 1, uint8_t, encode_group_index>);
    m.def("encode_group_fp8_32", &encode<32, 32, 1, uint8_t, encode_group_fp8<32>>);
    m.def("encode_group_fp8_64", &encode<64, 64, 1, uint8_t, encode_group_fp8<64>>);
    m.def("encode_row_index_fp8", &encode<128, 128, 1, float, encode_row_index_fp8>);

    m.def("decode_group_main", &decode<16, 8, uint8_t, float, decode_group_main<float>>);
    m.def("decode_group_main_bf16", &decode<16, 8, uint8_t, uint16_t, decode_group_main<uint16_t>>);
    m.def("decode_group_index", &decode<32, 16, uint8_t, float, decode_group_index<float>>);
    m.def("decode_group_index_bf16",
          &decode<32, 16, uint8_t, uint16_t, decode_group_index<uint16_t>>);
    m.def("decode_group_fp8_32", &decode<32, 32, uint8_t, float, decode_group_fp8<32, float>>);
    m.def("decode_group_fp8_32_bf16",
          &decode<32, 32, uint8_t, uint16_t, decode_group_fp8<32, uint16_t>>);
    m.def("decode_group_fp8_64", &decode<64, 64, uint8_t, float, decode_group_fp8<64, float>>);
    m.def("decode_group_fp8_64_bf16",
          &decode<64, 64, uint8_t, uint16_t, decode_group_fp8<64, uint16_t>>);
    m.def("decode_row_index_fp8", &decode<128, 128, float, float, decode_row_index_fp8<float>>);

    m.def("sum_squares_128", &reduce<128, sum_squares<128>>);
    m.def("sum_squares_512", &reduce<512, sum_squares<512>>);
    m.def("rms_norm_128", &rms_norm<128>);
    m.def("rms_norm_512", &rms_norm<512>);
    m.def("rope_128", &rotate<128, rope_row<128>>);
    m.def("rope_512", &rotate<512, rope_row<512>>);
    m.def("inverse_rope_512", &rotate<512, inverse_rope_row<512>>);
    m.def("hadamard_128", &hadamard);
    m.def("index_scores", &index_scores);
}

}  // namespace
}  // namespace flash_csa

PYBIND11_MODULE(flash_csa_core, m) {
    flash_csa::define_scalars(m);
    flash_csa::define_rows(m);
}
