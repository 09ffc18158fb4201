// verify_attn_wgmma.cu: tree attention over the swizzled latent cache with the warpgroup products of Hopper.
// Stages out_latent and scores, rules MLA-2, MLA-3, MASK-3, NUM-4. bfloat16, c = 512, r = 64; sm_90a alone.
//
// The same as verify_attn_mma.cu, which serves every architecture: rows R = node * h + head, keys and values
// of one cached row, splits, the same partial results and the same merge. This one is taken where there
// are more than 16 rows, tiles enough for every SM, and pages of whole tiles: there products bind, and wgmma
// has twice the rate and reads its operands from shared memory itself. H/M/L 8/65/64k (heads, nodes,
// committed tokens) takes 136 us on an H200, by mma.sync 286.
//
// A block takes 64 rows and, with `splits` blocks on the same rows, the tiles split, split + splits, ... of
// 64 slots. Warpgroups:
//
//   left    scores = query keys^T (36 products of 64 x 64 x 16), softmax in registers, probabilities to
//           shared memory; values of columns 0..255
//   right   values of columns 256..511, beside the left's, and beside the scores of the next tile; brings
//           tiles, two stages. (A ninth warp for that could not be launched: registers belong to a quarter
//           of an SM, and the third warp of one would find none.)
//
// A thread of either group holds rows g and g + 8 of its warp's 16, (g, q) = (lane / 4, lane % 4); columns
// 8 j + 2 q + (0, 1) of each. Softmax is in base 2; the reference exponent of a row moves only when a score
// exceeds it by 8, so accumulators are rescaled a few times a run.
//
// A tile in shared memory is nine groups of 64 columns, [64 slots][128 bytes] each. Tensor copies make it
// of the cache, where a row is 1,152 bytes; the cache's swizzle (chunk q of 128 bytes at q ^ (row & 7)) is
// the one that wgmma reads, because tiles begin at multiples of eight rows. Groups are keys as they lie, and
// values transposed: 16 slots deep, 64 columns wide.
//
// Barriers are waited at by all who use them, though the right group need not wait at SUMMED: it has nothing
// else to do there, and racecheck does not follow those who only arrive.
//
// Why hidden slots cannot matter: as in verify_attn_mma.cu. But the last tile is copied whole, as slots from
// n_slots on lie in the same page: their scores are -inf, and the right group puts 0 in the place of their values.
//
// grid (ceil(n h / 64), splits)   block 256   shared memory BYTES, dynamic, below

#include "attention.cuh"
#include "hopper.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace {

constexpr int ROWS = 64;  // of the query, a block
constexpr int KEYS = 64;  // slots, a tile
constexpr int GROUPS = 9;
constexpr int PIECES = 3;  // copies of a tile, of three groups each: the scores of the first need not wait
constexpr int GROUP_BYTES = KEYS * 128;
constexpr int TILE_BYTES = GROUPS * GROUP_BYTES;
constexpr int ATOM_BYTES = 1024;  // eight rows of 128 bytes

// Offsets in dynamic shared memory; the launcher knows the total.
constexpr int QUERY_AT = 2 * TILE_BYTES;
constexpr int P_AT = QUERY_AT + TILE_BYTES;
constexpr int ALPHA_AT = P_AT + ROWS * KEYS * 2;
constexpr int MOVED_AT = ALPHA_AT + ROWS * 4;
constexpr int BAD_AT = MOVED_AT + 16;  // two words a warpgroup
constexpr int BARRIERS_AT = BAD_AT + 16;
constexpr int BYTES = BARRIERS_AT + 2 * (PIECES + 1) * 8;
static_assert(BYTES == 229728, "cuda_hopper.py knows it");

// Of the named barriers, 0 being __syncthreads.
constexpr int WEIGHED = 1;  // probabilities are written
constexpr int SUMMED = 2;   // and read by the right group
constexpr int GROUP = 3;    // + 0 left, 1 right: of a group's own threads

template <int BARRIER, int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
// `bar`: the first of PIECES barriers.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int row, u32 bar) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        barrier_expect(bar + piece * 8, TILE_BYTES / PIECES);
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to + piece * (TILE_BYTES / PIECES)),
            "l"(map), "r"(0), "r"(row), "r"(piece * (GROUPS / PIECES)), "r"(bar + piece * 8)
            : "memory");
    }
}
__device__ __forceinline__ void prefetch_tile(const TensorMap* map, int row) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
        asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
                     "r"(0), "r"(row), "r"(piece * (GROUPS / PIECES))
                     : "memory");
}

// What follows in the asynchronous proxy (wgmma, bulk copies) sees this thread's writes.
__device__ __forceinline__ void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A matrix in atoms of eight rows of 128 bytes, swizzled. Rows along m or n: atoms lie ATOM_BYTES apart.
// Rows along k: so do they, and groups of 64 columns GROUP_BYTES.
__device__ __forceinline__ u64 matrix_at(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(GROUP_BYTES >> 4) << 16 | (u64)(ATOM_BYTES >> 4) << 32 |
           (u64)1 << 62;
}

// d [64, 64] = a [64, 16] b [64, 16]^T, plus what d held unless it is the first. A warpgroup together.
__device__ __forceinline__ void multiply_keys(float (&d)[32], u64 a, u64 b, bool first) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, add, 1, 1, 0, 0;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"((int)first));
}

// d [64, 256] += a [64, 16] b [16, 256]
__device__ __forceinline__ void add_values(float (&d)[128], u64 a, u64 b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, "
        "%72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, "
        "%88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, "
        "%104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, "
        "%120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, add, 1, 1, 0, 1;\n}\n"
        :
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
          "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]),
          "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
          "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
          "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]),
          "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]),
          "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
          "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),
          "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
          "+f"(d[126]), "+f"(d[127])
        : "l"(a), "l"(b));
}

// 0 for the values of slots from n_valid on: what lies there in the page is no slot's. By the right group, which
// has nothing else to do while the left multiplies; that one selects these slots' scores to -inf.
__device__ __forceinline__ void clear_slots(u32 tile, int thread, int n_valid) {
#pragma unroll 1
    for (int slot = n_valid + (thread >> 6); slot < KEYS; slot += 2)
        write_shared(tile + (thread >> 3 & 7) * GROUP_BYTES + slot * 128 + (thread & 7) * 16, 0u, 0u, 0u, 0u);
    show_writes();
}

// Hostile values in a tile that reaches past open_len, in a group's 256 columns: a row that sees a slot is
// NaN where the slot's value is not finite; then 0 for such values.
//
// seen_by(r)  the slots that row g + 8 r of the thread sees
template <int WARPGROUP, typename Seen>
__device__ __forceinline__ void clean_values(
    float (&o)[128], u32 half_tile, u32 moved_at, u32 bad_at, int thread, const Seen& seen_by, int n_valid) {
    // What is not finite shows in every row's score of its slot.
    u32 moved[4];
    read_shared(moved, moved_at);
    bool hostile = (moved[0] | moved[1] | moved[2] | moved[3]) & 2;
    u64 bad_slots = 0;
    // Thread: slots (thread / 8) + 16 i, chunk thread % 8 of each of the four groups of columns.
    u32 at = half_tile + thread * 16;
    if (hostile) {
        if (thread < 2)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(bad_at + thread * 4), "r"(0) : "memory");
        meet<GROUP + WARPGROUP, 128>();
        u64 bad = 0;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            int slot = (thread >> 3) + 16 * i;
            bool found = false;
            if (slot < n_valid)
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    u32 x[4];
                    read_shared(x, at + g * GROUP_BYTES + i * 2048);
                    found |= not_finite(x[0]) || not_finite(x[1]) || not_finite(x[2]) || not_finite(x[3]);
                }
            bad |= (u64)found << slot;
        }
        if (bad) {
            asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(bad_at), "r"((u32)bad) : "memory");
            asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(bad_at + 4), "r"((u32)(bad >> 32)) : "memory");
        }
        meet<GROUP + WARPGROUP, 128>();
        u32 low, high;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(bad_at) : "memory");
        bad_slots = (u64)high << 32 | low;
    }
    if (bad_slots) {
        int q = thread & 3;
        u64 seen_low = seen_by(0), seen_high = seen_by(1);
#pragma unroll 1
        for (u64 left = bad_slots; left; left &= left - 1) {
            int slot = __ffsll((long long)left) - 1;
            bool sees_low = (seen_low >> slot) & 1, sees_high = (seen_high >> slot) & 1;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                u32 pair;
                asm volatile("ld.shared.u32 %0, [%1];"
                             : "=r"(pair)
                             : "r"(half_tile + (j >> 3) * GROUP_BYTES + slot * 128 +
                                   (((j & 7) ^ (slot & 7)) * 16) + q * 4)
                             : "memory");
                bool first = (pair & 0x7f80u) == 0x7f80u, second = (pair & 0x7f800000u) == 0x7f800000u;
                if (first && sees_low) o[4 * j] = NOT_A_NUMBER;
                if (second && sees_low) o[4 * j + 1] = NOT_A_NUMBER;
                if (first && sees_high) o[4 * j + 2] = NOT_A_NUMBER;
                if (second && sees_high) o[4 * j + 3] = NOT_A_NUMBER;
            }
        }
        meet<GROUP + WARPGROUP, 128>();
    }
    if (bad_slots) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            int slot = (thread >> 3) + 16 * i;
            if (slot >= n_valid) continue;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                u32 x[4];
                read_shared(x, at + g * GROUP_BYTES + i * 2048);
                write_shared(at + g * GROUP_BYTES + i * 2048, finite_or_zero(x[0]), finite_or_zero(x[1]),
                             finite_or_zero(x[2]), finite_or_zero(x[3]));
            }
        }
        show_writes();
        meet<GROUP + WARPGROUP, 128>();
    }
}

// o [64, 256 of a group] += probabilities [64, 64] values [64, 256 of a group]
__device__ __forceinline__ void add_tile(float (&o)[128], u32 p, u32 half_tile) {
    open_products();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        add_values(o, matrix_at(p + step * 32), matrix_at(half_tile + step * 2 * ATOM_BYTES));
    finish_products();
}

__device__ __forceinline__ void rescale(float (&o)[128], float low, float high) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        o[4 * j] *= low;
        o[4 * j + 1] *= low;
        o[4 * j + 2] *= high;
        o[4 * j + 3] *= high;
    }
}

template <bool SCORES>
__device__ __forceinline__ void attend(
    const TensorMap* map, const char* query, const i64* page_table, int n_pages, int page_tiles,
    const u32* bits, int words, const i64* count, const i64* open_len_at, const i64* n_slots_at, int n,
    int h, float scale, float* acc, float* stats, float* scores, i64 score_stride, real* out) {
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory);
    u32 full = base + BARRIERS_AT, empty = full + 2 * PIECES * 8;
    int warp = __shfl_sync(~0u, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
    int first_row = blockIdx.x * ROWS, n_rows = n * h, split = blockIdx.y;

    // Where a tile of the cache lies, in tiles; negative where its page is not mapped.
    auto place = [&](int tile) {
        u32 page = (u32)tile / (u32)page_tiles;
        if ((int)page >= n_pages) return (i64)-1;
        return read_now(page_table + page) * page_tiles + (tile - page * page_tiles);
    };
    if (warp == 4 && lane == 0) {
#pragma unroll
        for (int i = 0; i < 2 * PIECES; ++i) barrier_init(full + i * 8, 1);
        barrier_init(empty, 8);
        barrier_init(empty + 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 4 && blockIdx.x == 0) {
        // One block of those on the same tiles, and the first tile alone, as in verify_attn_mma.cu.
        i64 at = place(split);
        if (lane == 0 && (u64)at < (u64)n_pages * page_tiles)  // -1 is no page
            prefetch_tile(map, (int)at * KEYS);
    }
    wait_for_predecessor();
    let_successor_start();
    i64 first_place = place(split);  // asked for at once, whatever comes of it
    int n_slots = (int)read_now(n_slots_at), open_len = (int)read_now(open_len_at);
    bool padding = first_row >= read_now(count) * h;  // nobody reads its results
    int cache_tiles = (n_slots + KEYS - 1) / KEYS;
    int splits = splits_in_use(cache_tiles, gridDim.y);
    if (padding | (split >= splits)) return;
    int n_tiles = tiles_of_split(cache_tiles, split, splits);

    i64 places = 0;  // of this block's tile 32 i + lane, in the warp that brings them
    auto start_copy = [&](int k, i64 at) {
        if (lane == 0)
            copy_tile(base + (k & 1) * TILE_BYTES, map, (int)at * KEYS, full + (k & 1) * PIECES * 8);
    };
    if (warp == 4) {
        start_copy(0, first_place);
        if (n_tiles > 1) {
            places = place(split + lane * splits);
            start_copy(1, __shfl_sync(~0u, places, 1));
        }
    }
    int group = warp >> 2, thread = threadIdx.x & 127;
    int row_of_block = (warp & 3) * 16 + (lane >> 2);  // and eight below
    int row = first_row + row_of_block;
    auto seen_by = [&](int its, int first) -> u64 {
        u32 seen[2];
        const u32* of_node = bits + (i64)(min(its, n_rows - 1) / h) * words;
        visible_slots(seen, of_node, words, first, open_len, n_slots);
        return its < n_rows ? (u64)seen[1] << 32 | seen[0] : 0;
    };
    int last = (split + (n_tiles - 1) * splits) * KEYS;  // the last tile's first slot
    u64 seen_of_last[2] = {0, 0};
    if (last + KEYS > open_len && group == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) seen_of_last[r] = seen_by(row + 8 * r, last);
    // The query as wgmma reads it: rows of 128 bytes in nine groups, swizzled; 0 where there is no row.
    {
        const char* from = query + (i64)first_row * ROW_BYTES;
        int left = n_rows - first_row;
#pragma unroll
        for (int i = 0; i < 18; ++i) {
            int chunk = i * 256 + threadIdx.x, row = chunk / 72, c = chunk % 72;
            u32 to = base + QUERY_AT + (c >> 3) * GROUP_BYTES + row * 128 + (((c & 7) ^ (row & 7)) * 16);
            int n_bytes = row < left ? 16 : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                         "l"(from + (row < left ? chunk * 16 : 0)), "r"(n_bytes)
                         : "memory");
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        show_writes();
    }
    __syncthreads();

    u32 alpha_at = base + ALPHA_AT + row_of_block * 4, moved_at = base + MOVED_AT + (warp & 3) * 4;
    u32 p_at = base + P_AT;
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.f;

    float norm[2] = {0.f, 0.f};
    if (group == 0) {
        float reference[2] = {NEG_INF, NEG_INF};
        float scale2 = scale * 1.4426950408889634f;
        int q2 = 2 * (lane & 3);
#pragma unroll 1
        for (int k = 0; k < n_tiles; ++k) {
            u32 tile = base + (k & 1) * TILE_BYTES;
            float s[32];
#pragma unroll
            for (int step = 0; step < 36; ++step) {
                if (step % 12 == 0)
                    barrier_wait(full + ((k & 1) * PIECES + step / 12) * 8, (k >> 1) & 1);
                if (step == 0) open_products();
                u32 at = (step >> 2) * GROUP_BYTES + (step & 3) * 32;
                multiply_keys(s, matrix_at(base + QUERY_AT + at), matrix_at(tile + at), step == 0);
            }
            finish_products();
            int first = (split + k * splits) * KEYS;
            bool masked = first + KEYS > open_len;
            bool bad = false;
            if (masked || SCORES) {
                // What lies beyond the last slot is nobody's, hostile or not.
#pragma unroll
                for (int e = 0; e < 32; ++e)
                    if ((e >> 2) * 8 + (e & 1) >= n_slots - first - q2) s[e] = 0.f;
#pragma unroll
                for (int e = 0; e < 32; ++e) bad |= !(fabsf(s[e]) < POS_INF);
                u64 seen[2] = {seen_of_last[0], seen_of_last[1]};
                if (k < n_tiles - 1 || !masked) {
                    seen[0] = seen_by(row, first);
                    seen[1] = seen_by(row + 8, first);
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    u64 mine = seen[r] >> q2;
#pragma unroll
                    for (int e = 0; e < 16; ++e) {
                        float& x = s[(e >> 1) * 4 + 2 * r + (e & 1)];
                        int slot = (e >> 1) * 8 + (e & 1);
                        bool visible = (mine >> slot) & 1;
                        if (SCORES && visible)
                            scores[(i64)(row + 8 * r) * score_stride + first + q2 + slot] = x * scale;
                        if (!visible) x = NEG_INF;
                    }
                }
            }
            float alpha[2];
            bool moves = false;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float top = NEG_INF;
#pragma unroll
                for (int e = 0; e < 16; ++e) top = fmaxf(top, s[(e >> 1) * 4 + 2 * r + (e & 1)]);
                top *= scale2;
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                bool its = top > reference[r] + SLACK;
                alpha[r] = its ? exp2_fast(reference[r] - top) : 1.f;
                reference[r] = its ? top : reference[r];
                moves |= its;
                float shift = reference[r] == NEG_INF ? 0.f : reference[r];
                float sum = 0.f;
#pragma unroll
                for (int e = 0; e < 16; ++e) {
                    float& x = s[(e >> 1) * 4 + 2 * r + (e & 1)];
                    x = exp2_fast(fmaf(x, scale2, -shift));
                    sum += x;
                }
                norm[r] = fmaf(norm[r], alpha[r], sum);
            }
            u32 moved = __any_sync(~0u, moves) | __any_sync(~0u, bad) << 1;
            meet<SUMMED, 256>();  // the probabilities of the tile before have been read
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(p_at + (row_of_block + 8 * r) * 128 +
                                                                ((j ^ (lane >> 2)) * 16) + q2 * 2),
                                 "r"(pack_bf16(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]))
                                 : "memory");
            if (q2 == 0) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(alpha_at), "f"(alpha[0]) : "memory");
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(alpha_at + 32), "f"(alpha[1]) : "memory");
            }
            if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(moved_at), "r"(moved) : "memory");
            show_writes();
            meet<WEIGHED, 256>();
            if (moved & 1) rescale(o, alpha[0], alpha[1]);
            if (masked)
                clean_values<0>(o, tile, base + MOVED_AT, base + BAD_AT, thread,
                                [&](int r) { return seen_by(row + 8 * r, first); }, n_slots - first);
            add_tile(o, p_at, tile);
            if (lane == 0) barrier_arrive(empty + (k & 1) * 8);
        }
        norm[0] += __shfl_xor_sync(~0u, norm[0], 1);
        norm[0] += __shfl_xor_sync(~0u, norm[0], 2);
        norm[1] += __shfl_xor_sync(~0u, norm[1], 1);
        norm[1] += __shfl_xor_sync(~0u, norm[1], 2);
        if (!out && (lane & 3) == 0)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (row + 8 * r < n_rows) {
                    float* at = stats + ((i64)(row + 8 * r) * gridDim.y + split) * 2;
                    at[0] = reference[r];
                    at[1] = norm[r];
                }
    } else {
#pragma unroll 1
        for (int k = 0; k < n_tiles; ++k) {
            u32 half_tile = base + (k & 1) * TILE_BYTES + 4 * GROUP_BYTES;
            if (warp == 4 && k >= 1 && k + 1 < n_tiles) {  // the other stage, once all have left it
                int next = k + 1;
                if ((next & 31) == 0 && next + lane < n_tiles)
                    places = place(split + (next + lane) * splits);
                i64 at = __shfl_sync(~0u, places, next & 31);
                barrier_wait(empty + (next & 1) * 8, ((next >> 1) - 1) & 1);
                start_copy(next, at);
            }
            int first = (split + k * splits) * KEYS;
            if (k == n_tiles - 1 && n_slots - last < KEYS) {
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece)
                    barrier_wait(full + ((k & 1) * PIECES + piece) * 8, (k >> 1) & 1);
                clear_slots(base + (k & 1) * TILE_BYTES, thread, n_slots - first);
            }
            meet<SUMMED, 256>();
            meet<WEIGHED, 256>();
            u32 moved;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(moved) : "r"(moved_at) : "memory");
            if (moved & 1) rescale(o, read_shared(alpha_at), read_shared(alpha_at + 32));
            if (first + KEYS > open_len)
                clean_values<1>(o, half_tile, base + MOVED_AT, base + BAD_AT + 8, thread,
                                [&](int r) { return seen_by(row + 8 * r, first); }, n_slots - first);
            add_tile(o, p_at, half_tile);
            if (lane == 0) barrier_arrive(empty + (k & 1) * 8);
        }
    }

    if (out) {  // this block had all tiles
        meet<SUMMED, 256>();
        if (group == 0 && (lane & 3) == 0) {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(alpha_at), "f"(1.f / norm[0]) : "memory");
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(alpha_at + 32), "f"(1.f / norm[1]) : "memory");
        }
        meet<WEIGHED, 256>();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + 8 * r >= n_rows) continue;
            float part = read_shared(alpha_at + 32 * r);
            real* at = out + (i64)(row + 8 * r) * LATENT + group * 256 + 2 * (lane & 3);
#pragma unroll
            for (int j = 0; j < 32; ++j)
                *(u32*)(at + 8 * j) = pack_bf16(o[4 * j + 2 * r] * part, o[4 * j + 2 * r + 1] * part);
        }
        return;
    }
    // Partial results, in the order of verify_attn_mma.cu's.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= n_rows) continue;
        float* at = acc + ((i64)split * n_rows + row + 8 * r) * LATENT + group * 256 + (lane & 3) * 4;
#pragma unroll
        for (int j = 0; j < 16; ++j)
            asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at + 16 * j), "f"(o[8 * j + 2 * r]),
                         "f"(o[8 * j + 2 * r + 1]), "f"(o[8 * j + 4 + 2 * r]), "f"(o[8 * j + 5 + 2 * r])
                         : "memory");
    }
}

}  // namespace

#define VERIFY_ATTN(NAME, SCORES)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME(                                    \
        const char* query,                     /* [n, h, 576] bfloat16 */                         \
        const __grid_constant__ TensorMap map, /* of this layer's rows */                         \
        const i64* page_table,                 /* [n_pages] */                                    \
        const u32* bits,                       /* [n, words] */                                   \
        const i64* count,                      /* [1] rows of the tree that count */              \
        const i64* open_len,                   /* [1] */                                          \
        const i64* n_slots,                    /* [1] */                                          \
        float* acc,    /* [splits, n h, 512], columns in the order of the fragments */            \
        float* stats,  /* [n h, splits, 2] reference exponent, sum of 2^(score - it) */           \
        float* scores, /* [n, h, score_stride] or null */                                         \
        real* out,     /* [n, h, 512], or null: acc and stats */                                  \
        i64 score_stride, float scale, /* positive */                                             \
        int n_pages, int page_tiles,   /* tiles a page */                                         \
        int words, int n, int h) {                                                                \
        attend<SCORES>(&map, query, page_table, n_pages, page_tiles, bits, words, count, open_len, \
                       n_slots, n, h, scale, acc, stats, scores, score_stride, out);              \
    }

VERIFY_ATTN(verify_attn_wgmma, false)
VERIFY_ATTN(verify_attn_wgmma_scores, true)

#endif
