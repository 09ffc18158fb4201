// attention.cuh: what the two attention kernels on tensor cores share: shared memory, the
// number of splits in use, visibility, values that are not finite. For verify_attn_mma.cu and
// verify_attn_wgmma.cu.

#pragma once
#include "barriers.cuh"
#include "tensor_cores.cuh"

constexpr int LATENT = 512;
constexpr int ROW_BYTES = 1152;
constexpr float SLACK = 8.f;  // a score may exceed its row's reference by this power of two

// Of `most` blocks that a row block has in the grid, how many share its tiles: no more than take as long.
__device__ __forceinline__ int splits_in_use(int tiles, int most) {
    if (tiles <= 1) return 1;
    u32 each = ((u32)tiles + most - 1) / (u32)most;  // unsigned: half the instructions
    return ((u32)tiles + each - 1) / each;
}
// A last row block that works half as long takes as few of them as keep up with the others'.
__device__ __forceinline__ int light_splits(int tiles, int splits) {
    u32 each = max(1u, ((u32)tiles + splits - 1) / (u32)splits * 19 / 11);
    return min((u32)splits, ((u32)tiles + each - 1) / each);
}

// Those of one split: split, split + splits, ...
__device__ __forceinline__ int tiles_of_split(int tiles, int split, int splits) {
    return (u32)(tiles - split + splits - 1) / (u32)splits;
}

__device__ __forceinline__ void write_shared(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void write_shared(u32 at, float a, float b, float c, float d) {
    write_shared(at, __float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}
__device__ __forceinline__ void read_shared(u32 (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void read_shared(float (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ float read_shared(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// From L2: not to be merged with, nor cached by, a read before the wait.
__device__ __forceinline__ i64 read_now(const i64* at) {
    i64 x;
    asm volatile("ld.global.cg.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

// Which slots from `first` on a node sees, 32 a word; n_slots and more it does not. Without a branch, so that
// all words that a tile needs are asked for at once: every block waits for the one that has the last tile.
//
// row  of the node, `words` long, bit j for slot open_len + j; all slots before are seen
template <int N>
__device__ __forceinline__ void visible_slots(
    u32 (&seen)[N], const u32* row, int words, int first, int open_len, int n_slots) {
    int j = first - open_len, word = j >> 5;  // rounded down where j is negative
    u32 x[N + 1];
#pragma unroll
    for (int i = 0; i <= N; ++i) {
        x[i] = word + i < 0 ? ~0u : 0u;
        asm volatile("{\n\t.reg .pred p;\n\tsetp.lt.u32 p, %2, %3;\n\t@p ld.global.u32 %0, [%1];\n\t}"
                     : "+r"(x[i])
                     : "l"(row + word + i), "r"(word + i), "r"(words));  // a negative number is a large one
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        int left = n_slots - first - 32 * i;
        u32 within = left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
        seen[i] = __funnelshift_r(x[i], x[i + 1], (u32)j & 31u) & within;
    }
}

__device__ __forceinline__ bool not_finite(u32 pair) {
    return (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u;
}
__device__ __forceinline__ u32 finite_or_zero(u32 pair) {
    if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
    if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0x0000ffffu;
    return pair;
}

