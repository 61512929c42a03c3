/* Host syncs for offloaded units, whose optimizer runs on the CPU (unit_offload.c).
 *
 * A synchronised backward ends with one host sync for all units: the reduce stream waits for the last read
 * of a master shard, and the host waits for the reduce stream. The host's wait fails when a communicator has
 * failed (each collective has its own deadline), or after a day. If the optimizer steps unit by unit, it
 * waits for each unit's sum in turn, and steps that unit while the device sums and copies the next units.
 */
#include "exchange/exchange_stream_impl.h"
#include "base/status.h"

int
fsdpc_stream_offload_open(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    bool any = false;
    s->all_offloaded = true;
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_unit *unit = x->units[u];
        any = any || fsdpc_unit_is_offloaded(unit);
        s->all_offloaded = s->all_offloaded && (fsdpc_unit_is_offloaded(unit) ||
                                                fsdpc_unit_layout(unit)->trainable_count == 0);
    }
    return any ? fsdpc_device_event_new(s->device, &s->copied) : FSDPC_OK;
}

static int
in_flight(const fsdpc_exchange *x, enum fsdpc_which which)
{
    int count = 0;
    for (int u = 0; u < x->unit_count; u++) {
        count += fsdpc_unit_in_flight(x->units[u], which) != NULL;
    }
    return count;
}

/* Makes the current stream wait for communication hooks' sums, which are not made on the reduce stream. */
static int
join_hooked(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_unit *unit = x->units[u];
        fsdpc_event *summed = fsdpc_unit_in_flight(unit, FSDPC_GRAD);
        if (fsdpc_unit_is_hooked(unit) && summed) {
            FSDPC_TRY(fsdpc_device_wait(x->streams->device, summed));
        }
    }
    return FSDPC_OK;
}

static int
join(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    if (in_flight(x, FSDPC_MASTER)) {
        fsdpc_device_use(s->device, s->gather);
        FSDPC_TRY(fsdpc_device_record(s->device, s->copied));
        fsdpc_device_use(s->device, s->reduce);
        FSDPC_TRY(fsdpc_device_wait(s->device, s->copied));
    }
    fsdpc_device_use(s->device, s->reduce);
    FSDPC_TRY(join_hooked(x));
    return fsdpc_device_record(s->device, s->sync_event);
}

int
fsdpc_stream_offload_end(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    if (!s->copied || (!in_flight(x, FSDPC_MASTER) && !in_flight(x, FSDPC_GRAD))) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_stream_refuse_capture(s, "a step with parameters in host memory"));
    if (x->settles_apart) {
        return FSDPC_OK;
    }
    fsdpc_stream *caller = fsdpc_device_current(s->device);
    int status = join(x);
    fsdpc_device_use(s->device, caller);
    FSDPC_TRY(status);
    FSDPC_TRY(fsdpc_stream_await_host(x, s->sync_event, "the sums of offloaded gradients"));
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_unit_settled(x->units[u], FSDPC_MASTER);
        fsdpc_unit_settled(x->units[u], FSDPC_GRAD);
    }
    return FSDPC_OK;
}

int
fsdpc_stream_offload_settle(fsdpc_exchange *x, fsdpc_unit *unit)
{
    for (int which = 0; which < 2; which++) {
        fsdpc_event *event = fsdpc_unit_in_flight(unit, which);
        if (event) {
            FSDPC_TRY(fsdpc_stream_await_host(x, event, "the sum of a unit's offloaded gradients"));
            fsdpc_unit_settled(unit, which);
        }
    }
    return fsdpc_stream_check(x);
}

int
fsdpc_stream_offload_leave(fsdpc_exchange *x)
{
    struct fsdpc_streams *s = x->streams;
    if (!s->copied || !in_flight(x, FSDPC_MASTER)) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_stream_refuse_capture(s, "a forward with parameters in host memory"));
    fsdpc_stream *caller = fsdpc_device_use(s->device, s->gather);
    int status = fsdpc_device_record(s->device, s->copied);
    fsdpc_device_use(s->device, caller);
    FSDPC_TRY(status);
    FSDPC_TRY(fsdpc_stream_await_host(x, s->copied, "the gathers of offloaded parameters"));
    for (int u = 0; u < x->unit_count; u++) {
        fsdpc_unit_settled(x->units[u], FSDPC_MASTER);
    }
    return FSDPC_OK;
}
