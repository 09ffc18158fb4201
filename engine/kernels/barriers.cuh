// barriers.cuh: barriers in shared memory, and the blocks of a cluster. For attention.cuh, sums.cuh and
// hopper.cuh.

#pragma once
#include "common.cuh"

// Barriers in shared memory that count arrivals and the bytes of bulk copies.
__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// An arrival, and bytes that copies will bring.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n_bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
#define BARRIER_WAIT(WHAT, bar, parity)                                           \
    asm volatile(                                                                 \
        "{\n"                                                                     \
        ".reg .pred done;\n"                                                      \
        "again:\n"                                                                \
        "mbarrier.try_wait.parity" WHAT ".shared::cta.b64 done, [%0], %1;\n"      \
        "@done bra.uni gone;\n"                                                   \
        "bra.uni again;\n"                                                        \
        "gone:\n"                                                                 \
        "}\n" ::"r"(bar),                                                         \
        "r"(parity)                                                               \
        : "memory")
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) { BARRIER_WAIT("", bar, parity); }
// For what other blocks of the cluster have sent.
__device__ __forceinline__ void barrier_wait_for_cluster(u32 bar, u32 parity) {
    BARRIER_WAIT(".acquire.cluster", bar, parity);
}
#undef BARRIER_WAIT

// A cluster's blocks run at the same time and read each other's shared memory. What its blocks wrote before
// this, all of them may read after it; what they read before it, whoever it belongs to may leave.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Its halves, for barriers in shared memory that were set up and fenced before the first, and nothing else.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 in_block(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ float4 read_cluster(u32 at) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
