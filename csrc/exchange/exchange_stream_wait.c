/* The functions by which the host waits for the streams of a "stream" exchange. They fail when a communicator
 * of the exchange has failed. The file also counts the bytes that were sent. */
#include <string.h>

#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

int
fsdpc_stream_check(const fsdpc_exchange *x)
{
    const fsdpc_comm *done = NULL;
    FSDPC_TRY(fsdpc_comm_check(x->comm));
    FSDPC_TRY(fsdpc_comm_check(x->streams->reduce_comm));
    for (int u = 0; u < x->unit_count && x->streams->replicas; u++) {
        fsdpc_comm *replicate = fsdpc_unit_replicate(x->units[u]);
        if (replicate && replicate != done) {
            FSDPC_TRY(fsdpc_comm_check(fsdpc_comm_for_reductions(replicate)));
            done = replicate;
        }
    }
    return FSDPC_OK;
}

static int
is_sound(const void *exchange)
{
    return fsdpc_stream_check(exchange);
}

int
fsdpc_stream_await_host(fsdpc_exchange *x, fsdpc_event *event, const char *what)
{
    return fsdpc_comm_await(x->comm, event, is_sound, x, what);
}

int
fsdpc_stream_sync(fsdpc_exchange *x, const char *what)
{
    FSDPC_TRY(fsdpc_device_record(x->streams->device, x->streams->sync_event));
    return fsdpc_stream_await_host(x, x->streams->sync_event, what);
}

void
fsdpc_stream_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_comm *comm,
                   const fsdpc_comm_part *parts, int count, bool all_reduce)
{
    uint64_t bytes = 0;
    const uint64_t world = (uint64_t)fsdpc_comm_world(comm);
    for (int i = 0; i < count; i++) {
        bytes += (uint64_t)parts[i].piece_numel * fsdpc_dtype_bytes(parts[i].dtype);
    }
    if (strcmp(fsdpc_comm_kind(comm), "nccl") == 0) {
        bytes *= world - 1;
        fsdpc_exchange_sent(x, unit, all_reduce ? 2 * bytes / world : bytes);
    }
}
