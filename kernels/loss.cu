// Cross entropy of rows of logits, with or without its gradient in place.
//
//   loss[r] = max + ln Σ e^(z − max) − z[target];   z = (softmax(z) − onehot(target))·scale
//
// Shapes: z [R, V] in T (bf16 or f32), targets [R] u32, losses [R] f32. V below 2^32.
// Accumulation: f32, the exponentials of eight elements first; the logarithm in f64, rounded once.
// Deterministic: each thread keeps a running maximum and sum over its elements in order; threads
// are combined in a fixed tree.
// Launch: a block of 512 threads for a row, which it reads once, and a second time for the
// gradient.
// Golden test: golden_kernels::losses

#include "common.cuh"

constexpr int THREADS = 512;

// A maximum, and Σ e^(z − max) of what it was taken over.
struct Running {
    float max, sum;
};

// e^(from − to) as a factor of a sum; 1 where both are −∞, so that nothing turns NaN.
__device__ inline float rescale(float from, float to)
{
    return from == to ? 1.0f : expf(from - to);
}

__device__ inline Running combine(Running a, Running b)
{
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
}

// Calls work(elements, their first column, how many exist) for this thread's part of a row, in
// order; 64 bytes are in flight at once.
template <bool WHOLE, typename T, typename Work>
__device__ inline void sweep(const T* row, u32 columns, Work work)
{
    constexpr int BATCH = 64 / sizeof(Eight<T>);
    const u64 step = THREADS * 8;
    float v[8];
    u64 column = threadIdx.x * 8;
#pragma unroll 1
    for (; column + (BATCH - 1) * step < columns; column += BATCH * step) {
        Eight<T> held[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
            held[k] = load<WHOLE>(row + column + k * step, columns - column - k * step);
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            unpack(held[k], v);
            work(v, column + k * step, columns - column - k * step);
        }
    }
#pragma unroll 1
    for (; column < columns; column += step) {
        load_f32<WHOLE>(row + column, columns - column, v);
        work(v, column, columns - column);
    }
}

// Maximum and sum of a row, the same bits in every thread; `of_warps` is shared.
template <bool WHOLE, typename T>
__device__ inline Running reduce_row(const T* row, u32 columns, Running* of_warps)
{
    Running mine = {__uint_as_float(0xff800000u), 0.0f};  // −∞
    sweep<WHOLE>(row, columns, [&](const float(&v)[8], u64, u64 left) {
        float max = mine.max;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (WHOLE || j < left) max = fmaxf(max, v[j]);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (WHOLE || j < left) sum += expf(v[j] - max);
        mine = {max, mine.sum * rescale(mine.max, max) + sum};
    });
#pragma unroll 1
    for (int distance = 16; distance > 0; distance /= 2) {
        Running other;
        other.max = __shfl_xor_sync(0xffffffffu, mine.max, distance);
        other.sum = __shfl_xor_sync(0xffffffffu, mine.sum, distance);
        mine = combine(mine, other);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
    Running all = of_warps[0];
#pragma unroll 1
    for (int warp = 1; warp < THREADS / 32; ++warp) all = combine(all, of_warps[warp]);
    return all;
}

template <bool WHOLE, bool GRADIENT, typename T>
__device__ inline void cross_entropy(T* z,                             // [R, V]
                                     const u32* __restrict__ targets,  // [R]
                                     float* __restrict__ losses,       // [R]
                                     u32 columns, float scale, Running* of_warps)
{
    const u64 r = blockIdx.x;
    T* row = z + r * columns;
    const u32 target = targets[r];
    const float chosen = widen(row[target]);
    // The barrier in reduce_row lies between this read of the target and its overwriting.
    const Running all = reduce_row<WHOLE>(row, columns, of_warps);
    if (threadIdx.x == 0)
        losses[r] = (float)((double)all.max - (double)chosen + log((double)all.sum));
    if constexpr (GRADIENT) {
        const float part = 1.0f / all.sum;
        sweep<WHOLE>(row, columns, [&](float(&v)[8], u64 column, u64 left) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                // z = (softmax(z) − onehot(target))·scale
                const float probability = expf(v[j] - all.max) * part;
                v[j] = (column + j == target ? probability - 1.0f : probability) * scale;
            }
            store<WHOLE>(row + column, v, left);
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_bf16(bf16* z, const u32* targets, float* losses, u32 columns, float scale,
                       u32 vector)
{
    __shared__ Running of_warps[THREADS / 32];
    vector ? cross_entropy<true, true>(z, targets, losses, columns, scale, of_warps)
           : cross_entropy<false, true>(z, targets, losses, columns, scale, of_warps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_f32(float* z, const u32* targets, float* losses, u32 columns, float scale,
                      u32 vector)
{
    __shared__ Running of_warps[THREADS / 32];
    vector ? cross_entropy<true, true>(z, targets, losses, columns, scale, of_warps)
           : cross_entropy<false, true>(z, targets, losses, columns, scale, of_warps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_loss_bf16(bf16* z, const u32* targets, float* losses, u32 columns, u32 vector)
{
    __shared__ Running of_warps[THREADS / 32];
    vector ? cross_entropy<true, false>(z, targets, losses, columns, 0.0f, of_warps)
           : cross_entropy<false, false>(z, targets, losses, columns, 0.0f, of_warps);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_loss_f32(float* z, const u32* targets, float* losses, u32 columns, u32 vector)
{
    __shared__ Running of_warps[THREADS / 32];
    vector ? cross_entropy<true, false>(z, targets, losses, columns, 0.0f, of_warps)
           : cross_entropy<false, false>(z, targets, losses, columns, 0.0f, of_warps);
}
