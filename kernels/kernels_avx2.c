/* The kernels with AVX2 and F16C: eight floats at a time. See vector.inc.
 *
 * bfloat16 is rounded in integers; float16 goes through the conversion instructions, which round
 * as convert.h does.
 */
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define TABLE_NAME "avx2"

enum { LANES = 8, NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };

typedef __m256 vec;

INLINE vec
vset(float value)
{
    return _mm256_set1_ps(value);
}

INLINE vec
vadd(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

INLINE vec
vmul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

INLINE vec
vload_F32(const void *src)
{
    return _mm256_loadu_ps(src);
}

INLINE vec
vload_BF16(const void *src)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(src));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

INLINE vec
vload_F16(const void *src)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(src));
}

INLINE void
vstore_F32(void *dst, vec values)
{
    _mm256_storeu_ps(dst, values);
}

INLINE __m128i
round_bf16(vec values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m128i low = _mm256_castsi256_si128(chosen);
    const __m128i high = _mm256_extracti128_si256(chosen, 1);
    return _mm_packus_epi32(low, high);
}

INLINE void
vstore_BF16(void *dst, vec values)
{
    _mm_storeu_si128(dst, round_bf16(values));
}

INLINE void
vstore_F16(void *dst, vec values)
{
    _mm_storeu_si128(dst, _mm256_cvtps_ph(values, NEAREST));
}

INLINE void
vstream_F32(void *dst, vec values)
{
    _mm256_stream_ps(dst, values);
}

INLINE void
vstream_BF16(void *dst, vec values)
{
    _mm_stream_si128(dst, round_bf16(values));
}

INLINE void
vstream_F16(void *dst, vec values)
{
    _mm_stream_si128(dst, _mm256_cvtps_ph(values, NEAREST));
}

INLINE void
vstream_fence(void)
{
    _mm_sfence();
}

/* The square of a float is exact in double. |x| is compared as an integer: there a NaN is larger
 * than infinity, and infinity than any number. */
typedef struct norm_state {
    __m256d low, high;
    __m256i max;
} norm_state;

INLINE void
norm_clear(norm_state *state)
{
    state->low = _mm256_setzero_pd();
    state->high = _mm256_setzero_pd();
    state->max = _mm256_setzero_si256();
}

INLINE void
norm_add(norm_state *state, vec values)
{
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    state->low = _mm256_add_pd(state->low, _mm256_mul_pd(low, low));
    state->high = _mm256_add_pd(state->high, _mm256_mul_pd(high, high));
    state->max = _mm256_max_epi32(state->max, magnitude);
}

INLINE fsdpc_norm
norm_finish(const norm_state *state)
{
    double sums[4];
    uint32_t tops[8];
    fsdpc_norm norm = {0};
    uint32_t bits = 0;
    float max;
    _mm256_storeu_pd(sums, _mm256_add_pd(state->low, state->high));
    _mm256_storeu_si256((__m256i *)tops, state->max);
    norm.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int k = 0; k < 8; k++) {
        bits = tops[k] > bits ? tops[k] : bits;
    }
    __builtin_memcpy(&max, &bits, sizeof max);
    norm.max = max;
    norm.nonfinite = bits >= 0x7F800000u;
    return norm;
}

#include "vector.inc"

const fsdpc_kernels *
fsdpc_kernels_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &vector_table : NULL;
}

#else

const fsdpc_kernels *
fsdpc_kernels_avx2(void)
{
    return NULL;
}

#endif
