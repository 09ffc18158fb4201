// What every kernel file shares: the storage type, its conversions, and reductions over a warp.
//
// No toolkit header is included: NVRTC finds none on a machine that has only the driver. The build
// defines STORE_BF16 for an engine that stores bfloat16; without it, `real` is float. Sums are float.
//
// Integers that the host reads or writes (tokens, positions, slots, ids) are int64, as in the seam
// (kernel_set.py); offsets into a cache are int64 too: a cache has more than 2^31 elements.

#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ void store(float* at, float x) { *at = x; }
__device__ __forceinline__ void store(bf16* at, float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    at->bits = bits;
}

// Two floats as bfloat16, `low` in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low_bf16(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_bf16(u32 both) { return __uint_as_float(both & 0xffff0000u); }

#ifdef STORE_BF16
typedef bf16 real;
#else
typedef float real;
#endif

// What a value becomes when it has been stored and is read again.
__device__ __forceinline__ float stored(float x) {
    real r;
    store(&r, x);
    return to_float(r);
}

#define NEG_INF __int_as_float(0xff800000)
#define POS_INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int offset = 16; offset; offset >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Kernels that are launched to overlap (cuda_launch.py) may start before the one ahead has ended.
// Until this returns a block may read only what no kernel writes, and must write nothing; then the
// writes of all kernels ahead are visible. Every block calls it that reads or writes anything, and at
// least one block of a kernel does: the kernel behind waits for it, and so for all kernels ahead.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may start where there is room.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Both, first of all in a kernel that is short.
__device__ __forceinline__ void follow() {
    let_successor_start();
    wait_for_predecessor();
}

// Sum over a block of a multiple of 32 threads, at most 1024; `scratch` holds 32 floats. Every
// thread gets the sum, the same bits whatever else runs.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0.f;
    for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) total += scratch[warp];
    __syncthreads();
    return total;
}
