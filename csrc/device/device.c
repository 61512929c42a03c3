/* The device interface: checks arguments, then calls the implementer's table. See device.h. */
#include "device/device_impl.h"

#include <math.h>

#include "base/pool.h"
#include "base/status.h"

static int
check_count(const char *operation, int64_t n, bool has_pointers)
{
    if (n < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: the number of elements is negative (%lld)",
                           operation, (long long)n);
    }
    if (n > INT64_MAX / 8) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: %lld elements do not fit into memory", operation,
                           (long long)n);
    }
    if (n > 0 && !has_pointers) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: a buffer of %lld elements is NULL", operation,
                           (long long)n);
    }
    return FSDPC_OK;
}

static int
check_float(const char *operation, fsdpc_dtype type)
{
    if (!fsdpc_dtype_is_float(type)) {
        return fsdpc_error(FSDPC_E_INVAL, "%s: the dtype must be a floating dtype, but is %s (%d)",
                           operation, fsdpc_dtype_name(type), (int)type);
    }
    return FSDPC_OK;
}

static int
check_accumulator(const char *operation, fsdpc_dtype type)
{
    if (type != FSDPC_F32 && type != FSDPC_F64) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "%s: the dtype of the sum must be float32 or float64, but is %s",
                           operation, fsdpc_dtype_name(type));
    }
    return FSDPC_OK;
}

static int
check_cast(const char *operation, fsdpc_dtype dst_type, fsdpc_dtype src_type, double scale)
{
    if (dst_type == FSDPC_BYTES && src_type == FSDPC_BYTES) {
        if (scale == 1.0) {
            return FSDPC_OK;
        }
        return fsdpc_error(FSDPC_E_INVAL, "%s: bytes cannot be scaled by %g", operation, scale);
    }
    FSDPC_TRY(check_float(operation, dst_type));
    return check_float(operation, src_type);
}

int
fsdpc_device_set_threads(fsdpc_device *device, int threads)
{
    const int most = device->i->set_threads ? FSDPC_POOL_MAX_THREADS : 1;
    if (threads < 1 || threads > most) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "device %s: the number of threads must be 1 to %d, but is %d",
                           device->i->name, most, threads);
    }
    return device->i->set_threads ? device->i->set_threads(device->context, threads) : FSDPC_OK;
}

int
fsdpc_device_threads(const fsdpc_device *device)
{
    return device->i->set_threads ? device->i->threads(device->context) : 1;
}

const char *
fsdpc_device_name(const fsdpc_device *device)
{
    return device->i->name;
}

const char *
fsdpc_device_kernels_name(const fsdpc_device *device)
{
    return device->i->kernels_name(device->context);
}

const fsdpc_device_caps *
fsdpc_device_get_caps(const fsdpc_device *device)
{
    return &device->caps;
}

int
fsdpc_device_cast(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                  fsdpc_dtype src_type, int64_t n, double scale)
{
    FSDPC_TRY(check_cast("cast", dst_type, src_type, scale));
    FSDPC_TRY(check_count("cast", n, dst && src));
    return n ? device->i->cast(device->context, dst, dst_type, src, src_type, n, scale) : FSDPC_OK;
}

int
fsdpc_device_accumulate(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *src,
                        fsdpc_dtype src_type, int64_t n, double scale)
{
    FSDPC_TRY(check_accumulator("accumulate", acc_type));
    FSDPC_TRY(check_float("accumulate", src_type));
    FSDPC_TRY(check_count("accumulate", n, acc && src));
    return n ? device->i->accumulate(device->context, acc, acc_type, src, src_type, n, scale)
             : FSDPC_OK;
}

static int
check_reduce(void *acc, fsdpc_dtype acc_type, const void *const *src, int src_count,
             fsdpc_dtype src_type, int64_t n)
{
    FSDPC_TRY(check_accumulator("reduce", acc_type));
    FSDPC_TRY(check_float("reduce", src_type));
    if (src_count < 0) {
        return fsdpc_error(FSDPC_E_INVAL, "reduce: the number of sources is negative (%d)",
                           src_count);
    }
    return check_count("reduce", n, acc && (src || src_count == 0));
}

int
fsdpc_device_reduce(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *const *src,
                    int src_count, fsdpc_dtype src_type, int64_t n, double scale, bool add)
{
    FSDPC_TRY(check_reduce(acc, acc_type, src, src_count, src_type, n));
    return n ? device->i->reduce(device->context, acc, acc_type, src, src_count, src_type, n, scale,
                                 add)
             : FSDPC_OK;
}

int
fsdpc_device_refresh(fsdpc_device *device, void *acc, fsdpc_dtype acc_type, const void *grad,
                     fsdpc_dtype grad_type, int64_t n)
{
    FSDPC_TRY(check_accumulator("refresh", acc_type));
    FSDPC_TRY(check_float("refresh", grad_type));
    FSDPC_TRY(check_count("refresh", n, acc && grad));
    return n ? device->i->refresh(device->context, acc, acc_type, grad, grad_type, n) : FSDPC_OK;
}

int
fsdpc_device_norm2(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n,
                   fsdpc_norm *out)
{
    *out = (fsdpc_norm){0};
    FSDPC_TRY(check_float("norm", type));
    FSDPC_TRY(check_count("norm", n, src));
    return n ? device->i->norm2(device->context, src, type, n, out) : FSDPC_OK;
}

int
fsdpc_device_norm_p(fsdpc_device *device, const void *src, fsdpc_dtype type, int64_t n, double p,
                    double *out)
{
    *out = 0;
    if (!(p > 0) || isinf(p)) {
        return fsdpc_error(FSDPC_E_INVAL, "norm: the order %g is not positive and finite", p);
    }
    FSDPC_TRY(check_float("norm", type));
    FSDPC_TRY(check_count("norm", n, src));
    return n ? device->i->norm_p(device->context, src, type, n, p, out) : FSDPC_OK;
}

int
fsdpc_device_check_scale(const void *x, fsdpc_dtype type, int64_t n)
{
    FSDPC_TRY(check_float("scale", type));
    return check_count("scale", n, x);
}

int
fsdpc_device_scale(fsdpc_device *device, void *x, fsdpc_dtype type, int64_t n, double factor)
{
    FSDPC_TRY(fsdpc_device_check_scale(x, type, n));
    if (n == 0) {
        return FSDPC_OK;
    }
    return device->i->scale ? device->i->scale(device->context, x, type, n, factor)
                            : device->i->cast(device->context, x, type, x, type, n, factor);
}

int
fsdpc_device_pack(fsdpc_device *device, void *dst, fsdpc_dtype dst_type, const void *src,
                  fsdpc_dtype src_type, int ndim, const int64_t *shape, const int64_t *strides,
                  double scale)
{
    bool empty = false;
    FSDPC_TRY(check_cast("pack", dst_type, src_type, scale));
    if (ndim < 0 || ndim > FSDPC_KERNEL_MAX_DIMS) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: %d dimensions, at most %d are supported", ndim,
                           FSDPC_KERNEL_MAX_DIMS);
    }
    for (int d = 0; d < ndim; d++) {
        empty = empty || shape[d] == 0;
    }
    if (!empty && (!dst || !src)) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: the buffer of a tensor with elements is NULL");
    }
    return device->i->pack(device->context, dst, dst_type, src, src_type, ndim, shape, strides,
                           scale);
}

int
fsdpc_device_poison(fsdpc_device *device, void *dst, fsdpc_dtype type, int64_t n)
{
    if (fsdpc_dtype_bytes(type) == 0) {
        return fsdpc_error(FSDPC_E_INVAL, "poison: unknown dtype %d", (int)type);
    }
    FSDPC_TRY(check_count("poison", n, dst));
    return n ? device->i->poison(device->context, dst, type, n) : FSDPC_OK;
}

int
fsdpc_device_zero(fsdpc_device *device, void *dst, size_t bytes)
{
    if (bytes > 0 && !dst) {
        return fsdpc_error(FSDPC_E_INVAL, "zero: a buffer of %zu bytes is NULL", bytes);
    }
    return bytes ? device->i->zero(device->context, dst, bytes) : FSDPC_OK;
}
