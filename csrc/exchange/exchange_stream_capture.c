/* A step of the "stream" exchange inside a capture: recorded into a graph that runs it later.
 *
 * Addresses never change and nothing is allocated, so a step is a graph but for what the host does
 * in it. Events of other captures, or of none, mean nothing inside: whoever runs the graph puts it
 * behind the work before. When the caller's stream leaves a pass, both own streams lead back into
 * it, or the capture could not end. What the host must wait for is refused by name.
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
    int status = fsdpc_device_record(s->device, s->settled);
    fsdpc_device_use(s->device, caller);
    FSDPC_TRY(status);
    return fsdpc_device_wait(s->device, s->settled);
}

int
fsdpc_stream_join_capture(struct fsdpc_streams *s)
{
    if (s->capture == 0) {
        return FSDPC_OK;
    }
    /* A stream that did nothing yet is not part of the capture. */
    if (s->masters_awaited) {
        FSDPC_TRY(join(s, s->gather));
    }
    return s->sent > 0 ? join(s, s->reduce) : FSDPC_OK;
}
