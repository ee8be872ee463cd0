// Attention and its gradient without tensor cores: f32, and bf16 of any width; and delta, Σ do·o.
//
// Formula, shapes and masks as in attention.cu; sums in f32, exponentials by expf. A warp has one
// row and lane l elements l, l + 32, … of it. Deterministic: a row's sums are one warp's, in a
// fixed order. Slow: speed is attention.cu's.
// Launch: four rows a block of 128 threads; grids (⌈T / 4⌉, heads), for keys (⌈T / 4⌉, kv_heads).
// Dynamic shared memory: 4·D floats, for keys 8·D.
// Golden test: golden_kernels::attention; others as attention.cu.

#ifndef ATTENTION_EMULATED
#include "attention_primitives.cuh"
#endif
#include "attention_common.cuh"

DEVICE float widen(float x)
{
    return x;
}
DEVICE float widen(u16 x)
{
    return bits_to_float((u32)x << 16);
}
DEVICE void narrow(float& out, float x)
{
    out = x;
}
DEVICE void narrow(u16& out, float x)
{
    out = (u16)pack_bf16(x, 0.0f);
}

DEVICE float sum_of_warp(float x)
{
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
    return x;
}

template <class T>
DEVICE float dot(const T* a, const T* b, int width)
{
    float sum = 0.0f;
    for (int d = LANE; d < width; d += 32) sum += widen(a[d]) * widen(b[d]);
    return sum_of_warp(sum);
}

// The sequence of a token, by bisection of its bounds.
DEVICE Unit sequence_of(const u32* bounds, int sequences, int token)
{
    int low = 0, high = sequences - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (bounds[middle] <= (u32)token)
            low = middle;
        else
            high = middle - 1;
    }
    return Unit{bounds[low], (int)(bounds[low + 1] - bounds[low]), (int)(token - bounds[low])};
}

// Elements at[0..4), of which `left` exist and the others are 0. `whole` says that bf16 may be
// read eight bytes at a time.
DEVICE void load_4(const float* at, int left, bool whole, float (&x)[4])
{
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = i < left ? at[i] : 0.0f;
}

DEVICE void load_4(const u16* at, int left, bool whole, float (&x)[4])
{
    if (whole) {
        const u64 four = *(const u64*)at;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = widen((u16)(four >> (16 * i)));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = i < left ? widen(at[i]) : 0.0f;
    }
}

// delta = Σ do·o of each token and head; a warp each, four neighbouring elements a lane.
template <class T>
DEVICE void row_delta(const T* o, const T* dout, float* delta, int width, Problem p)
{
    const u64 token = (u64)BLOCK_X * 4 + WARP;
    if (token >= p.tokens) return;
    const u64 at = (token * p.heads + BLOCK_Y) * width;
    const bool whole = width % 4 == 0 && ((u64)o | (u64)dout) % 8 == 0;
    float sum = 0.0f;
    for (int d = LANE * 4; d < width; d += 128) {
        float a[4], b[4];
        load_4(o + at + d, width - d, whole, a);
        load_4(dout + at + d, width - d, whole, b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += a[i] * b[i];
    }
    sum = sum_of_warp(sum);
    if (LANE == 0) delta[BLOCK_Y * p.tokens + token] = sum;
}

template <class T>
DEVICE void plain_forward(const T* q, const T* k, const T* v, T* o, float* lse, const u32* bounds,
                          int sequences, int width, Problem p)
{
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
        for (int d = LANE; d < width; d += 32)
            sums[d] = sums[d] * shrink + weight * widen(v[at + d]);
    }
    o += (token * p.heads + BLOCK_Y) * width;
    for (int d = LANE; d < width; d += 32) narrow(o[d], sums[d] / sum);
    if (LANE == 0) lse[BLOCK_Y * p.tokens + token] = max + logf(sum);
}

template <class T>
DEVICE void plain_queries(const T* q, const T* k, const T* v, const T* dout, const float* lse,
                          const float* delta, T* dq, const u32* bounds, int sequences, int width,
                          Problem p)
{
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

template <class T>
DEVICE void plain_keys(const T* q, const T* k, const T* v, const T* dout, const float* lse,
                       const float* delta, T* dk, T* dv, const u32* bounds, int sequences,
                       int width, Problem p)
{
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
            const u64 at = ((u64)(unit.start + i) * p.heads + head) * width,
                      at_row = head * p.tokens + unit.start + i;
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

#define PLAIN_KERNELS(NAME, T)                                                                     \
    KERNEL(128)                                                                                    \
    attention_delta_##NAME(const T* o, const T* dout, float* delta, int width, PROBLEM_ARGUMENTS)  \
    {                                                                                              \
        row_delta<T>(o, dout, delta, width, PROBLEM);                                              \
    }                                                                                              \
    KERNEL(128)                                                                                    \
    attention_forward_plain_##NAME(const T* q, const T* k, const T* v, T* o, float* lse,           \
                                   const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS) \
    {                                                                                              \
        plain_forward<T>(q, k, v, o, lse, bounds, sequences, width, PROBLEM);                      \
    }                                                                                              \
    KERNEL(128)                                                                                    \
    attention_backward_queries_plain_##NAME(                                                       \
        const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta,   \
        T* dq, const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS)                     \
    {                                                                                              \
        plain_queries<T>(q, k, v, dout, lse, delta, dq, bounds, sequences, width, PROBLEM);        \
    }                                                                                              \
    KERNEL(128)                                                                                    \
    attention_backward_keys_plain_##NAME(                                                          \
        const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta,   \
        T* dk, T* dv, const u32* bounds, int sequences, int width, PROBLEM_ARGUMENTS)              \
    {                                                                                              \
        plain_keys<T>(q, k, v, dout, lse, delta, dk, dv, bounds, sequences, width, PROBLEM);       \
    }

PLAIN_KERNELS(bf16, u16)
PLAIN_KERNELS(f32, float)
