/* The ring of an NCCL communicator's collectives in flight, each with an event that is recorded after the
 * collective. */
#include <stdio.h>

#include "base/deadline.h"
#include "comm/comm_nccl_impl.h"
#include "base/status.h"

static fsdpc_nccl_entry *
entry_of(nccl_comm *comm, uint64_t sequence)
{
    return &comm->ring[sequence % FSDPC_NCCL_RING];
}

/* Removes the oldest entries, up to one whose event is not reached. The watching thread reports failures. */
static fsdpc_cu_result
sweep_locked(nccl_comm *comm)
{
    while (comm->first < comm->next) {
        fsdpc_cu_result result = comm->driver->event_query(entry_of(comm, comm->first)->event);
        if (result != FSDPC_CU_SUCCESS) {
            return result;
        }
        comm->first++;
        if (comm->first < comm->next) {
            entry_of(comm, comm->first)->since_s = fsdpc_nccl_now_s();
        }
    }
    return FSDPC_CU_SUCCESS;
}

static int
make_room(nccl_comm *comm)
{
    double end = fsdpc_nccl_now_s() + comm->options.timeout_s;
    for (;;) {
        pthread_mutex_lock(&comm->lock);
        if (comm->next - comm->first == FSDPC_NCCL_RING) {
            (void)sweep_locked(comm);
        }
        bool room = comm->next - comm->first < FSDPC_NCCL_RING;
        pthread_mutex_unlock(&comm->lock);
        if (room) {
            return FSDPC_OK;
        }
        FSDPC_TRY(fsdpc_comm_check(&comm->base));
        if (fsdpc_nccl_now_s() > end) {
            char oldest[FSDPC_NCCL_OLDEST_BYTES];
            fsdpc_nccl_oldest(comm, oldest);
            const fsdpc_late late = {.rank = comm->base.rank,
                                     .seconds = comm->options.timeout_s,
                                     .what = oldest,
                                     .more = "; the communicator's ring of collectives is full"};
            return fsdpc_late_error(&late);
        }
        fsdpc_nccl_nap(200);
    }
}

/* A collective that is captured into a graph has no event to query.
 * NCCL's errors are still polled, but the collective has no deadline. */
static int
is_captured(const nccl_comm *comm, fsdpc_cu_stream stream, bool *captured)
{
    unsigned state = 0;
    uint64_t id = 0;
    if (comm->driver->capture_info) {
        FSDPC_TRY(fsdpc_cuda_check(
            comm->driver, comm->driver->capture_info(stream, &state, &id, NULL, NULL, NULL),
            "querying a stream's capture"));
    }
    *captured = state != 0;
    return FSDPC_OK;
}

int
fsdpc_nccl_watch_add(nccl_comm *comm, fsdpc_cu_stream stream, const char *what, size_t bytes)
{
    int status = FSDPC_OK;
    bool captured;
    FSDPC_TRY(is_captured(comm, stream, &captured));
    if (captured) {
        comm->has_graphs = true;
        return FSDPC_OK;
    }
    FSDPC_TRY(make_room(comm));
    pthread_mutex_lock(&comm->lock);
    fsdpc_nccl_entry *entry = entry_of(comm, comm->next);
    FSDPC_GOTO(fsdpc_cuda_check(comm->driver, comm->driver->event_record(entry->event, stream),
                                "%s: recording its end", what),
               end);
    entry->sequence = comm->next++;
    entry->bytes = bytes;
    entry->since_s = fsdpc_nccl_now_s();
    snprintf(entry->what, sizeof entry->what, "%s", what);
end:
    pthread_mutex_unlock(&comm->lock);
    return status;
}

void
fsdpc_nccl_oldest(nccl_comm *comm, char text[FSDPC_NCCL_OLDEST_BYTES])
{
    const size_t bytes = FSDPC_NCCL_OLDEST_BYTES;
    (void)fsdpc_nccl_use_context(comm);
    pthread_mutex_lock(&comm->lock);
    (void)sweep_locked(comm);
    const fsdpc_nccl_entry *entry = entry_of(comm, comm->first);
    if (comm->first < comm->next) {
        snprintf(text, bytes, "%s (collective %llu of communicator %s, %zu bytes)", entry->what,
                 (unsigned long long)entry->sequence, comm->name, entry->bytes);
    } else {
        snprintf(text, bytes, "communicator %s after %llu collectives", comm->name,
                 (unsigned long long)comm->first);
    }
    pthread_mutex_unlock(&comm->lock);
}

fsdpc_cu_result
fsdpc_nccl_sweep(nccl_comm *comm, double *waited)
{
    pthread_mutex_lock(&comm->lock);
    const fsdpc_cu_result result = sweep_locked(comm);
    if (waited) {
        *waited = comm->first < comm->next
                      ? fsdpc_nccl_now_s() - entry_of(comm, comm->first)->since_s
                      : 0;
    }
    pthread_mutex_unlock(&comm->lock);
    return result;
}
