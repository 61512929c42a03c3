/* The loops with AVX-512. */
#include "optim/optim_impl.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
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
