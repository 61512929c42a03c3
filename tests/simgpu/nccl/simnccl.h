/* Functions with which tests use the simulated NCCL: faults, versions, counters. nccl_sim.h describes the
 * rest. */
#ifndef SIMGPU_SIMNCCL_H
#define SIMGPU_SIMNCCL_H

#include <stdbool.h>
#include <stdint.h>

enum simnccl_fault {
    SIMNCCL_STOP,        /* the rank never comes to its k-th collective, nor to later ones */
    SIMNCCL_SLOW,        /* the rank comes `value` milliseconds late to its k-th collective */
    SIMNCCL_ASYNC_ERROR, /* the k-th collective never ends, and the communicator's error is `value` */
    SIMNCCL_REFUSE,      /* the k-th call of a collective returns `value` at once */
    SIMNCCL_INIT_STALL,   /* the rank never joins the others in its k-th communicator's start */
    SIMNCCL_ABORT_BLOCKS, /* the k-th abort lasts `value` milliseconds, or until aborts_end */
    SIMNCCL_WINDOW_FAILS  /* the k-th window fails: its communicator keeps the error `value` */
};
/* k counts from now (1 = the next), over all communicators of that rank in this process; rank -1
 * means any. */
bool simnccl_plant(enum simnccl_fault fault, int rank, int k, int value);

typedef struct simnccl_options {
    int version; /* 22803 by default; the result of registering a window depends on it */
    int in_progress; /* calls on a non-blocking communicator take effect after so many polls; 1 by default */
    int stall_ms;     /* blocking waits for other ranks fail after this time; 30000 by default */
    int window_error; /* error of each window, then also of the window's communicator; 0: none */
    _Atomic bool aborts_end; /* true: end the aborts that SIMNCCL_ABORT_BLOCKS holds up */
    bool graphs_live;        /* graphs outlive their capture until simnccl_drop_graphs() */
    bool symmetric;          /* GPUs see each other's memory, for windows; true by default */
    size_t comm_bytes;       /* device memory that each communicator takes; 0 by default */
    /* Sums begin with rank 0 everywhere instead of following the ring; also set by $SIMNCCL_RANK_ORDER. */
    bool rank_order;
} simnccl_options;
simnccl_options *simnccl_get_options(void);

typedef struct simnccl_counters {
    int64_t all_gathers, reduce_scatters, all_reduces, broadcasts;
    int64_t all_to_alls;               /* groups of sends and receives */
    int64_t joined;                    /* collectives in groups, without the first of each group */
    int64_t bytes_sent;                /* what this process's ranks sent to the others */
    int64_t mismatches;                /* collectives in which ranks asked for different things */
    int64_t misuses;                   /* calls that a real library would not survive */
    int64_t registered, communicators; /* how many registrations and communicators exist now */
    int64_t direct, windowed;          /* collectives on registered memory; those on windows */
    int64_t aborts, aborts_ended;
} simnccl_counters;
simnccl_counters simnccl_count(void);
/* Forgets faults, options and counters. */
void simnccl_reset(void);
/* Drops the graphs that hold collectives. Until then, ncclCommFinalize of their communicators stays in
 * progress, and ncclCommAbort waits for at most stall_ms. */
void simnccl_drop_graphs(void);

#endif
