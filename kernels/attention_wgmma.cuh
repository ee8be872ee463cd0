// Attention with wgmma and swizzled tiles: code for sm_90a. See attention.cu.
//
// A block stays on its multiprocessor and takes units of work from a common counter until none is
// left. Its last warpgroup starts copies into rings of buffers; the others, with 64 rows of a unit
// each, compute. Which block takes a unit decides no sum.
#pragma once
#ifdef ATTENTION_WGMMA

#define GROUPS 2       // warpgroups that compute
#define UNIT_ROWS 128  // queries or keys of a unit
#define WGMMA_THREADS 384

// ---- Work ---------------------------------------------------------------------------------------

// The work list of a launch. In front of the units are four u32: the next item to be taken, 0 at
// first; the bits of +∞, an lse for queries that are not there; two unused. An item is a unit of one
// head; heads come in sections (the last may be smaller), one done before the next, so that what
// its items share stays in the L2 cache.
struct Work {
    u32* list;
    u32 units, heads, section;  // section: heads
};
#define WORK_ARGUMENTS u32 *list, u32 units, u32 unit_heads, u32 section
#define WORK (Work{list, units, unit_heads, section})

struct Item {
    Unit unit;
    int head;
};

DEVICE Item item(const Work& work, u32 index)
{
    const u32 first_head = index / (work.units * work.section) * work.section;
    const u32 in_section = index - first_head * work.units;
    const u32 heads = least((int)work.section, (int)(work.heads - first_head));
    const u32* unit = work.list + 4 + 4 * (u64)(in_section / heads);
    return Item{Unit{unit[0], (int)unit[1], (int)unit[2]}, (int)(first_head + in_section % heads)};
}

// ---- Rings --------------------------------------------------------------------------------------

// A side's place in a ring of STAGES buffers. Each buffer has two barriers: full, then empty.
template <int STAGES>
struct Place {
    u32 barriers;
    u32 stage, parity;

    DEVICE_MEMBER void next()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    DEVICE_MEMBER u32 full() const { return barriers + stage * 16; }
    DEVICE_MEMBER u32 empty(u32 stage) const { return barriers + stage * 16 + 8; }
    DEVICE_MEMBER u32 empty() const { return empty(stage); }
    DEVICE_MEMBER void wait_full() const { barrier_wait(full(), parity); }
    DEVICE_MEMBER void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
};

// Barriers of a ring: `fills` arrivals fill a buffer, every computing warp empties it.
template <int STAGES>
DEVICE void ring_init(u32 barriers, u32 fills)
{
    for (int stage = 0; stage < STAGES; ++stage) {
        barrier_init(barriers + stage * 16, fills);
        barrier_init(barriers + stage * 16 + 8, GROUPS * 4);
    }
}

// The warp is done with the buffer of this `empty` barrier.
DEVICE void release(u32 empty)
{
    warp_barrier();
    if (LANE == 0) barrier_arrive(empty);
}
template <int STAGES>
DEVICE void release(Place<STAGES>& place)
{
    release(place.empty());
    place.next();
}

// Starts the copy of rows token.. of a head into a swizzled tile. Rows of the next sequence may be
// among them: they get a probability of 0, so that they count only if they are not finite.
template <int D, int ROWS>
DEVICE void copy_tile(u32 tile, const TensorMap& map, int head, u32 token, u32 barrier)
{
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
        copy_box(tile + panel * ROWS * 128, map, panel * 64, head, token, barrier);
}

// ---- Products -----------------------------------------------------------------------------------

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
    wgmma_commit();
}

// The same with a in registers.
template <int D, int N>
DEVICE void issue_transposed(float (&c)[N][4], const u32 (&a)[D / 16][4], u32 b)
{
    const u64 b_tile = descriptor(b, 16);
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
        wgmma_registers_transposed(c, a[k], further(b_tile, (k / 4) * N * 8 * 128 + (k % 4) * 32),
                                   k > 0);
    wgmma_commit();
}

// The warp's rows of a tile of UNIT_ROWS rows, as an A operand.
template <int D>
DEVICE void read_operand(u32 (&a)[D / 16][4], u32 tile)
{
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
        load_matrices(a[k], tile + SwizzledTile<D, UNIT_ROWS>::chunk(WARP * 16 + (LANE & 15),
                                                                k * 2 + (LANE >> 4)));
}

// Issues c[64, D] += p[64, 8·M]·b, b a tile of 8·M rows.
template <int D, int M>
DEVICE void issue(float (&c)[D / 8][4], const u32 (&p)[M / 2][4], u32 b)
{
    const u64 b_tile = descriptor(b, M * 8 * 128);
#pragma unroll
    for (int k = 0; k < M / 2; ++k) wgmma_registers(c, p[k], further(b_tile, k * 16 * 128));
    wgmma_commit();
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

// Registers of the computing threads and of the copying ones: 168 a thread at the start.
#define COMPUTING_REGISTERS 240
#define COPYING_REGISTERS 24

// ---- Forward ------------------------------------------------------------------------------------

// UNIT_ROWS queries a unit, tiles of KEYS keys, the last first. The scores of a tile are computed
// while the tile before is weighed, so k runs a tile ahead of v; each has a ring.
template <int D, int KEYS, int STAGES>
struct ForwardWgmma {
    static constexpr int N = KEYS / 8;
    typedef SwizzledTile<D, UNIT_ROWS> QueryTile;
    typedef SwizzledTile<D, KEYS> KeyTile;
    static constexpr u32 K_TILES = QueryTile::BYTES, V_TILES = K_TILES + STAGES * KeyTile::BYTES,
                         BARRIERS = V_TILES + STAGES * KeyTile::BYTES,
                         NEXT = BARRIERS + (1 + 2 * STAGES) * 16, SCRATCH = NEXT + 16,
                         BYTES = SCRATCH + GROUPS * 128 * 4;

    DEVICE_MEMBER static void run(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                  u16* o, float* lse, const Work& work, const Problem& p)
    {
        const u32 memory = SHARED_MEMORY;
        if (THREAD == 0) {
            ring_init<1>(memory + BARRIERS, 1);
            ring_init<2 * STAGES>(memory + BARRIERS + 16, 1);
            barriers_publish();
        }
        block_barrier();
        Place<1> q_place = {memory + BARRIERS, 0, 0};
        Place<STAGES> k_place = {memory + BARRIERS + 16, 0, 0},
                      v_place = {memory + BARRIERS + 16 + STAGES * 16, 0, 0};
        if (WARP / 4 == GROUPS) {
            registers_lower<COPYING_REGISTERS>();
            if (THREAD == GROUPS * 128)
                copy(memory, q, k, v, work, p, q_place, k_place, v_place);
        } else {
            registers_raise<COMPUTING_REGISTERS>();
            compute(memory, o, lse, work, p, q_place, k_place, v_place);
        }
    }

    DEVICE_MEMBER static void copy(u32 memory, const TensorMap& q, const TensorMap& k,
                                   const TensorMap& v, const Work& work, const Problem& p,
                                   Place<1> q_place, Place<STAGES> k_place, Place<STAGES> v_place)
    {
        const u32 end = work.units * work.heads;
        const int group = p.heads / p.kv_heads;
        const auto key_tile = [&](Place<STAGES>& place, u32 tiles, const TensorMap& map, int head,
                                  u32 token) {
            place.wait_empty();
            barrier_arrive_expecting(place.full(), KeyTile::BYTES);
            copy_tile<D, KEYS>(memory + tiles + place.stage * KeyTile::BYTES, map, head, token,
                               place.full());
            place.next();
        };
        for (u32 index = count_up(work.list);;) {
            q_place.wait_empty();
            store_word(memory + NEXT + q_place.parity * 4, index);
            if (index >= end) {
                barrier_arrive(q_place.full());
                break;
            }
            const Item it = item(work, index);
            index = count_up(work.list);
            const int first_tile = first_key_tile(it.unit, KEYS, p.window);
            int tile = last_key_tile(it.unit, UNIT_ROWS, KEYS);
            const u32 start = it.unit.start;
            barrier_arrive_expecting(q_place.full(), QueryTile::BYTES);
            copy_tile<D, UNIT_ROWS>(memory, q, it.head, start + it.unit.first, q_place.full());
            q_place.next();
            const int head = it.head / group;
            key_tile(k_place, K_TILES, k, head, start + tile * KEYS);
            for (; tile >= first_tile; --tile) {
                if (tile > first_tile)
                    key_tile(k_place, K_TILES, k, head, start + (tile - 1) * KEYS);
                key_tile(v_place, V_TILES, v, head, start + tile * KEYS);
            }
        }
    }

    DEVICE_MEMBER static void compute(u32 memory, u16* o, float* lse, const Work& work,
                                      const Problem& p, Place<1> q_place, Place<STAGES> k_place,
                                      Place<STAGES> v_place)
    {
        const u32 end = work.units * work.heads;
        const float scale_log2 = p.scale * LOG2E;
        const u32 scratch = memory + SCRATCH + THREAD * 4;
        for (;;) {
            q_place.wait_full();
            const u32 index = load_word(memory + NEXT + q_place.parity * 4);
            if (index >= end) break;
            const Item it = item(work, index);
            const int first_tile = first_key_tile(it.unit, KEYS, p.window);
            int tile = last_key_tile(it.unit, UNIT_ROWS, KEYS);
            const int warp_first = it.unit.first + WARP * 16, row = warp_first + LANE / 4,
                      column = (LANE & 3) * 2;
            float out[D / 8][4], s[N][4], factor[2];
            u32 queries[D / 16][4], rounded[N / 2][4];
            read_operand<D>(queries, memory);
            release(q_place);
            clear(out);
            clear(s);
            Softmax state = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
            k_place.wait_full();
            pin(s);
            wgmma_fence();
            issue_transposed<D>(s, queries, memory + K_TILES + k_place.stage * KeyTile::BYTES);
            wgmma_wait<0>();
            pin(s);
            release(k_place);
            if (!all_seen(warp_first, 16, tile * KEYS, KEYS, p.window))
                mask(s, row, tile * KEYS + column, p.window, MINUS_INFINITY);
            raise_max(state, s, scale_log2, factor);
            exponentiate(state, s, scale_log2);
            round_to_operand(rounded, s);
            for (; tile > first_tile; --tile) {
                k_place.wait_full();
                wgmma_fence();
                issue_transposed<D>(s, queries,
                                    memory + K_TILES + k_place.stage * KeyTile::BYTES);
                v_place.wait_full();
                wgmma_fence();
                issue<D, N>(out, rounded, memory + V_TILES + v_place.stage * KeyTile::BYTES);
                wgmma_wait<1>();
                pin(s);
                release(k_place);
                if (!all_seen(warp_first, 16, (tile - 1) * KEYS, KEYS, p.window))
                    mask(s, row, (tile - 1) * KEYS + column, p.window, MINUS_INFINITY);
                const bool raised = raise_max(state, s, scale_log2, factor);
                exponentiate(state, s, scale_log2);
                compute_first(float_to_bits(state.sum[0] + state.sum[1]), scratch);
                wgmma_wait<0>();
                pin(out);
                release(v_place);
                if (raised) rescale(out, factor);
                round_to_operand(rounded, s);
            }
            v_place.wait_full();
            wgmma_fence();
            issue<D, N>(out, rounded, memory + V_TILES + v_place.stage * KeyTile::BYTES);
            wgmma_wait<0>();
            pin(out);
            release(v_place);
            const Offsets at = offsets<D>(p, it.unit, it.head, 0);
            store_forward(o + at.q, at.q_stride, lse + at.row, row, it.unit.length, state, out,
                          p.scale);
        }
    }
};

// ---- Gradient of the queries --------------------------------------------------------------------

// dq: UNIT_ROWS queries a unit, tiles of KEYS keys. The products of a tile's scores and of their
// gradients run while the tile before is multiplied with k: every product is waited for in the
// loop's turn that issued it, for the compiler orders wgmma one by one if accumulators are pending
// around a loop.
template <int D, int KEYS, int K_STAGES, int V_STAGES>
struct QueriesWgmma {
    static constexpr int N = KEYS / 8;
    typedef SwizzledTile<D, UNIT_ROWS> QueryTile;
    typedef SwizzledTile<D, KEYS> KeyTile;
    static constexpr u32 DO_TILE = QueryTile::BYTES, K_TILES = 2 * QueryTile::BYTES,
                         V_TILES = K_TILES + K_STAGES * KeyTile::BYTES,
                         BARRIERS = V_TILES + V_STAGES * KeyTile::BYTES,
                         NEXT = BARRIERS + (1 + K_STAGES + V_STAGES) * 16, SCRATCH = NEXT + 16,
                         BYTES = SCRATCH + GROUPS * 128 * 4;

    DEVICE_MEMBER static void run(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                  const TensorMap& dout, const float* lse, const float* delta,
                                  u16* dq, const Work& work, const Problem& p)
    {
        const u32 memory = SHARED_MEMORY;
        if (THREAD == 0) {
            ring_init<1 + K_STAGES + V_STAGES>(memory + BARRIERS, 1);
            barriers_publish();
        }
        block_barrier();
        Place<1> q_place = {memory + BARRIERS, 0, 0};
        Place<K_STAGES> k_place = {memory + BARRIERS + 16, 0, 0};
        Place<V_STAGES> v_place = {memory + BARRIERS + 16 + K_STAGES * 16, 0, 0};
        if (WARP / 4 == GROUPS) {
            registers_lower<COPYING_REGISTERS>();
            if (THREAD == GROUPS * 128)
                copy(memory, q, k, v, dout, work, p, q_place, k_place, v_place);
        } else {
            registers_raise<COMPUTING_REGISTERS>();
            compute(memory, lse, delta, dq, work, p, q_place, k_place, v_place);
        }
    }

    DEVICE_MEMBER static void copy(u32 memory, const TensorMap& q, const TensorMap& k,
                                   const TensorMap& v, const TensorMap& dout, const Work& work,
                                   const Problem& p, Place<1> q_place, Place<K_STAGES> k_place,
                                   Place<V_STAGES> v_place)
    {
        const u32 end = work.units * work.heads;
        const int group = p.heads / p.kv_heads;
        for (u32 index = count_up(work.list);;) {
            q_place.wait_empty();
            store_word(memory + NEXT + q_place.parity * 4, index);
            if (index >= end) {
                barrier_arrive(q_place.full());
                break;
            }
            const Item it = item(work, index);
            index = count_up(work.list);
            const int last_tile = last_key_tile(it.unit, UNIT_ROWS, KEYS);
            const u32 start = it.unit.start;
            barrier_arrive_expecting(q_place.full(), 2 * QueryTile::BYTES);
            copy_tile<D, UNIT_ROWS>(memory, q, it.head, start + it.unit.first, q_place.full());
            copy_tile<D, UNIT_ROWS>(memory + DO_TILE, dout, it.head, start + it.unit.first,
                               q_place.full());
            q_place.next();
            const int head = it.head / group;
            for (int tile = first_key_tile(it.unit, KEYS, p.window); tile <= last_tile; ++tile) {
                k_place.wait_empty();
                barrier_arrive_expecting(k_place.full(), KeyTile::BYTES);
                copy_tile<D, KEYS>(memory + K_TILES + k_place.stage * KeyTile::BYTES, k, head,
                                   start + tile * KEYS, k_place.full());
                k_place.next();
                v_place.wait_empty();
                barrier_arrive_expecting(v_place.full(), KeyTile::BYTES);
                copy_tile<D, KEYS>(memory + V_TILES + v_place.stage * KeyTile::BYTES, v, head,
                                   start + tile * KEYS, v_place.full());
                v_place.next();
            }
        }
    }

    DEVICE_MEMBER static u32 keys(u32 memory, u32 stage)
    {
        return memory + K_TILES + stage * KeyTile::BYTES;
    }
    DEVICE_MEMBER static u32 values(u32 memory, u32 stage)
    {
        return memory + V_TILES + stage * KeyTile::BYTES;
    }

    DEVICE_MEMBER static void compute(u32 memory, const float* lse, const float* delta, u16* dq,
                                      const Work& work, const Problem& p, Place<1> q_place,
                                      Place<K_STAGES> k_place, Place<V_STAGES> v_place)
    {
        const float scale_log2 = p.scale * LOG2E;
        const u32 scratch = memory + SCRATCH + THREAD * 4;
        for (;;) {
            q_place.wait_full();
            const u32 index = load_word(memory + NEXT + q_place.parity * 4);
            if (index >= work.units * work.heads) break;
            // How far the warp's first query is behind the tile's first key, and tiles left.
            int behind, left;
            float lse_log2[2], row_delta[2];
            {
                const Item it = item(work, index);
                const u64 at = offsets<D>(p, it.unit, it.head, 0).row;
                const int tile = first_key_tile(it.unit, KEYS, p.window),
                          row = it.unit.first + WARP * 16;
                behind = row - tile * KEYS;
                left = last_key_tile(it.unit, UNIT_ROWS, KEYS) - tile;
                read_rows(lse_log2, row_delta, lse + at, delta + at, row + LANE / 4,
                          it.unit.length);
            }
            const auto weigh = [&](float (&s)[N][4]) {
                if (!all_seen(behind, 16, 0, KEYS, p.window))
                    mask(s, behind + LANE / 4, (LANE & 3) * 2, p.window, MINUS_INFINITY);
                probabilities(s, scale_log2, lse_log2);
            };
            float out[D / 8][4], s[N][4], ds[N][4];
            u32 queries[D / 16][4], douts[D / 16][4], rounded[N / 2][4];
            read_operand<D>(queries, memory);
            read_operand<D>(douts, memory + DO_TILE);
            release(q_place);
            clear(out);
            clear(s);
            clear(ds);
            pin(s);
            pin(ds);
            k_place.wait_full();
            wgmma_fence();
            issue_transposed<D>(s, queries, keys(memory, k_place.stage));
            v_place.wait_full();
            wgmma_fence();
            issue_transposed<D>(ds, douts, values(memory, v_place.stage));
            wgmma_wait<1>();
            pin(s);
            weigh(s);
            wgmma_wait<0>();
            pin(ds);
            release(v_place);
            score_gradient(s, ds, row_delta);
            round_to_operand(rounded, ds);
            u32 stage = k_place.stage;
            k_place.next();
            for (; left > 0; --left) {
                const u32 next = k_place.stage;
                k_place.wait_full();
                k_place.next();
                wgmma_fence();
                issue_transposed<D>(s, queries, keys(memory, next));
                v_place.wait_full();
                wgmma_fence();
                issue_transposed<D>(ds, douts, values(memory, v_place.stage));
                issue<D, N>(out, rounded, keys(memory, stage));
                wgmma_wait<2>();
                pin(s);
                behind -= KEYS;
                weigh(s);
                compute_first(all_bits(s), scratch);
                wgmma_wait<1>();
                pin(ds);
                release(v_place);
                score_gradient(s, ds, row_delta);
                compute_first(all_bits(ds), scratch);
                wgmma_wait<0>();
                pin(out);
                release(k_place.empty(stage));
                round_to_operand(rounded, ds);
                stage = next;
            }
            wgmma_fence();
            issue<D, N>(out, rounded, keys(memory, stage));
            wgmma_wait<0>();
            pin(out);
            release(k_place.empty(stage));
            // Read again, not kept in registers.
            const Item it = item(work, load_word(memory + NEXT + (q_place.parity ^ 1) * 4));
            const Offsets at = offsets<D>(p, it.unit, it.head, 0);
            const float factor[2] = {p.scale, p.scale};
            store_rows(dq + at.q, at.q_stride, it.unit.first + WARP * 16 + LANE / 4,
                       it.unit.length, out, factor);
        }
    }
};

// ---- Gradients of the keys and values -----------------------------------------------------------

// dk and dv: UNIT_ROWS keys a unit; over the heads of the group, and in each over tiles of QUERIES
// queries. A buffer of the ring has a tile of q, one of do, and for each query lse and delta.
template <int D, int QUERIES, int STAGES>
struct KeysWgmma {
    static constexpr int N = QUERIES / 8;
    typedef SwizzledTile<D, UNIT_ROWS> KeyTile;
    typedef SwizzledTile<D, QUERIES> QueryTile;
    static constexpr u32 V_TILE = KeyTile::BYTES, RING = 2 * KeyTile::BYTES,
                         STAGE = 2 * QueryTile::BYTES, SUMS = RING + STAGES * STAGE,
                         STAGE_SUMS = 2 * QUERIES * 4, BARRIERS = SUMS + STAGES * STAGE_SUMS,
                         NEXT = BARRIERS + (1 + STAGES) * 16, BYTES = NEXT + 8;

    DEVICE_MEMBER static void run(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                  const TensorMap& dout, const float* lse, const float* delta,
                                  u16* dk, u16* dv, const Work& work, const Problem& p)
    {
        const u32 memory = SHARED_MEMORY;
        if (THREAD == 0) {
            ring_init<1>(memory + BARRIERS, 1);
            ring_init<STAGES>(memory + BARRIERS + 16, 33);
            barriers_publish();
        }
        block_barrier();
        Place<1> k_place = {memory + BARRIERS, 0, 0};
        Place<STAGES> q_place = {memory + BARRIERS + 16, 0, 0};
        if (WARP / 4 == GROUPS) {
            registers_lower<COPYING_REGISTERS>();
            if (WARP == GROUPS * 4)
                copy(memory, q, k, v, dout, lse, delta, work, p, k_place, q_place);
        } else {
            registers_raise<COMPUTING_REGISTERS>();
            compute(memory, dk, dv, work, p, k_place, q_place);
        }
    }

    // First tile of queries that see keys of the unit, and how many.
    struct Span {
        int first, count;
    };
    DEVICE_MEMBER static Span span(const Unit& unit, int window)
    {
        const int first = unit.first / QUERIES;
        const int end = least(unit.length, least(unit.length, unit.first + UNIT_ROWS) - 1 + window);
        return Span{first, (end + QUERIES - 1) / QUERIES - first};
    }

    // One lane copies tiles, every lane some lse and delta. Queries beyond the sequence get an lse
    // that makes P zero.
    DEVICE_MEMBER static void copy(u32 memory, const TensorMap& q, const TensorMap& k,
                                   const TensorMap& v, const TensorMap& dout, const float* lse,
                                   const float* delta, const Work& work, const Problem& p,
                                   Place<1> k_place, Place<STAGES> q_place)
    {
        for (;;) {
            u32 index = 0;
            k_place.wait_empty();
            if (LANE == 0) {
                index = count_up(work.list);
                store_word(memory + NEXT + k_place.parity * 4, index);
            }
            index = broadcast(index);
            if (index >= work.units * work.heads) {
                if (LANE == 0) barrier_arrive(k_place.full());
                break;
            }
            const Item it = item(work, index);
            if (LANE == 0) {
                barrier_arrive_expecting(k_place.full(), 2 * KeyTile::BYTES);
                copy_tile<D, UNIT_ROWS>(memory, k, it.head, it.unit.start + it.unit.first,
                                   k_place.full());
                copy_tile<D, UNIT_ROWS>(memory + V_TILE, v, it.head, it.unit.start + it.unit.first,
                                   k_place.full());
            }
            k_place.next();
            const Span tiles = span(it.unit, p.window);
            int head = it.head * (p.heads / p.kv_heads);
            for (const int end = head + p.heads / p.kv_heads; head < end; ++head)
                for (int tile = tiles.first; tile < tiles.first + tiles.count; ++tile) {
                    const u32 first = it.unit.start + tile * QUERIES;
                    q_place.wait_empty();
                    if (LANE == 0) {
                        barrier_arrive_expecting(q_place.full(), STAGE);
                        copy_tile<D, QUERIES>(queries(memory, q_place.stage), q, head, first,
                                              q_place.full());
                        copy_tile<D, QUERIES>(douts(memory, q_place.stage), dout, head, first,
                                              q_place.full());
                    }
#pragma unroll
                    for (int i = LANE; i < QUERIES; i += 32) {
                        const bool inside = tile * QUERIES + i < it.unit.length;
                        const u64 row = head * p.tokens + first + i;
                        const u32 to = lses(memory, q_place.stage) + i * 4;
                        copy_4(to, inside ? lse + row : (const float*)work.list + 1, true);
                        copy_4(to + QUERIES * 4, delta + (inside ? row : 0), inside);
                    }
                    copies_arrive(q_place.full());
                    q_place.next();
                }
        }
    }

    // Where a stage has q, do, lse and delta.
    DEVICE_MEMBER static u32 queries(u32 memory, u32 stage)
    {
        return memory + RING + stage * STAGE;
    }
    DEVICE_MEMBER static u32 douts(u32 memory, u32 stage)
    {
        return queries(memory, stage) + QueryTile::BYTES;
    }
    DEVICE_MEMBER static u32 lses(u32 memory, u32 stage)
    {
        return memory + SUMS + stage * STAGE_SUMS;
    }

    DEVICE_MEMBER static void compute(u32 memory, u16* dk, u16* dv, const Work& work,
                                      const Problem& p, Place<1> k_place, Place<STAGES> q_place)
    {
        const u32 end = work.units * work.heads;
        const int group = p.heads / p.kv_heads, group_row = WARP / 4 * 64;
        const float scale_log2 = p.scale * LOG2E;
        for (;;) {
            k_place.wait_full();
            const u32 index = load_word(memory + NEXT + k_place.parity * 4);
            if (index >= end) break;
            // How far the tile's first query is behind the warp's first key: the first tile's, the
            // one's after the last, this tile's.
            int from, to, behind, left;
            {
                const Unit unit = item(work, index).unit;
                const Span tiles = span(unit, p.window);
                from = tiles.first * QUERIES - (unit.first + WARP * 16);
                to = from + tiles.count * QUERIES;
                behind = from - QUERIES;
                left = group * tiles.count;
            }
            // The next tile; those before the warpgroup's first key are left out.
            const auto advance = [&] {
                for (; left > 0; release(q_place)) {
                    --left;
                    behind += QUERIES;
                    if (behind == to) behind = from;
                    if (behind + WARP * 16 % 64 > -QUERIES) return true;
                    q_place.wait_full();
                }
                return false;
            };
            const auto weigh = [&](float (&s)[N][4], u32 sums) {
                if (!all_seen(behind, QUERIES, 0, 16, p.window))
                    mask_transposed(s, behind + (LANE & 3) * 2, LANE / 4, p.window,
                                    MINUS_INFINITY);
                probabilities_transposed<16>(s, scale_log2, sums);
            };
            float dk_rows[D / 8][4], dv_rows[D / 8][4], s[N][4], ds[N][4];
            clear(dk_rows);
            clear(dv_rows);
            clear(s);
            clear(ds);
            pin(s);
            pin(ds);
            if (advance()) {
                u32 rounded[N / 2][4];
                u32 stage = q_place.stage;
                q_place.wait_full();
                q_place.next();
                wgmma_fence();
                issue_transposed<D, UNIT_ROWS>(s, memory, group_row, queries(memory, stage));
                wgmma_wait<0>();
                pin(s);
                weigh(s, lses(memory, stage));
                round_to_operand(rounded, s);
                for (;;) {
                    pin(ds);
                    wgmma_fence();
                    issue_transposed<D, UNIT_ROWS>(ds, memory + V_TILE, group_row,
                                              douts(memory, stage));
                    issue<D, N>(dv_rows, rounded, douts(memory, stage));
                    wgmma_wait<1>();
                    pin(ds);
                    score_gradient_transposed<16>(s, ds, lses(memory, stage) + QUERIES * 4);
                    wgmma_wait<0>();
                    pin(dv_rows);
                    round_to_operand(rounded, ds);
                    if (!advance()) break;
                    const u32 next = q_place.stage;
                    q_place.wait_full();
                    q_place.next();
                    wgmma_fence();
                    issue_transposed<D, UNIT_ROWS>(s, memory, group_row, queries(memory, next));
                    issue<D, N>(dk_rows, rounded, queries(memory, stage));
                    wgmma_wait<1>();
                    pin(s);
                    weigh(s, lses(memory, next));
                    wgmma_wait<0>();
                    pin(dk_rows);
                    release(q_place.empty(stage));
                    round_to_operand(rounded, s);
                    stage = next;
                }
                release(k_place);
                wgmma_fence();
                issue<D, N>(dk_rows, rounded, queries(memory, stage));
                wgmma_wait<0>();
                pin(dk_rows);
                release(q_place.empty(stage));
            } else {
                release(k_place);
            }
            // Read again, not kept in registers.
            const Item it = item(work, load_word(memory + NEXT + (k_place.parity ^ 1) * 4));
            const Offsets at = offsets<D>(p, it.unit, 0, it.head);
            const int row = it.unit.first + WARP * 16 + LANE / 4;
            const float factor[2] = {p.scale, p.scale}, one[2] = {1.0f, 1.0f};
            store_rows(dk + at.k, at.k_stride, row, it.unit.length, dk_rows, factor);
            store_rows(dv + at.k, at.k_stride, row, it.unit.length, dv_rows, one);
        }
    }
};
#endif
