/* Callbacks of a "c10d" communicator that pass each call on to another communicator. */
#ifndef FSDPC_TEST_CARRIER_H
#define FSDPC_TEST_CARRIER_H

#include "comm/comm.h"
#include "test.h"

typedef struct carrier {
    fsdpc_comm *inner; /* NULL: calls do nothing, as if the other ranks had agreed to everything */
    bool owned;        /* the release frees `inner` and the carrier */
    int calls, released;
    int fail_at, fail_status; /* this call fails, counted from 1; 0: none */
} carrier;

static int
carrier_enter(carrier *self)
{
    if (++self->calls != self->fail_at) {
        return FSDPC_OK;
    }
    return self->fail_status < 0 ? fsdpc_error(self->fail_status, "the wire broke")
                                 : self->fail_status;
}

static int
carrier_all_gather(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return self->inner ? fsdpc_comm_all_gather(self->inner, buffer, piece_bytes, what) : FSDPC_OK;
}

static int
carrier_reduce_scatter(void *context, void *buffer, int64_t piece, fsdpc_dtype dtype,
                       const char *what)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return self->inner ? fsdpc_comm_reduce_scatter(self->inner, buffer, piece, dtype, what)
                       : FSDPC_OK;
}

static int
carrier_all_reduce(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
                   const char *what)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return self->inner ? fsdpc_comm_all_reduce(self->inner, buffer, numel, dtype, op, what)
                       : FSDPC_OK;
}

static int
carrier_broadcast(void *context, void *buffer, size_t bytes, int root, const char *what)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return self->inner ? fsdpc_comm_broadcast(self->inner, buffer, bytes, root, what) : FSDPC_OK;
}

static int
carrier_barrier(void *context, const char *what)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return self->inner ? fsdpc_comm_barrier(self->inner, what) : FSDPC_OK;
}

static void
carrier_release(void *context)
{
    carrier *self = context;
    self->released++;
    if (self->owned) {
        fsdpc_comm_free(self->inner);
        free(self);
    }
}

__attribute__((unused)) static fsdpc_comm_callbacks
carrier_callbacks(carrier *self)
{
    return (fsdpc_comm_callbacks){.context = self,
                                  .all_gather = carrier_all_gather,
                                  .reduce_scatter = carrier_reduce_scatter,
                                  .all_reduce = carrier_all_reduce,
                                  .broadcast = carrier_broadcast,
                                  .barrier = carrier_barrier,
                                  .release = carrier_release};
}

/* A communicator over `inner`, which it takes. */
__attribute__((unused)) static fsdpc_comm *
carrier_over(fsdpc_device *device, int rank, int world, fsdpc_comm *inner)
{
    fsdpc_comm *comm;
    carrier *self = calloc(1, sizeof *self);
    REQUIRE(self != NULL);
    *self = (carrier){.inner = inner, .owned = true};
    fsdpc_comm_callbacks calls = carrier_callbacks(self);
    REQUIRE_OK(fsdpc_comm_c10d(device, rank, world, &calls, &comm));
    return comm;
}

#endif
