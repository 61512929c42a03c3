/* Declarations that the files of the simulated NCCL share.
 *
 * A communicator's ranks meet in a memfd. The unique id names the process that made the id, and that
 * process's descriptor of the memfd. Each rank opens the memfd by these two numbers. So ranks can be threads
 * or processes, and no file name is left behind.
 *
 * A collective is a piece of work on its stream. When the work runs, the rank lays its data into the segment
 * and is *blocked* until all ranks have done so; then the rank takes the result. Long collectives go in
 * rounds.
 *
 * Locks: the driver's lock may be taken while api_lock() is held, never the other way round. Work that runs
 * uses only atomics.
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

/* The collective that a rank asks for; all ranks must ask for the same one. */
typedef struct nccl_request {
    int kind, type, op, root;
    uint64_t count;
    uint64_t place; /* number of the buffer's window, and offset in the window; 0: no window */
} nccl_request;

typedef struct nccl_rank {
    _Atomic int joined;
    _Atomic uint64_t at;      /* the number of the last collective that this rank has begun */
    _Atomic uint64_t arrived; /* for how many rounds this rank has put its data into the segment */
    nccl_request asked[2];    /* what this rank asked for in the last two rounds */
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
    uint64_t number; /* the window's number, the same on all ranks */
} nccl_registration;

/* A window whose registration is in progress. */
typedef struct nccl_window_task {
    void *buffer;
    size_t bytes;
    fsdpc_nccl_window *window;
} nccl_window_task;

struct ncclComm {
    struct ncclComm *next; /* in the list of live communicators */
    int rank, world, fd;
    bool blocking, stalled;
    size_t held_bytes; /* device memory that the communicator takes */
    bool born;         /* the communicator's start has ended */
    bool finalizing;
    struct ncclComm **out; /* where to write the communicator when it is born */
    nccl_segment *segment;
    size_t segment_bytes;
    _Atomic int users; /* references: one of the handle, and one of each collective in a queue */
    _Atomic bool aborted;
    _Atomic int error;
    uint64_t issued; /* collectives so far */
    uint64_t round;  /* rounds that are done; only running work uses this field */
    uint64_t splits, windows;
    nccl_registration *registrations;
    simgpu_point last;      /* end of the last collective, which the next one follows */
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
    const char *sends[NCCL_RANKS]; /* only ALL_TO_ALL: a buffer for each other rank */
    char *recvs[NCCL_RANKS];
    fsdpc_cu_stream stream;
    uint64_t number;
    uint64_t done_items; /* how many items of each piece are done */
    bool begun, laid, stuck;
    bool windowed; /* the buffer is in a window: bf16 and fp16 are summed in F32 and rounded once */
    int stuck_error;
    int64_t not_before_ms;
} nccl_call;

extern simnccl_options nccl_options;
extern simnccl_counters nccl_counters;

void api_lock(void);
void api_unlock(void);
int64_t nccl_now_ms(void);
/* Counts an event at which the fault may strike. Returns the planted value, or -1 for no fault. Lock held. */
int nccl_planted(enum simnccl_fault fault, int rank);
/* Reports a call that a real library would not survive. */
fsdpc_nccl_result nccl_misuse(struct ncclComm *comm, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Returns the communicator if it is alive; else reports a misuse and returns NULL. Lock held. */
struct ncclComm *nccl_check(struct ncclComm *comm, const char *call);
/* Returns the registration of the memory in which these bytes are, or NULL. Lock held. */
const nccl_registration *nccl_registered(const struct ncclComm *comm, const void *at, size_t bytes);
/* Checks whether a call may begin. Returns the communicator's error if it has one (errors stay), or reports a
 * misuse if another call is in progress. Lock held. */
fsdpc_nccl_result nccl_enter(struct ncclComm *comm, const char *call);
/* Waits until no call is in progress, and returns the communicator's state. Without the lock. */
fsdpc_nccl_result nccl_await(struct ncclComm *comm);
void nccl_unuse(struct ncclComm *comm);
size_t nccl_item(int type);

/* nccl_register.c */
enum nccl_window_state { NCCL_WINDOW_NONE, NCCL_WINDOW_WAITS };
/* Makes the window whose registration is in progress, if all ranks have asked for it. Lock held. */
enum nccl_window_state nccl_window_look(struct ncclComm *comm);

/* nccl_ops.c */
fsdpc_nccl_result nccl_put(nccl_call *call);
fsdpc_nccl_result nccl_put_all(nccl_call *call);
/* nccl_run.c */
enum simgpu_progress nccl_run(void *context, simgpu_task *task);
bool nccl_wanted(void *context);
void nccl_drop(void *context);

#endif
