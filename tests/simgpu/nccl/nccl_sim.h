/* What the files of the simulated NCCL share.
 *
 * A communicator's ranks meet in a memfd that each opens by the unique id (process and descriptor
 * of whoever made the id), so threads and processes are alike and no name is left behind. A
 * collective is a piece of work on its stream: when it runs, the rank lays its part into the
 * segment and is *blocked* until all have; then it takes the result. Long ones go in rounds.
 *
 * Locks: api_lock() may be held when the driver's lock is taken, never the other way round; what
 * runs as work uses atomics only.
 */
#ifndef SIMGPU_NCCL_SIM_H
#define SIMGPU_NCCL_SIM_H

#include <stdatomic.h>
#include <sys/types.h>

#include "comm/nccl_api.h"
#include "driver/simgpu.h"
#include "simnccl.h"

enum { NCCL_RANKS = 16, ROUND_BYTES = 256 * 1024 };
#define NCCL_EXPORT __attribute__((visibility("default")))

/* ALL_TO_ALL: a group of sends and receives. */
enum nccl_kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, ALL_TO_ALL, NCCL_KINDS };
extern const char *const nccl_kind_names[NCCL_KINDS];

/* What a rank asks for; all must ask for the same. */
typedef struct nccl_request {
    int kind, type, op, root;
    uint64_t count;
    uint64_t place; /* in which window the buffer is, and where; 0: in none */
} nccl_request;

typedef struct nccl_rank {
    _Atomic int joined;
    _Atomic uint64_t at;      /* how many collectives it has come to */
    _Atomic uint64_t arrived; /* how many rounds it has laid out */
    nccl_request asked[2];    /* what it asked for in the last two rounds */
    _Atomic uint64_t splits, windows;
    int color, key, fd;
    pid_t process;
} nccl_rank;

typedef struct nccl_segment {
    _Atomic int world, joined;
    nccl_rank ranks[NCCL_RANKS];
} nccl_segment;

typedef struct nccl_registration {
    struct nccl_registration *next;
    uintptr_t base;
    size_t bytes;
    bool window;
    uint64_t number; /* of the window; the same on all ranks */
} nccl_registration;

/* A window on its way. */
typedef struct nccl_window_task {
    void *buffer;
    size_t bytes;
    fsdpc_nccl_window *window;
} nccl_window_task;

struct ncclComm {
    struct ncclComm *next; /* among the live ones */
    int rank, world, fd;
    bool blocking, stalled;
    size_t held_bytes; /* of device memory */
    bool born;         /* the start is over */
    bool finalizing;
    struct ncclComm **out; /* where to write the communicator when it is born */
    nccl_segment *segment;
    size_t segment_bytes;
    _Atomic int users; /* the handle and the work in queues */
    _Atomic bool aborted;
    _Atomic int error;
    uint64_t issued; /* collectives so far */
    uint64_t round;  /* only for work that runs */
    uint64_t splits, windows;
    nccl_registration *registrations;
    simgpu_point last;      /* collectives of one communicator follow each other */
    struct nccl_call *late; /* a call that has not taken effect yet */
    nccl_window_task *window;
    int64_t captured; /* collectives in graphs */
    int polls;
    char text[256];
};

typedef struct nccl_call {
    struct nccl_call *next; /* the next call of the group */
    struct ncclComm *comm;
    nccl_request request;
    const char *send;
    char *recv;
    const char *sends[NCCL_RANKS]; /* ALL_TO_ALL: for each other rank */
    char *recvs[NCCL_RANKS];
    fsdpc_cu_stream stream;
    uint64_t number;
    uint64_t done_items; /* how many items of a piece are done */
    bool begun, laid, stuck;
    bool windowed; /* low precision is summed in F32 and rounded once */
    int stuck_error;
    int64_t not_before_ms;
} nccl_call;

extern simnccl_options nccl_options;
extern simnccl_counters nccl_counters;

void api_lock(void);
void api_unlock(void);
int64_t nccl_now_ms(void);
/* The value planted for this event, or -1. Counts the event. Lock held. */
int nccl_planted(enum simnccl_fault fault, int rank);
/* Reports a call that a real library would not survive. */
fsdpc_nccl_result nccl_misuse(struct ncclComm *comm, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The communicator if it is alive; else reports a misuse and returns NULL. Lock held. */
struct ncclComm *nccl_check(struct ncclComm *comm, const char *call);
/* The registered memory that these bytes lie in, or NULL. Lock held. */
const nccl_registration *nccl_registered(const struct ncclComm *comm, const void *at, size_t bytes);
/* What becomes of a call before anything is done: the communicator's error, which stays, or a misuse while
 * another call is in progress. Lock held. */
fsdpc_nccl_result nccl_enter(struct ncclComm *comm, const char *call);
/* Waits until no call is in progress, and returns the communicator's state. Without the lock. */
fsdpc_nccl_result nccl_await(struct ncclComm *comm);
void nccl_unuse(struct ncclComm *comm);
size_t nccl_item(int type);

/* nccl_register.c */
enum nccl_window_state { NCCL_WINDOW_NONE, NCCL_WINDOW_WAITS };
/* Ends the window that is on its way, once all ranks have come to it. Lock held. */
enum nccl_window_state nccl_window_look(struct ncclComm *comm);

/* nccl_ops.c */
fsdpc_nccl_result nccl_put(nccl_call *call);
fsdpc_nccl_result nccl_put_all(nccl_call *call);
/* nccl_run.c */
enum simgpu_progress nccl_run(void *context, simgpu_task *task);
bool nccl_wanted(void *context);
void nccl_drop(void *context);

#endif
