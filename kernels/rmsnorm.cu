// RMSNorm over rows and its gradient.
//
//   forward:   inv[r] = 1/sqrt(mean(x[r]^2) + eps),   y = x·inv·w
//   backward:  dx = inv·(dy·w − x̂·mean(dy·w·x̂)),  x̂ = x·inv;   dw[c] += Σ_r dy·x̂
//
// Shapes: x, y, dy, dx [R, C] and w [C] in T (bf16 or f32); inv [R], dw [C] f32. C ≤ 16384.
// Accumulation: f32. Forward reads a row once and holds it in registers.
// Deterministic: a row's sums are a fixed tree over its lanes. dw is summed per fixed block of rows
// into `partial` [blocks, C] f32, rows in order, and then over the blocks by `add_partials`
// (reduce.cu): the number of blocks follows from the shape alone.
// Launch: a group of LANES threads for a row. Up to 32 lanes, blocks of 256 threads hold several
// groups; above, the block is the group. Forward: one row a group. Backward: `rows_per_block`
// rows a block, the next row loaded while one is worked on.
// In place: dx may be dy if not accumulating; each thread reads its own elements before it writes.
// Golden test: golden_kernels::norms

#include "common.cuh"

template <bool WHOLE, int LANES, int HELD, typename T>
__device__ inline void rmsnorm_forward(const T* __restrict__ x,  // [R, C]
                                       const T* __restrict__ w,  // [C]
                                       T* __restrict__ y,        // [R, C]
                                       float* __restrict__ inv,  // [R]
                                       u64 rows, u32 columns, float eps,
                                       float* warp_sums)  // shared [32]
{
    const u32 lane = threadIdx.x % LANES;
    const u64 row = (u64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const u32 width = row < rows ? columns : 0;  // lanes without a row stay for the sums
    const u64 start = row * columns;
    Eight<T> held[HELD], weights[HELD];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const u32 column = (k * LANES + lane) * 8;
        held[k] = load<WHOLE>(x + start + column, rest(column, width));
        weights[k] = load<WHOLE>(w + column, rest(column, width));
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        float v[8];
        unpack(held[k], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
    }
    // inv = 1/sqrt(mean(x^2) + eps)
    const float mean = group_sum<LANES>(squares, warp_sums) / (float)columns;
    const float scale = 1.0f / sqrtf(mean + eps);
    if (lane == 0 && row < rows) inv[row] = scale;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const u32 column = (k * LANES + lane) * 8;
        const u64 left = rest(column, width);
        float v[8], weight[8];
        unpack(held[k], v), unpack(weights[k], weight);
        // y = x·inv·w
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * scale * weight[j];
        store<WHOLE>(y + start + column, v, left);
    }
}

// partial[column] of this block = sum over its groups, in their order. sums are those of a thread.
template <bool WHOLE, int LANES, int HELD>
__device__ inline void store_partial(const float (&sums)[HELD][8], float* partial,  // [blocks, C]
                                     u32 columns,
                                     float* of_groups)  // shared [groups, LANES·8]
{
    const u32 lane = threadIdx.x % LANES;
    float* out = partial + (u64)blockIdx.x * columns;
    if constexpr (LANES > 32) {
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const u32 column = (k * LANES + lane) * 8;
            store<WHOLE>(out + column, sums[k], rest(column, columns));
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) of_groups[threadIdx.x * 8 + j] = sums[0][j];
        __syncthreads();
        for (u32 column = threadIdx.x; column < columns; column += blockDim.x) {
            float sum = of_groups[column];
            for (u32 group = 1; group < blockDim.x / LANES; ++group)
                sum += of_groups[group * LANES * 8 + column];
            out[column] = sum;
        }
    }
}

template <bool WHOLE, int LANES, int HELD, typename T>
__device__ inline void rmsnorm_backward(const T* __restrict__ x,  // [R, C]
                                        const T* __restrict__ w,  // [C]
                                        const float* __restrict__ inv,  // [R]
                                        const T* dy,                    // [R, C]
                                        T* dx,                          // [R, C], may be dy
                                        float* __restrict__ partial,    // [blocks, C]
                                        u64 rows, u64 rows_per_block, u32 columns,
                                        bool accumulate,
                                        float (*warp_sums)[32],  // shared [2, 32]
                                        float* of_groups)        // shared [groups, LANES·8]
{
    static_assert(LANES > 32 || HELD == 1, "groups within a warp hold one sweep");
    const u32 lane = threadIdx.x % LANES, groups = blockDim.x / LANES;
    const u64 first = blockIdx.x * rows_per_block;
    const u64 end = min(first + rows_per_block, rows);
    u64 row = first + threadIdx.x / LANES;
    // Elements of this lane in sweep k of a row; none in a row beyond the block's.
    auto left = [&](int k, u64 row) {
        return row < end ? rest((k * LANES + lane) * 8, columns) : 0;
    };
    auto at = [&](int k, u64 row) { return row * columns + (k * LANES + lane) * 8; };
    float sums[HELD][8] = {};
    // Rows of one sweep are held, and the next is fetched ahead; longer ones are read again, from
    // the nearest cache, where holding them would leave room for one block a multiprocessor.
    Eight<T> next_x, next_dy, held_x, held_dy, old = {};
    auto fetch = [&](int k, u64 row) {
        next_x = load<WHOLE>(x + at(k, row), left(k, row));
        next_dy = load<WHOLE>(dy + at(k, row), left(k, row));
    };
    if constexpr (HELD == 1) fetch(0, row);
    u32 turn = 0;
#pragma unroll 1
    for (u64 base = first; base < end; base += groups, row += groups, turn ^= 1) {
        float v[8], d[8], weight[8];
        float products = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if constexpr (HELD > 1) fetch(k, row);
            held_x = next_x, held_dy = next_dy;
            unpack(held_x, v), unpack(held_dy, d);
            load_f32<WHOLE>(w + at(k, 0), left(k, row), weight);
#pragma unroll
            for (int j = 0; j < 8; ++j) products += d[j] * weight[j] * v[j];
        }
        if constexpr (HELD == 1) {
            if (accumulate) old = load<WHOLE>(dx + at(0, row), left(0, row));
            fetch(0, row + groups);
        }
        const float scale = row < end ? inv[row] : 0.0f;
        // inv·(dy·w − x·inv·mean(dy·w·x)·inv): the factor of x is the row's.
        const float mean = group_sum<LANES>(products, warp_sums[turn]) / (float)columns;
        const float pull = mean * scale * scale;
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if constexpr (HELD > 1) {
                fetch(k, row);
                held_x = next_x, held_dy = next_dy;
                if (accumulate) old = load<WHOLE>(dx + at(k, row), left(k, row));
            }
            float out[8];
            unpack(held_x, v), unpack(held_dy, d);
            load_f32<WHOLE>(w + at(k, 0), left(k, row), weight);
            unpack(old, out);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sums[k][j] += d[j] * (v[j] * scale);
                const float gradient = scale * (d[j] * weight[j] - v[j] * pull);
                out[j] = accumulate ? out[j] + gradient : gradient;
            }
            store<WHOLE>(dx + at(k, row), out, left(k, row));
        }
    }
    store_partial<WHOLE, LANES, HELD>(sums, partial, columns, of_groups);
}

// Threads of a block: a group above 32 lanes, else several groups.
#define BLOCK_THREADS(LANES) (LANES > 32 ? LANES : 256)

#define FORWARD(NAME, T, LANES, HELD)                                                              \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS(LANES))                       \
        NAME(const T* x, const T* w, T* y, float* inv, u64 rows, u32 columns, float eps,           \
             u32 vector)                                                                           \
    {                                                                                              \
        __shared__ float warp_sums[32];                                                            \
        vector ? rmsnorm_forward<true, LANES, HELD>(x, w, y, inv, rows, columns, eps, warp_sums)   \
               : rmsnorm_forward<false, LANES, HELD>(x, w, y, inv, rows, columns, eps, warp_sums); \
    }

#define BACKWARD(NAME, T, LANES, HELD)                                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS(LANES))                       \
        NAME(const T* x, const T* w, const float* inv, const T* dy, T* dx, float* partial,         \
             u64 rows, u64 rows_per_block, u32 columns, u32 accumulate, u32 vector)                \
    {                                                                                              \
        __shared__ float warp_sums[2][32];                                                         \
        __shared__ float of_groups[LANES > 32 ? 1 : 256 * 8];                                      \
        vector ? rmsnorm_backward<true, LANES, HELD>(x, w, inv, dy, dx, partial, rows,             \
                                                     rows_per_block, columns, accumulate != 0,     \
                                                     warp_sums, of_groups)                         \
               : rmsnorm_backward<false, LANES, HELD>(x, w, inv, dy, dx, partial, rows,            \
                                                      rows_per_block, columns, accumulate != 0,    \
                                                      warp_sums, of_groups);                       \
    }

// C up to 128, 1024, 4096, 8192, 16384.
FORWARD(rmsnorm_forward_128_bf16, bf16, 16, 1)
FORWARD(rmsnorm_forward_1024_bf16, bf16, 32, 4)
FORWARD(rmsnorm_forward_4096_bf16, bf16, 128, 4)
FORWARD(rmsnorm_forward_8192_bf16, bf16, 256, 4)
FORWARD(rmsnorm_forward_16384_bf16, bf16, 512, 4)
FORWARD(rmsnorm_forward_128_f32, float, 16, 1)
FORWARD(rmsnorm_forward_1024_f32, float, 32, 4)
FORWARD(rmsnorm_forward_4096_f32, float, 128, 4)
FORWARD(rmsnorm_forward_8192_f32, float, 256, 4)
FORWARD(rmsnorm_forward_16384_f32, float, 512, 4)

// C up to 128, 256, 1024, 4096, 8192, 16384.
BACKWARD(rmsnorm_backward_128_bf16, bf16, 16, 1)
BACKWARD(rmsnorm_backward_256_bf16, bf16, 32, 1)
BACKWARD(rmsnorm_backward_1024_bf16, bf16, 128, 1)
BACKWARD(rmsnorm_backward_4096_bf16, bf16, 512, 1)
BACKWARD(rmsnorm_backward_8192_bf16, bf16, 512, 2)
BACKWARD(rmsnorm_backward_16384_bf16, bf16, 512, 4)
BACKWARD(rmsnorm_backward_128_f32, float, 16, 1)
BACKWARD(rmsnorm_backward_256_f32, float, 32, 1)
BACKWARD(rmsnorm_backward_1024_f32, float, 128, 1)
BACKWARD(rmsnorm_backward_4096_f32, float, 512, 1)
BACKWARD(rmsnorm_backward_8192_f32, float, 512, 2)
BACKWARD(rmsnorm_backward_16384_f32, float, 512, 4)
