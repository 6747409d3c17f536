// One loop body, compiled once per instruction level, chosen at run time.
//
//   inline void rows_body(const StoreParams& p, int64_t begin, int64_t end) { ... }
//   per_level<rows_body>(p, begin, end);
//
// The body is inlined (flatten) into a wrapper for each level, so the compiler vectorises it with
// that level's registers and turns std::fma into an instruction. All levels give the same bytes:
// fused operations are written as std::fma, and -ffp-contract=off keeps others apart.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace flash_csa::cpu {

// Avx512Vnni adds byte dot products, which a loop body does not use by itself: code that has its
// own variant for them asks for the level.
enum class Level : int32_t { Baseline, Avx2, Avx512, Avx512Vnni };

inline Level best_level() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512vnni") ? Level::Avx512Vnni : Level::Avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Level::Avx2;
#endif
    return Level::Baseline;
}

// FLASH_CSA_CPU_LEVEL=baseline|avx2|avx512|avx512vnni lowers the level (a test compares their
// bytes).
inline Level initial_level() {
    const char* wanted = std::getenv("FLASH_CSA_CPU_LEVEL");
    const Level best = best_level();
    if (wanted == nullptr) return best;
    Level level = best;
    if (std::strcmp(wanted, "baseline") == 0) level = Level::Baseline;
    if (std::strcmp(wanted, "avx2") == 0) level = Level::Avx2;
    if (std::strcmp(wanted, "avx512") == 0) level = Level::Avx512;
    return level < best ? level : best;
}

inline Level current_level = initial_level();

#if defined(__x86_64__) && defined(__GNUC__)
#define FCSA_TARGET_AVX2 __attribute__((flatten, target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")))
#define FCSA_TARGET_AVX512                                                                   \
    __attribute__((flatten,                                                                  \
                   target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,lzcnt," \
                          "popcnt,prefer-vector-width=512")))
#else
#define FCSA_TARGET_AVX2
#define FCSA_TARGET_AVX512
#endif

template <auto kBody, class... Args>
__attribute__((flatten)) void run_baseline(const Args&... args) {
    kBody(args...);
}
template <auto kBody, class... Args>
FCSA_TARGET_AVX2 void run_avx2(const Args&... args) {
    kBody(args...);
}
template <auto kBody, class... Args>
FCSA_TARGET_AVX512 void run_avx512(const Args&... args) {
    kBody(args...);
}

template <auto kBody, class... Args>
void per_level(const Args&... args) {
    switch (current_level) {
        case Level::Avx512Vnni:
        case Level::Avx512:
            return run_avx512<kBody>(args...);
        case Level::Avx2:
            return run_avx2<kBody>(args...);
        default:
            return run_baseline<kBody>(args...);
    }
}

}  // namespace flash_csa::cpu
