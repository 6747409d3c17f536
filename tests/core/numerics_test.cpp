// Worked examples of core/numerics.h, every number by hand. The exhaustive comparison with PyTorch
// and with exact arithmetic is tests/test_numerics.py.
#include "core/numerics.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "check.h"

namespace flash_csa {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A group of kCount BF16 values, zero where none is given.
template <int kCount>
std::vector<uint16_t> group(std::initializer_list<float> values) {
    std::vector<uint16_t> x(kCount, 0);
    size_t i = 0;
    for (float value : values) x[i++] = f32_to_bf16(value);
    return x;
}

void test_scalar_codes() {
    const float e2m1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    for (uint8_t code = 0; code < 8; ++code) {
        CHECK(decode_e2m1(code) == e2m1[code]);
        CHECK(decode_e2m1(code | 8) == -e2m1[code]);
        CHECK(encode_e2m1(e2m1[code]) == code);
    }
    CHECK(encode_e2m1(-0.0f) == 8 && encode_e2m1(-0.25f) == 8 && encode_e2m1(-kInf) == 15);

    CHECK(decode_e4m3(0x01) == 0x1p-9f && decode_e4m3(0x7e) == 448 && decode_e4m3(0xb8) == -1);
    CHECK(encode_e4m3(464) == 0x7e && encode_e4m3(kInf) == 0x7e && encode_e4m3(-1e30f) == 0xfe);
    CHECK(encode_e4m3(0x1p-10f) == 0x00 && encode_e4m3(0x1.8p-9f) == 0x02);  // ties to even
    CHECK(encode_e4m3(kNan) == 0x7f && encode_e4m3(-kNan) == 0x7f);

    CHECK(decode_ue8m0(0) == 0x1p-127f && decode_ue8m0(127) == 1 && decode_ue8m0(254) == 0x1p127f);
    CHECK(std::isnan(decode_ue8m0(0xff)));
    CHECK(encode_ue8m0_ceil(1.0f) == 127 && encode_ue8m0_ceil(1.0000001f) == 128);
    CHECK(encode_ue8m0_ceil(0.0f) == 0 && encode_ue8m0_ceil(3e38f) == 254);
    CHECK(encode_ue8m0_ceil(kInf) == 0xff && encode_ue8m0_ceil(kNan) == 0xff);
}

void test_bf16() {
    CHECK(f32_to_bf16(1.00390625f) == 0x3f80);  // tie, to even
    CHECK(f32_to_bf16(1.01171875f) == 0x3f82);
    CHECK(f32_to_bf16(3.4e38f) == 0x7f80 && f32_to_bf16(-kNan) == 0x7fc0);
}

void test_main_group() {
    uint8_t codes[8], scale = 0;
    encode_groups_main<1>(
        group<16>({.5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6, -0.0f}).data(),
        codes, &scale);
    const uint8_t expected[8] = {0x21, 0x43, 0x65, 0x07, 0xa9, 0xcb, 0xed, 0x8f};
    CHECK(scale == 0x38 && std::memcmp(codes, expected, 8) == 0);

    encode_groups_main<1>(group<16>({}).data(), codes, &scale);
    CHECK(scale == 0x01 && codes[0] == 0);
    encode_groups_main<1>(group<16>({6.375f}).data(), codes, &scale);
    CHECK(scale == 0x38 && codes[0] == 7);
    encode_groups_main<1>(group<16>({1, kInf}).data(), codes, &scale);
    CHECK(scale == kNanE4M3 && codes[0] == 0);
}

void test_power_of_two_groups() {
    uint8_t codes[64], scale = 0;
    encode_group_index(group<32>({6, -3}).data(), codes, &scale);
    CHECK(scale == 127 && codes[0] == 0xd7);
    encode_group_index(group<32>({}).data(), codes, &scale);
    CHECK(scale == 1);  // 2^-126
    encode_group_fp8<32>(group<32>({}).data(), codes, &scale);
    CHECK(scale == 127 - 22);
    encode_group_fp8<64>(group<64>({450}).data(), codes, &scale);
    CHECK(scale == 128 && codes[0] == encode_e4m3(224));
}

void test_exp() {
    CHECK(exp_fma(0) == 1 && exp_fma(-0.0f) == 1 && exp_fma(-kInf) == 0 && exp_fma(kInf) == kInf);
    CHECK(exp_fma(-104) == 0 && exp_fma(89) == kInf && std::isnan(exp_fma(kNan)));
}

}  // namespace
}  // namespace flash_csa

int main() {
    flash_csa::test_scalar_codes();
    flash_csa::test_bf16();
    flash_csa::test_main_group();
    flash_csa::test_power_of_two_groups();
    flash_csa::test_exp();
    return flash_csa::test::report();
}
