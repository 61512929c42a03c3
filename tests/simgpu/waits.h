/* Ranks on the simulated GPU with NCCL between them, and the search that leaves each wait out.
 *
 * A function that looks for missing waits calls leave_out before the step in question and judge after it;
 * leave_each_out runs it once as it is, then once for each call of an entry of the driver, which does
 * nothing on rank 0. The clocks, or an error, must tell.
 */
#ifndef SIMGPU_WAITS_H
#define SIMGPU_WAITS_H

#include "comm/comm_nccl.h"
#include "engine.h"
#include "gpu.h"
#include "nccl/simnccl.h"

/* --- ranks --------------------------------------------------------------------------------------- */

/* Two ids for each group of ranks: for gathers and for reductions. */
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

/* A communicator with a twin, by two ids from `first_id` on. */
__attribute__((unused)) static fsdpc_comm *
open_twins(fsdpc_device *device, int rank, int world, int first_id, fsdpc_comm_nccl_options options)
{
    fsdpc_comm *comm = open_one(device, rank, world, "gather", ids[first_id], options);
    fsdpc_comm_set_twin(comm, open_one(device, rank, world, "reduce", ids[first_id + 1], options));
    return comm;
}

/* A run's option below 5 names an order of the held-back work; others are seeds. */
enum { LAZY = 1 };

__attribute__((unused)) static void
start_rank(int rank, const ranks_run *run)
{
    static const char *const policies[] = {"eager", "lazy", "order:1,host,0", "order:0,host,1",
                                           "order:host,1,0"};
    char policy[32];
    gpu_start();
    simgpu_get_options()->granule = 64 << 10; /* new memory is filled: less of it is faster */
    simnccl_reset();
    snprintf(policy, sizeof policy, "random:%d", run->option * 100 + rank);
    REQUIRE(simgpu_policy(run->option < 5 ? policies[run->option] : policy));
}

/* What a run's flags mean. */
enum { FOUND, WRONG, CALLS };

/* The next option: on two ranks all of them, on one and on more only some. */
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
    int k; /* which call is left out; 0: none */
    int64_t before;
} fault;

/* Leaves out call `fault.k` of the entry from now on, on rank 0. */
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

/* Under sanitizers only one call in so many is left out, or each only once: they do not see such faults. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LEFT_OUT_EVERY = 8, LEFT_OUT_RUNS = 1 };
#else
enum { LEFT_OUT_EVERY = 1, LEFT_OUT_RUNS = FAULT_RUNS };
#endif

typedef struct waits {
    int calls, found, wrong; /* wrong: the values told it, too */
} wait_counts;

/* Runs the function once without each call of `entry`. With `what`, each of these faults must be found. */
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
