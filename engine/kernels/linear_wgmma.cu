// linear_wgmma.cu: y[n][o] = sum over i of x[n][i] w[o][i] with the warpgroup products of Hopper. Every
// projection of more than 24 rows; bfloat16 in rows of 16-byte chunks; sm_90a alone.
//
// The same as linear_wide of linear.cu, which serves every architecture, bit for bit: a slice of i is summed
// upwards, 16 elements a product, and slices are added as a balanced tree; a wgmma of 16 elements gives the
// bits of mma.sync, as observed on an H200 (tests/engine/gpu/test_linear_kernels_agree.py). So a row's bits
// stay the same where the number of rows decides which of them runs.
//
// A block takes BANDS times 64 rows of w and up to N rows of x. Its warpgroups stand in SIDES of BANDS each: a
// side has four slices that follow one another, and a ring of DEPTH stages, 64 elements of every row, which a
// warp of its own fills by tensor copies. Rows and elements that are not there arrive as 0. All slices are
// those of a block's sides, or of a cluster of PARTS blocks of one side each.
//
// The first copy of w begins before the kernel ahead has ended. Of the others, x's follow w's stage by stage:
// behind all of w that the ring holds, the first x came when nearly all of it was there.
//
// Rows from `count` on are padding: they may be multiplied, which concerns no other row, and are not written.
//
// grid (ceil(o / 64 BANDS), PARTS, ceil(n / N))   cluster (1, PARTS)   block SIDES (128 BANDS + 32)
// shared memory: what is given, the rings, their barriers and one more; dynamic, and none other, so that it
// begins at a multiple of 1,024 bytes

#include "hopper.cuh"
#include "sums.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace {

constexpr int ROW = 128;       // bytes of a stage's row: 64 elements, two steps
constexpr int OWN_SLICES = 4;  // of a side
constexpr int EARLY = 1;       // stages whose w is asked for before the kernel ahead has ended

// A matrix of rows of 128 bytes, swizzled, eight rows 1,024 bytes apart from the next eight.
__device__ __forceinline__ u64 matrix_at(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(8 * ROW >> 4) << 32 | (u64)1 << 62;
}
// The one 16 `chunks` bytes further on.
__device__ __forceinline__ u64 further(u64 matrix, u32 chunks) {
    return (matrix & ~(u64)0xffffffff) | ((u32)matrix + chunks);
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
// To the shared memory of a block of the cluster, where a barrier counts its bytes.
__device__ __forceinline__ void send(u32 to, float4 v, u32 bar) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
        : "memory");
}

// The sums of a slice, the `index`-th of four, joined with those before it as far as the tree goes. After the
// last, `sum` is the tree's. By branches: chosen value by value, it took as long as a stage's products.
template <int SIZE>
__device__ __forceinline__ void join(float (&sum)[SIZE], float (&even)[SIZE], float (&first_two)[SIZE],
                                     int index) {
    if (index % 2 == 0) {
#pragma unroll
        for (int e = 0; e < SIZE; ++e) even[e] = sum[e];
    } else if (index == 1) {
#pragma unroll
        for (int e = 0; e < SIZE; ++e) first_two[e] = even[e] + sum[e];
    } else {
#pragma unroll
        for (int e = 0; e < SIZE; ++e) sum[e] = first_two[e] + (even[e] + sum[e]);
    }
}
template <int SIZE>
__device__ __forceinline__ void finish(float (&sum)[SIZE]) {
    wait_for_products<0>();
#pragma unroll
    for (int e = 0; e < SIZE; ++e) asm volatile("" : "+f"(sum[e]));  // not touched before
}

// A side's part of i: slices from `first` on of `slices`, in steps.
struct Part {
    int first, slices, all, begin, steps;

    __device__ __forceinline__ Part(int first, int slices, int i)
        : first(first), slices(slices), all(n_steps(i)), begin(slice_begin(first, slices, all)),
          steps(slice_begin(first + OWN_SLICES, slices, all) - begin) {}
    __device__ __forceinline__ int stages() const { return (steps + 1) / 2; }
    __device__ __forceinline__ int slice_end(int slice) const {
        return slice_begin(first + slice + 1, slices, all) - begin;
    }
};

// DEPTH stages that one thread fills and BANDS warpgroups read, and two barriers for each. A stage: rows of w,
// then of x.
template <int N, int BANDS, int DEPTH>
struct Ring {
    static constexpr int W_BYTES = BANDS * 64 * ROW, STAGE = W_BYTES + N * ROW, STAGES = DEPTH * STAGE;
    static constexpr int BARRIERS = DEPTH * 16, SIZE = N / 2;
    u32 at, full, empty;

    __device__ __forceinline__ Ring(u32 stages, u32 barriers)
        : at(stages), full(barriers), empty(barriers + DEPTH * 8) {}
    __device__ __forceinline__ void set_up() const {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            barrier_init(full + d * 8, 1);
            barrier_init(empty + d * 8, BANDS * 4);
        }
    }
    // First of a stage: its barrier expects the bytes of x too.
    __device__ __forceinline__ void open_stage(const TensorMap* map, int k, int row, int place) const {
        barrier_expect(full + place * 8, STAGE);
        copy_rows(at + place * STAGE, map, k, row, full + place * 8);
    }
    __device__ __forceinline__ void copy_x(const TensorMap* map, int k, int row, int place) const {
        copy_rows(at + place * STAGE + W_BYTES, map, k, row, full + place * 8);
    }

    // All stages but the w of the first EARLY.
    __device__ __forceinline__ void fill(const TensorMap* w_map, const TensorMap* x_map, const Part& part,
                                         int o_0, int row_0) const {
        int stages = part.stages(), place = 0, parity = 1;
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage) {
            int k = (part.begin + 2 * stage) * STEP;
            if (stage >= DEPTH) barrier_wait(empty + place * 8, parity);
            if (stage >= EARLY) open_stage(w_map, k, o_0, place);
            copy_x(x_map, k, row_0, place);
            if (++place == DEPTH) {
                place = 0;
                parity ^= 1;
            }
        }
    }

    // The tree's sums of a part, of 64 rows of w. The compiler lets products overlap only in a loop that ends
    // before anything else touches their sums: one of whole stages for every slice, which may begin and end in
    // the middle of a stage.
    __device__ __forceinline__ void add_products(float (&sum)[SIZE], const Part& part, int band) const {
        u64 w = matrix_at(at + band * (64 * ROW)), x = matrix_at(at + W_BYTES);
        u32 chunk = 0;
        int step = 0, place = 0, parity = 0;
        auto multiply_half = [&](u32 from) {
            multiply(sum, further(w, chunk + from), further(x, chunk + from));
            multiply(sum, further(w, chunk + from + 2), further(x, chunk + from + 2));
        };
        auto leave_previous = [&] {
            int previous = place ? place - 1 : DEPTH - 1;
            if (step > 1 && (threadIdx.x & 31) == 0) barrier_arrive(empty + previous * 8);
        };
        auto go_on = [&] {
            chunk += STAGE / 16;
            if (++place == DEPTH) {
                chunk = 0;
                place = 0;
                parity ^= 1;
            }
        };
        float even[SIZE], first_two[SIZE];
#pragma unroll 1
        for (int slice = 0; slice < OWN_SLICES; ++slice) {
            int end = part.slice_end(slice);
#pragma unroll
            for (int e = 0; e < SIZE; ++e) sum[e] = 0.f;
            if (step < end && step & 1) {
                open_products();
                multiply_half(4);
                close_products();
                finish(sum);
                go_on();
                ++step;
            }
#pragma unroll 1
            for (; step + 1 < end; step += 2) {
                barrier_wait(full + place * 8, parity);
                open_products();
                multiply_half(0);
                multiply_half(4);
                close_products();
                wait_for_products<1>();  // those of the stage before are finished
                leave_previous();
                go_on();
            }
            finish(sum);
            if (step < end) {
                barrier_wait(full + place * 8, parity);
                open_products();
                multiply_half(0);
                close_products();
                finish(sum);
                leave_previous();
                ++step;
            }
            join(sum, even, first_two, slice);
        }
    }
};

// Sums change hands. Each of SOURCES has a part of i, and adds up the tiles of 8 rows of x whose number is its
// own modulo SOURCES; of the others it gives its sums away. As a + b is b + a, the tree of s, s ^ 1, s ^ 2 ..
// has the bits of that of the sources 0, 1, 2 ..
//
// In a source's place, in fours: [tile of its own][other source, by ^][warp][lane].
template <int N, int WARPS, int SOURCES>
struct Exchange {
    static constexpr int TILES = N / 8, OWN = (TILES + SOURCES - 1) / SOURCES;
    static constexpr int BYTES = OWN * (SOURCES - 1) * WARPS * 512;  // of a place
    typedef float Sums[N / 2];
    u32 mine;  // this lane's fours

    __device__ __forceinline__ explicit Exchange(int warp) : mine((warp * 32 + (threadIdx.x & 31)) * 16) {}
    __device__ __forceinline__ u32 at(int own_tile, int other) const {
        return mine + (own_tile * (SOURCES - 1) + other - 1) * (WARPS * 512);
    }
    static __device__ __forceinline__ float4 tile_of(const Sums& sum, int tile) {
        return make_float4(sum[4 * tile], sum[4 * tile + 1], sum[4 * tile + 2], sum[4 * tile + 3]);
    }
    // What `source` is given: of a tile, lanes (g, t) whose rows 2t or 2t + 1 of x are there.
    static __device__ __forceinline__ int bytes(int source, int rows) {
        int lanes = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            if (tile % SOURCES == source) lanes += 8 * max(0, min(4, (rows - 8 * tile + 1) / 2));
        return lanes * 16 * WARPS * (SOURCES - 1);
    }
    // put(source, offset in its place, sums)
    template <typename Put>
    __device__ __forceinline__ void give(const Sums& sum, int source, int rows, const Put& put) const {
        int row = 2 * (threadIdx.x & 3);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            int owner = tile % SOURCES;
            if (owner != source && 8 * tile + row < rows)
                put(owner, at(tile / SOURCES, source ^ owner), tile_of(sum, tile));
        }
    }
    // put(tile, sums)
    template <typename Put>
    __device__ __forceinline__ void add_up(const Sums& sum, int source, int rows, const unsigned char* place,
                                           const Put& put) const {
        float4 total[OWN];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            if (tile % SOURCES == source) total[tile / SOURCES] = tile_of(sum, tile);
#pragma unroll
        for (int t = 0; t < OWN; ++t) {  // before the first is put: all reads are under way at once
            float4 v[SOURCES] = {total[t]};
#pragma unroll
            for (int other = 1; other < SOURCES; ++other)
                v[other] = *reinterpret_cast<const float4*>(place + at(t, other));
            total[t] = tree_sum(v);
        }
#pragma unroll
        for (int t = 0; t < OWN; ++t)
            if (8 * (t * SOURCES + source) < rows) put(t * SOURCES + source, total[t]);
    }
};

template <int N, int BANDS, int SLICES, int PARTS, int DEPTH>
__device__ __forceinline__ void linear_wgmma(const TensorMap* w_map, const TensorMap* x_map, bf16* y,
                                             const i64* count, int n, int o, int i, i64 y_stride) {
    constexpr int SOURCES = SLICES / OWN_SLICES, SIDES = SOURCES / PARTS, WARPS = 4 * BANDS;
    static_assert(PARTS == 1 || SIDES == 1, "sums stay in a block, or each block has one side");
    typedef Ring<N, BANDS, DEPTH> Stages;
    typedef Exchange<N, WARPS, SOURCES> Given;
    constexpr int PLACES = (SIDES * Given::BYTES + 1023) / 1024 * 1024;
    let_successor_start();
    i64 row_0 = (i64)blockIdx.z * N;
    if (row_0 > 0 && row_0 >= rows_that_count(count, n)) {  // so does the whole cluster
        wait_for_predecessor();
        return;
    }
    int warp = __shfl_sync(~0u, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
    bool fills = warp >= SIDES * WARPS;
    int side = fills ? warp - SIDES * WARPS : warp / WARPS, source = PARTS > 1 ? blockIdx.y : side;
    int o_0 = blockIdx.x * (64 * BANDS);
    Part part(source * OWN_SLICES, SLICES, i);
    u32 base = shared_address(memory), barriers = base + PLACES + SIDES * Stages::STAGES;
    u32 given = barriers + SIDES * Stages::BARRIERS;
    Stages ring(base + PLACES + side * Stages::STAGES, barriers + side * Stages::BARRIERS);
    if (fills && lane == 0) {
        ring.set_up();
        if (PARTS > 1) barrier_init(given, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int d = 0; d < EARLY && d < part.stages(); ++d)
            ring.open_stage(w_map, (part.begin + 2 * d) * STEP, o_0, d);
    }
    __syncwarp();
    if (PARTS > 1) cluster_arrive();
    __syncthreads();  // the block's barriers are set up

    Asked asked = ask_for_count(count, n);
    float sum[N / 2];
    if (fills) {
        wait_for_predecessor();
        if (lane == 0) ring.fill(w_map, x_map, part, o_0, (int)row_0);
        __syncwarp();
    } else {
        ring.add_products(sum, part, warp / 4 % BANDS);
    }
    int rows = (int)min(rows_that_count(asked) - row_0, (i64)N);

    Given exchange(warp % WARPS);
    if (PARTS > 1) {
        cluster_wait();  // the barriers of the cluster's other blocks are set up too
        if (threadIdx.x == 0) barrier_expect(given, Given::bytes(source, rows));
        if (!fills)
            exchange.give(sum, source, rows, [&](int to, u32 at, float4 v) {
                send(in_block(base + at, to), v, in_block(given, to));
            });
    } else {
        if (!fills)
            exchange.give(sum, source, rows, [&](int to, u32 at, float4 v) {
                *reinterpret_cast<float4*>(memory + to * Given::BYTES + at) = v;
            });
        __syncthreads();
    }
    if (fills) return;
    if (PARTS > 1) barrier_wait_for_cluster(given, 0);
    bf16* to = y + row_0 * y_stride;
    exchange.add_up(sum, source, rows, memory + (PARTS > 1 ? 0 : side * Given::BYTES), [&](int tile, float4 v) {
        put_tile_turned(to, y_stride, v, 8 * tile, rows, o_0 + warp % WARPS * 16, o);
    });
}

}  // namespace

// name: rows of x, bands, slices, blocks that have them; and stages
#define LINEAR_WGMMA(N, BANDS, SLICES, PARTS, DEPTH)                                                   \
    extern "C" __global__ void __cluster_dims__(1, PARTS, 1)                                           \
        __launch_bounds__(SLICES / 4 / PARTS * (128 * BANDS + 32), 1)                                  \
            linear_wgmma_##N##_##BANDS##_##SLICES##_##PARTS(                                           \
                const __grid_constant__ TensorMap w_map, /* [o][i], boxes of 64 BANDS by 64 */         \
                const __grid_constant__ TensorMap x_map, /* [n][i], boxes of N by 64 */                \
                bf16* y,                                 /* [n][y_stride], o used */                   \
                const i64* count,                        /* [1], or null: all */                       \
                int n, int o, int i, i64 y_stride) {                                                   \
        linear_wgmma<N, BANDS, SLICES, PARTS, DEPTH>(&w_map, &x_map, y, count, n, o, i, y_stride);     \
    }
LINEAR_WGMMA(40, 1, 16, 4, 8)
LINEAR_WGMMA(72, 1, 16, 4, 8)
LINEAR_WGMMA(40, 2, 16, 4, 7)
LINEAR_WGMMA(72, 2, 16, 4, 7)
LINEAR_WGMMA(40, 1, 8, 2, 8)
LINEAR_WGMMA(72, 1, 8, 2, 8)
LINEAR_WGMMA(40, 1, 8, 1, 5)
LINEAR_WGMMA(72, 1, 8, 1, 5)

#endif
