// verify_attn.cu: tree attention over the paged latent cache, for any sizes and both storage types.
// Stages out_latent and scores, rules MLA-2, MLA-3, MASK-3, NUM-4.
//
//   score[i, head, t] = scale (query[i, head] . row[t])        over all c + r elements
//   out[i, head]      = softmax over the slots t that node i sees, times row[t][0..c-1]
//
// Split-KV: a split of split_size slots leaves for every row and head its largest score, the sum of
// exp(score - largest) and that sum times the values; verify_attn_merge joins the splits in
// ascending order. A slot that a node does not see is not read for it: nothing is multiplied by zero.
// Every sum has a fixed order, so the same inputs give the same bits.
//
// A block serves one node, up to HEADS heads and one split; 32 slots at a time:
//   a warp's lanes walk one slot's row together, against all heads    -> scores of the chunk
//   a warp takes one head                                             -> maximum, exponentials, sum
//   a thread takes columns tid, tid + 256, ... for all slots and heads -> accumulators, in shared memory
//
// A launch serves `rows` nodes from first_row on: the launcher cuts n where the splits' results would
// take too much memory, or the grid has no more blocks in y.
//
// split: grid (ceil(h / 4), rows, splits)   block 256   shared memory 16 (2 c + r) + 832 bytes
// merge: grid (h, rows)   block 128   shared memory none

#include "common.cuh"

namespace {
constexpr int HEADS = 4;
constexpr int CHUNK = 32;  // slots
constexpr int THREADS = 256;

__device__ __forceinline__ bool visible(const u32* bits, i64 slot, i64 open_len) {
    i64 column = slot - open_len;
    return column < 0 || (bits[column >> 5] >> (column & 31)) & 1;
}
}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) verify_attn_split(
    const real* query,      // [n, h, c + r]
    const real* rows,       // [physical rows, c + r]: this layer's
    const i64* page_table,  // [n_pages]
    const u32* bits,        // [n, words]
    const i64* count,       // [1] rows that count
    const i64* open_len,    // [1]
    const i64* n_slots,     // [1]
    float* top,             // [splits, rows, h]
    float* norm,            // [splits, rows, h]
    float* acc,             // [splits, rows, h, c]; a split from n_slots on leaves it undefined
    float* scores,          // [n, h, score_stride] or null
    i64 score_stride, float scale, int page_size, int words, int split_size, int first_row, int h,
    int c, int r) {
    extern __shared__ float memory[];
    float* q = memory;                    // [HEADS, c + r]
    float* sums = q + HEADS * (c + r);    // [HEADS, c]
    float* p = sums + HEADS * c;          // [HEADS, CHUNK] scores, then probabilities
    float* largest = p + HEADS * CHUNK;   // [HEADS]
    float* total = largest + HEADS;       // [HEADS]
    float* rescale = total + HEADS;       // [HEADS]
    i64* at = (i64*)(rescale + 2 * HEADS);  // [CHUNK] the row's first element; -1 where hidden

    int node = first_row + blockIdx.y, split = blockIdx.z, first_head = blockIdx.x * HEADS;
    if (node >= *count) return;
    int heads = min(HEADS, h - first_head), row_len = c + r;
    int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    i64 first = (i64)split * split_size;
    i64 end = min(first + split_size, *n_slots);
    i64 out_row = ((i64)split * gridDim.y + blockIdx.y) * h + first_head;

    const real* q_from = query + ((i64)node * h + first_head) * row_len;
    for (int i = tid; i < HEADS * row_len; i += THREADS)
        q[i] = i < heads * row_len ? to_float(q_from[i]) : 0.f;
    for (int i = tid; i < HEADS * c; i += THREADS) sums[i] = 0.f;
    if (tid < HEADS) {
        largest[tid] = NEG_INF;
        total[tid] = 0.f;
    }

    for (i64 chunk = first; chunk < end; chunk += CHUNK) {
        __syncthreads();  // the chunk before this one has been used
        if (tid < CHUNK) {
            i64 slot = chunk + tid, where = -1;
            if (slot < end && visible(bits + (i64)node * words, slot, *open_len))
                where = (page_table[slot / page_size] * page_size + slot % page_size) * row_len;
            at[tid] = where;
        }
        __syncthreads();
        for (int j = warp; j < CHUNK; j += THREADS / 32) {
            float dot[HEADS] = {};
            if (at[j] >= 0) {
                const real* row = rows + at[j];
                for (int e = lane; e < row_len; e += 32) {
                    float x = to_float(row[e]);
#pragma unroll
                    for (int k = 0; k < HEADS; ++k) dot[k] = fmaf(q[k * row_len + e], x, dot[k]);
                }
            }
#pragma unroll
            for (int k = 0; k < HEADS; ++k) {
                float score = warp_sum(dot[k]) * scale;
                if (lane == 0) p[k * CHUNK + j] = at[j] >= 0 ? score : NEG_INF;
                if (scores && lane == 0 && at[j] >= 0 && k < heads)
                    scores[((i64)node * h + first_head + k) * score_stride + chunk + j] = score;
            }
        }
        __syncthreads();
        if (warp < HEADS) {
            float score = p[warp * CHUNK + lane];
            float before = largest[warp], now = fmaxf(before, warp_max(score));
            float shift = now == NEG_INF ? 0.f : now;  // nothing visible yet: exp(-inf - 0) = 0
            float probability = expf(score - shift);
            float sum = warp_sum(probability);
            p[warp * CHUNK + lane] = probability;
            __syncwarp();  // every lane has read `largest`
            if (lane == 0) {
                float factor = expf(before - shift);
                rescale[warp] = factor;
                total[warp] = fmaf(total[warp], factor, sum);
                largest[warp] = now;
            }
        }
        __syncthreads();
        for (int column = tid; column < c; column += THREADS) {
            float sum[HEADS];
#pragma unroll
            for (int k = 0; k < HEADS; ++k) sum[k] = sums[k * c + column] * rescale[k];
#pragma unroll 4
            for (int j = 0; j < CHUNK; ++j) {
                if (at[j] < 0) continue;
                float x = to_float(rows[at[j] + column]);
#pragma unroll
                for (int k = 0; k < HEADS; ++k) sum[k] = fmaf(p[k * CHUNK + j], x, sum[k]);
            }
#pragma unroll
            for (int k = 0; k < HEADS; ++k) sums[k * c + column] = sum[k];
        }
    }
    __syncthreads();
    if (tid < heads) {
        top[out_row + tid] = largest[tid];
        norm[out_row + tid] = total[tid];
    }
    if (first >= end) return;
    for (int i = tid; i < heads * c; i += THREADS) acc[out_row * c + i] = sums[i];
}

extern "C" __global__ void verify_attn_merge(
    const float* top,    // [splits, rows, h]
    const float* norm,   // [splits, rows, h]
    const float* acc,    // [splits, rows, h, c]
    const i64* count,    // [1]
    const i64* n_slots,  // [1]
    real* out,           // [n, h, c]
    int split_size, int first_row, int h, int c) {
    if (first_row + (i64)blockIdx.y >= *count) return;
    i64 row = (i64)blockIdx.y * h + blockIdx.x, n_rows = (i64)gridDim.y * h;
    out += (i64)first_row * h * c;
    int splits = (int)((*n_slots + split_size - 1) / split_size);
    float largest = NEG_INF;
    for (int i = 0; i < splits; ++i) largest = fmaxf(largest, top[i * n_rows + row]);
    float total = 0.f;
    for (int i = 0; i < splits; ++i)
        total = fmaf(expf(top[i * n_rows + row] - largest), norm[i * n_rows + row], total);
    for (int column = threadIdx.x; column < c; column += blockDim.x) {
        float sum = 0.f;
        for (int i = 0; i < splits; ++i)
            sum = fmaf(expf(top[i * n_rows + row] - largest),
                       acc[(i * n_rows + row) * c + column], sum);
        store(out + row * c + column, sum / total);
    }
}
