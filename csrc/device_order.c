/* Streams, events and packs of many tensors: what an asynchronous device has and others need not.
 *
 * A device without streams runs everything at once in the order of the calls, so nothing has to be
 * recorded or waited for: callers are written for streams and cost nothing without them.
 */
#include "device_impl.h"

#include "status.h"

int
fsdpc_device_stream_new(fsdpc_device *device, const char *name, fsdpc_stream **out)
{
    *out = NULL;
    return device->i->order ? device->i->order->stream_new(device->context, name, out) : FSDPC_OK;
}

void
fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream)
{
    if (stream) {
        device->i->order->stream_free(device->context, stream);
    }
}

void
fsdpc_device_set_caller(fsdpc_device *device, void *raw)
{
    if (device->i->order) {
        device->i->order->set_caller(device->context, raw);
    }
}

void
fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream)
{
    if (device->i->order) {
        device->i->order->use(device->context, stream);
    }
}

void *
fsdpc_device_stream_raw(fsdpc_device *device, fsdpc_stream *stream)
{
    return device->i->order ? device->i->order->stream_raw(device->context, stream) : NULL;
}

int
fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out)
{
    *out = NULL;
    return device->i->order ? device->i->order->event_new(device->context, out) : FSDPC_OK;
}

void
fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event)
{
    if (event) {
        device->i->order->event_free(device->context, event);
    }
}

int
fsdpc_device_record(fsdpc_device *device, fsdpc_event *event, fsdpc_stream *stream)
{
    return event ? device->i->order->record(device->context, event, stream) : FSDPC_OK;
}

int
fsdpc_device_await(fsdpc_device *device, fsdpc_stream *stream, fsdpc_event *event)
{
    return event ? device->i->order->await(device->context, stream, event) : FSDPC_OK;
}

int
fsdpc_device_is_done(fsdpc_device *device, fsdpc_event *event, bool *out)
{
    *out = true;
    return event ? device->i->order->is_done(device->context, event, out) : FSDPC_OK;
}

int
fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout_s, const char *what)
{
    return event ? device->i->order->finish(device->context, event, timeout_s, what) : FSDPC_OK;
}

/* --- packs of many tensors -------------------------------------------------------------------- */

static int
check_entry(const fsdpc_pack_entry *entry, int index, int source_count)
{
    if (entry->n < 0 || entry->n > INT64_MAX / 8 || entry->source < -1 ||
        entry->source >= source_count) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: entry %d has %lld elements of source %d of %d",
                           index, (long long)entry->n, entry->source, source_count);
    }
    if (!fsdpc_dtype_is_float(entry->dst_type)) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: no arithmetic with dtype %s (%d)",
                           fsdpc_dtype_name(entry->dst_type), (int)entry->dst_type);
    }
    return FSDPC_OK;
}

int
fsdpc_device_pack_plan_new(fsdpc_device *device, const fsdpc_pack_entry *entries, int count,
                           int source_count, fsdpc_pack_plan **out)
{
    *out = NULL;
    if (count < 0 || source_count < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: %d entries, %d sources", count, source_count);
    }
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(check_entry(&entries[i], i, source_count));
    }
    if (!device->i->pack_plan_new) {
        return fsdpc_error(FSDPC_E_UNAVAILABLE, "device %s packs tensors one by one",
                           fsdpc_device_name(device));
    }
    return device->i->pack_plan_new(device->context, entries, count, source_count, out);
}

void
fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan)
{
    if (plan) {
        device->i->pack_plan_free(device->context, plan);
    }
}

int
fsdpc_device_pack_many(fsdpc_device *device, const fsdpc_pack_plan *plan, void *dst,
                       const fsdpc_tensor *sources, double scale)
{
    if (!plan || !dst) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: no plan or no destination");
    }
    return device->i->pack_many(device->context, plan, dst, sources, scale);
}
