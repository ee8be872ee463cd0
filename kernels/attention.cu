// Causal attention within packed sequences: o = softmax(q·kᵀ/√D)·v and its gradient.
//
// q, o, do, dq [T, heads, D]; k, v, dk, dv [T, kv_heads, D]; lse, delta [heads, T] f32 (lse:
// natural logarithm of the sum of exponentials of scaled scores). bf16 with tensor cores (D 32, 64,
// 80, 96, 128, 256); attention_plain.cu has f32 and other widths. Key j is seen by query i of the
// same sequence iff i − window < j ≤ i.
//
// Products are summed in f32; the probabilities P and the score gradients dS are rounded to bf16
// before their products, as FlashAttention does. 2ˣ is ex2.approx.ftz: relative error 2⁻²².
// Deterministic: each output element belongs to one block that sums in a fixed order; no atomics.
//
// Work comes in units: some queries or keys of a sequence (4 u32: first token of the sequence, its
// length, first query or key of the unit, 0), times a head; units come longest first. Tiles that no
// query of a unit sees are not visited.
// Two engines compute the products: mma.sync (sm_80 and up), where a block is a unit and grid.y the
// head; and wgmma for D 64 and 128 (code for sm_90a), whose blocks take units from a list. They
// hold accumulators alike, so the rest is shared.
// Golden test: golden_kernels::attention. Also tests/kernels/attention_check.py (a GPU) and
// tests/kernels/attention_emulated.cpp (none).

#ifndef ATTENTION_EMULATED
#include "attention_primitives.cuh"
#endif
#include "attention_common.cuh"
#include "attention_mma.cuh"
#include "attention_wgmma.cuh"

// Warps of forward; warps and keys of a tile of dq; queries of a tile and columns of dk, dv.
// Grids: (units of 16·warps queries, heads), the same, (units of 64 keys, kv_heads, D / columns).
#define TENSOR_KERNELS(D, FORWARD_WARPS, KEYS, QUERIES, SLICE)                                   \
    KERNEL(FORWARD_WARPS * 32)                                                                   \
    attention_forward_##D(const u16* q, const u16* k, const u16* v, u16* o, float* lse,          \
                          const u32* units, PROBLEM_ARGUMENTS)                                   \
    {                                                                                            \
        forward<D, FORWARD_WARPS>(q, k, v, o, lse, units, PROBLEM);                              \
    }                                                                                            \
    KERNEL(128)                                                                                  \
    attention_backward_queries_##D(const u16* q, const u16* k, const u16* v, const u16* dout,    \
                                   const float* lse, const float* delta, u16* dq,                \
                                   const u32* units, PROBLEM_ARGUMENTS)                          \
    {                                                                                            \
        backward_queries<D, 4, KEYS>(q, k, v, dout, lse, delta, dq, units, PROBLEM);             \
    }                                                                                            \
    KERNEL(128)                                                                                  \
    attention_backward_keys_##D(const u16* q, const u16* k, const u16* v, const u16* dout,       \
                                const float* lse, const float* delta, u16* dk, u16* dv,          \
                                const u32* units, PROBLEM_ARGUMENTS)                             \
    {                                                                                            \
        backward_keys<D, 4, QUERIES, SLICE>(q, k, v, dout, lse, delta, dk, dv, units, PROBLEM);  \
    }

TENSOR_KERNELS(32, 8, 64, 64, 32)
TENSOR_KERNELS(64, 8, 64, 64, 64)
TENSOR_KERNELS(80, 8, 64, 32, 80)
TENSOR_KERNELS(96, 8, 64, 32, 96)
TENSOR_KERNELS(128, 8, 32, 32, 128)
TENSOR_KERNELS(256, 4, 16, 16, 128)

// Template arguments after D: rows of a tile of what the unit does not consist of, buffers of each
// ring. Launch: WGMMA_THREADS threads, at least BYTES of shared memory, as many blocks as
// multiprocessors. Maps: boxes of 64 columns of a head, of UNIT_ROWS rows where the unit consists
// of them, else of a tile's.
#ifdef ATTENTION_WGMMA
typedef ForwardWgmma<64, 128, 2> Forward64;
typedef ForwardWgmma<128, 128, 2> Forward128;
typedef QueriesWgmma<64, 96, 3, 2> Queries64;
typedef QueriesWgmma<128, 64, 4, 4> Queries128;
typedef KeysWgmma<64, 64, 4> Keys64;
typedef KeysWgmma<128, 64, 4> Keys128;

#define WGMMA_KERNELS(D)                                                                         \
    KERNEL(WGMMA_THREADS)                                                                        \
    attention_forward_wgmma_##D(TENSOR_MAP q, TENSOR_MAP k, TENSOR_MAP v, u16* o, float* lse,    \
                                WORK_ARGUMENTS, PROBLEM_ARGUMENTS)                               \
    {                                                                                            \
        Forward##D::run(q, k, v, o, lse, WORK, PROBLEM);                                         \
    }                                                                                            \
    KERNEL(WGMMA_THREADS)                                                                        \
    attention_backward_queries_wgmma_##D(TENSOR_MAP q, TENSOR_MAP k, TENSOR_MAP v,               \
                                         TENSOR_MAP dout, const float* lse, const float* delta,  \
                                         u16* dq, WORK_ARGUMENTS, PROBLEM_ARGUMENTS)             \
    {                                                                                            \
        Queries##D::run(q, k, v, dout, lse, delta, dq, WORK, PROBLEM);                           \
    }                                                                                            \
    KERNEL(WGMMA_THREADS)                                                                        \
    attention_backward_keys_wgmma_##D(TENSOR_MAP q, TENSOR_MAP k, TENSOR_MAP v, TENSOR_MAP dout, \
                                      const float* lse, const float* delta, u16* dk, u16* dv,    \
                                      WORK_ARGUMENTS, PROBLEM_ARGUMENTS)                         \
    {                                                                                            \
        Keys##D::run(q, k, v, dout, lse, delta, dk, dv, WORK, PROBLEM);                          \
    }

WGMMA_KERNELS(64)
WGMMA_KERNELS(128)
#endif
