/* A communicator whose collectives are callbacks into another library.
 *
 * The other library sets the deadlines. `agree` is an all-gather of the records of agree.h.
 */
#include <stdio.h>

#include "base/forks.h"
#include "base/agree.h"
#include "comm/comm_impl.h"
#include "base/mem.h"
#include "base/status.h"

typedef struct c10d_comm {
    fsdpc_comm base;
    fsdpc_comm_callbacks calls;
    char *bundle; /* comm_bundle.c */
} c10d_comm;

static c10d_comm *
of(fsdpc_comm *comm)
{
    return (c10d_comm *)comm;
}

static bool
flies(const fsdpc_comm *comm)
{
    return ((const c10d_comm *)comm)->calls.post != NULL && comm->world > 1;
}

/* Rejects a positive value of a callback, which is not a status code and must not count as success. */
static int
outcome(int status)
{
    if (status > 0) {
        return fsdpc_error(FSDPC_E_INTERNAL, "a callback returned %d, which is not a status code",
                           status);
    }
    return status;
}

static int
all_gather(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    if (flies(comm)) {
        return fsdpc_flight_all_gather_now(comm, buffer, piece_bytes, what);
    }
    return outcome(calls->all_gather(calls->context, buffer, piece_bytes, what));
}

static int
reduce_scatter(fsdpc_comm *comm, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    if (flies(comm)) {
        return fsdpc_flight_reduce_scatter_now(comm, buffer, piece_numel, dtype, what);
    }
    return outcome(calls->reduce_scatter(calls->context, buffer, piece_numel, dtype, what));
}

static int
all_reduce(fsdpc_comm *comm, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    if (flies(comm) && op == FSDPC_SUM) {
        return fsdpc_flight_sum_now(comm, buffer, numel, dtype, what);
    }
    return outcome(calls->all_reduce(calls->context, buffer, numel, dtype, op, what));
}

static int
broadcast(fsdpc_comm *comm, void *buffer, size_t bytes, int root, const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    return outcome(calls->broadcast(calls->context, buffer, bytes, root, what));
}

static int
barrier(fsdpc_comm *comm, const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    return outcome(calls->barrier(calls->context, what));
}

static int
all_gather_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return fsdpc_comm_bundle(comm, &of(comm)->bundle, parts, count, false, what);
}

static int
reduce_scatter_parts(fsdpc_comm *comm, const fsdpc_comm_part *parts, int count, const char *what)
{
    return fsdpc_comm_bundle(comm, &of(comm)->bundle, parts, count, true, what);
}

static int
post(fsdpc_comm *comm, const fsdpc_comm_move *moves, int count, uint32_t tag, const char *what,
     void **transfers)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    return outcome(calls->post(calls->context, moves, count, tag, what, transfers));
}

static int
land(fsdpc_comm *comm, void *transfers, const bool *skip, const char *what)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    return outcome(calls->land(calls->context, transfers, skip, what));
}

static void
drop(fsdpc_comm *comm, void *transfers)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    calls->drop(calls->context, transfers);
}

static const fsdpc_agree_record *
record_of(const void *context, int rank)
{
    return (const fsdpc_agree_record *)context + rank;
}

static int
agree(fsdpc_comm *comm, const char *text, const char *what)
{
    fsdpc_agree_record *records = fsdpc_mem_calloc((size_t)comm->world, sizeof *records);
    if (!records) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the texts of %d ranks", what,
                           comm->world);
    }
    int status = FSDPC_OK;
    fsdpc_agree_fill(&records[comm->rank], text);
    FSDPC_GOTO(all_gather(comm, records, sizeof *records, what), end);
    FSDPC_GOTO(fsdpc_agree_compare(record_of, records, comm->world, what), end);
end:
    fsdpc_mem_free(records);
    return status;
}

static void
release(fsdpc_comm *comm)
{
    fsdpc_comm_callbacks *calls = &of(comm)->calls;
    if (calls->release) {
        calls->release(calls->context);
    }
    fsdpc_mem_free(of(comm)->bundle);
    fsdpc_mem_free(comm);
}

static const fsdpc_comm_ops c10d_ops = {
    .kind = "c10d",
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .barrier = barrier,
    .agree = agree,
    .all_gather_parts = all_gather_parts,
    .reduce_scatter_parts = reduce_scatter_parts,
    .flies = flies,
    .post = post,
    .land = land,
    .drop = drop,
    .free = release,
};

int
fsdpc_comm_c10d(fsdpc_device *device, int rank, int world, const fsdpc_comm_callbacks *callbacks,
                fsdpc_comm **out)
{
    *out = NULL;
    if (world < 1 || rank < 0 || rank >= world) {
        return fsdpc_error(FSDPC_E_INVAL, "rank %d is not one of a group of %d", rank, world);
    }
    if (!callbacks || !callbacks->all_gather || !callbacks->reduce_scatter ||
        !callbacks->all_reduce || !callbacks->broadcast || !callbacks->barrier) {
        return fsdpc_error(FSDPC_E_INVAL, "c10d communicator: one of its callbacks is NULL");
    }
    c10d_comm *comm = fsdpc_mem_calloc(1, sizeof *comm);
    if (!comm) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a communicator");
    }
    comm->base.ops = &c10d_ops;
    comm->base.forks = fsdpc_forks();
    comm->base.device = device;
    comm->base.rank = rank;
    comm->base.world = world;
    comm->calls = *callbacks;
    *out = &comm->base;
    return FSDPC_OK;
}
