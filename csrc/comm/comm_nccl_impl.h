/* Types and functions that the files of the NCCL communicator share. Callers use comm_nccl.h. */
#ifndef FSDPC_COMM_NCCL_IMPL_H
#define FSDPC_COMM_NCCL_IMPL_H

#include <pthread.h>
#include <sys/types.h>

#include "comm/comm_impl.h"
#include "comm/comm_nccl.h"
#include "comm/nccl_api.h"

#define FSDPC_NCCL_SIGNALS_S 0.1 /* seconds between checks for Ctrl-C */

enum {
    FSDPC_NCCL_RING = 512,
    FSDPC_NCCL_WHAT_BYTES = 64,
    FSDPC_NCCL_NAME_BYTES = 64,
    FSDPC_NCCL_OLDEST_BYTES = 192,
    FSDPC_NCCL_OTHERS_BYTES = 3072,
    FSDPC_NCCL_STAGE_BYTES =
        1024 * 1024, /* bytes per rank when host memory is staged through the GPU */
    FSDPC_NCCL_CHANNEL_BYTES = 256 * 1024 /* limit for all ranks' bytes on the host's channel */
};

/* A collective in flight. */
typedef struct fsdpc_nccl_entry {
    uint64_t sequence;
    char what[FSDPC_NCCL_WHAT_BYTES];
    size_t bytes;
    double since_s; /* when this became the oldest in flight; until then: when it was enqueued */
    fsdpc_cu_event event; /* made once for each entry of the ring, and reused */
} fsdpc_nccl_entry;

/* See [Note: registration]. */
enum fsdpc_nccl_way { FSDPC_NCCL_NEITHER, FSDPC_NCCL_WINDOWS, FSDPC_NCCL_BUFFERS_OF_ONE };
typedef struct fsdpc_nccl_buffer {
    struct fsdpc_nccl_buffer *next;
    void *address, *own;
    fsdpc_nccl_window window;
} fsdpc_nccl_buffer;

/* The states of the watching thread and of NCCL's communicator. The owner is the thread
 * that calls close or free. Each change is made under `lock` and broadcast by `changed`.
 *
 *   state      event                                       by      next
 *   UNWATCHED  the thread starts                           owner   WATCHING
 *              free: neither thread nor handle exists     owner   (freed)
 *   WATCHING   the communicator is broken; NCCL is aborted thread  ABORTED
 *              close, free                                 owner   STOPPING
 *   ABORTED    close, free                                 owner   STOPPING
 *   STOPPING   NCCL's communicator is destroyed or aborted thread  ENDED
 *              NCCL's one stays: a graph may still use it  thread  LEFT
 *              free: NCCL has not returned in time         owner   ORPHANED
 *   ENDED      free: the thread is joined                  owner   (freed)
 *   LEFT       free: the thread is joined                  owner   (kept reachable, never freed)
 *   ORPHANED   NCCL has returned                           thread  ENDED or LEFT; the thread frees or keeps
 *
 * Only `base` says whether the communicator is broken (fsdpc_comm_check), in every state. */
enum fsdpc_nccl_life {
    FSDPC_NCCL_UNWATCHED,
    FSDPC_NCCL_WATCHING,
    FSDPC_NCCL_ABORTED,
    FSDPC_NCCL_STOPPING,
    FSDPC_NCCL_ENDED,
    FSDPC_NCCL_LEFT,
    FSDPC_NCCL_ORPHANED
};

typedef struct nccl_comm {
    fsdpc_comm base;
    const fsdpc_nccl *nccl;
    const fsdpc_cuda_driver *driver;
    fsdpc_cu_context context;
    fsdpc_comm_nccl_options options;
    char name[FSDPC_NCCL_NAME_BYTES];

    /* Held by the one thread that calls NCCL. */
    pthread_mutex_t calls;
    fsdpc_nccl_comm handle; /* NULL after it was aborted or destroyed; guarded by `calls` */
    fsdpc_nccl_comm made;   /* NCCL may write here even after a start that was given up */
    enum fsdpc_nccl_way way;
    bool shares; /* the windows are symmetric memory */
    fsdpc_nccl_buffer *buffers;
    _Atomic bool trying; /* true while the trial of registration handles NCCL's errors */
    char *scratch;       /* device memory through which host memory is staged, or NULL */
    char *pinned;
    fsdpc_cu_stream staging;
    bool has_graphs; /* a CUDA graph may contain collectives of this communicator */
    bool on_board;   /* the watching thread shows a wait on the board (board.h) */

    /* Guards the fields below. It is never held while NCCL is called. */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* broadcast when `life` changes or the communicator breaks */
    enum fsdpc_nccl_life life;
    pthread_t thread;
    fsdpc_nccl_entry ring[FSDPC_NCCL_RING];
    uint64_t first, next; /* collectives with sequence in [first, next) are in flight */
    char others[FSDPC_NCCL_OTHERS_BYTES]; /* the text of fsdpc_comm_nccl_note_others */

    pid_t owner; /* the process that made this; a forked child has neither the thread nor NCCL */
    struct nccl_comm *next_left;
} nccl_comm;

/* A collective to enqueue. */
enum fsdpc_nccl_kind {
    FSDPC_NCCL_GATHER,
    FSDPC_NCCL_SCATTER,
    FSDPC_NCCL_REDUCE,
    FSDPC_NCCL_BROADCAST,
    FSDPC_NCCL_ALL_TO_ALL
};
typedef struct fsdpc_nccl_order {
    enum fsdpc_nccl_kind kind;
    char *buffer;
    char *landing; /* ALL_TO_ALL */
    size_t count;  /* elements of one rank's piece */
    fsdpc_dtype dtype;
    fsdpc_nccl_op op;
    int root;
    fsdpc_cu_stream stream; /* NULL: the device's current stream */
} fsdpc_nccl_order;

/* comm_nccl_common.c */
double fsdpc_nccl_now_s(void);
void fsdpc_nccl_nap(int us);
/* Makes the communicator's CUDA context current, because the calling thread may have no context. */
int fsdpc_nccl_use_context(const nccl_comm *comm);
/* True in a forked child of the communicator's process: the child has no watching thread, and a
 * lock may be held by a thread of the parent. */
bool fsdpc_nccl_is_forked(const nccl_comm *comm);
/* Breaks the communicator: polling loops end, and the watching thread calls ncclCommAbort. Any thread. */
void fsdpc_nccl_fail(nccl_comm *comm, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* comm_nccl_issue.c */
/* Polls until the NCCL call that returned `result` is no longer in progress,
 * and returns the call's outcome as a status. The caller holds `calls`. */
int fsdpc_nccl_complete(nccl_comm *comm, fsdpc_nccl_result result, const char *what);
/* Breaks the communicator with this thread's error text. An interrupt breaks it with FSDPC_E_COMM: only
 * the call that was interrupted returns FSDPC_E_INTERRUPT. */
void fsdpc_nccl_break(nccl_comm *comm, int status);
/* Enqueues a collective and adds it to the ring. */
int fsdpc_nccl_run(nccl_comm *comm, fsdpc_nccl_order *o, const char *what);
/* Enqueues several all-gathers or reduce-scatters as one group of NCCL. */
int fsdpc_nccl_run_parts(nccl_comm *comm, enum fsdpc_nccl_kind kind, const fsdpc_comm_part *parts,
                         int count, const char *what);

/* comm_nccl_host.c */
/* Waits on the host, by queries, until all collectives in flight have
 * ended. Returns the communicator's failure if there is one. Local. */
int fsdpc_nccl_await(nccl_comm *comm);
int fsdpc_nccl_exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
int fsdpc_nccl_agree(fsdpc_comm *comm, const char *text, const char *what);
int fsdpc_nccl_barrier(fsdpc_comm *comm, const char *what);

/* comm_nccl_register.c */
int fsdpc_nccl_register(fsdpc_comm *comm, void *buffer, size_t bytes);
void fsdpc_nccl_unregister(fsdpc_comm *comm, void *buffer);
/* Ends all registrations. The caller holds `calls`. */
void fsdpc_nccl_delist_all(nccl_comm *comm);
/* Finds out how memory can be registered, and sets `way` and `shares`. Collective. */
int fsdpc_nccl_try_registration(nccl_comm *comm);

/* comm_nccl_ring.c */
/* Adds to the ring the collective that has just been enqueued. */
int fsdpc_nccl_watch_add(nccl_comm *comm, fsdpc_cu_stream stream, const char *what, size_t bytes);
/* Describes the oldest collective in flight, for error texts. */
void fsdpc_nccl_oldest(nccl_comm *comm, char text[FSDPC_NCCL_OLDEST_BYTES]);
/* Removes completed collectives. FSDPC_CU_SUCCESS: none is in flight. FSDPC_CU_NOT_READY: the
 * oldest one has been the oldest for *waited seconds. Any other result is an error of the device. */
fsdpc_cu_result fsdpc_nccl_sweep(nccl_comm *comm, double *waited);

/* comm_nccl_watch.c */
int fsdpc_nccl_watch_start(nccl_comm *comm);
/* Gives collectives in flight a few seconds to end, then ends the watching thread and NCCL's communicator.
 * `comm` is not freed, but refuses collectives. */
void fsdpc_nccl_close(nccl_comm *comm);
/* Ends the watching thread and NCCL's communicator, and frees `comm`. If NCCL does not return in time, the
 * thread frees `comm` when NCCL has returned. */
void fsdpc_nccl_end(nccl_comm *comm);

#endif
