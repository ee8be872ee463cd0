// What the kernels of attention share: the problem, units of work, tiles in shared memory, masks,
// the running softmax, the scores' gradient, results to memory. Accumulators are held as by
// mma.m16n8k16 and wgmma have them: with g = lane / 4 and t = lane % 4, c[n] is (g, 2t),
// (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1) of the warp's n-th 16×8 block.
#pragma once

#define LOG2E 1.4426950408889634f

// ---- Work -------------------------------------------------------------------------------------

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

DEVICE Unit read_unit(const u32* units)
{
    const u32* unit = units + 4 * (u64)BLOCK_X;
    return Unit{unit[0], (int)unit[1], (int)unit[2]};
}

DEVICE int least(int a, int b)
{
    return a < b ? a : b;
}
DEVICE int most(int a, int b)
{
    return a > b ? a : b;
}

// Pointers to the unit's sequence in each matrix: the head's part of its first token.
struct Offsets {
    u64 q_stride, k_stride;  // elements from a token to the next
    u64 q, k, row;           // offsets in matrices as q, as k, as lse
};

template <int D>
DEVICE Offsets offsets(const Problem& p, const Unit& unit, int head, int kv_head)
{
    Offsets at;
    at.q_stride = (u64)p.heads * D;
    at.k_stride = (u64)p.kv_heads * D;
    at.q = unit.start * at.q_stride + head * D;
    at.k = unit.start * at.k_stride + kv_head * D;
    at.row = head * p.tokens + unit.start;
    return at;
}

// Key tiles that queries first.. (`rows`) of a sequence see: the first, and the last.
DEVICE int first_key_tile(const Unit& unit, int keys, int window)
{
    return most(0, unit.first + 1 - window) / keys;
}
DEVICE int last_key_tile(const Unit& unit, int rows, int keys)
{
    return (least(unit.length, unit.first + rows) - 1) / keys;
}

// ---- Tiles in shared memory ------------------------------------------------------------------

// ROWS rows of D bf16, each padded by 16 bytes: a row is an odd number of 16-byte chunks, so that
// the eight rows of an ldmatrix touch all banks once. The padding of row r holds the f32 sums (lse
// or delta) of rows 4r..4r + 3 where a kernel has some.
template <int D, int ROWS>
struct PaddedTile {
    static constexpr int ROW_BYTES = D * 2 + 16;
    static constexpr u32 BYTES = ROWS * ROW_BYTES;
    DEVICE u32 chunk(int row, int chunk) { return row * ROW_BYTES + chunk * 16; }
    static constexpr u32 SUMS = D * 2;
};

// ROWS rows of D bf16 in panels of 64 columns; within a panel row r's chunk c of 16 bytes is at
// c ^ (r % 8), the 128-byte swizzle that wgmma reads. The tile begins at a multiple of 1024 bytes.
template <int D, int ROWS>
struct SwizzledTile {
    static constexpr u32 BYTES = ROWS * D * 2;
    DEVICE u32 chunk(int row, int chunk)
    {
        return (chunk / 8) * (ROWS * 128) + row * 128 + (((chunk % 8) ^ (row % 8)) * 16);
    }
};

// Starts the copy of rows first.. of a sequence (those at `length` and beyond become zeros).
// `matrix` points at the head's part of the sequence's first token, tokens are `stride` elements
// apart.
template <class Tile, int D, int ROWS, int THREADS>
DEVICE void load_rows(u32 tile, const u16* matrix, u64 stride, int first, int length)
{
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

// Starts the copies of q, do, lse and delta of queries first.. of one head into a stage, two padded
// tiles.
template <class Tile, int D, int QUERIES, int THREADS>
DEVICE void load_queries(u32 stage, const u16* q, const u16* dout, const float* lse,
                         const float* delta, const Offsets& at, int first, int length)
{
    load_rows<Tile, D, QUERIES, THREADS>(stage, q + at.q, at.q_stride, first, length);
    load_rows<Tile, D, QUERIES, THREADS>(stage + Tile::BYTES, dout + at.q, at.q_stride, first,
                                         length);
    if (THREAD < QUERIES) {
        const bool inside = first + THREAD < length;
        const u64 row = at.row + (inside ? first + THREAD : 0);
        const u32 to = stage + Tile::SUMS + THREAD / 4 * Tile::ROW_BYTES + THREAD % 4 * 4;
        copy_4(to, lse + row, inside);
        copy_4(to + Tile::BYTES, delta + row, inside);
    }
}

// ---- Accumulators ------------------------------------------------------------------------------

template <int N>
DEVICE void clear(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
}

// Accumulators of a product, rounded to bf16, as the A operand of the next.
template <int N>
DEVICE void round_to_operand(u32 (&a)[N / 2][4], const float (&c)[N][4])
{
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        a[k][0] = pack_bf16(c[2 * k][0], c[2 * k][1]);
        a[k][1] = pack_bf16(c[2 * k][2], c[2 * k][3]);
        a[k][2] = pack_bf16(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = pack_bf16(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

// ---- Masks and softmax -------------------------------------------------------------------------

// Whether some of queries i.. (`rows`) sees some of keys j.. (`columns`), and whether all see all.
DEVICE bool some_seen(int i, int rows, int j, int columns, int window)
{
    return j <= i + rows - 1 && j + columns - 1 + window > i;
}
DEVICE bool all_seen(int i, int rows, int j, int columns, int window)
{
    return j + columns - 1 <= i && j + window > i + rows - 1;
}

// Sets scores out of sight to `hidden`. The thread's first row is query i, its first column key j.
template <int N>
DEVICE void mask(float (&s)[N][4], int i, int j, int window, float hidden)
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int behind = (i + (e >> 1) * 8) - (j + n * 8 + (e & 1));
            if (behind < 0 || behind >= window) s[n][e] = hidden;
        }
}

// The same for transposed scores: the first row is key j, the first column query i.
template <int N>
DEVICE void mask_transposed(float (&s)[N][4], int i, int j, int window, float hidden)
{
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
template <int N>
DEVICE bool raise_max(Softmax& state, const float (&s)[N][4], float scale_log2, float (&factor)[2])
{
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

template <int N>
DEVICE void rescale(float (&o)[N][4], const float (&factor)[2])
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= factor[e >> 1];
}

// s = 2^(s·scale − max·scale), and the sums grow by it.
template <int N>
DEVICE void exponentiate(Softmax& state, float (&s)[N][4], float scale_log2)
{
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

// Four words of each of four neighbouring lanes: lane i of them gets every lane's i-th word.
DEVICE void transpose(u32 (&x)[4])
{
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const bool high = LANE & bit;
            const u32 other = shuffle_xor(high ? x[i] : x[i | bit], bit);
            (high ? x[i] : x[i | bit]) = other;
        }
}

struct alignas(16) Chunk {
    u32 words[4];
};

// Stores the warp's rows of c·factor[row / 8]; `row` is the thread's first, in the sequence. Four
// lanes have a row between them, two columns of each eight: they exchange words, where there are
// enough for each to store 16 bytes at once.
template <int N>
DEVICE void store_rows(u16* matrix, u64 stride, int row, int length, const float (&c)[N][4],
                       const float (&factor)[2])
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < length;
        u16* out = matrix + (u64)(row + 8 * r) * stride;
#pragma unroll
        for (int first = 0; first < N; first += 4) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4 && first + i < N; ++i) {
                const float* x = c[first + i] + 2 * r;
                words[i] = pack_bf16(x[0] * factor[r], x[1] * factor[r]);
            }
            if (first + 4 <= N) {
                transpose(words);
                if (inside)
                    ((Chunk*)out)[first + (LANE & 3)] = {words[0], words[1], words[2], words[3]};
            } else if (inside) {
#pragma unroll
                for (int i = 0; first + i < N; ++i)
                    ((u32*)out)[(first + i) * 4 + (LANE & 3)] = words[i];
            }
        }
    }
}

// Stores o = c/sum and lse.
template <int N>
DEVICE void store_forward(u16* o, u64 stride, float* lse, int row, int length, Softmax& state,
                          const float (&c)[N][4], float scale)
{
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

// ---- Gradient of the scores -------------------------------------------------------------------
// P = 2^(s·scale·log₂e − lse·log₂e), dS = P·(do·vᵀ − delta).

// s = P, rows g and g + 8 with their own lse.
template <int N>
DEVICE void probabilities(float (&s)[N][4], float scale_log2, const float (&lse_log2)[2])
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(s[n][e] * scale_log2 - lse_log2[e >> 1]);
}

// dp = p·(dp − delta).
template <int N>
DEVICE void score_gradient(const float (&p)[N][4], float (&dp)[N][4], const float (&delta)[2])
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] = p[n][e] * (dp[n][e] - delta[e >> 1]);
}

// The lane's two of eight columns' sums in shared memory, of which fours are STEP bytes apart.
template <int STEP>
DEVICE float2 sums_of_columns(u32 sums, int eight)
{
    return load_pair(sums + (eight * 2 + (LANE >> 1 & 1)) * STEP + (LANE & 1) * 8);
}

// The transposed P: each column has its own lse, in shared memory.
template <int STEP, int N>
DEVICE void probabilities_transposed(float (&s)[N][4], float scale_log2, u32 lse)
{
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 l = sums_of_columns<STEP>(lse, n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s[n][e] = exp2_approx(s[n][e] * scale_log2 - (e & 1 ? l.y : l.x) * LOG2E);
    }
}

template <int STEP, int N>
DEVICE void score_gradient_transposed(float (&p)[N][4], float (&dp)[N][4], u32 delta)
{
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 d = sums_of_columns<STEP>(delta, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] = p[n][e] * (dp[n][e] - (e & 1 ? d.y : d.x));
    }
}

// lse·log₂e and delta of the thread's rows; rows beyond the sequence get values that do no harm.
DEVICE void read_rows(float (&lse_log2)[2], float (&delta)[2], const float* lses,
                      const float* deltas, int row, int length)
{
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool inside = row + 8 * r < length;
        lse_log2[r] = inside ? lses[row + 8 * r] * LOG2E : 0.0f;
        delta[r] = inside ? deltas[row + 8 * r] : 0.0f;
    }
}

// ---- Entry points -----------------------------------------------------------------------------

#define PROBLEM_ARGUMENTS u64 tokens, int heads, int kv_heads, int window, float scale
#define PROBLEM (Problem{tokens, heads, kv_heads, window, scale})
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
