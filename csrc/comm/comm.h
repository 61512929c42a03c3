/* Communicators: collectives among the ranks of a group, whatever carries them.
 *
 * kinds: "self" (one rank), "shm" (ranks of one host), "c10d" (calls back into another library,
 * in practice torch.distributed), "nccl" (GPUs; comm_nccl.h). All collectives are in place, block until done (or
 * are queued, on an asynchronous device), must be called by all ranks of the group in the same
 * order, and end by the group's deadline at the latest. After a failure the communicator is broken:
 * later calls return the first error at once. Sums are in rank order in F32 (F64 for F64), so that
 * two runs agree to the bit ("shm" and "self"; "c10d" sums as its backend does).
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

/* Callbacks of a "c10d" communicator; each returns a status with the error text set. `context` is
 * passed through; `release` (optional) is called once by fsdpc_comm_free. Buffers are host memory.
 * The shapes are those of the functions below. all entries but release are required. */
typedef struct fsdpc_comm_callbacks {
    void *context;
    int (*all_gather)(void *context, void *buffer, size_t piece_bytes, const char *what);
    int (*reduce_scatter)(void *context, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
                          const char *what);
    int (*all_reduce)(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype,
                      enum fsdpc_op op, const char *what);
    int (*broadcast)(void *context, void *buffer, size_t bytes, int root, const char *what);
    int (*barrier)(void *context, const char *what);
    void (*release)(void *context);
} fsdpc_comm_callbacks;

int fsdpc_comm_self(fsdpc_device *device, fsdpc_comm **out);
/* Collective; arguments as fsdpc_shm_create. */
int fsdpc_comm_shm(fsdpc_device *device, int rank, int world, const char *name, double timeout_s,
                   fsdpc_comm **out);
/* Copies the callbacks. */
int fsdpc_comm_c10d(fsdpc_device *device, int rank, int world,
                    const fsdpc_comm_callbacks *callbacks, fsdpc_comm **out);
/* Collectives on the memory of `device`, a GPU, by those of `inner` on copies in host memory: the host
 * waits in each. The kind is that of `inner`, which is borrowed, from all threads one at a time;
 * release(context) (optional) is called once by fsdpc_comm_free. Local. */
int fsdpc_comm_staged(fsdpc_device *device, fsdpc_comm *inner, void (*release)(void *context),
                      void *context, fsdpc_comm **out);
/* Local, waits for nobody. NULL is allowed. */
void fsdpc_comm_free(fsdpc_comm *comm);
/* Marks the group broken for all ranks where the kind can (shm), else for this rank. The twin, too. */
void fsdpc_comm_abort(fsdpc_comm *comm, const char *text);
/* Marks it broken on this rank, because something is known of another one. The twin, too. Local. */
void fsdpc_comm_fail(fsdpc_comm *comm, int status, const char *text);
/* Leaves in good order: peers that still need this rank are told where the kind can. What is on its
 * way gets a moment to end. Nothing may be asked of it after. The twin, too. Local. */
void fsdpc_comm_close(fsdpc_comm *comm);

/* The failure that broke the communicator, or FSDPC_OK. Local; for results of queued work. */
int fsdpc_comm_check(const fsdpc_comm *comm);
/* Local: the host waits for all that is queued on the device's current stream, the group's collectives
 * among it, or until the group has failed. `what` is for the text. Never in a step. */
int fsdpc_comm_settle(fsdpc_comm *comm, const char *what);
/* One look of such a wait, at an event of the device: FSDPC_E_TIMEOUT when it has not come within a second,
 * FSDPC_E_INTERRUPT (Ctrl-C; the group is aborted). So many looks at most: the deadline of a collective is
 * the group's own, by which it is broken; this is the one of whatever else the stream holds. */
enum { FSDPC_COMM_LOOKS = 24 * 3600 };
int fsdpc_comm_look(fsdpc_comm *comm, fsdpc_event *reached, const char *what);

int fsdpc_comm_rank(const fsdpc_comm *comm);
int fsdpc_comm_world(const fsdpc_comm *comm);
const char *fsdpc_comm_kind(const fsdpc_comm *comm);
fsdpc_device *fsdpc_comm_device(const fsdpc_comm *comm);
/* A second communicator over the same ranks, so that reductions need not queue behind gathers; `comm`
 * owns it from now on. Without one the first serves for both. */
void fsdpc_comm_set_twin(fsdpc_comm *comm, fsdpc_comm *twin);
fsdpc_comm *fsdpc_comm_for_reductions(fsdpc_comm *comm);
/* The shared segment of an "shm" communicator, NULL for other kinds: where slots can be shared. */
fsdpc_shm *fsdpc_comm_segment(const fsdpc_comm *comm);

/* `what` (e.g. "gather of unit layers.3") goes into error texts; borrowed for the call.
 * all_gather: rank r's piece is at buffer + r * piece_bytes before, all pieces are there after.
 * reduce_scatter: buffer holds world pieces; after, piece `rank` holds the sum over ranks, the
 * other pieces are unspecified. Low precision types are summed in F32 and rounded once ("shm"). */
int fsdpc_comm_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what);
int fsdpc_comm_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                              fsdpc_dtype dtype, const char *what);
/* Several of the same kind at once, as if one by one; "nccl" makes one call of them. Parts without
 * elements are left out. */
typedef struct fsdpc_comm_part {
    void *buffer;
    int64_t piece_numel;
    fsdpc_dtype dtype;
} fsdpc_comm_part;
int fsdpc_comm_all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                const char *what);
int fsdpc_comm_reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count,
                                    const char *what);
int fsdpc_comm_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                          enum fsdpc_op op, const char *what);
int fsdpc_comm_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what);
int fsdpc_comm_barrier(fsdpc_comm *comm, const char *what);
/* See fsdpc_shm_agree. */
int fsdpc_comm_agree(fsdpc_comm *comm, const char *text, const char *what);

/* Collective, in one order: collectives on these bytes go without staging where the kind can do that
 * ("nccl"); elsewhere nothing happens. On the device they are a slot's (arena.h). They stay until
 * they are forgotten (local), or the communicator ends. */
int fsdpc_comm_register(fsdpc_comm *comm, void *buffer, size_t bytes);
void fsdpc_comm_forget(fsdpc_comm *comm, void *buffer);
/* Whether registered memory is of use: then a collective needs it on all ranks, or on none. */
bool fsdpc_comm_registers(const fsdpc_comm *comm);
/* Whether all ranks' registered memory is one to the device: then low precision types are summed in
 * F32 and rounded once. */
bool fsdpc_comm_is_symmetric(const fsdpc_comm *comm);

/* The same on host memory, wherever the group's own collectives work (comm_host.c): for what ranks
 * tell each other outside of steps. Sums are in rank order, in F32 (F64 for F64). */
int fsdpc_comm_host_all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes,
                               const char *what);
int fsdpc_comm_host_reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel,
                                   fsdpc_dtype dtype, const char *what);
int fsdpc_comm_host_all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype,
                               enum fsdpc_op op, const char *what);
int fsdpc_comm_host_broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root,
                              const char *what);

#endif
