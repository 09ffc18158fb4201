// Rows of activations: embedding, norms, residual, argmax. One block per row; padding is skipped.

#include "common.cuh"

// table [w, m], tokens [n] -> out [n, m]
extern "C" __global__ void embed(const real* table, const i64* tokens, real* out, int m,
                                 const i64* count) {
    follow();
    int row = blockIdx.x;
    if (row >= *count) return;
    const real* from = table + tokens[row] * m;
    for (int j = threadIdx.x; j < m; j += blockDim.x) out[(i64)row * m + j] = from[j];
}

// x [n, width] at a stride -> out [n, width]: x / sqrt(mean(x^2) + eps) * weight
extern "C" __global__ void rms_norm(const real* x, i64 x_stride, const real* weight, float eps,
                                    real* out, int width, const i64* count) {
    follow();
    __shared__ float scratch[32];
    int row = blockIdx.x;
    if (row >= *count) return;
    const real* from = x + row * x_stride;
    float squares = 0.f;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        float value = to_float(from[j]);
        squares += value * value;
    }
    float root = sqrtf(block_sum(squares, scratch) / width + eps);
    for (int j = threadIdx.x; j < width; j += blockDim.x)
        store(out + (i64)row * width + j, to_float(from[j]) / root * to_float(weight[j]));
}

// residual [n, m] + delta [n, m] -> total [n, m], and the norm of what was stored [n, m]
extern "C" __global__ void add_norm(const real* residual, const real* delta, const real* weight,
                                    float eps, real* total, real* normed, int m,
                                    const i64* count) {
    follow();
    __shared__ float scratch[32];
    int row = blockIdx.x;
    if (row >= *count) return;
    i64 at = (i64)row * m;
    float squares = 0.f;
    for (int j = threadIdx.x; j < m; j += blockDim.x) {
        float sum = stored(to_float(residual[at + j]) + to_float(delta[at + j]));
        store(total + at + j, sum);
        squares += sum * sum;
    }
    float root = sqrtf(block_sum(squares, scratch) / m + eps);
    for (int j = threadIdx.x; j < m; j += blockDim.x)  // the thread's own stores
        store(normed + at + j, to_float(total[at + j]) / root * to_float(weight[j]));
}

// Does (a, i) come before (b, j)? Largest first, NaN before all, the lowest id of equals (ACC-1).
__device__ __forceinline__ bool beats(float a, int i, float b, int j) {
    bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a != b) return a > b;
    return i < j;
}

// logits [n, w] -> targets [n]
extern "C" __global__ void argmax(const real* logits, i64* targets, int w, const i64* count) {
    follow();
    __shared__ float tops[32];
    __shared__ int ids[32];
    int row = blockIdx.x;
    if (row >= *count) return;
    const real* from = logits + (i64)row * w;
    float top = NEG_INF;
    int id = 0x7fffffff;
    for (int j = threadIdx.x; j < w; j += blockDim.x) {
        float value = to_float(from[j]);
        if (beats(value, j, top, id)) top = value, id = j;
    }
    for (int offset = 16; offset; offset >>= 1) {
        float other = __shfl_xor_sync(0xffffffffu, top, offset);
        int other_id = __shfl_xor_sync(0xffffffffu, id, offset);
        if (beats(other, other_id, top, id)) top = other, id = other_id;
    }
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top, ids[threadIdx.x >> 5] = id;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < (int)(blockDim.x >> 5); ++warp)
        if (beats(tops[warp], ids[warp], top, id)) top = tops[warp], id = ids[warp];
    targets[row] = id;
}
