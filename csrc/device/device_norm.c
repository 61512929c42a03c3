/* Norms whose results stay in the device's memory, on devices that queue their work. */
#include "device/device_impl.h"

#include <float.h>

#include "base/status.h"

static int
check_queues(const fsdpc_device *device)
{
    return device->caps.asynchronous
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_UNAVAILABLE,
                             "device %s has no norms on a stream: compute norms with norm2",
                             device->i->name);
}

int64_t
fsdpc_device_norm_parts(const fsdpc_device *device, int64_t n)
{
    return device->i->norm_parts ? device->i->norm_parts(n) : 0;
}

static int
check_list(const fsdpc_device *device, const fsdpc_stretch *list, int count)
{
    FSDPC_TRY(check_queues(device));
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(fsdpc_device_check_scale(list[i].data, list[i].dtype, list[i].n));
        if (list[i].n == 0) {
            return fsdpc_error(FSDPC_E_INVAL, "norm: stretch %d has no elements", i);
        }
    }
    return FSDPC_OK;
}

int
fsdpc_device_norm_into(fsdpc_device *device, const fsdpc_stretch *list, int count, double p,
                       void *parts)
{
    FSDPC_TRY(check_list(device, list, count));
    if (!(p > 0) || p > DBL_MAX) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the order %g is not positive and finite", p);
    }
    if (!parts) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the buffer for parts is NULL");
    }
    return device->i->norm_into(device->context, list, count, p, parts);
}

int
fsdpc_device_norm_total(fsdpc_device *device, const void *parts, int64_t count, bool add,
                        void *total)
{
    FSDPC_TRY(check_queues(device));
    if (count < 0 || (count > 0 && !parts) || !total) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "norm: cannot total %lld parts: a negative count or a NULL buffer",
                           (long long)count);
    }
    return device->i->norm_total(device->context, parts, count, add, total);
}

int
fsdpc_device_clip_factor(fsdpc_device *device, const void *total, double p, double max_norm,
                         double *out)
{
    FSDPC_TRY(check_queues(device));
    if (!total || !out) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the total or the clip factor is NULL");
    }
    if (!(p > 0)) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the order %g is not positive", p);
    }
    return device->i->clip_factor(device->context, total, p, max_norm, out);
}

int
fsdpc_device_scale_by(fsdpc_device *device, const fsdpc_stretch *list, int count,
                      const double *factor)
{
    FSDPC_TRY(check_list(device, list, count));
    if (!factor) {
        return fsdpc_error(FSDPC_E_INVAL, "scale: the factor is NULL");
    }
    return device->i->scale_by(device->context, list, count, factor);
}
