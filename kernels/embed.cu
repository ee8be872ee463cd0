// Gradient of the embedding as a segment sum.
//
//   dw[ids[i]] += Σ dy[p] over p in positions[starts[i]..starts[i+1]], ascending
//
// Shapes: dy [T, H] in T (bf16 or f32); ids [n], starts [n + 1], positions [T] u32; dw [V, H] f32.
// Accumulation: f32; the sum of the segment first, then one addition to dw.
// Deterministic: ids are distinct, so one thread owns an element of dw and adds its segment in
// order. A segment's loads are independent, 128 bytes in flight; only additions are in sequence.
// Launch: grid (ids, columns / 1024), 128 threads of eight columns.
// Golden test: golden_kernels::rows

#include "common.cuh"

template <bool WHOLE, typename T>
__device__ inline void embed_backward(const T* __restrict__ dy,           // [T, H]
                                      const u32* __restrict__ ids,        // [n]
                                      const u32* __restrict__ starts,     // [n + 1]
                                      const u32* __restrict__ positions,  // [T]
                                      float* __restrict__ dw,             // [V, H]
                                      u32 hidden)
{
    const u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const u64 left = rest(column, hidden);
    if (left == 0) return;
    const u32 end = starts[blockIdx.x + 1];
    float sum[8] = {};
    auto add = [&](const Eight<T>& x) {
        float v[8];
        unpack(x, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += v[j];
    };
    constexpr int BATCH = 128 / sizeof(Eight<T>);
    u32 i = starts[blockIdx.x];
#pragma unroll 1
    for (; end - i >= BATCH; i += BATCH) {
        Eight<T> held[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            held[k] = load<WHOLE>(dy + (u64)positions[i + k] * hidden + column, left);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) add(held[k]);
    }
#pragma unroll 1
    for (; i < end; ++i) add(load<WHOLE>(dy + (u64)positions[i] * hidden + column, left));
    float* at = dw + (u64)ids[blockIdx.x] * hidden + column;
    float held[8];
    load_f32<WHOLE>(at, left, held);
#pragma unroll
    for (int j = 0; j < 8; ++j) held[j] += sum[j];
    store<WHOLE>(at, held, left);
}

extern "C" __global__ void __launch_bounds__(128)
    embed_backward_bf16(const bf16* dy, const u32* ids, const u32* starts, const u32* positions,
                        float* dw, u32 hidden, u32 vector)
{
    vector ? embed_backward<true>(dy, ids, starts, positions, dw, hidden)
           : embed_backward<false>(dy, ids, starts, positions, dw, hidden);
}

extern "C" __global__ void __launch_bounds__(128)
    embed_backward_f32(const float* dy, const u32* ids, const u32* starts, const u32* positions,
                       float* dw, u32 hidden, u32 vector)
{
    vector ? embed_backward<true>(dy, ids, starts, positions, dw, hidden)
           : embed_backward<false>(dy, ids, starts, positions, dw, hidden);
}
