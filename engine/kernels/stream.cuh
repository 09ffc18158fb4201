// stream.cuh: weights from memory through the tensor cores, a warp at a time. For linear.cu, router.cu and
// experts.cu; linear_wgmma.cu has its steps and slices.
//
// Weights [rows][i] are the A operand of mma.m16n8k16, rows of x its B operand: up to 8 rows of x
// cost one column block, and nothing is padded to 16. The sums are float.
//
// A step is 32 elements of i. In shared memory, a tile is a step of 8 rows, 512 bytes: chunk c of row r, 16
// bytes, lies at 64 r + 16 (c ^ r / 2), so that eight rows' chunks c meet 32 banks. Lane (g, t) =
// (lane / 4, lane % 4) copies chunk t of row g (cp.async), ldmatrix gives each lane what the MMAs take. A
// warp that streams alone needs no barrier but its own.
//
// A column of a product depends on one row of x alone: a NaN in another row stays there, and so
// does what lies in shared memory where there is no row.

#pragma once
#include "tensor_cores.cuh"

extern __shared__ __align__(128) unsigned char memory[];

#define STEP 32  // elements of i

// i is cut into a power of two of slices, each a run of whole steps. A slice is summed upwards;
// slices are added as a balanced binary tree. Which thread sums which slice is free, and so is the
// number of rows: the bits of a result are the same.
__device__ __forceinline__ int n_steps(int i) { return (i + STEP - 1) / STEP; }
__device__ __forceinline__ int slice_begin(int slice, int slices, int steps) {
    return (int)((u32)slice * (u32)steps / (u32)slices);  // at most 16 times 2^26
}

__device__ __forceinline__ float sigmoid(float x) {
    float e = expf(-fabsf(x));  // never of a positive number: no overflow
    return x >= 0.f ? 1.f / (1.f + e) : e / (1.f + e);
}

// `count` is written before a run, not by a kernel of it: it may be read before the wait.
__device__ __forceinline__ i64 rows_that_count(const i64* count, int n) {
    if (!count) return n;
    i64 rows = *count;
    return rows < n ? rows : n;
}

// The same in two, so that nothing waits for the number before it is needed.
struct Asked {
    i64 rows;
    int n;
};
__device__ __forceinline__ Asked ask_for_count(const i64* count, int n) {
    Asked asked = {n, n};
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u64 p, %1, 0;\n\t@p ld.global.b64 %0, [%1];\n\t}"
                 : "+l"(asked.rows)
                 : "l"(count));
    return asked;
}
__device__ __forceinline__ i64 rows_that_count(Asked asked) {
    asm volatile("" : "+l"(asked.rows));  // else the compiler compares at once
    return asked.rows < asked.n ? asked.rows : asked.n;
}

// 16 bytes to shared memory, or 16 zero bytes.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool valid) {
    int n_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n_bytes)
                 : "memory");
}
// The same where it is wanted, without a branch.
__device__ __forceinline__ void copy_16_if(bool wanted, u32 to, const void* from, bool valid) {
    int n_bytes = valid ? 16 : 0;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
        "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n\t}" ::"r"(to),
        "l"(from), "r"(n_bytes), "r"((int)wanted)
        : "memory");
}
__device__ __forceinline__ void end_of_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWER>
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
}

__device__ __forceinline__ void write_shared_16(u32 to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Where in a tile this lane copies to; where in two tiles it points to 16 rows of w for the first MMA of a
// step (^ 32: for the second); where in a tile to 8 rows of x for both.
__device__ __forceinline__ u32 copy_place() {
    u32 g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    return g * 64 + (t ^ (g >> 1)) * 16;
}
__device__ __forceinline__ u32 w_place() {
    u32 matrix = (threadIdx.x & 31) >> 3, r = threadIdx.x & 7;
    return (matrix & 1) * 512 + r * 64 + ((matrix >> 1) ^ (r >> 1)) * 16;
}
__device__ __forceinline__ u32 x_place() {
    u32 matrix = (threadIdx.x & 31) >> 3, r = threadIdx.x & 7;
    return r * 64 + (matrix ^ (r >> 1)) * 16;
}
__device__ __forceinline__ uint4 read_16(const void* from, bool valid) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (valid) v = *reinterpret_cast<const uint4*>(from);
    return v;
}

// Half a step: 16 rows of w, 8 rows of x.
__device__ __forceinline__ void mma_half(float (&c)[4], uint4 w, uint4 x, int half) {
    mma(c, w.x, w.y, w.z, w.w, half ? x.z : x.x, half ? x.w : x.y);
}
// One step.
__device__ __forceinline__ void mma_step(float (&c)[4], uint4 first, uint4 second, uint4 x) {
    mma(c, first.x, first.y, first.z, first.w, x.x, x.y);
    mma(c, second.x, second.y, second.z, second.w, x.z, x.w);
}

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[m][n][q] = 0.f;
}
template <int MT, int NT>
__device__ __forceinline__ void add_to(float (&acc)[MT][NT][4], const float (&other)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[m][n][q] = other[m][n][q] + acc[m][n][q];
}

// A warp's sums over steps [begin, end) of 16 MT rows of w and 8 NT rows of x: one slice, or with TWO
// the sum of two that meet at `middle`.
//
// w_at [2 MT]  where this lane's rows (g, g + 8 of each 16) begin in w, in elements, 8t included
// x_place_of(n) where this lane's row of the n-th 8 begins in x, likewise; NO_ROW where there is none. Asked
//              for after the first copies of w
// i, i_8t      elements in a row (a multiple of 8), and 8t
// fifo         the warp's DEPTH stages of (2 MT + NT) tiles
// acc[m][n][q] row g + 8 (q / 2) of the m-th 16, row 2t + q % 2 of the n-th 8
#define NO_ROW 0xffffffffu
template <int MT, int NT, int DEPTH, bool TWO, typename At>
__device__ __forceinline__ void stream(float (&acc)[MT][NT][4], const bf16* w,
                                       const u32 (&w_at)[2 * MT], const bf16* x, const At& x_place_of,
                                       int i, int i_8t, int begin, int middle, int end, u32 fifo) {
    const u32 STAGE = (2 * MT + NT) * 512;
    u32 copy_to = fifo + copy_place();
    clear(acc);
    float first[MT][NT][4];
    clear(first);
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) {
        if (begin + d < end) {
            int k = (begin + d) * STEP;
#pragma unroll
            for (int j = 0; j < 2 * MT; ++j)
                copy_16(copy_to + d * STAGE + j * 512, w + w_at[j] + k, k + i_8t < i);
        }
        end_of_stage();
    }
    wait_for_predecessor();
    u32 x_at[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) x_at[n] = x_place_of(n);
    uint4 early[DEPTH - 1][NT];
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int k = (begin + d) * STEP;
            early[d][n] = read_16(x + x_at[n] + k, x_at[n] != NO_ROW && begin + d < end && k + i_8t < i);
        }
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d)
#pragma unroll
        for (int n = 0; n < NT; ++n)
            write_shared_16(copy_to + d * STAGE + (2 * MT + n) * 512, early[d][n]);
    u32 w_place_0 = w_place(), x_place_0 = x_place() + 2 * MT * 512;
    u32 full = 0, empty = (DEPTH - 1) * STAGE;
#pragma unroll 1
    for (int s = begin; s < end; ++s) {
        if (TWO && s == middle) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        first[m][n][q] = acc[m][n][q];
                        acc[m][n][q] = 0.f;
                    }
        }
        wait_for_stage<DEPTH - 2>();
        __syncwarp();
        if (s + DEPTH - 1 < end) {
            int k = (s + DEPTH - 1) * STEP;
            bool valid = k + i_8t < i;
#pragma unroll
            for (int j = 0; j < 2 * MT; ++j) copy_16(copy_to + empty + j * 512, w + w_at[j] + k, valid);
#pragma unroll
            for (int n = 0; n < NT; ++n)
                if (x_at[n] != NO_ROW)
                    copy_16(copy_to + empty + (2 * MT + n) * 512, x + x_at[n] + k, valid);
        }
        end_of_stage();
        u32 w_from = fifo + full + w_place_0, x_from = fifo + full + x_place_0;
        uint4 a[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            a[m][0] = load_matrices(w_from + m * 1024);
            a[m][1] = load_matrices((w_from ^ 32) + m * 1024);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            uint4 b = load_matrices(x_from + n * 512);
#pragma unroll
            for (int m = 0; m < MT; ++m) mma_step(acc[m][n], a[m][0], a[m][1], b);
        }
        full = full == (DEPTH - 1) * STAGE ? 0 : full + STAGE;
        empty = empty == (DEPTH - 1) * STAGE ? 0 : empty + STAGE;
    }
    if (TWO) add_to(acc, first);
    wait_for_stage<0>();
}

// A warp's sums to shared memory as [8 NT rows of x][16 MT rows of w].
template <int MT, int NT>
__device__ __forceinline__ void put_sums(float* to, const float (&acc)[MT][NT][4]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                to[(n * 8 + 2 * t + (q & 1)) * 16 * MT + m * 16 + g + 8 * (q >> 1)] = acc[m][n][q];
}
// The tree over WARPS parts that lie `stride` floats apart.
template <int WARPS>
__device__ __forceinline__ float tree_sum(const float* part, int stride) {
    float v[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) v[w] = part[w * stride];
#pragma unroll
    for (int width = 1; width < WARPS; width *= 2)
#pragma unroll
        for (int w = 0; w < WARPS; w += 2 * width) v[w] += v[w + width];
    return v[0];
}

// Any shape and type: a warp's sums of ROWS rows of w and 8 of x, lanes along i; all lanes get them.
template <int ROWS>
__device__ __forceinline__ void dot_any(float (&sum)[ROWS][8], const real* const (&w)[ROWS],
                                        const real* const (&x)[8], int i) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[r][n] = 0.f;
#pragma unroll 2
    for (int k = threadIdx.x & 31; k < i; k += 32) {
        float a[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) a[r] = to_float(w[r][k]);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float b = x[n] ? to_float(x[n][k]) : 0.f;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r][n] = fmaf(a[r], b, sum[r][n]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[r][n] = warp_sum(sum[r][n]);
}
