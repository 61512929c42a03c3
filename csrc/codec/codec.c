/* Encoding and decoding of rows. See codec.h for the codecs.
 *
 * A row is processed in stretches that fit in the cache. Encoding converts a stretch to float32 and codes it;
 * decoding makes float32 and converts that to the type of the values. The loops are written once, as
 * always-inlined functions. So each loop is compiled for the instruction set of each of its callers.
 */
#include "codec/codec.h"

#include <math.h>
#include <string.h>

#include "activation/activation.h"
#include "base/mem.h"
#include "base/status.h"
#include "codec_bits.h"
#include "kernels.h"

#define INLINE FSDPC_CODEC_INLINE

enum { STRETCH = 4096 }; /* elements of a stretch; a multiple of every codec's block */

_Static_assert(FSDPC_ACTIVATION_BLOCK == 256, "that of int8 in codec_bits.h");

#define NAME(with, codec, name, ...) name,
#define NAME_AND_SPACE(with, codec, name, ...) name " "

static const char *const NAMES[FSDPC_CODECS] = {"", FSDPC_CODEC_LIST(NAME, )};

int
fsdpc_codec_from_name(const char *name, fsdpc_codec *out)
{
    for (int i = 0; i < FSDPC_CODECS; i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            *out = (fsdpc_codec)i;
            return FSDPC_OK;
        }
    }
    return fsdpc_error(FSDPC_E_INVAL,
                       "unknown codec '%s': " FSDPC_CODEC_LIST(NAME_AND_SPACE, ) "exist", name);
}

const char *
fsdpc_codec_name(fsdpc_codec codec)
{
    return NAMES[codec];
}

/* --- sizes --------------------------------------------------------------------------------------- */

static int64_t
blocks_of(const struct fsdpc_codec_form *form, int64_t n)
{
    return (n + form->block - 1) / form->block;
}

static size_t
code_bytes(const struct fsdpc_codec_form *form, int64_t n)
{
    return ((size_t)n * (size_t)form->code_bits + 7) / 8;
}

static size_t
scales_offset(const struct fsdpc_codec_form *form, int64_t rows, int64_t row)
{
    return fsdpc_round_up((size_t)rows * code_bytes(form, row), 16);
}

size_t
fsdpc_codec_bytes(fsdpc_codec codec, int64_t rows, int64_t row)
{
    const struct fsdpc_codec_form *form = &fsdpc_codec_forms[codec];
    const size_t scales = (size_t)(rows * blocks_of(form, row)) * (size_t)form->scale_bytes;
    return scales_offset(form, rows, row) + fsdpc_round_up(scales, 16);
}

size_t
fsdpc_codec_scales(fsdpc_codec codec, int64_t rows, int64_t row)
{
    return scales_offset(&fsdpc_codec_forms[codec], rows, row);
}

int64_t
fsdpc_codec_block(fsdpc_codec codec, int64_t row, int64_t i)
{
    const int64_t column = i % row, block = fsdpc_codec_forms[codec].block;
    const int64_t begin = (column + block - 1) / block * block;
    return i - column + (begin < row ? begin : row);
}

/* --- blocks -------------------------------------------------------------------------------------- */

/* Returns the largest magnitude of the values; infinity or NaN if any value is not finite. */
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

/* A block's values are multiplied by both factors, so that their largest magnitude becomes `top`. `lift` is
 * above 1 only for blocks of very small numbers, because the reciprocal of their scale would overflow. */
struct factor {
    float lift, inverse;
};

INLINE struct factor
factor_of(float most, float top)
{
    const float lift = most < 0x1p-90f ? 0x1p64f : 1;
    return (struct factor){lift, most > 0 && isfinite(most) ? top / (most * lift) : 0};
}

INLINE void
put_scale(float most, uint8_t *scale)
{
    const float value = isfinite(most) ? most : NAN;
    memcpy(scale, &value, sizeof value);
}

INLINE void
encode_float8(const float *values, int64_t n, struct fsdpc_float8 f, float top, uint8_t *codes,
              uint8_t *scale)
{
    const float most = largest(values, n);
    const struct factor factor = factor_of(most, top);
    put_scale(most, scale);
    for (int64_t i = 0; i < n; i++) {
        codes[i] = fsdpc_float8_of(values[i] * factor.lift * factor.inverse, f);
    }
}

INLINE void
decode_float8(const uint8_t *codes, int64_t n, struct fsdpc_float8 f, float top,
              const uint8_t *scale, float *values)
{
    const float most = load_F32(scale, 0);
    for (int64_t i = 0; i < n; i++) {
        values[i] = fsdpc_float8_value(codes[i], f) * (1.0f / top) * most;
    }
}

INLINE void
encode_mxfp8(const float *values, int64_t n, uint8_t *codes, uint8_t *scale)
{
    const float most = largest(values, n);
    const int32_t exponent = (int32_t)(f32_bits(most) >> 23) - 8;
    const int32_t code = exponent > 0 ? exponent : 0;
    const float inverse = f32_from_bits((uint32_t)(254 - code) << 23);
    *scale = isfinite(most) ? (uint8_t)code : 255;
    for (int64_t i = 0; i < n; i++) {
        const float x = values[i] * inverse, low = x < 448 ? x : 448;
        codes[i] = fsdpc_float8_of(low > -448 ? low : -448, fsdpc_float8_e4m3());
    }
}

INLINE void
decode_mxfp8(const uint8_t *codes, int64_t n, const uint8_t *scale, float *values)
{
    const float factor = fsdpc_e8m0_value(*scale);
    for (int64_t i = 0; i < n; i++) {
        values[i] = fsdpc_float8_value(codes[i], fsdpc_float8_e4m3()) * factor;
    }
}

/* Packs two codes into each byte, the first one in the upper half. `levels` has space for n + 1 elements. */
INLINE void
pack_levels(int32_t *levels, int64_t n, uint8_t *codes)
{
    levels[n] = 0;
    for (int64_t i = 0; i < n; i += 2) {
        codes[i / 2] = (uint8_t)(levels[i] << 4 | levels[i + 1]);
    }
}

/* Codes one part of a block and returns the part's scale. `scale`: the block's scale, times `lift`. */
INLINE uint8_t
encode_part(const float *values, int64_t n, float lift, float scale, int32_t *levels)
{
    const float ratio = scale > 0 ? largest(values, n) * lift / 6 / scale : 0;
    const uint8_t part = fsdpc_float8_of(ratio, fsdpc_float8_e4m3());
    const float inverse = part > 0 ? 1 / scale / fsdpc_float8_value(part, fsdpc_float8_e4m3()) : 0;
    for (int64_t i = 0; i < n; i++) {
        const float x = values[i] * lift * inverse, low = x < 6 ? x : 6;
        levels[i] = fsdpc_float4_of(low > -6 ? low : -6);
    }
    return part;
}

/* Uses torchao's order of operations, but a part whose numbers are all very small gets a scale below 2^-6. */
INLINE void
encode_nvfp4(const float *values, int64_t n, uint8_t *codes, uint8_t *scale)
{
    enum { PART = FSDPC_NVFP4_PART };
    const float most = largest(values, n);
    const float lift = most < 0x1p-90f ? 0x1p64f : 1;
    const float lifted = isfinite(most) ? most * lift / 2688 : 0;
    int32_t levels[512 + 1];
    put_scale(isfinite(most) ? lifted / lift : NAN, scale);
    for (int64_t i = 0; i + PART <= n; i += PART) {
        scale[4 + i / PART] = encode_part(values + i, PART, lift, lifted, levels + i);
    }
    if (n % PART > 0) {
        const int64_t i = n / PART * PART;
        scale[4 + i / PART] = encode_part(values + i, n - i, lift, lifted, levels + i);
    }
    pack_levels(levels, n, codes);
}

INLINE void
decode_nvfp4(const uint8_t *codes, int64_t n, const uint8_t *scale, float *values)
{
    float factors[512 / FSDPC_NVFP4_PART];
    for (int64_t i = 0; i * FSDPC_NVFP4_PART < n; i++) {
        factors[i] = load_F32(scale, 0) * fsdpc_float8_value(scale[4 + i], fsdpc_float8_e4m3());
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t code = codes[i / 2] >> (i % 2 ? 0 : 4) & 15;
        values[i] = fsdpc_float4_value(code) * factors[i / FSDPC_NVFP4_PART];
    }
}

INLINE void
encode_nf4(const float *values, int64_t n, uint8_t *codes, uint8_t *scale)
{
    const float most = largest(values, n);
    const struct factor factor = factor_of(most, 1);
    int32_t levels[64 + 1];
    put_scale(most, scale);
    for (int64_t i = 0; i < n; i++) {
        levels[i] = fsdpc_nf4_of(values[i] * factor.lift * factor.inverse);
    }
    pack_levels(levels, n, codes);
}

INLINE void
decode_nf4(const uint8_t *codes, int64_t n, const uint8_t *scale, float *values)
{
    const float most = load_F32(scale, 0);
    for (int64_t i = 0; i < n; i++) {
        values[i] = fsdpc_nf4_levels[codes[i / 2] >> (i % 2 ? 0 : 4) & 15] * most;
    }
}

/* Returns the seed of a block's stochastic rounding: a hash of the sum of the values' bits. */
INLINE uint32_t
seed_of(const float *values, int64_t n)
{
    uint32_t seed = 0;
    for (int64_t i = 0; i < n; i++) {
        seed += f32_bits(values[i]);
    }
    return fsdpc_random_end(seed, 0);
}

INLINE void
encode_int4(const float *values, int64_t n, bool stochastic, uint8_t *codes, uint8_t *scale)
{
    const float most = largest(values, n);
    const struct factor factor = factor_of(most, 7);
    const uint32_t seed = stochastic ? seed_of(values, n) : 0;
    uint8_t levels[128 + 1];
    put_scale(most, scale);
    for (int32_t i = 0; i < (int32_t)n; i++) {
        const float shift = stochastic ? fsdpc_dither(seed + (uint32_t)i) : 0;
        levels[i] = (uint8_t)fsdpc_int4_of(values[i] * factor.lift * factor.inverse + shift);
    }
    levels[n] = 0;
    for (int32_t i = 0; i < (int32_t)(n + 1) / 2; i++) {
        codes[i] = (uint8_t)(levels[2 * i] << 4 | levels[2 * i + 1]);
    }
}

INLINE float
int4_value(int32_t code, float most)
{
    return (float)(code - 8) * (1.0f / 7) * most;
}

INLINE void
decode_int4(const uint8_t *codes, int64_t n, const uint8_t *scale, float *values)
{
    const float most = load_F32(scale, 0);
    for (int32_t i = 0; i < (int32_t)n / 2; i++) {
        values[2 * i] = int4_value(codes[i] >> 4, most);
        values[2 * i + 1] = int4_value(codes[i] & 15, most);
    }
    if (n % 2 > 0) {
        values[n - 1] = int4_value(codes[n / 2] >> 4, most);
    }
}

/* --- stretches of a row ------------------------------------------------------------------------ */

INLINE void
encode_blocks(fsdpc_codec codec, const float *values, int64_t n, uint8_t *codes, uint8_t *scales)
{
    const struct fsdpc_codec_form *form = &fsdpc_codec_forms[codec];
    for (int64_t at = 0; at < n; at += form->block, scales += form->scale_bytes) {
        const int64_t count = n - at < form->block ? n - at : form->block;
        uint8_t *out = codes + code_bytes(form, at);
        if (codec == FSDPC_E4M3) {
            encode_float8(values + at, count, fsdpc_float8_e4m3(), 448, out, scales);
        } else if (codec == FSDPC_E5M2) {
            encode_float8(values + at, count, fsdpc_float8_e5m2(), 57344, out, scales);
        } else if (codec == FSDPC_MXFP8) {
            encode_mxfp8(values + at, count, out, scales);
        } else if (codec == FSDPC_NVFP4) {
            encode_nvfp4(values + at, count, out, scales);
        } else if (codec == FSDPC_NF4) {
            encode_nf4(values + at, count, out, scales);
        } else {
            encode_int4(values + at, count, codec == FSDPC_INT4_STOCHASTIC, out, scales);
        }
    }
}

INLINE void
decode_blocks(fsdpc_codec codec, const uint8_t *codes, const uint8_t *scales, int64_t n,
              float *values)
{
    const struct fsdpc_codec_form *form = &fsdpc_codec_forms[codec];
    for (int64_t at = 0; at < n; at += form->block, scales += form->scale_bytes) {
        const int64_t count = n - at < form->block ? n - at : form->block;
        const uint8_t *in = codes + code_bytes(form, at);
        if (codec == FSDPC_E4M3) {
            decode_float8(in, count, fsdpc_float8_e4m3(), 448, scales, values + at);
        } else if (codec == FSDPC_E5M2) {
            decode_float8(in, count, fsdpc_float8_e5m2(), 57344, scales, values + at);
        } else if (codec == FSDPC_MXFP8) {
            decode_mxfp8(in, count, scales, values + at);
        } else if (codec == FSDPC_NVFP4) {
            decode_nvfp4(in, count, scales, values + at);
        } else if (codec == FSDPC_NF4) {
            decode_nf4(in, count, scales, values + at);
        } else {
            decode_int4(in, count, scales, values + at);
        }
    }
}

#define VARIANT(name, target)                                                           \
    target static void encode_##name(fsdpc_codec codec, const float *values, int64_t n, \
                                     uint8_t *codes, uint8_t *scales)                   \
    {                                                                                   \
        encode_blocks(codec, values, n, codes, scales);                                 \
    }                                                                                   \
    target static void decode_##name(fsdpc_codec codec, const uint8_t *codes,           \
                                     const uint8_t *scales, int64_t n, float *values)   \
    {                                                                                   \
        decode_blocks(codec, codes, scales, n, values);                                 \
    }

VARIANT(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
VARIANT(avx2, __attribute__((target("avx2"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#else
#define encode_avx2 encode_plain
#define decode_avx2 decode_plain
#define encode_avx512 encode_plain
#define decode_avx512 decode_plain
#endif

struct loops {
    void (*encode)(fsdpc_codec, const float *, int64_t, uint8_t *, uint8_t *);
    void (*decode)(fsdpc_codec, const uint8_t *, const uint8_t *, int64_t, float *);
};

static struct loops
loops_of(const fsdpc_kernels *kernels)
{
    return strcmp(kernels->name, "avx512") == 0 ? (struct loops){encode_avx512, decode_avx512}
           : strcmp(kernels->name, "avx2") == 0 ? (struct loops){encode_avx2, decode_avx2}
                                                : (struct loops){encode_plain, decode_plain};
}

/* --- rows -------------------------------------------------------------------------------------- */

/* This function and those below process at most STRETCH elements of a row. The first one begins a block. */
static int
encode_wide(fsdpc_codec codec, const fsdpc_kernels *kernels, const float *wide, int64_t n,
            uint8_t *codes, uint8_t *scales)
{
    if (codec == FSDPC_INT8) {
        return fsdpc_activation_pack(wide, FSDPC_F32, n, (int8_t *)codes, (float *)(void *)scales);
    }
    loops_of(kernels).encode(codec, wide, n, codes, scales);
    return FSDPC_OK;
}

static int
decode_wide(fsdpc_codec codec, const fsdpc_kernels *kernels, const uint8_t *codes,
            const uint8_t *scales, int64_t n, float *wide)
{
    if (codec == FSDPC_INT8) {
        return fsdpc_activation_unpack((const int8_t *)codes, (const float *)(const void *)scales,
                                       n, wide, FSDPC_F32);
    }
    loops_of(kernels).decode(codec, codes, scales, n, wide);
    return FSDPC_OK;
}

static bool
is_zero(const float *values, int64_t n)
{
    int64_t i = 0;
    while (i < n && values[i] == 0) {
        i++;
    }
    return i == n;
}

/* Encodes with error feedback. A block of zeros stays zero, because it may belong to a parameter that got no
 * gradient. In blocks of zeros, and in blocks with a value that is not finite, `lost` stays unchanged. */
static int
encode_keeping(fsdpc_codec codec, const fsdpc_kernels *kernels, float *wide, int64_t n, float *lost,
               uint8_t *codes, uint8_t *scales)
{
    float back[STRETCH];
    bool zero[STRETCH / 32];
    const int block = fsdpc_codec_forms[codec].block;
    for (int64_t at = 0; at < n; at += block) {
        const int64_t end = n - at < block ? n : at + block;
        zero[at / block] = is_zero(wide + at, end - at);
        for (int64_t i = at; i < end && !zero[at / block]; i++) {
            wide[i] += lost[i];
        }
    }
    FSDPC_TRY(encode_wide(codec, kernels, wide, n, codes, scales));
    FSDPC_TRY(decode_wide(codec, kernels, codes, scales, n, back));
    for (int64_t at = 0; at < n; at += block) {
        const int64_t end = n - at < block ? n : at + block;
        for (int64_t i = at; i < end && !zero[at / block]; i++) {
            lost[i] = isfinite(back[i]) ? wide[i] - back[i] : lost[i];
        }
    }
    return FSDPC_OK;
}

static int
encode_stretch(fsdpc_codec codec, const fsdpc_kernels *kernels, const void *values,
               fsdpc_dtype type, int64_t n, float *lost, uint8_t *codes, uint8_t *scales)
{
    float wide[STRETCH];
    kernels->cast(wide, FSDPC_F32, values, type, n, 1.0);
    return lost ? encode_keeping(codec, kernels, wide, n, lost, codes, scales)
                : encode_wide(codec, kernels, wide, n, codes, scales);
}

static int
decode_stretch(fsdpc_codec codec, const fsdpc_kernels *kernels, const uint8_t *codes,
               const uint8_t *scales, int64_t n, void *values, fsdpc_dtype type)
{
    float wide[STRETCH];
    FSDPC_TRY(decode_wide(codec, kernels, codes, scales, n, wide));
    kernels->cast(values, type, wide, FSDPC_F32, n, 1.0);
    return FSDPC_OK;
}

/* Offsets of a stretch's codes and scales in coded memory. The stretch begins at element `at` of a row. */
struct place {
    size_t codes, scales;
};

static struct place
place_of(const struct fsdpc_codec_form *form, int64_t rows, int64_t row, int64_t number, int64_t at)
{
    return (struct place){(size_t)number * code_bytes(form, row) + code_bytes(form, at),
                          scales_offset(form, rows, row) +
                              (size_t)(number * blocks_of(form, row) + at / form->block) *
                                  (size_t)form->scale_bytes};
}

int
fsdpc_codec_encode(fsdpc_codec codec, const void *values, fsdpc_dtype type, int64_t rows,
                   int64_t row, float *lost, void *coded)
{
    const size_t item = fsdpc_dtype_bytes(type);
    const fsdpc_kernels *kernels;
    FSDPC_TRY(fsdpc_kernels_select(&kernels));
    for (int64_t number = 0; number < rows; number++) {
        for (int64_t at = 0; at < row; at += STRETCH) {
            const struct place place = place_of(&fsdpc_codec_forms[codec], rows, row, number, at);
            FSDPC_TRY(encode_stretch(
                codec, kernels, (const char *)values + (size_t)(number * row + at) * item, type,
                row - at < STRETCH ? row - at : STRETCH, lost ? lost + number * row + at : NULL,
                (uint8_t *)coded + place.codes, (uint8_t *)coded + place.scales));
        }
    }
    return FSDPC_OK;
}

int
fsdpc_codec_decode(fsdpc_codec codec, const void *coded, int64_t rows, int64_t row, int64_t begin,
                   int64_t n, void *values, fsdpc_dtype type)
{
    const size_t item = fsdpc_dtype_bytes(type);
    const fsdpc_kernels *kernels;
    FSDPC_TRY(fsdpc_kernels_select(&kernels));
    for (int64_t i = 0, count; i < n; i += count) {
        const int64_t number = (begin + i) / row, at = (begin + i) % row;
        const struct place place = place_of(&fsdpc_codec_forms[codec], rows, row, number, at);
        count = row - at < STRETCH ? row - at : STRETCH;
        count = count < n - i ? count : n - i;
        FSDPC_TRY(decode_stretch(codec, kernels, (const uint8_t *)coded + place.codes,
                                 (const uint8_t *)coded + place.scales, count,
                                 (char *)values + (size_t)i * item, type));
    }
    return FSDPC_OK;
}

int
fsdpc_codec_round(fsdpc_codec codec, const void *src, fsdpc_dtype src_type, int64_t row, int64_t at,
                  int64_t n, void *dst, fsdpc_dtype dst_type)
{
    uint8_t codes[STRETCH];
    float scales[STRETCH / 32];
    const fsdpc_kernels *kernels;
    FSDPC_TRY(fsdpc_kernels_select(&kernels));
    for (int64_t i = 0, count; i < n; i += count) {
        const int64_t left = row - (at + i) % row;
        count = left < STRETCH ? left : STRETCH;
        count = count < n - i ? count : n - i;
        FSDPC_TRY(encode_stretch(codec, kernels,
                                 (const char *)src + (size_t)i * fsdpc_dtype_bytes(src_type),
                                 src_type, count, NULL, codes, (uint8_t *)scales));
        FSDPC_TRY(decode_stretch(codec, kernels, codes, (const uint8_t *)scales, count,
                                 (char *)dst + (size_t)i * fsdpc_dtype_bytes(dst_type), dst_type));
    }
    return FSDPC_OK;
}
