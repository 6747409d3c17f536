// Threads without a framework: ops installs PyTorch's pool, C++ tests run on the caller's thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace flash_csa::cpu {

using ParallelBody = void (*)(const void* context, int64_t begin, int64_t end);
using ParallelRun = void (*)(int64_t n, int64_t grain, ParallelBody body, const void* context);

inline void run_serial(int64_t n, int64_t, ParallelBody body, const void* context) {
    if (n > 0) body(context, 0, n);
}
inline ParallelRun parallel_run = run_serial;

// Calls f(begin, end) on ranges that cover [0, n), each at least `grain` long where n allows.
// f must not throw, and its result must not depend on where the ranges are cut.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
    static_assert(std::is_invocable_v<F, int64_t, int64_t>);
    parallel_run(
        n, grain,
        [](const void* context, int64_t begin, int64_t end) {
            (*static_cast<const F*>(context))(begin, end);
        },
        &f);
}

// Deals tasks 0, 1, .. n - 1 to whichever thread is free. worker(next) runs on every thread, which
// lets it keep scratch between tasks; next() is a task, or n when none is left.
template <class Worker>
void parallel_tasks(int64_t n, const Worker& worker) {
    std::atomic<int64_t> dealt{0};
    const auto next = [&dealt, n] {
        const int64_t task = dealt.fetch_add(1, std::memory_order_relaxed);
        return task < n ? task : n;
    };
    parallel_for(n, 1, [&](int64_t, int64_t) { worker(next); });
}

}  // namespace flash_csa::cpu
