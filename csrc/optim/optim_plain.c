/* The loops in plain C: the oracle of the others, and the fallback everywhere. */
#define TARGET
#include "optim/optim_loops.inc"

const fsdpc_optim_loops *
fsdpc_optim_loops_plain(void)
{
    return &loops;
}
