// Attention with mma.sync and padded tiles: sm_80 and up. See attention.cu.
#pragma once

// ---- Products: a warp has 16 rows -------------------------------------------------------------

// Offset in a padded tile of the row that this lane gives to ldmatrix for an A operand, or for a B
// operand stored [k][n] and read transposed: rows lane % 16, the right 8 columns for lanes 16 up.
template <int ROW_BYTES>
DEVICE u32 lane_offset_a()
{
    return (LANE & 15) * ROW_BYTES + (LANE >> 4) * 16;
}

// The same for a pair of B operands stored [n][k]: n 0-7 then 8-15, each with its k 0-7 and 8-15.
template <int ROW_BYTES>
DEVICE u32 lane_offset_b()
{
    return ((LANE & 7) + ((LANE >> 4) << 3)) * ROW_BYTES + ((LANE >> 3) & 1) * 16;
}

// c[16, 8·N] += a·bᵀ, a in registers, b a padded tile of 8·N rows; `b` is with the lane's offset.
template <int D, int N>
DEVICE void multiply_transposed(float (&c)[N][4], const u32 (&a)[D / 16][4], u32 b)
{
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
template <int D, int N>
DEVICE void multiply_transposed(float (&c)[N][4], u32 a, u32 b)
{
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
template <int D, int M, int N>
DEVICE void multiply(float (&c)[N][4], const u32 (&p)[M / 2][4], u32 b)
{
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

// ---- Forward ----------------------------------------------------------------------------------

// WARPS·16 queries a block, tiles of WARPS·8 keys in two stages. Up to D = 128, q is staged in the
// second stage's memory and held in registers; above, it has memory of its own.
template <int D, int WARPS>
DEVICE void forward(const u16* q, const u16* k, const u16* v, u16* o, float* lse, const u32* units,
                    Problem p)
{
    constexpr int THREADS = WARPS * 32, QUERIES = WARPS * 16, KEYS = WARPS * 8;
    constexpr bool HELD = D <= 128;
    typedef PaddedTile<D, KEYS> KeyTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int first_tile = first_key_tile(unit, KEYS, p.window);
    int tile = last_key_tile(unit, QUERIES, KEYS);
    const u32 memory = SHARED_MEMORY, q_tile = memory + (HELD ? 1 : 2) * STAGE;
    load_rows<PaddedTile<D, QUERIES>, D, QUERIES, THREADS>(q_tile, q + at.q, at.q_stride,
                                                           unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride,
                                         tile * KEYS, unit.length);
    copies_commit();
    copies_wait();
    block_barrier();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(),
              offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
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
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile - 1) * KEYS,
                                                 unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride,
                                                 (tile - 1) * KEYS, unit.length);
        }
        copies_commit();
        if (some_seen(warp_first, 16, tile * KEYS, KEYS, p.window)) {
            float s[KEYS / 8][4];
            clear(s);
            if constexpr (HELD)
                multiply_transposed<D>(s, queries, here + offset_b);
            else
                multiply_transposed<D>(s, q_rows, here + offset_b);
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

// ---- Backward ---------------------------------------------------------------------------------
// dq = scale·dS·k, dv = Pᵀ·do, dk = scale·dSᵀ·q.

// dq: WARPS·16 queries a block, tiles of KEYS keys in two stages.
template <int D, int WARPS, int KEYS>
DEVICE void backward_queries(const u16* q, const u16* k, const u16* v, const u16* dout,
                             const float* lse, const float* delta, u16* dq, const u32* units,
                             Problem p)
{
    constexpr int THREADS = WARPS * 32, QUERIES = WARPS * 16;
    typedef PaddedTile<D, KEYS> KeyTile;
    typedef PaddedTile<D, QUERIES> QueryTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int last_tile = last_key_tile(unit, QUERIES, KEYS);
    int tile = first_key_tile(unit, KEYS, p.window);
    const u32 q_tile = SHARED_MEMORY, do_tile = q_tile + QueryTile::BYTES,
              memory = do_tile + QueryTile::BYTES;
    load_rows<QueryTile, D, QUERIES, THREADS>(q_tile, q + at.q, at.q_stride, unit.first,
                                              unit.length);
    load_rows<QueryTile, D, QUERIES, THREADS>(do_tile, dout + at.q, at.q_stride, unit.first,
                                              unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride,
                                         tile * KEYS, unit.length);
    copies_commit();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(),
              offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
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
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile + 1) * KEYS,
                                                 unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride,
                                                 (tile + 1) * KEYS, unit.length);
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
            probabilities(s, scale_log2, lse_log2);
            score_gradient(s, ds, row_delta);
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

// dk and dv: WARPS·16 keys a block; over the heads of the group, and in each over tiles of QUERIES
// queries, in two stages. Everything is transposed: rows are keys. A block has SLICE columns of dk
// and dv (grid.z counts them), for all would not fit in registers above D = 128.
template <int D, int WARPS, int QUERIES, int SLICE>
DEVICE void backward_keys(const u16* q, const u16* k, const u16* v, const u16* dout,
                          const float* lse, const float* delta, u16* dk, u16* dv, const u32* units,
                          Problem p)
{
    constexpr int THREADS = WARPS * 32, KEYS = WARPS * 16;
    typedef PaddedTile<D, KEYS> KeyTile;
    typedef PaddedTile<D, QUERIES> QueryTile;
    constexpr u32 STAGE = 2 * QueryTile::BYTES;
    const Unit unit = read_unit(units);
    const int group = p.heads / p.kv_heads;
    Offsets at = offsets<D>(p, unit, BLOCK_Y * group, BLOCK_Y);
    const int first_tile = unit.first / QUERIES;
    const int seen_end = least(unit.length, least(unit.length, unit.first + KEYS) - 1 + p.window);
    const int tiles = (seen_end + QUERIES - 1) / QUERIES - first_tile;
    const u32 k_tile = SHARED_MEMORY, v_tile = k_tile + KeyTile::BYTES,
              memory = v_tile + KeyTile::BYTES;
    load_rows<KeyTile, D, KEYS, THREADS>(k_tile, k + at.k, at.k_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(v_tile, v + at.k, at.k_stride, unit.first, unit.length);
    load_queries<QueryTile, D, QUERIES, THREADS>(memory, q, dout, lse, delta, at,
                                                 first_tile * QUERIES, unit.length);
    copies_commit();
    const u32 offset_a = lane_offset_a<KeyTile::ROW_BYTES>(),
              offset_b = lane_offset_b<KeyTile::ROW_BYTES>();
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
        if (left > 1)
            load_queries<QueryTile, D, QUERIES, THREADS>(
                there, q, dout, lse, delta, at, (first_tile + tile) * QUERIES, unit.length);
        copies_commit();
        if (some_seen(first, QUERIES, warp_first, 16, p.window)) {
            const u32 lses = here + QueryTile::SUMS;
            float s[QUERIES / 8][4], ds[QUERIES / 8][4];
            u32 rounded[QUERIES / 16][4];
            clear(s);
            clear(ds);
            multiply_transposed<D>(s, k_tile + rows, here + offset_b);
            if (!all_seen(first, QUERIES, warp_first, 16, p.window))
                mask_transposed(s, first + (LANE & 3) * 2, row, p.window, MINUS_INFINITY);
            probabilities_transposed<QueryTile::ROW_BYTES>(s, scale_log2, lses);
            multiply_transposed<D>(ds, v_tile + rows, here + QueryTile::BYTES + offset_b);
            score_gradient_transposed<QueryTile::ROW_BYTES>(s, ds, lses + QueryTile::BYTES);
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
