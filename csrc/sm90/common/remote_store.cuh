// Stores and copies to the shared memory of a peer in the cluster, which its barrier counts.
#pragma once

#include <cstdint>

namespace flash_csa::sm90 {

// The address of a block's own shared memory, in that of the peer `rank`.
__device__ __forceinline__ uint32_t peer_address(const void* own, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank));
    return address;
}

// 16 bytes, which the barrier there counts when they have come. Both are addresses of a peer.
__device__ __forceinline__ void store_remote(uint32_t to, const uint4& value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}
// The same with 4 bytes.
__device__ __forceinline__ void store_remote(uint32_t to, uint32_t value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
        "r"(value), "r"(barrier)
        : "memory");
}

// `bytes` of the own shared memory: addresses and number are multiples of 16.
__device__ __forceinline__ void copy_remote(uint32_t to, const void* from, int bytes,
                                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier)
        : "memory");
}

// Arrives at the barrier of a peer, with what the thread has done to its own shared memory.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace flash_csa::sm90
