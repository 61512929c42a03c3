/* The loops in plain C: the reference for the other loops, and the fallback on any processor. */
#define TARGET
#include "optim/optim_loops.inc"

const fsdpc_optim_loops *
fsdpc_optim_loops_plain(void)
{
    return &loops;
}
