// Causal attention within packed sequences: o = softmax(q·kᵀ/√D)·v and its gradient.
//
// q, o, do, dq [T, heads, D]; k, v, dk, dv [T, kv_heads, D]; lse, delta [heads, T] f32 (lse: natural
// logarithm of the sum of exponentials of scaled scores). bf16 with tensor cores (D 32, 64, 80, 96,
// 128, 256), or f32 and other widths with the plain kernels at the end. Key j is seen by query i of
// the same sequence iff i − window < j ≤ i.
//
// Products are summed in f32; the probabilities P and the score gradients dS are rounded to bf16
// before their products, as FlashAttention does. 2ˣ is ex2.approx.ftz: relative error 2⁻²².
// Deterministic: each output element belongs to one block that sums in a fixed order; no atomics.
//
// Launch: a block is a unit of the work list (4 u32: first token of the sequence, its length, first
// query or key of the block, 0), times a head in grid.y; units come longest first. Tiles that no
// query of a block sees are not visited.
// Two engines compute the products: mma.sync (sm_80 and up), and wgmma for D 64 and 128 (code for
// sm_90a); they hold accumulators alike, so the rest is shared.
// Tests: tests/kernels/attention_check.py (a GPU), tests/kernels/attention_emulated.cpp (none).

#ifndef ATTENTION_EMULATED
#include "attention_primitives.cuh"
#endif

#define LOG2E 1.4426950408889634f


// ---- Tiles in shared memory ------------------------------------------------------------------

// ROWS rows of D bf16, each padded by 16 bytes: a row is an odd number of 16-byte chunks, so that
// the eight rows of an ldmatrix touch all banks once.
template <int D, int ROWS> struct PaddedTile {
    static constexpr int ROW_BYTES = D * 2 + 16;
    static constexpr u32 BYTES = ROWS * ROW_BYTES;
    DEVICE u32 chunk(int row, int chunk) { return row * ROW_BYTES + chunk * 16; }
};

// ROWS rows of D bf16 in panels of 64 columns; within a panel row r's chunk c of 16 bytes is at
// c ^ (r % 8), the 128-byte swizzle that wgmma reads. The tile begins at a multiple of 1024 bytes.
template <int D, int ROWS> struct SwizzledTile {
    static constexpr u32 BYTES = ROWS * D * 2;
    DEVICE u32 chunk(int row, int chunk) {
        return (chunk / 8) * (ROWS * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
    }
};

// Starts the copy of rows first.. of a sequence (those at `length` and beyond become zeros).
// `matrix` points at the head's part of the sequence's first token, tokens are `stride` elements
// apart.
template <class Tile, int D, int ROWS, int THREADS>
DEVICE void load_rows(u32 tile, const u16* matrix, u64 stride, int first, int length) {
    constexpr int CHUNKS = D / 8;
    if constexpr (THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0) {
        // A thread's rows are STEP apart. A row that is not inside is not read.
        constexpr int STEP = THREADS / CHUNKS;
        const int top = THREAD / CHUNKS, chunk = THREAD % CHUNKS;
        const u16* from = matrix + (u64)(first + top) * stride + chunk * 8;
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP, from += STEP * stride)
            copy_16(tile + Tile::chunk(row + top, chunk), from, first + row + top < length);
    } else {
#pragma unroll
        for (int i = 0; i < (ROWS * CHUNKS + THREADS - 1) / THREADS; ++i) {
            const int index = i * THREADS + THREAD;
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            if (index >= ROWS * CHUNKS) break;
            const bool inside = first + row < length;
            const u64 token = inside ? first + row : 0;
            copy_16(tile + Tile::chunk(row, chunk), matrix + token * stride + chunk * 8, inside);
        }
    }
}

// ---- Products with mma.sync: a warp has 16 rows -----------------------------------------------

// Offset in a padded tile of the row that this lane gives to ldmatrix for an A operand, or for a B
// operand stored [k][n] and read transposed: rows lane % 16, the right 8 columns for lanes 16 up.
template <int ROW_BYTES> DEVICE u32 lane_offset_a() {
    return (LANE & 15) * ROW_BYTES + (LANE >> 4) * 16;
}

// The same for a pair of B operands stored [n][k]: n 0-7 then 8-15, each with its k 0-7 and 8-15.
template <int ROW_BYTES> DEVICE u32 lane_offset_b() {
    return ((LANE & 7) + ((LANE >> 4) << 3)) * ROW_BYTES + ((LANE >> 3) & 1) * 16;
}

template <int N> DEVICE void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
}

// c[16, 8·N] += a·bᵀ, a in registers, b a padded tile of 8·N rows; `b` is with the lane's offset.
template <int D, int N> DEVICE void multiply_transposed(float (&c)[N][4], const u32 (&a)[D / 16][4], u32 b) {
    constexpr int ROW_BYTES = PaddedTile<D, 1>::ROW_BYTES;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 f[4];
            load_matrices(f, b + n * 16 * ROW_BYTES + k * 32);
            mma(c[2 * n], a[k], f[0], f[1]);
            mma(c[2 * n + 1], a[k], f[2], f[3]);
        }
}

// The same with a in shared memory.
template <int D, int N> DEVICE void multiply_transposed(float (&c)[N][4], u32 a, u32 b) {
    constexpr int ROW_BYTES = PaddedTile<D, 1>::ROW_BYTES;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        u32 rows[4];
        load_matrices(rows, a + k * 32);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 f[4];
            load_matrices(f, b + n * 16 * ROW_BYTES + k * 32);
            mma(c[2 * n], rows, f[0], f[1]);
            mma(c[2 * n + 1], rows, f[2], f[3]);
        }
    }
}

// c[16, 8·N] += p[16, 8·M]·b, b rows of a padded tile of width D (with the lane's offset), columns
// from that offset.
template <int D, int M, int N> DEVICE void multiply(float (&c)[N][4], const u32 (&p)[M / 2][4], u32 b) {
    constexpr int ROW_BYTES = PaddedTile<D, 1>::ROW_BYTES;
#pragma unroll
    for (int k = 0; k < M / 2; ++k)
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 f[4];
            load_matrices_transposed(f, b + k * 16 * ROW_BYTES + n * 32);
            mma(c[2 * n], p[k], f[0], f[1]);
            mma(c[2 * n + 1], p[k], f[2], f[3]);
        }
}

// Accumulators of a product, rounded to bf16, as the A operand of the next.
template <int N> DEVICE void round_to_operand(u32 (&a)[N / 2][4], const float (&c)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        a[k][0] = pack_bf16(c[2 * k][0], c[2 * k][1]);
        a[k][1] = pack_bf16(c[2 * k][2], c[2 * k][3]);
        a[k][2] = pack_bf16(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = pack_bf16(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

// ---- Work, masks, softmax ---------------------------------------------------------------------

struct Problem {
    u64 tokens;
    int heads, kv_heads, window;
    float scale;  // of scores: 1/√D
};

struct Unit {
    u32 start;   // first token of the sequence
    int length;  // of the sequence
    int first;   // first query or key of the block, in the sequence
};

DEVICE Unit read_unit(const u32* units) {
    const u32* unit = units + 4 * (u64)BLOCK_X;
    return Unit{unit[0], (int)unit[1], (int)unit[2]};
}

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

// Whether some of queries i.. (`rows`) sees some of keys j.. (`columns`), and whether all see all.
DEVICE bool some_seen(int i, int rows, int j, int columns, int window) {
    return j <= i + rows - 1 && j + columns - 1 + window > i;
}
DEVICE bool all_seen(int i, int rows, int j, int columns, int window) {
    return j + columns - 1 <= i && j + window > i + rows - 1;
}

// Sets scores out of sight to `hidden`. The thread's first row is query i, its first column key j.
template <int N> DEVICE void mask(float (&s)[N][4], int i, int j, int window, float hidden) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int behind = (i + (e >> 1) * 8) - (j + n * 8 + (e & 1));
            if (behind < 0 || behind >= window) s[n][e] = hidden;
        }
}

// The same for transposed scores: the first row is key j, the first column query i.
template <int N> DEVICE void mask_transposed(float (&s)[N][4], int i, int j, int window, float hidden) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int behind = (i + n * 8 + (e & 1)) - (j + (e >> 1) * 8);
            if (behind < 0 || behind >= window) s[n][e] = hidden;
        }
}

// Running softmax of the thread's rows g and g + 8. `max` is a bound for the scores, not always the
// largest: it grows only when a score is more than 8 binary digits above it, so that rescaling is
// rare; probabilities then reach 2⁸ at most, and the division by the sum makes up for it.
struct Softmax {
    float max[2];
    float sum[2];  // of this thread's columns
};

// Whether rows of the warp need rescaling for the scores s; if so `factor` is by how much.
template <int N> DEVICE bool raise_max(Softmax& state, const float (&s)[N][4], float scale_log2, float (&factor)[2]) {
    float largest[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) largest[e >> 1] = fmaxf(largest[e >> 1], s[n][e]);
    bool raise = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 1));
        largest[r] = fmaxf(largest[r], shuffle_xor(largest[r], 2));
        raise = raise || (largest[r] - state.max[r]) * scale_log2 > 8.0f;
    }
    if (!any_lane(raise)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float max = fmaxf(state.max[r], largest[r]);
        factor[r] = max == MINUS_INFINITY ? 1.0f : exp2_approx((state.max[r] - max) * scale_log2);
        state.max[r] = max;
        state.sum[r] *= factor[r];
    }
    return true;
}

template <int N> DEVICE void rescale(float (&o)[N][4], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= factor[e >> 1];
}

// s = 2^(s·scale − max·scale), and the sums grow by it.
template <int N> DEVICE void exponentiate(Softmax& state, float (&s)[N][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float max = state.max[r] == MINUS_INFINITY ? 0.0f : state.max[r] * scale_log2;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = s[n][2 * r + e];
                x = exp2_approx(x * scale_log2 - max);
                sum += x;
            }
        state.sum[r] += sum;
    }
}

// Stores the warp's rows of c·factor[row / 8]; `row` is the thread's first, in the sequence.
template <int N> DEVICE void store_rows(u16* matrix, u64 stride, int row, int length, const float (&c)[N][4], const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= length) continue;
        u32* out = (u32*)(matrix + (u64)(row + 8 * r) * stride) + (LANE & 3);
#pragma unroll
        for (int n = 0; n < N; ++n)
            out[n * 4] = pack_bf16(c[n][2 * r] * factor[r], c[n][2 * r + 1] * factor[r]);
    }
}

// Stores o = c/sum and lse.
template <int N> DEVICE void store_forward(u16* o, u64 stride, float* lse, int row, int length, Softmax& state, const float (&c)[N][4], float scale) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = state.sum[r];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        factor[r] = 1.0f / sum;
        if ((LANE & 3) == 0 && row + 8 * r < length)
            lse[row + 8 * r] = state.max[r] * scale + logf(sum);
    }
    store_rows(o, stride, row, length, c, factor);
}

// ---- Forward, mma.sync ------------------------------------------------------------------------

// Pointers to the unit's sequence in each matrix: the head's part of its first token.
struct Offsets {
    u64 q_stride, k_stride;  // elements from a token to the next
    u64 q, k, row;           // offsets in matrices as q, as k, as lse
};

template <int D> DEVICE Offsets offsets(const Problem& p, const Unit& unit, int head, int kv_head) {
    Offsets at;
    at.q_stride = (u64)p.heads * D;
    at.k_stride = (u64)p.kv_heads * D;
    at.q = unit.start * at.q_stride + head * D;
    at.k = unit.start * at.k_stride + kv_head * D;
    at.row = head * p.tokens + unit.start;
    return at;
}

// Key tiles that queries first.. (`rows`) of a sequence see: the first, and the last.
DEVICE int first_key_tile(const Unit& unit, int keys, int window) { return most(0, unit.first + 1 - window) / keys; }
DEVICE int last_key_tile(const Unit& unit, int rows, int keys) { return (least(unit.length, unit.first + rows) - 1) / keys; }

// WARPS·16 queries a block, tiles of WARPS·8 keys in two stages. Up to D = 128, q is staged in the
// second stage's memory and held in registers; above, it has memory of its own.
template <int D, int WARPS>
DEVICE void forward(const u16* q, const u16* k, const u16* v, u16* o, float* lse, const u32* units, Problem p) {
    constexpr int THREADS = WARPS * 32, QUERIES = WARPS * 16, KEYS = WARPS * 8;
    constexpr bool HELD = D <= 128;
    typedef PaddedTile<D, KEYS> KeyTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int first_tile = first_key_tile(unit, KEYS, p.window);
    int tile = last_key_tile(unit, QUERIES, KEYS);
    const u32 memory = SHARED_MEMORY, q_tile = memory + (HELD ? 1 : 2) * STAGE;
    load_rows<PaddedTile<D, QUERIES>, D, QUERIES, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride, tile * KEYS, unit.length);
    copies_commit();
    copies_wait();
    block_barrier();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(), offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
    const u32 q_rows = q_tile + WARP * 16 * KeyTile::ROW_BYTES + offset_a;
    u32 queries[HELD ? D / 16 : 1][4];
    if constexpr (HELD) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) load_matrices(queries[i], q_rows + i * 32);
        block_barrier();
    }
    const int warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    float out[D / 8][4];
    clear(out);
    Softmax state = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
    for (u32 stage = 0; tile >= first_tile; --tile, stage ^= 1) {
        const u32 here = memory + stage * STAGE, there = memory + (stage ^ 1) * STAGE;
        if (tile > first_tile) {
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile - 1) * KEYS, unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride, (tile - 1) * KEYS, unit.length);
        }
        copies_commit();
        if (some_seen(warp_first, 16, tile * KEYS, KEYS, p.window)) {
            float s[KEYS / 8][4];
            clear(s);
            if constexpr (HELD) multiply_transposed<D>(s, queries, here + offset_b);
            else multiply_transposed<D>(s, q_rows, here + offset_b);
            if (!all_seen(warp_first, 16, tile * KEYS, KEYS, p.window))
                mask(s, row, tile * KEYS + (LANE & 3) * 2, p.window, MINUS_INFINITY);
            float factor[2];
            if (raise_max(state, s, scale_log2, factor)) rescale(out, factor);
            exponentiate(state, s, scale_log2);
            u32 rounded[KEYS / 16][4];
            round_to_operand(rounded, s);
            multiply<D, KEYS / 8>(out, rounded, here + KeyTile::BYTES + offset_a);
        }
        copies_wait();
        block_barrier();
    }
    store_forward(o + at.q, at.q_stride, lse + at.row, row, unit.length, state, out, p.scale);
}

// ---- Backward, mma.sync -----------------------------------------------------------------------
// With P = 2^(s·scale·log₂e − lse·log₂e) and dS = P·(do·vᵀ − delta):
// dq = scale·dS·k, dv = Pᵀ·do, dk = scale·dSᵀ·q.

// dp = p·(dp − delta), rows g and g + 8 with their own lse and delta.
template <int N> DEVICE void score_gradient(float (&s)[N][4], float (&dp)[N][4], float scale_log2, const float (&lse_log2)[2], const float (&delta)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = exp2_approx(s[n][e] * scale_log2 - lse_log2[e >> 1]);
            dp[n][e] = s[n][e] * (dp[n][e] - delta[e >> 1]);
        }
}

// The transposed P: each column has its own lse, in shared memory.
template <int N> DEVICE void probabilities_transposed(float (&s)[N][4], float scale_log2, u32 lse) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 l = load_pair(lse + (n * 8 + (LANE & 3) * 2) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(s[n][e] * scale_log2 - (e & 1 ? l.y : l.x) * LOG2E);
    }
}

template <int N> DEVICE void score_gradient_transposed(float (&p)[N][4], float (&dp)[N][4], u32 delta) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 d = load_pair(delta + (n * 8 + (LANE & 3) * 2) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] = p[n][e] * (dp[n][e] - (e & 1 ? d.y : d.x));
    }
}

// lse·log₂e and delta of the thread's rows; rows beyond the sequence get values that do no harm.
DEVICE void read_rows(float (&lse_log2)[2], float (&delta)[2], const float* lses, const float* deltas, int row, int length) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < length;
        lse_log2[r] = inside ? lses[row + 8 * r] * LOG2E : 0.0f;
        delta[r] = inside ? deltas[row + 8 * r] : 0.0f;
    }
}

// dq: WARPS·16 queries a block, tiles of KEYS keys in two stages.
template <int D, int WARPS, int KEYS>
DEVICE void backward_queries(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq, const u32* units, Problem p) {
    constexpr int THREADS = WARPS * 32, QUERIES = WARPS * 16;
    typedef PaddedTile<D, KEYS> KeyTile;
    typedef PaddedTile<D, QUERIES> QueryTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int last_tile = last_key_tile(unit, QUERIES, KEYS);
    int tile = first_key_tile(unit, KEYS, p.window);
    const u32 q_tile = SHARED_MEMORY, do_tile = q_tile + QueryTile::BYTES, memory = do_tile + QueryTile::BYTES;
    load_rows<QueryTile, D, QUERIES, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<QueryTile, D, QUERIES, THREADS>(do_tile, dout + at.q, at.q_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride, tile * KEYS, unit.length);
    copies_commit();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(), offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
    const u32 rows = WARP * 16 * KeyTile::ROW_BYTES + offset_a;
    const int warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    float lse_log2[2], row_delta[2];
    read_rows(lse_log2, row_delta, lse + at.row, delta + at.row, row, unit.length);
    float out[D / 8][4];
    clear(out);
    copies_wait();
    block_barrier();
    for (u32 stage = 0; tile <= last_tile; ++tile, stage ^= 1) {
        const u32 here = memory + stage * STAGE, there = memory + (stage ^ 1) * STAGE;
        if (tile < last_tile) {
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile + 1) * KEYS, unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride, (tile + 1) * KEYS, unit.length);
        }
        copies_commit();
        if (some_seen(warp_first, 16, tile * KEYS, KEYS, p.window)) {
            float s[KEYS / 8][4], ds[KEYS / 8][4];
            clear(s);
            clear(ds);
            multiply_transposed<D>(s, q_tile + rows, here + offset_b);
            multiply_transposed<D>(ds, do_tile + rows, here + KeyTile::BYTES + offset_b);
            if (!all_seen(warp_first, 16, tile * KEYS, KEYS, p.window))
                mask(s, row, tile * KEYS + (LANE & 3) * 2, p.window, MINUS_INFINITY);
            score_gradient(s, ds, scale_log2, lse_log2, row_delta);
            u32 rounded[KEYS / 16][4];
            round_to_operand(rounded, ds);
            multiply<D, KEYS / 8>(out, rounded, here + offset_a);
        }
        copies_wait();
        block_barrier();
    }
    const float factor[2] = {p.scale, p.scale};
    store_rows(dq + at.q, at.q_stride, row, unit.length, out, factor);
}

// Starts the copies of q, do, lse and delta of queries first.. of one head into a stage.
template <class Tile, int D, int QUERIES, int THREADS>
DEVICE void load_queries(u32 stage, const u16* q, const u16* dout, const float* lse, const float* delta, const Offsets& at, int first, int length) {
    load_rows<Tile, D, QUERIES, THREADS>(stage, q + at.q, at.q_stride, first, length);
    load_rows<Tile, D, QUERIES, THREADS>(stage + Tile::BYTES, dout + at.q, at.q_stride, first, length);
    if (THREAD < QUERIES) {
        const bool inside = first + THREAD < length;
        const u64 row = at.row + (inside ? first + THREAD : 0);
        const u32 to = stage + 2 * Tile::BYTES + THREAD * 4;
        copy_4(to, lse + row, inside);
        copy_4(to + QUERIES * 4, delta + row, inside);
    }
}

// dk and dv: WARPS·16 keys a block; over the heads of the group, and in each over tiles of QUERIES
// queries, in two stages. Everything is transposed: rows are keys. A block has SLICE columns of dk
// and dv (grid.z counts them), for all would not fit in registers above D = 128.
template <int D, int WARPS, int QUERIES, int SLICE>
DEVICE void backward_keys(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dk, u16* dv, const u32* units, Problem p) {
    constexpr int THREADS = WARPS * 32, KEYS = WARPS * 16;
    typedef PaddedTile<D, KEYS> KeyTile;
    typedef PaddedTile<D, QUERIES> QueryTile;
    constexpr u32 STAGE = 2 * QueryTile::BYTES + 2 * QUERIES * 4;
    const Unit unit = read_unit(units);
    const int group = p.heads / p.kv_heads;
    Offsets at = offsets<D>(p, unit, BLOCK_Y * group, BLOCK_Y);
    const int first_tile = unit.first / QUERIES;
    const int seen_end = least(unit.length, least(unit.length, unit.first + KEYS) - 1 + p.window);
    const int tiles = (seen_end + QUERIES - 1) / QUERIES - first_tile;
    const u32 k_tile = SHARED_MEMORY, v_tile = k_tile + KeyTile::BYTES, memory = v_tile + KeyTile::BYTES;
    load_rows<KeyTile, D, KEYS, THREADS>(k_tile, k + at.k, at.k_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(v_tile, v + at.k, at.k_stride, unit.first, unit.length);
    load_queries<QueryTile, D, QUERIES, THREADS>(memory, q, dout, lse, delta, at, first_tile * QUERIES, unit.length);
    copies_commit();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(), offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
    const u32 rows = WARP * 16 * KeyTile::ROW_BYTES + offset_a;
    const int warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    const u32 slice = BLOCK_Z * SLICE * 2;
    float dk_rows[SLICE / 8][4], dv_rows[SLICE / 8][4];
    clear(dk_rows);
    clear(dv_rows);
    copies_wait();
    block_barrier();
    int tile = 0;
    for (int left = group * tiles; left > 0; --left) {
        const u32 stage = (left ^ (group * tiles)) & 1;
        const u32 here = memory + stage * STAGE, there = memory + (stage ^ 1) * STAGE;
        const int first = (first_tile + tile) * QUERIES;
        if (++tile == tiles) {
            tile = 0;
            at.q += D;
            at.row += p.tokens;
        }
        if (left > 1) load_queries<QueryTile, D, QUERIES, THREADS>(there, q, dout, lse, delta, at, (first_tile + tile) * QUERIES, unit.length);
        copies_commit();
        if (some_seen(first, QUERIES, warp_first, 16, p.window)) {
            const u32 lses = here + 2 * QueryTile::BYTES;
            float s[QUERIES / 8][4], ds[QUERIES / 8][4];
            u32 rounded[QUERIES / 16][4];
            clear(s);
            clear(ds);
            multiply_transposed<D>(s, k_tile + rows, here + offset_b);
            if (!all_seen(first, QUERIES, warp_first, 16, p.window))
                mask_transposed(s, first + (LANE & 3) * 2, row, p.window, MINUS_INFINITY);
            probabilities_transposed(s, scale_log2, lses);
            multiply_transposed<D>(ds, v_tile + rows, here + QueryTile::BYTES + offset_b);
            score_gradient_transposed(s, ds, lses + QUERIES * 4);
            round_to_operand(rounded, s);
            multiply<D, QUERIES / 8>(dv_rows, rounded, here + QueryTile::BYTES + offset_a + slice);
            round_to_operand(rounded, ds);
            multiply<D, QUERIES / 8>(dk_rows, rounded, here + offset_a + slice);
        }
        copies_wait();
        block_barrier();
    }
    const float factor[2] = {p.scale, p.scale}, one[2] = {1.0f, 1.0f};
    store_rows(dk + at.k + BLOCK_Z * SLICE, at.k_stride, row, unit.length, dk_rows, factor);
    store_rows(dv + at.k + BLOCK_Z * SLICE, at.k_stride, row, unit.length, dv_rows, one);
}

// ---- wgmma: a warpgroup of four warps has 64 rows ---------------------------------------------
#ifdef ATTENTION_WGMMA

// Matrix descriptor of a swizzled tile (PTX ISA, "Matrix-descriptor-format"): address, distance of
// panels (for operands stored [k][n]; ignored for [rows][k]), of groups of eight rows; all / 16.
DEVICE u64 descriptor(u32 address, u32 panel_bytes) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Issues c[64, 8·N] = a·bᵀ: a from row `a_row` of a tile of A_ROWS rows, b a tile of 8·N rows.
template <int D, int A_ROWS, int N> DEVICE void issue_transposed(float (&c)[N][4], u32 a, int a_row, u32 b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const u32 inside = (k % 4) * 32;
        wgmma_shared(c, descriptor(a + (k / 4) * A_ROWS * 128 + a_row * 128 + inside, 16),
                     descriptor(b + (k / 4) * N * 8 * 128 + inside, 16), k > 0);
    }
}

// Issues c[64, D] += p[64, 8·M]·b, b a tile of 8·M rows.
template <int D, int M> DEVICE void issue(float (&c)[D / 8][4], const u32 (&p)[M / 2][4], u32 b) {
#pragma unroll
    for (int k = 0; k < M / 2; ++k) wgmma_registers(c, p[k], descriptor(b + k * 16 * 128, M * 8 * 128));
}

// 128 queries a block, tiles of 128 keys. The scores of a tile are computed while the tile before
// is weighed, so k runs a tile ahead of v; each has two buffers.
template <int D>
DEVICE void forward_wgmma(const u16* q, const u16* k, const u16* v, u16* o, float* lse, const u32* units, Problem p) {
    constexpr int THREADS = 256, ROWS = 128, N = ROWS / 8;
    typedef SwizzledTile<D, ROWS> Tile;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int first_tile = first_key_tile(unit, ROWS, p.window);
    int tile = last_key_tile(unit, ROWS, ROWS);
    const u32 q_tile = SHARED_MEMORY, k_tiles = q_tile + Tile::BYTES, v_tiles = k_tiles + 2 * Tile::BYTES;
    load_rows<Tile, D, ROWS, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<Tile, D, ROWS, THREADS>(k_tiles, k + at.k, at.k_stride, tile * ROWS, unit.length);
    load_rows<Tile, D, ROWS, THREADS>(v_tiles, v + at.k, at.k_stride, tile * ROWS, unit.length);
    if (tile > first_tile) load_rows<Tile, D, ROWS, THREADS>(k_tiles + Tile::BYTES, k + at.k, at.k_stride, (tile - 1) * ROWS, unit.length);
    copies_commit();
    copies_wait();
    publish_to_wgmma();
    block_barrier();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4, column = (LANE & 3) * 2;
    const float scale_log2 = p.scale * LOG2E;
    float out[D / 8][4], s[N][4], factor[2];
    u32 rounded[N / 2][4];
    clear(out);
    clear(s);
    Softmax state = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
    pin(s);
    wgmma_fence();
    issue_transposed<D, ROWS>(s, q_tile, group_row, k_tiles);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    mask(s, row, tile * ROWS + column, p.window, MINUS_INFINITY);
    raise_max(state, s, scale_log2, factor);
    exponentiate(state, s, scale_log2);
    round_to_operand(rounded, s);
    u32 stage = 0;
    for (; tile > first_tile; --tile, stage ^= 1) {
        const u32 here = stage * Tile::BYTES, there = (stage ^ 1) * Tile::BYTES;
        wgmma_fence();
        issue_transposed<D, ROWS>(s, q_tile, group_row, k_tiles + there);
        wgmma_commit();
        issue<D, N>(out, rounded, v_tiles + here);
        wgmma_commit();
        if (tile - 1 > first_tile) load_rows<Tile, D, ROWS, THREADS>(k_tiles + here, k + at.k, at.k_stride, (tile - 2) * ROWS, unit.length);
        load_rows<Tile, D, ROWS, THREADS>(v_tiles + there, v + at.k, at.k_stride, (tile - 1) * ROWS, unit.length);
        copies_commit();
        wgmma_wait<1>();
        pin(s);
        if (!all_seen(warp_first, 16, (tile - 1) * ROWS, ROWS, p.window))
            mask(s, row, (tile - 1) * ROWS + column, p.window, MINUS_INFINITY);
        const bool raised = raise_max(state, s, scale_log2, factor);
        exponentiate(state, s, scale_log2);
        wgmma_wait<0>();
        pin(out);
        if (raised) rescale(out, factor);
        round_to_operand(rounded, s);
        copies_wait();
        publish_to_wgmma();
        block_barrier();
    }
    wgmma_fence();
    issue<D, N>(out, rounded, v_tiles + stage * Tile::BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    pin(out);
    store_forward(o + at.q, at.q_stride, lse + at.row, row, unit.length, state, out, p.scale);
}

// dq: 128 queries a block, tiles of KEYS keys in two stages. Every product is waited for in the
// loop's turn that issued it: the compiler orders wgmma one by one if its accumulators are pending
// around the loop. The other warpgroup has the tensor cores meanwhile.
template <int D, int KEYS>
DEVICE void backward_queries_wgmma(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq, const u32* units, Problem p) {
    constexpr int THREADS = 256, ROWS = 128, N = KEYS / 8;
    typedef SwizzledTile<D, KEYS> KeyTile;
    typedef SwizzledTile<D, ROWS> QueryTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int last_tile = last_key_tile(unit, ROWS, KEYS);
    int tile = first_key_tile(unit, KEYS, p.window);
    const u32 q_tile = SHARED_MEMORY, do_tile = q_tile + QueryTile::BYTES, memory = do_tile + QueryTile::BYTES;
    load_rows<QueryTile, D, ROWS, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<QueryTile, D, ROWS, THREADS>(do_tile, dout + at.q, at.q_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride, tile * KEYS, unit.length);
    copies_commit();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    float lse_log2[2], row_delta[2];
    read_rows(lse_log2, row_delta, lse + at.row, delta + at.row, row, unit.length);
    float out[D / 8][4], s[N][4], ds[N][4];
    u32 rounded[N / 2][4];
    clear(out);
    clear(s);
    clear(ds);
    copies_wait();
    publish_to_wgmma();
    block_barrier();
    for (u32 here = memory; tile <= last_tile; ++tile) {
        const u32 there = here == memory ? memory + STAGE : memory;
        wgmma_fence();
        issue_transposed<D, ROWS>(s, q_tile, group_row, here);
        wgmma_commit();
        issue_transposed<D, ROWS>(ds, do_tile, group_row, here + KeyTile::BYTES);
        wgmma_commit();
        if (tile < last_tile) {
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile + 1) * KEYS, unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride, (tile + 1) * KEYS, unit.length);
        }
        copies_commit();
        wgmma_wait<0>();
        pin(s);
        pin(ds);
        if (!all_seen(warp_first, 16, tile * KEYS, KEYS, p.window))
            mask(s, row, tile * KEYS + (LANE & 3) * 2, p.window, MINUS_INFINITY);
        score_gradient(s, ds, scale_log2, lse_log2, row_delta);
        round_to_operand(rounded, ds);
        wgmma_fence();
        issue<D, N>(out, rounded, here);
        wgmma_commit();
        wgmma_wait<0>();
        pin(out);
        copies_wait();
        publish_to_wgmma();
        block_barrier();
        here = there;
    }
    const float factor[2] = {p.scale, p.scale};
    store_rows(dq + at.q, at.q_stride, row, unit.length, out, factor);
}

// dk and dv: 128 keys a block, tiles of QUERIES queries in two stages.
template <int D, int QUERIES>
DEVICE void backward_keys_wgmma(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dk, u16* dv, const u32* units, Problem p) {
    constexpr int THREADS = 256, KEYS = 128, N = QUERIES / 8;
    typedef SwizzledTile<D, KEYS> KeyTile;
    typedef SwizzledTile<D, QUERIES> QueryTile;
    constexpr u32 STAGE = 2 * QueryTile::BYTES + 1024;
    const Unit unit = read_unit(units);
    const int group = p.heads / p.kv_heads;
    Offsets at = offsets<D>(p, unit, BLOCK_Y * group, BLOCK_Y);
    const int first_tile = unit.first / QUERIES;
    const int seen_end = least(unit.length, least(unit.length, unit.first + KEYS) - 1 + p.window);
    const int tiles = (seen_end + QUERIES - 1) / QUERIES - first_tile;
    const u32 k_tile = SHARED_MEMORY, v_tile = k_tile + KeyTile::BYTES, memory = v_tile + KeyTile::BYTES;
    load_rows<KeyTile, D, KEYS, THREADS>(k_tile, k + at.k, at.k_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(v_tile, v + at.k, at.k_stride, unit.first, unit.length);
    load_queries<QueryTile, D, QUERIES, THREADS>(memory, q, dout, lse, delta, at, first_tile * QUERIES, unit.length);
    copies_commit();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16, row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    float dk_rows[D / 8][4], dv_rows[D / 8][4], s[N][4], ds[N][4];
    u32 p_rounded[N / 2][4], ds_rounded[N / 2][4];
    clear(dk_rows);
    clear(dv_rows);
    clear(s);
    clear(ds);
    copies_wait();
    publish_to_wgmma();
    block_barrier();
    int tile = 0;
    u32 here = memory;
    for (int left = group * tiles; left > 0; --left) {
        const u32 there = here == memory ? memory + STAGE : memory;
        const int first = (first_tile + tile) * QUERIES;
        const u32 lses = here + 2 * QueryTile::BYTES;
        wgmma_fence();
        issue_transposed<D, KEYS>(s, k_tile, group_row, here);
        wgmma_commit();
        issue_transposed<D, KEYS>(ds, v_tile, group_row, here + QueryTile::BYTES);
        wgmma_commit();
        if (++tile == tiles) {
            tile = 0;
            at.q += D;
            at.row += p.tokens;
        }
        if (left > 1) load_queries<QueryTile, D, QUERIES, THREADS>(there, q, dout, lse, delta, at, (first_tile + tile) * QUERIES, unit.length);
        copies_commit();
        wgmma_wait<1>();
        pin(s);
        if (!all_seen(first, QUERIES, warp_first, 16, p.window))
            mask_transposed(s, first + (LANE & 3) * 2, row, p.window, MINUS_INFINITY);
        probabilities_transposed(s, scale_log2, lses);
        round_to_operand(p_rounded, s);
        wgmma_wait<0>();
        pin(ds);
        wgmma_fence();
        issue<D, N>(dv_rows, p_rounded, here + QueryTile::BYTES);
        wgmma_commit();
        score_gradient_transposed(s, ds, lses + QUERIES * 4);
        round_to_operand(ds_rounded, ds);
        wgmma_fence();
        issue<D, N>(dk_rows, ds_rounded, here);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dk_rows);
        pin(dv_rows);
        copies_wait();
        publish_to_wgmma();
        block_barrier();
        here = there;
    }
    const float factor[2] = {p.scale, p.scale}, one[2] = {1.0f, 1.0f};
    store_rows(dk + at.k, at.k_stride, row, unit.length, dk_rows, factor);
    store_rows(dv + at.k, at.k_stride, row, unit.length, dv_rows, one);
}
#endif

// ---- Plain kernels: f32, and bf16 of other widths ---------------------------------------------
// A warp has one row; lane l has elements l, l + 32, … of it. Slow, any width.

DEVICE float widen(float x) { return x; }
DEVICE float widen(u16 x) { return bits_to_float((u32)x << 16); }
DEVICE void narrow(float& out, float x) { out = x; }
DEVICE void narrow(u16& out, float x) { out = (u16)pack_bf16(x, 0.0f); }

DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

template <class T> DEVICE float dot(const T* a, const T* b, int width) {
    float sum = 0.0f;
    for (int d = LANE; d < width; d += 32) sum += widen(a[d]) * widen(b[d]);
    return sum_of_warp(sum);
}

// The sequence of a token, by bisection of its bounds.
DEVICE Unit sequence_of(const u32* bounds, int sequences, int token) {
    int low = 0, high = sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (bounds[middle] <= (u32)token) low = middle;
        else high = middle - 1;
    }
    return Unit{bounds[low], (int)(bounds[low + 1] - bounds[low]), (int)(token - bounds[low])};
}

// delta = Σ do·o of each token and head; a warp each.
template <class T> DEVICE void row_delta(const T* o, const T* dout, float* delta, int width, Problem p) {
    const u64 token = (u64)BLOCK_X * 4 + WARP;
    if (token >= p.tokens) return;
    const u64 at = (token * p.heads + BLOCK_Y) * width;
    const float sum = dot(o + at, dout + at, width);
    if (LANE == 0) delta[BLOCK_Y * p.tokens + token] = sum;
}

template <class T> DEVICE void plain_forward(const T* q, const T* k, const T* v, T* o, float* lse, const u32* bounds, int sequences, int width, Problem p) {
    const u64 token = (u64)BLOCK_X * 4 + WARP;
    if (token >= p.tokens) return;
    const Unit unit = sequence_of(bounds, sequences, (int)token);
    const int kv_head = BLOCK_Y / (p.heads / p.kv_heads);
    float* sums = shared_floats() + WARP * width;
    q += (token * p.heads + BLOCK_Y) * width;
    for (int d = LANE; d < width; d += 32) sums[d] = 0.0f;
    float max = MINUS_INFINITY, sum = 0.0f;
    for (int j = most(0, unit.first + 1 - p.window); j <= unit.first; ++j) {
        const u64 at = ((u64)(unit.start + j) * p.kv_heads + kv_head) * width;
        const float s = dot(q, k + at, width) * p.scale;
        const float larger = fmaxf(max, s), shrink = expf(max - larger), weight = expf(s - larger);
        max = larger;
        sum = sum * shrink + weight;
        for (int d = LANE; d < width; d += 32) sums[d] = sums[d] * shrink + weight * widen(v[at + d]);
    }
    o += (token * p.heads + BLOCK_Y) * width;
    for (int d = LANE; d < width; d += 32) narrow(o[d], sums[d] / sum);
    if (LANE == 0) lse[BLOCK_Y * p.tokens + token] = max + logf(sum);
}

template <class T> DEVICE void plain_queries(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, const u32* bounds, int sequences, int width, Problem p) {
    const u64 token = (u64)BLOCK_X * 4 + WARP;
    if (token >= p.tokens) return;
    const Unit unit = sequence_of(bounds, sequences, (int)token);
    const int kv_head = BLOCK_Y / (p.heads / p.kv_heads);
    float* sums = shared_floats() + WARP * width;
    const u64 row = (token * p.heads + BLOCK_Y) * width, at_row = BLOCK_Y * p.tokens + token;
    for (int d = LANE; d < width; d += 32) sums[d] = 0.0f;
    for (int j = most(0, unit.first + 1 - p.window); j <= unit.first; ++j) {
        const u64 at = ((u64)(unit.start + j) * p.kv_heads + kv_head) * width;
        const float weight = expf(dot(q + row, k + at, width) * p.scale - lse[at_row]);
        const float ds = weight * (dot(dout + row, v + at, width) - delta[at_row]);
        for (int d = LANE; d < width; d += 32) sums[d] += ds * widen(k[at + d]);
    }
    for (int d = LANE; d < width; d += 32) narrow(dq[row + d], sums[d] * p.scale);
}

template <class T> DEVICE void plain_keys(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, const u32* bounds, int sequences, int width, Problem p) {
    const u64 token = (u64)BLOCK_X * 4 + WARP;
    if (token >= p.tokens) return;
    const Unit unit = sequence_of(bounds, sequences, (int)token);
    const int group = p.heads / p.kv_heads;
    float *k_sums = shared_floats() + WARP * 2 * width, *v_sums = k_sums + width;
    const u64 row = (token * p.kv_heads + BLOCK_Y) * width;
    for (int d = LANE; d < 2 * width; d += 32) k_sums[d] = 0.0f;
    warp_barrier();
    const int end = least(unit.length, unit.first + p.window);
    for (int head = BLOCK_Y * group; head < (BLOCK_Y + 1) * group; ++head) {
        for (int i = unit.first; i < end; ++i) {
            const u64 at = ((u64)(unit.start + i) * p.heads + head) * width, at_row = head * p.tokens + unit.start + i;
            const float weight = expf(dot(q + at, k + row, width) * p.scale - lse[at_row]);
            const float ds = weight * (dot(dout + at, v + row, width) - delta[at_row]);
            for (int d = LANE; d < width; d += 32) {
                k_sums[d] += ds * widen(q[at + d]);
                v_sums[d] += weight * widen(dout[at + d]);
            }
        }
    }
    for (int d = LANE; d < width; d += 32) {
        narrow(dk[row + d], k_sums[d] * p.scale);
        narrow(dv[row + d], v_sums[d]);
    }
}

// ---- Entry points -----------------------------------------------------------------------------

#define PROBLEM_ARGUMENTS u64 tokens, int heads, int kv_heads, int window, float scale
#define PROBLEM (Problem{tokens, heads, kv_heads, window, scale})
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

// Warps of forward; warps and keys of a tile of dq; queries of a tile and columns of dk, dv.
// Grids: (units of 16·warps queries, heads), the same, (units of 64 keys, kv_heads, D / columns).
#define TENSOR_KERNELS(D, FORWARD_WARPS, KEYS, QUERIES, SLICE) \
    KERNEL(FORWARD_WARPS * 32) attention_forward_##D(const u16* q, const u16* k, const u16* v, u16* o, float* lse, const u32* units, PROBLEM_ARGUMENTS) { \
        forward<D, FORWARD_WARPS>(q, k, v, o, lse, units, PROBLEM); \
    } \
    KERNEL(128) attention_backward_queries_##D(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq, const u32* units, PROBLEM_ARGUMENTS) { \
        backward_queries<D, 4, KEYS>(q, k, v, dout, lse, delta, dq, units, PROBLEM); \
    } \
    KERNEL(128) attention_backward_keys_##D(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dk, u16* dv, const u32* units, PROBLEM_ARGUMENTS) { \
        backward_keys<D, 4, QUERIES, SLICE>(q, k, v, dout, lse, delta, dk, dv, units, PROBLEM); \
    }

TENSOR_KERNELS(32, 8, 64, 64, 32)
TENSOR_KERNELS(64, 8, 64, 64, 64)
TENSOR_KERNELS(80, 8, 64, 32, 80)
TENSOR_KERNELS(96, 8, 64, 32, 96)
TENSOR_KERNELS(128, 8, 32, 32, 128)
TENSOR_KERNELS(256, 4, 16, 16, 128)

// Grids: (units of 128 queries, heads), the same, (units of 128 keys, kv_heads).
#ifdef ATTENTION_WGMMA
#define WGMMA_KERNELS(D, KEYS, QUERIES) \
    KERNEL(256) attention_forward_wgmma_##D(const u16* q, const u16* k, const u16* v, u16* o, float* lse, const u32* units, PROBLEM_ARGUMENTS) { \
        forward_wgmma<D>(q, k, v, o, lse, units, PROBLEM); \
    } \
    KERNEL(256) attention_backward_queries_wgmma_##D(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dq, const u32* units, PROBLEM_ARGUMENTS) { \
        backward_queries_wgmma<D, KEYS>(q, k, v, dout, lse, delta, dq, units, PROBLEM); \
    } \
    KERNEL(256) attention_backward_keys_wgmma_##D(const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta, u16* dk, u16* dv, const u32* units, PROBLEM_ARGUMENTS) { \
        backward_keys_wgmma<D, QUERIES>(q, k, v, dout, lse, delta, dk, dv, units, PROBLEM); \
    }

WGMMA_KERNELS(64, 128, 64)
WGMMA_KERNELS(128, 64, 64)
#endif

// Four rows a block; grids (⌈T / 4⌉, heads), and kv_heads for keys. Shared memory: 4·D floats, and
// 8·D for keys.
#define PLAIN_KERNELS(NAME, T) \
    KERNEL(128) attention_delta_##NAME(const T* o, const T* dout, float* delta, int width, PROBLEM_ARGUMENTS) { \
        row_delta<T>(o, dout, delta, width, PROBLEM); \
    } \
    KERNEL(128) attention_forward_plain_##NAME(const T* q, const T* k, const T* v, T* o, float* lse, const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS) { \
        plain_forward<T>(q, k, v, o, lse, bounds, sequences, width, PROBLEM); \
    } \
    KERNEL(128) attention_backward_queries_plain_##NAME(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS) { \
        plain_queries<T>(q, k, v, dout, lse, delta, dq, bounds, sequences, width, PROBLEM); \
    } \
    KERNEL(128) attention_backward_keys_plain_##NAME(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS) { \
        plain_keys<T>(q, k, v, dout, lse, delta, dk, dv, bounds, sequences, width, PROBLEM); \
    }

PLAIN_KERNELS(bf16, u16)
PLAIN_KERNELS(f32, float)
