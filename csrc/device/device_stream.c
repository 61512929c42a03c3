/* Streams and events: the part of device.h that only devices which queue their work implement.
 * Other devices have done all work when a call returns, so that there is nothing to wait for.
 */
#include "device/device_impl.h"
#include "base/status.h"

int
fsdpc_device_stream_new(fsdpc_device *device, bool urgent, fsdpc_stream **out)
{
    *out = NULL;
    return device->i->stream_new ? device->i->stream_new(device->context, urgent, out) : FSDPC_OK;
}

void
fsdpc_device_stream_free(fsdpc_device *device, fsdpc_stream *stream)
{
    if (stream) {
        device->i->stream_free(device->context, stream);
    }
}

fsdpc_stream *
fsdpc_device_use(fsdpc_device *device, fsdpc_stream *stream)
{
    return device->i->use ? device->i->use(device->context, stream) : NULL;
}

fsdpc_stream *
fsdpc_device_current(fsdpc_device *device)
{
    return device->i->current ? device->i->current(device->context) : NULL;
}

int
fsdpc_device_capture(fsdpc_device *device, uint64_t *id)
{
    *id = 0;
    return device->i->capture ? device->i->capture(device->context, id) : FSDPC_OK;
}

int
fsdpc_device_event_new(fsdpc_device *device, fsdpc_event **out)
{
    *out = NULL;
    return device->i->event_new ? device->i->event_new(device->context, out) : FSDPC_OK;
}

void
fsdpc_device_event_free(fsdpc_device *device, fsdpc_event *event)
{
    if (event) {
        device->i->event_free(device->context, event);
    }
}

int
fsdpc_device_record(fsdpc_device *device, fsdpc_event *event)
{
    return event ? device->i->record(device->context, event) : FSDPC_OK;
}

int
fsdpc_device_wait(fsdpc_device *device, fsdpc_event *event)
{
    return event ? device->i->wait(device->context, event) : FSDPC_OK;
}

int
fsdpc_device_poll(fsdpc_device *device, fsdpc_event *event, bool *done)
{
    *done = true;
    return event ? device->i->poll(device->context, event, done) : FSDPC_OK;
}

int
fsdpc_device_finish(fsdpc_device *device, fsdpc_event *event, double timeout, const char *what)
{
    return event ? device->i->finish(device->context, event, timeout, what) : FSDPC_OK;
}

int64_t
fsdpc_device_waits(const fsdpc_device *device)
{
    return device->i->waits ? device->i->waits(device->context) : 0;
}

int
fsdpc_device_free_bytes(fsdpc_device *device, size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = 0;
    return device->i->free_bytes ? device->i->free_bytes(device->context, free_bytes, total)
                                 : FSDPC_OK;
}
