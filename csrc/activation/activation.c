/* Packing and unpacking of activations. The bodies are written once, as always-inline functions. So each body
 * is compiled for the instruction set of each of its callers. */
#include "activation/activation.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"
#include "convert.h"
#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = FSDPC_ACTIVATION_BLOCK };

/* If 1.5 * 2^23 is added to a small float, the sum's low bits hold the integer nearest to that float. */
#define ROUNDS 12582912.0f
#define STEPS ((float)FSDPC_ACTIVATION_STEPS)

INLINE void
load(const void *values, fsdpc_dtype type, int64_t begin, int64_t n, float *out)
{
    const uint16_t *narrow = (const uint16_t *)values + begin;
    if (type == FSDPC_F32) {
        memcpy(out, (const float *)values + begin, (size_t)n * sizeof *out);
    } else if (type == FSDPC_BF16) {
        for (int64_t i = 0; i < n; i++) {
            out[i] = bf16_to_f32(narrow[i]);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            out[i] = f16_to_f32(narrow[i]);
        }
    }
}

/* Writes the values as bfloat16 or float16 to `out`; for float32 it writes nothing. */
INLINE void
narrow(const float *values, int64_t n, uint16_t *out, fsdpc_dtype type)
{
    if (type == FSDPC_BF16) {
        for (int64_t i = 0; i < n; i++) {
            out[i] = f32_to_bf16(values[i]);
        }
    } else if (type == FSDPC_F16) {
        for (int64_t i = 0; i < n; i++) {
            out[i] = f32_to_f16(values[i]);
        }
    }
}

INLINE float
largest(const float *values, int64_t n)
{
    int32_t most = 0; /* the largest magnitude, as bits: the bits of floats >= 0 sort like them */
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = (int32_t)(f32_bits(values[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return f32_from_bits((uint32_t)most);
}

INLINE void
pack(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes, float *scales)
{
    float block[BLOCK];
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
        load(values, type, begin, count, block);
        const float most = largest(block, count);
        /* Blocks of very small numbers are multiplied by 2^64, so that the scale's reciprocal is finite. */
        const float lift = most < 0x1p-90f ? 0x1p64f : 1;
        const float inverse = most > 0 && isfinite(most) ? STEPS / (most * lift) : 0;
        scales[begin / BLOCK] = isfinite(most) ? most : NAN;
        for (int64_t i = 0; i < count; i++) {
            const float sum = block[i] * lift * inverse + ROUNDS;
            const int32_t steps = (int32_t)f32_bits(sum) - (int32_t)f32_bits(ROUNDS);
            codes[begin + i] = (int8_t)(steps + (block[i] > 0) - (block[i] < 0));
        }
    }
}

/* `value`, but at least -most and at most `most`. */
INLINE int32_t
within(int32_t value, int32_t most)
{
    const int32_t low = value < most ? value : most;
    return low > -most ? low : -most;
}

INLINE void
unpack(const int8_t *codes, const float *scales, int64_t n, void *values, fsdpc_dtype type)
{
    float block[BLOCK];
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
        const float scale = scales[begin / BLOCK];
        float *wide = type == FSDPC_F32 ? (float *)values + begin : block;
        for (int64_t i = 0; i < count; i++) {
            /* The value in quarters of a step: 4 * (code - sign), but 1 for the code 1 and -1 for -1. */
            const int32_t code = codes[begin + i];
            const int32_t quarters = 4 * code - 2 * within(code, 1) - within(code, 2);
            wide[i] = (float)quarters * (0.25f / STEPS) * scale;
        }
        narrow(block, count, (uint16_t *)values + begin, type);
    }
}

#define VARIANT(name, target)                                                                      \
    target static void pack_##name(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes, \
                                   float *scales)                                                  \
    {                                                                                              \
        pack(values, type, n, codes, scales);                                                      \
    }                                                                                              \
    target static void unpack_##name(const int8_t *codes, const float *scales, int64_t n,          \
                                     void *values, fsdpc_dtype type)                               \
    {                                                                                              \
        unpack(codes, scales, n, values, type);                                                    \
    }

VARIANT(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
VARIANT(avx2, __attribute__((target("avx2"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#else
#define pack_avx2 pack_plain
#define unpack_avx2 unpack_plain
#define pack_avx512 pack_plain
#define unpack_avx512 unpack_plain
#endif

static int
check(fsdpc_dtype type, const char **kernels)
{
    const fsdpc_kernels *table;
    if (type != FSDPC_F32 && type != FSDPC_BF16 && type != FSDPC_F16) {
        return fsdpc_error(FSDPC_E_TYPE, "activations of type %s cannot be packed",
                           fsdpc_dtype_name(type));
    }
    FSDPC_TRY(fsdpc_kernels_select(&table));
    *kernels = table->name;
    return FSDPC_OK;
}

int
fsdpc_activation_pack(const void *values, fsdpc_dtype type, int64_t n, int8_t *codes, float *scales)
{
    const char *kernels = "plain";
    FSDPC_TRY(check(type, &kernels));
    if (strcmp(kernels, "avx512") == 0) {
        pack_avx512(values, type, n, codes, scales);
    } else if (strcmp(kernels, "avx2") == 0) {
        pack_avx2(values, type, n, codes, scales);
    } else {
        pack_plain(values, type, n, codes, scales);
    }
    return FSDPC_OK;
}

int
fsdpc_activation_unpack(const int8_t *codes, const float *scales, int64_t n, void *values,
                        fsdpc_dtype type)
{
    const char *kernels = "plain";
    FSDPC_TRY(check(type, &kernels));
    if (strcmp(kernels, "avx512") == 0) {
        unpack_avx512(codes, scales, n, values, type);
    } else if (strcmp(kernels, "avx2") == 0) {
        unpack_avx2(codes, scales, n, values, type);
    } else {
        unpack_plain(codes, scales, n, values, type);
    }
    return FSDPC_OK;
}
