/* Codes rows of values and decodes them as csrc/codec/codec.c does; sums the decoded values of several ranks.
 * A warp codes a block of values at a time. Each thread has consecutive values whose codes fill whole bytes.
 */
#include "cuda_span.cuh"

#include "codec_bits.h"

enum { CODEC_WARP = 32 };

template <int CODEC> struct codec_form {
    enum {
        BITS = fsdpc_codec_forms[CODEC].code_bits,
        BLOCK = CODEC == FSDPC_UNCODED ? (int)FSDPC_CUDA_PLAIN_BLOCK
                                       : fsdpc_codec_forms[CODEC].block,
        SCALE = fsdpc_codec_forms[CODEC].scale_bytes,
        SHARE = BLOCK / CODEC_WARP,
        BYTES = SHARE * BITS / 8,
    };
};

/* A thread's elements of a block: `count` (at most SHARE) from index `at` on, their codes, and the scale. */
struct codec_share {
    int64_t at;
    int count, place; /* place: index of the first element in the block */
    uint8_t *codes, *scale;
};

/* The calling thread's share of block `number` of all pieces; its count is 0 if there is no such block. */
template <int CODEC>
static __device__ __forceinline__ codec_share
share_of(const fsdpc_cuda_coding &c, int64_t number)
{
    typedef codec_form<CODEC> form;
    const int64_t blocks = (c.row + form::BLOCK - 1) / form::BLOCK;
    const int64_t row = number / blocks, block = number % blocks;
    const int64_t piece = row / c.rows, inside = row % c.rows;
    const int place = (int)threadIdx.x % CODEC_WARP * form::SHARE;
    const int64_t column = block * form::BLOCK + place;
    const int64_t left = number < c.blocks ? c.row - column : 0;
    uint8_t *coded = c.coded + piece * c.stride;
    codec_share share;
    share.at = row * c.row + column;
    share.count = left < 0 ? 0 : left < form::SHARE ? (int)left : form::SHARE;
    share.place = place;
    share.codes = coded + inside * ((c.row * form::BITS + 7) / 8) + column * form::BITS / 8;
    share.scale = coded + c.scales + (inside * blocks + block) * form::SCALE;
    return share;
}

/* --- values ------------------------------------------------------------------------------------- */

template <int T, int SHARE, typename VALUE>
static __device__ __forceinline__ void
load_share(const void *values, const codec_share &share, VALUE *out)
{
    typedef typename item<T>::raw raw;
    const raw *from = (const raw *)values + share.at;
    if constexpr (SHARE * sizeof(raw) % 16 == 0) {
        if (share.count == SHARE && on_boundary(from)) {
            group<raw, SHARE> in;
            in.template load<true>(from);
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                out[i] = (VALUE)item<T>::get(in.item[i]);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        out[i] = i < share.count ? (VALUE)item<T>::get(from[i]) : 0;
    }
}

template <int SHARE, typename VALUE>
static __device__ __forceinline__ void
load_any(const void *values, int type, const codec_share &share, VALUE *out)
{
    switch (type) {
    case FSDPC_F32: load_share<FSDPC_F32, SHARE>(values, share, out); break;
    case FSDPC_BF16: load_share<FSDPC_BF16, SHARE>(values, share, out); break;
    case FSDPC_F16: load_share<FSDPC_F16, SHARE>(values, share, out); break;
    default: load_share<FSDPC_F64, SHARE>(values, share, out); break;
    }
}

template <int T, int SHARE>
static __device__ __forceinline__ void
store_share(void *values, const codec_share &share, const float *in)
{
    typedef typename item<T>::raw raw;
    raw *to = (raw *)values + share.at;
    if constexpr (SHARE * sizeof(raw) % 16 == 0) {
        if (share.count == SHARE && on_boundary(to)) {
            group<raw, SHARE> out;
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                out.item[i] = item<T>::put(in[i]);
            }
            out.store(to);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        if (i < share.count) {
            to[i] = item<T>::put(in[i]);
        }
    }
}

template <int SHARE>
static __device__ __forceinline__ void
store_any(const fsdpc_cuda_coding &c, const codec_share &share, const float *in)
{
    switch (c.type) {
    case FSDPC_F32: store_share<FSDPC_F32, SHARE>(c.values, share, in); break;
    case FSDPC_BF16: store_share<FSDPC_BF16, SHARE>(c.values, share, in); break;
    case FSDPC_F16: store_share<FSDPC_F16, SHARE>(c.values, share, in); break;
    default: store_share<FSDPC_F64, SHARE>(c.values, share, in); break;
    }
}

/* --- codes -------------------------------------------------------------------------------------- */

template <int BYTES> union codec_bytes {
    uint2 word[BYTES / 8 + 1];
    uint8_t item[BYTES];
};

template <int BITS, int BYTES>
static __device__ __forceinline__ void
load_codes(const codec_share &share, codec_bytes<BYTES> *out)
{
    const int bytes = (share.count * BITS + 7) / 8;
    if (BYTES == 8 && bytes == 8 && (uintptr_t)share.codes % 8 == 0) {
        out->word[0] = __ldcs((const uint2 *)share.codes);
        return;
    }
#pragma unroll
    for (int i = 0; i < BYTES; i++) {
        out->item[i] = i < bytes ? share.codes[i] : 0;
    }
}

template <int BITS, int BYTES>
static __device__ __forceinline__ void
store_codes(const codec_share &share, const codec_bytes<BYTES> &in)
{
    const int bytes = (share.count * BITS + 7) / 8;
    if (BYTES == 8 && bytes == 8 && (uintptr_t)share.codes % 8 == 0) {
        *(uint2 *)share.codes = in.word[0];
        return;
    }
#pragma unroll
    for (int i = 0; i < BYTES; i++) {
        if (i < bytes) {
            share.codes[i] = in.item[i];
        }
    }
}

/* Returns the scale by which the thread's decoded codes are multiplied. */
template <int CODEC>
static __device__ __forceinline__ float
load_scale(const codec_share &share)
{
    if (CODEC == FSDPC_MXFP8) {
        return fsdpc_e8m0_value(*share.scale);
    }
    const float scale = *(const float *)share.scale;
    if (CODEC == FSDPC_NVFP4) {
        const uint8_t part = share.scale[4 + share.place / FSDPC_NVFP4_PART];
        return product(scale, fsdpc_float8_value(part, fsdpc_float8_e4m3()));
    }
    return scale;
}

/* --- blocks ------------------------------------------------------------------------------------- */

/* Returns the number to which the largest value of a block is scaled. */
template <int CODEC>
static __device__ __forceinline__ float
codec_top(void)
{
    return CODEC == FSDPC_INT8   ? 126.0f /* as in csrc/activation/activation.h */
           : CODEC == FSDPC_E4M3 ? 448.0f
           : CODEC == FSDPC_E5M2 ? 57344.0f
           : CODEC == FSDPC_NF4  ? 1.0f
                                 : 7.0f;
}

static __device__ __forceinline__ int32_t
nearest(float value)
{
    return (int32_t)f32_bits(sum(value, FSDPC_ROUNDS)) - (int32_t)f32_bits(FSDPC_ROUNDS);
}

/* Returns the code of a value. `scaled` is the value times the factors of its block. */
template <int CODEC>
static __device__ __forceinline__ int32_t
codec_code(float value, float scaled, bool finite)
{
    if (CODEC == FSDPC_INT8) {
        return finite ? nearest(scaled) + (value > 0) - (value < 0) : 0;
    }
    if (CODEC == FSDPC_E4M3 || CODEC == FSDPC_MXFP8) {
        return fsdpc_float8_of(scaled, fsdpc_float8_e4m3());
    }
    if (CODEC == FSDPC_E5M2) {
        return fsdpc_float8_of(scaled, fsdpc_float8_e5m2());
    }
    if (CODEC == FSDPC_NVFP4) {
        return fsdpc_float4_of(scaled);
    }
    return CODEC == FSDPC_NF4 ? fsdpc_nf4_of(scaled) : fsdpc_int4_of(scaled);
}

/* The value of a code, times the block's scale. */
template <int CODEC>
static __device__ __forceinline__ float
codec_value(int32_t code, float scale)
{
    if (CODEC == FSDPC_INT8) {
        const int32_t steps = (int8_t)code;
        const int32_t one = steps > 1 ? 1 : steps < -1 ? -1 : steps;
        const int32_t two = steps > 2 ? 2 : steps < -2 ? -2 : steps;
        return product(product((float)(4 * steps - 2 * one - two), 0.25f / 126.0f), scale);
    }
    if (CODEC == FSDPC_MXFP8) {
        return product(fsdpc_float8_value((uint8_t)code, fsdpc_float8_e4m3()), scale);
    }
    if (CODEC == FSDPC_E4M3) {
        const float value = fsdpc_float8_value((uint8_t)code, fsdpc_float8_e4m3());
        return product(product(value, 1.0f / 448.0f), scale);
    }
    if (CODEC == FSDPC_E5M2) {
        const float value = fsdpc_float8_value((uint8_t)code, fsdpc_float8_e5m2());
        return product(product(value, 1.0f / 57344.0f), scale);
    }
    if (CODEC == FSDPC_NVFP4) {
        return product(fsdpc_float4_value(code), scale);
    }
    if (CODEC == FSDPC_NF4) {
        return product(fsdpc_nf4_levels[code], scale);
    }
    return product(product((float)(code - 8), 1.0f / 7), scale);
}

/* To be encoded, a value is multiplied by `lift` and then by `inverse` (see csrc/codec/codec.c). */
struct codec_factor {
    float lift, inverse;
    float scale; /* decoded codes are multiplied by it */
};

/* Sets the factors of the elements of a thread. `scale` is the scale of the block times factors->lift. */
static __device__ __forceinline__ void
part_factors(int32_t own, float scale, codec_factor *factors, uint8_t *part)
{
    const float largest = product(f32_from_bits((uint32_t)own), factors->lift);
    const float ratio = scale > 0 ? __fdiv_rn(__fdiv_rn(largest, 6), scale) : 0;
    *part = fsdpc_float8_of(ratio, fsdpc_float8_e4m3());
    const float value = fsdpc_float8_value(*part, fsdpc_float8_e4m3());
    factors->inverse = value > 0 ? __fdiv_rn(__fdiv_rn(1, scale), value) : 0;
    factors->scale = product(factors->scale, value);
}

/* Writes scales as csrc/codec/codec.c does. `most`, `own`: bits of the block's and the thread's maximum. */
static __device__ __forceinline__ codec_factor
nvfp4_factors(int32_t most, int32_t own, bool finite, const codec_share &share)
{
    codec_factor factors = {1, 0, 0};
    const float largest = f32_from_bits((uint32_t)most);
    factors.lift = largest < 0x1p-90f ? 0x1p64f : 1;
    const float lifted = finite ? __fdiv_rn(product(largest, factors.lift), 2688) : 0;
    factors.scale = finite ? __fdiv_rn(lifted, factors.lift) : f32_from_bits(0x7FC00000u);
    if (share.place == 0 && share.count > 0) {
        *(float *)share.scale = factors.scale;
    }
    uint8_t part;
    part_factors(own, lifted, &factors, &part);
    if (share.count > 0) {
        share.scale[4 + share.place / FSDPC_NVFP4_PART] = part;
    }
    return factors;
}

/* Returns a block's factors. `most`: the bits of its largest |value|. If `first`, this thread sets *scale. */
template <int CODEC>
static __device__ __forceinline__ codec_factor
codec_factors(int32_t most, bool finite, uint8_t *scale, bool first)
{
    codec_factor factors = {1, 0, 0};
    if (CODEC == FSDPC_MXFP8) {
        const int32_t exponent = (most >> 23) - 8, code = exponent > 0 ? exponent : 0;
        const uint8_t kept = finite ? (uint8_t)code : 255;
        if (first) {
            *scale = kept;
        }
        factors.inverse = f32_from_bits((uint32_t)(254 - code) << 23);
        factors.scale = fsdpc_e8m0_value(kept);
        return factors;
    }
    const float largest = f32_from_bits((uint32_t)most);
    factors.lift = largest < 0x1p-90f ? 0x1p64f : 1;
    if (finite && largest > 0) {
        factors.inverse = __fdiv_rn(codec_top<CODEC>(), product(largest, factors.lift));
    }
    factors.scale = finite ? largest : f32_from_bits(0x7FC00000u);
    if (first) {
        *(float *)scale = factors.scale;
    }
    return factors;
}

/* Adds earlier coding errors to the values and returns true; if all values are 0, only returns false. */
template <int SHARE>
static __device__ __forceinline__ bool
add_lost(const float *lost, const codec_share &share, float *values)
{
    int32_t any = 0;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        any |= values[i] != 0;
    }
    any = __reduce_max_sync(0xffffffffu, any);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        if (any && i < share.count) {
            values[i] = sum(values[i], lost[share.at + i]);
        }
    }
    return any;
}

template <int CODEC>
static __device__ __forceinline__ void
encode_block(const fsdpc_cuda_coding &c, int64_t number)
{
    typedef codec_form<CODEC> form;
    float values[form::SHARE];
    codec_bytes<form::BYTES> codes;
    int32_t most = 0;
    uint32_t seed = 0;
    const codec_share share = share_of<CODEC>(c, number);
    load_any<form::SHARE>(c.values, c.type, share, values);
    const bool keeps = c.lost && add_lost<form::SHARE>(c.lost, share, values);
#pragma unroll
    for (int i = 0; i < form::SHARE; i++) {
        const int32_t bits = (int32_t)(f32_bits(values[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
        seed += f32_bits(values[i]);
    }
    const int32_t own = most;
    most = __reduce_max_sync(0xffffffffu, own);
    if (CODEC == FSDPC_INT4_STOCHASTIC) {
        seed = fsdpc_random_end(__reduce_add_sync(0xffffffffu, seed), 0);
    }
    const bool finite = most < 0x7F800000, first = share.place == 0 && share.count > 0;
    const codec_factor factors = CODEC == FSDPC_NVFP4
                                     ? nvfp4_factors(most, own, finite, share)
                                     : codec_factors<CODEC>(most, finite, share.scale, first);
#pragma unroll
    for (int i = 0; i < form::SHARE; i++) {
        float scaled = product(product(values[i], factors.lift), factors.inverse);
        if (CODEC == FSDPC_MXFP8 || CODEC == FSDPC_NVFP4) {
            const float top = CODEC == FSDPC_MXFP8 ? 448 : 6;
            scaled = scaled < top ? scaled : top;
            scaled = scaled > -top ? scaled : -top;
        }
        if (CODEC == FSDPC_INT4_STOCHASTIC) {
            scaled = sum(scaled, fsdpc_dither(seed + (uint32_t)(share.place + i)));
        }
        const int32_t code = codec_code<CODEC>(values[i], scaled, finite);
        if (keeps && finite && i < share.count) {
            c.lost[share.at + i] = sum(values[i], -codec_value<CODEC>(code, factors.scale));
        }
        if (form::BITS == 8) {
            codes.item[i] = (uint8_t)code;
        } else if (i % 2 == 0) {
            codes.item[i / 2] = (uint8_t)(code << 4);
        } else if (i < share.count) { /* the last byte of a row may have one code only */
            codes.item[i / 2] |= (uint8_t)code;
        }
    }
    store_codes<form::BITS, form::BYTES>(share, codes);
}

/* Copies a block of values that no codec codes (FSDPC_UNCODED). Pieces of such values have one row. */
static __device__ void
copy_block(const fsdpc_cuda_coding &c, int64_t number)
{
    const int64_t blocks = (c.row + FSDPC_CUDA_PLAIN_BLOCK - 1) / FSDPC_CUDA_PLAIN_BLOCK;
    const int64_t piece = number / blocks, begin = number % blocks * FSDPC_CUDA_PLAIN_BLOCK;
    const int64_t end = begin + FSDPC_CUDA_PLAIN_BLOCK, from = piece * c.row;
    uint8_t *to = c.coded + piece * c.stride;
    if (number >= c.blocks) {
        return;
    }
#pragma unroll 1
    for (int64_t i = begin + threadIdx.x % CODEC_WARP; i < end && i < c.row; i += CODEC_WARP) {
        switch (item_bytes(c.type)) {
        case 2: ((uint16_t *)to)[i] = ((const uint16_t *)c.values)[from + i]; break;
        case 4: ((uint32_t *)to)[i] = ((const uint32_t *)c.values)[from + i]; break;
        default: ((uint2 *)to)[i] = ((const uint2 *)c.values)[from + i]; break;
        }
    }
}

template <int CODEC>
static __device__ __forceinline__ void
decode_share(const codec_share &share, float *values)
{
    typedef codec_form<CODEC> form;
    codec_bytes<form::BYTES> codes;
    const float scale = load_scale<CODEC>(share);
    load_codes<form::BITS, form::BYTES>(share, &codes);
#pragma unroll
    for (int i = 0; i < form::SHARE; i++) {
        const int32_t code = form::BITS == 8 ? codes.item[i]
                                             : codes.item[i / 2] >> (i % 2 ? 0 : 4) & 15;
        values[i] = codec_value<CODEC>(code, scale);
    }
}

template <int CODEC>
static __device__ __forceinline__ void
decode_block(const fsdpc_cuda_coding &c, int64_t number)
{
    typedef codec_form<CODEC> form;
    float values[form::SHARE];
    const codec_share share = share_of<CODEC>(c, number);
    if (share.count > 0) {
        decode_share<CODEC>(share, values);
        store_any<form::SHARE>(c, share, values);
    }
}

/* --- sums ---------------------------------------------------------------------------------------- */

/* Loads the values of sender s. They are decoded, unless s is this rank or CODEC is FSDPC_UNCODED. */
template <int CODEC, typename VALUE>
static __device__ __forceinline__ void
load_sent(const fsdpc_cuda_coding &c, const codec_share &share, int s, int own, VALUE *out)
{
    typedef codec_form<CODEC> form;
    const int64_t skip = (s < own ? s : s - 1) * c.stride;
    if (s == own) {
        load_any<form::SHARE>(c.values, c.type, share, out);
    } else if constexpr (CODEC == FSDPC_UNCODED) {
        load_any<form::SHARE>(c.coded + skip, c.type, share, out);
    } else {
        float values[form::SHARE];
        codec_share theirs = share;
        theirs.codes += skip;
        theirs.scale += skip;
        decode_share<CODEC>(theirs, values);
#pragma unroll
        for (int i = 0; i < form::SHARE; i++) {
            out[i] = (VALUE)values[i];
        }
    }
}

template <int CODEC, typename VALUE>
static __device__ __forceinline__ void
sum_block(const fsdpc_cuda_landed_params &p, const fsdpc_cuda_landed &l, int64_t number)
{
    typedef codec_form<CODEC> form;
    VALUE added[form::SHARE], term[form::SHARE];
    const VALUE scale = (VALUE)p.scale;
    const codec_share share = share_of<CODEC>(l.from, number);
    VALUE *to = (VALUE *)l.sum + share.at;
    if (share.count == 0) {
        return;
    }
    load_sent<CODEC>(l.from, share, 0, p.own, added);
#pragma unroll 1
    for (int s = 1; s < p.senders; s++) {
        load_sent<CODEC>(l.from, share, s, p.own, term);
#pragma unroll
        for (int i = 0; i < form::SHARE; i++) {
            added[i] = sum(added[i], term[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < form::SHARE; i++) {
        if (i < share.count) {
            const VALUE scaled = scale == 1 ? added[i] : product(added[i], scale);
            to[i] = p.add ? sum(to[i], scaled) : scaled;
        }
    }
}

/* --- lists of rows ------------------------------------------------------------------------------ */

/* Calls `what` for each block of values of the calling warp. All warps make the same number of calls. */
#define FOR_CODEC_BLOCKS(what, CODEC)                                            \
    for (int b = (int)threadIdx.x / CODEC_WARP; b < FSDPC_CUDA_CODING_BLOCKS;    \
         b += FSDPC_CUDA_THREADS / CODEC_WARP) {                                 \
        what(CODEC, first + b);                                                  \
    }

#define CODEC_CASE(what, CODEC, ...) \
    case FSDPC_##CODEC: FOR_CODEC_BLOCKS(what, FSDPC_##CODEC); break;
#define FOR_CODECS(what) \
    switch (codec) {     \
        FSDPC_CODEC_LIST(CODEC_CASE, what) \
    }

static __device__ __forceinline__ const fsdpc_cuda_coding &
own_coding(const fsdpc_cuda_coding_params &p, int64_t *first)
{
    int i = 0;
    while (i + 1 < p.count && p.coding[i + 1].first_block <= (int)blockIdx.x) {
        i++;
    }
    *first = (int64_t)((int)blockIdx.x - p.coding[i].first_block) * FSDPC_CUDA_CODING_BLOCKS;
    return p.coding[i];
}

/* FOR_CODECS(what); but if the codec is FSDPC_UNCODED, calls `plain` for each block of values. */
#define FOR_CODECS_AND_PLAIN(what, plain)      \
    if (codec == FSDPC_UNCODED) {              \
        FOR_CODEC_BLOCKS(plain, FSDPC_UNCODED) \
    } else {                                   \
        FOR_CODECS(what)                       \
    }

#define COPY(CODEC, number) copy_block(c, number)
#define ENCODE(CODEC, number) encode_block<CODEC>(c, number)
#define DECODE(CODEC, number) decode_block<CODEC>(c, number)
#define SUM_F32(CODEC, number) sum_block<CODEC, float>(p, l, number)
#define SUM_F64(CODEC, number) sum_block<CODEC, double>(p, l, number)

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_encode(const __grid_constant__ fsdpc_cuda_coding_params p)
{
    int64_t first;
    const fsdpc_cuda_coding &c = own_coding(p, &first);
    const int codec = c.codec;
    FOR_CODECS_AND_PLAIN(ENCODE, COPY)
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_decode(const __grid_constant__ fsdpc_cuda_coding_params p)
{
    int64_t first;
    const fsdpc_cuda_coding &c = own_coding(p, &first);
    const int codec = c.codec;
    FOR_CODECS(DECODE)
}

extern "C" __global__ void
__launch_bounds__(FSDPC_CUDA_THREADS, FSDPC_CUDA_RESIDENT)
    fsdpc_cuda_sum_landed(const __grid_constant__ fsdpc_cuda_landed_params p)
{
    int i = 0;
    while (i + 1 < p.count && p.landed[i + 1].from.first_block <= (int)blockIdx.x) {
        i++;
    }
    const fsdpc_cuda_landed &l = p.landed[i];
    const int codec = l.from.codec;
    const int64_t first =
        (int64_t)((int)blockIdx.x - l.from.first_block) * FSDPC_CUDA_CODING_BLOCKS;
    if (l.sum_type == FSDPC_F64) {
        FOR_CODECS_AND_PLAIN(SUM_F64, SUM_F64)
    } else {
        FOR_CODECS_AND_PLAIN(SUM_F32, SUM_F32)
    }
}
