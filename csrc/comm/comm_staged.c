/* A communicator of GPUs, staged through host memory: for several ranks on one GPU where NCCL
 * refuses that, for groups that NCCL does not reach, and to tell faults of NCCL from other faults.
 *
 * Each collective copies to pinned memory on the device's current stream, waits for the copy, runs
 * the inner communicator's collective on the host, copies back and waits again: two host syncs,
 * which are counted. Gathers and reductions share one communicator, because the host runs them one
 * by one.
 */
#include "comm/comm_impl.h"
#include "base/forks.h"
#include "base/mem.h"
#include "base/status.h"

typedef struct staged_comm {
    fsdpc_comm base;
    fsdpc_comm_ops ops; /* this communicator's table, with the kind and caps of `inner` */
    fsdpc_comm *inner;  /* borrowed until `release` is called */
    void (*release)(void *context);
    void *context;
    char *room; /* pinned memory, as large as the largest collective so far */
    size_t room_bytes;
} staged_comm;

static staged_comm *
of(fsdpc_comm *comm)
{
    return (staged_comm *)comm;
}

static int
refuse_capture(const staged_comm *self, const char *what)
{
    uint64_t capture;
    FSDPC_TRY(fsdpc_device_capture(self->base.device, &capture));
    return capture == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_STATE,
                             "%s: collectives staged through host memory (\"%s\") cannot be "
                             "captured into a CUDA graph",
                             what, self->ops.kind);
}

static int
make_room(staged_comm *self, size_t bytes)
{
    void *block;
    if (bytes <= self->room_bytes) {
        return FSDPC_OK;
    }
    fsdpc_device_host_free(self->base.device, self->room, self->room_bytes);
    self->room = NULL;
    self->room_bytes = 0;
    FSDPC_TRY(fsdpc_device_host_alloc(self->base.device, bytes, &block));
    self->room = block;
    self->room_bytes = bytes;
    return FSDPC_OK;
}

/* Copies from the device at `buffer` + `at` to `room` + `at`. This is a host sync. */
static int
fetch(staged_comm *self, const void *buffer, size_t at, size_t bytes, const char *what)
{
    FSDPC_TRY(fsdpc_device_copy_out(self->base.device, self->room + at, (const char *)buffer + at,
                                    bytes));
    return fsdpc_comm_drain(&self->base, what);
}

/* Copies from `room` to the device. This is a host sync, so that `room` may be reused. */
static int
put_back(staged_comm *self, void *buffer, size_t at, size_t bytes, const char *what)
{
    FSDPC_TRY(fsdpc_device_copy_in(self->base.device, (char *)buffer + at, self->room + at, bytes));
    return fsdpc_comm_drain(&self->base, what);
}

static int
open_room(staged_comm *self, size_t bytes, const char *what)
{
    FSDPC_TRY(refuse_capture(self, what));
    return make_room(self, bytes);
}

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    staged_comm *self = of(comm);
    const size_t bytes = piece_bytes * (size_t)comm->world;
    FSDPC_TRY(open_room(self, bytes, what));
    FSDPC_TRY(fetch(self, buffer, piece_bytes * (size_t)comm->rank, piece_bytes, what));
    FSDPC_TRY(fsdpc_comm_all_gather(self->inner, self->room, piece_bytes, what));
    return put_back(self, buffer, 0, bytes, what);
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    staged_comm *self = of(comm);
    const size_t piece = (size_t)piece_numel * fsdpc_dtype_bytes(dtype);
    FSDPC_TRY(open_room(self, piece * (size_t)comm->world, what));
    FSDPC_TRY(fetch(self, buffer, 0, piece * (size_t)comm->world, what));
    FSDPC_TRY(fsdpc_comm_reduce_scatter(self->inner, self->room, piece_numel, dtype, what));
    return put_back(self, buffer, piece * (size_t)comm->rank, piece, what);
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    staged_comm *self = of(comm);
    const size_t bytes = (size_t)numel * fsdpc_dtype_bytes(dtype);
    FSDPC_TRY(open_room(self, bytes, what));
    FSDPC_TRY(fetch(self, buffer, 0, bytes, what));
    FSDPC_TRY(fsdpc_comm_all_reduce(self->inner, self->room, numel, dtype, op, what));
    return put_back(self, buffer, 0, bytes, what);
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    staged_comm *self = of(comm);
    FSDPC_TRY(open_room(self, bytes, what));
    if (comm->rank == root) {
        FSDPC_TRY(fetch(self, buffer, 0, bytes, what));
    }
    FSDPC_TRY(fsdpc_comm_broadcast(self->inner, self->room, bytes, root, what));
    return comm->rank == root ? FSDPC_OK : put_back(self, buffer, 0, bytes, what);
}

static int
barrier(fsdpc_comm *comm, const char *what)
{
    return fsdpc_comm_barrier(of(comm)->inner, what);
}

static int
agree(fsdpc_comm *comm, const char *text, const char *what)
{
    return fsdpc_comm_agree(of(comm)->inner, text, what);
}

static int
exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    return fsdpc_comm_all_gather(of(comm)->inner, buffer, piece_bytes, what);
}

static void
tell_abort(fsdpc_comm *comm, const char *text)
{
    fsdpc_comm_abort(of(comm)->inner, text);
}

static void
tell_failure(fsdpc_comm *comm, int status, const char *text)
{
    fsdpc_comm_fail(of(comm)->inner, status, text);
}

static void
leave(fsdpc_comm *comm)
{
    fsdpc_comm_close(of(comm)->inner);
}

static void
end(fsdpc_comm *comm)
{
    staged_comm *self = of(comm);
    fsdpc_device_host_free(comm->device, self->room, self->room_bytes);
    if (self->release) {
        self->release(self->context);
    }
    fsdpc_mem_free(self);
}

int
fsdpc_comm_staged(fsdpc_device *device, fsdpc_comm *inner, void (*release)(void *context),
                  void *context, fsdpc_comm **out)
{
    *out = NULL;
    if (!fsdpc_device_get_caps(device)->asynchronous ||
        fsdpc_device_get_caps(fsdpc_comm_device(inner))->asynchronous) {
        return fsdpc_error(
            FSDPC_E_INVAL,
            "staged: the device must be a GPU and the inner communicator on the CPU (shm or c10d)");
    }
    staged_comm *self = fsdpc_mem_calloc(1, sizeof *self);
    if (!self) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    self->ops = (fsdpc_comm_ops){.kind = fsdpc_comm_kind(inner),
                                 .caps = *fsdpc_comm_get_caps(inner),
                                 .all_gather = all_gather,
                                 .reduce_scatter = reduce_scatter,
                                 .all_reduce = all_reduce,
                                 .broadcast = broadcast,
                                 .barrier = barrier,
                                 .agree = agree,
                                 .exchange = exchange,
                                 .abort = tell_abort,
                                 .fail = tell_failure,
                                 .close = leave,
                                 .free = end};
    self->ops.caps.one_memory = false; /* GPUs do not see the segment */
    self->base.ops = &self->ops;
    self->base.forks = fsdpc_forks();
    self->base.device = device;
    self->base.rank = fsdpc_comm_rank(inner);
    self->base.world = fsdpc_comm_world(inner);
    self->base.timeout_s = fsdpc_comm_timeout(inner);
    self->inner = inner;
    self->release = release;
    self->context = context;
    *out = &self->base;
    return FSDPC_OK;
}
