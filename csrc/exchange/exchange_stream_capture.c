/* A step of the "stream" exchange that is captured into a graph, which runs later.
 *
 * Addresses never change and a step allocates nothing, so a step without host syncs can be captured.
 * A captured step does not wait for events that were recorded outside of the capture: the caller orders the
 * launch of the graph after earlier work. At the end of a pass the caller's stream waits for the exchange's
 * streams, else the capture could not end. An operation that needs a host sync fails; the error names it.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

int
fsdpc_stream_refuse_capture(const struct fsdpc_streams *s, const char *what)
{
    return s->capture == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_STATE, "%s cannot be captured into a CUDA graph", what);
}

static int
join(struct fsdpc_streams *s, fsdpc_stream *own)
{
    fsdpc_stream *caller = fsdpc_device_use(s->device, own);
    int status = fsdpc_device_record(s->device, s->sync_event);
    fsdpc_device_use(s->device, caller);
    FSDPC_TRY(status);
    return fsdpc_device_wait(s->device, s->sync_event);
}

int
fsdpc_stream_join_capture(struct fsdpc_streams *s)
{
    if (s->capture == 0) {
        return FSDPC_OK;
    }
    /* A stream on which no work was captured is not part of the capture, so it is not joined. */
    if (s->masters_awaited) {
        FSDPC_TRY(join(s, s->gather));
    }
    return s->sent > 0 ? join(s, s->reduce) : FSDPC_OK;
}
