// A GPU's thread blocks on the CPU, one at a time, and attention_primitives.cuh by its definitions
// in the PTX ISA. See attention_emulated.cpp.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct float2 {
    float x, y;
};

// ---- Fibres: one block at a time ----------------------------------------------------------------

struct Meeting {
    int arrived = 0, generation = 0;
    void* slots[1024];
};
struct Fibre {
    ucontext_t state;
    std::vector<char> stack;
    bool done = true;
    struct Copy {
        u32 to;
        const void* from;
        int bytes;
        bool inside;
    };
    std::vector<Copy> copies;
};
static ucontext_t scheduler;
static Fibre fibres[1024];
static int thread_now, thread_count, block_now[3];
static Meeting warp_meetings[32], group_meetings[8], named_meetings[16], block_meeting;
alignas(1024) static unsigned char shared_bytes[232448];
static u32 shared_limit;
static std::function<void()> kernel;

static void give_way()
{
    swapcontext(&fibres[thread_now].state, &scheduler);
}

// Meets `count` threads; the last to come runs `work` on what all brought.
template <class Work>
static void meet(Meeting& meeting, int count, int index, void* mine, Work work)
{
    meeting.slots[index] = mine;
    const int generation = meeting.generation;
    if (++meeting.arrived == count) {
        work(meeting.slots);
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    while (meeting.generation == generation) give_way();
}

static void fibre_main()
{
    kernel();
    fibres[thread_now].done = true;
    swapcontext(&fibres[thread_now].state, &scheduler);
}

static void run_block(int threads, bool backwards)
{
    thread_count = threads;
    for (Meeting& meeting : named_meetings) meeting = Meeting();
    for (auto& byte : shared_bytes) byte = 0xff;
    for (int i = 0; i < threads; ++i) {
        Fibre& f = fibres[i];
        f.stack.resize(64 << 10);
        f.done = false;
        f.copies.clear();
        getcontext(&f.state);
        f.state.uc_stack.ss_sp = f.stack.data();
        f.state.uc_stack.ss_size = f.stack.size();
        f.state.uc_link = nullptr;
        makecontext(&f.state, fibre_main, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < threads; ++i) {
            thread_now = backwards ? threads - 1 - i : i;
            if (fibres[thread_now].done) continue;
            any = true;
            swapcontext(&scheduler, &fibres[thread_now].state);
        }
    }
}

static void launch(int x, int y, int z, int threads, u32 shared, std::function<void()> body)
{
    kernel = body;
    shared_limit = shared;
    int block = 0;
    for (block_now[2] = 0; block_now[2] < z; ++block_now[2])
        for (block_now[1] = 0; block_now[1] < y; ++block_now[1])
            for (block_now[0] = 0; block_now[0] < x; ++block_now[0])
                run_block(threads, block++ % 2 == 1);
}

// ---- The primitives
// -------------------------------------------------------------------------------

#define ATTENTION_EMULATED
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define THREAD thread_now
#define LANE (thread_now & 31)
#define WARP (thread_now >> 5)
#define BLOCK_X block_now[0]
#define BLOCK_Y block_now[1]
#define BLOCK_Z block_now[2]
#define SHARED_MEMORY 0u
#define MINUS_INFINITY (-INFINITY)
#define INFINITE INFINITY

static unsigned char* shared_at(u32 at, u32 bytes)
{
    if (at % bytes != 0 || at + bytes > shared_limit) {
        printf("shared memory access of %u bytes at %u of %u\n", bytes, at, shared_limit);
        abort();
    }
    return shared_bytes + at;
}
static float bits_to_float(u32 x)
{
    float f;
    memcpy(&f, &x, 4);
    return f;
}
static float bf16_to_float(u16 x)
{
    return bits_to_float((u32)x << 16);
}
static u16 float_to_bf16(float x)
{
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE u32 float_to_bits(float x)
{
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE u32 pack_bf16(float low, float high)
{
    return float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
}
DEVICE float exp2_approx(float x)
{
    return exp2f(x);
}

static void copy_later(u32 to, const void* from, int bytes, bool inside)
{
    memset(shared_at(to, bytes), 0xff, bytes);
    fibres[thread_now].copies.push_back({to, from, bytes, inside});
}
DEVICE void copy_16(u32 to, const void* from, bool inside)
{
    copy_later(to, from, 16, inside);
}
DEVICE void copy_4(u32 to, const void* from, bool inside)
{
    copy_later(to, from, 4, inside);
}
DEVICE void copies_commit() {}
DEVICE void copies_wait()
{
    for (auto& copy : fibres[thread_now].copies) {
        unsigned char* to = shared_at(copy.to, copy.bytes);
        if (copy.inside)
            memcpy(to, copy.from, copy.bytes);
        else
            memset(to, 0, copy.bytes);
    }
    fibres[thread_now].copies.clear();
}
DEVICE void block_barrier()
{
    meet(block_meeting, thread_count, thread_now, nullptr, [](void**) {});
}
DEVICE void warp_barrier()
{
    meet(warp_meetings[WARP], 32, LANE, nullptr, [](void**) {});
}
DEVICE float2 load_pair(u32 from)
{
    float2 x;
    memcpy(&x, shared_at(from, 8), 8);
    return x;
}
DEVICE float* shared_floats()
{
    return (float*)shared_bytes;
}

static void load_matrices_of(u32 (&f)[4], u32 row, bool transposed)
{
    struct Lane {
        u32* f;
        u32 row;
    } mine = {f, row};
    meet(warp_meetings[WARP], 32, LANE, &mine, [transposed](void** slots) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            u16 x[8][8];
            for (int r = 0; r < 8; ++r)
                memcpy(x[r], shared_at(((Lane*)slots[matrix * 8 + r])->row, 16), 16);
            for (int lane = 0; lane < 32; ++lane) {
                const int r = lane / 4, c = lane % 4 * 2;
                const u16 low = transposed ? x[c][r] : x[r][c],
                          high = transposed ? x[c + 1][r] : x[r][c + 1];
                ((Lane*)slots[lane])->f[matrix] = low | (u32)high << 16;
            }
        }
    });
}
DEVICE void load_matrices(u32 (&f)[4], u32 row)
{
    load_matrices_of(f, row, false);
}
DEVICE void load_matrices_transposed(u32 (&f)[4], u32 row)
{
    load_matrices_of(f, row, true);
}

static float half_of(u32 x, int high)
{
    return bf16_to_float((u16)(high ? x >> 16 : x));
}

struct MmaLane {
    float* c;
    const u32* a;
    u32 b[2];
};
// Rows and columns as the PTX ISA gives them for mma.m16n8k16 with 16-bit elements.
static void mma_of_warp(void** slots)
{
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaLane& x = *(MmaLane*)slots[lane];
        const int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
            const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = half_of(x.a[i / 2], i & 1);
        }
        for (int i = 0; i < 4; ++i)
            b[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = half_of(x.b[i / 2], i & 1);
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            ((MmaLane*)slots[lane])->c[i] += sum;
        }
}
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    MmaLane mine = {c, a, {b0, b1}};
    meet(warp_meetings[WARP], 32, LANE, &mine, mma_of_warp);
}
DEVICE float shuffle_xor(float x, int lanes)
{
    struct Lane {
        float in, out;
    } mine = {x, 0.0f};
    meet(warp_meetings[WARP], 32, LANE, &mine, [lanes](void** slots) {
        for (int lane = 0; lane < 32; ++lane)
            ((Lane*)slots[lane])->out = ((Lane*)slots[lane ^ lanes])->in;
    });
    return mine.out;
}
DEVICE u32 shuffle_xor(u32 x, int lanes)
{
    return float_to_bits(shuffle_xor(bits_to_float(x), lanes));
}
DEVICE u32 broadcast(u32 x)
{
    u32 mine = x;
    meet(warp_meetings[WARP], 32, LANE, &mine, [](void** slots) {
        for (int lane = 1; lane < 32; ++lane) *(u32*)slots[lane] = *(u32*)slots[0];
    });
    return mine;
}
DEVICE bool any_lane(bool x)
{
    bool mine = x;
    meet(warp_meetings[WARP], 32, LANE, &mine, [](void** slots) {
        bool any = false;
        for (int lane = 0; lane < 32; ++lane) any |= *(bool*)slots[lane];
        for (int lane = 0; lane < 32; ++lane) *(bool*)slots[lane] = any;
    });
    return mine;
}

// Barriers in shared memory, known by their address. A copy by tensor map poisons its target when
// it starts; it comes when somebody waits for its barrier.
#define ATTENTION_WGMMA
#define TENSOR_MAP const TensorMap
struct TensorMap {
    const u16* matrix;
    int width, heads, tokens, rows;
};
struct Barrier {
    u32 expected = 0, arrived = 0, phase = 0;
    long bytes = 0;
    struct Box {
        u32 to;
        const TensorMap* map;
        int column, head, token;
    };
    std::vector<Box> boxes;
};
static std::map<u32, Barrier> barriers;

static void end_phase(Barrier& barrier)
{
    if (barrier.arrived != barrier.expected || barrier.bytes != 0) return;
    barrier.arrived = 0;
    ++barrier.phase;
}
DEVICE void barrier_init(u32 barrier, u32 arrivals)
{
    shared_at(barrier, 8);
    barriers[barrier] = Barrier();
    barriers[barrier].expected = arrivals;
}
DEVICE void barriers_publish() {}
DEVICE void barrier_arrive_expecting(u32 at, u32 bytes)
{
    Barrier& barrier = barriers.at(at);
    if (++barrier.arrived > barrier.expected) abort();
    barrier.bytes += bytes;
    end_phase(barrier);
}
DEVICE void barrier_arrive(u32 at)
{
    barrier_arrive_expecting(at, 0);
}
DEVICE void copy_box(u32 to, const TensorMap& map, int column, int head, int token, u32 at)
{
    if (to % 1024 != 0) abort();
    memset(shared_at(to, 16), 0xff, map.rows * 128);
    barriers.at(at).boxes.push_back({to, &map, column, head, token});
}
DEVICE void barrier_wait(u32 at, u32 parity)
{
    Barrier& barrier = barriers.at(at);
    while ((barrier.phase & 1) == parity) {
        for (const Barrier::Box& box : barrier.boxes) {
            const TensorMap& map = *box.map;
            for (int row = 0; row < map.rows; ++row)
                for (int x = 0; x < 64; ++x) {
                    const int token = box.token + row, column = box.column + x;
                    u16 value = 0;
                    if (token < map.tokens && column < map.width)
                        value = map.matrix[((size_t)token * map.heads + box.head) * map.width +
                                           column];
                    u32 to = box.to + row * 128 + x * 2;
                    to ^= (to >> 7 & 7) << 4;
                    memcpy(shared_at(to, 2), &value, 2);
                }
            barrier.bytes -= map.rows * 128;
        }
        if (!barrier.boxes.empty()) {
            barrier.boxes.clear();
            end_phase(barrier);
            continue;
        }
        give_way();
    }
}

DEVICE void copies_arrive(u32 barrier)
{
    copies_wait();
    barrier_arrive(barrier);
}
static bool named_come(int id, int threads)
{
    Meeting& meeting = named_meetings[id];
    if (++meeting.arrived != threads) return false;
    meeting.arrived = 0;
    ++meeting.generation;
    return true;
}
DEVICE void named_arrive(int id, int threads)
{
    named_come(id, threads);
}
DEVICE void named_wait(int id, int threads)
{
    const int generation = named_meetings[id].generation;
    if (named_come(id, threads)) return;
    while (named_meetings[id].generation == generation) give_way();
}

template <int COUNT>
DEVICE void registers_raise()
{
}
template <int COUNT>
DEVICE void registers_lower()
{
}
DEVICE void store_word(u32 to, u32 x)
{
    memcpy(shared_at(to, 4), &x, 4);
}
DEVICE u32 load_word(u32 from)
{
    u32 x;
    memcpy(&x, shared_at(from, 4), 4);
    return x;
}
DEVICE u32 count_up(u32* counter)
{
    return (*counter)++;
}

// wgmma: done when it is issued; what a tile holds is found by its descriptor.
DEVICE void compute_first(u32 bits, u32 scratch)
{
    memcpy(shared_at(scratch, 4), &bits, 4);
}
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int PENDING>
DEVICE void wgmma_wait()
{
}
template <int N>
DEVICE void pin(float (&)[N][4])
{
}

// Element (row, column) of an operand; rows are 64 bf16, swizzled by bits of the address. Stored
// [row][k], the column is k; stored [k][column], panels of 64 columns follow each other.
static float operand(u64 descriptor, int row, int column, bool column_is_contiguous_k)
{
    const u32 start = (descriptor & 0x3fff) << 4, panel = (descriptor >> 16 & 0x3fff) << 4;
    const u32 group = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) abort();
    u32 at = start + row / 8 * group + row % 8 * 128 + column % 64 * 2;
    if (!column_is_contiguous_k) at += column / 64 * panel;
    at ^= (at >> 7 & 7) << 4;
    u16 x;
    memcpy(&x, shared_at(at, 2), 2);
    return bf16_to_float(x);
}

struct WgmmaThread {
    float (*c)[4];
    const u32* a;  // null if by descriptor
    u64 a_tile, b_tile;
    bool add, transposed;  // b: [rows][k]
};
static void wgmma_of_group(void** slots, int tiles)
{
    static float a[64][16], b[128][16];
    const WgmmaThread& first = *(WgmmaThread*)slots[0];
    for (int thread = 0; thread < 128; ++thread) {
        const WgmmaThread& x = *(WgmmaThread*)slots[thread];
        if (x.b_tile != first.b_tile || x.a_tile != first.a_tile || x.add != first.add) abort();
        if (!x.a) continue;
        for (int i = 0; i < 8; ++i)
            a[thread / 32 * 16 + thread % 32 / 4 + (i & 2 ? 8 : 0)]
             [thread % 4 * 2 + (i & 1) + (i & 4 ? 8 : 0)] = half_of(x.a[i / 2], i & 1);
    }
    if (!first.a)
        for (int r = 0; r < 64; ++r)
            for (int k = 0; k < 16; ++k) a[r][k] = operand(first.a_tile, r, k, true);
    for (int n = 0; n < tiles * 8; ++n)
        for (int k = 0; k < 16; ++k)
            b[n][k] = first.transposed
                          ? operand(first.b_tile, n, k, true)
                          : operand(first.b_tile, k, n, false);
    for (int thread = 0; thread < 128; ++thread)
        for (int n = 0; n < tiles; ++n)
            for (int i = 0; i < 4; ++i) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + (i & 2 ? 8 : 0),
                          column = n * 8 + thread % 4 * 2 + (i & 1);
                float& c = ((WgmmaThread*)slots[thread])->c[n][i];
                float sum = first.add ? c : 0.0f;
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
                c = sum;
            }
}
template <int N>
DEVICE void wgmma_shared(float (&c)[N][4], u64 a, u64 b, bool add)
{
    WgmmaThread mine = {c, nullptr, a, b, add, true};
    meet(group_meetings[thread_now / 128], 128, thread_now % 128, &mine,
         [](void** slots) { wgmma_of_group(slots, N); });
}
template <int N>
DEVICE void wgmma_registers(float (&c)[N][4], const u32 (&a)[4], u64 b)
{
    WgmmaThread mine = {c, a, 0, b, true, false};
    meet(group_meetings[thread_now / 128], 128, thread_now % 128, &mine,
         [](void** slots) { wgmma_of_group(slots, N); });
}
template <int N>
DEVICE void wgmma_registers_transposed(float (&c)[N][4], const u32 (&a)[4], u64 b, bool add)
{
    WgmmaThread mine = {c, a, 0, b, add, true};
    meet(group_meetings[thread_now / 128], 128, thread_now % 128, &mine,
         [](void** slots) { wgmma_of_group(slots, N); });
}
