/* The loops with AVX2 and fused multiply-add. */
#include "optim/optim_impl.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define TARGET __attribute__((target("avx2,fma,f16c")))
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
