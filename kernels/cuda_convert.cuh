/* Conversions of single elements with the results of convert.h, by the GPU's instructions.
 *
 * The GPU's instructions round to nearest even and keep subnormals, but give every NaN the same bits. The
 * functions here therefore compute a NaN separately, to keep its sign and its top bits as on the CPU.
 * Products and sums use intrinsics that a compiler never fuses.
 */
#ifndef FSDPC_CUDA_CONVERT_CUH
#define FSDPC_CUDA_CONVERT_CUH

#include "cuda_params.h"

#ifdef __CUDA_ARCH__

static __device__ __forceinline__ uint32_t
f32_bits(float value)
{
    return __float_as_uint(value);
}

static __device__ __forceinline__ float
f32_from_bits(uint32_t bits)
{
    return __uint_as_float(bits);
}

static __device__ __forceinline__ float
bf16_to_f32(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}

static __device__ __forceinline__ uint16_t
f32_to_bf16(float value)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    const uint16_t quiet = (uint16_t)(__float_as_uint(value) >> 16 | 0x0040u);
    return value == value ? bits : quiet;
}

static __device__ __forceinline__ float
f16_to_f32(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    const uint32_t quiet = (uint32_t)(bits & 0x8000u) << 16 | 0x7FC00000u | (bits & 0x3FFu) << 13;
    return value == value ? value : __uint_as_float(quiet);
}

static __device__ __forceinline__ uint16_t
f32_to_f16(float value)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    const uint32_t from = __float_as_uint(value);
    const uint16_t quiet = (uint16_t)((from >> 16 & 0x8000u) | 0x7E00u | (from >> 13 & 0x3FFu));
    return value == value ? bits : quiet;
}

#else
#include "convert.h"
#endif

/* raw: the type in memory; value: the type of computations. */
template <int TYPE> struct item;

template <> struct item<FSDPC_F32> {
    typedef float raw, value;
    static __device__ __forceinline__ float get(float x) { return x; }
    static __device__ __forceinline__ float put(float x) { return x; }
};

template <> struct item<FSDPC_BF16> {
    typedef uint16_t raw;
    typedef float value;
    static __device__ __forceinline__ float get(uint16_t x) { return bf16_to_f32(x); }
    static __device__ __forceinline__ uint16_t put(float x) { return f32_to_bf16(x); }
};

template <> struct item<FSDPC_F16> {
    typedef uint16_t raw;
    typedef float value;
    static __device__ __forceinline__ float get(uint16_t x) { return f16_to_f32(x); }
    static __device__ __forceinline__ uint16_t put(float x) { return f32_to_f16(x); }
};

template <> struct item<FSDPC_F64> {
    typedef double raw, value;
    static __device__ __forceinline__ double get(double x) { return x; }
    static __device__ __forceinline__ double put(double x) { return x; }
};

static __device__ __forceinline__ float
product(float a, float b)
{
    return __fmul_rn(a, b);
}

static __device__ __forceinline__ double
product(double a, double b)
{
    return __dmul_rn(a, b);
}

static __device__ __forceinline__ float
sum(float a, float b)
{
    return __fadd_rn(a, b);
}

static __device__ __forceinline__ double
sum(double a, double b)
{
    return __dadd_rn(a, b);
}

/* The type is float if both types are float, else double. */
template <typename A, typename B> struct wider {
    typedef double type;
};
template <> struct wider<float, float> {
    typedef float type;
};

static __device__ __forceinline__ int
item_bytes(int type)
{
    return type == FSDPC_BYTES ? 1 : type == FSDPC_F32 ? 4 : type == FSDPC_F64 ? 8 : 2;
}

static __device__ __forceinline__ double
load_item(const void *base, int type, int64_t i)
{
    switch (type) {
    case FSDPC_F32: return ((const float *)base)[i];
    case FSDPC_BF16: return bf16_to_f32(((const uint16_t *)base)[i]);
    case FSDPC_F16: return f16_to_f32(((const uint16_t *)base)[i]);
    default: return ((const double *)base)[i];
    }
}

/* --- 16 bytes at a time -------------------------------------------------------------------------- */

/* Each word of global memory is read once. __ldcs is used, because it leaves the caches to data that is read
 * again. __ldcs must not read shared memory. */
template <bool GLOBAL, typename WORD>
static __device__ __forceinline__ WORD
load_word(const WORD *from)
{
    if constexpr (GLOBAL) {
        return __ldcs(from);
    } else {
        return *from;
    }
}

/* COUNT elements in words of 16 bytes. COUNT must be chosen so that source and target fill whole words. */
template <typename RAW, int COUNT> struct group {
    enum { WORDS = COUNT * (int)sizeof(RAW) / 16 };
    union {
        uint4 word[WORDS];
        RAW item[COUNT];
    };

    template <bool GLOBAL> __device__ __forceinline__ void load(const RAW *from)
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = load_word<GLOBAL>((const uint4 *)from + i);
        }
    }

    __device__ __forceinline__ void store(RAW *to) const
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            ((uint4 *)to)[i] = word[i];
        }
    }
};

/* The number of elements before the first 16-byte boundary, at most n. */
template <typename I>
static __device__ __forceinline__ I
head_items(const void *address, int bytes, I n)
{
    const I head = (I)(-(uintptr_t)address & 15) / bytes;
    return head < n ? head : n;
}

static __device__ __forceinline__ bool
on_boundary(const void *address)
{
    return ((uintptr_t)address & 15) == 0;
}

#endif
