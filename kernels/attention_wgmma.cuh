// Attention with wgmma and swizzled tiles: code for sm_90a. A warpgroup of four warps has 64 rows.
// See attention.cu.
#pragma once
#ifdef ATTENTION_WGMMA

// Matrix descriptor of a swizzled tile (PTX ISA, "Matrix-descriptor-format"): address, distance of
// panels (for operands stored [k][n]; ignored for [rows][k]), of groups of eight rows; all / 16.
DEVICE u64 descriptor(u32 address, u32 panel_bytes)
{
    return (u64)((address >> 4) | (panel_bytes >> 4) << 16) | (u64)(1024 >> 4 | 1 << 30) << 32;
}

// The descriptor of the same tile `bytes` further on; shared memory is too small for a carry.
DEVICE u64 further(u64 descriptor, u32 bytes)
{
    return (descriptor & 0xffffffff00000000) | ((u32)descriptor + (bytes >> 4));
}

// Issues c[64, 8·N] = a·bᵀ: a from row `a_row` of a tile of A_ROWS rows, b a tile of 8·N rows.
template <int D, int A_ROWS, int N>
DEVICE void issue_transposed(float (&c)[N][4], u32 a, int a_row, u32 b)
{
    const u64 a_tile = descriptor(a + a_row * 128, 16), b_tile = descriptor(b, 16);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const u32 inside = (k % 4) * 32;
        wgmma_shared(c, further(a_tile, (k / 4) * A_ROWS * 128 + inside),
                     further(b_tile, (k / 4) * N * 8 * 128 + inside), k > 0);
    }
}

// Issues c[64, D] += p[64, 8·M]·b, b a tile of 8·M rows.
template <int D, int M>
DEVICE void issue(float (&c)[D / 8][4], const u32 (&p)[M / 2][4], u32 b)
{
    const u64 b_tile = descriptor(b, M * 8 * 128);
#pragma unroll
    for (int k = 0; k < M / 2; ++k) wgmma_registers(c, p[k], further(b_tile, k * 16 * 128));
}

// A number that needs all of c; see `compute_first`.
template <int N>
DEVICE u32 all_bits(const float (&c)[N][4])
{
    u32 bits = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) bits ^= float_to_bits(c[n][e]);
    return bits;
}

// 128 queries a block, tiles of 128 keys. The scores of a tile are computed while the tile before
// is weighed, so k runs a tile ahead of v; each has two buffers.
template <int D>
DEVICE void forward_wgmma(const u16* q, const u16* k, const u16* v, u16* o, float* lse,
                          const u32* units, Problem p)
{
    constexpr int THREADS = 256, ROWS = 128, N = ROWS / 8;
    typedef SwizzledTile<D, ROWS> Tile;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int first_tile = first_key_tile(unit, ROWS, p.window);
    int tile = last_key_tile(unit, ROWS, ROWS);
    const u32 q_tile = SHARED_MEMORY, k_tiles = q_tile + Tile::BYTES,
              v_tiles = k_tiles + 2 * Tile::BYTES;
    load_rows<Tile, D, ROWS, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<Tile, D, ROWS, THREADS>(k_tiles, k + at.k, at.k_stride, tile * ROWS, unit.length);
    load_rows<Tile, D, ROWS, THREADS>(v_tiles, v + at.k, at.k_stride, tile * ROWS, unit.length);
    if (tile > first_tile)
        load_rows<Tile, D, ROWS, THREADS>(k_tiles + Tile::BYTES, k + at.k, at.k_stride,
                                          (tile - 1) * ROWS, unit.length);
    copies_commit();
    copies_wait();
    publish_to_wgmma();
    block_barrier();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16,
              row = warp_first + LANE / 4, column = (LANE & 3) * 2;
    const float scale_log2 = p.scale * LOG2E;
    const u32 scratch = q_tile + 5 * Tile::BYTES + THREAD * 4;
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
        if (tile - 1 > first_tile)
            load_rows<Tile, D, ROWS, THREADS>(k_tiles + here, k + at.k, at.k_stride,
                                              (tile - 2) * ROWS, unit.length);
        load_rows<Tile, D, ROWS, THREADS>(v_tiles + there, v + at.k, at.k_stride, (tile - 1) * ROWS,
                                          unit.length);
        copies_commit();
        wgmma_wait<1>();
        pin(s);
        if (!all_seen(warp_first, 16, (tile - 1) * ROWS, ROWS, p.window))
            mask(s, row, (tile - 1) * ROWS + column, p.window, MINUS_INFINITY);
        const bool raised = raise_max(state, s, scale_log2, factor);
        exponentiate(state, s, scale_log2);
        compute_first(float_to_bits(state.sum[0] + state.sum[1]), scratch);
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
DEVICE void backward_queries_wgmma(const u16* q, const u16* k, const u16* v, const u16* dout,
                                   const float* lse, const float* delta, u16* dq, const u32* units,
                                   Problem p)
{
    constexpr int THREADS = 256, ROWS = 128, N = KEYS / 8;
    typedef SwizzledTile<D, KEYS> KeyTile;
    typedef SwizzledTile<D, ROWS> QueryTile;
    constexpr u32 STAGE = 2 * KeyTile::BYTES;
    const Unit unit = read_unit(units);
    const Offsets at = offsets<D>(p, unit, BLOCK_Y, BLOCK_Y / (p.heads / p.kv_heads));
    const int last_tile = last_key_tile(unit, ROWS, KEYS);
    int tile = first_key_tile(unit, KEYS, p.window);
    const u32 q_tile = SHARED_MEMORY, do_tile = q_tile + QueryTile::BYTES,
              memory = do_tile + QueryTile::BYTES;
    load_rows<QueryTile, D, ROWS, THREADS>(q_tile, q + at.q, at.q_stride, unit.first, unit.length);
    load_rows<QueryTile, D, ROWS, THREADS>(do_tile, dout + at.q, at.q_stride, unit.first,
                                           unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory, k + at.k, at.k_stride, tile * KEYS, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(memory + KeyTile::BYTES, v + at.k, at.k_stride,
                                         tile * KEYS, unit.length);
    copies_commit();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16,
              row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    const u32 scratch = memory + 2 * STAGE + THREAD * 4;
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
            load_rows<KeyTile, D, KEYS, THREADS>(there, k + at.k, at.k_stride, (tile + 1) * KEYS,
                                                 unit.length);
            load_rows<KeyTile, D, KEYS, THREADS>(there + KeyTile::BYTES, v + at.k, at.k_stride,
                                                 (tile + 1) * KEYS, unit.length);
        }
        copies_commit();
        wgmma_wait<1>();
        pin(s);
        if (!all_seen(warp_first, 16, tile * KEYS, KEYS, p.window))
            mask(s, row, tile * KEYS + (LANE & 3) * 2, p.window, MINUS_INFINITY);
        probabilities(s, scale_log2, lse_log2);
        compute_first(all_bits(s), scratch);
        wgmma_wait<0>();
        pin(ds);
        score_gradient(s, ds, row_delta);
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
DEVICE void backward_keys_wgmma(const u16* q, const u16* k, const u16* v, const u16* dout,
                                const float* lse, const float* delta, u16* dk, u16* dv,
                                const u32* units, Problem p)
{
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
    const u32 k_tile = SHARED_MEMORY, v_tile = k_tile + KeyTile::BYTES,
              memory = v_tile + KeyTile::BYTES;
    load_rows<KeyTile, D, KEYS, THREADS>(k_tile, k + at.k, at.k_stride, unit.first, unit.length);
    load_rows<KeyTile, D, KEYS, THREADS>(v_tile, v + at.k, at.k_stride, unit.first, unit.length);
    load_queries<QueryTile, D, QUERIES, THREADS>(memory, q, dout, lse, delta, at,
                                                 first_tile * QUERIES, unit.length);
    copies_commit();
    const int group_row = WARP / 4 * 64, warp_first = unit.first + WARP * 16,
              row = warp_first + LANE / 4;
    const float scale_log2 = p.scale * LOG2E;
    const u32 scratch = memory + 2 * STAGE + THREAD * 4;
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
        if (left > 1)
            load_queries<QueryTile, D, QUERIES, THREADS>(
                there, q, dout, lse, delta, at, (first_tile + tile) * QUERIES, unit.length);
        copies_commit();
        wgmma_wait<1>();
        pin(s);
        if (!all_seen(first, QUERIES, warp_first, 16, p.window))
            mask_transposed(s, first + (LANE & 3) * 2, row, p.window, MINUS_INFINITY);
        probabilities_transposed(s, scale_log2, lses);
        round_to_operand(p_rounded, s);
        compute_first(all_bits(s), scratch);
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
