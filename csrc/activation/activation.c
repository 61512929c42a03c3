/* Packing and unpacking. The bodies are written once and compiled for each instruction set: a function
 * that is always inlined takes the instructions of its caller. */
#include "activation/activation.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"
#include "convert.h"
#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = FSDPC_ACTIVATION_BLOCK };

/* Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum. */
#define ROUNDS 12582912.0f

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

INLINE float
largest(const float *values, int64_t n)
{
    int32_t most = 0; /* patterns of floats without sign are in the order of integers */
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
        const float scale = isfinite(most) ? most / 127 : NAN;
        /* Blocks of the smallest numbers are lifted, so that their scale has a reciprocal. */
        const float lift = scale < 0x1p-100f ? 0x1p64f : 1;
        const float inverse = scale > 0 ? 1 / (scale * lift) : 0;
        scales[begin / BLOCK] = scale;
        for (int64_t i = 0; i < count; i++) {
            const float sum = block[i] * lift * inverse + ROUNDS;
            codes[begin + i] = (int8_t)(f32_bits(sum) & 0xff);
        }
    }
}

INLINE void
unpack(const int8_t *codes, const float *scales, int64_t n, void *values, fsdpc_dtype type)
{
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
        const float scale = scales[begin / BLOCK];
        if (type == FSDPC_F32) {
            float *out = (float *)values + begin;
            for (int64_t i = 0; i < count; i++) {
                out[i] = (float)codes[begin + i] * scale;
            }
            continue;
        }
        uint16_t *out = (uint16_t *)values + begin;
        for (int64_t i = 0; i < count; i++) {
            const float value = (float)codes[begin + i] * scale;
            out[i] = type == FSDPC_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
        }
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
