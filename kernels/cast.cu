// Filling, converting, and rounding in place.
//
//   fill:     out[i] = value
//   convert:  out[i] = src[i] in out's format: bf16 → f32 exact, f32 → bf16 to nearest, ties to
//             even (a NaN becomes 0x7fff)
//   round:    f32 → bf16 at the front of the same memory
//
// Shapes: [n], bf16 or f32.
// Deterministic: no sums.
// Launch: a thread for eight elements. round_first is one block of 1024 threads.
//
// Rounding in place has no race and needs no scratch: elements [a, b) are read from bytes [4a, 4b)
// and written to bytes [2a, 2b). With b ≤ 2a these are apart, and what is written over belongs to
// elements below a, which earlier launches have read. So round_first does the first 8192 elements
// (all read before a barrier, then written), and launches of round_rest do [8192, 16384),
// [16384, 32768), … in stream order.
// Golden test: golden_kernels::elementwise

#include "common.cuh"

template <bool WHOLE, typename T>
__device__ inline void fill(T* __restrict__ out, float value, u64 index, u64 left)
{
    const float v[8] = {value, value, value, value, value, value, value, value};
    store<WHOLE>(out + index, v, left);
}

template <bool WHOLE, typename From, typename To>
__device__ inline void convert(const From* __restrict__ src, To* __restrict__ out, u64 index,
                               u64 left)
{
    float v[8];
    load_f32<WHOLE>(src + index, left, v);
    store<WHOLE>(out + index, v, left);
}

extern "C" __global__ void __launch_bounds__(256)
    fill_bf16(bf16* out, float value, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? fill<true>(out, value, index, left)
                        : fill<false>(out, value, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    fill_f32(float* out, float value, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? fill<true>(out, value, index, left)
                        : fill<false>(out, value, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    convert_bf16_f32(const bf16* src, float* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? convert<true>(src, out, index, left)
                        : convert<false>(src, out, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    convert_f32_bf16(const float* src, bf16* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? convert<true>(src, out, index, left)
                        : convert<false>(src, out, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    convert_bf16_bf16(const bf16* src, bf16* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? convert<true>(src, out, index, left)
                        : convert<false>(src, out, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    convert_f32_f32(const float* src, float* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? convert<true>(src, out, index, left)
                        : convert<false>(src, out, index, left);
}

// bf16 elements index.. of out = f32 elements index.. of x, both in one memory. A barrier lies
// between reading and writing if BARRIER: then all threads of the block come here.
template <bool WHOLE, bool BARRIER>
__device__ inline void round_eight(float* x, u64 index, u64 left)
{
    float v[8];
    load_f32<WHOLE>(x + index, left, v);
    if constexpr (BARRIER) __syncthreads();
    store<WHOLE>(reinterpret_cast<bf16*>(x) + index, v, left);
}

// x[0..count), count ≤ 8192: input and output overlap, and a block is all there is.
extern "C" __global__ void __launch_bounds__(1024) round_first(float* x, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    // The choice is the block's, so that its threads meet at one barrier.
    vector && count % 8 == 0 ? round_eight<true, true>(x, index, left)
                             : round_eight<false, true>(x, index, left);
}

// Elements [first, end) of x, end ≤ 2·first: input and output are apart.
extern "C" __global__ void __launch_bounds__(256)
    round_rest(float* x, u64 first, u64 end, u32 vector)
{
    const u64 index = first + first_element(), left = rest(index, end);
    whole(vector, left) ? round_eight<true, false>(x, index, left)
                        : round_eight<false, false>(x, index, left);
}
