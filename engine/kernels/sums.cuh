// sums.cuh: partial sums of a product, added in one order and stored. For linear.cu and linear_wgmma.cu.
//
// Sums lie as mma and wgmma leave them, 16 rows of w by 8 rows of x: lane (g, t) = (lane / 4, lane % 4) holds
// rows g, g, g + 8, g + 8 of w and 2t, 2t + 1, 2t, 2t + 1 of x, in a float4.

#pragma once
#include "barriers.cuh"
#include "stream.cuh"

// A balanced binary tree.
template <int PARTS>
__device__ __forceinline__ float4 tree_sum(float4 (&v)[PARTS]) {
#pragma unroll
    for (int width = 1; width < PARTS; width *= 2)
#pragma unroll
        for (int p = 0; p < PARTS; p += 2 * width) {
            v[p].x += v[p + width].x;
            v[p].y += v[p + width].y;
            v[p].z += v[p + width].z;
            v[p].w += v[p + width].w;
        }
    return v[0];
}

// Slices that the PARTS blocks of a cluster have, in the order of their ranks, all at the same place.
template <int PARTS>
__device__ __forceinline__ float4 total_of_blocks(u32 at) {
    float4 v[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) v[part] = read_cluster(in_block(at, part));
    return tree_sum(v);
}

// The 16 rows of w from `at` on, the 8 rows of x from `row` on, of a lane's sums.
__device__ __forceinline__ void put_tile(bf16* y, i64 y_stride, float4 sum, int row, int rows, int at,
                                         int o) {
    int lane = threadIdx.x & 31;
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
    row += 2 * (lane & 3);
    at += lane >> 2;
#pragma unroll
    for (int q = 0; q < 4; ++q)
        if (row + (q & 1) < rows && at + 8 * (q >> 1) < o)
            store(y + (row + (q & 1)) * y_stride + at + 8 * (q >> 1), v[q]);
}

// 8 by 8 values, of which lane (g, t) has column g, rows 2t and 2t + 1: it gets row g, columns 2t and 2t + 1.
__device__ __forceinline__ u32 turned(float first, float second) {
    u32 v = pack_bf16(first, second);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(v));
    return v;
}
// As put_tile, with half as many stores. A warp together. linear.cu does without: with it, the compiler had its
// kernels per head read their first rows of x one by one.
__device__ __forceinline__ void put_tile_turned(bf16* y, i64 y_stride, float4 sum, int row, int rows, int at,
                                                int o) {
    int lane = threadIdx.x & 31;
    u32 v[2] = {turned(sum.x, sum.y), turned(sum.z, sum.w)};
    row += lane >> 2;
    at += 2 * (lane & 3);
    if (row >= rows) return;
    u16* to = &y[row * y_stride + at].bits;
    bool pairs = (((u64)y | 2 * y_stride | 2 * o) & 3) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half, at += 8, to += 8) {
        if (pairs && at < o) *reinterpret_cast<u32*>(to) = v[half];
        if (!pairs && at < o) to[0] = (u16)v[half];
        if (!pairs && at + 1 < o) to[1] = (u16)(v[half] >> 16);
    }
}
