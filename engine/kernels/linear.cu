// linear.cu: y[n][o] = sum over i of x[n][i] w[o][i], alone or per head.   Every projection
//
// linear_stream_*   few rows: a block owns 16 or 32 rows of w and all of i; each of its 8 warps streams
//                   its part of i, and the block adds the warps' sums.
// linear_wide_*     more rows: a block owns 128 rows of w and 2 slices of i, and shares its part of x among
//                   its warps; a cluster of blocks has all slices, and adds them up.
// linear_heads_*    per head, small w: a block owns 32 rows of w and all of i.
// latent_query_*    linear_heads with the rotated part of the query beside it.
// linear_any        any shape and alignment, float32 or bfloat16: a warp per two rows of w.
//
// All but the last are of bfloat16 and take rows of 16-byte chunks: base addresses and strides are
// multiples of 8 elements, and so is i. The first two add in one order (stream.cuh), whatever the number
// of rows and whichever of them runs: a row's bits do not depend on the other rows (batch invariance).
// The launcher takes 16 slices (blocks of 16 rows of w) or 8 (of 32) by the shape of w alone. linear_heads
// and linear_any have orders of their own, and are chosen by shape and alignment.
//
// Head g of `heads` reads x + g x_head, w + g o i, and writes y + g y_head; without heads, g is 0.
// Rows from `count` on are padding: neither read nor written.

#include "sums.cuh"

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

// grid (ceil(o / 16 MT), 1, ceil(n / 8 NT))   block 256   shared memory 8 * DEPTH * (2 MT + NT) * 512
template <int MT, int NT, int DEPTH>
__device__ __forceinline__ void linear_stream(const bf16* x, const bf16* w, bf16* y,
                                              const i64* count, int n, int o, int i, i64 x_stride,
                                              i64 y_stride) {
    const int R = 16 * MT, FIFO_BYTES = DEPTH * (2 * MT + NT) * 512;
    const int SLICES = MT == 1 ? 16 : 8, EACH = SLICES / 8;
    static_assert(FIFO_BYTES >= 8 * NT * R * 4, "a warp's sums take the place of its stages");
    let_successor_start();
    i64 row_0 = (i64)blockIdx.z * (8 * NT);
    if (row_0 > 0 && row_0 >= rows_that_count(count, n)) {
        wait_for_predecessor();
        return;
    }
    Asked asked = ask_for_count(count, n);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int o_0 = blockIdx.x * R;
    u32 w_at[2 * MT];
#pragma unroll
    for (int j = 0; j < 2 * MT; ++j) w_at[j] = min(j * 8 + g, o - 1 - o_0) * i + 8 * t;
    auto x_at = [&](int j) {
        return row_0 + j * 8 + g < rows_that_count(asked) ? (j * 8 + g) * (u32)x_stride + 8 * t : NO_ROW;
    };
    int steps = n_steps(i);
    int begin = slice_begin(warp * EACH, SLICES, steps);
    int middle = slice_begin(warp * EACH + 1, SLICES, steps);
    int end = slice_begin((warp + 1) * EACH, SLICES, steps);
    float acc[MT][NT][4];
    stream<MT, NT, DEPTH, EACH == 2>(acc, w + (i64)o_0 * i, w_at, x + row_0 * x_stride, x_at, i, 8 * t,
                                     begin, middle, end, shared_address(memory) + warp * FIFO_BYTES);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * FIFO_BYTES), acc);
    __syncthreads();
    i64 rows = rows_that_count(asked);
    for (int e = threadIdx.x; e < 8 * NT * R; e += 256) {
        i64 row = row_0 + e / R;
        int at = o_0 + e % R;
        float sum = tree_sum<8>(reinterpret_cast<float*>(memory) + e, FIFO_BYTES / 4);
        if (row < rows && at < o) store(y + row * y_stride + at, sum);
    }
}

// The sums of a block: rows of w in bands of 16 MT, one slice of i a side, a warp for each of both, and up
// to ROWS rows of x that the warps of a side share. A stage: the warps' 2 MT tiles of w each, then the sides'
// rows of x.
//
// x, w     first row of each; the weights are those of this block
// counted  rows of x that count from the first on
// slice    of SLICES, that of side 0
//
// Sides of several warps go round together, the one with a step less idling in the last round: barriers
// are the block's. With one for each side, racecheck takes the block's own, further down, for less than it
// is where sides have passed theirs a different number of times.
template <int ROWS, int DEPTH, int SLICES, int MT, int BANDS, int SIDES>
struct Shared {
    static const int NT = (ROWS + 7) / 8, BAND_THREADS = BANDS * 32, BAND = 16 * MT;
    static const int W_BYTES = MT * 1024, X_BYTES = ROWS * 64;
    static const int STAGE = BANDS * SIDES * W_BYTES + SIDES * X_BYTES;
    static const int PASSES = (ROWS + BANDS * 8 - 1) / (BANDS * 8);  // over the rows of a side
    static const int SUMS = BANDS * MT * NT * 32;                    // of a side, in fours
    typedef float Sums[MT][NT][4];

    // Returns the rows of x, ROWS at most. Afterwards the stages are free.
    static __device__ __forceinline__ int sum(Sums& acc, const bf16* x, const bf16* w, i64 counted,
                                              int w_rows, int i, i64 x_stride, int slice) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        int band = warp % BANDS, side = warp / BANDS, of_side = threadIdx.x - side * BAND_THREADS;
        int steps = n_steps(i);
        int begin = slice_begin(slice + side, SLICES, steps);
        int end = slice_begin(slice + side + 1, SLICES, steps);
        int rounds = BANDS == 1 ? end - begin : (steps + SLICES - 1) / SLICES;
        bool idle = BANDS > 1 && band * BAND >= w_rows;  // no rows are left for this warp
        u32 w_at[2 * MT];
#pragma unroll
        for (int j = 0; j < 2 * MT; ++j) w_at[j] = min(band * BAND + j * 8 + g, w_rows - 1) * i + 8 * t;
        u32 w_stage = shared_address(memory) + warp * W_BYTES;
        u32 x_stage = shared_address(memory) + BANDS * SIDES * W_BYTES + side * X_BYTES;
        u32 w_to = w_stage + copy_place();
        int row_0 = of_side >> 2;
        u32 x_to = x_stage + row_0 * 64 + (t ^ ((row_0 >> 1) & 3)) * 16;
        u32 x_at = row_0 * (u32)x_stride + 8 * t, x_pass = BANDS * 8 * (u32)x_stride;
        clear(acc);
#pragma unroll
        for (int d = 0; d < DEPTH - 1; ++d) {
            int k = (begin + d) * STEP;
            if (begin + d < end && !idle)
#pragma unroll
                for (int j = 0; j < 2 * MT; ++j)
                    copy_16(w_to + d * STAGE + j * 512, w + w_at[j] + k, k + 8 * t < i);
            end_of_stage();
        }
        wait_for_predecessor();
        int tile_rows = (int)min(counted, (i64)ROWS);
        int rows_left = tile_rows - row_0;  // pass p has a row for this lane if p * BANDS * 8 < rows_left
        uint4 early[DEPTH - 1][PASSES];
#pragma unroll
        for (int d = 0; d < DEPTH - 1; ++d)
#pragma unroll
            for (int p = 0; p < PASSES; ++p) {
                int k = (begin + d) * STEP;
                early[d][p] = read_16(x + (x_at + p * x_pass) + k, p * BANDS * 8 < rows_left &&
                                                                       begin + d < end && k + 8 * t < i);
            }
#pragma unroll
        for (int d = 0; d < DEPTH - 1; ++d)
#pragma unroll
            for (int p = 0; p < PASSES; ++p)
                if (p * BANDS * 8 < rows_left && begin + d < end)
                    write_shared_16(x_to + d * STAGE + p * BANDS * 512, early[d][p]);
        u32 w_from = w_stage + w_place(), x_from = x_stage + x_place();
        // The last tile of x may have one row alone.
        u32 x_last = ROWS % 8 ? x_stage + (NT - 1) * 512 + (lane >> 3) * 16 : x_from + (NT - 1) * 512;
        u32 full = 0, empty = (DEPTH - 1) * STAGE;
        int left = end - begin, k_left = i - (begin + DEPTH - 1) * STEP - 8 * t;
        const bf16 *w_next = w + (begin + DEPTH - 1) * STEP, *x_next = x + (begin + DEPTH - 1) * STEP;
#pragma unroll 1
        for (int round = 0; round < rounds; ++round, --left, k_left -= STEP, w_next += STEP, x_next += STEP) {
            wait_for_stage<DEPTH - 2>();
            if (BANDS == 1)
                __syncwarp();
            else
                __syncthreads();
            if (left > DEPTH - 1) {
                bool valid = k_left > 0;
                if (!idle)
#pragma unroll
                    for (int j = 0; j < 2 * MT; ++j) copy_16(w_to + empty + j * 512, w_next + w_at[j], valid);
                u32 at = x_at;
                asm volatile("" : "+r"(at));  // else the compiler holds every row's offset
#pragma unroll
                for (int p = 0; p < PASSES; ++p, at += x_pass)
                    copy_16_if(p * BANDS * 8 < rows_left, x_to + empty + p * BANDS * 512, x_next + at, valid);
            }
            end_of_stage();
            if (BANDS == 1 || (left > 0 && !idle)) {
                uint4 a[MT][2];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    a[m][0] = load_matrices(w_from + full + m * 1024);
                    a[m][1] = load_matrices((w_from ^ 32) + full + m * 1024);
                }
                // Tiles of x by twos, the next two on their way: products that follow each other are of
                // different sums, and do not wait for one another.
                const int AHEAD = BANDS == 1 ? 1 : 2;  // tiles; where registers allow, two
                auto x_tile = [&](int n) {
                    return load_matrices((n == NT - 1 ? x_last : x_from + n * 512) + full);
                };
                uint4 b[2][AHEAD];
#pragma unroll
                for (int n = 0; n < AHEAD && n < NT; ++n) b[0][n] = x_tile(n);
#pragma unroll
                for (int n_0 = 0; n_0 < NT; n_0 += AHEAD) {
                    const int now = n_0 / AHEAD & 1;
#pragma unroll
                    for (int n = 0; n < AHEAD; ++n)
                        if (n_0 + AHEAD + n < NT) b[now ^ 1][n] = x_tile(n_0 + AHEAD + n);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int n = 0; n < AHEAD; ++n)
#pragma unroll
                            for (int m = 0; m < MT; ++m)
                                if (n_0 + n < NT) mma_half(acc[m][n_0 + n], a[m][half], b[now][n], half);
                }
            }
            full = full == (DEPTH - 1) * STAGE ? 0 : full + STAGE;
            empty = empty == (DEPTH - 1) * STAGE ? 0 : empty + STAGE;
        }
        wait_for_stage<0>();
        __syncthreads();
        return tile_rows;
    }

    // In shared memory, in fours: [side][band][at][lane], the 16 rows of w `at % MT` of the band, the 8 rows
    // of x `at / MT`.
    static __device__ __forceinline__ float4* place(int side, int band) {
        return reinterpret_cast<float4*>(memory) + side * SUMS + band * (MT * NT * 32) + (threadIdx.x & 31);
    }
    static __device__ __forceinline__ void put(const Sums& acc) {
        int warp = threadIdx.x >> 5;
        float4* to = place(warp / BANDS, warp % BANDS);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int m = 0; m < MT; ++m)
                to[(n * MT + m) * 32] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    }
    // The sums of both sides as one: each gives half of its own to the other, and adds what it is given to
    // the half that it keeps.
    template <int GIVEN>
    static __device__ __forceinline__ void give(const Sums& acc, float4* to) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int m = GIVEN * MT / 2; m < (GIVEN + 1) * MT / 2; ++m)
                to[(n * MT + m) * 32] = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    }
    template <int KEPT>
    static __device__ __forceinline__ void add_given(const Sums& acc, float4* to) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int m = KEPT * MT / 2; m < (KEPT + 1) * MT / 2; ++m) {
                float4& at = to[(n * MT + m) * 32];
                float4 other = at;
                at = make_float4(acc[m][n][0] + other.x, acc[m][n][1] + other.y, acc[m][n][2] + other.z,
                                 acc[m][n][3] + other.w);
            }
    }
    static __device__ __forceinline__ void put_both(const Sums& acc) {
        static_assert(SIDES == 2 && MT % 2 == 0, "two halves");
        int warp = threadIdx.x >> 5, side = warp / BANDS;
        float4* to = place(0, warp % BANDS);
        if (side)
            give<0>(acc, to);
        else
            give<1>(acc, to);
        __syncthreads();
        if (side)
            add_given<1>(acc, to);
        else
            add_given<0>(acc, to);
    }
};

// Slices as a tree, those of a lane: from the sides of this block.
template <typename Block, int SIDES>
__device__ __forceinline__ float4 total_of_sides(int band, int at) {
    float4 v[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; ++side) v[side] = Block::place(side, band)[at * 32];
    return tree_sum(v);
}

// 4 warps: 2 bands of 64 rows of w, 2 sides; a cluster of blocks for all slices. Each block adds up and writes
// its share of the tile, from the shared memory of all. Bands of 64 rows, so that a tile of x is read from
// shared memory once for four products: with 32, reading takes as long as multiplying.
// grid (ceil(o / 128), SLICES / 2, ceil(n / ROWS))   cluster (1, SLICES / 2)   block 128
// shared memory DEPTH stages
template <int ROWS, int DEPTH, int SLICES>
__device__ __forceinline__ void linear_wide(const bf16* x, const bf16* w, bf16* y, const i64* count, int n,
                                            int o, int i, i64 x_stride, i64 y_stride) {
    const int MT = 4, BANDS = 2, SIDES = 2, PARTS = SLICES / SIDES, WARPS = BANDS * SIDES;
    typedef Shared<ROWS, DEPTH, SLICES, MT, BANDS, SIDES> Block;
    static_assert(DEPTH * Block::STAGE >= Block::SUMS * 16, "sums take the place of stages");
    let_successor_start();
    i64 row_0 = (i64)blockIdx.z * ROWS;
    i64 counted = rows_that_count(count, n);
    if (row_0 > 0 && row_0 >= counted) {  // so does the whole cluster
        wait_for_predecessor();
        return;
    }
    int o_0 = blockIdx.x * (BANDS * Block::BAND), part = blockIdx.y;
    typename Block::Sums acc;
    int tile_rows = Block::sum(acc, x + row_0 * x_stride, w + (i64)o_0 * i, counted - row_0, o - o_0, i,
                               x_stride, part * SIDES);
    Block::put_both(acc);
    cluster_barrier();  // every block's sums are there
    const int EACH = (BANDS * MT * Block::NT + WARPS * PARTS - 1) / (WARPS * PARTS);
    int items = (tile_rows + 7) / 8 * MT * BANDS, item = (threadIdx.x >> 5) * PARTS + part;
    float4 sums[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {  // without a branch: all reads are under way at once
        int its = max(min(item + e * WARPS * PARTS, items - 1), 0);
        sums[e] = total_of_blocks<PARTS>(shared_address(Block::place(0, its % BANDS) + its / BANDS * 32));
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e, item += WARPS * PARTS)
        if (item < items)
            put_tile(y + row_0 * y_stride, y_stride, sums[e], item / (BANDS * MT) * 8, tile_rows,
                     o_0 + item % BANDS * Block::BAND + item / BANDS % MT * 16, o);
    cluster_barrier();  // no block leaves while another reads its shared memory
}

// x and y of one head and row.
struct Strides {
    i64 x_row, x_head, y_row, y_head;
};

// Many rows: the next kernel's blocks, crowded among these, would take longer than they gain.
template <int ROWS>
__device__ __forceinline__ void let_successor_start_early() {
    if (ROWS <= 24) let_successor_start();
}

// 4 warps, a slice of i each; 32 rows of w, `tile` of them.
// grid (ceil(o / 32), heads, ceil(n / ROWS))   block 128
// shared memory: as many of DEPTH stages as a slice has steps, at least what the sums take
template <int ROWS, int DEPTH>
__device__ __forceinline__ void linear_heads(const bf16* x, const bf16* w, bf16* y, i64 counted, int o, int i,
                                             const Strides& strides, int tile) {
    i64 row_0 = (i64)blockIdx.z * ROWS, head = blockIdx.y;
    int o_0 = tile * 32;
    typedef Shared<ROWS, DEPTH, 4, 2, 1, 4> Block;
    typename Block::Sums acc;
    int tile_rows = Block::sum(acc, x + head * strides.x_head + row_0 * strides.x_row, w + (head * o + o_0) * i,
                               counted - row_0, o - o_0, i, strides.x_row, 0);
    Block::put(acc);
    if (ROWS > 24) let_successor_start();
    __syncthreads();
    bf16* to = y + head * strides.y_head + row_0 * strides.y_row;
#pragma unroll 2
    for (int at = threadIdx.x >> 5; at < (tile_rows + 7) / 8 * 2; at += 4)
        put_tile(to, strides.y_row, total_of_sides<Block, 4>(0, at), at / 2 * 8, tile_rows,
                 o_0 + at % 2 * 16, o);
}

// The rope part of a head's queries, half-split: from `x` to `y`, r elements.
template <int ROWS>
__device__ __forceinline__ void rotate(const bf16* x, bf16* y, const float* cosines, const float* sines,
                                       i64 rows, int r, const Strides& strides) {
    int half = r / 2;
    i64 row_0 = (i64)blockIdx.z * ROWS, head = blockIdx.y;
    int total = (int)(rows - row_0 < ROWS ? rows - row_0 : ROWS) * half;
    x += head * strides.x_head + row_0 * strides.x_row;
    y += head * strides.y_head + row_0 * strides.y_row;
    cosines += row_0 * half;
    sines += row_0 * half;
    const int BATCH = ROWS > 8 ? 4 : 2;  // loads at a time, and few times
    for (int begin = threadIdx.x; begin < total; begin += BATCH * 128) {
        float first[BATCH], second[BATCH], cosine[BATCH], sine[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int at = min(begin + b * 128, total - 1);
            const bf16* from = x + (at / half) * strides.x_row + at % half;
            first[b] = to_float(from[0]);
            second[b] = to_float(from[half]);
            cosine[b] = cosines[at];
            sine[b] = sines[at];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int at = begin + b * 128;
            if (at >= total) break;
            bf16* to = y + (at / half) * strides.y_row + at % half;
            store(to, first[b] * cosine[b] - second[b] * sine[b]);
            store(to + half, second[b] * cosine[b] + first[b] * sine[b]);
        }
    }
}

#define LINEAR_STREAM(name, MT, NT, DEPTH, BLOCKS)                                                     \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) name(                                    \
        const bf16* x, const bf16* w, bf16* y, const i64* count, int n, int o, int i, i64 x_stride,    \
        i64 y_stride) {                                                                                \
        linear_stream<MT, NT, DEPTH>(x, w, y, count, n, o, i, x_stride, y_stride);                     \
    }
// name: rows of w, rows of x
LINEAR_STREAM(linear_stream_16_8, 1, 1, 8, 2)
LINEAR_STREAM(linear_stream_16_24, 1, 3, 4, 2)
LINEAR_STREAM(linear_stream_32_8, 2, 1, 4, 2)
LINEAR_STREAM(linear_stream_32_24, 2, 3, 3, 2)

#define LINEAR_WIDE(ROWS, DEPTH, SLICES)                                                               \
    extern "C" __global__ void __cluster_dims__(1, SLICES / 2, 1) __launch_bounds__(128, 2)            \
        linear_wide_##ROWS##_##SLICES(                                                                 \
            const bf16* x, const bf16* w, bf16* y, const i64* count, int n, int o, int i, i64 x_stride, \
            i64 y_stride) {                                                                            \
        linear_wide<ROWS, DEPTH, SLICES>(x, w, y, count, n, o, i, x_stride, y_stride);                 \
    }
// 65 rows are a root and 64 more, and what shared memory holds.
LINEAR_WIDE(40, 4, 8)
LINEAR_WIDE(40, 4, 16)
LINEAR_WIDE(65, 4, 8)
LINEAR_WIDE(65, 4, 16)

#define LINEAR_HEADS(ROWS, DEPTH)                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 4) linear_heads_##ROWS(                          \
        const bf16* x, const bf16* w, bf16* y, const i64* count, int n, int o, int i, i64 x_row,       \
        i64 x_head, i64 y_row, i64 y_head) {                                                           \
        let_successor_start_early<ROWS>();                                                             \
        i64 counted = rows_that_count(count, n);                                                       \
        Strides strides = {x_row, x_head, y_row, y_head};                                              \
        if (blockIdx.z == 0 || (i64)blockIdx.z * ROWS < counted)                                       \
            linear_heads<ROWS, DEPTH>(x, w, y, counted, o, i, strides, blockIdx.x);                    \
        else                                                                                           \
            wait_for_predecessor();                                                                    \
    }                                                                                                  \
    /* q [n][h][d + r] -> query [n][h][c + r]; grid.x has one more, the first */                       \
    extern "C" __global__ void __launch_bounds__(128, 4) latent_query_##ROWS(                          \
        const bf16* q, const bf16* w_kc, const float* cosines, const float* sines, bf16* query,        \
        const i64* count, int n, int c, int d, int r) {                                                \
        let_successor_start_early<ROWS>();                                                             \
        i64 counted = rows_that_count(count, n);                                                       \
        i64 h = gridDim.y;                                                                             \
        Strides strides = {h * (d + r), d + r, h * (c + r), c + r};                                    \
        bool rope = blockIdx.x == 0, beyond = blockIdx.z > 0 && (i64)blockIdx.z * ROWS >= counted;     \
        if (rope || beyond) wait_for_predecessor();                                                    \
        if (beyond) return;                                                                            \
        if (rope)                                                                                      \
            rotate<ROWS>(q + d, query + c, cosines, sines, counted, r, strides);                       \
        else                                                                                           \
            linear_heads<ROWS, DEPTH>(q, w_kc, query, counted, c, d, strides, blockIdx.x - 1);         \
    }
LINEAR_HEADS(8, 4)
LINEAR_HEADS(24, 4)
LINEAR_HEADS(65, 3)

#endif  // STORE_BF16
