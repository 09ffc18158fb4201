// linear.cu: y[n][o] = sum over i of x[n][i] w[o][i], alone or per head.   Every projection
//
// linear_stream_*   few rows: a block owns 16 or 32 rows of w and all of i; each of its 8 warps streams
//                   its part of i, and the block adds the warps' sums.
// linear_wide_*     more rows: a block owns 128 rows of w and two slices of i, and shares its part of x
//                   among its warps; the last block of a tile to arrive adds the blocks' sums.
// linear_any        any shape and alignment, float32 or bfloat16: a warp per two rows of w.
//
// The first two are of bfloat16 and take rows of 16-byte chunks: base addresses and strides are
// multiples of 8 elements, and so is i. They add in one order (stream.cuh), whatever the number of
// rows and whichever of them runs: a row's bits do not depend on the other rows (batch invariance).
// The launcher takes 16 slices (blocks of 16 rows of w) or 8 (of 32) by the shape of w alone, and
// linear_any, which has an order of its own, by shape and alignment.
//
// Head g of `heads` reads x + g x_head, w + g o i, and writes y + g y_head; without heads, g is 0.
// Rows from `count` on are padding: neither read nor written.

#include "stream.cuh"

// grid (ceil(o / 2 / 8), ceil(n / 8), heads)   block 256   shared memory none
extern "C" __global__ void __launch_bounds__(256) linear_any(
    const real* x,             // [n][x_stride], i used
    const real* w,             // [heads][o][i]
    real* y,                   // [n][y_stride], o used
    const i64* count,          // [1], or null: all
    int n, int o, int i, i64 x_stride, i64 x_head, i64 y_stride, i64 y_head)
{
    let_successor_start();
    wait_for_predecessor();
    i64 rows = rows_that_count(count, n);
    i64 row_0 = (i64)blockIdx.y * 8;
    int o_0 = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 2;
    if (row_0 >= rows || o_0 >= o) return;
    i64 head = blockIdx.z;
    const real* w_row[2];
    const real* x_row[8];
    for (int r = 0; r < 2; ++r) w_row[r] = w + (head * o + min(o_0 + r, o - 1)) * i;
    for (int j = 0; j < 8; ++j)
        x_row[j] = row_0 + j < rows ? x + head * x_head + (row_0 + j) * x_stride : nullptr;
    float sum[2][8];
    dot_any<2>(sum, w_row, x_row, i);
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (lane == j * 2 + r && row_0 + j < rows && o_0 + r < o)
                store(y + head * y_head + (row_0 + j) * y_stride + o_0 + r, sum[r][j]);
}

#ifdef STORE_BF16

// grid (ceil(o / 16 MT), ceil(n / 8 NT), heads)   block 256   shared memory 8 * DEPTH * MT * 1024
template <int MT, int NT, int DEPTH>
__device__ __forceinline__ void linear_stream(const bf16* x, const bf16* w, bf16* y,
                                              const i64* count, int n, int o, int i, i64 x_stride,
                                              i64 x_head, i64 y_stride, i64 y_head) {
    const int R = 16 * MT, FIFO_BYTES = DEPTH * MT * 1024;
    const int SLICES = MT == 1 ? 16 : 8, EACH = SLICES / 8;
    static_assert(FIFO_BYTES >= 8 * NT * R * 4, "a warp's sums take the place of its stages");
    let_successor_start();
    i64 rows = rows_that_count(count, n);
    i64 row_0 = (i64)blockIdx.y * (8 * NT);
    if (row_0 >= rows) {
        wait_for_predecessor();
        return;
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    i64 head = blockIdx.z;
    int o_0 = blockIdx.x * R;
    u32 w_at[2 * MT], x_at[NT];
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) w_at[j] = min(j * 8 + g, o - 1 - o_0) * i + 8 * t;
#pragma unroll
    for (int j = 0; j < NT; ++j)
        x_at[j] = row_0 + j * 8 + g < rows ? (j * 8 + g) * (u32)x_stride + 8 * t : NO_ROW;
    int steps = n_steps(i);
    int begin = slice_begin(warp * EACH, SLICES, steps);
    int middle = slice_begin(warp * EACH + 1, SLICES, steps);
    int end = slice_begin((warp + 1) * EACH, SLICES, steps);
    float acc[MT][NT][4];
    stream<MT, NT, DEPTH, EACH == 2>(acc, w + (head * o + o_0) * i, w_at,
                                     x + head * x_head + row_0 * x_stride, x_at, i, 8 * t, begin,
                                     middle, end,
                                     shared_address(memory) + warp * FIFO_BYTES + lane * 16);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * FIFO_BYTES), acc);
    __syncthreads();
    for (int e = threadIdx.x; e < 8 * NT * R; e += 256) {
        i64 row = row_0 + e / R;
        int at = o_0 + e % R;
        float sum = tree_sum<8>(reinterpret_cast<float*>(memory) + e, FIFO_BYTES / 4);
        if (row < rows && at < o) store(y + head * y_head + row * y_stride + at, sum);
    }
}

// A warp takes 32 of the block's 128 rows of w, and one (side 0 or 1) of its two slices.
// grid (ceil(o / 128), SLICES / 2, ceil(n / ROWS))   block 256
// shared memory DEPTH * (16384 + 128 min(n, ROWS))
#define WIDE_ROWS 128
template <int ROWS, int DEPTH, int SLICES>
__device__ __forceinline__ void linear_wide(const bf16* x, const bf16* w, bf16* y, float* parts,
                                            int* arrived, const i64* count, int n, int o, int i,
                                            i64 x_stride, i64 y_stride) {
    __shared__ int is_last;
    const int PARTS = SLICES / 2, NT = (ROWS + 7) / 8;
    let_successor_start();
    i64 rows = rows_that_count(count, n);
    i64 row_0 = (i64)blockIdx.z * ROWS;
    if (row_0 >= rows) {
        wait_for_predecessor();
        return;
    }
    int tile_rows = (int)(rows - row_0 < ROWS ? rows - row_0 : ROWS);  // of x, here
    int x_bytes = 128 * min(n, ROWS);                                  // of a stage
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int band = warp & 3, side = warp >> 2;
    int o_0 = blockIdx.x * WIDE_ROWS + band * 32;
    const bf16* w_band = w + (i64)min(o_0, o - 1) * i;
    u32 w_at[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w_at[j] = max(min(j * 8 + g, o - 1 - o_0), 0) * i + 8 * t;
    int steps = n_steps(i), slice = blockIdx.y * 2 + side;
    int begin = slice_begin(slice, SLICES, steps), end = slice_begin(slice + 1, SLICES, steps);

    u32 fifo = shared_address(memory) + warp * (DEPTH * 2048) + lane * 16;
    u32 x_stages = shared_address(memory) + DEPTH * 16384;
    const bf16* x_tile = x + row_0 * x_stride;
    auto fill_w = [&](int s, int stage) {
        int k = s * STEP;
        if (s < end)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                copy_16(fifo + stage * 2048 + j * 512, w_band + w_at[j] + k, k + 8 * t < i);
    };
    // A stage of x: [row][side][4 chunks]; odd rows exchange sides, so that 8 lanes meet 32 banks.
    auto fill_x = [&](int s, int stage) {
        if (s < end)
            for (int c = threadIdx.x & 127; c < tile_rows * 4; c += 128) {
                int row = c >> 2, chunk = c & 3, at = s * STEP + 8 * chunk;
                copy_16(x_stages + stage * x_bytes + row * 128 + ((side ^ (row & 1)) * 4 + chunk) * 16,
                        x_tile + row * x_stride + at, at < i);
            }
        end_of_stage();
    };
    float acc[2][NT][4];
    clear(acc);
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) fill_w(begin + d, d);
    wait_for_predecessor();
#pragma unroll
    for (int d = 0; d < DEPTH - 1; ++d) fill_x(begin + d, d);
    int full = 0, empty = DEPTH - 1;
    for (int s = begin; s < end; ++s) {
        wait_for_stage<DEPTH - 2>();
        asm volatile("bar.sync %0, 128;" ::"r"(1 + side) : "memory");
        fill_w(s + DEPTH - 1, empty);
        fill_x(s + DEPTH - 1, empty);
        uint4 a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = read_shared_16(fifo + full * 2048 + j * 512);
        u32 x_stage = x_stages + full * x_bytes;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            int row = min(j * 8 + g, tile_rows - 1);  // a column beyond the rows is never written
            uint4 b = read_shared_16(x_stage + row * 128 + ((side ^ (row & 1)) * 4 + t) * 16);
            mma_step(acc[0][j], a[0], a[1], b);
            mma_step(acc[1][j], a[2], a[3], b);
        }
        if (++full == DEPTH) full = 0;
        if (++empty == DEPTH) empty = 0;
    }
    wait_for_stage<0>();
    __syncthreads();  // the stages are free

    // The two sides, then the block's sums to memory: parts [PARTS][tiles of x][ROWS][o in tiles of 128].
    float4* other = reinterpret_cast<float4*>(memory) + band * (2 * NT * 32) + lane;
    if (side == 1)
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < NT; ++j)
                other[(m * NT + j) * 32] =
                    make_float4(acc[m][j][0], acc[m][j][1], acc[m][j][2], acc[m][j][3]);
    __syncthreads();
    int o_padded = gridDim.x * WIDE_ROWS;
    i64 part_size = (i64)gridDim.z * ROWS * o_padded;
    float* tile = parts + (i64)blockIdx.z * ROWS * o_padded + blockIdx.x * WIDE_ROWS;
    if (side == 0) {
        float* mine = tile + blockIdx.y * part_size + band * 32;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                float4 v = other[(m * NT + j) * 32];
                float pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    int row = j * 8 + 2 * t + (q & 1);
                    if (row < tile_rows)
                        mine[(i64)row * o_padded + m * 16 + g + 8 * (q >> 1)] = acc[m][j][q] + pair[q];
                }
            }
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = arrived + blockIdx.z * gridDim.x + blockIdx.x;
        is_last = atomicAdd(counter, 1) == PARTS - 1;
        if (is_last) *counter = 0;  // for the next launch
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    int lane_o = lane * 4, at = blockIdx.x * WIDE_ROWS + lane_o;
#pragma unroll 2
    for (int row = warp; row < tile_rows; row += 8) {
        float4 v[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            v[p] = __ldcg(reinterpret_cast<const float4*>(tile + p * part_size + (i64)row * o_padded + lane_o));
#pragma unroll
        for (int width = 1; width < PARTS; width *= 2)
#pragma unroll
            for (int p = 0; p < PARTS; p += 2 * width) {
                v[p].x += v[p + width].x;
                v[p].y += v[p + width].y;
                v[p].z += v[p + width].z;
                v[p].w += v[p + width].w;
            }
        float sum[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
        bf16* to = y + (row_0 + row) * y_stride + at;
#pragma unroll
        for (int q = 0; q < 4; ++q)
            if (at + q < o) store(to + q, sum[q]);
    }
}

#define LINEAR_STREAM(name, MT, NT, DEPTH, BLOCKS)                                                     \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) name(                                    \
        const bf16* x, const bf16* w, bf16* y, const i64* count, int n, int o, int i, i64 x_stride,    \
        i64 x_head, i64 y_stride, i64 y_head) {                                                        \
        linear_stream<MT, NT, DEPTH>(x, w, y, count, n, o, i, x_stride, x_head, y_stride, y_head);     \
    }
// name: rows of w, rows of x, stages
LINEAR_STREAM(linear_stream_16_8_4, 1, 1, 4, 4)
LINEAR_STREAM(linear_stream_16_8_10, 1, 1, 10, 2)
LINEAR_STREAM(linear_stream_16_24_4, 1, 3, 4, 2)
LINEAR_STREAM(linear_stream_16_24_10, 1, 3, 10, 2)
LINEAR_STREAM(linear_stream_32_8_3, 2, 1, 3, 3)
LINEAR_STREAM(linear_stream_32_8_6, 2, 1, 6, 2)
LINEAR_STREAM(linear_stream_32_24_3, 2, 3, 3, 2)
LINEAR_STREAM(linear_stream_32_24_6, 2, 3, 6, 2)

#define LINEAR_WIDE(name, ROWS, DEPTH, SLICES)                                                         \
    extern "C" __global__ void __launch_bounds__(256, 1) name(                                         \
        const bf16* x, const bf16* w, bf16* y, float* parts, int* arrived, const i64* count, int n,    \
        int o, int i, i64 x_stride, i64 y_stride) {                                                    \
        linear_wide<ROWS, DEPTH, SLICES>(x, w, y, parts, arrived, count, n, o, i, x_stride, y_stride); \
    }
// name: rows of x, slices. 65 rows are a root and 64 more, and what shared memory holds.
LINEAR_WIDE(linear_wide_24_8, 24, 5, 8)
LINEAR_WIDE(linear_wide_24_16, 24, 5, 16)
LINEAR_WIDE(linear_wide_40_8, 40, 4, 8)
LINEAR_WIDE(linear_wide_40_16, 40, 4, 16)
LINEAR_WIDE(linear_wide_65_8, 65, 4, 8)
LINEAR_WIDE(linear_wide_65_16, 65, 4, 16)

#endif  // STORE_BF16
