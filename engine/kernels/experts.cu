// experts.cu: the router, its choice, and the chosen experts' SwiGLUs.   MOE-1 to MOE-4
//
//   router_*    raw scores x gate^T, as sums over parts of i
//   choose      adds the parts; sigmoid or softmax; groups, top k, weights; then, in the last block to
//               arrive, group_pairs
//   gate_up_*   inner = silu(gate x) * up x for every pair (row, expert) and for the shared expert
//   down_*      every expert's output, then per row the weighted sum and the shared expert
//
// A pair is one row and one of its k experts. group_pairs orders the pairs by expert, then row, and
// lists the touched experts, so that the grids below need not depend on the routing. `groups`, int32:
//
//   [0]                   number of touched experts
//   [1 + j]               the j-th touched expert, ascending                          j < e
//   [1 + e + j]           its first pair; [1 + e + j + 1] is the end of its pairs     j <= e
//   [2 + 2e + p]          row of pair p                                               p < n k
//   [2 + 2e + n k + q]    the pair of row q / k and its choice q % k                  q < n k
//
// Stored as `real`: the inner products, every expert's output before it is weighed, the weighted sum,
// the shared expert's output, and their sum. A row adds its experts in ascending order, and every sum
// over i or m has an order that depends on neither the routing nor the number of rows (stream.cuh),
// so a row's bits do not depend on the other rows. Rows from `count` on are padding: not routed, not
// read, not written.

#include "stream.cuh"

// Router

// parts [1][n][e]   grid (ceil(e / 2 / 8), ceil(n / 8))   block 256
extern "C" __global__ void __launch_bounds__(256) router_any(
    const real* x,      // [n][x_stride], m used
    const real* gate,   // [e][m]
    float* parts,       // [1][n][e]
    const i64* count, int n, int e, int m, i64 x_stride)
{
    let_successor_start();
    wait_for_predecessor();
    i64 rows = rows_that_count(count, n);
    i64 row_0 = (i64)blockIdx.y * 8;
    int e_0 = (blockIdx.x * 8 + (threadIdx.x >> 5)) * 2;
    if (row_0 >= rows || e_0 >= e) return;
    const real* w_row[2];
    const real* x_row[8];
    for (int r = 0; r < 2; ++r) w_row[r] = gate + (i64)min(e_0 + r, e - 1) * m;
    for (int j = 0; j < 8; ++j) x_row[j] = row_0 + j < rows ? x + (row_0 + j) * x_stride : nullptr;
    float sum[2][8];
    dot_any<2>(sum, w_row, x_row, m);
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (lane == j * 2 + r && row_0 + j < rows && e_0 + r < e)
                parts[(row_0 + j) * e + e_0 + r] = sum[r][j];
}

#define ROUTER_PARTS 4
#ifdef STORE_BF16
// A block sums 4 slices of 16 experts, a warp each.
// grid (ceil(e / 16), ROUTER_PARTS, ceil(n / 8 NT))   block 128   shared memory 4 * DEPTH * 1024
template <int NT, int DEPTH>
__device__ __forceinline__ void router_stream(const bf16* x, const bf16* gate, float* parts,
                                              const i64* count, int n, int e, int m, i64 x_stride) {
    let_successor_start();
    i64 rows = rows_that_count(count, n);
    i64 row_0 = (i64)blockIdx.z * (8 * NT);
    if (row_0 >= rows) {
        wait_for_predecessor();
        return;
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int e_0 = blockIdx.x * 16;
    u32 w_at[2], x_at[NT];
#pragma unroll
    for (int j = 0; j < 2; ++j) w_at[j] = min(j * 8 + g, e - 1 - e_0) * m + 8 * t;
#pragma unroll
    for (int j = 0; j < NT; ++j)
        x_at[j] = row_0 + j * 8 + g < rows ? (j * 8 + g) * (u32)x_stride + 8 * t : NO_ROW;
    int steps = n_steps(m), slice = blockIdx.y * 4 + warp;
    int begin = slice_begin(slice, 4 * ROUTER_PARTS, steps);
    int end = slice_begin(slice + 1, 4 * ROUTER_PARTS, steps);
    float acc[1][NT][4];
    stream<1, NT, DEPTH, false>(acc, gate + (i64)e_0 * m, w_at, x + row_0 * x_stride, x_at, m, 8 * t,
                                begin, begin, end,
                                shared_address(memory) + warp * (DEPTH * 1024) + lane * 16);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * (DEPTH * 1024)), acc);
    __syncthreads();
    for (int at = threadIdx.x; at < 8 * NT * 16; at += 128) {
        i64 row = row_0 + at / 16;
        int expert = e_0 + at % 16;
        float sum = tree_sum<4>(reinterpret_cast<float*>(memory) + at, DEPTH * 256);
        if (row < rows && expert < e) parts[((i64)blockIdx.y * n + row) * e + expert] = sum;
    }
}
extern "C" __global__ void __launch_bounds__(128) router_stream_8(
    const bf16* x, const bf16* gate, float* parts, const i64* count, int n, int e, int m, i64 x_stride) {
    router_stream<1, 12>(x, gate, parts, count, n, e, m, x_stride);
}
extern "C" __global__ void __launch_bounds__(128) router_stream_24(
    const bf16* x, const bf16* gate, float* parts, const i64* count, int n, int e, int m, i64 x_stride) {
    router_stream<3, 12>(x, gate, parts, count, n, e, m, x_stride);
}
#endif

// Choice

#define MAX_EXPERTS 512
#define MAX_CHOSEN 16
#define CHOOSE_WARPS 4

// Larger is better: a larger value, then the lower id. NaN is below -inf; 0 is taken.
__device__ __forceinline__ u64 rank_key(float value, int id) {
    u32 bits = __float_as_uint(value + 0.f);  // -0 is +0
    bits = value != value ? 1u : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (0xffffffffu - (u32)id);
}
__device__ __forceinline__ int id_of(u64 key) { return (int)(0xffffffffu - (u32)key); }
__device__ __forceinline__ u64 warp_best(u64 key) {
    for (int offset = 16; offset; offset >>= 1) {
        u64 other = __shfl_xor_sync(0xffffffffu, key, offset);
        key = other > key ? other : key;
    }
    return key;
}

// By one block. ids [n][k]; scratch: MAX_EXPERTS ints.
__device__ __forceinline__ void group_pairs(int* groups, const i64* ids, int rows, int n, int e, int k,
                                            int* scratch) {
    int* touched = groups + 1;
    int* first = groups + 1 + e;
    int* pair_row = groups + 2 + 2 * e;
    int* pair_of = pair_row + (i64)n * k;
    int lane = threadIdx.x & 31;
    for (int expert = threadIdx.x; expert < e; expert += blockDim.x) scratch[expert] = 0;
    __syncthreads();
    for (int q = threadIdx.x; q < rows * k; q += blockDim.x) atomicAdd(&scratch[(int)__ldcg(ids + q)], 1);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // Two prefix sums in one: pairs in the upper bits (below 2^41), touched experts in the lower 20.
    const int PER_LANE = MAX_EXPERTS / 32;
    u64 mine = 0;
    for (int j = 0; j < PER_LANE; ++j) {
        int expert = lane * PER_LANE + j;
        int pairs = expert < e ? scratch[expert] : 0;
        mine += (u64)pairs << 20 | (pairs ? 1 : 0);
    }
    u64 before = mine;
    for (int offset = 1; offset < 32; offset <<= 1) {
        u64 other = __shfl_up_sync(0xffffffffu, before, offset);
        if (lane >= offset) before += other;
    }
    if (lane == 31) {
        int n_touched = (int)(before & 0xfffff);
        groups[0] = n_touched;
        first[n_touched] = (int)(before >> 20);
    }
    before -= mine;
    for (int j = 0; j < PER_LANE; ++j) {
        int expert = lane * PER_LANE + j;
        int pairs = expert < e ? scratch[expert] : 0;
        if (pairs) {
            int at = (int)(before & 0xfffff), begin = (int)(before >> 20);
            touched[at] = expert;
            first[at] = begin;
            scratch[expert] = begin;
            before += (u64)pairs << 20 | 1;
        }
    }
    __syncwarp();
    // Rows upwards, 32 pairs at a time; scratch[expert] is where its next pair goes.
    for (int base = 0; base < rows * k; base += 32) {
        int q = base + lane;
        int expert = q < rows * k ? (int)__ldcg(ids + q) : -1;
        u32 same = __match_any_sync(0xffffffffu, expert);
        u32 lower = same & ((1u << lane) - 1);
        int begin = expert >= 0 ? scratch[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
            int pair = begin + __popc(lower);
            if (!lower) scratch[expert] = begin + __popc(same);
            pair_row[pair] = q / k;
            pair_of[q] = pair;
        }
        __syncwarp();
    }
}

// grid 1   block 128
extern "C" __global__ void __launch_bounds__(128) group(
    const i64* ids,   // [n][k]
    int* groups, const i64* count, int n, int e, int k)
{
    __shared__ int scratch[MAX_EXPERTS];
    let_successor_start();
    wait_for_predecessor();
    group_pairs(groups, ids, (int)rows_that_count(count, n), n, e, k, scratch);
}

// A warp per row. activation: 0 the sum of the parts is the score, 1 sigmoid, 2 softmax.
// grid ceil(n / 4)   block 128   shared memory static
extern "C" __global__ void __launch_bounds__(128) choose(
    const float* parts,            // [n_parts][n][e], n_parts a power of two up to 4
    float* scores,                 // [n][e], or null
    const float* correction_bias,  // [e]
    i64* ids,                      // [n][k] ascending
    float* weights,                // [n][k]
    int* groups,                   // see above; null: not wanted
    int* arrived,                  // [1], 0 before and after
    const i64* count, int n, int e, int k, int n_parts, int activation, int n_group, int topk_group,
    int normalise, float factor)
{
    __shared__ float score_of[CHOOSE_WARPS][MAX_EXPERTS];
    __shared__ float biased_of[CHOOSE_WARPS][MAX_EXPERTS];
    __shared__ int scratch[MAX_EXPERTS];
    __shared__ int chosen_of[CHOOSE_WARPS][MAX_CHOSEN];
    __shared__ int is_last;
    let_successor_start();
    wait_for_predecessor();
    i64 rows = rows_that_count(count, n);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    i64 row = (i64)blockIdx.x * CHOOSE_WARPS + warp;
    if (row < rows) {
        float* score = score_of[warp];
        float* biased = biased_of[warp];
        int* chosen = chosen_of[warp];
        i64 stride = (i64)n * e;
        float top = NEG_INF;
        for (int expert = lane; expert < e; expert += 32) {
            const float* part = parts + row * e + expert;
            float raw = part[0];
            if (n_parts == 2) raw = part[0] + part[stride];
            if (n_parts == 4) raw = (part[0] + part[stride]) + (part[2 * stride] + part[3 * stride]);
            if (activation == 1) raw = sigmoid(raw);
            score[expert] = raw;
            top = fmaxf(top, raw);
        }
        if (activation == 2) {
            top = warp_max(top);
            float total = 0.f;
            for (int expert = lane; expert < e; expert += 32) {
                float p = expf(score[expert] - top);
                score[expert] = p;
                total += p;
            }
            total = warp_sum(total);
            for (int expert = lane; expert < e; expert += 32) score[expert] /= total;
        }
        for (int expert = lane; expert < e; expert += 32) {
            biased[expert] = score[expert] + correction_bias[expert];
            if (scores) scores[row * e + expert] = score[expert];
        }
        __syncwarp();
        int per_group = e / n_group;
        if (topk_group < n_group) {
            u64 key = 0;
            if (lane < n_group) {
                const float* member = biased + lane * per_group;
                float best = NEG_INF, second = NEG_INF;
                for (int j = 0; j < per_group; ++j) {
                    float v = member[j];
                    if (v > best) {
                        second = best;
                        best = v;
                    } else if (v > second) {
                        second = v;
                    }
                }
                key = rank_key(per_group > 1 ? second + best : best, lane);
            }
            bool kept = false;
            for (int j = 0; j < topk_group; ++j) {
                u64 best = warp_best(key);
                if (key == best && key) {
                    kept = true;
                    key = 0;
                }
            }
            u32 kept_groups = __ballot_sync(0xffffffffu, kept);
            for (int expert = lane; expert < e; expert += 32)
                if (!(kept_groups >> (expert / per_group) & 1)) biased[expert] = NEG_INF;
            __syncwarp();
        }
        u64 keys[MAX_EXPERTS / 32];
#pragma unroll
        for (int j = 0; j < MAX_EXPERTS / 32; ++j) {
            int expert = j * 32 + lane;
            keys[j] = expert < e ? rank_key(biased[expert], expert) : 0;
        }
        for (int c = 0; c < k; ++c) {
            u64 best = 0;
#pragma unroll
            for (int j = 0; j < MAX_EXPERTS / 32; ++j) best = keys[j] > best ? keys[j] : best;
            best = warp_best(best);
#pragma unroll
            for (int j = 0; j < MAX_EXPERTS / 32; ++j)
                if (keys[j] == best) keys[j] = 0;
            if (lane == 0) chosen[c] = id_of(best);
        }
        __syncwarp();
        int id = lane < k ? chosen[lane] : 0, place = 0;
        for (int c = 0; c < k; ++c) place += chosen[c] < id;
        if (lane < k) biased[place] = score[id];  // free by now: the chosen scores, ids ascending
        __syncwarp();
        float total = 0.f;
        for (int c = 0; c < k; ++c) total += biased[c];
        if (lane < k) {
            float weight = normalise ? score[id] / (total + 1e-20f) : score[id];
            ids[row * k + place] = id;
            weights[row * k + place] = weight * factor;
        }
    }
    if (!groups) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived, 1) == (int)gridDim.x - 1;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) group_pairs(groups, ids, (int)rows, n, e, k, scratch);
}

// Experts

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
    float sum = 0.f;
    if (pair_of)
        for (int j = 0; j < k; ++j)
            sum += weights[row * k + j] * to_float(y[(i64)pair_of[row * k + j] * m + at]);
    sum = stored(sum);
    if (shared_y) sum += to_float(shared_y[row * m + at]);
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

#define GATE_UP_DEPTH 6  // stages
#define DOWN_DEPTH 10

// 16 inner values of one expert for up to 8 NT of its pairs: rows of gate and of up side by side.
// rows_of  rows of x of these pairs; null: first_row and on
template <int NT>
__device__ __forceinline__ void gate_up_tile(const bf16* x, const bf16* w, bf16* to,
                                             const int* rows_of, int first_row, int pairs, int width,
                                             int at_0, int m, u32 x_stride) {
    const int FIFO_BYTES = GATE_UP_DEPTH * 2048;
    static_assert(FIFO_BYTES >= 8 * NT * 32 * 4, "a warp's sums take the place of its stages");
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 w_at[4], x_at[NT];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        w_at[j] = (u32)((j >> 1) * width + min(at_0 + (j & 1) * 8 + g, width - 1)) * m + 8 * t;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        int pair = j * 8 + g;
        x_at[j] = NO_ROW;
        if (pair < pairs) x_at[j] = (u32)(rows_of ? rows_of[pair] : first_row + pair) * x_stride + 8 * t;
    }
    int steps = n_steps(m);
    int begin = slice_begin(warp, 8, steps), end = slice_begin(warp + 1, 8, steps);
    float acc[2][NT][4];
    stream<2, NT, GATE_UP_DEPTH, false>(acc, w, w_at, x, x_at, m, 8 * t, begin, begin, end,
                                        shared_address(memory) + warp * FIFO_BYTES + lane * 16);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * FIFO_BYTES), acc);
    __syncthreads();
    for (int v = threadIdx.x; v < 8 * NT * 16; v += 256) {
        int pair = v / 16, at = at_0 + v % 16;
        const float* part = reinterpret_cast<float*>(memory) + v / 16 * 32 + v % 16;
        float gate = tree_sum<8>(part, FIFO_BYTES / 4), up = tree_sum<8>(part + 16, FIFO_BYTES / 4);
        if (pair < pairs && at < width) store(to + (i64)pair * width + at, silu_mul(gate, up));
    }
    __syncthreads();
}

// grid any   block 256   shared memory 8 * GATE_UP_DEPTH * 2048
extern "C" __global__ void __launch_bounds__(256, 2) gate_up_stream(
    const bf16* x, const bf16* gate_up, const bf16* shared_gate_up, bf16* inner, bf16* shared_inner,
    const int* groups, const i64* count, int n, int e, int k, int m, int i, int s, i64 x_stride)
{
    let_successor_start();
    wait_for_predecessor();
    int shared_items = shared_gate_up ? (s + 15) / 16 : 0, items = (i + 15) / 16;
    int total = shared_items + (groups ? groups[0] * items : 0);
    for (int item = blockIdx.x; item < total; item += gridDim.x) {
        const bf16* w = shared_gate_up;
        bf16* to = shared_inner;
        const int* rows_of = nullptr;
        int width = s, at_0 = item * 16, pairs = (int)rows_that_count(count, n);
        if (item >= shared_items) {
            int j = (item - shared_items) / items, first = groups[1 + e + j];
            at_0 = (item - shared_items - j * items) * 16;
            pairs = groups[2 + e + j] - first;
            width = i;
            w = gate_up + (i64)groups[1 + j] * 2 * i * m;
            to = inner + (i64)first * i;
            rows_of = groups + 2 + 2 * e + first;
        }
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
    const bf16* w;  // this lane's row g, at element 8t
    u32 lower;      // from there to row g + 8
    Job job;
    int unit, step, steps, base;
};

struct DownStream {
    const bf16* down;
    const bf16* shared_down;
    const int* touched;  // shared memory, as are first's
    const int* first;
    int n_touched, n_units, row_tiles, tile_0, m, i, s, rows;

    __device__ __forceinline__ void open(Cursor& c) const {
        if (c.unit >= n_units) return;
        int lane = threadIdx.x & 31;
        int j = c.unit / row_tiles, row = (tile_0 + c.unit % row_tiles) * 16 + (lane >> 2);
        if (j < n_touched)
            c.job = {touched[j], i, first[j + 1] - first[j], first[j], false};
        else
            c.job = {0, s, rows, 0, true};
        int upper = min(row, m - 1);
        c.w = (c.job.shared ? shared_down : down + c.job.expert * m * i) + (i64)upper * c.job.width +
              8 * (lane & 3);
        c.lower = (u32)(min(row + 8, m - 1) - upper) * c.job.width;
        c.steps = n_steps(c.job.width);
        c.step = 0;
        c.base = 0;
    }
    __device__ __forceinline__ int pass_rows(const Cursor& c) const {
        return c.job.pairs - c.base <= 8 ? 8 : 24;
    }
    // Copies a step of 16 rows and goes on to the next.
    __device__ __forceinline__ void produce(Cursor& c, u32 to) const {
        if (c.unit < n_units) {
            int k = c.step * STEP;
            bool valid = k + 8 * (int)(threadIdx.x & 3) < c.job.width;
            copy_16(to, c.w + (valid ? k : 0), valid);
            copy_16(to + 512, c.w + c.lower + (valid ? k : 0), valid);
            if (++c.step == c.steps) {
                c.step = 0;
                c.base += pass_rows(c);
                if (c.base >= c.job.pairs) {
                    c.unit += 8;
                    open(c);
                }
            }
        }
        end_of_stage();
    }
};

template <int NT>
__device__ __forceinline__ void down_pass(const DownStream& from, const Cursor& now, Cursor& later,
                                          const bf16* x, bf16* to, u32 fifo, u32& full, u32& empty) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, width = now.job.width;
    const bf16* x_row[NT];
    uint4 ahead[NT];
    float acc[NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        int pair = now.base + j * 8 + g;
        x_row[j] = pair < now.job.pairs ? x + (i64)pair * width + 8 * t : nullptr;
        ahead[j] = read_16(x_row[j], x_row[j] && 8 * t < width);
#pragma unroll
        for (int q = 0; q < 4; ++q) acc[j][q] = 0.f;
    }
    for (int step = 0; step < now.steps; ++step) {
        wait_for_stage<DOWN_DEPTH - 2>();
        uint4 b[NT];
        int k = (step + 1) * STEP;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            b[j] = ahead[j];
            ahead[j] = read_16(x_row[j] + k, x_row[j] && k + 8 * t < width);
        }
        uint4 upper = read_shared_16(full), lower = read_shared_16(full + 512);
        from.produce(later, empty);
        full = full == fifo + (DOWN_DEPTH - 1) * 1024 ? fifo : full + 1024;
        empty = empty == fifo + (DOWN_DEPTH - 1) * 1024 ? fifo : empty + 1024;
#pragma unroll
        for (int j = 0; j < NT; ++j) mma_step(acc[j], upper, lower, b[j]);
    }
    int row = (from.tile_0 + now.unit % from.row_tiles) * 16 + g;
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            int pair = now.base + j * 8 + 2 * t + (q & 1), at = row + 8 * (q >> 1);
            if (pair < now.job.pairs && at < from.m) store(to + (i64)pair * from.m + at, acc[j][q]);
        }
}

// A block owns 16 row_tiles columns of the result, for all experts: a warp streams 16 rows of one expert's
// `down` after another, without a pause between them, and the block adds up at the end.
// grid ceil(m / (16 row_tiles))   block 256   shared memory 8 * DOWN_DEPTH * 1024
extern "C" __global__ void __launch_bounds__(256, 2) down_stream(
    const bf16* inner, const bf16* shared_inner, const bf16* down, const bf16* shared_down, bf16* y,
    bf16* shared_y, bf16* out, const float* weights, const int* groups, const i64* count, int n, int e,
    int k, int m, int i, int s, int row_tiles)
{
    __shared__ int touched[MAX_EXPERTS];
    __shared__ int first[MAX_EXPERTS + 1];
    let_successor_start();
    wait_for_predecessor();
    int rows = (int)rows_that_count(count, n);
    int n_touched = groups[0];
    for (int j = threadIdx.x; j <= n_touched; j += 256) {
        if (j < n_touched) touched[j] = groups[1 + j];
        first[j] = groups[1 + e + j];
    }
    __syncthreads();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    bool has_shared = shared_down && rows > 0;
    DownStream from = {down, shared_down, touched, first, n_touched,
                       (n_touched + (has_shared ? 1 : 0)) * row_tiles, row_tiles,
                       (int)blockIdx.x * row_tiles, m, i, s, rows};
    Cursor now, later;
    now.unit = later.unit = warp;
    from.open(now);
    from.open(later);
    u32 fifo = shared_address(memory) + warp * (DOWN_DEPTH * 1024) + lane * 16;
    for (int d = 0; d < DOWN_DEPTH - 1; ++d) from.produce(later, fifo + d * 1024);
    u32 full = fifo, empty = fifo + (DOWN_DEPTH - 1) * 1024;
    while (now.unit < from.n_units) {
        const bf16* x = now.job.shared ? shared_inner : inner + (i64)now.job.first * i;
        bf16* to = now.job.shared ? shared_y : y + (i64)now.job.first * m;
        int pass_rows = from.pass_rows(now);
        if (pass_rows == 8)
            down_pass<1>(from, now, later, x, to, fifo, full, empty);
        else
            down_pass<3>(from, now, later, x, to, fifo, full, empty);
        now.base += pass_rows;
        if (now.base >= now.job.pairs) {
            now.unit += 8;
            from.open(now);
        }
    }
    wait_for_stage<0>();
    __syncthreads();  // what the block has written, all of its threads may read
    const int* pair_of = groups + 2 + 2 * e + (i64)n * k;
    int width = 16 * row_tiles;
    for (int v = threadIdx.x; v < rows * width; v += 256) {
        int at = blockIdx.x * width + v % width;
        if (at < m) combine(out, y, has_shared ? shared_y : nullptr, weights, pair_of, v / width, at, k, m);
    }
}

#endif  // STORE_BF16
