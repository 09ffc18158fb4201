// router.cu: which experts a row goes to, and with which weights.   MOE-1 to MOE-3
//
//   router_*    raw scores x gate^T, as sums over parts of i
//   choose      adds the parts; sigmoid or softmax; groups, top k, weights; then, in the last block to
//               arrive, group_pairs: the pairs by expert (pairs.cuh)
//   group       that alone
//
// Every sum has an order that depends on neither the routing nor the number of rows (stream.cuh), so a
// row's bits do not depend on the other rows. Rows from `count` on are padding: not routed, not read, not
// written.

#include "pairs.cuh"
#include "stream.cuh"

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
    i64 row_0 = (i64)blockIdx.z * (8 * NT);
    i64 rows = rows_that_count(count, n);
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
