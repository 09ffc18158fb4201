// hopper.cuh: what the kernels for sm_90a share: tensor maps, and products of a warpgroup (wgmma). For
// verify_attn_wgmma.cu and linear_wgmma.cu.

#pragma once
#include "barriers.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Sizes and strides of what a copy reads, as the driver wrote them (cuda_hopper.py).
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes a group of the products since the last one: right behind them, with no branch between, or the compiler
// closes it where they are.
__device__ __forceinline__ void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All groups but the last NEWER.
template <int NEWER>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
}
__device__ __forceinline__ void finish_products() {
    close_products();
    wait_for_products<0>();
}

#endif
