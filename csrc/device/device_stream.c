/* Streams, events, copies, pieces of memory and norms that stay on the device: the part of device.h that only devices
 * which queue their work implement. Elsewhere all is done when a call returns, so that there is
 * nothing to wait for and a copy is a copy.
 */
#include "device/device_impl.h"

#include <float.h>
#include <string.h>

#include "base/status.h"

enum { READ_BACK_TIMEOUT_S = 300 };

/* --- streams and events ------------------------------------------------------------------------- */

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

/* --- host memory and copies --------------------------------------------------------------------- */

int
fsdpc_device_host_alloc(fsdpc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (!device->i->host_alloc) {
        return fsdpc_device_alloc(device, bytes, out);
    }
    return bytes ? device->i->host_alloc(device->context, bytes, out) : FSDPC_OK;
}

void
fsdpc_device_host_free(fsdpc_device *device, void *block, size_t bytes)
{
    if (!device->i->host_free) {
        fsdpc_device_free(device, block, bytes);
    } else if (block) {
        device->i->host_free(device->context, block);
    }
}

int
fsdpc_device_host_register(fsdpc_device *device, void *block, size_t bytes)
{
    return device->i->host_register && bytes
               ? device->i->host_register(device->context, block, bytes)
               : FSDPC_OK;
}

void
fsdpc_device_host_unregister(fsdpc_device *device, void *block)
{
    if (device->i->host_unregister && block) {
        device->i->host_unregister(device->context, block);
    }
}

static int
check_copy(size_t bytes, const void *a, const void *b)
{
    return bytes == 0 || (a && b)
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "copy: a buffer of %zu bytes is NULL", bytes);
}

int
fsdpc_device_copy_in(fsdpc_device *device, void *dst, const void *host, size_t bytes)
{
    FSDPC_TRY(check_copy(bytes, dst, host));
    if (bytes && device->i->copy_in) {
        return device->i->copy_in(device->context, dst, host, bytes);
    }
    if (bytes) {
        memcpy(dst, host, bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_device_copy_out(fsdpc_device *device, void *host, const void *src, size_t bytes)
{
    FSDPC_TRY(check_copy(bytes, host, src));
    if (bytes && device->i->copy_out) {
        return device->i->copy_out(device->context, host, src, bytes);
    }
    if (bytes) {
        memcpy(host, src, bytes);
    }
    return FSDPC_OK;
}

int
fsdpc_device_read_back(fsdpc_device *device, void *host, const void *src, size_t bytes,
                       const char *what)
{
    int status = FSDPC_OK;
    fsdpc_event *copied = NULL;
    FSDPC_TRY(fsdpc_device_event_new(device, &copied));
    FSDPC_GOTO(fsdpc_device_copy_out(device, host, src, bytes), done);
    FSDPC_GOTO(fsdpc_device_record(device, copied), done);
    FSDPC_GOTO(fsdpc_device_finish(device, copied, READ_BACK_TIMEOUT_S, what), done);
done:
    fsdpc_device_event_free(device, copied);
    return status;
}

int
fsdpc_device_copy(fsdpc_device *device, void *dst, const void *src, size_t bytes)
{
    FSDPC_TRY(check_copy(bytes, dst, src));
    if (bytes && device->i->copy) {
        return device->i->copy(device->context, dst, src, bytes);
    }
    if (bytes) {
        memcpy(dst, src, bytes);
    }
    return FSDPC_OK;
}

/* --- addresses and pieces of memory -------------------------------------------------------------- */

static int
check_pieces(const fsdpc_device *device)
{
    return device->i->reserve
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_UNAVAILABLE, "device %s has no pieces of memory: map files",
                             device->i->name);
}

size_t
fsdpc_device_grain(const fsdpc_device *device)
{
    return device->i->grain ? device->i->grain(device->context) : 1;
}

static int
check_grain(const fsdpc_device *device, size_t bytes, const char *what)
{
    FSDPC_TRY(check_pieces(device));
    return bytes && bytes % fsdpc_device_grain(device) == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "%s of %zu bytes: not a multiple of %zu", what, bytes,
                             fsdpc_device_grain(device));
}

int
fsdpc_device_reserve(fsdpc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    FSDPC_TRY(check_grain(device, bytes, "a reservation"));
    return device->i->reserve(device->context, bytes, out);
}

void
fsdpc_device_unreserve(fsdpc_device *device, void *address, size_t bytes)
{
    if (address) {
        device->i->unreserve(device->context, address, bytes);
    }
}

int
fsdpc_device_piece_new(fsdpc_device *device, size_t bytes, fsdpc_piece **out)
{
    *out = NULL;
    FSDPC_TRY(check_grain(device, bytes, "a piece"));
    int status = device->i->piece_new(device->context, bytes, out);
    if (status == FSDPC_E_DEVMEM && fsdpc_device_trim(device)) {
        status = device->i->piece_new(device->context, bytes, out);
    }
    return status;
}

void
fsdpc_device_piece_free(fsdpc_device *device, fsdpc_piece *piece)
{
    if (piece) {
        device->i->piece_free(device->context, piece);
    }
}

int
fsdpc_device_show(fsdpc_device *device, void **address, size_t bytes, fsdpc_piece *piece)
{
    FSDPC_TRY(check_grain(device, bytes, "what is shown"));
    return device->i->show(device->context, address, bytes, piece);
}

int
fsdpc_device_hide(fsdpc_device *device, void *address, size_t bytes, fsdpc_piece *piece)
{
    FSDPC_TRY(check_pieces(device));
    return device->i->hide(device->context, address, bytes, piece);
}

/* --- norms that stay on the device -------------------------------------------------------------- */

static int
check_queues(const fsdpc_device *device)
{
    return device->caps.asynchronous
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_UNAVAILABLE,
                             "device %s does not queue its work: take norms with norm2",
                             device->i->name);
}

int64_t
fsdpc_device_norm_parts(const fsdpc_device *device, int64_t n)
{
    return device->i->norm_parts ? device->i->norm_parts(n) : 0;
}

int
fsdpc_device_norm_into(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n, double p,
                       void *parts)
{
    FSDPC_TRY(check_queues(device));
    FSDPC_TRY(fsdpc_device_check_scale(src, type, n));
    if (!(p > 0) || p > DBL_MAX || !parts || n == 0) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: order %g of %lld elements into %p", p,
                           (long long)n, parts);
    }
    return device->i->norm_into(device->context, src, type, n, p, parts);
}

int
fsdpc_device_reduce_norm(fsdpc_device *device, void *acc, fsdpc_dtype acc_type,
                         const void *const *src, int src_count, fsdpc_dtype src_type, int64_t n,
                         double scale, bool add, void *parts)
{
    FSDPC_TRY(check_queues(device));
    FSDPC_TRY(fsdpc_device_check_reduce(acc, acc_type, src, src_count, src_type, n));
    if (!parts) {
        return fsdpc_error(FSDPC_E_INVAL, "reduce: no place for the parts of the norm");
    }
    return device->i->reduce_norm(device->context, acc, acc_type, src, src_count, src_type, n,
                                  scale, add, parts);
}

int
fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                        void *total)
{
    FSDPC_TRY(check_queues(device));
    if (count < 0 || (count > 0 && !parts) || !total) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: a total of %lld parts", (long long)count);
    }
    return device->i->norm_total(device->context, parts, count, add, total);
}

int
fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                         double *out)
{
    FSDPC_TRY(check_queues(device));
    if (!total || !out || !(p > 0)) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the order %g is not positive", p);
    }
    return device->i->clip_factor(device->context, total, p, max_norm, out);
}

int
fsdpc_device_scale_by(fsdpc_device *device, void *x, fsdpc_dtype type, int64_t n,
                      const double *factor)
{
    FSDPC_TRY(check_queues(device));
    FSDPC_TRY(fsdpc_device_check_scale(x, type, n));
    if (!factor) {
        return fsdpc_error(FSDPC_E_INVAL, "scale: the factor is NULL");
    }
    return n ? device->i->scale_by(device->context, x, type, n, factor) : FSDPC_OK;
}
