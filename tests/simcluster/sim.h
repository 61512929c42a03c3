/* Declarations that the files of the simulated cluster share. See README.md.
 *
 *   main.c      makes cases from seeds, runs and judges them; the command line
 *   schedule.c  fibers and their scheduler, virtual time, death and stop of a rank
 *   world.c     replaces the core's calls to libc and the kernel: memory, files, threads, clocks, futexes
 *   sockets.c   replaces the calls of the rendezvous: sockets, descriptors in messages, poll
 *   wire.c      messages between ranks that share no memory
 *   program.c   the program of each rank, and the model of its values; linked into each copy of the core
 */
#ifndef FSDPC_SIMCLUSTER_SIM_H
#define FSDPC_SIMCLUSTER_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SIM_RANKS = 64,
    SIM_UNITS = 5,
    SIM_TEXT_BYTES = 2048,
    SIM_FIRST_PID = 1000,
    SIM_PLACES = 256
};
#define SIM_NEVER INT64_MAX

/* --- a case ---------------------------------------------------------------------------------- */

enum sim_fault {
    SIM_NO_FAULT,
    SIM_DIES,
    SIM_STOPS,  /* for good */
    SIM_PAUSES, /* stops for half of the deadline */
    SIM_RAISES,
    SIM_LEAVES, /* ends in good order before the others */
    SIM_NO_MEMORY,
    SIM_CHANGES, /* changes weights after fewer batches than the others; no wrong value may be read */
    SIM_STRAYS,  /* calls a collective that no other rank calls, or skips a unit or an unfreezing */
    SIM_REFUSED, /* one system call for memory, a thread or a descriptor fails */
    SIM_FAULTS
};

/* A case. It depends only on the seed and on the options of the command line. */
typedef struct sim_case {
    uint64_t seed;
    int world, units, steps;
    bool wire;    /* ranks are on several hosts, with a wire between the hosts */
    bool hosts;   /* some hosts have several ranks, which share memory */
    bool trusts;  /* messages do not name their unit: ranks trust that all use the same order */
    int replicas; /* number of shard groups, in each of which ranks share memory; 0: no replicas */
    bool near;    /* replicas share memory with each other; else a wire is between them */
    int host_of[SIM_RANKS];
    /* The program. */
    int rounds; /* backwards in a step; all but the last run under no_sync */
    bool own_order, skips, evaluates, uneven, poison, wide;
    bool nested;   /* every second child runs inside of the child before it */
    bool rootless; /* no rank runs the root's unit */
    bool late;     /* units get more gradients after they have been reduced */
    bool idle;     /* in some batches of an evaluation, ranks run no unit */
    bool meets;    /* ranks meet in a barrier after each evaluation */
    bool
        joins; /* the barrier of `meets` makes pass counts equal, so weights may change after that barrier */
    bool swaps;    /* every second change of the weights restores the old weights */
    bool parts;    /* each rank ends without a barrier after the last backward */
    bool thaws;    /* units are frozen until some step */
    bool twins;    /* two models train in turns; the second may also run inside of the first */
    bool computes; /* ranks compute for some time, in modules and after passes */
    bool in_step;  /* all ranks run the same units in the same order; no `naps`, no `computes` */
    int backward_prefetch, gather_slots, reduce_slots;
    bool forward_prefetch;
    /* The machine. */
    int cores;
    bool without_waitv, without_pidfd;
    double timeout_s;
    /* With `priorities`, the fiber of highest priority runs. Else fibers switch after about `mean` points. */
    bool priorities;
    int changes; /* with `priorities`: how many times one is lowered */
    int mean;
    bool naps, spurious;
    bool lingers; /* ranks are sometimes delayed just before they sleep */
    bool weak;    /* stores that are not sequentially consistent are seen late */
    /* With `holds`, ranks are held up at each place whose hash has the value `hold` in `hold_bits` bits. */
    bool holds;
    int hold_bits;
    uint64_t hold;
    /* The fault, the rank that has it, and the point (or allocation, or step) at which the fault strikes. */
    enum sim_fault fault;
    int victim;
    bool vanishes; /* all ranks of the victim's host stop with it */
    uint64_t at;
    int place; /* not 0: the fault strikes at places of this hash; `at` says at which visit */
} sim_case;

typedef struct sim_outcome {
    bool finished, died, joined; /* joined: the rank is a member of the group */
    int status;
    char text[SIM_TEXT_BYTES];
    int64_t end_ns;
    int64_t idle_ns; /* the value of sim_run.idle_ns when this rank ended */
    int64_t live;    /* how many blocks the core counts as allocated at the end */
    int done;        /* how many passes, backwards and meetings this rank has done */
} sim_outcome;

/* --- random numbers -------------------------------------------------------------------------- */

static inline uint64_t
sim_mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static inline uint64_t
sim_random(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return sim_mix(*state);
}

/* Returns the same number on every rank for the same case and arguments. */
static inline uint64_t
sim_drawn(const sim_case *c, int a, int b, int d, int e)
{
    return sim_mix(c->seed * 31 + (uint64_t)a * 1000003 + (uint64_t)b * 10007 + (uint64_t)d * 1009 +
                   (uint64_t)e * 101 + 1);
}

/* True if the fault makes this rank die, stop or pause. */
static inline bool
sim_is_lost(const sim_case *c, int rank)
{
    return (c->fault == SIM_DIES || c->fault == SIM_STOPS || c->fault == SIM_PAUSES) &&
           (rank == c->victim || (c->vanishes && c->host_of[rank] == c->host_of[c->victim]));
}

/* --- schedule.c ------------------------------------------------------------------------------ */

/* A point at which another fiber may run. `place` names the point for the trace and for faults. */
void sim_point(const char *place);
/* The rank of the fiber that runs. */
int sim_rank(void);
int64_t sim_now_ns(void);
int64_t sim_used_ns(int rank);
uint64_t sim_draw(void);
/* Puts the running fiber to sleep. Returns true if it was woken, or false if `until_ns` came first. */
bool sim_sleep(int64_t until_ns, const char *place);
/* Like sim_sleep(), but sim_wake() of any of these words wakes the fiber. */
bool sim_sleep_on(void *const *words, int count, int64_t until_ns);
int sim_wake(const void *word, int count);
/* Wakes each fiber that sleeps in sim_sleep_in_poll(), so that the fiber checks its condition again. */
void sim_wake_polls(void);
bool sim_sleep_in_poll(int64_t until_ns);
int sim_start_thread(void *(*function)(void *), void *argument);
void sim_join_thread(int thread);
void sim_yield(void);
bool sim_is_over(int rank); /* dead or finished */
void sim_kill(int rank);
/* Lets some time pass in the program, if the case has `computes`. */
void sim_compute(void);
/* Notes that a wait has ended. `called`: another rank must have ended it. Then, if the wait's last sleep
 * timed out and no other rank writes the sleep's word soon, a wake-up was lost, which is a violation. */
void sim_wait_ended(bool called);
/* Makes the late stores of the running fiber visible to the others, in the order of the stores. */
void sim_flush(void);
/* A run for sim_schedule(), which returns false if the run did not end. `main_of` runs once per rank. */
typedef struct sim_run {
    const sim_case *c;
    void (*main_of)(int rank, const sim_case *c, sim_outcome *out);
    sim_outcome *out;
    /* Results. */
    uint64_t points, switches;
    int64_t end_ns, fault_ns, napped_ns;
    int64_t idle_ns;       /* the total time since the fault in which all ranks slept */
    bool struck;           /* the fault has happened */
    const char *struck_at; /* the place of the fault */
    int threads_left[SIM_RANKS];
    char stuck[256]; /* where ranks were when the run did not end */
} sim_run;
bool sim_schedule(sim_run *run);

/* --- world.c, sockets.c ---------------------------------------------------------------------- */

void sim_world_begin(const sim_case *c);
/* Frees what a rank has left behind. Returns a text about it; "" if nothing was left or if `expected`. */
const char *sim_world_leftovers(int rank, bool expected);
void sim_world_end(void);
void sim_descriptors_begin(void);
int sim_descriptors_of(int rank);
/* Returns true and sets errno if the case refuses this call. `needed`: the rank cannot do without it. */
bool sim_refuse(int errnum, bool needed);
/* The errno of the refused call; 0: none was refused. */
int sim_refused(void);
bool sim_refused_need(void);
/* Notes that the running rank begins to close: from now on, the rank can do without a refused call. */
void sim_note_close(void);
void sim_descriptors_close(int rank);
const sim_case *sim_case_now(void);

struct sim_file {
    int real_fd;
    char *base; /* the file's address in each rank that maps the file without MAP_FIXED */
    uint64_t bytes;
    bool used;
};
struct sim_file *sim_file_of(int fd);
int sim_file_fd(struct sim_file *file);

/* --- wire.c ---------------------------------------------------------------------------------- */

typedef struct sim_transfer sim_transfer;
enum sim_way {
    SIM_ON_ITS_WAY,
    SIM_OVER,
    SIM_CLOSED
}; /* SIM_CLOSED: the other rank has ended or died */
void sim_wire_begin(const sim_case *c);
void sim_wire_end(void);
/* Sends and delivers the messages that are due. sim_wire_due_ns: when the next message is due. */
void sim_wire_advance(void);
extern int64_t sim_wire_due_ns;
/* Posts a send to `peer`, or a receive from it, for the rank that runs. */
sim_transfer *sim_wire_post(int peer, bool send, uint32_t tag, void *memory, size_t bytes);
/* Returns the state of a transfer. *until_ns: the time at which the caller must look again at the latest. */
enum sim_way sim_wire_look(sim_transfer *transfer, int64_t *until_ns);
/* End the use of a transfer: forget one that is over, skip one nobody awaits, drop one that may match. */
void sim_wire_forget(sim_transfer *transfer);
void sim_wire_skip(sim_transfer *transfer);
void sim_wire_drop(sim_transfer *transfer);
bool sim_wire_has_dropped(int rank); /* true: memory that the rank has not freed is no error */
void sim_wire_cut(void);             /* this rank's posted receives write no memory any more */
/* The reason why a rank gave up, for ranks that find its connections closed; NULL if the rank gave none. */
void sim_wire_give_reason(int rank, const char *text);
const char *sim_wire_reason(int rank);
void sim_wire_close(int rank);

/* --- the trace and violations ---------------------------------------------------------------- */

extern bool sim_tracing;
void sim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Reports a violation. The first violation of a run is kept and ends the run. */
void sim_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool sim_violated(void);
void sim_note_fault(void);

/* --- program.c ------------------------------------------------------------------------------- */

typedef void sim_program(int rank, const sim_case *c, sim_outcome *out);

#endif
