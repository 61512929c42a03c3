/* The loops of optim_loops.inc with AVX-512. */
#include "optim/optim_impl.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))

/* Vector operations for optim_codes.inc, see optim_avx2.c. PICK's tables have 16 entries: 8, then 8 again. */
#define LANES 16
#define REALS __m512
#define INTS __m512i
#define LOAD(from) _mm512_loadu_ps(from)
#define STORE(to, a) _mm512_storeu_ps(to, a)
#define ALL(x) _mm512_set1_ps(x)
#define ALL_INTS(x) _mm512_set1_epi32(x)
#define BITS(a) _mm512_castps_si512(a)
#define AS_REALS(a) _mm512_castsi512_ps(a)
#define TIMES(a, b) _mm512_mul_ps(a, b)
#define LESS(a, b) _mm512_sub_ps(a, b)
#define FUSED(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MOST(a, b) _mm512_max_ps(a, b)
#define LEAST(a, b) _mm512_min_ps(a, b)
#define ABS(a) _mm512_abs_ps(a)
#define ABS_INTS(a) _mm512_abs_epi32(a)
#define SIGNS(a) _mm512_srai_epi32(BITS(a), 31)
#define DOWN(a, bits) _mm512_srli_epi32(a, bits)
#define PLUS(a, b) _mm512_add_epi32(a, b)
#define MINUS(a, b) _mm512_sub_epi32(a, b)
#define AND(a, b) _mm512_and_si512(a, b)
#define XOR(a, b) _mm512_xor_si512(a, b)
#define TO_INTS(a) _mm512_cvttps_epi32(a)
#define TO_REALS(a) _mm512_cvtepi32_ps(a)
#define PICK(table, index) _mm512_permutexvar_ps(index, table)
#define ABOVE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define IF_ABOVE(a, b, c) _mm512_maskz_mov_epi32(ABOVE(a, b), c)
#define EITHER_ABOVE(a, b, c, d) _mm512_mask_blend_epi32(ABOVE(a, b), d, c)
#define UNLESS_ZERO(a, b) _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(a, a), b)
#define LOAD_BYTES(from) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define STORE_BYTES(to, a) _mm_storeu_si128((__m128i *)(to), _mm512_cvtepi32_epi8(a))

#include "optim/optim_loops.inc"

const fsdpc_optim_loops *
fsdpc_optim_loops_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? &loops
               : NULL;
}

#else

const fsdpc_optim_loops *
fsdpc_optim_loops_avx512(void)
{
    return NULL;
}

#endif
