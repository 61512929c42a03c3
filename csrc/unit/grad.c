/* The gradient side of a unit: pack, sum, accumulate, norm.
 *
 * Gradients of one backward travel as one buffer with a layout that never changes: a parameter
 * without a gradient contributes zeros and an unset bit, so that sizes and counts of what is sent
 * do not depend on the data, and a parameter that no rank used keeps having no gradient.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

static const fsdpc_segment *
segment_of(const fsdpc_unit *unit, int param)
{
    return &unit->layout->segments[unit->layout->params[param].segment];
}

char *
fsdpc_grad_local_at(const fsdpc_unit *unit, int param)
{
    const fsdpc_param_place *place = &unit->layout->params[param];
    size_t item = fsdpc_dtype_bytes(segment_of(unit, param)->accumulate);
    return (char *)unit->local + unit->local_offset[place->segment] + (size_t)place->offset * item;
}

void
fsdpc_grad_lay_local(fsdpc_unit *unit)
{
    size_t bytes = 0;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        unit->local_offset[s] = bytes;
        if (seg->trainable) {
            bytes +=
                (size_t)seg->piece_numel * (size_t)unit->world * fsdpc_dtype_bytes(seg->accumulate);
        }
    }
    unit->local_bytes = bytes;
}

int
fsdpc_grad_make_local(fsdpc_unit *unit)
{
    if (unit->local) {
        return FSDPC_OK;
    }
    fsdpc_grad_lay_local(unit);
    return fsdpc_device_alloc(unit->device, unit->local_bytes, &unit->local);
}

/* One launch instead of one per parameter. */
static bool
queues(const fsdpc_unit *unit)
{
    return fsdpc_device_get_caps(unit->device)->asynchronous;
}

static int
pack_one(fsdpc_unit *unit, int param, const fsdpc_tensor *grad, void *dst, fsdpc_dtype dtype,
         double scale)
{
    int64_t numel = unit->layout->params[param].numel;
    if (grad->contiguous) {
        return fsdpc_device_cast(unit->device, dst, dtype, grad->data, grad->dtype, numel, scale);
    }
    return fsdpc_device_pack(unit->device, dst, dtype, grad->data, grad->dtype, grad->ndim,
                             grad->shape, grad->strides, scale);
}

/* acc (accumulate dtype, packed) += gradient. A strided gradient goes through a packed copy. */
static int
add_one(fsdpc_unit *unit, int param, const fsdpc_tensor *grad, void *acc, double scale)
{
    int status = FSDPC_OK;
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t numel = unit->layout->params[param].numel;
    if (grad->contiguous) {
        return fsdpc_device_accumulate(unit->device, acc, seg->accumulate, grad->data, grad->dtype,
                                       numel, scale);
    }
    size_t bytes = (size_t)numel * fsdpc_dtype_bytes(seg->accumulate);
    void *packed = NULL;
    FSDPC_GOTO(fsdpc_device_alloc(unit->device, bytes, &packed), done);
    FSDPC_GOTO(pack_one(unit, param, grad, packed, seg->accumulate, 1.0), done);
    FSDPC_GOTO(fsdpc_device_accumulate(unit->device, acc, seg->accumulate, packed, seg->accumulate,
                                       numel, scale),
               done);
done:
    fsdpc_device_free(unit->device, packed, bytes);
    return status;
}

int
fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    if (!grads) {
        return FSDPC_OK;
    }
    if (queues(unit)) {
        return fsdpc_grad_queue_keep(unit, grads);
    }
    FSDPC_TRY(fsdpc_grad_make_local(unit));
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (!grads[i].data || unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        char *acc = fsdpc_grad_local_at(unit, i);
        if (unit->local_used[i]) {
            FSDPC_TRY(add_one(unit, i, &grads[i], acc, 1.0));
        } else {
            FSDPC_TRY(pack_one(unit, i, &grads[i], acc, segment_of(unit, i)->accumulate, 1.0));
        }
        unit->local_used[i] = 1;
        unit->local_any = true;
    }
    return FSDPC_OK;
}

void
fsdpc_grad_drop_local(fsdpc_unit *unit, int param)
{
    unit->local_used[param] = 0;
}

/* Reduce buffers serve many units in turn. What an earlier one left between the parameters must not
 * come into the gradient: a view of a whole segment shows it. */
static int
zero_padding(fsdpc_unit *unit, int segment, char *buffer)
{
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    size_t item = fsdpc_dtype_bytes(seg->reduce);
    char *piece = buffer + seg->reduce_offset;
    int64_t at = 0;
    for (int i = 0; i < unit->layout->param_count; i++) {
        const fsdpc_param_place *place = &unit->layout->params[i];
        if (place->segment == segment) {
            FSDPC_TRY(fsdpc_device_zero(unit->device, piece + (size_t)at * item,
                                        (size_t)(place->offset - at) * item));
            at = place->offset + place->numel;
        }
    }
    return fsdpc_device_zero(unit->device, piece + (size_t)at * item,
                             (size_t)(seg->piece_numel * unit->world - at) * item);
}

int
fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits)
{
    static const fsdpc_tensor absent;
    if (queues(unit)) {
        return fsdpc_grad_queue_pack(unit, grads, buffer, bits);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        if (unit->layout->segments[s].trainable) {
            FSDPC_TRY(zero_padding(unit, s, buffer));
        }
    }
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        const fsdpc_segment *seg = segment_of(unit, i);
        const fsdpc_tensor *grad = grads ? &grads[i] : &absent;
        int64_t numel = unit->layout->params[i].numel;
        char *dst = (char *)buffer + fsdpc_layout_reduce_offset(unit->layout, i);
        bits[i] = grad->data || unit->local_used[i];
        if (unit->local_used[i]) {
            char *acc = fsdpc_grad_local_at(unit, i);
            if (grad->data) {
                FSDPC_TRY(add_one(unit, i, grad, acc, 1.0));
            }
            FSDPC_TRY(fsdpc_device_cast(unit->device, dst, seg->reduce, acc, seg->accumulate, numel,
                                        1.0));
            unit->local_used[i] = 0;
        } else if (grad->data) {
            FSDPC_TRY(pack_one(unit, i, grad, dst, seg->reduce, 1.0));
        } else {
            FSDPC_TRY(fsdpc_device_zero(unit->device, dst,
                                        (size_t)numel * fsdpc_dtype_bytes(seg->reduce)));
        }
    }
    unit->local_any = false;
    return FSDPC_OK;
}

/* The one factor stands behind the last sum: with replicas that is theirs (tree_backward.c). */
static double
first_scale(const fsdpc_unit *unit)
{
    return unit->replicate ? 1.0 : unit->scale;
}

int
fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count)
{
    const fsdpc_layout *layout = unit->layout;
    char *target = unit->replicate ? unit->partial : unit->grad;
    bool add = unit->replicate ? unit->partial_any : unit->add;
    const void *pieces[FSDPC_SHM_MAX_RANKS];
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable) {
            continue;
        }
        size_t skip = seg->reduce_offset + (size_t)seg->piece_numel * (size_t)unit->rank *
                                               fsdpc_dtype_bytes(seg->reduce);
        for (int r = 0; r < count; r++) {
            pieces[r] = sources[r] ? (const char *)sources[r] + skip : NULL;
        }
        FSDPC_TRY(fsdpc_device_reduce(unit->device, target + seg->grad_offset, seg->accumulate,
                                      pieces, count, seg->reduce, seg->piece_numel,
                                      first_scale(unit), add));
    }
    if (unit->replicate) {
        unit->partial_any = true;
    } else {
        unit->add = true;
    }
    return FSDPC_OK;
}

int
fsdpc_unit_take_sums(fsdpc_unit *unit, const fsdpc_tensor *sums)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        if (seg->trainable) {
            FSDPC_TRY(fsdpc_device_reduce(unit->device, (char *)unit->grad + seg->grad_offset,
                                          seg->accumulate, &sums[s].data, 1, sums[s].dtype,
                                          seg->piece_numel, 1.0, unit->add));
        }
    }
    unit->add = true;
    return fsdpc_unit_touch(unit, FSDPC_GRAD);
}

int
fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits)
{
    if (queues(unit)) {
        return fsdpc_grad_queue_direct(unit, grads, bits);
    }
    char *target = unit->replicate ? unit->partial : unit->grad;
    bool add = unit->replicate ? unit->partial_any : unit->add;
    for (int i = 0; i < unit->layout->param_count; i++) {
        const fsdpc_param_place *place = &unit->layout->params[i];
        if (place->trainable_index < 0) {
            continue;
        }
        const fsdpc_segment *seg = segment_of(unit, i);
        size_t item = fsdpc_dtype_bytes(seg->accumulate);
        char *acc = target + seg->grad_offset + (size_t)place->offset * item;
        bool have = grads && grads[i].data;
        bits[i] |= have || unit->local_used[i];
        bool add_this = add;
        if (unit->local_used[i]) {
            FSDPC_TRY((add_this ? fsdpc_device_accumulate : fsdpc_device_cast)(
                unit->device, acc, seg->accumulate, fsdpc_grad_local_at(unit, i), seg->accumulate,
                place->numel, first_scale(unit)));
            unit->local_used[i] = 0;
            add_this = true;
        }
        if (have && add_this) {
            FSDPC_TRY(add_one(unit, i, &grads[i], acc, first_scale(unit)));
        } else if (have) {
            FSDPC_TRY(pack_one(unit, i, &grads[i], acc, seg->accumulate, first_scale(unit)));
        } else if (!add_this) {
            FSDPC_TRY(fsdpc_device_zero(unit->device, acc, (size_t)place->numel * item));
        }
    }
    unit->local_any = false;
    if (unit->replicate) {
        unit->partial_any = true;
    } else {
        unit->add = true;
    }
    return FSDPC_OK;
}

int
fsdpc_unit_grad_norm(fsdpc_unit *unit, const uint8_t *mask, double p, fsdpc_norm *out)
{
    *out = (fsdpc_norm){0};
    FSDPC_TRY(fsdpc_unit_settle(unit));
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (!mask[i] || unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        int64_t length;
        const void *own = fsdpc_unit_grad_part(unit, i, &length);
        fsdpc_dtype dtype = fsdpc_unit_grad_dtype(unit, i);
        fsdpc_norm one;
        FSDPC_TRY(fsdpc_device_norm2(unit->own_device, own, dtype, length, &one));
        if (p != 2.0) {
            FSDPC_TRY(fsdpc_device_norm_p(unit->own_device, own, dtype, length, p, &one.sum));
        }
        out->sum += one.sum;
        out->nonfinite |= one.nonfinite;
        /* Written so that a NaN on either side stays. */
        out->max = one.max > out->max || one.max != one.max ? one.max : out->max;
    }
    return FSDPC_OK;
}

int
fsdpc_unit_scale_grads(fsdpc_unit *unit, const uint8_t *mask, double factor)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    for (int i = 0; i < unit->layout->param_count; i++) {
        if (!mask[i] || unit->layout->params[i].trainable_index < 0) {
            continue;
        }
        int64_t length;
        void *own = fsdpc_unit_grad_part(unit, i, &length);
        FSDPC_TRY(fsdpc_device_scale(unit->own_device, own, fsdpc_unit_grad_dtype(unit, i), length,
                                     factor));
    }
    return FSDPC_OK;
}

int
fsdpc_unit_zero_grad(fsdpc_unit *unit, int param)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    size_t item = fsdpc_dtype_bytes(seg->accumulate);
    char *acc = (char *)unit->grad + seg->grad_offset + (size_t)span.piece_begin * item;
    FSDPC_TRY(fsdpc_device_zero(unit->own_device, acc, (size_t)span.length * item));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    int64_t length;
    void *seen = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_zero(unit->own_device, seen,
                             (size_t)length * fsdpc_dtype_bytes(seg->storage));
}

int
fsdpc_unit_scale_grad(fsdpc_unit *unit, int param, double factor)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    char *acc = (char *)unit->grad + seg->grad_offset +
                (size_t)span.piece_begin * fsdpc_dtype_bytes(seg->accumulate);
    FSDPC_TRY(fsdpc_device_scale(unit->own_device, acc, seg->accumulate, span.length, factor));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    int64_t length;
    void *seen = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_scale(unit->own_device, seen, seg->storage, length, factor);
}

static char *
own_sum(const fsdpc_unit *unit, int param, int64_t *length)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    *length = span.length;
    return (char *)unit->grad + seg->grad_offset +
           (size_t)span.piece_begin * fsdpc_dtype_bytes(seg->accumulate);
}

int
fsdpc_unit_take_grad(fsdpc_unit *unit, int param, const void *values, fsdpc_dtype dtype)
{
    FSDPC_TRY(fsdpc_unit_settle(unit));
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    char *acc = own_sum(unit, param, &length);
    FSDPC_TRY(
        fsdpc_device_cast(unit->own_device, acc, seg->accumulate, values, dtype, length, 1.0));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    void *seen = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_cast(unit->own_device, seen, seg->storage, values, dtype, length, 1.0);
}

int
fsdpc_unit_reload_grad(fsdpc_unit *unit, int param)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    int64_t length;
    FSDPC_TRY(fsdpc_unit_settle(unit));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    char *acc = own_sum(unit, param, &length);
    const char *seen = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_refresh(unit->own_device, acc, seg->accumulate, seen, seg->storage, length);
}
