// What surrounds the attention: latents into the paged cache, queries into latent space, and the
// cache's own rows (MLA-1 to MLA-3, MLA-7, SLOT-1, COMMIT-1).
//
// `swizzle` is 1 where the 16-byte chunks of a row are stored as the tensor cores' loads want them:
// inside every 128 bytes, chunk q of physical row p lies at q ^ (p & 7). Otherwise it is 0.

#include "common.cuh"

__device__ __forceinline__ i64 physical_row(const i64* page_table, int page_size, i64 slot) {
    return page_table[slot / page_size] * page_size + slot % page_size;
}

// Where element j of a row lies in physical row `row`.
__device__ __forceinline__ int place(int j, i64 row, int swizzle) {
    const int per_chunk = 16 / sizeof(real);
    return swizzle ? j ^ (((int)row & 7) * per_chunk) : j;
}

// positions [n], frequencies [half] -> cos, sin [n, half] of float64 angles, rounded once (MLA-5)
extern "C" __global__ void rotary_angles(const i64* positions, const double* frequencies,
                                         double factor, float* cosines, float* sines, int half,
                                         const i64* count) {
    follow();
    int row = blockIdx.x;
    if (row >= *count) return;
    for (int j = threadIdx.x; j < half; j += blockDim.x) {
        double sine, cosine;
        sincos((double)positions[row] * frequencies[j], &sine, &cosine);
        cosines[row * half + j] = (float)(cosine * factor);
        sines[row * half + j] = (float)(sine * factor);
    }
}

// Half-split: element j of a pair (j, j + half).
__device__ __forceinline__ float rotated(const real* x, int j, int half, const float* cosines,
                                         const float* sines) {
    int pair = j < half ? j : j - half;
    float first = to_float(x[pair]), second = to_float(x[pair + half]);
    return j < half ? first * cosines[pair] - second * sines[pair]
                    : second * cosines[pair] + first * sines[pair];
}

__device__ void norm_row(const real* x, const real* weight, float eps, real* out, int width,
                         float* scratch) {
    float squares = 0.f;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        float value = to_float(x[j]);
        squares += value * value;
    }
    float root = sqrtf(block_sum(squares, scratch) / width + eps);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(out + j, to_float(x[j]) / root * to_float(weight[j]));
}

// projected [n, q + c + r] -> q_a [n, q], c_kv [n, c], k_pe [n, r], and the last two to
// slots[row] of the layer whose rows begin at `rows`. One block per row; a slot of -1 is padding.
extern "C" __global__ void append_normed(const real* projected, i64 stride, const real* q_norm,
                                         const real* kv_norm, float eps, const float* cosines,
                                         const float* sines, const i64* slots, real* q_a,
                                         real* c_kv, real* k_pe, real* rows,
                                         const i64* page_table, int page_size, int q, int c, int r,
                                         int swizzle) {
    follow();
    __shared__ float scratch[32];
    int row = blockIdx.x;
    i64 slot = slots[row];
    if (slot < 0) return;
    const real* from = projected + row * stride;
    if (q) norm_row(from, q_norm, eps, q_a + (i64)row * q, q, scratch);
    real* latent = c_kv + (i64)row * c;
    norm_row(from + q, kv_norm, eps, latent, c, scratch);
    real* key = k_pe + (i64)row * r;
    const int half = r / 2;
    for (int j = threadIdx.x; j < r; j += blockDim.x)
        store(key + j, rotated(from + q + c, j, half, cosines + row * half, sines + row * half));
    i64 physical = physical_row(page_table, page_size, slot);
    real* cached = rows + physical * (c + r);
    for (int j = threadIdx.x; j < c; j += blockDim.x)  // the thread's own stores, as below
        cached[place(j, physical, swizzle)] = latent[j];
    for (int j = threadIdx.x; j < r; j += blockDim.x)
        cached[place(c + j, physical, swizzle)] = key[j];
}

// q [n, h, d + r], w_kc [h, c, d] -> query [n, h, c + r]: absorbed part, then the rotated part.
// Grid (h, row tiles of ROWS, column tiles of blockDim.x / 32 * COLUMNS): a warp sums a column of
// w_kc for ROWS rows, whose nope parts lie in shared memory.
#define ROWS 8
#define COLUMNS 16
extern "C" __global__ void latent_query(const real* q, const real* w_kc, const float* cosines,
                                        const float* sines, real* query, int h, int c, int d,
                                        int r, const i64* count) {
    follow();
    extern __shared__ float nope[];  // [ROWS, d]
    int head = blockIdx.x, first = blockIdx.y * ROWS, n = (int)*count;
    if (first >= n) return;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int at = threadIdx.x; at < ROWS * d; at += blockDim.x) {
        int row = first + at / d;
        nope[at] = row < n ? to_float(q[((i64)row * h + head) * (d + r) + at % d]) : 0.f;
    }
    __syncthreads();
    for (int step = 0; step < COLUMNS; ++step) {
        int column = (blockIdx.z * COLUMNS + step) * warps + warp;
        if (column >= c) break;
        const real* weights = w_kc + ((i64)head * c + column) * d;
        float sums[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums[i] = 0.f;
        for (int j = lane; j < d; j += 32) {
            float weight = to_float(weights[j]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) sums[i] += nope[i * d + j] * weight;
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float sum = warp_sum(sums[i]);
            if (lane == 0 && first + i < n)
                store(query + ((i64)(first + i) * h + head) * (c + r) + column, sum);
        }
    }
    if (blockIdx.z) return;
    const int half = r / 2;
    for (int at = threadIdx.x; at < ROWS * r; at += blockDim.x) {
        int row = first + at / r, j = at % r;
        if (row >= n) break;
        i64 from = ((i64)row * h + head) * (d + r) + d;
        i64 to = ((i64)row * h + head) * (c + r) + c;
        store(query + to + j,
              rotated(q + from, j, half, cosines + row * half, sines + row * half));
    }
}

// Slot L + path[k] -> slot L + k in every layer, k ascending; moves [n, 2]. Grid (layers, chunks).
// A thread owns one element of a row, wherever the row's swizzle puts it, so no two threads meet;
// and since path[k] >= k and rises, a batch of loads never passes a store that it needed first.
extern "C" __global__ void commit_rows(real* rows, i64 layer_stride, const i64* page_table,
                                       int page_size, const i64* path, const i64* accept_len,
                                       const i64* committed_len, i64* moves, int n, int row_len,
                                       int swizzle) {
    follow();
    const int batch = 8;
    i64 length = *committed_len;
    int accepted = (int)*accept_len;
    int j = blockIdx.y * blockDim.x + threadIdx.x;
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int k = threadIdx.x; k < n; k += blockDim.x) {
            moves[2 * k] = k < accepted ? length + path[k] : -1;
            moves[2 * k + 1] = k < accepted ? length + k : -1;
        }
    if (j >= row_len) return;
    real* layer = rows + blockIdx.x * layer_stride;
    for (int first = 0; first < accepted; first += batch) {
        real values[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (first + i < accepted) {
                i64 from = physical_row(page_table, page_size, length + path[first + i]);
                values[i] = layer[from * row_len + place(j, from, swizzle)];
            }
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (first + i < accepted) {
                i64 to = physical_row(page_table, page_size, length + first + i);
                layer[to * row_len + place(j, to, swizzle)] = values[i];
            }
    }
}

// Slots 0..n_slots-1 of every layer in slot order -> out [l, n_slots, row_len]. Grid (slots, layers).
extern "C" __global__ void read_rows(const real* rows, i64 layer_stride, const i64* page_table,
                                     int page_size, real* out, int row_len, int swizzle) {
    follow();
    i64 slot = blockIdx.x, layer = blockIdx.y;
    i64 from = physical_row(page_table, page_size, slot);
    real* to = out + (layer * gridDim.x + slot) * row_len;
    const real* row = rows + layer * layer_stride + from * row_len;
    for (int j = threadIdx.x; j < row_len; j += blockDim.x) to[j] = row[place(j, from, swizzle)];
}

// NaN into `n` elements of every layer from element `first` on. Grid (blocks, layers).
extern "C" __global__ void poison_rows(real* rows, i64 layer_stride, i64 first, i64 n) {
    follow();
    real* layer = rows + blockIdx.y * layer_stride + first;
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += step)
        store(layer + at, NOT_A_NUMBER);
}
