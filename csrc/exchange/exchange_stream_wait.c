/* Waits of the host for the streams of an exchange: they end when a communicator has failed. */
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
