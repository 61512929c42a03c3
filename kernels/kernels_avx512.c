/* The kernels with AVX-512: sixteen floats at a time. See vector.inc.
 *
 * bfloat16 is rounded in integers, because the conversion instruction flushes subnormals to zero.
 * float16 is rounded by the conversion instruction, which rounds as convert.h does.
 */
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define TABLE_NAME "avx512"

enum { LANES = 16, NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };

typedef __m512 vec;
typedef __m512d doubles;
typedef __m512i integers;

#define WIDE(name) _mm512_##name
#define HALF(name) _mm256_##name##_si256
#define AS_FLOATS(integers) _mm512_castsi512_ps(integers)

INLINE __m256i
round_bf16(vec values)
{
    const __m512i bits = _mm512_castps_si512(values);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    __m512i rounded = _mm512_add_epi32(bits, half);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

#include "vector_x86.inc"

INLINE void
norm_add(norm_state *state, vec values)
{
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    state->low = _mm512_fmadd_pd(low, low, state->low);
    state->high = _mm512_fmadd_pd(high, high, state->high);
    state->max = _mm512_max_epi32(state->max, magnitude);
}

INLINE fsdpc_norm
norm_finish(const norm_state *state)
{
    const uint32_t bits = (uint32_t)_mm512_reduce_max_epi32(state->max);
    float max;
    __builtin_memcpy(&max, &bits, sizeof max);
    return (fsdpc_norm){.sum = _mm512_reduce_add_pd(_mm512_add_pd(state->low, state->high)),
                        .max = max,
                        .nonfinite = bits >= 0x7F800000u};
}

#include "vector.inc"

const fsdpc_kernels *
fsdpc_kernels_avx512(void)
{
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return runs ? &vector_table : NULL;
}

#else

const fsdpc_kernels *
fsdpc_kernels_avx512(void)
{
    return NULL;
}

#endif
