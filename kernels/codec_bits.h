/* The formats of single values in few bits, for C and CUDA. The functions have no branches, so that compilers
 * can vectorise loops of them. csrc/codec/codec.h describes the blocks of values. */
#ifndef FSDPC_CODEC_BITS_H
#define FSDPC_CODEC_BITS_H

#include <stdint.h>

#ifndef __CUDA_ARCH__
#include "convert.h"
#endif
#include "random.h"

#ifdef __CUDACC__
#define FSDPC_CODEC_INLINE static __device__ __forceinline__
#define FSDPC_CODEC_TABLE static __constant__ const
#else
#define FSDPC_CODEC_INLINE static inline __attribute__((always_inline, unused))
#define FSDPC_CODEC_TABLE __attribute__((unused)) static const
#endif

/* The list of codecs. Each row has the name in C, the name in options, the elements of a block, the bits of a
 * code, the bytes of a block's scale, whether weights may use the codec, and whether gradients may use it.
 * X gets `with` as its first argument. */
#define FSDPC_CODEC_LIST(X, with)                       \
    X(with, INT8, "int8", 256, 8, 4, 1, 1)              \
    X(with, E4M3, "float8_e4m3", 256, 8, 4, 1, 1)       \
    X(with, E5M2, "float8_e5m2", 256, 8, 4, 1, 1)       \
    X(with, MXFP8, "mxfp8", 32, 8, 1, 1, 1)             \
    X(with, NVFP4, "nvfp4", 512, 4, 4 + 512 / 16, 1, 1) \
    X(with, NF4, "nf4", 64, 4, 4, 1, 0)                 \
    X(with, INT4, "int4", 128, 4, 4, 0, 1)              \
    X(with, INT4_STOCHASTIC, "int4_stochastic", 128, 4, 4, 0, 1)

#define FSDPC_CODEC_NUMBER(with, codec, ...) FSDPC_##codec,
#define FSDPC_CODEC_FORM(with, codec, name, block, bits, scale, ...) {block, bits, scale},

typedef enum fsdpc_codec {
    FSDPC_UNCODED, /* values are sent without a codec */
    FSDPC_CODEC_LIST(FSDPC_CODEC_NUMBER, ) FSDPC_CODECS
} fsdpc_codec;

/* Elements of a block, bits of a code, bytes of a block's scale. */
struct fsdpc_codec_form {
    int block, code_bits, scale_bytes;
};
#ifdef __cplusplus /* templates need the table at compile time */
static constexpr
#else
__attribute__((unused)) static const
#endif
    struct fsdpc_codec_form fsdpc_codec_forms[FSDPC_CODECS] = {
        {1, 0, 0}, FSDPC_CODEC_LIST(FSDPC_CODEC_FORM, )};

/* If 1.5 * 2^23 is added to a small float32, the low bits of the sum are the nearest integer. */
#define FSDPC_ROUNDS 12582912.0f

/* A floating-point format of 8 bits. Bit 7 is the sign, the lowest `mantissa` bits are the mantissa, and the
 * bits between them are the exponent, from which `bias` is subtracted. A code of 4 bits is converted to this
 * layout by moving its sign to bit 7. */
struct fsdpc_float8 {
    int mantissa, bias;
    int32_t past;     /* the code, without sign, of all values above the largest number */
    int32_t nan;      /* the code of NaN, without sign */
    float least_unit; /* the value of the lowest bit of subnormal numbers */
};

FSDPC_CODEC_INLINE struct fsdpc_float8
fsdpc_float8_e4m3(void)
{
    const struct fsdpc_float8 format = {3, 7, 0x7f, 0x7f, 0x1p-9f};
    return format;
}

FSDPC_CODEC_INLINE struct fsdpc_float8
fsdpc_float8_e5m2(void)
{
    const struct fsdpc_float8 format = {2, 15, 0x7c, 0x7e, 0x1p-16f};
    return format;
}

FSDPC_CODEC_INLINE uint8_t
fsdpc_float8_of(float value, struct fsdpc_float8 f)
{
    const uint32_t bits = f32_bits(value), sign = bits >> 24 & 0x80u;
    const int32_t magnitude = (int32_t)(bits & 0x7fffffffu);
    const int drop = 23 - f.mantissa;
    const int32_t half = (1 << (drop - 1)) - 1 + (magnitude >> drop & 1);
    const int32_t finite = magnitude < 0x7f000000 ? magnitude : 0x7f000000;
    int32_t code = ((finite + half) >> drop) - ((127 - f.bias) << f.mantissa);
    const float lifted = f32_from_bits((uint32_t)magnitude) * (1.0f / f.least_unit) + FSDPC_ROUNDS;
    const int32_t subnormal = (int32_t)f32_bits(lifted) - (int32_t)f32_bits(FSDPC_ROUNDS);
    code = magnitude < (128 - f.bias) << 23 ? subnormal : code;
    code = code < f.past ? code : f.past;
    code = magnitude > 0x7f800000 ? f.nan : code;
    return (uint8_t)((uint32_t)code | sign);
}

FSDPC_CODEC_INLINE float
fsdpc_float8_value(uint8_t code, struct fsdpc_float8 f)
{
    const int32_t magnitude = code & 0x7f;
    const uint32_t sign = (uint32_t)(code & 0x80) << 24;
    const uint32_t normal =
        (uint32_t)(magnitude << (23 - f.mantissa)) + ((uint32_t)(127 - f.bias) << 23);
    const uint32_t subnormal = f32_bits((float)magnitude * f.least_unit);
    uint32_t bits = magnitude < 1 << f.mantissa ? subnormal : normal;
    bits = magnitude >= f.past ? magnitude == f.past && f.past != f.nan ? 0x7f800000u : 0x7fc00000u
                               : bits;
    return f32_from_bits(bits | sign);
}

enum { FSDPC_NVFP4_PART = 16 }; /* consecutive elements that share a second scale */

/* Returns the format E2M1. Values to encode must be finite and in the range -6 to 6. */
FSDPC_CODEC_INLINE struct fsdpc_float8
fsdpc_float4(void)
{
    const struct fsdpc_float8 format = {1, 1, 8, 7, 0.5f};
    return format;
}

FSDPC_CODEC_INLINE int32_t
fsdpc_float4_of(float value)
{
    const uint8_t code = fsdpc_float8_of(value, fsdpc_float4());
    return (code & 7) | (code >> 4 & 8);
}

FSDPC_CODEC_INLINE float
fsdpc_float4_value(int32_t code)
{
    return fsdpc_float8_value((uint8_t)((code & 7) | (code & 8) << 4), fsdpc_float4());
}

/* The value of a code in E8M0: 2^(code - 127), and NaN for 255. */
FSDPC_CODEC_INLINE float
fsdpc_e8m0_value(uint8_t code)
{
    return f32_from_bits(code == 255 ? 0x7fc00000u
                         : code == 0 ? 0x00400000u
                                     : (uint32_t)code << 23);
}

FSDPC_CODEC_TABLE float fsdpc_nf4_levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

/* The midpoints of neighbouring levels, in the float32 rounding that bitsandbytes uses on CPUs. */
FSDPC_CODEC_TABLE float fsdpc_nf4_bounds[15] = {
    -0.8480963706970215f,  -0.6106328964233398f,  -0.4599952697753906f,   -0.33967941999435425f,
    -0.23460739850997925f, -0.13791173696517944f, -0.045525018125772476f, 0.03979014977812767f,
    0.120255246758461f,    0.2035212516784668f,   0.2920137643814087f,    0.3893125355243683f,
    0.5016634464263916f,   0.6427869200706482f,   0.8614784479141235f,
};

FSDPC_CODEC_INLINE int32_t
fsdpc_nf4_of(float value)
{
    int32_t code = 0;
    for (int i = 0; i < 15; i++) {
        code += value > fsdpc_nf4_bounds[i];
    }
    return code;
}

/* Returns the code of int4: 8 plus `value` rounded to an integer (ties to even) and clamped to -7..7. */
FSDPC_CODEC_INLINE int32_t
fsdpc_int4_of(float value)
{
    const int32_t level = (int32_t)f32_bits(value + FSDPC_ROUNDS) - (int32_t)f32_bits(FSDPC_ROUNDS);
    const int32_t low = level < 7 ? level : 7;
    return 8 + (low > -7 ? low : -7);
}

/* Returns a random number from -1/2 to 1/2. Rounding to the nearest integer becomes stochastic rounding if
 * this number is added to the value first. */
FSDPC_CODEC_INLINE float
fsdpc_dither(uint32_t bits)
{
    return (float)(int32_t)(fsdpc_random_end(bits, 0) >> 8) * 0x1p-24f - 0.5f;
}

#endif
