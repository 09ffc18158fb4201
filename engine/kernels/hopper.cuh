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
__device__ __forceinline__ void finish_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#endif
