/* The loops of optim_loops.inc with AVX2 and fused multiply-add. */
#include "optim/optim_impl.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))

/* The vector operations that optim_codes.inc uses. PICK(table, index) is entry index % 8 of the table.
 * IF_ABOVE(a, b, c) is c where a > b, else 0. EITHER_ABOVE(a, b, c, d) is c where a > b, else d.
 * UNLESS_ZERO(a, b) is b where a is not 0, else 0. */
#define LANES 8
#define REALS __m256
#define INTS __m256i
#define LOAD(from) _mm256_loadu_ps(from)
#define STORE(to, a) _mm256_storeu_ps(to, a)
#define ALL(x) _mm256_set1_ps(x)
#define ALL_INTS(x) _mm256_set1_epi32(x)
#define BITS(a) _mm256_castps_si256(a)
#define AS_REALS(a) _mm256_castsi256_ps(a)
#define TIMES(a, b) _mm256_mul_ps(a, b)
#define LESS(a, b) _mm256_sub_ps(a, b)
#define FUSED(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MOST(a, b) _mm256_max_ps(a, b)
#define LEAST(a, b) _mm256_min_ps(a, b)
#define ABS(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define ABS_INTS(a) _mm256_abs_epi32(a)
#define SIGNS(a) _mm256_srai_epi32(BITS(a), 31)
#define DOWN(a, bits) _mm256_srli_epi32(a, bits)
#define PLUS(a, b) _mm256_add_epi32(a, b)
#define MINUS(a, b) _mm256_sub_epi32(a, b)
#define AND(a, b) _mm256_and_si256(a, b)
#define XOR(a, b) _mm256_xor_si256(a, b)
#define TO_INTS(a) _mm256_cvttps_epi32(a)
#define TO_REALS(a) _mm256_cvtepi32_ps(a)
#define PICK(table, index) _mm256_permutevar8x32_ps(table, index)
#define ABOVE(a, b) BITS(_mm256_cmp_ps(a, b, _CMP_GT_OQ))
#define IF_ABOVE(a, b, c) AND(ABOVE(a, b), c)
#define EITHER_ABOVE(a, b, c, d) _mm256_blendv_epi8(d, c, ABOVE(a, b))
#define UNLESS_ZERO(a, b) _mm256_andnot_si256(_mm256_cmpeq_epi32(a, ALL_INTS(0)), b)
#define LOAD_BYTES(from) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define STORE_BYTES(to, a) store_bytes(to, a)

TARGET static inline void
store_bytes(uint8_t *to, __m256i a)
{
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(words, words));
}

#include "optim/optim_loops.inc"

const fsdpc_optim_loops *
fsdpc_optim_loops_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &loops : NULL;
}

#else

const fsdpc_optim_loops *
fsdpc_optim_loops_avx2(void)
{
    return NULL;
}

#endif
