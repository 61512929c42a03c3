/* What the files of the NCCL communicator share. Callers use comm_nccl.h. */
#ifndef FSDPC_COMM_NCCL_IMPL_H
#define FSDPC_COMM_NCCL_IMPL_H

#include <pthread.h>
#include <sys/types.h>

#include "comm/comm_impl.h"
#include "comm/comm_nccl.h"
#include "comm/nccl_api.h"

#define FSDPC_NCCL_LOOK_S 0.1 /* between looks for Ctrl-C */

enum {
    FSDPC_NCCL_RING = 512,
    FSDPC_NCCL_WHAT_BYTES = 64,
    FSDPC_NCCL_NAME_BYTES = 64,
    FSDPC_NCCL_OLDEST_BYTES = 192,
    FSDPC_NCCL_OTHERS_BYTES = 640,
    FSDPC_NCCL_STAGE_BYTES = 1024 * 1024, /* of one rank, when host memory goes over the GPU */
    FSDPC_NCCL_WORDS_BYTES = 256 * 1024   /* of all ranks, at most, over the host's own channel */
};

/* A collective on its way. */
typedef struct fsdpc_nccl_entry {
    uint64_t sequence;
    char what[FSDPC_NCCL_WHAT_BYTES];
    size_t bytes;
    double since_s;       /* put on the stream, or became the oldest: whichever is later */
    fsdpc_cu_event event; /* made once for the place, reused */
} fsdpc_nccl_entry;

/* See [Note: registration]. */
enum fsdpc_nccl_way { FSDPC_NCCL_NEITHER, FSDPC_NCCL_WINDOWS, FSDPC_NCCL_BUFFERS_OF_ONE };
typedef struct fsdpc_nccl_buffer {
    struct fsdpc_nccl_buffer *next;
    void *address, *own;
    fsdpc_nccl_window window;
} fsdpc_nccl_buffer;

typedef struct nccl_comm {
    fsdpc_comm base;
    const fsdpc_nccl *nccl;
    const fsdpc_cuda_driver *driver;
    fsdpc_cu_context context;
    fsdpc_cu_stream stream; /* NULL: the device's current one */
    fsdpc_comm_nccl_options options;
    char name[FSDPC_NCCL_NAME_BYTES];

    /* One thread at a time is inside NCCL: whoever holds this. */
    pthread_mutex_t calls;
    fsdpc_nccl_comm handle; /* NULL once aborted or destroyed; under `calls` */
    fsdpc_nccl_comm made;   /* NCCL's to write: once more when a start is over that was given up */
    enum fsdpc_nccl_way way;
    bool shares; /* its windows are one memory to all ranks */
    fsdpc_nccl_buffer *buffers;
    _Atomic bool trying; /* an error of NCCL's is looked at by who tries to register memory */
    char *scratch;       /* on the device, for host memory that goes over it */
    char *pinned;
    fsdpc_cu_stream staging;

    /* The ring and the thread's orders; never held while NCCL is called. */
    pthread_mutex_t lock;
    pthread_cond_t told; /* the thread has an order, or has ended */
    fsdpc_nccl_entry ring[FSDPC_NCCL_RING];
    uint64_t first, next; /* sequences: [first, next) are on their way */
    pthread_t thread;
    bool threaded, stop, ended, orphan;
    char others[FSDPC_NCCL_OTHERS_BYTES]; /* what is known of the other ranks */
    pid_t owner;      /* a forked child has no such thread, and none of NCCL's */
    bool captured;    /* a graph may hold collectives; set by who puts them, with `calls` held */
    bool left_behind; /* NCCL's side stays, because such a graph may still run */
    struct nccl_comm *next_left;
    _Atomic bool abort_wanted; /* whoever polls inside NCCL leaves */
} nccl_comm;

/* A collective that shall be. */
enum fsdpc_nccl_kind {
    FSDPC_NCCL_GATHER,
    FSDPC_NCCL_SCATTER,
    FSDPC_NCCL_REDUCE,
    FSDPC_NCCL_BROADCAST
};
typedef struct fsdpc_nccl_order {
    enum fsdpc_nccl_kind kind;
    char *buffer;
    size_t count; /* of a piece */
    fsdpc_dtype dtype;
    fsdpc_nccl_op op;
    int root;
    fsdpc_cu_stream stream; /* NULL: the communicator's */
} fsdpc_nccl_order;

/* comm_nccl_common.c */
double fsdpc_nccl_now_s(void);
void fsdpc_nccl_nap(int us);
/* The calling thread may have no CUDA context. */
int fsdpc_nccl_use_context(const nccl_comm *comm);
/* Whether this process is a child that was forked off the communicator's: nothing can be ended there, and a
 * lock may be held by a thread that is not there. */
bool fsdpc_nccl_is_forked(const nccl_comm *comm);
/* Breaks the communicator and leaves the abort to the thread. Any thread. */
void fsdpc_nccl_fail(nccl_comm *comm, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* comm_nccl_issue.c */
/* `result` of the call just made becomes a status, by the deadline; `calls` is held. */
int fsdpc_nccl_settle(nccl_comm *comm, fsdpc_nccl_result result, const char *what);
/* A failure of this thread's, whose text is set, ends the communicator. An interrupt is raised once:
 * what is asked later fails because this rank gave up. */
void fsdpc_nccl_break_by(nccl_comm *comm, int status);
/* Puts a collective on its stream and notes it. */
int fsdpc_nccl_run(nccl_comm *comm, fsdpc_nccl_order *o, const char *what);
/* Several of one kind by one call of NCCL: gathers, or sums that are scattered. */
int fsdpc_nccl_run_parts(nccl_comm *comm, enum fsdpc_nccl_kind kind, const fsdpc_comm_part *parts,
                         int count, const char *what);

/* comm_nccl_host.c */
int fsdpc_nccl_exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
int fsdpc_nccl_agree(fsdpc_comm *comm, const char *text, const char *what);
int fsdpc_nccl_barrier(fsdpc_comm *comm, const char *what);

/* comm_nccl_register.c */
int fsdpc_nccl_register(fsdpc_comm *comm, void *buffer, size_t bytes);
void fsdpc_nccl_forget(fsdpc_comm *comm, void *buffer);
/* With `calls` held. */
void fsdpc_nccl_delist_all(nccl_comm *comm);
/* Collective: finds out what can be registered. */
int fsdpc_nccl_try_registration(nccl_comm *comm);

/* comm_nccl_ring.c */
/* Notes what has just been put on the stream. */
int fsdpc_nccl_watch_add(nccl_comm *comm, fsdpc_cu_stream stream, const char *what, size_t bytes);
/* The oldest collective that has not ended, for texts. */
void fsdpc_nccl_oldest(nccl_comm *comm, char text[FSDPC_NCCL_OLDEST_BYTES]);
/* Takes out what has ended. FSDPC_CU_SUCCESS: all has, FSDPC_CU_NOT_READY: the oldest one is on its way for so
 * many seconds, else an error of the device's. */
fsdpc_cu_result fsdpc_nccl_sweep(nccl_comm *comm, double *waited);

/* comm_nccl_watch.c */
int fsdpc_nccl_watch_start(nccl_comm *comm);
/* Gives what is on its way a few seconds to end, then ends the thread and NCCL's side; the
 * communicator stays, and refuses collectives. */
void fsdpc_nccl_part(nccl_comm *comm);
/* Ends the thread and NCCL's side. True: all is over and the caller frees. False: NCCL does not let
 * go; the thread frees the communicator when it does. */
bool fsdpc_nccl_watch_end(nccl_comm *comm);
/* Frees memory, events and locks; NCCL's side is gone. */
void fsdpc_nccl_dispose(nccl_comm *comm);

#endif
