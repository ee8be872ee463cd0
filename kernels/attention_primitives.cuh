// The instructions that attention.cu is made of, one function each, and what identifies a thread.
// tests/kernels/attention_emulated.cpp has the same functions for a CPU.
// Fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

typedef unsigned short u16;  // the bits of a bf16
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define THREAD ((int)threadIdx.x)
#define LANE ((int)(threadIdx.x & 31))
#define WARP ((int)(threadIdx.x >> 5))
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define BLOCK_Z ((int)blockIdx.z)

extern __shared__ __align__(1024) unsigned char shared_memory[];
#define SHARED_MEMORY ((u32)__cvta_generic_to_shared(shared_memory))
#define MINUS_INFINITY __int_as_float(0xff800000)
#define INFINITE __int_as_float(0x7f800000)

// Starts a copy of 16 bytes from global to shared memory; zeros instead if not `inside`.
DEVICE void copy_16(u32 to, const void* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

// The same for 4 bytes.
DEVICE void copy_4(u32 to, const void* from, bool inside)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

DEVICE void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
DEVICE void copies_wait()
{
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}
DEVICE void block_barrier()
{
    __syncthreads();
}

DEVICE float2 load_pair(u32 from)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

// Four 8×8 matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix
// elements 2·(l % 4) and the next of row l / 4.
DEVICE void load_matrices(u32 (&f)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(row)
                 : "memory");
}

// The same with each matrix transposed.
DEVICE void load_matrices_transposed(u32 (&f)[4], u32 row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(row)
                 : "memory");
}

// c[16, 8] += a[16, 16]·b[16, 8]. With g = lane / 4 and t = lane % 4: c holds (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to bf16 (nearest, ties to even), `low` in the low half.
DEVICE u32 pack_bf16(float low, float high)
{
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

DEVICE float exp2_approx(float x)
{
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float shuffle_xor(float x, int lanes)
{
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}
DEVICE u32 shuffle_xor(u32 x, int lanes)
{
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}
DEVICE bool any_lane(bool x)
{
    return __any_sync(0xffffffffu, x);
}
DEVICE void warp_barrier()
{
    __syncwarp();
}
DEVICE u32 float_to_bits(float x)
{
    return __float_as_uint(x);
}
DEVICE float bits_to_float(u32 x)
{
    return __uint_as_float(x);
}
DEVICE float* shared_floats()
{
    return (float*)shared_memory;
}

// ---- Hopper: code for sm_90a alone ------------------------------------------------------------
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ATTENTION_WGMMA

// How a matrix lies in memory, encoded by the driver (cuTensorMapEncodeTiled).
struct alignas(128) TensorMap {
    u64 words[16];
};
#define TENSOR_MAP const __grid_constant__ TensorMap

// A barrier in shared memory: 8 bytes. A phase ends when `arrivals` arrived and all bytes that they
// expect came; phases alternate in parity, the first is 0.
DEVICE void barrier_init(u32 barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// Initial states become visible to copies.
DEVICE void barriers_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_arrive_expecting(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity is over.
DEVICE void barrier_wait(u32 barrier, u32 parity)
{
    u32 over;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

// Starts the copy of the box of `map` at (column, head, token); zeros for what lies outside the
// matrix. Its bytes are counted by `barrier`.
DEVICE void copy_box(u32 to, const TensorMap& map, int column, int head, int token, u32 barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(column), "r"(head), "r"(token), "r"(barrier)
        : "memory");
}

// The thread arrives when its copies by copy_4 and copy_16 so far are done.
DEVICE void copies_arrive(u32 barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Barrier `id` of some warps, `threads` in all: those that wait, and those that only arrive.
DEVICE void named_wait(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers of the calling warpgroup's threads from here on.
template <int COUNT>
DEVICE void registers_raise()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_lower()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

DEVICE void store_word(u32 to, u32 x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
DEVICE u32 load_word(u32 from)
{
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
DEVICE u32 count_up(u32* counter)
{
    return atomicAdd(counter, 1u);
}
// Lane 0's value.
DEVICE u32 broadcast(u32 x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

// Before the first wgmma of a sequence: registers written so far are visible to it.
DEVICE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `PENDING` of the committed groups are unfinished.
template <int PENDING>
DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Has `bits` computed here, before a wait that follows: without the store, ptxas puts arithmetic
// that is to run beside a product behind the wait for it. `scratch`: four bytes of the thread's
// own.
DEVICE void compute_first(u32 bits, u32 scratch)
{
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(scratch), "r"(bits) : "memory");
}
// Keeps the compiler from moving reads and writes of accumulators past this point.
template <int N>
DEVICE void pin(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
}

#define ACCUMULATORS_2(c, n)                                                       \
    "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]), "+f"(c[n + 1][0]), \
        "+f"(c[n + 1][1]), "+f"(c[n + 1][2]), "+f"(c[n + 1][3])
#define ACCUMULATORS_4(c, n) ACCUMULATORS_2(c, n), ACCUMULATORS_2(c, n + 2)
#define ACCUMULATORS_8(c, n) ACCUMULATORS_4(c, n), ACCUMULATORS_4(c, n + 4)

// c[64, 8·N] = a[64, 16]·b[8·N, 16]ᵀ, plus c if `add`; a and b by descriptor, each [rows][k].
DEVICE void wgmma_shared(float (&c)[8][4], u64 a, u64 b, bool add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;}"
        : ACCUMULATORS_8(c, 0)
        : "l"(a), "l"(b), "r"((int)add));
}

// The same with a in registers as for mma.
DEVICE void wgmma_registers_transposed(float (&c)[8][4], const u32 (&a)[4], u64 b, bool add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : ACCUMULATORS_8(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
DEVICE void wgmma_registers_transposed(float (&c)[12][4], const u32 (&a)[4], u64 b, bool add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %53, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, "
        "%45, %46, %47}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;}"
        : ACCUMULATORS_8(c, 0), ACCUMULATORS_4(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
DEVICE void wgmma_registers_transposed(float (&c)[16][4], const u32 (&a)[4], u64 b, bool add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"
        : ACCUMULATORS_8(c, 0), ACCUMULATORS_8(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

// c[64, 8·N] += a[64, 16]·b[16, 8·N], a in registers as for mma, b by descriptor, stored [k][n].
DEVICE void wgmma_registers(float (&c)[8][4], const u32 (&a)[4], u64 b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
        : ACCUMULATORS_8(c, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void wgmma_registers(float (&c)[16][4], const u32 (&a)[4], u64 b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : ACCUMULATORS_8(c, 0), ACCUMULATORS_8(c, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
