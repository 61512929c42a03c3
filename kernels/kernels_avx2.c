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
typedef __m256d doubles;
typedef __m256i integers;

#define WIDE(name) _mm256_##name
#define HALF(name) _mm_##name##_si128
#define AS_FLOATS(integers) _mm256_castsi256_ps(integers)

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

#include "vector_x86.inc"

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
