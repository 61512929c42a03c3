/* Communicators: collectives among the ranks of a group.
 *
 * Kinds: "self" (one rank), "shm" (ranks of one host), "c10d" (callbacks into another library, in practice
 * torch.distributed), "nccl" (GPUs; comm_nccl.h). All collectives but all-to-all work in place. A
 * collective either blocks until it is done, or only enqueues work on an asynchronous device. All ranks of
 * the group must call collectives in the same order. A collective ends by the deadline at the latest (for
 * "c10d", the deadline of its library). After a failure the communicator is broken: later calls return the
 * first error at once.
 *
 * "shm" and "self" sum in rank order in F32 (F64 for F64), so that two runs agree to the bit. "c10d" does the
 * same if its library sends in the background (flight.h). "nccl" and other "c10d" communicators sum as their
 * library does.
 */
#ifndef FSDPC_COMM_H
#define FSDPC_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"
#include "base/dtype.h"
#include "shm/shm.h"

typedef struct fsdpc_comm fsdpc_comm;

enum fsdpc_op { FSDPC_SUM = 0, FSDPC_MAX = 1, FSDPC_MIN = 2 };

/* One transfer between this rank and another; see flight.h. */
typedef struct fsdpc_comm_move {
    void *memory;
    size_t bytes;
    int peer;
    bool send;
} fsdpc_comm_move;

/* Callbacks of a "c10d" communicator. Each one returns a status, and on failure sets the error text.
 * `context` is passed to each callback. `release` (optional) is called once by fsdpc_comm_free.
 * Buffers are in host memory and have the sizes that the functions below describe. */
typedef struct fsdpc_comm_callbacks {
    void *context;
    int (*all_gather)(void *context, void *buffer, size_t piece_bytes, const char *what);
    int (*reduce_scatter)(void *context, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
                          const char *what);
    int (*all_reduce)(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype,
                      enum fsdpc_op op, const char *what);
    int (*broadcast)(void *context, void *buffer, size_t bytes, int root, const char *what);
    int (*barrier)(void *context, const char *what);
    /* Optional: either all three are given or none is. See fsdpc_comm_ops in comm_impl.h. */
    int (*post)(void *context, const fsdpc_comm_move *moves, int count, uint32_t tag,
                const char *what, void **transfers);
    int (*land)(void *context, void *transfers, const bool *skip, const char *what);
    void (*drop)(void *context, void *transfers);
    void (*release)(void *context);
} fsdpc_comm_callbacks;

int fsdpc_comm_self(fsdpc_device *device, fsdpc_comm **out);
/* Collective. The arguments after `device` are those of fsdpc_shm_create. */
int fsdpc_comm_shm(fsdpc_device *device, int rank, int world, const char *name, double timeout_s,
                   fsdpc_comm **out);
/* Copies the callbacks. */
int fsdpc_comm_c10d(fsdpc_device *device, int rank, int world,
                    const fsdpc_comm_callbacks *callbacks, fsdpc_comm **out);
/* Makes a communicator for collectives on the memory of `device`, a GPU. The collectives are
 * staged through host memory and run by `inner`, a communicator on the CPU. Each collective
 * is a host sync. The kind is that of `inner`. `inner` is borrowed, and one thread at a time
 * uses it; release(context) (optional) is called once by fsdpc_comm_free. Local. */
int fsdpc_comm_staged(fsdpc_device *device, fsdpc_comm *inner, void (*release)(void *context),
                      void *context, fsdpc_comm **out);
/* Frees a communicator without waiting for peers. NULL is allowed. Local. */
void fsdpc_comm_free(fsdpc_comm *comm);
/* Breaks the communicator and its twin, on all ranks ("shm") or on this rank (other kinds). Local. */
void fsdpc_comm_abort(fsdpc_comm *comm, const char *text);
/* Breaks the communicator and its twin on this rank, because another rank is known to have failed.
 * Local. */
void fsdpc_comm_fail(fsdpc_comm *comm, int status, const char *text);
/* Leaves the group, in this communicator and its twin. Kind "shm": peers that still wait for this rank get an
 * error. Collectives in flight get a few seconds to end. No call but fsdpc_comm_free may follow. Local. */
void fsdpc_comm_close(fsdpc_comm *comm);

/* Returns the failure that broke the communicator, or FSDPC_OK. Call this
 * function before you use results of enqueued collectives. Local. */
int fsdpc_comm_check(const fsdpc_comm *comm);
/* Waits on the host for the device's current stream, and ends early if the group fails.
 * Training steps call this only in the collectives of a staged communicator. Local. */
int fsdpc_comm_drain(fsdpc_comm *comm, const char *what);
/* Waits on the host for an event, and ends early when `check(argument)` fails. Any number
 * of collectives may precede the event. Each collective ends by the group's deadline, so
 * this wait needs no deadline of its own: FSDPC_E_TIMEOUT after a day is for a kernel that
 * never ends. Ctrl-C aborts the group; the wait then fails with FSDPC_E_INTERRUPT. */
int fsdpc_comm_await(fsdpc_comm *comm, fsdpc_event *reached, int (*check)(const void *),
                     const void *argument, const char *what);

/* Properties that callers may rely on, whatever the kind of the communicator. */
typedef struct fsdpc_comm_caps {
    bool one_memory;      /* the ranks share a segment: see fsdpc_comm_segment */
    bool names_absentees; /* agree and barrier name the ranks that did not come by the deadline */
    /* True: sums of low precision types are rounded after each rank's addend, unless
     * fsdpc_comm_is_symmetric returns true. "c10d" has false, but its backend may round in this way. */
    bool rounds_sums;
} fsdpc_comm_caps;
const fsdpc_comm_caps *fsdpc_comm_get_caps(const fsdpc_comm *comm);
/* Returns the group's deadline in seconds, for callers that wait for the group's ranks by other means.
 * Returns fsdpc_timeout() for "self" and "c10d", which do not enforce a deadline themselves. */
double fsdpc_comm_timeout(const fsdpc_comm *comm);
int fsdpc_comm_rank(const fsdpc_comm *comm);
int fsdpc_comm_world(const fsdpc_comm *comm);
const char *fsdpc_comm_kind(const fsdpc_comm *comm);
fsdpc_device *fsdpc_comm_device(const fsdpc_comm *comm);
/* The twin is a second communicator over the same ranks, so that reductions do not queue behind
 * gathers; `comm` owns the twin. Without a twin, `comm` is used for both. */
void fsdpc_comm_set_twin(fsdpc_comm *comm, fsdpc_comm *twin);
fsdpc_comm *fsdpc_comm_for_reductions(fsdpc_comm *comm);
/* Sets a text with which errors begin, such as "ranks 2-3 are called 0-1 here". It is for communicators whose
 * ranks have other numbers in the whole program. Copies the text, also to the twin. Fails with FSDPC_E_NOMEM
 * if memory is short, and with FSDPC_E_STATE if the communicator has a text already. Local. */
int fsdpc_comm_set_numbers(fsdpc_comm *comm, const char *text);
const char *fsdpc_comm_numbers(const fsdpc_comm *comm); /* the text above, or "" if none is set */
/* If this thread's error names a rank and does not yet contain fsdpc_comm_numbers, prepends them. Returns
 * `status`. */
int fsdpc_comm_say_numbers(const fsdpc_comm *comm, int status);
/* Returns the shared segment of an "shm" communicator, NULL for other kinds. */
fsdpc_shm *fsdpc_comm_segment(const fsdpc_comm *comm);
/* Lets the ranks of each host share memory from now on, in a communicator with flights in the background
 * (flight.h). names[r] is equal for ranks of one host. `segment` and `timeout_s` are the name and the
 * deadline for fsdpc_comm_shm; the name differs from host to host. Collective over the ranks of each host. */
int fsdpc_comm_set_hosts(fsdpc_comm *comm, const int *names, const char *segment, double timeout_s);
/* Returns which ranks share a host; NULL if fsdpc_comm_set_hosts was not called. */
const struct fsdpc_hosts *fsdpc_comm_hosts(const fsdpc_comm *comm);
/* Returns how many ranks send this rank gradients of a unit: one rank of each other host or, if
 * fsdpc_comm_set_hosts was not called, all other ranks. */
int fsdpc_comm_senders(const fsdpc_comm *comm);
/* Returns to how many ranks this rank sends gradients of a unit, or 0 if its flights are blocking
 * collectives (flight.h). */
int fsdpc_comm_receivers(const fsdpc_comm *comm);
/* Returns how many ranks each host has, or 0 if hosts have different numbers of ranks or
 * fsdpc_comm_set_hosts was not called. */
int fsdpc_comm_ranks_per_host(const fsdpc_comm *comm);

/* `what` (e.g. "gather of unit layers.3") goes into error texts and is borrowed for the call. all_gather:
 * rank r passes its piece at buffer + r * piece_bytes, and afterwards has the pieces of all ranks.
 * reduce_scatter: each rank passes `world` pieces; afterwards piece `rank` holds the sum over the ranks,
 * and the other pieces are unspecified. Sums of low precision types in F32 (see above) are rounded once. */
int fsdpc_comm_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
int fsdpc_comm_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                              fsdpc_dtype dtype, const char *what);
/* One part of a call of a _parts function below. The result is that of one plain call per part.
 * "nccl" makes one grouped call; "c10d" sends small parts together. Parts without elements are skipped. */
typedef struct fsdpc_comm_part {
    void *buffer;
    int64_t piece_numel;
    fsdpc_dtype dtype;
} fsdpc_comm_part;
int fsdpc_comm_all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what);
int fsdpc_comm_reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                    const char *what);
/* Sums, over all ranks, the piece_numel elements at `buffer` of each part. */
int fsdpc_comm_all_reduce_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what);
/* Kind "nccl" only; for other kinds all_to_all returns FSDPC_E_UNAVAILABLE. Sends the bytes at
 * pieces + i * bytes to the i-th other rank, in rank order, and receives the bytes from that rank at
 * landing + i * bytes. */
bool fsdpc_comm_has_all_to_all(const fsdpc_comm *comm);
int fsdpc_comm_all_to_all(fsdpc_comm *comm, void *pieces, void *landing, size_t bytes,
                          const char *what);
int fsdpc_comm_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                          enum fsdpc_op op, const char *what);
int fsdpc_comm_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what);
int fsdpc_comm_barrier(fsdpc_comm *comm, const char *what);
/* See fsdpc_shm_agree. */
int fsdpc_comm_agree(fsdpc_comm *comm, const char *text, const char *what);
/* Returns how many calls of fsdpc_comm_agree have ended. The number is equal on all ranks. */
int fsdpc_comm_agreements(const fsdpc_comm *comm);

/* Registers memory of a slot (arena.h), so that collectives on this memory need no staging
 * ("nccl"; a no-op for other kinds). Collective, in the same order on all ranks. The
 * registration lasts until fsdpc_comm_unregister (local) or the communicator's end. */
int fsdpc_comm_register(fsdpc_comm *comm, void *buffer, size_t bytes);
void fsdpc_comm_unregister(fsdpc_comm *comm, void *buffer);
/* True if registration has an effect: then the memory of a collective must be registered on all
 * ranks or on none. */
bool fsdpc_comm_registers(const fsdpc_comm *comm);
/* True if registered memory is symmetric (each GPU accesses all ranks' windows): then low precision
 * types are summed in F32 and rounded once. */
bool fsdpc_comm_is_symmetric(const fsdpc_comm *comm);

/* Collectives on host memory for every kind of communicator (comm_host.c), for messages outside of
 * steps. They act like the collectives above, but always sum in rank order, in F32 (F64 for F64). */
int fsdpc_comm_host_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes,
                               const char *what);
int fsdpc_comm_host_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                                   fsdpc_dtype dtype, const char *what);
int fsdpc_comm_host_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                               enum fsdpc_op op, const char *what);
int fsdpc_comm_host_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root,
                              const char *what);

#endif
