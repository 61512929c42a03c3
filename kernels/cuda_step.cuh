/* Code of all kernels of optimizer steps: a block finds its tile, loads gradients, computes Adam's update. */
#ifndef FSDPC_CUDA_STEP_CUH
#define FSDPC_CUDA_STEP_CUH

#include "cuda_convert.cuh"
#include "random.h"

enum { QUAD = 4 }; /* neighbouring elements that a thread steps together */

static __device__ __forceinline__ float
fused(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

static __device__ __forceinline__ double
fused(double a, double b, double c)
{
    return __fma_rn(a, b, c);
}

static __device__ __forceinline__ float
root_of(float x)
{
    return __fsqrt_rn(x);
}

static __device__ __forceinline__ double
root_of(double x)
{
    return __dsqrt_rn(x);
}

static __device__ __forceinline__ float
quotient(float a, float b)
{
    return __fdiv_rn(a, b);
}

static __device__ __forceinline__ double
quotient(double a, double b)
{
    return __ddiv_rn(a, b);
}

/* The tile that a block steps: the entry of the tile's tensor, and the index of the tile's first element in
 * that tensor. `begin` is negative if the tensor's first element is inside the tile, not at its beginning. */
struct own_tile {
    const fsdpc_step_entry *entry;
    int64_t begin;

    __device__ __forceinline__ own_tile(const fsdpc_step_entry *entries, int64_t count)
    {
        const int64_t tile = blockIdx.x;
        int64_t low = 0, high = count - 1;
#pragma unroll 1
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (entries[middle].tensor.first_tile <= tile) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        entry = &entries[low];
        const fsdpc_step_tensor &t = entry->tensor;
        const int64_t first = t.first / FSDPC_CUDA_STEP_TILE * FSDPC_CUDA_STEP_TILE - t.first;
        begin = first + (tile - t.first_tile) * FSDPC_CUDA_STEP_TILE;
    }
};

/* Stores the step's number, which this launch never reads. All ranges of a parameter store equal numbers. */
static __device__ __forceinline__ void
count_step(const own_tile &own)
{
    if (threadIdx.x == 0 && own.begin <= 0) {
        *own.entry->tensor.step = (float)own.entry->step;
    }
}

/* --- memory of any type: float for 16 bits, and double for itself -------------------------------- */

static __device__ __forceinline__ float
load_real(const void *base, int type, int64_t i, float)
{
    switch (type) {
    case FSDPC_F32: return ((const float *)base)[i];
    case FSDPC_BF16: return bf16_to_f32(((const uint16_t *)base)[i]);
    default: return f16_to_f32(((const uint16_t *)base)[i]);
    }
}

static __device__ __forceinline__ double
load_real(const void *base, int, int64_t i, double)
{
    return ((const double *)base)[i];
}

static __device__ __forceinline__ void
store_real(void *base, int type, int64_t i, float value)
{
    switch (type) {
    case FSDPC_F32: ((float *)base)[i] = value; break;
    case FSDPC_BF16: ((uint16_t *)base)[i] = f32_to_bf16(value); break;
    default: ((uint16_t *)base)[i] = f32_to_f16(value); break;
    }
}

static __device__ __forceinline__ void
store_real(void *base, int, int64_t i, double value)
{
    ((double *)base)[i] = value;
}

/* The elements of a quad that are in [begin, end), and whether one access can load or store the quad. */
struct place {
    int64_t at;
    int low, high;

    __device__ __forceinline__ place(int64_t first, int64_t begin, int64_t end)
        : at(first), low(first < begin ? (int)(begin - first) : 0),
          high(end - first < QUAD ? (int)(end - first) : QUAD)
    {
    }

    __device__ __forceinline__ bool is_word(const void *base, int bytes) const
    {
        return low == 0 && high == QUAD &&
               ((uintptr_t)base + (uintptr_t)at * bytes) % (QUAD * bytes) == 0;
    }
};

static __device__ __forceinline__ void
load_quad(float *out, const void *base, int type, const place &where)
{
    if (type == FSDPC_F32 && where.is_word(base, 4)) {
        const uint4 word = __ldcs((const uint4 *)((const float *)base + where.at));
        out[0] = __uint_as_float(word.x);
        out[1] = __uint_as_float(word.y);
        out[2] = __uint_as_float(word.z);
        out[3] = __uint_as_float(word.w);
        return;
    }
    if (type == FSDPC_BF16 && where.is_word(base, 2)) {
        const uint2 word = __ldcs((const uint2 *)((const uint16_t *)base + where.at));
        out[0] = __uint_as_float(word.x << 16);
        out[1] = __uint_as_float(word.x & 0xffff0000u);
        out[2] = __uint_as_float(word.y << 16);
        out[3] = __uint_as_float(word.y & 0xffff0000u);
        return;
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        out[i] = i >= where.low && i < where.high ? load_real(base, type, where.at + i, 0.0f) : 0;
    }
}

static __device__ __forceinline__ void
load_quad(double *out, const void *base, int type, const place &where)
{
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        out[i] = i >= where.low && i < where.high ? load_real(base, type, where.at + i, 0.0) : 0;
    }
}

/* Stores the upper halves of four words without rounding. */
static __device__ __forceinline__ void
store_halves(void *base, const uint32_t *bits, const place &where)
{
    uint16_t *to = (uint16_t *)base + where.at;
    if (where.is_word(base, 2)) {
        const uint2 word = {bits[0] >> 16 | (bits[1] & 0xffff0000u),
                            bits[2] >> 16 | (bits[3] & 0xffff0000u)};
        *(uint2 *)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        if (i >= where.low && i < where.high) {
            to[i] = (uint16_t)(bits[i] >> 16);
        }
    }
}

static __device__ __forceinline__ void
store_quad(void *base, int type, const place &where, const float *values)
{
    if (type == FSDPC_F32 && where.is_word(base, 4)) {
        const uint4 word = {__float_as_uint(values[0]), __float_as_uint(values[1]),
                            __float_as_uint(values[2]), __float_as_uint(values[3])};
        *(uint4 *)((float *)base + where.at) = word;
        return;
    }
    if (type == FSDPC_BF16) {
        uint32_t bits[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; i++) {
            bits[i] = (uint32_t)f32_to_bf16(values[i]) << 16;
        }
        store_halves(base, bits, where);
        return;
    }
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        if (i >= where.low && i < where.high) {
            store_real(base, type, where.at + i, values[i]);
        }
    }
}

static __device__ __forceinline__ void
store_quad(void *base, int type, const place &where, const double *values)
{
#pragma unroll
    for (int i = 0; i < QUAD; i++) {
        if (i >= where.low && i < where.high) {
            store_real(base, type, where.at + i, values[i]);
        }
    }
}

/* --- formulas: those of csrc/optim/optim.h -------------------------------------------------------- */

template <typename REAL> struct gradient_numbers {
    REAL scale, factor, coupled;

    __device__ __forceinline__ explicit gradient_numbers(const fsdpc_step_entry &e)
        : scale((REAL)e.grad_scale), factor((REAL)e.factor), coupled((REAL)e.coupled)
    {
    }

    __device__ __forceinline__ REAL operator()(REAL g, REAL p) const
    {
        if (factor != 1) {
            g = product(g, factor);
        }
        return coupled != 0 ? fused(coupled, p, g) : g;
    }
};

/* Returns -1 / d, with the bits that minus_reciprocal in csrc/optim/optim_pairs.inc returns. */
static __device__ __forceinline__ float
minus_reciprocal(float d)
{
    const float guess = __uint_as_float(0xfef311c7u - __float_as_uint(d));
    const float wrong = fused(d, guess, 1.0f);
    const float near = fused(fused(wrong, wrong, wrong), guess, guess);
    const float rest = fused(d, near, 1.0f);
    return fused(fused(rest, rest, rest), near, near);
}

template <typename REAL> struct adam_numbers {
    REAL decay, beta2, weight1, weight2, root, eps, size;

    __device__ __forceinline__ explicit adam_numbers(const fsdpc_step_entry &e)
        : decay((REAL)e.decay), beta2((REAL)e.beta2), weight1((REAL)e.weight1),
          weight2((REAL)e.weight2), root((REAL)e.root), eps((REAL)e.eps), size((REAL)e.size)
    {
    }

    __device__ __forceinline__ REAL next_m(REAL g, REAL m) const
    {
        const bool near = weight1 < (REAL)0.5;
        return fused(near ? weight1 : weight1 - 1, g - m, near ? m : g);
    }

    __device__ __forceinline__ REAL next_v(REAL g, REAL v) const
    {
        return fused(product(weight2, g), g, product(v, beta2));
    }

    __device__ __forceinline__ REAL exact(REAL p, REAL m, REAL v) const
    {
        const REAL divisor = sum(quotient(root_of(v), root), eps);
        return sum(product(p, decay), quotient(product(size, m), divisor));
    }

    /* Here `root` must be the reciprocal of exact()'s `root`, and `size` positive (see fill_rates). */
    __device__ __forceinline__ REAL quick(REAL p, REAL m, REAL v) const
    {
        return fused(p, decay, product(product(size, m), minus_reciprocal(fused(root_of(v), root, eps))));
    }
};

#endif
