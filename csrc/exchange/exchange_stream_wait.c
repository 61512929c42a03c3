/* Waits of the host for the streams of an exchange: they end when a communicator has failed. */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

int
fsdpc_stream_check(const fsdpc_exchange *x)
{
    const fsdpc_comm *seen = NULL;
    FSDPC_TRY(fsdpc_comm_check(x->comm));
    FSDPC_TRY(fsdpc_comm_check(x->streams->reduce_comm));
    for (int u = 0; u < x->unit_count && x->streams->replicas; u++) {
        fsdpc_comm *replicate = fsdpc_unit_replicate(x->units[u]);
        if (replicate && replicate != seen) {
            FSDPC_TRY(fsdpc_comm_check(fsdpc_comm_for_reductions(replicate)));
            seen = replicate;
        }
    }
    return FSDPC_OK;
}

int
fsdpc_stream_await_host(fsdpc_exchange *x, fsdpc_event *event, const char *what)
{
    int status = FSDPC_E_TIMEOUT;
    for (int i = 0; status == FSDPC_E_TIMEOUT && i < FSDPC_COMM_POLLS; i++) {
        status = fsdpc_comm_poll(x->comm, event, what);
        FSDPC_TRY(status == FSDPC_E_INTERRUPT ? status : fsdpc_stream_check(x));
    }
    return status;
}

int
fsdpc_stream_settle(fsdpc_exchange *x, const char *what)
{
    FSDPC_TRY(fsdpc_device_record(x->streams->device, x->streams->settled));
    return fsdpc_stream_await_host(x, x->streams->settled, what);
}
