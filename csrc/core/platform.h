// Marks functions that both the CPU back end and CUDA kernels call.
#pragma once

#ifdef __CUDACC__
#define FCSA_HD __host__ __device__ __forceinline__
#else
// Inlined by force: the CPU kernels compile their loops once per instruction level, and a shared
// out-of-line copy would be stuck at the baseline level.
#define FCSA_HD inline __attribute__((always_inline))
#endif
