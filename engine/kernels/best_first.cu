// The best-first tree from draft logits (TREE-3, TREE-4; DDTree, arXiv 2604.12989), in float64.

#include "common.cuh"

#define THREADS 256

__device__ __forceinline__ double shuffled(double x, int offset) {
    return __shfl_xor_sync(0xffffffffu, x, offset);
}

// Largest first, the lowest id of equals.
__device__ __forceinline__ bool ranks_before(double a, int i, double b, int j) {
    return a > b || (a == b && i < j);
}

// logits [depth, w] -> tokens and log_probs [depth, k]: the k most probable tokens of the row, over
// the full row, in order; -1 where fewer are finite. Grid (depth), THREADS threads.
// Each thread knows the best of its own strided share; the winner alone searches its share again.
extern "C" __global__ void rank_tokens(const double* logits, int w, int k, int* tokens,
                                       double* log_probs) {
    follow();
    __shared__ double values[THREADS / 32];
    __shared__ int ids[THREADS / 32];
    __shared__ double sums[THREADS / 32];
    const double* row = logits + (i64)blockIdx.x * w;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const double low = -__longlong_as_double(0x7ff0000000000000ll);

    double top = low;
    for (int j = threadIdx.x; j < w; j += THREADS) top = fmax(top, row[j]);
    for (int offset = 16; offset; offset >>= 1) top = fmax(top, shuffled(top, offset));
    if (lane == 0) values[warp] = top;
    __syncthreads();
    for (int i = 0; i < THREADS / 32; ++i) top = fmax(top, values[i]);
    __syncthreads();
    double sum = 0;
    if (top > low)
        for (int j = threadIdx.x; j < w; j += THREADS) sum += exp(row[j] - top);
    for (int offset = 16; offset; offset >>= 1) sum += shuffled(sum, offset);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < THREADS / 32; ++i) sum += sums[i];
    double log_sum = log(sum);

    double last = -low;  // what this thread last gave away: later ranks come after it
    int last_id = -1;
    double best = low;
    int best_id = 0x7fffffff;
    bool search = true;
    for (int rank = 0; rank < k; ++rank) {
        if (search) {
            best = low, best_id = 0x7fffffff;
            for (int j = threadIdx.x; j < w; j += THREADS) {
                double value = top > low ? row[j] - top - log_sum : low;
                if (ranks_before(last, last_id, value, j) &&
                    ranks_before(value, j, best, best_id))
                    best = value, best_id = j;
            }
            search = false;
        }
        double value = best;
        int id = best_id;
        for (int offset = 16; offset; offset >>= 1) {
            double other = shuffled(value, offset);
            int other_id = __shfl_xor_sync(0xffffffffu, id, offset);
            if (ranks_before(other, other_id, value, id)) value = other, id = other_id;
        }
        if (lane == 0) values[warp] = value, ids[warp] = id;
        __syncthreads();
        for (int i = 0; i < THREADS / 32; ++i)
            if (ranks_before(values[i], ids[i], value, id)) value = values[i], id = ids[i];
        bool taken = value > low;  // -inf is never taken
        if (threadIdx.x == 0) {
            tokens[blockIdx.x * k + rank] = taken ? id : -1;
            log_probs[blockIdx.x * k + rank] = value;
        }
        if (taken && id == best_id && id % THREADS == (int)threadIdx.x)
            last = best, last_id = best_id, search = true;
        __syncthreads();
    }
}

// A prefix that may be taken: its cost (minus its score), its parent node and its last rank.
struct Prefix {
    double cost, parent_cost;
    int parent, rank, depth;  // depth: edges from the root
};

// Lower cost first, then the rank path in lexicographic order, a prefix before its extensions.
// paths [nodes, depths]: the rank path of every node taken.
__device__ bool comes_before(const Prefix& a, const Prefix& b, const int* paths, int depths) {
    if (a.cost != b.cost) return a.cost < b.cost;
    for (int at = 0; at < a.depth && at < b.depth; ++at) {
        int x = at == a.depth - 1 ? a.rank : paths[a.parent * depths + at];
        int y = at == b.depth - 1 ? b.rank : paths[b.parent * depths + at];
        if (x != y) return x < y;
    }
    return a.depth < b.depth;
}

// tokens, log_probs [depths, k] -> parents, nodes [budget + 1] and their number [1]. One warp;
// `open` [2 budget + 1] and `paths` [budget + 1, depths] are its memory.
extern "C" __global__ void grow_tree(const int* tokens, const double* log_probs, int depths, int k,
                                     int budget, Prefix* open, int* paths, i64* parents,
                                     i64* nodes, i64* n_nodes) {
    follow();
    __shared__ int n_open;
    __shared__ int usable;  // depths before the first row without a finite logit
    int lane = threadIdx.x;
    if (lane == 0) {
        usable = 0;
        while (usable < depths && k > 0 && tokens[usable * k] >= 0) ++usable;
        parents[0] = nodes[0] = -1;
        n_open = 0;
        if (usable) open[n_open++] = Prefix{-log_probs[0], 0.0, 0, 0, 1};
    }
    __syncwarp();
    int n = 1;
    while (n <= budget && n_open) {
        int best = -1;
        for (int i = lane; i < n_open; i += 32)
            if (best < 0 || comes_before(open[i], open[best], paths, depths)) best = i;
        for (int offset = 16; offset; offset >>= 1) {
            int other = __shfl_xor_sync(0xffffffffu, best, offset);
            if (other >= 0 && (best < 0 || comes_before(open[other], open[best], paths, depths)))
                best = other;
        }
        __syncwarp();
        if (lane == 0) {
            Prefix taken = open[best];
            open[best] = open[--n_open];
            int last = taken.depth - 1;
            parents[n] = taken.parent;
            nodes[n] = tokens[last * k + taken.rank];
            for (int at = 0; at < last; ++at)
                paths[n * depths + at] = paths[taken.parent * depths + at];
            paths[n * depths + last] = taken.rank;
            if (taken.depth < usable)  // its best extension
                open[n_open++] = Prefix{taken.cost - log_probs[taken.depth * k], taken.cost, n, 0,
                                        taken.depth + 1};
            int rank = taken.rank + 1;  // its next sibling
            if (rank < k && tokens[last * k + rank] >= 0)
                open[n_open++] = Prefix{taken.parent_cost - log_probs[last * k + rank],
                                        taken.parent_cost, taken.parent, rank, taken.depth};
        }
        ++n;
        __syncwarp();
    }
    if (lane == 0) *n_nodes = n;
}
