// verify_attn_mma.cu: tree attention over the swizzled latent cache with tensor cores.
// Stages out_latent and scores, rules MLA-2, MLA-3, MASK-3, NUM-4. bfloat16, c = 512, r = 64.
//
// Row R = node * h + head attends to the slots that its node sees; all rows share keys and values
// (one cached row: 512 latent elements, then 64 rope elements; the value is the latent part).
//
// A block takes 16 or 32 rows (cuda_cuts.py says which) and the tiles split, split + splits, ... of 32
// slots. Tile t of the cache is 36,864 contiguous bytes: one bulk copy, two stages of them, or three
// where a block of 16 rows has an SM's memory to itself. The grid has
// splits for the most slots of a bucket; how many of them share the tiles is decided here, from n_slots,
// and the others leave. Where blocks have 32 rows, a last one of 16 or fewer does half the work a tile,
// and so shares its tiles among fewer blocks. The merge joins the splits; with one split there is none,
// and the blocks write the result.
//
//   scores   Each of the four warps multiplies all rows by its quarter of the 576 dimensions (the
//            query stays in registers) and all 32 keys. The quarters' sums meet in shared memory,
//            in the order of the fragments: what a lane writes is what the same lane of another
//            warp reads. (q0 + q1) + (q2 + q3) for every row, wherever it lies in the block.
//   softmax  Warp d holds eight rows (octet d) by 32 keys, in base 2. The reference exponent of a
//            row moves only when a score exceeds it by 8: probabilities stay below 2^8, and the
//            accumulators are rescaled a few times a run, not once a tile.
//   values   Each warp multiplies all rows' probabilities by its 128 columns of the tile.
//
// Warp w keeps the row octets in the order o ^ w, so that its own octet is always its octet 0 and
// every register index is a constant.
//
// Why hidden slots cannot matter: tiles that reach past open_len select hidden scores to -inf after
// the sum, and put 0 in the place of values that are not finite before they are multiplied. Nothing
// vanishes by that: a row that sees such a slot becomes NaN in the column of the value first, as 0
// times infinity would make it (its score may be -inf). Whether a tile holds such values need not be
// searched: each makes every row's score of its slot inf or NaN. Slots from n_slots on are never
// loaded: their scores are -inf, and the last slot's values stand in for theirs.
//
// Such a tile is one block's, and all wait for it: what costs it a microsecond costs the launch one.
//
// The launches may overlap with their neighbours (griddepcontrol): before the wait, only addresses
// and a prefetch into L2. The tile -> split table depends on the grid and n_slots alone, and nothing
// is summed by atomics: the same inputs give the same bits.
//
// What decided, on an H200 (H/M/L: heads, nodes, committed tokens):
//   A warp's products take 14 clocks an mma, twice what the unit takes, with one block on the SM or
//   two: four warps with 32 rows need a second block, and two such blocks take all its registers.
//   The page table is read 32 tiles ahead by the lanes of warp 0. Read for each copy it held up all
//   warps at the barrier after the scores: 680 clocks of 3,800 a tile; 8/1/64k took 35 us, now 27.
//   Eight warps a block, tiles of 16 slots in four stages and the softmax of one tile beside the
//   products of another lost: 101 us against 85 at 8/17/64k, 330 against 260 at 8/65/64k. Each of
//   its tiles waits for two exchanges between warps, and half as many slots pay for them.
//
// verify_attn_mma_<rows>: grid (ceil(n h / rows), splits)   block 128   shared memory: Shared::BYTES,
// dynamic, below
// merge: grid (n h PARTS)   block 128

#include "attention.cuh"

namespace {

constexpr int WARPS = 4;
constexpr int KEYS = 32;  // slots a tile
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr int HALF_TILE = 16 * ROW_BYTES;
constexpr int STEPS = 9;          // k16 steps of a quarter of the row
constexpr int QUARTER_BYTES = 288;
constexpr int COLUMN_TILES = 16;  // n8 tiles of a warp's 128 columns

// Offsets in dynamic shared memory: the stages last, two or, of 16 rows, three, as the launcher has asked memory
// for. The light block of 32 rows has two.
template <int OCTETS>
struct Shared {
    // Steps of the query that registers do not hold (spills cost more).
    static constexpr int FAR_STEPS = OCTETS == 4 ? 2 : 0;
    static constexpr int MOST_STAGES = OCTETS == 4 ? 2 : 3;
    static constexpr int PARTIALS_AT = 0;
    static constexpr int FAR_AT = PARTIALS_AT + OCTETS * 3 * 1024;
    static constexpr int P_AT = FAR_AT + FAR_STEPS * OCTETS * WARPS * 256;
    static constexpr int ALPHA_AT = P_AT + OCTETS * 512;
    static constexpr int MOVED_AT = ALPHA_AT + 8 * 4 * 4;
    static constexpr int BARRIERS_AT = MOVED_AT + 16;
    static constexpr int STAGES_AT = (BARRIERS_AT + 2 * MOST_STAGES * 8 + 127) / 128 * 128;
};
static_assert(Shared<4>::STAGES_AT == 22784, "cuda_cuts.py knows it");
static_assert(Shared<2>::STAGES_AT == 7424, "cuda_cuts.py knows it");

__device__ __forceinline__ void copy_tile(u32 to, const char* from, u32 n_bytes, u32 bar) {
    barrier_expect(bar, n_bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(n_bytes), "r"(bar)
        : "memory");
}

// Lane t of four holds x[0..3]; afterwards lane t holds what was x[t] of lanes 0..3.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    u32 b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    x[0] = odd ? a : x[0];
    x[1] = odd ? x[1] : a;
    x[2] = odd ? b : x[2];
    x[3] = odd ? x[3] : b;
    a = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2);
    b = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    x[0] = high ? a : x[0];
    x[1] = high ? b : x[1];
    x[2] = high ? x[2] : a;
    x[3] = high ? x[3] : b;
}

// The warp's quarter of its rows as A fragments: q[step][m][half + 2 (upper 8 of k16)].
template <int M>
__device__ __forceinline__ void load_query(
    u32 (&q)[STEPS][M][4], const char* query, int first_row, int n_rows, int warp, int lane) {
    u32 x[2 * M][5][4];  // four 16-byte chunks at a time, of 18; all loads are in flight at once
#pragma unroll
    for (int o = 0; o < 2 * M; ++o) {
        int row = first_row + (o ^ (warp & (2 * M - 1))) * 8 + (lane >> 2);
        const char* from = query + (i64)row * ROW_BYTES + warp * QUARTER_BYTES;
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            int chunk = 4 * i + (i < 4 ? lane & 3 : lane & 1);
#pragma unroll
            for (int j = 0; j < 4; ++j) x[o][i][j] = 0;
            if (row < n_rows)
                asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[o][i][0]), "=r"(x[o][i][1]), "=r"(x[o][i][2]), "=r"(x[o][i][3])
                             : "l"(from + chunk * 16));
        }
    }
#pragma unroll
    for (int o = 0; o < 2 * M; ++o)
#pragma unroll
        for (int i = 0; i < 5; ++i) {
            transpose_quad(x[o][i]);
#pragma unroll
            for (int j = 0; j < (i < 4 ? 4 : 2); ++j)
                q[2 * i + (j >> 1)][o >> 1][(o & 1) + 2 * (j & 1)] = x[o][i][j];
        }
}

// Which of a tile's slots hold what is not finite in the warp's 128 columns.
__device__ __forceinline__ u32 bad_slots(u32 tile, int warp, int lane, int n_valid) {
    u32 at = tile + (lane >> 4) * ROW_BYTES + warp * 256 + (lane & 15) * 16, bad = 0;
#pragma unroll 4
    for (int row = lane >> 4; row < KEYS; row += 2, at += 2 * ROW_BYTES) {
        if (row >= n_valid) continue;
        u32 x[4];
        read_shared(x, at);
        bool found = not_finite(x[0]) || not_finite(x[1]) || not_finite(x[2]) || not_finite(x[3]);
        bad |= (u32)found << row;
    }
    return __reduce_or_sync(~0u, bad);
}

// In the warp's 128 columns, of the n_valid first slots: 0 for what is not finite.
__device__ __forceinline__ void clean_values(u32 tile, int warp, int lane, int n_valid) {
    u32 at = tile + (lane >> 4) * ROW_BYTES + warp * 256 + (lane & 15) * 16;
#pragma unroll 1
    for (int row = lane >> 4; row < KEYS && row < n_valid; row += 2, at += 2 * ROW_BYTES) {
        u32 x[4];
        read_shared(x, at);
        write_shared(at, finite_or_zero(x[0]), finite_or_zero(x[1]), finite_or_zero(x[2]),
                     finite_or_zero(x[3]));
    }
    // The next bulk copy into this stage comes after these writes.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

// A block's work, on 16 M rows at most; each block ahead of it in x has ROWS. LIGHT: the last row block, half
// empty, whose tiles fewer blocks share.
template <int M, int ROWS, bool LIGHT, bool SCORES>
__device__ __forceinline__ void attend(
    const char* query, const char* rows, const i64* page_table, int n_pages, int page_tiles,
    const u32* bits, int words, const i64* count, const i64* open_len_at, const i64* n_slots_at,
    int n, int h, float scale, float* acc, float* stats, float* scores, i64 score_stride, real* out) {
    constexpr int OCTETS = 2 * M;
    typedef Shared<OCTETS> Layout;
    constexpr int FAR = Layout::FAR_STEPS;
    // What the last tile shows is asked for at the start. Larger blocks have no register for it: they wait.
    constexpr bool KEEPS_SEEN = M == 1;
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory);
    u32 full = base + Layout::BARRIERS_AT, empty = full + Layout::MOST_STAGES * 8;
    int stages = 2;
    if (M == 1) {
        u32 n_bytes;
        asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(n_bytes));
        stages = min((n_bytes - Layout::STAGES_AT) / TILE_BYTES, (u32)Layout::MOST_STAGES);
    }
    int warp = __shfl_sync(~0u, (int)(threadIdx.x >> 5), 0), lane = threadIdx.x & 31;
    int split = blockIdx.y, first_row = blockIdx.x * ROWS, n_rows = n * h;

    // Where a tile of the cache lies, in tiles; negative where its page is not mapped.
    auto place = [&](int tile) {
        u32 page = (u32)tile / (u32)page_tiles;
        if ((int)page >= n_pages) return (i64)-1;
        return read_now(page_table + page) * page_tiles + (tile - page * page_tiles);
    };
    auto tiles_of = [](i64 n_slots) { return (int)((n_slots + KEYS - 1) / KEYS); };
    auto splits_of = [](int tiles) {
        int splits = splits_in_use(tiles, gridDim.y);
        return LIGHT ? light_splits(tiles, splits) : splits;
    };
    if (warp == 0) {
        // One block of those on the same tiles, and the first tile alone: more are in its copies' way. A table
        // that the kernel ahead has yet to write misleads no more than this.
        if (blockIdx.x == 0) {
            i64 at = place(split);
            if (lane == 0 && (u64)at < (u64)n_pages * page_tiles)  // -1 is no page
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows + at * TILE_BYTES),
                             "r"(TILE_BYTES));
        }
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < Layout::MOST_STAGES; ++i) {
                barrier_init(full + i * 8, 1);
                barrier_init(empty + i * 8, WARPS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    wait_for_predecessor();
    let_successor_start();

    i64 places = place(split);  // asked for at once, whatever comes of it
    int n_slots = (int)read_now(n_slots_at), open_len = (int)read_now(open_len_at);
    bool padding = first_row >= read_now(count) * h;  // nobody reads its results
    int cache_tiles = tiles_of(n_slots), splits = splits_of(cache_tiles);
    // Nor does the merge read a split that is not in use. One branch: two would load one after the other.
    if (padding | (split >= splits)) return;
    int n_tiles = tiles_of_split(cache_tiles, split, splits);

    // Tile k of this block is tile split + k splits of the cache.
    auto start_copy = [&](int k, int stage, i64 at) {
        int left = n_slots - (split + k * splits) * KEYS;
        copy_tile(base + Layout::STAGES_AT + stage * TILE_BYTES, rows + at * TILE_BYTES,
                  left < KEYS ? left * ROW_BYTES : TILE_BYTES, full + stage * 8);
    };
    if (warp == 0) {
        if (lane == 0) start_copy(0, 0, places);
        if (n_tiles > 1) places = place(split + lane * splits);  // from now on, of this block's tile 32 i + lane
#pragma unroll 1
        for (int k = 1; k < stages && k < n_tiles; ++k) {
            i64 at = __shfl_sync(~0u, places, k);
            if (lane == 0) start_copy(k, k, at);
        }
    }

    auto seen_by = [&](int row, int first) {
        u32 seen[1];
        visible_slots(seen, bits + (i64)(row / h) * words, words, first, open_len, n_slots);
        return seen[0];
    };
    // Of this block's last tile: its first slot.
    int last = (split + (n_tiles - 1) * splits) * KEYS;
    int row_of_lane = first_row + warp * 8 + (lane >> 2);
    u32 seen_of_last = ~0u;
    if (KEEPS_SEEN && last + KEYS > open_len && warp < OCTETS && row_of_lane < n_rows)
        seen_of_last = seen_by(row_of_lane, last);
    u32 q[STEPS][M][4];
    load_query<M>(q, query, first_row, n_rows, warp, lane);
    u32 far_at = base + Layout::FAR_AT + warp * (FAR * M * 512) + lane * 16;
#pragma unroll
    for (int i = 0; i < FAR * M; ++i) {
        const u32(&x)[4] = q[STEPS - FAR + i / M][i % M];
        write_shared(far_at + i * 512, x[0], x[1], x[2], x[3]);
    }
    float o[M][COLUMN_TILES][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int t = 0; t < COLUMN_TILES; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[m][t][e] = 0.f;
    float reference = NEG_INF, norm = 0.f;  // of row lane / 4 of octet `warp`
    float scale2 = scale * 1.4426950408889634f;
    __syncthreads();  // the barriers are set up

    // ldmatrix addresses inside a tile. Keys: matrices (keys 0-7, k 0-7), (keys 0-7, k 8-15), (keys
    // 8-15, ...). Values: (keys 0-7, columns 0-7), (keys 8-15, columns 0-7), (..., columns 8-15).
    u32 key_at[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        int chunk = 2 * ((warp + j) & 3) + ((lane >> 3) & 1);
        key_at[j] = ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (2 * warp + ((warp + j) >> 2)) * 128 +
                    (chunk ^ (lane & 7)) * 16;
    }
    u32 partials = base + Layout::PARTIALS_AT + lane * 16, p_at = base + Layout::P_AT + lane * 16;
    u32 alpha_at = base + Layout::ALPHA_AT + (lane >> 2) * 16, moved_at = base + Layout::MOVED_AT;
    constexpr int OWN = OCTETS - 1;  // mask: this warp's first octet is warp & OWN

    int stage = 0, parity = 0;  // of tile k
#pragma unroll 1
    for (int k = 0; k < n_tiles; ++k) {
        u32 tile = base + Layout::STAGES_AT + stage * TILE_BYTES;
        float s[M][4][4];  // [16 rows][8 keys]
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][t][e] = 0.f;
        barrier_wait(full + stage * 8, parity);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 low[4], high[4];
            load_matrices(low, tile + key_at[step & 3] + (step >> 2) * 128);
            load_matrices(high, tile + key_at[step & 3] + (step >> 2) * 128 + HALF_TILE);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (step >= STEPS - FAR)
                    read_shared(q[step][m], far_at + ((step - STEPS + FAR) * M + m) * 512);
                mma(s[m][0], q[step][m], low[0], low[1]);
                mma(s[m][1], q[step][m], low[2], low[3]);
                mma(s[m][2], q[step][m], high[0], high[1]);
                mma(s[m][3], q[step][m], high[2], high[3]);
            }
            // The stage before this one is free once every warp has left the tile before this one.
            int next = k + stages - 1;
            if (step == 2 && warp == 0 && k >= 1 && next < n_tiles) {
                int before = stage ? stage - 1 : stages - 1;
                if ((next & 31) == 0 && next + lane < n_tiles) places = place(split + (next + lane) * splits);
                i64 at = __shfl_sync(~0u, places, next & 31);
                barrier_wait(empty + before * 8, stage ? parity : parity ^ 1);
                if (lane == 0) start_copy(next, before, at);
            }
        }

        // Octet o of this warp belongs to warp o ^ (warp & OWN); the slot says whose quarter it is.
#pragma unroll
        for (int oct = 0; oct < OCTETS; ++oct) {
            int to = oct ^ (warp & OWN);
            int slot = oct - 1 + (M == 2 ? 0 : warp & 2);
            if (slot < 0) continue;
            u32 at = partials + (to * 3 + slot) * 1024;
            const float(&x)[4][4] = s[oct >> 1];
            int e = 2 * (oct & 1);
            write_shared(at, x[0][e], x[0][e + 1], x[1][e], x[1][e + 1]);
            write_shared(at + 512, x[2][e], x[2][e + 1], x[3][e], x[3][e + 1]);
        }
        int first = (split + k * splits) * KEYS;
        bool masked = first + KEYS > open_len;
        // Where this lane points to 16 slots of values. In the place of slots from n_slots on, which are not
        // there, to the last one that is: their probabilities are 0.
        u32 value_at[2], thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // anew: what is kept of it would be spilled
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            int slot = min((int)(16 * step + (thread & 15)), n_slots - first - 1);
            value_at[step] = tile + slot * ROW_BYTES + warp * 256 + ((((thread >> 4) & 1) ^ (slot & 7)) * 16);
        }
        __syncthreads();

        u32 p[OCTETS][4];  // [octet of this warp][8 keys]: two probabilities each
        if (warp < OCTETS) {
            float x[8];
            u32 from = partials + warp * 3072;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float a[4], b[4], c[4];
                read_shared(a, from + half * 512);
                read_shared(b, from + 1024 + half * 512);
                read_shared(c, from + 2048 + half * 512);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[4 * half + e] =
                        (s[0][2 * half + (e >> 1)][e & 1] + a[e]) + (b[e] + c[e]);
            }
            bool bad = false;
            if (masked || SCORES) {
                int n_valid = n_slots - first - 2 * (lane & 3);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    bad |= (e >> 1) * 8 + (e & 1) < n_valid && !(fabsf(x[e]) < POS_INF);
                int row = first_row + warp * 8 + (lane >> 2);
                u32 seen = 0;
                if (row < n_rows) seen = KEEPS_SEEN && k == n_tiles - 1 ? seen_of_last : seen_by(row, first);
                seen >>= 2 * (lane & 3);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    bool visible = (seen >> ((e >> 1) * 8 + (e & 1))) & 1;
                    if (SCORES && visible)
                        scores[(i64)row * score_stride + first + (e >> 1) * 8 + 2 * (lane & 3) + (e & 1)] =
                            x[e] * scale;
                    if (!visible) x[e] = NEG_INF;
                }
            }
            float top = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])),
                              fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
            top *= scale2;
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            bool moves = top > reference + SLACK;
            float alpha = moves ? exp2_fast(reference - top) : 1.f;
            reference = moves ? top : reference;
            float shift = reference == NEG_INF ? 0.f : reference;
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] = exp2_fast(fmaf(x[e], scale2, -shift));
                sum += x[e];
            }
            norm = fmaf(norm, alpha, sum);
#pragma unroll
            for (int t = 0; t < 4; ++t) p[0][t] = pack_bf16(x[2 * t], x[2 * t + 1]);
            write_shared(p_at + warp * 512, p[0][0], p[0][1], p[0][2], p[0][3]);
            u32 moved = __any_sync(~0u, moves) | __any_sync(~0u, bad) << 1;
            if ((lane & 3) == 0)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(alpha_at + warp * 4), "f"(alpha)
                             : "memory");
            if (lane == 0)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(moved_at + warp * 4), "r"(moved)
                             : "memory");
        }
        __syncthreads();
        u32 moved[4];
        read_shared(moved, moved_at);
        u32 flags = moved[0] | moved[1] | (OCTETS == 4 ? moved[2] | moved[3] : 0u);
        if (masked) {
            u32 bad = flags & 2 ? bad_slots(tile, warp, lane, n_slots - first) : 0;
#pragma unroll 1
            for (u32 left = bad; left; left &= left - 1) {
                int slot = __ffs(left) - 1;
#pragma unroll
                for (int oct = 0; oct < OCTETS; ++oct) {
                    int row = first_row + (oct ^ (warp & OWN)) * 8 + (lane >> 2);
                    bool sees = row < n_rows && (seen_by(row, first) >> slot) & 1;
                    if (!__any_sync(~0u, sees)) continue;
#pragma unroll
                    for (int t = 0; t < COLUMN_TILES; ++t) {
                        u32 pair;
                        asm volatile("ld.shared.u32 %0, [%1];"
                                     : "=r"(pair)
                                     : "r"(tile + slot * ROW_BYTES + warp * 256 + (t >> 3) * 128 +
                                           (((t & 7) ^ (slot & 7)) * 16) + (lane & 3) * 4));
                        int e = 2 * (oct & 1);
                        if (sees && not_finite(pair << 16)) o[oct >> 1][t][e] = NOT_A_NUMBER;
                        if (sees && not_finite(pair & 0xffff0000u)) o[oct >> 1][t][e + 1] = NOT_A_NUMBER;
                    }
                }
            }
            __syncwarp();
            if (bad) clean_values(tile, warp, lane, n_slots - first);
        }
#pragma unroll
        for (int oct = M == 2 ? 1 : 0; oct < OCTETS; ++oct)
            read_shared(p[oct], p_at + (oct ^ (warp & OWN)) * 512);
        if (flags & 1) {
#pragma unroll
            for (int oct = 0; oct < OCTETS; ++oct) {
                float alpha = read_shared(alpha_at + (oct ^ (warp & OWN)) * 4);
#pragma unroll
                for (int t = 0; t < COLUMN_TILES; ++t) {
                    o[oct >> 1][t][2 * (oct & 1)] *= alpha;
                    o[oct >> 1][t][2 * (oct & 1) + 1] *= alpha;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            u32 a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) a[m][e] = p[2 * m + (e & 1)][2 * step + (e >> 1)];
#pragma unroll
            for (int t = 0; t < COLUMN_TILES / 2; ++t) {
                u32 v[4];
                load_transposed(v, (value_at[step] ^ ((t & 3) * 32)) + (t >> 2) * 128);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    mma(o[m][2 * t], a[m], v[0], v[1]);
                    mma(o[m][2 * t + 1], a[m], v[2], v[3]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }

    if (out) {  // this block had all tiles
        // Asked for anew: addresses that are ready before the loop would be spilled.
        u32 thread, to_alpha;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        asm volatile("mov.u32 %0, %1;" : "=r"(to_alpha) : "r"(base + Layout::ALPHA_AT));
        int octet = thread >> 5, octet_row = (thread & 31) >> 2, quad = thread & 3;
        norm += __shfl_xor_sync(~0u, norm, 1);
        norm += __shfl_xor_sync(~0u, norm, 2);
        __syncthreads();
        if (octet < OCTETS && quad == 0)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to_alpha + (octet_row * 4 + octet) * 4),
                         "f"(1.f / norm)
                         : "memory");
        __syncthreads();
#pragma unroll
        for (int oct = 0; oct < OCTETS; ++oct) {
            int its = oct ^ (octet & OWN), row = first_row + its * 8 + octet_row, e = 2 * (oct & 1);
            if (row >= n_rows) continue;
            float part = read_shared(to_alpha + (octet_row * 4 + its) * 4);
            real* at = out + (i64)row * LATENT + octet * 128 + quad * 2;
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; ++t) {
                const float(&x)[4] = o[oct >> 1][t];
                *(u32*)(at + t * 8) = pack_bf16(x[e] * part, x[e + 1] * part);
            }
        }
        return;
    }
    // Partial results. Columns lie as the fragments do: 16 t + 4 q + e holds column 16 t + 2 q + (e & 1)
    // + 8 (e >> 1).
#pragma unroll
    for (int oct = 0; oct < OCTETS; ++oct) {
        int row = first_row + (oct ^ (warp & OWN)) * 8 + (lane >> 2);
        if (row >= n_rows) continue;
        float* at = acc + ((i64)split * n_rows + row) * LATENT + warp * 128 + (lane & 3) * 4;
#pragma unroll
        for (int t = 0; t < COLUMN_TILES / 2; ++t) {
            const float(&x)[4] = o[oct >> 1][2 * t];
            const float(&y)[4] = o[oct >> 1][2 * t + 1];
            int e = 2 * (oct & 1);
            asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at + 16 * t), "f"(x[e]),
                         "f"(x[e + 1]), "f"(y[e]), "f"(y[e + 1])
                         : "memory");
        }
    }
    if (warp < OCTETS) {
        norm += __shfl_xor_sync(~0u, norm, 1);
        norm += __shfl_xor_sync(~0u, norm, 2);
        int row = first_row + warp * 8 + (lane >> 2);
        if ((lane & 3) == 0 && row < n_rows) {
            float* at = stats + ((i64)row * gridDim.y + split) * 2;
            at[0] = reference;
            at[1] = norm;
        }
    }
}

// The splits' softmax as one. A block serves LATENT / PARTS columns of a row, four a thread; PARTS threads
// share four columns: part p sums the splits p, p + PARTS, ..., ascending, and the parts' sums are added in
// a fixed order. The launcher takes as many parts as threads can be at work at once.
constexpr int MERGE_THREADS = LATENT / 4;
constexpr int MOST_SPLITS = 512;  // the launcher knows it
template <int PARTS>
__device__ __forceinline__ void merge(
    const float* acc, const float* stats, const i64* count, const i64* n_slots, real* out, int most,
    int keys, int heavy_rows, int n, int h) {
    constexpr int QUADS = MERGE_THREADS / PARTS;
    constexpr int WARPS_ALL = MERGE_THREADS / 32, GROUPS = QUADS < 32 ? WARPS_ALL : PARTS;
    constexpr int BATCH = 8;  // loads in flight
    constexpr int KEPT = PARTS < 16 ? 2 : 9;  // splits whose exponent and sum a lane reads but once
    __shared__ float weights_of_warps[WARPS_ALL][MOST_SPLITS];
    __shared__ float4 sums[PARTS == 1 ? 1 : GROUPS][PARTS == 1 ? 1 : QUADS];
    int part = threadIdx.x / QUADS, here = threadIdx.x % QUADS, lane = threadIdx.x & 31;
    int row = blockIdx.x / PARTS, quad = blockIdx.x % PARTS * QUADS + here;
    // These two were written before the splits began, and the splits let this kernel start only
    // after they had waited for that.
    int cache_tiles = (int)((*n_slots + keys - 1) / keys);
    bool padding = row >= *count * h;
    let_successor_start();  // which waits for the end of this one, and so for the splits'
    int used = splits_in_use(cache_tiles, most);
    if (row >= heavy_rows) used = light_splits(cache_tiles, used);
    wait_for_predecessor();
    if (padding) return;

    const float2* stat = (const float2*)stats + (i64)row * most;
    const float4* from = (const float4*)acc + (i64)row * (LATENT / 4) + quad;
    i64 stride = (i64)n * h * (LATENT / 4);
    float4 x[BATCH];
    auto load = [&](int first) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int i = first + b * PARTS;
            x[b] = i < used ? from[i * stride] : float4{0.f, 0.f, 0.f, 0.f};
        }
    };
    load(part);
    // Each warp for itself: no barrier until the sums meet.
    float* weights = weights_of_warps[threadIdx.x >> 5];
    float2 its[KEPT];
    float top = NEG_INF, norm = 0.f;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        its[k] = lane + 32 * k < used ? stat[lane + 32 * k] : float2{NEG_INF, 0.f};
        top = fmaxf(top, its[k].x);
    }
    for (int i = lane + 32 * KEPT; i < used; i += 32) top = fmaxf(top, stat[i].x);
    top = warp_max(top);
    auto weigh = [&](int i, float2 its) {
        weights[i] = exp2_fast(its.x - top);
        norm = fmaf(weights[i], its.y, norm);
    };
#pragma unroll
    for (int k = 0; k < KEPT; ++k)
        if (lane + 32 * k < used) weigh(lane + 32 * k, its[k]);
    for (int i = lane + 32 * KEPT; i < used; i += 32) weigh(i, stat[i]);
    norm = warp_sum(norm);
    __syncwarp();
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    for (int i = part;;) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (i + b * PARTS >= used) break;
            float weight = weights[i + b * PARTS];
            sum.x = fmaf(weight, x[b].x, sum.x);
            sum.y = fmaf(weight, x[b].y, sum.y);
            sum.z = fmaf(weight, x[b].z, sum.z);
            sum.w = fmaf(weight, x[b].w, sum.w);
        }
        i += BATCH * PARTS;
        if (i >= used) break;
        load(i);
    }
    if (PARTS > 1) {
        __syncwarp();
#pragma unroll
        for (int offset = QUADS; offset < 32; offset *= 2) {
            sum.x += __shfl_xor_sync(~0u, sum.x, offset);
            sum.y += __shfl_xor_sync(~0u, sum.y, offset);
            sum.z += __shfl_xor_sync(~0u, sum.z, offset);
            sum.w += __shfl_xor_sync(~0u, sum.w, offset);
        }
        if (QUADS >= 32 || lane < QUADS) sums[QUADS < 32 ? (int)threadIdx.x >> 5 : part][here] = sum;
        __syncthreads();
        if (threadIdx.x >= QUADS) return;
#pragma unroll
        for (int i = 1; i < GROUPS; ++i) {
            float4 y = sums[i][here];
            sum.x += y.x;
            sum.y += y.y;
            sum.z += y.z;
            sum.w += y.w;
        }
    }
    u32* to = (u32*)(out + (i64)row * LATENT + (quad >> 2) * 16 + (quad & 3) * 2);
    to[0] = pack_bf16(sum.x / norm, sum.y / norm);
    to[4] = pack_bf16(sum.z / norm, sum.w / norm);
}

}  // namespace

#define VERIFY_ATTN(NAME, M, SCORES)                                                              \
    extern "C" __global__ void __launch_bounds__(128, 2) NAME(                                    \
        const char* query,      /* [n, h, 576] bfloat16 */                                        \
        const char* rows,       /* [physical rows, 576] bfloat16, swizzled: this layer's */       \
        const i64* page_table,  /* [n_pages] */                                                   \
        const u32* bits,        /* [n, words] */                                                  \
        const i64* count,       /* [1] rows of the tree that count */                             \
        const i64* open_len,    /* [1] */                                                         \
        const i64* n_slots,     /* [1] */                                                         \
        float* acc,             /* [splits, n h, 512], columns in the order of the fragments */   \
        float* stats,           /* [n h, splits, 2] reference exponent, sum of 2^(score - it) */  \
        float* scores,          /* [n, h, score_stride] or null */                                \
        real* out,              /* [n, h, 512], or null: acc and stats */                         \
        i64 score_stride, float scale,  /* positive */                                            \
        int n_pages, int page_tiles,    /* tiles a page */                                        \
        int words, int n, int h) {                                                                \
        if (M == 1 || (int)blockIdx.x * 32 + 16 < n * h)                                          \
            attend<M, 16 * M, false, SCORES>(query, rows, page_table, n_pages, page_tiles, bits,  \
                                             words, count, open_len, n_slots, n, h, scale, acc,   \
                                             stats, scores, score_stride, out);                   \
        else                                                                                      \
            attend<1, 16 * M, true, SCORES>(query, rows, page_table, n_pages, page_tiles, bits,   \
                                            words, count, open_len, n_slots, n, h, scale, acc,    \
                                            stats, scores, score_stride, out);                    \
    }

VERIFY_ATTN(verify_attn_mma_32, 2, false)
VERIFY_ATTN(verify_attn_mma_16, 1, false)
VERIFY_ATTN(verify_attn_mma_32_scores, 2, true)
VERIFY_ATTN(verify_attn_mma_16_scores, 1, true)

#define MERGE(PARTS, BLOCKS)                                                                      \
    extern "C" __global__ void __launch_bounds__(MERGE_THREADS, BLOCKS)                           \
        verify_attn_mma_merge_##PARTS(                                                            \
        const float* acc,    /* [splits, n h, 512] */                                             \
        const float* stats,  /* [n h, splits, 2] */                                               \
        const i64* count,    /* [1] */                                                            \
        const i64* n_slots,  /* [1] */                                                            \
        real* out,           /* [n, h, 512] */                                                    \
        int most,            /* the splits that the grid was made for */                          \
        int keys,            /* slots a tile */                                                   \
        int heavy_rows,      /* rows from here on are those of a last block that is half empty */ \
        int n, int h) {                                                                           \
        merge<PARTS>(acc, stats, count, n_slots, out, most, keys, heavy_rows, n, h);              \
    }

// PARTS, and blocks that an SM should hold: few rows make few blocks, and many splits.
MERGE(1, 9)
MERGE(2, 9)
MERGE(4, 9)
MERGE(8, 9)
MERGE(16, 4)
MERGE(32, 4)
