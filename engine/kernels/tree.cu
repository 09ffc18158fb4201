// The tree: positions and ancestor bits from the parents, the greedy walk (POS-1, MASK-2, ACC-*).
//
// A mask block is u32 bits [n, words]: bit (j & 31) of word j >> 5 of row i says whether row i sees
// slot open_len + j.

#include "common.cuh"

// parents [n] -> positions [n], bits [n, words]. Dynamic shared memory: n ints. Each thread climbs
// from its own row to the root; rows need no order but TREE-1's.
extern "C" __global__ void tree_layout(const i64* parents, const i64* committed_len,
                                       i64* positions, u32* bits, int n, int words) {
    follow();
    extern __shared__ int parent_of[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) parent_of[i] = (int)parents[i];
    __syncthreads();
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    u32* seen = bits + (i64)row * words;
    for (int word = 0; word < words; ++word) seen[word] = 0;
    int depth = 0;
    for (int node = row; node >= 0; node = parent_of[node], ++depth)
        seen[node >> 5] |= 1u << (node & 31);
    positions[row] = *committed_len + depth - 1;
}

// Rows one after the other: row i sees rows 0..i. Grid (n).
extern "C" __global__ void causal_layout(const i64* committed_len, i64* positions, u32* bits,
                                         int words) {
    follow();
    int row = blockIdx.x;
    for (int word = threadIdx.x; word < words; word += blockDim.x) {
        int last = row - 32 * word;  // the highest bit that is seen, if the word has it
        bits[(i64)row * words + word] = last < 0 ? 0u : last >= 31 ? ~0u : (2u << last) - 1u;
    }
    if (threadIdx.x == 0) positions[row] = *committed_len + row;
}

// The mask as bytes [n, max_slots], the open prefix included, for whoever observes. Grid (n).
extern "C" __global__ void full_mask(const u32* bits, int words, int width, const i64* open_len,
                                     unsigned char* out, i64 max_slots) {
    follow();
    int row = blockIdx.x;
    i64 open = *open_len;
    for (i64 slot = threadIdx.x; slot < max_slots; slot += blockDim.x) {
        i64 j = slot - open;
        bool seen = j < 0 || (j < width && bits[(i64)row * words + (j >> 5)] >> (j & 31) & 1u);
        out[row * max_slots + slot] = seen;
    }
}

// n float32 -inf
extern "C" __global__ void fill_neg_inf(float* out, i64 n) {
    follow();
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += step) out[at] = NEG_INF;
}

// tokens, parents, targets [n] -> path [n], -1 past accept_len [1], bonus [1]. One block.
// At node k of the path the round emits targets[path[k]]: the token of path[k + 1], or the bonus;
// so the walk ends before it enters a node whose token ends the round (ACC-4).
extern "C" __global__ void accept_walk(const i64* tokens, const i64* parents, const i64* targets,
                                       const i64* stop_tokens, int n_stops, const i64* max_emitted,
                                       i64* path, i64* accept_len, i64* bonus, int n) {
    follow();
    __shared__ int child;
    for (int i = threadIdx.x; i < n; i += blockDim.x) path[i] = i ? -1 : 0;
    int node = 0, accepted = 1;
    i64 most = *max_emitted;
    while (true) {
        i64 target = targets[node];
        if (threadIdx.x == 0) child = -1;
        __syncthreads();
        bool stops = accepted >= most;
        for (int i = threadIdx.x; i < n_stops; i += blockDim.x)
            stops = stops || stop_tokens[i] == target;
        bool ended = __syncthreads_or(stops);
        if (!ended)
            for (int i = threadIdx.x; i < n; i += blockDim.x)
                if (parents[i] == node && tokens[i] == target) child = i;  // siblings differ
        __syncthreads();
        int next = child;
        __syncthreads();
        if (next < 0) break;
        node = next;
        if (threadIdx.x == 0) path[accepted] = node;
        ++accepted;
    }
    if (threadIdx.x == 0) {
        *accept_len = accepted;
        *bonus = targets[node];
    }
}
