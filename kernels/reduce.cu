// Sums over rows (gradients of biases and norm weights) and over whole arrays.
//
//   column_partials:  partial[b, c] = Σ x[r, c] over the rows r of block b
//   add_partials:     out[c] += Σ_b partial[b, c]
//   square_partials:  partial[b] = Σ x² over piece b;   sum_partials: Σ x
//   total:            out = Σ_b partial[b]
//
// Shapes: x [R, C] in T (bf16 or f32) for columns, [n] f32 for whole arrays; partial f32 for
// columns, f64 for whole arrays; out [C] f32, or one f64.
// Accumulation: f32 over columns, f64 over whole arrays (a square of an f32 is exact in f64).
// Deterministic: pieces follow from the shape; within one, threads add in order and are combined in
// a fixed tree; partial sums are added in order within slices, slices in order.
// Launch: column_partials grid (C / 256, blocks), 256 threads; add_partials grid C / 32, 32 × 16
// threads; square_partials and sum_partials grid pieces, 256 threads; total one block of 256.
// Golden test: golden_kernels::sums

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int SLICES = 16;
// Loads of a thread in flight; the additions stay in order.
constexpr int BATCH = 4;

// Eight columns a lane, a row a warp and turn.
template <bool WHOLE, typename T>
__device__ inline void column_partials(const T* __restrict__ x,      // [R, C]
                                       float* __restrict__ partial,  // [blocks, C]
                                       u64 rows, u64 rows_per_block, u32 columns,
                                       float (*of_warps)[256])  // shared [8, 256]
{
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 column = (blockIdx.x * 32 + lane) * 8;
    const u64 left = rest(column, columns);
    const u64 first = blockIdx.y * rows_per_block;
    const u64 end = min(first + rows_per_block, rows);
    const u64 step = THREADS / 32;
    float sums[8] = {};
    auto add = [&](const Eight<T>& x) {
        float v[8];
        unpack(x, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] += v[j];
    };
    u64 row = first + warp;
#pragma unroll 1
    for (; row + (BATCH - 1) * step < end; row += BATCH * step) {
        Eight<T> held[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            held[k] = load<WHOLE>(x + (row + k * step) * columns + column, left);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) add(held[k]);
    }
#pragma unroll 1
    for (; row < end; row += step) add(load<WHOLE>(x + row * columns + column, left));
#pragma unroll
    for (int j = 0; j < 8; ++j) of_warps[warp][lane * 8 + j] = sums[j];
    __syncthreads();
    const u32 mine = blockIdx.x * 256 + threadIdx.x;
    if (mine >= columns) return;
    float sum = of_warps[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) sum += of_warps[w][threadIdx.x];
    partial[(u64)blockIdx.y * columns + mine] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    column_partials_bf16(const bf16* x, float* partial, u64 rows, u64 rows_per_block, u32 columns,
                         u32 vector)
{
    __shared__ float of_warps[THREADS / 32][256];
    vector ? column_partials<true>(x, partial, rows, rows_per_block, columns, of_warps)
           : column_partials<false>(x, partial, rows, rows_per_block, columns, of_warps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    column_partials_f32(const float* x, float* partial, u64 rows, u64 rows_per_block, u32 columns,
                        u32 vector)
{
    __shared__ float of_warps[THREADS / 32][256];
    vector ? column_partials<true>(x, partial, rows, rows_per_block, columns, of_warps)
           : column_partials<false>(x, partial, rows, rows_per_block, columns, of_warps);
}

extern "C" __global__ void __launch_bounds__(32 * SLICES)
    add_partials(const float* __restrict__ partial,  // [blocks, C]
                 float* __restrict__ out,            // [C]
                 u32 blocks, u32 columns)
{
    __shared__ float of_slices[SLICES][32];
    const u32 column = blockIdx.x * 32 + threadIdx.x, slice = threadIdx.y;
    const u32 length = (blocks + SLICES - 1) / SLICES;
    const u32 first = slice * length, end = min(first + length, blocks);
    float sum = 0.0f;
    if (column < columns) {
        u32 block = first;
#pragma unroll 1
        for (; block + BATCH <= end; block += BATCH) {
            float held[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
                held[k] = partial[(u64)(block + k) * columns + column];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) sum += held[k];
        }
#pragma unroll 1
        for (; block < end; ++block) sum += partial[(u64)block * columns + column];
    }
    of_slices[slice][threadIdx.x] = sum;
    __syncthreads();
    if (slice > 0 || column >= columns) return;
#pragma unroll
    for (int s = 1; s < SLICES; ++s) sum += of_slices[s][threadIdx.x];
    out[column] += sum;
}

// Sum of this block's piece of x, of its squares if SQUARES.
template <bool SQUARES>
__device__ inline void piece_sum(const float* __restrict__ x,   // [n]
                                 double* __restrict__ partial,  // [pieces]
                                 u64 count, u64 piece, bool vector)
{
    __shared__ double of_warps[THREADS / 32];
    const u64 first = blockIdx.x * piece;
    const u64 end = min(first + piece, count);
    double sum = 0.0;
    auto add = [&](const Eight<float>& x) {
        float v[8];
        unpack(x, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += SQUARES ? (double)v[j] * (double)v[j] : (double)v[j];
    };
    const u64 step = THREADS * 8;
    u64 index = first + threadIdx.x * 8;
    if (vector) {
#pragma unroll 1
        for (; index + (BATCH - 1) * step + 8 <= end; index += BATCH * step) {
            Eight<float> held[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; ++k) held[k] = load<true>(x + index + k * step, 8);
#pragma unroll
            for (int k = 0; k < BATCH; ++k) add(held[k]);
        }
#pragma unroll 1
        for (; index + 8 <= end; index += step) add(load<true>(x + index, 8));
    }
#pragma unroll 1
    for (; index < end; index += step) add(load<false>(x + index, end - index));
    sum = group_sum<THREADS>(sum, of_warps);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    square_partials(const float* x, double* partial, u64 count, u64 piece, u32 vector)
{
    piece_sum<true>(x, partial, count, piece, vector != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_partials(const float* x, double* partial, u64 count, u64 piece, u32 vector)
{
    piece_sum<false>(x, partial, count, piece, vector != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    total(const double* __restrict__ partial,  // [pieces]
          double* __restrict__ out,            // [1]
          u32 pieces)
{
    __shared__ double of_warps[THREADS / 32];
    double sum = 0.0;
    for (u32 index = threadIdx.x; index < pieces; index += THREADS) sum += partial[index];
    sum = group_sum<THREADS>(sum, of_warps);
    if (threadIdx.x == 0) *out = sum;
}
