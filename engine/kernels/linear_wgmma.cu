// linear_wgmma.cu: y[n][o] = sum over i of x[n][i] w[o][i] with the warpgroup products of Hopper. Every
// projection of more than 24 rows; bfloat16 in rows of 16-byte chunks; sm_90a alone.
//
// The same as linear_wide of linear.cu, which serves every architecture, bit for bit: a slice of i is summed
// upwards, 16 elements a product, and slices are added as a balanced tree; a wgmma of 16 elements gives the
// bits of mma.sync, as observed on an H200 (tests/engine/gpu/test_linear_kernels_agree.py). So a row's bits
// stay the same where the number of rows decides which of them runs.
//
// A block takes 64 rows of w for each of its WARPGROUPS, up to N rows of x, and SLICES / PARTS slices that
// follow one another; a cluster of PARTS blocks has all slices, and each adds up and writes its share. Tensor
// copies bring 64 elements of every row, w's before the kernel ahead has ended, DEPTH stages of them; rows and
// elements that are not there arrive as 0. One thread asks for them, while products are under way: where every
// step's products were waited for, a stage took 620 clocks and more, however early its copies came. Stages
// take half of an SM's shared memory, so that it holds two blocks: one does not keep memory busy.
//
// Rows from `count` on are padding: they may be multiplied, which concerns no other row, and are not written.
//
// grid (ceil(o / 64 WARPGROUPS), PARTS, ceil(n / N))   cluster (1, PARTS)   block 128 WARPGROUPS
// shared memory: DEPTH stages, then their barriers; dynamic, and none other, so that it begins at a multiple
// of 1,024 bytes

#include "hopper.cuh"
#include "sums.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace {

constexpr int ROW = 128;  // bytes of a stage's row: 64 elements, two steps

// A matrix of rows of 128 bytes, swizzled, eight rows 1,024 bytes apart from the next eight.
__device__ __forceinline__ u64 matrix_at(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(8 * ROW >> 4) << 32 | (u64)1 << 62;
}
// d [64, N] += w [64, 16] x [N, 16]^T. A warpgroup together.
__device__ __forceinline__ void multiply(float (&d)[20], u64 w, u64 x) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
        "}, %20, %21, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
        : "l"(w), "l"(x));
}
__device__ __forceinline__ void multiply(float (&d)[36], u64 w, u64 x) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
        "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
        "}, %36, %37, add, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "l"(w), "l"(x));
}
// 64 elements from `k` on, of the rows from `row` on that the map's box has.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, int k, int row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(bar)
        : "memory");
}

// Sums of slices, of which the next is the `index`-th: joined with those before it as far as the tree goes.
// After the last, `sum` is the tree's.
template <int LEVELS, int SIZE>
__device__ __forceinline__ void join(float (&sum)[SIZE], float (&kept)[LEVELS][SIZE], int index) {
    bool goes_on = true;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level)
        if (goes_on) {
            goes_on = (index >> level) & 1;
#pragma unroll
            for (int e = 0; e < SIZE; ++e) {
                if (goes_on)
                    sum[e] = kept[level][e] + sum[e];
                else
                    kept[level][e] = sum[e];
            }
        }
}

template <int N, int WARPGROUPS, int SLICES, int PARTS, int DEPTH>
__device__ __forceinline__ void linear_wgmma(const TensorMap* w_map, const TensorMap* x_map, bf16* y,
                                             const i64* count, int n, int o, int i, i64 y_stride) {
    constexpr int SIZE = N / 2, TILES = N / 8, OWN = SLICES / PARTS;
    constexpr int LEVELS = OWN == 4 ? 2 : 1;
    constexpr int W_BYTES = WARPGROUPS * 64 * ROW, STAGE = W_BYTES + N * ROW;
    constexpr int WARPS = 4 * WARPGROUPS, ITEMS = WARPS * TILES;
    static_assert((OWN == 2 || OWN == 4) && DEPTH * STAGE >= ITEMS * 512, "sums take the place of stages");
    let_successor_start();
    i64 row_0 = (i64)blockIdx.z * N;
    i64 counted = rows_that_count(count, n);
    if (row_0 > 0 && row_0 >= counted) {  // so does the whole cluster
        wait_for_predecessor();
        return;
    }
    int warp = __shfl_sync(~0u, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
    int o_0 = blockIdx.x * (64 * WARPGROUPS), part = blockIdx.y;
    int first = part * OWN, all = n_steps(i);
    int begin = slice_begin(first, SLICES, all), steps = slice_begin(first + OWN, SLICES, all) - begin;
    int stages = (steps + 1) / 2;
    u32 base = shared_address(memory), full = base + DEPTH * STAGE, empty = full + DEPTH * 8;
    auto copy_w = [&](int stage) {
        u32 bar = full + stage % DEPTH * 8;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(STAGE)
                     : "memory");
        copy_rows(base + stage % DEPTH * STAGE, w_map, (begin + 2 * stage) * STEP, o_0, bar);
    };
    auto copy_x = [&](int stage) {
        copy_rows(base + stage % DEPTH * STAGE + W_BYTES, x_map, (begin + 2 * stage) * STEP, (int)row_0,
                  full + stage % DEPTH * 8);
    };
    if (threadIdx.x == 0) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            barrier_init(full + d * 8, 1);
            barrier_init(empty + d * 8, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int d = 0; d < DEPTH && d < stages; ++d) copy_w(d);
    }
    wait_for_predecessor();
    if (threadIdx.x == 0)
        for (int d = 0; d < DEPTH && d < stages; ++d) copy_x(d);
    __syncthreads();  // the barriers are set up

    float sum[SIZE], kept[LEVELS][SIZE];
    u32 w_at = base + (warp >> 2) * (64 * ROW), x_at = base + W_BYTES;
    int step = 0, place = 0, parity = 0;
    // The compiler lets products overlap only where nothing else touches their sums: a loop for every slice.
#pragma unroll 1
    for (int slice = 0; slice < OWN; ++slice) {
        int slice_end = slice_begin(first + slice + 1, SLICES, all) - begin;
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] = 0.f;
#pragma unroll 1
        for (; step < slice_end; ++step) {
            int stage = step / 2, half = step & 1;
            if (half == 0) barrier_wait(full + place * 8, parity);
            u32 at = place * STAGE + half * 64;
            open_products();
            multiply(sum, matrix_at(w_at + at), matrix_at(x_at + at));
            multiply(sum, matrix_at(w_at + at + 32), matrix_at(x_at + at + 32));
            close_products();
            wait_for_products<1>();  // those of the step before are finished
            if (half == 0 && stage > 0) {
                u32 left = empty + (place ? place - 1 : DEPTH - 1) * 8;
                if (lane == 0) barrier_arrive(left);
                int next = stage - 1 + DEPTH;  // takes the place of the stage before, once all have left it
                if (threadIdx.x == 0 && next < stages) {
                    barrier_wait(left, ((stage - 1) / DEPTH) & 1);
                    copy_w(next);
                    copy_x(next);
                }
                __syncwarp();
            }
            if (half && ++place == DEPTH) {
                place = 0;
                parity ^= 1;
            }
        }
        wait_for_products<0>();
#pragma unroll
        for (int e = 0; e < SIZE; ++e) asm volatile("" : "+f"(sum[e]));  // not before they are finished
        join<LEVELS>(sum, kept, slice);
    }

    int tile_rows = (int)min(counted - row_0, (i64)N);
    bf16* to = y + row_0 * y_stride;
    __syncthreads();  // the stages are free
    float4* sums = reinterpret_cast<float4*>(memory) + lane;  // [tile of x][warp][lane]
#pragma unroll
    for (int t = 0; t < TILES; ++t)
        sums[(t * WARPS + warp) * 32] = make_float4(sum[4 * t], sum[4 * t + 1], sum[4 * t + 2], sum[4 * t + 3]);
    cluster_barrier();  // every block's sums are there
    constexpr int EACH = (ITEMS + WARPS * PARTS - 1) / (WARPS * PARTS);
    int items = (tile_rows + 7) / 8 * WARPS, item = warp * PARTS + part;
    float4 totals[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {  // without a branch: all reads are under way at once
        int its = max(min(item + e * WARPS * PARTS, items - 1), 0);
        totals[e] = total_of_blocks<PARTS>(shared_address(sums + its * 32));
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e, item += WARPS * PARTS)
        if (item < items)
            put_tile(to, y_stride, totals[e], item / WARPS * 8, tile_rows, o_0 + item % WARPS * 16, o);
    cluster_barrier();  // no block leaves while another reads its shared memory
}

}  // namespace

// name: rows of x, warpgroups, slices, blocks that have them
#define LINEAR_WGMMA(N, WARPGROUPS, SLICES, PARTS, DEPTH)                                              \
    extern "C" __global__ void __cluster_dims__(1, PARTS, 1) __launch_bounds__(128 * WARPGROUPS, 1)    \
        linear_wgmma_##N##_##WARPGROUPS##_##SLICES##_##PARTS(                                          \
            const __grid_constant__ TensorMap w_map, /* [o][i], boxes of 64 WARPGROUPS by 64 */        \
            const __grid_constant__ TensorMap x_map, /* [n][i], boxes of N by 64 */                    \
            bf16* y,                                 /* [n][y_stride], o used */                       \
            const i64* count,                        /* [1], or null: all */                           \
            int n, int o, int i, i64 y_stride) {                                                       \
        linear_wgmma<N, WARPGROUPS, SLICES, PARTS, DEPTH>(&w_map, &x_map, y, count, n, o, i, y_stride); \
    }
LINEAR_WGMMA(40, 1, 16, 8, 6)
LINEAR_WGMMA(72, 1, 16, 8, 6)
LINEAR_WGMMA(40, 2, 16, 8, 4)
LINEAR_WGMMA(72, 2, 16, 8, 4)
LINEAR_WGMMA(40, 1, 8, 2, 6)
LINEAR_WGMMA(72, 1, 8, 2, 6)

#endif
