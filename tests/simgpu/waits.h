/* Ranks on the simulated GPU with NCCL between them, and a search that leaves out one wait at a time.
 *
 * A function that looks for missing waits calls leave_out before the step in question and judge after it.
 * leave_each_out runs this function once without a fault. Then, for each call of a driver entry, it runs the
 * function with that call skipped on rank 0, up to FAULT_RUNS times, until the vector clocks or an error
 * reveal the skipped call. */
#ifndef SIMGPU_WAITS_H
#define SIMGPU_WAITS_H

#include "comm/comm_nccl.h"
#include "engine.h"
#include "gpu.h"
#include "nccl/simnccl.h"

/* --- ranks --------------------------------------------------------------------------------------- */

/* Each group of ranks has two ids: one for gathers and one for reductions. */
static char ids[RANKS_MAX][FSDPC_COMM_NCCL_ID_BYTES];

static fsdpc_comm *
open_one(fsdpc_device *device, int rank, int world, const char *name, const char *id,
         fsdpc_comm_nccl_options options)
{
    fsdpc_comm *comm;
    options.name = name;
    REQUIRE_OK(fsdpc_comm_nccl(device, rank, world, id, &options, &comm));
    return comm;
}

/* Opens a communicator and its twin, with the ids `first_id` and `first_id` + 1. */
__attribute__((unused)) static fsdpc_comm *
open_twins(fsdpc_device *device, int rank, int world, int first_id, fsdpc_comm_nccl_options options)
{
    fsdpc_comm *comm = open_one(device, rank, world, "gather", ids[first_id], options);
    fsdpc_comm_set_twin(comm, open_one(device, rank, world, "reduce", ids[first_id + 1], options));
    return comm;
}

/* A run's option below 5 is an index in `policies`; LAZY is such an index. Greater options are seeds of
 * random policies. */
enum { LAZY = 1 };

__attribute__((unused)) static void
start_rank(int rank, const ranks_run *run)
{
    static const char *const policies[] = {"eager", "lazy", "order:1,host,0", "order:0,host,1",
                                           "order:host,1,0"};
    char policy[32];
    gpu_start();
    /* The simulator fills new memory, which takes less time with small granules. */
    simgpu_get_options()->granule = 64 << 10;
    simnccl_reset();
    snprintf(policy, sizeof policy, "random:%d", run->option * 100 + rank);
    REQUIRE(simgpu_policy(run->option < 5 ? policies[run->option] : policy));
}

/* Indices in a run's flags: whether the fault was found, whether values were wrong, and how many calls of the
 * entry there were. */
enum { FOUND, WRONG, CALLS };

/* Returns the option to run after `option`. With two ranks, every option is run. With any other number of
 * ranks, every third option is run. */
__attribute__((unused)) static int
next_option(int world, int option)
{
    return option + (world == 2 ? 1 : 3);
}

static ranks_run
with_ranks_as(const char *what, int world, int option, rank_function function)
{
    for (int i = 0; i < RANKS_MAX; i++) {
        REQUIRE_OK(fsdpc_comm_nccl_id(ids[i]));
    }
    return ranks_do_as(what, function, (ranks_run){.world = world, .option = option});
}

#define with_ranks(world, option, function) with_ranks_as(#function, world, option, function)

/* --- planted faults ------------------------------------------------------------------------------ */

static struct fault {
    const char *entry;
    int k; /* the call that is left out, counted from 1; 0: no call is left out */
    int64_t before;
} fault;

/* Makes the driver skip a call of the entry on rank 0: call number `fault.k`, counted from now on. */
__attribute__((unused)) static void
leave_out(int rank)
{
    fault.before = simgpu_calls(fault.entry);
    REQUIRE(fault.k == 0 || rank > 0 || simgpu_skip(fault.entry, fault.k));
}

__attribute__((unused)) static void
judge(int rank, ranks_run *run, int status, bool wrong)
{
    int64_t calls = simgpu_calls(fault.entry) - fault.before;
    (void)simgpu_drain();
    if (rank == 0) {
        run->flags[CALLS] = (uint32_t)calls;
        run->flags[FOUND] = status != FSDPC_OK || simgpu_count().races || simgpu_count().faults;
        run->flags[WRONG] = wrong;
    }
}

/* Sanitizers do not detect that a driver call is skipped, so leave_each_out runs the function less often
 * under sanitizers. If its argument `what` is not NULL, it leaves out only every eighth call. If `what` is
 * NULL, it leaves out every call, but in one run only. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LEFT_OUT_EVERY = 8, LEFT_OUT_RUNS = 1 };
#else
enum { LEFT_OUT_EVERY = 1, LEFT_OUT_RUNS = FAULT_RUNS };
#endif

/* The number of calls in a run without a fault, the number of left-out calls that the clocks or an error
 * revealed, and the number of left-out calls that made values wrong. */
typedef struct waits {
    int calls, found, wrong;
} wait_counts;

/* For each call of `entry`, runs the function with that call left out, until the fault is found or the runs
 * are used up. With `what`, the test fails if a fault is not found. */
__attribute__((unused)) static wait_counts
leave_each_out(int world, int option, rank_function function, const char *entry, const char *what)
{
    const char *name = what ? what : entry;
    wait_counts w = {0};
    fault = (struct fault){.entry = entry};
    ranks_run run = with_ranks_as(name, world, option, function);
    CHECK(!run.flags[FOUND] && !run.flags[WRONG]);
    w.calls = (int)run.flags[CALLS];
    for (fault.k = 1; fault.k <= w.calls; fault.k += what ? LEFT_OUT_EVERY : 1) {
        const int most = what ? FAULT_RUNS : LEFT_OUT_RUNS;
        for (int tries = 0; tries < most && (tries == 0 || !run.flags[FOUND]); tries++) {
            run = with_ranks_as(name, world, option, function);
        }
        w.found += run.flags[FOUND] != 0;
        w.wrong += run.flags[WRONG] != 0;
        if (!run.flags[FOUND] && what) {
            TEST_FAIL("%s: nothing is found without wait %d of %d", what, fault.k, w.calls);
        }
    }
    return w;
}

__attribute__((unused)) static wait_counts
leave_each_wait_out(int world, int option, rank_function function, const char *what)
{
    return leave_each_out(world, option, function, "cuStreamWaitEvent", what);
}

#endif
