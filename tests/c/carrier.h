/* Callbacks of a "c10d" communicator that pass each call on to another communicator. */
#ifndef FSDPC_TEST_CARRIER_H
#define FSDPC_TEST_CARRIER_H

#include "comm/comm.h"
#include "flying.h"
#include "test.h"

typedef struct carrier {
    fsdpc_comm *inner; /* NULL: calls do nothing and succeed, as if all other ranks agreed */
    bool owned;        /* if true, the release callback frees `inner` and the carrier */
    int calls, released;
    /* The call with the number fail_at, counted from 1, fails and returns fail_status. 0: no call fails. */
    int fail_at, fail_status;
    flying *flies; /* state of sends and receives; NULL if they are not supported */
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
        if (self->flies) {
            flying_end(self->flies);
        }
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

static int
carrier_post(void *context, const fsdpc_comm_move *moves, int count, uint32_t tag, const char *what,
             void **transfers)
{
    carrier *self = context;
    FSDPC_TRY(carrier_enter(self));
    return flying_post(self->flies, moves, count, tag, what, transfers);
}

static int
carrier_land(void *context, void *transfers, const bool *skip, const char *what)
{
    carrier *self = context;
    int status = carrier_enter(self);
    if (status != FSDPC_OK) {
        flying_drop(self->flies, transfers);
        return status;
    }
    return flying_land(self->flies, transfers, skip, what);
}

static void
carrier_drop(void *context, void *transfers)
{
    flying_drop(((carrier *)context)->flies, transfers);
}

/* Returns a communicator that owns `inner` and passes calls on to `inner`. If `name` (the group's name) is
 * not NULL, the communicator also supports sends and receives between two ranks. */
__attribute__((unused)) static fsdpc_comm *
carrier_over(fsdpc_device *device, int rank, int world, fsdpc_comm *inner, const char *name)
{
    fsdpc_comm *comm;
    carrier *self = calloc(1, sizeof *self);
    REQUIRE(self != NULL);
    *self = (carrier){.inner = inner, .owned = true};
    fsdpc_comm_callbacks calls = carrier_callbacks(self);
    if (name) {
        self->flies = calloc(1, sizeof *self->flies);
        snprintf(self->flies->name, sizeof self->flies->name, "%s", name);
        self->flies->rank = rank;
        calls.post = carrier_post;
        calls.land = carrier_land;
        calls.drop = carrier_drop;
    }
    REQUIRE_OK(fsdpc_comm_c10d(device, rank, world, &calls, &comm));
    return comm;
}

#endif
