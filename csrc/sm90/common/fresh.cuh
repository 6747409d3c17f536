// Against values that the compiler would compute before a loop and keep in registers it lacks.
#pragma once

namespace flash_csa::sm90 {

// The same number as if it were a new one: what follows from it is computed where it is used.
__device__ __forceinline__ int fresh(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The same number of a lane, a thread or a record: that it is not negative makes divisions shifts.
__device__ __forceinline__ int fresh_lane(int x) {
    x = fresh(x);
    __builtin_assume(x >= 0);
    return x;
}

// The same value: it is waited for here, if it is on its way.
__device__ __forceinline__ float fresh(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// The same address: accesses at constant distances from it share it.
template <class T>
__device__ __forceinline__ T* fresh(T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

}  // namespace flash_csa::sm90
