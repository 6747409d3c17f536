// Worked examples of core/scoring.h.
#include "core/scoring.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "head_scores.h"

namespace flash_csa {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void test_order() {
    CHECK(order_key(1.0f) > order_key(0.5f) && order_key(0.5f) > order_key(0.0f));
    CHECK(order_key(0.0f) == order_key(-0.0f) && order_key(0.0f) > order_key(-0x1p-149f));
    CHECK(order_key(-1.0f) > order_key(-2.0f) && order_key(-2.0f) > order_key(-kInf));
    CHECK(order_key(-kInf) > order_key(kNan) && order_key(kNan) == 0 && order_key(-kNan) == 0);
    CHECK(order_key(1.0f, 3) > order_key(1.0f, 4) && order_key(1.5f, 4) > order_key(1.0f, 3));
}

void test_dots() {
    uint8_t codes[kIndexDims / 2];
    int8_t units[kIndexDims];
    for (int i = 0; i < kIndexDims / 2; ++i) codes[i] = static_cast<uint8_t>(0x2f);  // -6 and 1
    half_units_row(codes, units);
    CHECK(units[0] == -12 && units[1] == 2 && units[127] == 2);
    CHECK(group_dot(units, units) == 16 * (144 + 4));  // in quarters
    const uint8_t ones[4] = {127, 127, 127, 127};
    const uint8_t poisoned[4] = {127, 127, 0xff, 127};
    CHECK(head_dot(units, ones, units, ones) == 4 * 16 * 37);
    CHECK(std::isnan(head_dot(units, ones, units, poisoned)));
    CHECK(scale_product(130, 120) == 0x1p-4f && scale_product(254, 254) == kInf);
    CHECK(scale_product(1, 100) == 0 && scale_product(0, 120) == 0x1p-134f);
}

void test_head_sum() {
    const float dots[5] = {1, -1, 2, 3, 5};
    const float weights[5] = {-2, 100, 1, 1, 1};
    CHECK(sum_heads(dots, weights, 5) == -2 + 0 + 2 + 3 + 5);
    const float bad[1] = {kNan};
    CHECK(std::isnan(sum_heads(bad, weights, 1)) && sum_heads(dots, weights, 0) == 0);
    // Lanes: heads 0, 1, 8, 9 | 2, 3 | 4, 5 | 6, 7. 2^24 + 1 survives only in a lane of its own.
    const float big[4] = {0x1p24f, 1, 0, 0};
    const float unit[4] = {1, 1, 1, 1};
    CHECK(sum_heads(big, unit, 2) == 0x1p24f);
    const float apart[4] = {0x1p24f, 0, 1, 1};
    CHECK(sum_heads(apart, unit, 4) == 0x1p24f + 2);
}

}  // namespace
}  // namespace flash_csa

int main() {
    flash_csa::test_order();
    flash_csa::test_dots();
    flash_csa::test_head_sum();
    return flash_csa::test::report();
}
