// Goal: without a GPU, that attention.cu computes attention and its gradients: fragment layouts,
// addresses, masks, stages and barriers, for packed sequences, windows and grouped queries.
//
// Method: the kernels' own source is compiled for the CPU. Each function of
// attention_primitives.cuh is written again here by its definition in the PTX ISA; CUDA threads are
// fibres that meet at warp-wide instructions and barriers. An asynchronous copy poisons its target
// when it starts and writes it when it is waited for, so that reading too early or overwriting too
// soon shows. Results are compared with sums in double precision over the same bf16 inputs.
//
// c++ -std=c++20 -O2 -o attention_emulated tests/kernels/attention_emulated.cpp && ./attention_emulated
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
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
static Meeting warp_meetings[32], group_meetings[8], block_meeting;
alignas(1024) static unsigned char shared_bytes[232448];
static u32 shared_limit;
static std::function<void()> kernel;

static void give_way() { swapcontext(&fibres[thread_now].state, &scheduler); }

// Meets `count` threads; the last to come runs `work` on what all brought.
template <class Work> static void meet(Meeting& meeting, int count, int index, void* mine, Work work) {
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

static void fibre_main() {
    kernel();
    fibres[thread_now].done = true;
    swapcontext(&fibres[thread_now].state, &scheduler);
}

static void run_block(int threads, bool backwards) {
    thread_count = threads;
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

static void launch(int x, int y, int z, int threads, u32 shared, std::function<void()> body) {
    kernel = body;
    shared_limit = shared;
    int block = 0;
    for (block_now[2] = 0; block_now[2] < z; ++block_now[2])
        for (block_now[1] = 0; block_now[1] < y; ++block_now[1])
            for (block_now[0] = 0; block_now[0] < x; ++block_now[0]) run_block(threads, block++ % 2 == 1);
}

// ---- The primitives -------------------------------------------------------------------------------

#define ATTENTION_EMULATED
#define DEVICE static inline
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

static unsigned char* shared_at(u32 at, u32 bytes) {
    if (at % bytes != 0 || at + bytes > shared_limit) {
        printf("shared memory access of %u bytes at %u of %u\n", bytes, at, shared_limit);
        abort();
    }
    return shared_bytes + at;
}
static float bits_to_float(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
static float bf16_to_float(u16 x) { return bits_to_float((u32)x << 16); }
static u16 float_to_bf16(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
DEVICE u32 pack_bf16(float low, float high) { return float_to_bf16(low) | (u32)float_to_bf16(high) << 16; }
DEVICE float exp2_approx(float x) { return exp2f(x); }

static void copy_later(u32 to, const void* from, int bytes, bool inside) {
    memset(shared_at(to, bytes), 0xff, bytes);
    fibres[thread_now].copies.push_back({to, from, bytes, inside});
}
DEVICE void copy_16(u32 to, const void* from, bool inside) { copy_later(to, from, 16, inside); }
DEVICE void copy_4(u32 to, const void* from, bool inside) { copy_later(to, from, 4, inside); }
DEVICE void copies_commit() {}
DEVICE void copies_wait() {
    for (auto& copy : fibres[thread_now].copies) {
        unsigned char* to = shared_at(copy.to, copy.bytes);
        if (copy.inside) memcpy(to, copy.from, copy.bytes);
        else memset(to, 0, copy.bytes);
    }
    fibres[thread_now].copies.clear();
}
DEVICE void block_barrier() {
    meet(block_meeting, thread_count, thread_now, nullptr, [](void**) {});
}
DEVICE void warp_barrier() {
    meet(warp_meetings[WARP], 32, LANE, nullptr, [](void**) {});
}
DEVICE float2 load_pair(u32 from) {
    float2 x;
    memcpy(&x, shared_at(from, 8), 8);
    return x;
}
DEVICE float* shared_floats() { return (float*)shared_bytes; }

static void load_matrices_of(u32 (&f)[4], u32 row, bool transposed) {
    struct Lane {
        u32* f;
        u32 row;
    } mine = {f, row};
    meet(warp_meetings[WARP], 32, LANE, &mine, [transposed](void** slots) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            u16 x[8][8];
            for (int r = 0; r < 8; ++r) memcpy(x[r], shared_at(((Lane*)slots[matrix * 8 + r])->row, 16), 16);
            for (int lane = 0; lane < 32; ++lane) {
                const int r = lane / 4, c = lane % 4 * 2;
                const u16 low = transposed ? x[c][r] : x[r][c], high = transposed ? x[c + 1][r] : x[r][c + 1];
                ((Lane*)slots[lane])->f[matrix] = low | (u32)high << 16;
            }
        }
    });
}
DEVICE void load_matrices(u32 (&f)[4], u32 row) { load_matrices_of(f, row, false); }
DEVICE void load_matrices_transposed(u32 (&f)[4], u32 row) { load_matrices_of(f, row, true); }

static float half_of(u32 x, int high) { return bf16_to_float((u16)(high ? x >> 16 : x)); }

struct MmaLane {
    float* c;
    const u32* a;
    u32 b[2];
};
// Rows and columns as the PTX ISA gives them for mma.m16n8k16 with 16-bit elements.
static void mma_of_warp(void** slots) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaLane& x = *(MmaLane*)slots[lane];
        const int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
            const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = half_of(x.a[i / 2], i & 1);
        }
        for (int i = 0; i < 4; ++i) b[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = half_of(x.b[i / 2], i & 1);
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            ((MmaLane*)slots[lane])->c[i] += sum;
        }
}
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MmaLane mine = {c, a, {b0, b1}};
    meet(warp_meetings[WARP], 32, LANE, &mine, mma_of_warp);
}
DEVICE float shuffle_xor(float x, int lanes) {
    struct Lane {
        float in, out;
    } mine = {x, 0.0f};
    meet(warp_meetings[WARP], 32, LANE, &mine, [lanes](void** slots) {
        for (int lane = 0; lane < 32; ++lane) ((Lane*)slots[lane])->out = ((Lane*)slots[lane ^ lanes])->in;
    });
    return mine.out;
}
DEVICE bool any_lane(bool x) {
    bool mine = x;
    meet(warp_meetings[WARP], 32, LANE, &mine, [](void** slots) {
        bool any = false;
        for (int lane = 0; lane < 32; ++lane) any |= *(bool*)slots[lane];
        for (int lane = 0; lane < 32; ++lane) *(bool*)slots[lane] = any;
    });
    return mine;
}

// wgmma: done when it is issued; what a tile holds is found by its descriptor.
#define ATTENTION_WGMMA
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
template <int PENDING> DEVICE void wgmma_wait() {}
DEVICE void publish_to_wgmma() {}
template <int N> DEVICE void pin(float (&)[N][4]) {}

// Element (row, column) of an operand; rows are 64 bf16, swizzled by bits of the address. Stored
// [row][k], the column is k; stored [k][column], panels of 64 columns follow each other.
static float operand(u64 descriptor, int row, int column, bool column_is_contiguous_k) {
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
    bool add;
};
static void wgmma_of_group(void** slots, int tiles) {
    static float a[64][16], b[128][16];
    const WgmmaThread& first = *(WgmmaThread*)slots[0];
    for (int thread = 0; thread < 128; ++thread) {
        const WgmmaThread& x = *(WgmmaThread*)slots[thread];
        if (x.b_tile != first.b_tile || x.a_tile != first.a_tile || x.add != first.add) abort();
        if (!x.a) continue;
        for (int i = 0; i < 8; ++i)
            a[thread / 32 * 16 + thread % 32 / 4 + (i & 2 ? 8 : 0)][thread % 4 * 2 + (i & 1) + (i & 4 ? 8 : 0)] = half_of(x.a[i / 2], i & 1);
    }
    if (!first.a)
        for (int r = 0; r < 64; ++r)
            for (int k = 0; k < 16; ++k) a[r][k] = operand(first.a_tile, r, k, true);
    for (int n = 0; n < tiles * 8; ++n)
        for (int k = 0; k < 16; ++k) b[n][k] = first.a ? operand(first.b_tile, k, n, false) : operand(first.b_tile, n, k, true);
    for (int thread = 0; thread < 128; ++thread)
        for (int n = 0; n < tiles; ++n)
            for (int i = 0; i < 4; ++i) {
                const int row = thread / 32 * 16 + thread % 32 / 4 + (i & 2 ? 8 : 0), column = n * 8 + thread % 4 * 2 + (i & 1);
                float& c = ((WgmmaThread*)slots[thread])->c[n][i];
                float sum = first.add ? c : 0.0f;
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[column][k];
                c = sum;
            }
}
template <int N> DEVICE void wgmma_shared(float (&c)[N][4], u64 a, u64 b, bool add) {
    WgmmaThread mine = {c, nullptr, a, b, add};
    meet(group_meetings[thread_now / 128], 128, thread_now % 128, &mine, [](void** slots) { wgmma_of_group(slots, N); });
}
template <int N> DEVICE void wgmma_registers(float (&c)[N][4], const u32 (&a)[4], u64 b) {
    WgmmaThread mine = {c, a, 0, b, true};
    meet(group_meetings[thread_now / 128], 128, thread_now % 128, &mine, [](void** slots) { wgmma_of_group(slots, N); });
}

#include "../../kernels/attention.cu"

// ---- The reference ----------------------------------------------------------------------------------

struct Shape {
    int heads, kv_heads, dim, window;
    std::vector<u32> bounds;
};
struct Tensors {
    std::vector<float> q, k, v, dout, o, lse, dq, dk, dv;
};

static Tensors reference(const Shape& shape, const Tensors& in) {
    const int heads = shape.heads, kv = shape.kv_heads, dim = shape.dim, tokens = shape.bounds.back();
    const double scale = 1 / std::sqrt((double)dim);
    std::vector<double> dk(in.k.size()), dv(in.k.size());
    Tensors out = in;
    out.o.assign(in.q.size(), 0);
    out.dq.assign(in.q.size(), 0);
    out.lse.assign(heads * tokens, 0);
    for (size_t s = 0; s + 1 < shape.bounds.size(); ++s)
        for (int token = shape.bounds[s]; token < (int)shape.bounds[s + 1]; ++token)
            for (int head = 0; head < heads; ++head) {
                const size_t row = ((size_t)token * heads + head) * dim;
                const int from = std::max<int>(shape.bounds[s], token + 1 - shape.window);
                std::vector<double> p, o(dim), dq(dim);
                double sum = 0, delta = 0;
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    double x = 0;
                    for (int d = 0; d < dim; ++d) x += (double)in.q[row + d] * in.k[at + d];
                    p.push_back(std::exp(x * scale));
                    sum += p.back();
                }
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    p[j - from] /= sum;
                    for (int d = 0; d < dim; ++d) o[d] += p[j - from] * in.v[at + d];
                }
                for (int d = 0; d < dim; ++d) delta += o[d] * in.dout[row + d];
                for (int j = from; j <= token; ++j) {
                    const size_t at = ((size_t)j * kv + head / (heads / kv)) * dim;
                    double dp = 0;
                    for (int d = 0; d < dim; ++d) dp += (double)in.dout[row + d] * in.v[at + d];
                    const double ds = p[j - from] * (dp - delta) * scale;
                    for (int d = 0; d < dim; ++d) {
                        dq[d] += ds * in.k[at + d];
                        dk[at + d] += ds * in.q[row + d];
                        dv[at + d] += p[j - from] * in.dout[row + d];
                    }
                }
                for (int d = 0; d < dim; ++d) out.o[row + d] = o[d], out.dq[row + d] = dq[d];
                out.lse[(size_t)head * tokens + token] = std::log(sum);
            }
    out.dk.assign(dk.begin(), dk.end());
    out.dv.assign(dv.begin(), dv.end());
    return out;
}

// ---- The kernels --------------------------------------------------------------------------------------

static std::vector<u32> units_of(const Shape& shape, int rows) {
    std::vector<u32> units;
    for (size_t s = 0; s + 1 < shape.bounds.size(); ++s)
        for (u32 first = 0; first < shape.bounds[s + 1] - shape.bounds[s]; first += rows)
            units.insert(units.end(), {shape.bounds[s], shape.bounds[s + 1] - shape.bounds[s], first, 0});
    return units;
}

template <class T> static std::vector<T> to(const std::vector<float>& x);
template <> std::vector<float> to(const std::vector<float>& x) { return x; }
template <> std::vector<u16> to(const std::vector<float>& x) {
    std::vector<u16> y;
    for (float f : x) y.push_back(float_to_bf16(f));
    return y;
}
static std::vector<float> from(const std::vector<float>& x) { return x; }
static std::vector<float> from(const std::vector<u16>& x) {
    std::vector<float> y;
    for (u16 f : x) y.push_back(bf16_to_float(f));
    return y;
}

// The outputs of a kernel set; `Kernels` has forward, queries and keys over pointers of type T.
template <class T, class Kernels> static Tensors run(const Shape& shape, const Tensors& in, Kernels kernels) {
    const int tokens = shape.bounds.back();
    const float scale = 1 / std::sqrt((float)shape.dim);
    const Problem p = {(u64)tokens, shape.heads, shape.kv_heads, std::min(shape.window, tokens), scale};
    auto q = to<T>(in.q), k = to<T>(in.k), v = to<T>(in.v), dout = to<T>(in.dout);
    std::vector<T> o(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
    std::vector<float> lse(shape.heads * tokens), delta(lse.size());
    kernels.forward(shape, p, q.data(), k.data(), v.data(), o.data(), lse.data());
    launch((tokens + 3) / 4, shape.heads, 1, 128, 0, [&] { row_delta<T>(o.data(), dout.data(), delta.data(), shape.dim, p); });
    kernels.queries(shape, p, q.data(), k.data(), v.data(), dout.data(), lse.data(), delta.data(), dq.data());
    kernels.keys(shape, p, q.data(), k.data(), v.data(), dout.data(), lse.data(), delta.data(), dk.data(), dv.data());
    Tensors out = in;
    out.o = from(o), out.lse = lse, out.dq = from(dq), out.dk = from(dk), out.dv = from(dv);
    return out;
}

template <int D, int WARPS, int KEYS, int QUERIES, int SLICE> struct Tensor {
    void forward(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* o, float* lse) {
        auto units = units_of(shape, WARPS * 16);
        const u32 row = D * 2 + 16, stages = 4 * WARPS * 8 * row;
        launch(units.size() / 4, shape.heads, 1, WARPS * 32, stages + (D > 128 ? WARPS * 16 * row : 0), [&] { ::forward<D, WARPS>(q, k, v, o, lse, units.data(), p); });
    }
    void queries(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse, float* delta, u16* dq) {
        auto units = units_of(shape, 64);
        launch(units.size() / 4, shape.heads, 1, 128, (2 * 64 + 4 * KEYS) * (D * 2 + 16), [&] { backward_queries<D, 4, KEYS>(q, k, v, dout, lse, delta, dq, units.data(), p); });
    }
    void keys(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse, float* delta, u16* dk, u16* dv) {
        auto units = units_of(shape, 64);
        launch(units.size() / 4, shape.kv_heads, D / SLICE, 128, (2 * 64 + 4 * QUERIES) * (D * 2 + 16) + 16 * QUERIES, [&] { backward_keys<D, 4, QUERIES, SLICE>(q, k, v, dout, lse, delta, dk, dv, units.data(), p); });
    }
};

template <int D, int KEYS, int QUERIES> struct Wgmma {
    void forward(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* o, float* lse) {
        auto units = units_of(shape, 128);
        launch(units.size() / 4, shape.heads, 1, 256, 5 * 128 * D * 2, [&] { forward_wgmma<D>(q, k, v, o, lse, units.data(), p); });
    }
    void queries(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse, float* delta, u16* dq) {
        auto units = units_of(shape, 128);
        launch(units.size() / 4, shape.heads, 1, 256, (2 * 128 + 6 * KEYS) * D * 2, [&] { backward_queries_wgmma<D, KEYS>(q, k, v, dout, lse, delta, dq, units.data(), p); });
    }
    void keys(const Shape& shape, Problem p, u16* q, u16* k, u16* v, u16* dout, float* lse, float* delta, u16* dk, u16* dv) {
        auto units = units_of(shape, 128);
        launch(units.size() / 4, shape.kv_heads, 1, 256, (2 * 128 + 6 * QUERIES) * D * 2 + 3 * 1024, [&] { backward_keys_wgmma<D, QUERIES>(q, k, v, dout, lse, delta, dk, dv, units.data(), p); });
    }
};

template <class T> struct Plain {
    void forward(const Shape& shape, Problem p, T* q, T* k, T* v, T* o, float* lse) {
        launch((p.tokens + 3) / 4, shape.heads, 1, 128, 0, [&] { plain_forward<T>(q, k, v, o, lse, shape.bounds.data(), shape.bounds.size() - 1, shape.dim, p); });
    }
    void queries(const Shape& shape, Problem p, T* q, T* k, T* v, T* dout, float* lse, float* delta, T* dq) {
        launch((p.tokens + 3) / 4, shape.heads, 1, 128, 0, [&] { plain_queries<T>(q, k, v, dout, lse, delta, dq, shape.bounds.data(), shape.bounds.size() - 1, shape.dim, p); });
    }
    void keys(const Shape& shape, Problem p, T* q, T* k, T* v, T* dout, float* lse, float* delta, T* dk, T* dv) {
        launch((p.tokens + 3) / 4, shape.kv_heads, 1, 128, 0, [&] { plain_keys<T>(q, k, v, dout, lse, delta, dk, dv, shape.bounds.data(), shape.bounds.size() - 1, shape.dim, p); });
    }
};

static int failures = 0;

// Largest difference beyond half a unit of bf16, over the root mean square (0.1 at least, for
// gradients that are zero).
static double difference(const std::vector<float>& a, const std::vector<float>& b) {
    double top = 0, square = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        if (!(a[i] == a[i])) return std::numeric_limits<double>::infinity();
        top = std::max(top, std::fabs((double)a[i] - b[i]) - std::fabs(b[i]) / 256);
        square += (double)b[i] * b[i];
    }
    return top / std::max(0.1, std::sqrt(square / a.size()));
}

template <class T, class Kernels> static void check(const std::string& name, Shape shape, float loud, double limit, Kernels kernels) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    auto fill = [&](size_t count, float by) {
        std::vector<float> x(count);
        for (float& f : x) f = bf16_to_float(float_to_bf16(normal(random) * by));
        return x;
    };
    const size_t tokens = shape.bounds.back(), q = tokens * shape.heads * shape.dim, k = tokens * shape.kv_heads * shape.dim;
    Tensors in;
    in.q = fill(q, loud), in.k = fill(k, 1), in.v = fill(k, 1), in.dout = fill(q, 1);
    const Tensors wanted = reference(shape, in), got = run<T>(shape, in, kernels);
    const double differences[] = {difference(got.o, wanted.o), difference(got.lse, wanted.lse), difference(got.dq, wanted.dq), difference(got.dk, wanted.dk), difference(got.dv, wanted.dv)};
    bool right = true;
    printf("%-12s D %3d heads %d/%d window %5d tokens %4zu:", name.c_str(), shape.dim, shape.heads, shape.kv_heads, shape.window, tokens);
    for (double d : differences) printf(" %.1e", d), right &= d < limit;
    printf("  %s\n", right ? "ok" : "WRONG");
    fflush(stdout);
    failures += !right;
}

int main() {
    const int all = 1 << 30;
    const double bf16 = 0.08, f32 = 2e-5;
    printf("difference / rms of: o lse dq dk dv\n");
    check<float>("plain f32", {4, 2, 40, all, {0, 5, 6, 40}}, 1, f32, Plain<float>());
    check<float>("plain f32", {2, 1, 64, 7, {0, 33}}, 2, f32, Plain<float>());
    check<u16>("plain bf16", {2, 2, 48, all, {0, 20, 31}}, 1, bf16, Plain<u16>());
    check<u16>("mma", {2, 1, 64, all, {0, 200, 201, 233}}, 1, bf16, Tensor<64, 8, 64, 64, 64>());
    check<u16>("mma", {2, 2, 128, all, {0, 150, 300}}, 1, bf16, Tensor<128, 8, 32, 32, 128>());
    check<u16>("mma", {3, 1, 128, 70, {0, 290}}, 4, bf16, Tensor<128, 8, 32, 32, 128>());
    check<u16>("mma", {2, 1, 96, 33, {0, 7, 170}}, 1, bf16, Tensor<96, 8, 64, 32, 96>());
    check<u16>("mma", {1, 1, 80, all, {0, 140}}, 1, bf16, Tensor<80, 8, 64, 32, 80>());
    check<u16>("mma", {2, 2, 32, 1, {0, 64, 140}}, 1, bf16, Tensor<32, 8, 64, 64, 32>());
    check<u16>("mma", {2, 1, 256, 40, {0, 100, 130}}, 1, bf16, Tensor<256, 4, 16, 16, 128>());
    check<u16>("wgmma", {1, 1, 64, all, {0, 200, 201, 233}}, 1, bf16, Wgmma<64, 128, 64>());
    check<u16>("wgmma", {2, 1, 128, all, {0, 420}}, 3, bf16, Wgmma<128, 64, 64>());
    check<u16>("wgmma", {1, 1, 128, 100, {0, 128, 500}}, 1, bf16, Wgmma<128, 64, 64>());
    if (failures) printf("%d of the checks failed\n", failures);
    return failures != 0;
}
