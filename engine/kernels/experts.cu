// experts.cu: the chosen experts' SwiGLUs, and the shared one's.   MOE-4
//
//   gate_up_*   inner = silu(gate x) * up x for every pair (row, expert) and for the shared expert
//   down_*      every expert's output, then per row the weighted sum and the shared expert
//
// router.cu has listed the pairs by expert (`groups`, pairs.cuh), so that the grids below need not depend on
// the routing.
//
// Stored as `real`: the inner products, every expert's output before it is weighed, the weighted sum,
// the shared expert's output, and their sum. A row adds its experts in ascending order, and every sum
// over i or m has an order that depends on neither the routing nor the number of rows (stream.cuh),
// so a row's bits do not depend on the other rows. Rows from `count` on are padding: not read, not written.

#include "pairs.cuh"
#include "stream.cuh"

__device__ __forceinline__ float silu_mul(float gate, float up) { return gate * sigmoid(gate) * up; }

// What one touched expert, or the shared one, computes.
struct Job {
    i64 expert;
    int width;     // of its inner products
    int pairs;     // rows to compute
    int first;     // its first pair; the shared expert's pairs are the rows themselves
    bool shared;
};
__device__ __forceinline__ int row_of(const Job& job, const int* pair_row, int pair) {
    return job.shared ? pair : pair_row[job.first + pair];
}

// grid any   block 256: 8 inner values at a time, one a warp
extern "C" __global__ void __launch_bounds__(256) gate_up_any(
    const real* x,               // [n][x_stride], m used
    const real* gate_up,         // [e][2i][m]: gate's rows, then up's
    const real* shared_gate_up,  // [2s][m], or null
    real* inner,                 // [n k][i], by pair
    real* shared_inner,          // [n][s]
    const int* groups,           // or null: the shared expert alone
    const i64* count, int n, int e, int k, int m, int i, int s, i64 x_stride)
{
    let_successor_start();
    wait_for_predecessor();
    int rows = (int)rows_that_count(count, n);
    int shared_items = shared_gate_up ? (s + 7) / 8 : 0, items = (i + 7) / 8;
    int total = shared_items + (groups ? groups[0] * items : 0);
    const int* pair_row = groups + 2 + 2 * e;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int item = blockIdx.x; item < total; item += gridDim.x) {
        Job job = {0, s, rows, 0, true};
        int at = item * 8 + warp;
        if (item >= shared_items) {
            int j = (item - shared_items) / items;
            job = {groups[1 + j], i, groups[2 + e + j] - groups[1 + e + j], groups[1 + e + j], false};
            at = (item - shared_items) % items * 8 + warp;
        }
        if (at >= job.width) continue;
        const real* w = job.shared ? shared_gate_up : gate_up + job.expert * 2 * i * m;
        real* to = job.shared ? shared_inner : inner + (i64)job.first * i;
        const real* w_row[2] = {w + (i64)at * m, w + (i64)(job.width + at) * m};
        for (int base = 0; base < job.pairs; base += 8) {
            const real* x_row[8];
            for (int j = 0; j < 8; ++j)
                x_row[j] = base + j < job.pairs ? x + row_of(job, pair_row, base + j) * x_stride : nullptr;
            float sum[2][8];
            dot_any<2>(sum, w_row, x_row, m);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (lane == j && base + j < job.pairs)
                    store(to + (i64)(base + j) * job.width + at, silu_mul(sum[0][j], sum[1][j]));
        }
    }
}

// The weighted sum of a row's experts at column `at`, and the shared expert's part.
__device__ __forceinline__ void combine(real* out, const real* y, const real* shared_y,
                                        const float* weights, const int* pair_of, i64 row, int at,
                                        int k, int m) {
    float sum = 0.f, shared_part = shared_y ? to_float(shared_y[row * m + at]) : 0.f;
#pragma unroll 8
    for (int j = 0; j < k; ++j)
        sum += weights[row * k + j] * to_float(y[(i64)pair_of[row * k + j] * m + at]);
    sum = stored(sum);
    if (shared_y) sum += shared_part;
    store(out + row * m + at, sum);
}

// grid ceil(m / 8)   block 256: a column of the result a warp
extern "C" __global__ void __launch_bounds__(256) down_any(
    const real* inner,         // [n k][i], by pair
    const real* shared_inner,  // [n][s]
    const real* down,          // [e][m][i]
    const real* shared_down,   // [m][s], or null
    real* y,                   // [n k][m], by pair: every expert's output
    real* shared_y,            // [n][m]
    real* out,                 // [n][m]
    const float* weights,      // [n][k]
    const int* groups, const i64* count, int n, int e, int k, int m, int i, int s, int row_tiles)
{
    let_successor_start();
    wait_for_predecessor();
    int rows = (int)rows_that_count(count, n);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int at = blockIdx.x * 8 + warp;
    if (at >= m) return;
    int touched = groups[0];
    for (int j = 0; j < touched + (shared_down ? 1 : 0); ++j) {
        Job job = {0, s, rows, 0, true};
        if (j < touched)
            job = {groups[1 + j], i, groups[2 + e + j] - groups[1 + e + j], groups[1 + e + j], false};
        const real* w_row[1] = {(job.shared ? shared_down : down + job.expert * m * i) +
                                (i64)at * job.width};
        const real* from = job.shared ? shared_inner : inner + (i64)job.first * i;
        real* to = job.shared ? shared_y : y + (i64)job.first * m;
        for (int base = 0; base < job.pairs; base += 8) {
            const real* x_row[8];
            for (int q = 0; q < 8; ++q)
                x_row[q] = base + q < job.pairs ? from + (i64)(base + q) * job.width : nullptr;
            float sum[1][8];
            dot_any<1>(sum, w_row, x_row, job.width);
#pragma unroll
            for (int q = 0; q < 8; ++q)
                if (lane == q && base + q < job.pairs) store(to + (i64)(base + q) * m + at, sum[0][q]);
        }
    }
    __syncwarp();
    const int* pair_of = groups + 2 + 2 * e + (i64)n * k;
    for (int row = lane; row < rows; row += 32)
        combine(out, y, shared_down ? shared_y : nullptr, weights, pair_of, row, at, k, m);
}

#ifdef STORE_BF16

// Shared memory a warp, and the stages that it makes for up to 8 NT pairs.
#define GATE_UP_BYTES 9216
#define GATE_UP_DEPTH(NT) (GATE_UP_BYTES / ((2 + NT) * 512))
#define DOWN_TILES 2  // of pairs, at most
#define DOWN_DEPTH 5
#define DOWN_STAGE ((2 + DOWN_TILES) * 512)

// 8 inner values of one expert for up to 8 NT of its pairs: rows of gate, then of up.
// rows_of  rows of x of these pairs; null: first_row and on
template <int NT>
__device__ __forceinline__ void gate_up_tile(const bf16* x, const bf16* w, bf16* to,
                                             const int* rows_of, int first_row, int pairs, int width,
                                             int at_0, int m, u32 x_stride) {
    static_assert(GATE_UP_BYTES >= 8 * NT * 16 * 4, "a warp's sums take the place of its stages");
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 w_at[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) w_at[j] = (u32)(j * width + min(at_0 + g, width - 1)) * m + 8 * t;
    auto x_at = [&](int j) {
        int pair = j * 8 + g;
        if (pair >= pairs) return NO_ROW;
        return (u32)(rows_of ? rows_of[pair] : first_row + pair) * x_stride + 8 * t;
    };
    int steps = n_steps(m);
    int begin = slice_begin(warp, 8, steps), end = slice_begin(warp + 1, 8, steps);
    float acc[1][NT][4];
    stream<1, NT, GATE_UP_DEPTH(NT), false>(acc, w, w_at, x, x_at, m, 8 * t, begin, begin, end,
                                            shared_address(memory) + warp * GATE_UP_BYTES);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * GATE_UP_BYTES), acc);
    __syncthreads();
    for (int v = threadIdx.x; v < 8 * NT * 8; v += 256) {
        int pair = v / 8, at = at_0 + v % 8;
        const float* part = reinterpret_cast<float*>(memory) + pair * 16 + v % 8;
        float gate = tree_sum<8>(part, GATE_UP_BYTES / 4), up = tree_sum<8>(part + 8, GATE_UP_BYTES / 4);
        if (pair < pairs && at < width) store(to + (i64)pair * width + at, silu_mul(gate, up));
    }
    __syncthreads();
}

// grid any   block 256   shared memory 8 * GATE_UP_BYTES
extern "C" __global__ void __launch_bounds__(256, 3) gate_up_stream(
    const bf16* x, const bf16* gate_up, const bf16* shared_gate_up, bf16* inner, bf16* shared_inner,
    const int* groups, const i64* count, int n, int e, int k, int m, int i, int s, i64 x_stride)
{
    wait_for_predecessor();
    int shared_items = shared_gate_up ? (s + 7) / 8 : 0, items = (i + 7) / 8;
    int rows_in_all = (int)rows_that_count(count, n), touched = groups ? groups[0] : 0;
    for (int item = blockIdx.x;; item += gridDim.x) {
        const bf16* w = shared_gate_up;
        bf16* to = shared_inner;
        const int* rows_of = nullptr;
        int width = s, at_0 = item * 8, pairs = rows_in_all;
        if (item >= shared_items) {
            if (!groups) break;
            // Read before it is known whether there is an item: the number of experts takes as long.
            int j = (item - shared_items) / items, slot = min(j, e - 1);
            int expert = groups[1 + slot], first = groups[1 + e + slot], end = groups[2 + e + slot];
            asm volatile("" ::"r"(expert), "r"(first), "r"(end));
            if (j >= touched) break;
            at_0 = (item - shared_items - j * items) * 8;
            pairs = end - first;
            width = i;
            w = gate_up + (i64)expert * 2 * i * m;
            to = inner + (i64)first * i;
            rows_of = groups + 2 + 2 * e + first;
        }
        // The block's last: earlier, the next kernel's blocks would only be in the way.
        if (item + (int)gridDim.x >= shared_items + touched * items) let_successor_start();
        for (int base = 0; base < pairs;) {
            const int* rows = rows_of ? rows_of + base : nullptr;
            bf16* at = to + (i64)base * width;
            if (pairs - base <= 8) {
                gate_up_tile<1>(x, w, at, rows, base, pairs - base, width, at_0, m, (u32)x_stride);
                base += 8;
            } else {
                gate_up_tile<3>(x, w, at, rows, base, pairs - base, width, at_0, m, (u32)x_stride);
                base += 24;
            }
        }
    }
}

// A warp's stream in down_stream: units upwards in steps of 8; in a unit, passes over its pairs, each
// over all of the expert's inner width. One unit is 16 rows of w of one expert.
struct Cursor {
    int unit, step, steps, base, pairs, width, first;
    bool shared;
};

struct DownStream {
    const bf16 *down, *shared_down, *inner, *shared_inner;
    const int* touched;  // shared memory, as are first's
    const int* first;
    int n_touched, n_units, row_tiles, tile_0, m, i, s, rows;

    __device__ __forceinline__ int row_of(const Cursor& c) const {
        return (tile_0 + c.unit % row_tiles) * 16;
    }
    __device__ __forceinline__ void open(Cursor& c) const {
        if (c.unit >= n_units) return;
        int j = c.unit / row_tiles;
        c.shared = j >= n_touched;
        c.width = c.shared ? s : i;
        c.first = c.shared ? 0 : first[j];
        c.pairs = c.shared ? rows : first[j + 1] - c.first;
        c.steps = n_steps(c.width);
        c.step = 0;
        c.base = 0;
    }
};

// What a cursor copies next: this lane's chunk of row g of w, from there to row g + 8, and of the pairs.
struct Source {
    const bf16* w;
    const bf16* x[DOWN_TILES];
    u32 lower;
    int left;  // elements of the row from this lane's chunk on

    __device__ __forceinline__ void open(const DownStream& from, const Cursor& c) {
        if (c.unit >= from.n_units) return;
        int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        int row = from.row_of(c) + g, upper = min(row, from.m - 1);
        int j = c.unit / from.row_tiles;
        w = (c.shared ? from.shared_down : from.down + (i64)from.touched[j] * from.m * from.i) +
            (i64)upper * c.width + 8 * t;
        lower = (u32)(min(row + 8, from.m - 1) - upper) * c.width;
        left = c.width - 8 * t;
        open_pass(from, c);
    }
    __device__ __forceinline__ void open_pass(const DownStream& from, const Cursor& c) {
        int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        const bf16* first_x = (c.shared ? from.shared_inner : from.inner + (i64)c.first * c.width) + 8 * t;
#pragma unroll
        for (int n = 0; n < DOWN_TILES; ++n) {
            int pair = c.base + n * 8 + g;
            x[n] = pair < c.pairs ? first_x + (i64)pair * c.width : nullptr;
        }
    }
    // Copies a step and goes on to the next.
    __device__ __forceinline__ void produce(const DownStream& from, Cursor& c, u32 to) {
        if (c.unit < from.n_units) {
            int k = c.step * STEP;
            bool valid = k < left;
            k = valid ? k : 0;
            copy_16(to, w + k, valid);
            copy_16(to + 512, w + lower + k, valid);
#pragma unroll
            for (int n = 0; n < DOWN_TILES; ++n)
                if (x[n]) copy_16(to + (2 + n) * 512, x[n] + k, valid);
            if (++c.step == c.steps) {
                c.step = 0;
                c.base += 8 * DOWN_TILES;
                if (c.base < c.pairs) {
                    open_pass(from, c);
                } else {
                    c.unit += 8;
                    from.open(c);
                    open(from, c);
                }
            }
        }
        end_of_stage();
    }
};

// A block owns 16 row_tiles columns of the result, for all experts: a warp streams 16 rows of one expert's
// `down` after another, without a pause between them, and the block adds up at the end.
// grid ceil(m / (16 row_tiles))   block 256   shared memory 8 * DOWN_DEPTH * DOWN_STAGE
extern "C" __global__ void __launch_bounds__(256, 2) down_stream(
    const bf16* inner, const bf16* shared_inner, const bf16* down, const bf16* shared_down, bf16* y,
    bf16* shared_y, bf16* out, const float* weights, const int* groups, const i64* count, int n, int e,
    int k, int m, int i, int s, int row_tiles)
{
    __shared__ __align__(16) int touched[MAX_EXPERTS];
    __shared__ __align__(16) int first[MAX_EXPERTS + 1];
    wait_for_predecessor();
    int rows = (int)rows_that_count(count, n);
    int n_touched = groups[0];
    // Of more than are touched, so as not to wait for their number.
    int most = (int)min((i64)e, (i64)n * k);
    for (int j = threadIdx.x; j <= most; j += 256) {
        if (j < most) touched[j] = groups[1 + j];
        first[j] = groups[1 + e + j];
    }
    __syncthreads();
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    bool has_shared = shared_down && rows > 0;
    DownStream from = {down, shared_down, inner, shared_inner, touched, first, n_touched,
                       (n_touched + (has_shared ? 1 : 0)) * row_tiles, row_tiles,
                       (int)blockIdx.x * row_tiles, m, i, s, rows};
    Cursor now, later;
    Source source;
    now.unit = later.unit = warp;
    from.open(now);
    from.open(later);
    source.open(from, later);
    u32 fifo = shared_address(memory) + warp * (DOWN_DEPTH * DOWN_STAGE);
    u32 copy_to = fifo + copy_place(), w_from = fifo + w_place(), x_from = fifo + x_place() + 1024;
    for (int d = 0; d < DOWN_DEPTH - 1; ++d) source.produce(from, later, copy_to + d * DOWN_STAGE);
    u32 full = 0, empty = (DOWN_DEPTH - 1) * DOWN_STAGE;
    while (now.unit < from.n_units) {
        float acc[DOWN_TILES][4];
#pragma unroll
        for (int j = 0; j < DOWN_TILES; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) acc[j][q] = 0.f;
        for (int step = 0; step < now.steps; ++step) {
            wait_for_stage<DOWN_DEPTH - 2>();
            __syncwarp();
            uint4 a_0 = load_matrices(w_from + full), a_1 = load_matrices((w_from ^ 32) + full);
            uint4 b[DOWN_TILES];
#pragma unroll
            for (int j = 0; j < DOWN_TILES; ++j) b[j] = load_matrices(x_from + full + j * 512);
            source.produce(from, later, copy_to + empty);
            full = full == (DOWN_DEPTH - 1) * DOWN_STAGE ? 0 : full + DOWN_STAGE;
            empty = empty == (DOWN_DEPTH - 1) * DOWN_STAGE ? 0 : empty + DOWN_STAGE;
#pragma unroll
            for (int j = 0; j < DOWN_TILES; ++j) mma_step(acc[j], a_0, a_1, b[j]);
        }
        int row = from.row_of(now) + g;
        bf16* to = now.shared ? shared_y : y + (i64)now.first * m;
#pragma unroll
        for (int j = 0; j < DOWN_TILES; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                int pair = now.base + j * 8 + 2 * t + (q & 1), at = row + 8 * (q >> 1);
                if (pair < now.pairs && at < m) store(to + (i64)pair * m + at, acc[j][q]);
            }
        now.base += 8 * DOWN_TILES;
        if (now.base >= now.pairs) {
            now.unit += 8;
            from.open(now);
        }
    }
    wait_for_stage<0>();
    let_successor_start();
    __syncthreads();  // what the block has written, all of its threads may read
    const int* pair_of = groups + 2 + 2 * e + (i64)n * k;
    int width = 16 * row_tiles;
    for (int v = threadIdx.x; v < rows * width; v += 256) {
        int at = blockIdx.x * width + v % width;
        if (at < m) combine(out, y, has_shared ? shared_y : nullptr, weights, pair_of, v / width, at, k, m);
    }
}

#endif  // STORE_BF16
