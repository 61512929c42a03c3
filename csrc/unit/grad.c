/* Sums of a unit's gradients, and the operations on them after a backward: norm, scale, set.
 *
 * [Note: divided once] Gradients are divided by `divide` behind their last sum, which is the sum over the shard
 * group, or over replicas if there are any: no partial sum is rounded after a division.
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

double
fsdpc_grad_last_scale(const fsdpc_unit *unit)
{
    return 1.0 / unit->divide;
}

struct fsdpc_grad_target
fsdpc_grad_target(fsdpc_unit *unit)
{
    return unit->replicate
               ? (struct fsdpc_grad_target){unit->partial, &unit->grads.partial_any, 1.0}
               : (struct fsdpc_grad_target){unit->grad, &unit->grads.add,
                                            fsdpc_grad_last_scale(unit)};
}

static size_t
own_piece(const fsdpc_unit *unit, const fsdpc_segment *seg)
{
    return seg->reduce_offset +
           (size_t)seg->piece_numel * (size_t)unit->rank * fsdpc_dtype_bytes(seg->reduce);
}

static int
sum_segment(fsdpc_unit *unit, const fsdpc_segment *seg, const void *const *pieces, int count)
{
    const struct fsdpc_grad_target to = fsdpc_grad_target(unit);
    return fsdpc_device_reduce(unit->device, (char *)to.sum + seg->grad_offset, seg->accumulate,
                               pieces, count, seg->reduce, seg->piece_numel, to.scale, *to.add);
}

int
fsdpc_grad_sum(fsdpc_unit *unit, const void *const *sources, int count)
{
    const fsdpc_layout *layout = unit->layout;
    const void *pieces[FSDPC_SHM_MAX_RANKS];
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable) {
            continue;
        }
        for (int r = 0; r < count; r++) {
            pieces[r] = sources[r] ? (const char *)sources[r] + own_piece(unit, seg) : NULL;
        }
        FSDPC_TRY(sum_segment(unit, seg, pieces, count));
    }
    *fsdpc_grad_target(unit).add = true;
    return FSDPC_OK;
}

/* Pieces of one segment in the order of ranks. */
static void
list_landed(const fsdpc_unit *unit, const char *own, const char *landing, size_t stride,
            const void **pieces)
{
    for (int r = 0, at = 0; r < unit->layout->world; r++) {
        pieces[r] = r == unit->rank ? own : landing + stride * (size_t)at++;
    }
}

int
fsdpc_grad_sum_landed(fsdpc_unit *unit, const void *own, const char *landing)
{
    int status = FSDPC_OK;
    const fsdpc_layout *layout = unit->layout;
    const size_t world = (size_t)layout->world, segments = (size_t)layout->segment_count;
    if (!landing) {
        return fsdpc_grad_sum(unit, &own, 1);
    }
    const void **pieces = fsdpc_mem_calloc(world, sizeof *pieces);
    size_t *offsets = fsdpc_mem_calloc(segments, sizeof *offsets);
    if (!pieces || !offsets) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the sums of unit %s", unit->name),
                   done);
    }
    const size_t stride = fsdpc_footprint_landing(layout, offsets);
    for (size_t s = 0; s < segments; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->trainable) {
            list_landed(unit, (const char *)own + own_piece(unit, seg), landing + offsets[s],
                        stride, pieces);
            FSDPC_GOTO(sum_segment(unit, seg, pieces, layout->world), done);
        }
    }
    *fsdpc_grad_target(unit).add = true;
done:
    fsdpc_mem_free(pieces);
    fsdpc_mem_free(offsets);
    return status;
}

int
fsdpc_unit_take_sums(fsdpc_unit *unit, const fsdpc_tensor *sums)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        if (seg->trainable) {
            FSDPC_TRY(fsdpc_device_reduce(unit->device, (char *)unit->grad + seg->grad_offset,
                                          seg->accumulate, &sums[s].data, 1, sums[s].dtype,
                                          seg->piece_numel, 1.0, unit->grads.add));
        }
    }
    unit->grads.add = true;
    return fsdpc_unit_touch(unit, FSDPC_GRAD);
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
        FSDPC_TRY(fsdpc_device_norm2(unit->shard_device, own, dtype, length, &one));
        if (p != 2.0) {
            FSDPC_TRY(fsdpc_device_norm_p(unit->shard_device, own, dtype, length, p, &one.sum));
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
        FSDPC_TRY(fsdpc_device_scale(unit->shard_device, own, fsdpc_unit_grad_dtype(unit, i),
                                     length, factor));
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
    FSDPC_TRY(fsdpc_device_zero(unit->shard_device, acc, (size_t)span.length * item));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    int64_t length;
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_zero(unit->shard_device, out,
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
    FSDPC_TRY(fsdpc_device_scale(unit->shard_device, acc, seg->accumulate, span.length, factor));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    int64_t length;
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_scale(unit->shard_device, out, seg->storage, length, factor);
}

static char *
shard_sum(const fsdpc_unit *unit, int param, int64_t *length)
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
    char *acc = shard_sum(unit, param, &length);
    FSDPC_TRY(
        fsdpc_device_cast(unit->shard_device, acc, seg->accumulate, values, dtype, length, 1.0));
    if (!unit->grad_out) {
        return FSDPC_OK;
    }
    void *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_cast(unit->shard_device, out, seg->storage, values, dtype, length, 1.0);
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
    char *acc = shard_sum(unit, param, &length);
    const char *out = fsdpc_unit_grad_part(unit, param, &length);
    return fsdpc_device_refresh(unit->shard_device, acc, seg->accumulate, out, seg->storage,
                                length);
}
