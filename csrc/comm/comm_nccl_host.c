/* Collectives on host memory for an NCCL communicator: exchange, agree, barrier, and their host sync.
 *
 * The host's channel carries agree, barrier and exchanges of up to FSDPC_NCCL_CHANNEL_BYTES. Larger exchanges
 * are staged through the GPU, FSDPC_NCCL_STAGE_BYTES per rank at a time. Without a channel, all are staged.
 */
#include <string.h>

#include "base/agree.h"
#include "comm/comm_nccl_impl.h"
#include "base/mem.h"
#include "base/status.h"

/* Breaks the communicator after Ctrl-C, so that collectives in flight are aborted. */
static int
interrupt_wait(fsdpc_comm *base)
{
    if (!fsdpc_shm_interrupt_check || !fsdpc_shm_interrupt_check()) {
        return FSDPC_OK;
    }
    fsdpc_nccl_fail((nccl_comm *)base, FSDPC_E_COMM, "rank %d gave up: interrupted", base->rank);
    return fsdpc_error(FSDPC_E_INTERRUPT, "rank %d: interrupted while waiting for NCCL",
                       base->rank);
}

static fsdpc_cu_result
query(nccl_comm *comm, uint64_t sequence)
{
    pthread_mutex_lock(&comm->lock);
    fsdpc_cu_result result =
        comm->driver->event_query(comm->ring[sequence % FSDPC_NCCL_RING].event);
    pthread_mutex_unlock(&comm->lock);
    return result;
}

int
fsdpc_nccl_await(nccl_comm *comm)
{
    fsdpc_comm *base = &comm->base;
    double next_check = fsdpc_nccl_now_s() + FSDPC_NCCL_SIGNALS_S;
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    pthread_mutex_lock(&comm->lock);
    uint64_t end = comm->next;
    pthread_mutex_unlock(&comm->lock);
    /* This loop has no deadline of its own: the watching thread enforces one. */
    for (;;) {
        FSDPC_TRY(fsdpc_comm_check(base));
        fsdpc_cu_result result = query(comm, end - 1);
        if (result != FSDPC_CU_NOT_READY) {
            FSDPC_TRY(
                fsdpc_cuda_check(comm->driver, result, "rank %d: waiting for NCCL", base->rank));
            return fsdpc_comm_check(base);
        }
        if (fsdpc_nccl_now_s() > next_check) {
            next_check = fsdpc_nccl_now_s() + FSDPC_NCCL_SIGNALS_S;
            FSDPC_TRY(interrupt_wait(base));
        }
        fsdpc_nccl_nap(50);
    }
}

static size_t
staged_bytes(const nccl_comm *comm)
{
    return (size_t)comm->base.world * FSDPC_NCCL_STAGE_BYTES;
}

/* Allocates the memory and the stream for staging, once, on the first use. */
static int
need_scratch(nccl_comm *comm, const char *what)
{
    fsdpc_cu_ptr block = 0;
    void *pinned = NULL;
    size_t bytes = staged_bytes(comm);
    if (comm->scratch) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_cuda_check(comm->driver, comm->driver->mem_alloc(&block, bytes),
                               "%s: %zu bytes of device memory", what, bytes));
    fsdpc_cu_result result = comm->driver->host_alloc(&pinned, bytes, 0);
    if (result != FSDPC_CU_SUCCESS) {
        (void)comm->driver->mem_free(block);
        return fsdpc_cuda_check(comm->driver, result, "%s: %zu bytes of pinned memory", what,
                                bytes);
    }
    comm->scratch = (char *)(uintptr_t)block;
    comm->pinned = pinned;
    return fsdpc_cuda_check(
        comm->driver, comm->driver->stream_create(&comm->staging, FSDPC_CU_STREAM_NON_BLOCKING, 0),
        "%s: a stream", what);
}

/* Gathers the ranks' pieces in comm->pinned, in place, by the GPU. This is a host sync. */
static int
exchange_staged(nccl_comm *comm, size_t piece_bytes, const char *what)
{
    const fsdpc_cuda_driver *driver = comm->driver;
    size_t all = piece_bytes * (size_t)comm->base.world;
    size_t own = piece_bytes * (size_t)comm->base.rank;
    fsdpc_cu_stream stream = comm->staging;
    fsdpc_nccl_order o = {.kind = FSDPC_NCCL_GATHER,
                          .buffer = comm->scratch,
                          .count = piece_bytes,
                          .dtype = FSDPC_BYTES,
                          .stream = stream};
    FSDPC_TRY(
        fsdpc_cuda_check(driver,
                         driver->copy_to_device((fsdpc_cu_ptr)(uintptr_t)(comm->scratch + own),
                                                comm->pinned + own, piece_bytes, stream),
                         "%s: copying to the device", what));
    FSDPC_TRY(fsdpc_nccl_run(comm, &o, what));
    FSDPC_TRY(fsdpc_cuda_check(
        driver,
        driver->copy_to_host(comm->pinned, (fsdpc_cu_ptr)(uintptr_t)comm->scratch, all, stream),
        "%s: copying to the host", what));
    FSDPC_TRY(fsdpc_nccl_watch_add(comm, stream, what, all));
    return fsdpc_nccl_await(comm);
}

/* Gathers host memory, in place, staged through the GPU. This is a host sync. */
static int
exchange_over_gpu(nccl_comm *comm, char *buffer, size_t piece_bytes, const char *what)
{
    FSDPC_TRY(fsdpc_nccl_use_context(comm));
    FSDPC_TRY(need_scratch(comm, what));
    for (size_t at = 0; at < piece_bytes; at += FSDPC_NCCL_STAGE_BYTES) {
        size_t left = piece_bytes - at;
        size_t part = left < FSDPC_NCCL_STAGE_BYTES ? left : FSDPC_NCCL_STAGE_BYTES;
        memcpy(comm->pinned + (size_t)comm->base.rank * part,
               buffer + (size_t)comm->base.rank * piece_bytes + at, part);
        FSDPC_TRY(exchange_staged(comm, part, what));
        for (int rank = 0; rank < comm->base.world; rank++) {
            memcpy(buffer + (size_t)rank * piece_bytes + at, comm->pinned + (size_t)rank * part,
                   part);
        }
    }
    return FSDPC_OK;
}

/* Exchanges over the host's channel, or over the GPU if there is no channel. A failure of the
 * channel breaks the communicator, because the ranks are then out of step on the GPU as well. */
static int
exchange_on_host(nccl_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    if (!comm->options.exchange) {
        return exchange_over_gpu(comm, buffer, piece_bytes, what);
    }
    int status = comm->options.exchange(comm->options.context, buffer, piece_bytes, what);
    if (status != FSDPC_OK) {
        fsdpc_nccl_break(comm, status);
    }
    return status;
}

/* Large exchanges go over the GPU, which is much faster than the host's channel. */
int
fsdpc_nccl_exchange(fsdpc_comm *comm, void *buffer, size_t piece_bytes, const char *what)
{
    if (piece_bytes * (size_t)comm->world > FSDPC_NCCL_CHANNEL_BYTES) {
        return exchange_over_gpu((nccl_comm *)comm, buffer, piece_bytes, what);
    }
    return exchange_on_host((nccl_comm *)comm, buffer, piece_bytes, what);
}

static const fsdpc_agree_record *
record_of(const void *context, int rank)
{
    return (const fsdpc_agree_record *)context + rank;
}

/* Exchanges only the digests of texts: with many ranks, the texts would take megabytes on each rank. */
static int
compare_digests(nccl_comm *comm, const fsdpc_agree_record *mine, bool *alike, const char *what)
{
    const int world = comm->base.world;
    struct {
        uint64_t digest, bytes;
    } *all = fsdpc_mem_calloc((size_t)world, sizeof *all);
    if (!all) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the digests of %d ranks", what, world);
    }
    all[comm->base.rank].digest = mine->digest;
    all[comm->base.rank].bytes = mine->bytes;
    const int status = exchange_on_host(comm, all, sizeof *all, what);
    *alike = true;
    for (int rank = 0; rank < world; rank++) {
        *alike = *alike && all[rank].digest == mine->digest && all[rank].bytes == mine->bytes;
    }
    fsdpc_mem_free(all);
    return status;
}

/* Every rank gets the same digests, so either all ranks exchange their texts or none does. */
int
fsdpc_nccl_agree(fsdpc_comm *base, const char *text, const char *what)
{
    int status = FSDPC_OK;
    bool alike = false;
    nccl_comm *comm = (nccl_comm *)base;
    fsdpc_agree_record *records = NULL, *mine = fsdpc_mem_calloc(1, sizeof *mine);
    if (!mine) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the text to compare", what);
    }
    fsdpc_agree_fill(mine, text);
    FSDPC_GOTO(compare_digests(comm, mine, &alike, what), end);
    if (alike) {
        goto end;
    }
    records = fsdpc_mem_calloc((size_t)base->world, sizeof *records);
    if (!records) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for the texts of %d ranks", what,
                               base->world),
                   end);
    }
    records[base->rank] = *mine;
    FSDPC_GOTO(exchange_on_host(comm, records, sizeof *records, what), end);
    FSDPC_GOTO(fsdpc_agree_compare(record_of, records, base->world, what), end);
end:
    fsdpc_mem_free(mine);
    fsdpc_mem_free(records);
    return status;
}

/* A barrier of the ranks' host threads: collectives on streams may still be in flight. */
int
fsdpc_nccl_barrier(fsdpc_comm *comm, const char *what)
{
    char *bytes = fsdpc_mem_calloc((size_t)comm->world, 1);
    if (!bytes) {
        return fsdpc_error(FSDPC_E_NOMEM, "%s: no memory for %d bytes", what, comm->world);
    }
    int status = exchange_on_host((nccl_comm *)comm, bytes, 1, what);
    fsdpc_mem_free(bytes);
    return status;
}
