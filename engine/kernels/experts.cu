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
// grid (ceil(e / 16), ROUTER_PARTS, ceil(n / 8 NT))   block 128   shared memory 4 * DEPTH * (2 + NT) * 512
template <int NT, int DEPTH>
__device__ __forceinline__ void router_stream(const bf16* x, const bf16* gate, float* parts,
                                              const i64* count, int n, int e, int m, i64 x_stride) {
    const int FIFO_BYTES = DEPTH * (2 + NT) * 512;
    let_successor_start();
    i64 row_0 = (i64)blockIdx.z * (8 * NT), rows = ask_rows(count, n);
    if (row_0 > 0 && row_0 >= rows) {
        wait_for_predecessor();
        return;
    }
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int e_0 = blockIdx.x * 16;
    u32 w_at[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) w_at[j] = min(j * 8 + g, e - 1 - e_0) * m + 8 * t;
    auto x_at = [&](int j) {
        return row_0 + j * 8 + g < rows ? (j * 8 + g) * (u32)x_stride + 8 * t : NO_ROW;
    };
    int steps = n_steps(m), slice = blockIdx.y * 4 + warp;
    int begin = slice_begin(slice, 4 * ROUTER_PARTS, steps);
    int end = slice_begin(slice + 1, 4 * ROUTER_PARTS, steps);
    float acc[1][NT][4];
    stream<1, NT, DEPTH, false>(acc, gate + (i64)e_0 * m, w_at, x + row_0 * x_stride, x_at, m, 8 * t,
                                begin, begin, end, shared_address(memory) + warp * FIFO_BYTES);
    __syncwarp();
    put_sums(reinterpret_cast<float*>(memory + warp * FIFO_BYTES), acc);
    __syncthreads();
    for (int at = threadIdx.x; at < 8 * NT * 16; at += 128) {
        i64 row = row_0 + at / 16;
        int expert = e_0 + at % 16;
        float sum = tree_sum<4>(reinterpret_cast<float*>(memory) + at, FIFO_BYTES / 4);
        if (row < rows && expert < e) parts[((i64)blockIdx.y * n + row) * e + expert] = sum;
    }
}
extern "C" __global__ void __launch_bounds__(128) router_stream_8(
    const bf16* x, const bf16* gate, float* parts, const i64* count, int n, int e, int m, i64 x_stride) {
    router_stream<1, 8>(x, gate, parts, count, n, e, m, x_stride);
}
extern "C" __global__ void __launch_bounds__(128) router_stream_24(
    const bf16* x, const bf16* gate, float* parts, const i64* count, int n, int e, int m, i64 x_stride) {
    router_stream<3, 6>(x, gate, parts, count, n, e, m, x_stride);
}
#endif

// Choice

#define MAX_EXPERTS 512
#define MAX_CHOSEN 16
#define CHOOSE_THREADS 128
#define PER_THREAD (MAX_EXPERTS / CHOOSE_THREADS)
#define CHOOSE_WARPS (CHOOSE_THREADS / 32)

// Larger is better: a larger value, then the lower id. NaN is below -inf; 0 is taken.
__device__ __forceinline__ u64 rank_key(float value, int id) {
    u32 bits = __float_as_uint(value + 0.f);  // -0 is +0
    bits = value != value ? 1u : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (0xffffffffu - (u32)id);
}
__device__ __forceinline__ int id_of(u64 key) { return (int)(0xffffffffu - (u32)key); }
__device__ __forceinline__ u32 warp_largest(u32 x) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
    return most;
}
__device__ __forceinline__ u64 warp_best(u64 key) {
    u32 upper = warp_largest((u32)(key >> 32));
    u32 lower = warp_largest((u32)(key >> 32) == upper ? (u32)key : 0);
    return (u64)upper << 32 | lower;
}

// By one block of CHOOSE_THREADS; ids [n][k], a row's differ. Rows are taken ROW_BITS at a time, as
// bits of each expert. Arrays begin at 16 bytes: the compiler joins loads, and a load of four would
// else begin in the array before (racecheck reports what it reads there, though nobody uses it).
#define ROW_WORDS 4
#define ROW_BITS (32 * ROW_WORDS)
struct Grouping {
    __align__(16) u32 rows_of[ROW_WORDS][MAX_EXPERTS];
    __align__(16) int next[MAX_EXPERTS];  // pairs of an expert; then its next pair
    __align__(16) int warp_pairs[CHOOSE_WARPS];
    __align__(16) int warp_touched[CHOOSE_WARPS];
};
__device__ __forceinline__ void group_pairs(int* groups, const i64* ids, int rows, int n, int e, int k,
                                            Grouping& of) {
    int* touched = groups + 1;
    int* first = groups + 1 + e;
    int* pair_row = groups + 2 + 2 * e;
    int* pair_of = pair_row + (i64)n * k;
    int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, total = rows * k;
    bool once = rows <= ROW_BITS;
    for (int expert = thread; expert < MAX_EXPERTS; expert += CHOOSE_THREADS) {
        of.next[expert] = 0;
#pragma unroll
        for (int word = 0; word < ROW_WORDS; ++word) of.rows_of[word][expert] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int q = thread; q < total; q += CHOOSE_THREADS) {
        int expert = (int)__ldcg(ids + q), row = q / k;
        atomicAdd(&of.next[expert], 1);
        if (once) atomicOr(&of.rows_of[row >> 5][expert], 1u << (row & 31));
    }
    __syncthreads();
    int pairs[PER_THREAD], n_pairs = 0, n_touched = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        pairs[j] = of.next[thread * PER_THREAD + j];
        n_pairs += pairs[j];
        n_touched += pairs[j] > 0;
    }
    int pairs_before = n_pairs, touched_before = n_touched;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        int p = __shfl_up_sync(0xffffffffu, pairs_before, offset);
        int t = __shfl_up_sync(0xffffffffu, touched_before, offset);
        if (lane >= offset) {
            pairs_before += p;
            touched_before += t;
        }
    }
    if (lane == 31) {
        of.warp_pairs[warp] = pairs_before;
        of.warp_touched[warp] = touched_before;
    }
    pairs_before -= n_pairs;
    touched_before -= n_touched;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < CHOOSE_WARPS; ++w)
        if (w < warp) {
            pairs_before += of.warp_pairs[w];
            touched_before += of.warp_touched[w];
        }
    if (thread == CHOOSE_THREADS - 1) {
        groups[0] = touched_before + n_touched;
        first[touched_before + n_touched] = pairs_before + n_pairs;
    }
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        of.next[thread * PER_THREAD + j] = pairs_before;
        if (pairs[j]) {
            touched[touched_before] = thread * PER_THREAD + j;
            first[touched_before] = pairs_before;
            pairs_before += pairs[j];
            ++touched_before;
        }
    }
    for (int row_0 = 0; row_0 < rows; row_0 += ROW_BITS) {
        int begin = row_0 * k, end = min(rows, row_0 + ROW_BITS) * k;
        if (!once) {
            for (int q = begin + thread; q < end; q += CHOOSE_THREADS) {
                int row = q / k - row_0;
                atomicOr(&of.rows_of[row >> 5][(int)__ldcg(ids + q)], 1u << (row & 31));
            }
        }
        __syncthreads();
#pragma unroll 4
        for (int q = begin + thread; q < end; q += CHOOSE_THREADS) {
            int expert = (int)__ldcg(ids + q), row = q / k, bit = row - row_0;
            int pair = of.next[expert];
#pragma unroll
            for (int word = 0; word < ROW_WORDS; ++word) {
                u32 lower = bit >= 32 * word + 32 ? 0xffffffffu
                            : bit > 32 * word     ? (1u << (bit & 31)) - 1
                                                  : 0;
                pair += __popc(of.rows_of[word][expert] & lower);
            }
            pair_row[pair] = row;
            pair_of[q] = pair;
        }
        if (end == total) break;
        __syncthreads();
        for (int expert = thread; expert < MAX_EXPERTS; expert += CHOOSE_THREADS)
#pragma unroll
            for (int word = 0; word < ROW_WORDS; ++word) {
                of.next[expert] += __popc(of.rows_of[word][expert]);
                of.rows_of[word][expert] = 0;
            }
        __syncthreads();
    }
}

// grid 1   block 128
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS) group(
    const i64* ids,   // [n][k]
    int* groups, const i64* count, int n, int e, int k)
{
    __shared__ Grouping of;
    let_successor_start();
    wait_for_predecessor();
    group_pairs(groups, ids, (int)rows_that_count(count, n), n, e, k, of);
}

// A block per row: each warp ranks its experts, the first one the warps' best. activation: 0 the sum of the
// parts is the score, 1 sigmoid, 2 softmax.
// grid n   block 128   shared memory static
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS) choose(
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
    __shared__ __align__(16) float score[MAX_EXPERTS];
    __shared__ __align__(16) float biased[MAX_EXPERTS];
    __shared__ __align__(16) u64 best_of[CHOOSE_WARPS * MAX_CHOSEN];
    __shared__ __align__(16) int chosen[MAX_CHOSEN];
    __shared__ __align__(16) float scratch[32];
    __shared__ u32 kept_groups;
    __shared__ Grouping of;
    __shared__ int is_last;
    let_successor_start();
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    i64 rows = rows_that_count(count, n), row = blockIdx.x;
    float bias[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        int expert = j * CHOOSE_THREADS + thread;
        bias[j] = expert < e ? correction_bias[expert] : 0.f;
    }
    wait_for_predecessor();
    if (row < rows) {
        i64 stride = (i64)n * e;
        float raw[PER_THREAD], most = NEG_INF;
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) {
            int expert = j * CHOOSE_THREADS + thread;
            const float* part = parts + row * e + expert;
            raw[j] = NEG_INF;
            if (expert < e) {
                raw[j] = part[0];
                if (n_parts == 2) raw[j] = part[0] + part[stride];
                if (n_parts == 4) raw[j] = (part[0] + part[stride]) + (part[2 * stride] + part[3 * stride]);
                if (activation == 1) raw[j] = sigmoid(raw[j]);
                most = fmaxf(most, raw[j]);
            }
        }
        if (activation == 2) {
            most = warp_max(most);
            if (lane == 0) scratch[warp] = most;
            __syncthreads();
            for (int w = 0; w < CHOOSE_WARPS; ++w) most = fmaxf(most, scratch[w]);
            __syncthreads();
            float total = 0.f;
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) {
                raw[j] = expf(raw[j] - most);
                if (j * CHOOSE_THREADS + thread < e) total += raw[j];
            }
            total = block_sum(total, scratch);
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) raw[j] /= total;
        }
        u64 keys[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) {
            int expert = j * CHOOSE_THREADS + thread;
            keys[j] = 0;
            if (expert < e) {
                float value = raw[j] + bias[j];
                score[expert] = raw[j];
                biased[expert] = value;
                if (scores) scores[row * e + expert] = raw[j];
                keys[j] = rank_key(value, expert);
            }
        }
        int per_group = e / n_group;
        if (topk_group < n_group) {
            __syncthreads();
            if (warp == 0) {
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
                u32 all = __ballot_sync(0xffffffffu, kept);
                if (lane == 0) kept_groups = all;
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) {
                int expert = j * CHOOSE_THREADS + thread;
                if (expert < e && !(kept_groups >> (expert / per_group) & 1))
                    keys[j] = rank_key(NEG_INF, expert);
            }
        }
        // The warp's k best, 0 where it has fewer.
        for (int c = 0; c < k; ++c) {
            u64 mine = 0;
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j) mine = keys[j] > mine ? keys[j] : mine;
            u64 best = warp_best(mine);
#pragma unroll
            for (int j = 0; j < PER_THREAD; ++j)
                if (keys[j] == best) keys[j] = 0;
            if (lane == 0) best_of[warp * k + c] = best;
        }
        __syncthreads();
        if (warp == 0) {
            const int HELD = CHOOSE_WARPS * MAX_CHOSEN / 32;
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                int at = j * 32 + lane;
                u64 mine = at < CHOOSE_WARPS * k ? best_of[at] : 0;
                int larger = 0;
#pragma unroll 8
                for (int other = 0; other < CHOOSE_WARPS * k; ++other) larger += best_of[other] > mine;
                if (mine && larger < k) chosen[larger] = id_of(mine);
            }
            __syncwarp();
            int id = lane < k ? chosen[lane] : 0, place = 0;
            for (int c = 0; c < k; ++c) place += chosen[c] < id;
            float mine = lane < k ? score[id] : 0.f;
            if (lane < k) biased[place] = mine;  // free by now: the chosen scores, ids ascending
            __syncwarp();
            float total = 0.f;
            for (int c = 0; c < k; ++c) total += biased[c];
            if (lane < k) {
                float weight = normalise ? mine / (total + 1e-20f) : mine;
                ids[row * k + place] = id;
                weights[row * k + place] = weight * factor;
            }
        }
    }
    if (!groups) return;
    if (gridDim.x == 1) {
        __syncthreads();
    } else {
        if (warp == 0) {
            __threadfence();
            __syncwarp();
        }
        if (thread == 0) {
            is_last = atomicAdd(arrived, 1) == (int)gridDim.x - 1;
            if (is_last) *arrived = 0;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
    }
    group_pairs(groups, ids, (int)rows, n, e, k, of);
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
