/* The communicator of a group with one rank: in-place collectives have nothing to do. */
#include "comm/comm_impl.h"
#include "base/mem.h"
#include "base/status.h"

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    (void)comm, (void)buffer, (void)piece_bytes, (void)what;
    return FSDPC_OK;
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    (void)comm, (void)buffer, (void)piece_numel, (void)dtype, (void)what;
    return FSDPC_OK;
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    (void)comm, (void)buffer, (void)numel, (void)dtype, (void)op, (void)what;
    return FSDPC_OK;
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    (void)comm, (void)buffer, (void)bytes, (void)root, (void)what;
    return FSDPC_OK;
}

static int
barrier(fsdpc_comm *comm, const char *what)
{
    (void)comm, (void)what;
    return FSDPC_OK;
}

static int
agree(fsdpc_comm *comm, const char *text, const char *what)
{
    (void)comm, (void)text, (void)what;
    return FSDPC_OK;
}

static void
release(fsdpc_comm *comm)
{
    fsdpc_mem_free(comm);
}

static const fsdpc_comm_ops self_ops = {
    .kind = "self",
    .caps = {.names_absentees = true},
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .agree = agree,
    .free = release,
};

int
fsdpc_comm_self(fsdpc_device *device, fsdpc_comm **out)
{
    *out = NULL;
    fsdpc_comm *comm = fsdpc_mem_calloc(1, sizeof *comm);
    if (!comm) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    comm->ops = &self_ops;
    comm->device = device;
    comm->world = 1;
    *out = comm;
    return FSDPC_OK;
}
