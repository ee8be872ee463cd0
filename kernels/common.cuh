// What every kernel shares: bf16, eight elements at a time, sums over the lanes of a group.
//
// - Activations are bf16 or f32 (template parameter T); arithmetic is f32. Nothing is included, so
//   that NVRTC needs no headers on the machine that trains.
// - A thread's unit of memory is eight elements: 16 bytes of bf16, 32 of f32. `vector` says that
//   addresses are 16-byte aligned (the host checks pointers and row widths); otherwise, and at a
//   tail, elements are moved one by one.
// - Sums run in an order that the shape fixes. There are no atomics.
// - Sizes and indices are 64-bit; only columns of a row are 32-bit.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A bfloat16: the upper half of an f32.
struct bf16 {
    u16 bits;
};

// Eight elements as they lie in memory.
template <typename T>
struct Eight;

template <>
struct Eight<bf16> {
    uint4 raw;
};

template <>
struct Eight<float> {
    float4 low, high;
};

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Two f32 as bf16, `low` in the lower half: nearest, ties to even; a NaN becomes 0x7fff.
__device__ inline u32 narrow_pair(float low, float high)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline void narrow(float x, float* out) { *out = x; }

__device__ inline void narrow(float x, bf16* out) { out->bits = (u16)narrow_pair(x, 0.0f); }

__device__ inline void unpack(const Eight<float>& x, float (&v)[8])
{
    v[0] = x.low.x, v[1] = x.low.y, v[2] = x.low.z, v[3] = x.low.w;
    v[4] = x.high.x, v[5] = x.high.y, v[6] = x.high.z, v[7] = x.high.w;
}

__device__ inline void unpack(const Eight<bf16>& x, float (&v)[8])
{
    const u32 pairs[4] = {x.raw.x, x.raw.y, x.raw.z, x.raw.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        v[2 * k] = __uint_as_float(pairs[k] << 16);
        v[2 * k + 1] = __uint_as_float(pairs[k] & 0xffff0000u);
    }
}

__device__ inline void pack(const float (&v)[8], Eight<float>& x)
{
    x.low = make_float4(v[0], v[1], v[2], v[3]);
    x.high = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ inline void pack(const float (&v)[8], Eight<bf16>& x)
{
    x.raw = make_uint4(narrow_pair(v[0], v[1]), narrow_pair(v[2], v[3]), narrow_pair(v[4], v[5]),
                       narrow_pair(v[6], v[7]));
}

// at[0..8), of which `left` exist; those that do not are 0. WHOLE says that `at` is aligned and
// that all exist or none. Which of the two a launch takes changes no sum's order.
template <bool WHOLE, typename T>
__device__ inline Eight<T> load(const T* at, u64 left)
{
    Eight<T> x = {};
    if constexpr (WHOLE) {
        if (left > 0) x = *reinterpret_cast<const Eight<T>*>(at);
    } else {
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = k < left ? widen(at[k]) : 0.0f;
        pack(v, x);
    }
    return x;
}

// As `load`, as f32.
template <bool WHOLE, typename T>
__device__ inline void load_f32(const T* at, u64 left, float (&v)[8])
{
    unpack(load<WHOLE>(at, left), v);
}

// at[0..8) = v, of which `left` exist; WHOLE as in `load`.
template <bool WHOLE, typename T>
__device__ inline void store(T* at, const float (&v)[8], u64 left)
{
    if constexpr (WHOLE) {
        Eight<T> x;
        pack(v, x);
        if (left > 0) *reinterpret_cast<Eight<T>*>(at) = x;
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (k < left) narrow(v[k], at + k);
    }
}

// Elements of `count` from `index` on.
__device__ inline u64 rest(u64 index, u64 count) { return index < count ? count - index : 0; }

// Whether a thread of an elementwise launch moves its eight elements whole.
__device__ inline bool whole(u32 vector, u64 left) { return vector && left >= 8; }

// First of the eight elements of this thread, in a launch of one thread for eight elements.
__device__ inline u64 first_element()
{
    return ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
}

// Sum over LANES neighbouring threads, the same bits in each. Up to 32 lanes lie in a warp; more
// are the whole block, and `shared` holds a value a warp (not to be reused before another barrier).
template <int LANES, typename V>
__device__ inline V group_sum(V value, V* shared)
{
#pragma unroll
    for (int distance = (LANES < 32 ? LANES : 32) / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    if constexpr (LANES > 32) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
        __syncthreads();
        value = shared[0];
#pragma unroll
        for (int warp = 1; warp < LANES / 32; ++warp) value += shared[warp];
    }
    return value;
}
