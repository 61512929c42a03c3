/* Optimizer steps, packing of activations, and coding of values, on devices that queue their work. */
#include "device/device_impl.h"

#include "base/status.h"

static int
check_queues(const fsdpc_device *device, const char *what)
{
    return device->i->step
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_UNAVAILABLE,
                             "device %s has no kernels for %s: step host memory on the CPU instead",
                             device->i->name, what);
}

int
fsdpc_device_step(fsdpc_device *device, const fsdpc_steps *steps)
{
    FSDPC_TRY(check_queues(device, "optimizer steps"));
    if (steps->count < 0 || (steps->count > 0 && (!steps->tensors || !steps->scratch))) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "step: the number of tensors is negative (%d), or their list or the "
                           "scratch memory is NULL",
                           steps->count);
    }
    for (int i = 0; i < steps->count; i++) {
        const fsdpc_step_tensor *t = &steps->tensors[i];
        if (t->n < 0 || t->first < 0 || !t->step || (t->n > 0 && (!t->param || !t->grad))) {
            return fsdpc_error(
                FSDPC_E_INVAL,
                "step: tensor %d of %lld elements has a NULL buffer or a negative size", i,
                (long long)t->n);
        }
    }
    return steps->count ? device->i->step(device->context, steps) : FSDPC_OK;
}

static int
run_activation(fsdpc_device *device, bool pack, void *values, fsdpc_dtype type, int64_t n,
               int8_t *codes, float *scales)
{
    FSDPC_TRY(check_queues(device, "packed activations"));
    if (type != FSDPC_F32 && type != FSDPC_BF16 && type != FSDPC_F16) {
        return fsdpc_error(FSDPC_E_TYPE, "activations of type %s cannot be packed",
                           fsdpc_dtype_name(type));
    }
    if (n < 0 || (n > 0 && (!values || !codes || !scales))) {
        return fsdpc_error(
            FSDPC_E_INVAL,
            "activations: the number of elements is negative (%lld), or a buffer is NULL",
            (long long)n);
    }
    return n ? device->i->activation(device->context, pack, values, type, n, codes, scales)
             : FSDPC_OK;
}

int
fsdpc_device_pack8(fsdpc_device *device, const void *values, fsdpc_dtype type, int64_t n,
                   int8_t *codes, float *scales)
{
    return run_activation(device, true, (void *)(uintptr_t)values, type, n, codes, scales);
}

int
fsdpc_device_unpack8(fsdpc_device *device, const int8_t *codes, const float *scales, int64_t n,
                     void *values, fsdpc_dtype type)
{
    return run_activation(device, false, values, type, n, (int8_t *)(uintptr_t)codes,
                          (float *)(uintptr_t)scales);
}

static int
check_coding(const fsdpc_coding *c, int i, bool plain)
{
    return (c->codec == FSDPC_UNCODED && !plain) || c->type == FSDPC_BYTES || c->rows < 1 ||
                   c->row < 1 || c->pieces < 1 || !c->values || !c->coded ||
                   (uintptr_t)c->coded % 16 != 0 || c->stride % 16 != 0
               ? fsdpc_error(FSDPC_E_INVAL,
                             "codes: rows %d of %lld times %lld elements have no codec, no "
                             "floats, no memory, or codes that are not aligned to 16 bytes",
                             i, (long long)c->rows, (long long)c->row)
               : FSDPC_OK;
}

static int
code(fsdpc_device *device, bool encode, const fsdpc_coding *list, int count)
{
    FSDPC_TRY(check_queues(device, "codes"));
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(check_coding(&list[i], i, encode));
    }
    return count > 0 ? device->i->code(device->context, encode, list, count) : FSDPC_OK;
}

int
fsdpc_device_encode(fsdpc_device *device, const fsdpc_coding *list, int count)
{
    return code(device, true, list, count);
}

int
fsdpc_device_decode(fsdpc_device *device, const fsdpc_coding *list, int count)
{
    return code(device, false, list, count);
}

int
fsdpc_device_sum_landed(fsdpc_device *device, const fsdpc_landed *list, int count, int senders,
                        int own, double scale, bool add)
{
    FSDPC_TRY(check_queues(device, "codes"));
    if (own < 0 || own >= senders) {
        return fsdpc_error(FSDPC_E_INVAL, "sum: %d is not one of %d senders", own, senders);
    }
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(check_coding(&list[i].from, i, true));
        if (!list[i].sum || (list[i].sum_type != FSDPC_F32 && list[i].sum_type != FSDPC_F64) ||
            (list[i].from.type == FSDPC_F64 && list[i].sum_type != FSDPC_F64)) {
            return fsdpc_error(FSDPC_E_TYPE, "sum: %s cannot be summed in %s",
                               fsdpc_dtype_name(list[i].from.type),
                               list[i].sum ? fsdpc_dtype_name(list[i].sum_type) : "no memory");
        }
    }
    return count > 0 ? device->i->sum_landed(device->context, list, count, senders, own, scale, add)
                     : FSDPC_OK;
}
