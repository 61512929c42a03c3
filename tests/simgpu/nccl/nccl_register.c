/* Registration: buffers of one rank, and windows that all ranks register together. */
#include <stdlib.h>
#include <string.h>

#include "nccl_sim.h"

const nccl_registration *
nccl_registered(const struct ncclComm *comm, const void *at, size_t bytes)
{
    for (const nccl_registration *r = comm->registrations; r; r = r->next) {
        if ((uintptr_t)at >= r->base && (uintptr_t)at + bytes <= r->base + r->bytes) {
            return r;
        }
    }
    return NULL;
}

#ifdef SIMNCCL_OLD
enum nccl_window_state
nccl_window_look(struct ncclComm *comm)
{
    (void)comm;
    return NCCL_WINDOW_NONE;
}
#else
enum { WINDOWS_ON_DEVICE = 22800, WINDOWS_ONLY_SHARED = 22900 };

/* Registers a buffer. Refuses memory from cuMemAlloc, as a real library does by default. Lock held. */
static fsdpc_nccl_result
register_buffer(fsdpc_nccl_comm comm, void *buffer, size_t bytes, bool window, void **handle)
{
    size_t grain = window ? simgpu_get_options()->granule : 4096;
    *handle = NULL;
    if (bytes == 0 || (uintptr_t)buffer % grain || (window && bytes % grain) ||
        !simgpu_is_virtual(buffer, bytes)) {
        strcpy(comm->text, "only whole grains of virtual memory can be registered");
        return FSDPC_NCCL_INVALID_ARGUMENT;
    }
    for (const nccl_registration *r = comm->registrations; r; r = r->next) {
        if ((uintptr_t)buffer < r->base + r->bytes && r->base < (uintptr_t)buffer + bytes) {
            return nccl_misuse(comm, "memory is registered twice");
        }
    }
    nccl_registration *made = malloc(sizeof *made);
    if (!made) {
        abort();
    }
    *made =
        (nccl_registration){comm->registrations, (uintptr_t)buffer, bytes, window, comm->windows};
    comm->registrations = made;
    nccl_counters.registered++;
    *handle = made;
    return FSDPC_NCCL_SUCCESS;
}

static fsdpc_nccl_result
deregister_buffer(fsdpc_nccl_comm comm, void *handle)
{
    fsdpc_nccl_result result = FSDPC_NCCL_INVALID_ARGUMENT;
    api_lock();
    if (nccl_check(comm, "a deregistration")) {
        nccl_registration **link = &comm->registrations;
        while (*link && *link != handle &&
               (!(*link)->window || (*link)->base != (uintptr_t)handle)) {
            link = &(*link)->next;
        }
        nccl_registration *gone = *link;
        if (gone && !simgpu_is_virtual((void *)gone->base, gone->bytes)) {
            nccl_misuse(comm, "registered memory was taken away");
        }
        if (gone) {
            *link = gone->next;
            free(gone);
            nccl_counters.registered--;
            result = FSDPC_NCCL_SUCCESS;
        }
    }
    api_unlock();
    return result;
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommRegister(fsdpc_nccl_comm comm, void *buffer, size_t bytes, void **handle)
{
    api_lock();
    fsdpc_nccl_result result = nccl_check(comm, "a registration")
                                   ? register_buffer(comm, buffer, bytes, false, handle)
                                   : FSDPC_NCCL_INVALID_ARGUMENT;
    api_unlock();
    return result;
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommDeregister(fsdpc_nccl_comm comm, void *handle)
{
    return deregister_buffer(comm, handle);
}

/* True if all ranks have asked for this rank's last window; until then the window is not made. */
static bool
all_came(const struct ncclComm *comm)
{
    for (int r = 0; r < comm->world; r++) {
        if (atomic_load(&comm->segment->ranks[r].windows) < comm->windows) {
            return false;
        }
    }
    return true;
}

/* Makes a window. If all ranks share memory, the window is the memory's address from version 2.28 on. If they
 * do not, versions up to 2.28 register the buffer for this rank only, and later versions give no window. */
static fsdpc_nccl_result
make_window(struct ncclComm *comm, const nccl_window_task *task)
{
    void *handle = NULL;
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    const bool shared = nccl_options.symmetric;
    const int planted = nccl_planted(SIMNCCL_WINDOW_FAILS, comm->rank);
    if (planted >= 0) {
        return planted;
    }
    if (nccl_options.window_error) {
        return nccl_options.window_error;
    }
    if (shared || nccl_options.version < WINDOWS_ONLY_SHARED) {
        result = register_buffer(comm, task->buffer, task->bytes, shared, &handle);
    }
    if (result == FSDPC_NCCL_SUCCESS && shared && nccl_options.version >= WINDOWS_ON_DEVICE) {
        handle = task->buffer;
    }
    memcpy(task->window, &handle, sizeof handle);
    return result;
}

enum nccl_window_state
nccl_window_look(struct ncclComm *comm)
{
    if (!comm->window) {
        return NCCL_WINDOW_NONE;
    }
    if (!all_came(comm)) {
        return NCCL_WINDOW_WAITS;
    }
    nccl_window_task *task = comm->window;
    comm->window = NULL;
    atomic_store(&comm->error, make_window(comm, task));
    free(task);
    return NCCL_WINDOW_NONE;
}

/* As with the real library from 2.28 on, a call on a non-blocking communicator returns success before the
 * registration has ended. Later, the communicator's state shows the outcome, and the window is written. */
NCCL_EXPORT fsdpc_nccl_result
ncclCommWindowRegister(fsdpc_nccl_comm comm, void *buffer, size_t bytes, fsdpc_nccl_window *window,
                       int flags)
{
    fsdpc_nccl_result result = FSDPC_NCCL_SUCCESS;
    nccl_window_task *task = malloc(sizeof *task);
    if (!task) {
        abort();
    }
    *task = (nccl_window_task){.buffer = buffer, .bytes = bytes, .window = window};
    api_lock();
    if (flags != FSDPC_NCCL_WINDOW_SYMMETRIC || !nccl_check(comm, "a window")) {
        result = FSDPC_NCCL_INVALID_ARGUMENT;
    } else {
        result = nccl_enter(comm, "a window");
    }
    if (!result) {
        comm->window = task;
        comm->polls = comm->blocking ? 0 : nccl_options.in_progress;
        atomic_store(&comm->segment->ranks[comm->rank].windows, ++comm->windows);
    }
    api_unlock();
    if (result) {
        free(task);
        return result;
    }
    return comm->blocking                             ? nccl_await(comm)
           : nccl_options.version < WINDOWS_ON_DEVICE ? FSDPC_NCCL_IN_PROGRESS
                                                      : FSDPC_NCCL_SUCCESS;
}

NCCL_EXPORT fsdpc_nccl_result
ncclCommWindowDeregister(fsdpc_nccl_comm comm, fsdpc_nccl_window window)
{
    void *handle;
    memcpy(&handle, &window, sizeof handle);
    return deregister_buffer(comm, handle);
}

#endif
