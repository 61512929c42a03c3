/* Packs many tensors into one flat buffer by a plan: its checks, and a loop for devices that do not queue. */
#include "device/device_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"

enum { ADD_ITEMS = 32 << 10 }; /* elements in add_blocks' buffer, which fits in a cache */

static int
check_target(const fsdpc_pack_target *target, int index, size_t begin, size_t bytes, size_t *end)
{
    const size_t item = fsdpc_dtype_bytes(target->dtype);
    size_t length;
    if (item == 0) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: target %d has the unknown dtype %d", index,
                           (int)target->dtype);
    }
    if (target->n < 0 || !fsdpc_size_mul((size_t)target->n, item, &length) ||
        !fsdpc_size_add(target->offset, length, end) || *end > bytes || target->offset < begin ||
        target->offset % item) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "pack: target %d, %lld elements from byte %zu, does not fit behind byte "
                           "%zu of %zu",
                           index, (long long)target->n, target->offset, begin, bytes);
    }
    return FSDPC_OK;
}

static int
copy_lists(fsdpc_pack_plan *plan, const fsdpc_pack_target *targets, const fsdpc_pack_base *bases)
{
    size_t count = (size_t)plan->count;
    plan->targets = fsdpc_mem_calloc(count + 1, sizeof *targets);
    plan->bases = bases ? fsdpc_mem_calloc(count + 1, sizeof *bases) : NULL;
    if (!plan->targets || (bases && !plan->bases)) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a plan of %d tensors", plan->count);
    }
    memcpy(plan->targets, targets, count * sizeof *targets);
    if (bases) {
        memcpy(plan->bases, bases, count * sizeof *bases);
    }
    return FSDPC_OK;
}

static int
check_base(const fsdpc_pack_base *base, int index)
{
    const bool wide = base->dtype == FSDPC_F32 || base->dtype == FSDPC_F64;
    return wide && base->offset % fsdpc_dtype_bytes(base->dtype) == 0
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL,
                             "pack: base %d must be float32 or float64, aligned to its elements, "
                             "but has dtype %d at byte %zu",
                             index, (int)base->dtype, base->offset);
}

int
fsdpc_device_pack_plan(fsdpc_device *device, const fsdpc_pack_target *targets,
                       const fsdpc_pack_base *bases, int count, size_t bytes, bool keep_gaps,
                       fsdpc_pack_plan **out)
{
    int status = FSDPC_OK;
    size_t end = 0;
    *out = NULL;
    for (int i = 0; i < count; i++) {
        FSDPC_TRY(check_target(&targets[i], i, end, bytes, &end));
        FSDPC_TRY(bases ? check_base(&bases[i], i) : FSDPC_OK);
    }
    fsdpc_pack_plan *plan = fsdpc_mem_calloc(1, sizeof *plan);
    if (!plan) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a plan of %d tensors", count);
    }
    plan->count = count;
    plan->bytes = bytes;
    plan->keep_gaps = keep_gaps;
    FSDPC_GOTO(copy_lists(plan, targets, bases), fail);
    if (device->i->plan_new) {
        FSDPC_GOTO(device->i->plan_new(device->context, plan), fail);
    }
    *out = plan;
    return FSDPC_OK;
fail:
    fsdpc_mem_free(plan->targets);
    fsdpc_mem_free(plan->bases);
    fsdpc_mem_free(plan);
    return status;
}

void
fsdpc_device_pack_plan_free(fsdpc_device *device, fsdpc_pack_plan *plan)
{
    if (!plan) {
        return;
    }
    if (device->i->plan_free) {
        device->i->plan_free(device->context, plan);
    }
    fsdpc_mem_free(plan->targets);
    fsdpc_mem_free(plan->bases);
    fsdpc_mem_free(plan);
}

/* Checks one source. The pack functions of devices rely on this check. */
static int
check_source(const fsdpc_pack_target *target, const fsdpc_pack_source *source, int index,
             double scale)
{
    const bool floats = fsdpc_dtype_is_float(target->dtype) && fsdpc_dtype_is_float(source->dtype);
    int64_t numel = 1;
    if (!source->data) {
        return FSDPC_OK;
    }
    if (!floats && (target->dtype != FSDPC_BYTES || source->dtype != FSDPC_BYTES || scale != 1.0)) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "pack: source %d is %s, its target %s, the scale %g: only floats are "
                           "converted or scaled",
                           index, fsdpc_dtype_name(source->dtype), fsdpc_dtype_name(target->dtype),
                           scale);
    }
    if (!source->strides) {
        return FSDPC_OK;
    }
    if (source->ndim < 0 || source->ndim > FSDPC_KERNEL_MAX_DIMS) {
        return fsdpc_error(FSDPC_E_INVAL,
                           "pack: source %d has %d dimensions, at most %d are supported", index,
                           source->ndim, FSDPC_KERNEL_MAX_DIMS);
    }
    for (int d = 0; d < source->ndim; d++) {
        numel *= source->shape[d];
    }
    return numel == target->n
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "pack: source %d has %lld elements, its target %lld",
                             index, (long long)numel, (long long)target->n);
}

static int
pack_one(fsdpc_device *device, char *dst, const fsdpc_pack_target *target,
         const fsdpc_pack_source *source, double scale)
{
    if (!source->data) {
        return fsdpc_device_zero(device, dst, (size_t)target->n * fsdpc_dtype_bytes(target->dtype));
    }
    if (!source->strides) {
        return fsdpc_device_cast(device, dst, target->dtype, source->data, source->dtype, target->n,
                                 scale);
    }
    return fsdpc_device_pack(device, dst, target->dtype, source->data, source->dtype, source->ndim,
                             source->shape, source->strides, scale);
}

/* Writes dst = base + src * scale. Each sum is made in the base's dtype, so that dst is rounded only once. */
static int
add_blocks(fsdpc_device *device, char *dst, const fsdpc_pack_target *target, const char *base,
           fsdpc_dtype type, const fsdpc_pack_source *source, double scale)
{
    int status = FSDPC_OK;
    const size_t wide = fsdpc_dtype_bytes(type);
    void *block = fsdpc_mem_calloc(ADD_ITEMS, wide);
    if (!block) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory to add tensors");
    }
    for (int64_t at = 0; at < target->n; at += ADD_ITEMS) {
        const int64_t n = target->n - at < ADD_ITEMS ? target->n - at : ADD_ITEMS;
        const size_t i = (size_t)at;
        FSDPC_GOTO(fsdpc_device_cast(device, block, type, base + i * wide, type, n, 1.0), done);
        FSDPC_GOTO(fsdpc_device_accumulate(device, block, type,
                                           (const char *)source->data +
                                               i * fsdpc_dtype_bytes(source->dtype),
                                           source->dtype, n, scale),
                   done);
        FSDPC_GOTO(fsdpc_device_cast(device, dst + i * fsdpc_dtype_bytes(target->dtype),
                                     target->dtype, block, type, n, 1.0),
                   done);
    }
done:
    fsdpc_mem_free(block);
    return status;
}

static int
add_contiguous(fsdpc_device *device, char *dst, const fsdpc_pack_target *target, const char *base,
               fsdpc_dtype type, const fsdpc_pack_source *source, double scale)
{
    if (dst == base && target->dtype == type) {
        return source->data ? fsdpc_device_accumulate(device, dst, type, source->data,
                                                      source->dtype, target->n, scale)
                            : FSDPC_OK;
    }
    return source->data ? add_blocks(device, dst, target, base, type, source, scale)
                        : fsdpc_device_cast(device, dst, target->dtype, base, type, target->n, 1.0);
}

/* Writes dst = base + src * scale. A strided source is first packed into scratch memory. */
static int
add_one(fsdpc_device *device, char *dst, const fsdpc_pack_target *target, const char *base,
        fsdpc_dtype type, const fsdpc_pack_source *source, double scale)
{
    int status = FSDPC_OK;
    const size_t bytes = (size_t)target->n * fsdpc_dtype_bytes(source->dtype);
    void *packed = NULL;
    if (!source->data || !source->strides || target->n == 0) {
        return add_contiguous(device, dst, target, base, type, source, scale);
    }
    FSDPC_TRY(fsdpc_device_alloc(device, bytes, &packed));
    FSDPC_GOTO(fsdpc_device_pack(device, packed, source->dtype, source->data, source->dtype,
                                 source->ndim, source->shape, source->strides, 1.0),
               done);
    const fsdpc_pack_source flat = {.data = packed, .dtype = source->dtype};
    FSDPC_GOTO(add_contiguous(device, dst, target, base, type, &flat, scale), done);
done:
    fsdpc_device_free(device, packed, bytes);
    return status;
}

static int
zero_gap(fsdpc_device *device, const fsdpc_pack_plan *plan, char *buffer, size_t begin, size_t end)
{
    return plan->keep_gaps ? FSDPC_OK : fsdpc_device_zero(device, buffer + begin, end - begin);
}

static int
pack_each(fsdpc_device *device, const fsdpc_pack_plan *plan, char *buffer, const char *base,
          const fsdpc_pack_source *sources, double scale)
{
    size_t end = 0;
    for (int i = 0; i < plan->count; i++) {
        const fsdpc_pack_target *target = &plan->targets[i];
        FSDPC_TRY(zero_gap(device, plan, buffer, end, target->offset));
        FSDPC_TRY(sources[i].add
                      ? add_one(device, buffer + target->offset, target,
                                base + plan->bases[i].offset, plan->bases[i].dtype, &sources[i],
                                scale)
                      : pack_one(device, buffer + target->offset, target, &sources[i], scale));
        end = target->offset + (size_t)target->n * fsdpc_dtype_bytes(target->dtype);
    }
    return zero_gap(device, plan, buffer, end, plan->bytes);
}

static int
check_adding(const fsdpc_pack_plan *plan, const void *base, int index)
{
    return base && plan->bases
               ? FSDPC_OK
               : fsdpc_error(FSDPC_E_INVAL, "pack: source %d is to be added, but it has no base",
                             index);
}

int
fsdpc_device_pack_onto(fsdpc_device *device, const fsdpc_pack_plan *plan, void *buffer,
                       const void *base, const fsdpc_pack_source *sources, double scale)
{
    if (plan->bytes == 0) {
        return FSDPC_OK;
    }
    if (!buffer || (plan->count && !sources)) {
        return fsdpc_error(FSDPC_E_INVAL, "pack: the buffer or the list of sources is NULL");
    }
    for (int i = 0; i < plan->count; i++) {
        FSDPC_TRY(check_source(&plan->targets[i], &sources[i], i, scale));
        FSDPC_TRY(sources[i].add ? check_adding(plan, base, i) : FSDPC_OK);
    }
    return device->i->pack_onto
               ? device->i->pack_onto(device->context, plan, buffer, base, sources, scale)
               : pack_each(device, plan, buffer, base, sources, scale);
}
