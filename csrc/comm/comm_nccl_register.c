/* Memory that NCCL uses without staging: windows that all ranks see, or buffers of one rank.
 *
 * [Note: registration] At its start, a communicator tries to register a piece of memory made for the trial.
 * The result holds for all later buffers, because the ranks must treat buffers alike. Registering a
 * window is collective. Where one GPU cannot access the other ranks' memory, NCCL returns no
 * window (2.29 and later) or a window of this rank alone (2.28, 2.27), without an error. A
 * window is an address: in device memory if the ranks share the window, else in host memory.
 * NCCL 2.27 always returns an address in host memory, so its windows never count as shared.
 * Registered memory must consist of pieces (device.h), with address and size in whole grains,
 * because NCCL refuses memory of cuMemAlloc. A failed trial may leave NCCL's communicator
 * unusable. Then all ranks return FSDPC_E_UNAVAILABLE and may start again without registration.
 */
#include "comm/comm_nccl_impl.h"
#include "base/mem.h"
#include "base/status.h"

/* Ends a registration, which NCCL has already dropped if comm->handle is NULL. The caller holds `calls`. */
static void
delist(nccl_comm *comm, fsdpc_nccl_buffer *gone)
{
    fsdpc_nccl_buffer **at = &comm->buffers;
    while (*at != gone) {
        at = &(*at)->next;
    }
    *at = gone->next;
    if (comm->handle && gone->window) {
        (void)comm->nccl->window_deregister(comm->handle, gone->window);
    } else if (comm->handle && gone->own) {
        (void)comm->nccl->deregister_buffer(comm->handle, gone->own);
    }
    fsdpc_mem_free(gone);
}

void
fsdpc_nccl_delist_all(nccl_comm *comm)
{
    while (comm->buffers) {
        delist(comm, comm->buffers);
    }
}

/* Registers a buffer. The caller holds `calls`. Since 2.28, window_register returns success
 * while the registration is in progress, so async_error is polled. If this function gives
 * up, the buffer's entry stays in comm->buffers: NCCL may still write its `window` or `own`. */
static int
enlist(nccl_comm *comm, void *buffer, size_t bytes, enum fsdpc_nccl_way way)
{
    const fsdpc_nccl *nccl = comm->nccl;
    if (!comm->handle) {
        FSDPC_TRY(fsdpc_comm_check(&comm->base));
        return fsdpc_error(FSDPC_E_STATE, "registering a buffer: the communicator is closed");
    }
    fsdpc_nccl_buffer *made = fsdpc_mem_calloc(1, sizeof *made);
    if (!made) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the record of a registered buffer");
    }
    made->address = buffer;
    made->next = comm->buffers;
    comm->buffers = made;
    const fsdpc_nccl_result result =
        way == FSDPC_NCCL_WINDOWS
            ? nccl->window_register(comm->handle, buffer, bytes, &made->window,
                                    FSDPC_NCCL_WINDOW_SYMMETRIC)
            : nccl->register_buffer(comm->handle, buffer, bytes, &made->own);
    const bool begun = result == FSDPC_NCCL_IN_PROGRESS ||
                       (result == FSDPC_NCCL_SUCCESS && way == FSDPC_NCCL_WINDOWS);
    const int status =
        fsdpc_nccl_complete(comm, begun ? FSDPC_NCCL_IN_PROGRESS : result, "registering a buffer");
    if (status != FSDPC_OK && !begun) {
        delist(comm, made);
    }
    return status;
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
fsdpc_nccl_unregister(fsdpc_comm *base, void *buffer)
{
    nccl_comm *comm = (nccl_comm *)base;
    if (fsdpc_nccl_is_forked(comm)) {
        return;
    }
    (void)fsdpc_nccl_use_context(comm);
    pthread_mutex_lock(&comm->calls);
    for (fsdpc_nccl_buffer *next, *each = comm->buffers; each; each = next) {
        next = each->next;
        if (each->address == buffer) {
            delist(comm, each);
        }
    }
    pthread_mutex_unlock(&comm->calls);
}

/* --- the trial -------------------------------------------------------------------------------- */

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
    FSDPC_GOTO(fsdpc_device_show(device, &out->address, out->piece), fail);
    return FSDPC_OK;
fail:
    fsdpc_device_piece_free(device, out->piece);
    fsdpc_device_unreserve(device, out->address, out->bytes);
    return status;
}

static void
close_trial(trial *gone)
{
    if (fsdpc_device_hide(gone->device, gone->address, gone->piece) == FSDPC_OK) {
        fsdpc_device_unreserve(gone->device, gone->address, gone->bytes);
    }
    fsdpc_device_piece_free(gone->device, gone->piece);
}

enum outcome { SPOILT = -1, REFUSED, WORKS, SHARES };

/* True if NCCL's communicator can no longer be used, for example after a call that began and then failed. */
static bool
is_spoilt(const nccl_comm *comm)
{
    fsdpc_nccl_result state = FSDPC_NCCL_SUCCESS;
    return !comm->handle || comm->nccl->async_error(comm->handle, &state) != FSDPC_NCCL_SUCCESS ||
           state != FSDPC_NCCL_SUCCESS;
}

static bool
is_on_device(const nccl_comm *comm, fsdpc_nccl_window window)
{
    unsigned type = 0;
    return comm->driver->pointer_attribute &&
           comm->driver->pointer_attribute(&type, FSDPC_CU_POINTER_MEMORY_TYPE,
                                           (fsdpc_cu_ptr)(uintptr_t)window) == FSDPC_CU_SUCCESS &&
           type == FSDPC_CU_DEVICE_MEMORY;
}

/* Returns the outcome of the registration that has just ended without an error. */
static enum outcome
registration_outcome(const nccl_comm *comm, enum fsdpc_nccl_way way)
{
    const fsdpc_nccl_window window = comm->buffers->window;
    if (way != FSDPC_NCCL_WINDOWS) {
        return WORKS;
    }
    return !window ? REFUSED : is_on_device(comm, window) ? SHARES : WORKS;
}

static enum outcome
outcome_of(nccl_comm *comm, const trial *on, enum fsdpc_nccl_way way)
{
    pthread_mutex_lock(&comm->calls);
    enum outcome outcome = REFUSED;
    if (enlist(comm, on->address, on->bytes, way) == FSDPC_OK) {
        outcome = registration_outcome(comm, way);
        delist(comm, comm->buffers);
    } else if (is_spoilt(comm)) {
        outcome = SPOILT;
    }
    pthread_mutex_unlock(&comm->calls);
    return outcome;
}

/* Makes all ranks use `way` if it works on all of them; otherwise no rank uses it. Also sets `shares`. */
static int
try_way(nccl_comm *comm, const trial *on, enum fsdpc_nccl_way way, bool offered)
{
    float all = offered ? (float)outcome_of(comm, on, way) : REFUSED;
    FSDPC_TRY(fsdpc_comm_host_all_reduce(&comm->base, &all, 1, FSDPC_F32, FSDPC_MIN,
                                         "trying to register memory"));
    if (all < 0) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE,
                           "rank %d: NCCL failed when memory was registered (communicator %s): "
                           "FSDPC_NCCL_REGISTER=0 turns registration off",
                           comm->base.rank, comm->name);
    }
    comm->way = all >= WORKS ? way : comm->way;
    comm->shares = all >= SHARES;
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
    atomic_store(&comm->trying, true);
    FSDPC_GOTO(
        try_way(comm, &on, FSDPC_NCCL_WINDOWS, nccl->window_register && nccl->window_deregister),
        end);
    if (comm->way == FSDPC_NCCL_NEITHER) {
        FSDPC_GOTO(try_way(comm, &on, FSDPC_NCCL_BUFFERS_OF_ONE,
                           nccl->register_buffer && nccl->deregister_buffer),
                   end);
    }
end:
    /* After a failure `trying` stays true, so that the watching thread does not replace the error. */
    atomic_store(&comm->trying, status != FSDPC_OK);
    close_trial(&on);
    return status;
}
