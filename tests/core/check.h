// The few lines of test framework that the C++ tests of csrc/core need.
#pragma once

#include <cstdio>

namespace flash_csa::test {

inline int failures = 0;

inline void check(bool ok, const char* file, int line, const char* what) {
    if (ok) return;
    ++failures;
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

inline int report() {
    if (failures > 0) std::fprintf(stderr, "%d checks failed\n", failures);
    return failures > 0 ? 1 : 0;
}

}  // namespace flash_csa::test

#define CHECK(...) flash_csa::test::check((__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
