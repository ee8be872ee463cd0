// Rotary embedding in place, pairing (i, i + D/2).
//
//   (a, b) → (a·cos − b·sin, b·cos + a·sin);  `sign` −1 negates sin: the gradient.
//
// Shapes: x [T, heads, D] in T (bf16 or f32); table [positions, 2, D/2] f32: cos, then sin;
// positions [T] u32. Arithmetic: f32.
// Deterministic: no sums; each pair belongs to one thread.
// Launch: a block for a token; a thread takes eight pairs of one head.
// Golden test: golden_kernels::rotations

#include "common.cuh"

template <bool WHOLE, typename T>
__device__ inline void rope(T* __restrict__ x,                   // [T, heads, D]
                            const float* __restrict__ table,     // [positions, 2, D/2]
                            const u32* __restrict__ positions,   // [T]
                            u32 heads, u32 half, float sign)
{
    const u64 token = blockIdx.x;
    const u32 units = (half + 7) / 8;  // of eight pairs, in a head
    const float* cosines = table + (u64)positions[token] * 2 * half;
    for (u32 unit = threadIdx.x; unit < heads * units; unit += blockDim.x) {
        const u32 pair = unit % units * 8;
        const u64 left = half - pair;
        T* first = x + (token * heads + unit / units) * 2 * half + pair;
        T* second = first + half;
        float a[8], b[8], c[8], s[8], turned_a[8], turned_b[8];
        load_f32<WHOLE>(first, left, a);
        load_f32<WHOLE>(second, left, b);
        load_f32<WHOLE>(cosines + pair, left, c);
        load_f32<WHOLE>(cosines + half + pair, left, s);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float sine = sign * s[j];
            turned_a[j] = a[j] * c[j] - b[j] * sine;
            turned_b[j] = b[j] * c[j] + a[j] * sine;
        }
        store<WHOLE>(first, turned_a, left);
        store<WHOLE>(second, turned_b, left);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rope_bf16(bf16* x, const float* table, const u32* positions, u32 heads, u32 half, float sign,
              u32 vector)
{
    vector ? rope<true>(x, table, positions, heads, half, sign)
           : rope<false>(x, table, positions, heads, half, sign);
}

extern "C" __global__ void __launch_bounds__(256)
    rope_f32(float* x, const float* table, const u32* positions, u32 heads, u32 half, float sign,
             u32 vector)
{
    vector ? rope<true>(x, table, positions, heads, half, sign)
           : rope<false>(x, table, positions, heads, half, sign);
}
