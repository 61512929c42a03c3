/* Memory that NCCL uses without staging: windows that all ranks see, or buffers of this rank.
 *
 * [Note: registration] What a communicator can do is tried once, at its start, on a piece of memory
 * made for that, because the ranks must do the same with each buffer ever after. A window is a call
 * that all ranks make together; where the ranks' memory cannot be seen from one GPU, NCCL gives none
 * and says no error. Registered memory must be made of pieces (device.h), with an address and a size
 * in whole grains: what cuMemAlloc gives is refused.
 */
#include "comm_nccl_impl.h"
#include "status.h"

/* With `calls` held. */
static int
enlist(nccl_comm *comm, void *buffer, size_t bytes, enum fsdpc_nccl_way way)
{
    const fsdpc_nccl *nccl = comm->nccl;
    if (!comm->handle || comm->buffer_count == FSDPC_NCCL_BUFFERS) {
        return fsdpc_error(FSDPC_E_STATE, "no more buffers can be registered (at most %d)",
                           FSDPC_NCCL_BUFFERS);
    }
    fsdpc_nccl_buffer *made = &comm->buffers[comm->buffer_count];
    *made = (fsdpc_nccl_buffer){.address = buffer};
    fsdpc_nccl_result result =
        way == FSDPC_NCCL_WINDOWS
            ? nccl->window_register(comm->handle, buffer, bytes, &made->window,
                                    FSDPC_NCCL_WINDOW_SYMMETRIC)
            : nccl->register_buffer(comm->handle, buffer, bytes, &made->own);
    FSDPC_TRY(fsdpc_nccl_settle(comm, result, "registering a buffer"));
    comm->buffer_count++;
    return FSDPC_OK;
}

/* With `calls` held. */
static void
delist(nccl_comm *comm, int i)
{
    const fsdpc_nccl_buffer *gone = &comm->buffers[i];
    if (comm->handle && gone->window) {
        (void)comm->nccl->window_deregister(comm->handle, gone->window);
    } else if (comm->handle && gone->own) {
        (void)comm->nccl->deregister_buffer(comm->handle, gone->own);
    }
    comm->buffers[i] = comm->buffers[--comm->buffer_count];
}

void
fsdpc_nccl_delist_all(nccl_comm *comm)
{
    while (comm->buffer_count > 0) {
        delist(comm, comm->buffer_count - 1);
    }
}

static int
enter(nccl_comm *comm)
{
    FSDPC_TRY(fsdpc_comm_check(&comm->base));
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    pthread_mutex_lock(&comm->calls);
    return FSDPC_OK;
}

int
fsdpc_nccl_register(fsdpc_comm *base, void *buffer, size_t bytes)
{
    nccl_comm *comm = (nccl_comm *)base;
    if (comm->way == FSDPC_NCCL_NEITHER) {
        return FSDPC_OK;
    }
    FSDPC_TRY(enter(comm));
    int status = enlist(comm, buffer, bytes, comm->way);
    pthread_mutex_unlock(&comm->calls);
    return status;
}

void
fsdpc_nccl_forget(fsdpc_comm *base, void *buffer)
{
    nccl_comm *comm = (nccl_comm *)base;
    (void)fsdpc_nccl_use_context(comm);
    pthread_mutex_lock(&comm->calls);
    for (int i = comm->buffer_count - 1; i >= 0; i--) {
        if (comm->buffers[i].address == buffer) {
            delist(comm, i);
        }
    }
    pthread_mutex_unlock(&comm->calls);
}

/* --- the trial ---------------------------------------------------------------------------------- */

typedef struct trial {
    fsdpc_device *device;
    size_t bytes;
    void *address;
    fsdpc_piece *piece;
} trial;

static int
open_trial(fsdpc_device *device, trial *out)
{
    int status = FSDPC_OK;
    *out = (trial){.device = device, .bytes = fsdpc_device_grain(device)};
    FSDPC_TRY(fsdpc_device_reserve(device, out->bytes, &out->address));
    FSDPC_GOTO(fsdpc_device_piece_new(device, out->bytes, &out->piece), fail);
    FSDPC_GOTO(fsdpc_device_show(device, &out->address, out->bytes, out->piece), fail);
    return FSDPC_OK;
fail:
    fsdpc_device_piece_free(device, out->piece);
    fsdpc_device_unreserve(device, out->address, out->bytes);
    return status;
}

static void
close_trial(trial *gone)
{
    if (fsdpc_device_hide(gone->device, gone->address, gone->bytes, gone->piece) == FSDPC_OK) {
        fsdpc_device_unreserve(gone->device, gone->address, gone->bytes);
    }
    fsdpc_device_piece_free(gone->device, gone->piece);
}

static bool
works(nccl_comm *comm, const trial *on, enum fsdpc_nccl_way way)
{
    pthread_mutex_lock(&comm->calls);
    int status = enlist(comm, on->address, on->bytes, way);
    bool works = status == FSDPC_OK;
    if (works) {
        works = way != FSDPC_NCCL_WINDOWS || comm->buffers[comm->buffer_count - 1].window;
        delist(comm, comm->buffer_count - 1);
    }
    pthread_mutex_unlock(&comm->calls);
    return works;
}

/* On all ranks, or on none. */
static int
try_way(nccl_comm *comm, const trial *on, enum fsdpc_nccl_way way, bool offered)
{
    float all = offered && works(comm, on, way) ? 1 : 0;
    FSDPC_TRY(fsdpc_comm_host_all_reduce(&comm->base, &all, 1, FSDPC_F32, FSDPC_MIN,
                                         "trying to register memory"));
    comm->way = all > 0 ? way : comm->way;
    return FSDPC_OK;
}

int
fsdpc_nccl_try_registration(nccl_comm *comm)
{
    int status = FSDPC_OK;
    trial on;
    const fsdpc_nccl *nccl = comm->nccl;
    if (!comm->options.registers) {
        return FSDPC_OK;
    }
    FSDPC_TRY(open_trial(comm->base.device, &on));
    FSDPC_GOTO(
        try_way(comm, &on, FSDPC_NCCL_WINDOWS, nccl->window_register && nccl->window_deregister),
        end);
    if (comm->way == FSDPC_NCCL_NEITHER) {
        FSDPC_GOTO(try_way(comm, &on, FSDPC_NCCL_BUFFERS_OF_ONE,
                           nccl->register_buffer && nccl->deregister_buffer),
                   end);
    }
end:
    close_trial(&on);
    return status;
}
