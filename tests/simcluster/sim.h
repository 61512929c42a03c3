/* What the parts of the simulated cluster share. See README.md.
 *
 *   main.c      seeds to cases, runs, judgement, the command line
 *   schedule.c  fibers, who runs next, virtual time, death and stop
 *   world.c     the calls by which the core meets the world: memory, files, threads, clocks, futexes
 *   sockets.c   the calls of the rendezvous: sockets, descriptors in messages, poll
 *   wire.c      messages between ranks that share no memory
 *   program.c   what each rank does, and the model that its values must equal; linked into the core's copies
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
    SIM_PAUSES, /* for half of the deadline */
    SIM_RAISES,
    SIM_LEAVES, /* ends in good order before the others */
    SIM_NO_MEMORY,
    SIM_CHANGES, /* changes weights after fewer batches than the others: right values, or errors */
    SIM_STRAYS,  /* calls a collective, skips a unit or an unfreezing unlike the others */
    SIM_REFUSED, /* the system refuses memory, a thread or a descriptor, once */
    SIM_FAULTS
};

/* A case; it follows from the seed and the options of the command line alone. */
typedef struct sim_case {
    uint64_t seed;
    int world, units, steps;
    bool wire;    /* ranks are on hosts with a wire between them; a host has one rank, */
    bool hosts;   /* or, on some hosts, several that share memory */
    bool trusts;  /* messages do not say which unit they are of */
    int replicas; /* number of shard groups, in each of which ranks share memory; 0: no replicas */
    bool near;    /* replicas share memory, too, else a wire is between them */
    int host_of[SIM_RANKS];
    /* The program. */
    int rounds; /* backwards of a step, all but the last under no_sync */
    bool own_order, skips, evaluates, uneven, poison, wide;
    bool nested;   /* every second child runs inside of the one before */
    bool rootless; /* no rank runs the root's unit */
    bool late;     /* units get more gradients after they have been reduced */
    bool idle;     /* in some batches of evaluations ranks run nothing */
    bool meets;    /* ranks meet in a barrier after each evaluation */
    bool
        joins; /* that barrier makes the numbers of their passes equal, so weights may change after it */
    bool swaps;    /* every second change puts the weights back */
    bool parts;    /* each rank ends by itself after the last backward */
    bool thaws;    /* units are frozen until some step */
    bool twins;    /* two models of one group take turns, and one runs inside of the other */
    bool computes; /* ranks compute for some time, in modules and after passes */
    bool in_step;  /* all ranks run the same units in the same order; none naps or computes */
    int backward_prefetch, gather_slots, reduce_slots;
    bool forward_prefetch;
    /* The machine. */
    int cores;
    bool without_waitv, without_pidfd;
    double timeout_s;
    /* The schedule: by priorities, or at random with `mean` points between two switches on average; naps. */
    bool priorities;
    int changes; /* how many times priorities change */
    int mean;
    bool naps, spurious;
    bool lingers; /* ranks that are about to sleep are late */
    bool weak;    /* stores that are not sequentially consistent are seen late */
    /* With `holds`, ranks are held up at places where some bits of the place's hash equal `hold`. */
    bool holds;
    int hold_bits;
    uint64_t hold;
    /* What goes wrong, with which rank, at which of its points (or allocations, or steps). */
    enum sim_fault fault;
    int victim;
    bool vanishes; /* all ranks of the victim's host stop with it */
    uint64_t at;
    int place; /* not 0: the fault strikes at a place with this hash, however rarely reached */
} sim_case;

typedef struct sim_outcome {
    bool finished, died, joined; /* joined: is a member of the group */
    int status;
    char text[SIM_TEXT_BYTES];
    int64_t end_ns;
    int64_t idle_ns; /* sim_run's idle_ns at the end of this rank */
    int64_t live;    /* blocks that the core still counts */
    int done;        /* passes, backwards and meetings that this rank has come through */
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

/* The same number for the same case and arguments, on every rank. */
static inline uint64_t
sim_drawn(const sim_case *c, int a, int b, int d, int e)
{
    return sim_mix(c->seed * 31 + (uint64_t)a * 1000003 + (uint64_t)b * 10007 + (uint64_t)d * 1009 +
                   (uint64_t)e * 101 + 1);
}

/* The rank dies or stops as the fault says. */
static inline bool
sim_is_lost(const sim_case *c, int rank)
{
    return (c->fault == SIM_DIES || c->fault == SIM_STOPS || c->fault == SIM_PAUSES) &&
           (rank == c->victim || (c->vanishes && c->host_of[rank] == c->host_of[c->victim]));
}

/* --- schedule.c ------------------------------------------------------------------------------ */

/* A point at which another fiber may run. `place` says where, for the trace. */
void sim_point(const char *place);
/* The rank of the fiber that runs. */
int sim_rank(void);
int64_t sim_now_ns(void);
int64_t sim_used_ns(int rank);
uint64_t sim_draw(void);
/* Puts the fiber that runs to sleep until it is woken (true) or until `until_ns` (false). */
bool sim_sleep(int64_t until_ns, const char *place);
/* The same; sim_wake() of any of these words wakes the fiber. */
bool sim_sleep_on(void *const *words, int count, int64_t until_ns);
int sim_wake(const void *word, int count);
/* Wakes each fiber in sim_sleep_in_poll(), so that it looks again. */
void sim_wake_polls(void);
bool sim_sleep_in_poll(int64_t until_ns);
int sim_start_thread(void *(*function)(void *), void *argument);
void sim_join_thread(int thread);
void sim_yield(void);
bool sim_is_over(int rank); /* dead or finished */
void sim_kill(int rank);
/* Some time passes in the program, where the case says so. */
void sim_compute(void);
/* A wait has ended; `called`: by what another rank did. Then it is a violation if its last sleep timed out
 * and no other rank writes the word soon after: the wait ended by chance, its wake-up was lost. */
void sim_wait_ended(bool called);
/* Shows the others the late stores of the fiber that runs, in their order. */
void sim_flush(void);
/* A run, for sim_schedule(); false: the run did not end. `main_of` runs on a fiber for each rank. */
typedef struct sim_run {
    const sim_case *c;
    void (*main_of)(int rank, const sim_case *c, sim_outcome *out);
    sim_outcome *out;
    /* Results. */
    uint64_t points, switches;
    int64_t end_ns, fault_ns, napped_ns;
    int64_t idle_ns;       /* time since the fault in which all ranks slept */
    bool struck;           /* the fault has happened, */
    const char *struck_at; /* at this place */
    int threads_left[SIM_RANKS];
    char stuck[256]; /* where ranks were when the run did not end */
} sim_run;
bool sim_schedule(sim_run *run);

/* --- world.c, sockets.c ---------------------------------------------------------------------- */

void sim_world_begin(const sim_case *c);
/* What a rank has left behind, as text; "" if nothing. Frees it. */
const char *sim_world_leftovers(int rank, bool expected);
void sim_world_end(void);
void sim_descriptors_begin(void);
int sim_descriptors_of(int rank);
/* True, with `errnum` in errno, for the one call that the case refuses. `needed`: the rank needs the call. */
bool sim_refuse(int errnum, bool needed);
/* The errno of the refused call; 0: none was refused. */
int sim_refused(void);
bool sim_refused_need(void);
/* The running rank begins to close: from here on it needs no call. */
void sim_note_close(void);
void sim_descriptors_close(int rank);
const sim_case *sim_case_now(void);

struct sim_file {
    int real_fd;
    char *base; /* where all ranks see the file, but for mappings at addresses of their own */
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
}; /* closed: the other rank has ended or died */
void sim_wire_begin(const sim_case *c);
void sim_wire_end(void);
/* Lets messages leave and come whose time has come. sim_wire_due_ns: when the next one is due. */
void sim_wire_advance(void);
extern int64_t sim_wire_due_ns;
/* Posts a send to `peer`, or a receive from it, for the rank that runs. */
sim_transfer *sim_wire_post(int peer, bool send, uint32_t tag, void *memory, size_t bytes);
/* How a transfer stands. *until_ns: when to look again at the latest. */
enum sim_way sim_wire_look(sim_transfer *transfer, int64_t *until_ns);
/* forget: the transfer is over; skip: nobody waits for it; drop: it is given up, but may still be matched. */
void sim_wire_forget(sim_transfer *transfer);
void sim_wire_skip(sim_transfer *transfer);
void sim_wire_drop(sim_transfer *transfer);
bool sim_wire_has_dropped(int rank); /* memory stays then */
void sim_wire_cut(void);             /* nothing that was posted writes to memory any more */
/* Why a rank gave up, which others read where its connections are closed; NULL: it did not say. */
void sim_wire_give_reason(int rank, const char *text);
const char *sim_wire_reason(int rank);
void sim_wire_close(int rank);

/* --- the trace and violations ---------------------------------------------------------------- */

extern bool sim_tracing;
void sim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The first one of a run is kept, and ends it. */
void sim_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool sim_violated(void);
void sim_note_fault(void);

/* --- program.c ------------------------------------------------------------------------------- */

typedef void sim_program(int rank, const sim_case *c, sim_outcome *out);

#endif
