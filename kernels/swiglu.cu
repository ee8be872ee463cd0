// SwiGLU and its gradient.
//
//   forward:   a = silu(g)·u,  silu(x) = x/(1 + e^−x)
//   backward:  dg = da·u·s·(1 + g·(1 − s)),  du = da·g·s,  s = 1/(1 + e^−g)
//
// Shapes: all [n] in T (bf16 or f32). Arithmetic: f32, with the accurate exponential and division.
// Deterministic: no sums.
// Launch: a thread for eight elements.
// In place: dg may be g and du may be u; each thread reads its own elements before it writes.
// Golden test: golden_kernels::elementwise

#include "common.cuh"

template <bool WHOLE, typename T>
__device__ inline void swiglu_forward(const T* __restrict__ g, const T* __restrict__ u,
                                      T* __restrict__ a, u64 index, u64 left)
{
    float gate[8], up[8];
    load_f32<WHOLE>(g + index, left, gate);
    load_f32<WHOLE>(u + index, left, up);
    // a = g/(1 + e^−g)·u
#pragma unroll
    for (int j = 0; j < 8; ++j) up[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    store<WHOLE>(a + index, up, left);
}

template <bool WHOLE, typename T>
__device__ inline void swiglu_backward(const T* g, const T* u, const T* __restrict__ da, T* dg,
                                       T* du, u64 index, u64 left)
{
    float gate[8], up[8], d[8];
    load_f32<WHOLE>(g + index, left, gate);
    load_f32<WHOLE>(u + index, left, up);
    load_f32<WHOLE>(da + index, left, d);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        // s = 1/(1 + e^−g)
        const float s = 1.0f / (1.0f + expf(-gate[j]));
        const float d_gate = d[j] * up[j] * (s * (1.0f + gate[j] * (1.0f - s)));
        up[j] = d[j] * (gate[j] * s);
        gate[j] = d_gate;
    }
    store<WHOLE>(dg + index, gate, left);
    store<WHOLE>(du + index, up, left);
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_forward_bf16(const bf16* g, const bf16* u, bf16* a, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? swiglu_forward<true>(g, u, a, index, left)
                        : swiglu_forward<false>(g, u, a, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_forward_f32(const float* g, const float* u, float* a, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? swiglu_forward<true>(g, u, a, index, left)
                        : swiglu_forward<false>(g, u, a, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_bf16(const bf16* g, const bf16* u, const bf16* da, bf16* dg, bf16* du,
                         u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? swiglu_backward<true>(g, u, da, dg, du, index, left)
                        : swiglu_backward<false>(g, u, da, dg, du, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_f32(const float* g, const float* u, const float* da, float* dg, float* du,
                        u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? swiglu_backward<true>(g, u, da, dg, du, index, left)
                        : swiglu_backward<false>(g, u, da, dg, du, index, left);
}
