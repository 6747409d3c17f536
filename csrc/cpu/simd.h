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

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash_csa::cpu {

// Avx512Vnni adds byte dot products, Amx BF16 matrices, which a loop body does not use by itself:
// code that has its own variant for them asks for the level.
enum class Level : int32_t { Baseline, Avx2, Avx512, Avx512Vnni, Amx };
constexpr const char* kLevelNames[] = {"baseline", "avx2", "avx512", "avx512vnni", "amx"};

// Whether the processor has BF16 matrices and the system lets this process use their registers.
inline bool may_use_amx() {
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
    constexpr unsigned kTileAndBf16 = 1u << 24 | 1u << 22;      // of leaf 7's EDX
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h has them since 5.16
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (edx & kTileAndBf16) == kTileAndBf16 &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

inline Level best_level() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return !__builtin_cpu_supports("avx512vnni") ? Level::Avx512
               : may_use_amx()                       ? Level::Amx
                                                     : Level::Avx512Vnni;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Level::Avx2;
#endif
    return Level::Baseline;
}

// FLASH_CSA_CPU_LEVEL, one of kLevelNames, lowers the level (a test compares their bytes).
inline Level initial_level() {
    const char* wanted = std::getenv("FLASH_CSA_CPU_LEVEL");
    const Level best = best_level();
    if (wanted == nullptr) return best;
    for (int i = 0; i < static_cast<int>(best); ++i) {
        if (std::strcmp(wanted, kLevelNames[i]) == 0) return static_cast<Level>(i);
    }
    return best;
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
        case Level::Amx:
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
