// Additions and the moving of rows.
//
//   add:      out = a + b
//   gather:   out[i] = x[rows[i]];   scatter: out[rows[i]] = x[i], rows distinct
//
// Shapes: add [n]; x, out [·, C]; in T (bf16 or f32); rows [n] u32.
// Arithmetic: f32; rows are moved bit for bit.
// Deterministic: no sums across threads.
// Launch: add: a thread for eight elements. Others: grid (rows, C / 4096), 128 threads of four
// times eight columns.
// In place: out of add may be a or b.
// Golden test: golden_kernels::rows

#include "common.cuh"

constexpr int THREADS = 128;
constexpr int SWEEPS = 4;

template <bool WHOLE, typename T>
__device__ inline void add(const T* a, const T* b, T* out, u64 index, u64 left)
{
    float v[8], other[8];
    load_f32<WHOLE>(a + index, left, v);
    load_f32<WHOLE>(b + index, left, other);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] += other[j];
    store<WHOLE>(out + index, v, left);
}

// First of this thread's eight columns in a sweep.
__device__ inline u32 sweep_column(int sweep)
{
    return ((blockIdx.y * SWEEPS + sweep) * THREADS + threadIdx.x) * 8;
}

// to[0..columns) = from[0..columns).
template <bool WHOLE, typename T>
__device__ inline void move_row(const T* __restrict__ from, T* __restrict__ to, u32 columns)
{
    if constexpr (!WHOLE) {
        for (u32 column = blockIdx.y * blockDim.x + threadIdx.x; column < columns;
             column += gridDim.y * blockDim.x)
            to[column] = from[column];
    } else {
        Eight<T> held[SWEEPS];
#pragma unroll
        for (int sweep = 0; sweep < SWEEPS; ++sweep)
            held[sweep] =
                load<true>(from + sweep_column(sweep), rest(sweep_column(sweep), columns));
#pragma unroll
        for (int sweep = 0; sweep < SWEEPS; ++sweep)
            if (sweep_column(sweep) < columns)
                *reinterpret_cast<Eight<T>*>(to + sweep_column(sweep)) = held[sweep];
    }
}

template <bool WHOLE, typename T>
__device__ inline void gather(const T* __restrict__ x,         // [T, C]
                              const u32* __restrict__ rows,    // [n]
                              T* __restrict__ out,             // [n, C]
                              u32 columns)
{
    const u64 from = rows[blockIdx.x];
    move_row<WHOLE>(x + from * columns, out + (u64)blockIdx.x * columns, columns);
}

template <bool WHOLE, typename T>
__device__ inline void scatter(const T* __restrict__ x,        // [n, C]
                               const u32* __restrict__ rows,   // [n]
                               T* __restrict__ out,            // [T, C]
                               u32 columns)
{
    const u64 to = rows[blockIdx.x];
    move_row<WHOLE>(x + (u64)blockIdx.x * columns, out + to * columns, columns);
}

extern "C" __global__ void __launch_bounds__(256)
    add_bf16(const bf16* a, const bf16* b, bf16* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? add<true>(a, b, out, index, left)
                        : add<false>(a, b, out, index, left);
}

extern "C" __global__ void __launch_bounds__(256)
    add_f32(const float* a, const float* b, float* out, u64 count, u32 vector)
{
    const u64 index = first_element(), left = rest(index, count);
    whole(vector, left) ? add<true>(a, b, out, index, left)
                        : add<false>(a, b, out, index, left);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows_bf16(const bf16* x, const u32* rows, bf16* out, u32 columns, u32 vector)
{
    vector ? gather<true>(x, rows, out, columns)
           : gather<false>(x, rows, out, columns);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows_f32(const float* x, const u32* rows, float* out, u32 columns, u32 vector)
{
    vector ? gather<true>(x, rows, out, columns)
           : gather<false>(x, rows, out, columns);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_rows_bf16(const bf16* x, const u32* rows, bf16* out, u32 columns, u32 vector)
{
    vector ? scatter<true>(x, rows, out, columns)
           : scatter<false>(x, rows, out, columns);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_rows_f32(const float* x, const u32* rows, float* out, u32 columns, u32 vector)
{
    vector ? scatter<true>(x, rows, out, columns)
           : scatter<false>(x, rows, out, columns);
}
