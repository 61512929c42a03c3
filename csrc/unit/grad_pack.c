/* Packs all gradients of a unit into a buffer by one call: one launch on a device that queues.
 *
 * Gradients of one backward are sent as one buffer with a constant layout: a parameter without a gradient
 * contributes zeros and an unset bit, so that the sizes of collectives do not depend on the data, and a
 * parameter that no rank used has no gradient afterwards.
 *
 * Pack plans keep this layout: one for the reduce buffer, one for `local` (no_sync), some for the shard
 * gradient (one rank), one for reduced pieces. A plan can add values of `local` or of the shard gradient.
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

struct fsdpc_grad_plans {
    fsdpc_pack_plan *send;   /* writes the sum of new gradients and `local` to a reduce buffer */
    fsdpc_pack_plan *keep;   /* adds new gradients to `local`; made when first needed */
    fsdpc_pack_plan *direct; /* one rank: adds gradients to the shard gradient */
    fsdpc_pack_plan *wide;   /* one rank, offloaded: to a buffer laid out like the shard gradient */
    fsdpc_pack_plan *sum;    /* several trainable segments: adds pieces to the shard gradient */
    fsdpc_pack_source *sources;
    int *order;   /* the trainable parameters in the order of their places, segment by segment */
    int segments; /* number of trainable segments */
};

static const fsdpc_segment *
segment_of(const fsdpc_unit *unit, int param)
{
    return &unit->layout->segments[unit->layout->params[param].segment];
}

/* --- local ------------------------------------------------------------------------------------ */

/* Returns where the gradient of `param` starts in `local`. */
static char *
local_at(const fsdpc_unit *unit, int param)
{
    const fsdpc_param_place *place = &unit->layout->params[param];
    size_t item = fsdpc_dtype_bytes(segment_of(unit, param)->accumulate);
    return (char *)unit->local + unit->local_offset[place->segment] + (size_t)place->offset * item;
}

int
fsdpc_grad_make_local(fsdpc_unit *unit)
{
    if (unit->local) {
        return FSDPC_OK;
    }
    unit->local_bytes = fsdpc_footprint_local(unit->layout, unit->local_offset);
    return fsdpc_device_alloc(unit->device, unit->local_bytes, &unit->local);
}

void
fsdpc_grad_drop_local(fsdpc_unit *unit, int param)
{
    unit->grads.local_used[param] = 0;
}

static void
forget_local(fsdpc_unit *unit)
{
    memset(unit->grads.local_used, 0, (size_t)unit->layout->param_count);
    unit->grads.local_any = false;
}

/* --- plans ------------------------------------------------------------------------------------ */

enum plan_kind { SEND, KEEP, DIRECT, WIDE };

static void
locate(const fsdpc_unit *unit, int param, enum plan_kind kind, fsdpc_pack_target *target,
       fsdpc_pack_base *base)
{
    const fsdpc_segment *seg = segment_of(unit, param);
    const fsdpc_param_place *own = &unit->layout->params[param];
    const size_t wide = (size_t)own->offset * fsdpc_dtype_bytes(seg->accumulate);
    const size_t local = unit->local_offset[own->segment] + wide;
    const size_t direct = seg->grad_offset + wide;
    target->n = own->numel;
    target->dtype = kind == SEND ? seg->reduce : seg->accumulate;
    target->offset = kind == SEND   ? fsdpc_layout_reduce_offset(unit->layout, param)
                     : kind == KEEP ? local
                                    : direct;
    base->dtype = seg->accumulate;
    base->offset = kind == DIRECT ? direct : local;
}

static int
plan_params(fsdpc_unit *unit, enum plan_kind kind, size_t bytes, fsdpc_pack_plan **out)
{
    int status = FSDPC_OK, count = 0;
    const size_t most = (size_t)unit->layout->trainable_count;
    fsdpc_pack_target *targets = fsdpc_mem_calloc(most, sizeof *targets);
    fsdpc_pack_base *bases = fsdpc_mem_calloc(most, sizeof *bases);
    if (!targets || !bases) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of unit %s", unit->name),
                   done);
    }
    for (; count < unit->layout->trainable_count; count++) {
        locate(unit, unit->plans->order[count], kind, &targets[count], &bases[count]);
    }
    /* Many units use the same reduce buffers and slots of gradients, so a plan must set the bytes between
     * parameters to zero. */
    FSDPC_GOTO(
        fsdpc_device_pack_plan(unit->device, targets, bases, count, bytes, kind == KEEP, out),
        done);
done:
    fsdpc_mem_free(targets);
    fsdpc_mem_free(bases);
    return status;
}

static int
plan_segments(fsdpc_unit *unit, fsdpc_pack_plan **out)
{
    int status = FSDPC_OK, count = 0;
    const size_t most = (size_t)unit->layout->segment_count;
    fsdpc_pack_target *targets = fsdpc_mem_calloc(most, sizeof *targets);
    fsdpc_pack_base *bases = fsdpc_mem_calloc(most, sizeof *bases);
    if (!targets || !bases) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of unit %s", unit->name),
                   done);
    }
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        if (seg->trainable) {
            targets[count] =
                (fsdpc_pack_target){seg->piece_numel, seg->grad_offset, seg->accumulate};
            bases[count++] = (fsdpc_pack_base){seg->grad_offset, seg->accumulate};
        }
    }
    FSDPC_GOTO(fsdpc_device_pack_plan(unit->device, targets, bases, count, unit->layout->grad_bytes,
                                      true, out),
               done);
done:
    fsdpc_mem_free(targets);
    fsdpc_mem_free(bases);
    return status;
}

static void
list_params(const fsdpc_layout *layout, int *order)
{
    for (int k = 0; k < layout->param_count; k++) {
        if (layout->params[layout->order[k]].trainable_index >= 0) {
            *order++ = layout->order[k];
        }
    }
}

static int
make_plans(fsdpc_unit *unit, struct fsdpc_grad_plans *plans)
{
    const fsdpc_layout *layout = unit->layout;
    for (int s = 0; s < layout->segment_count; s++) {
        plans->segments += layout->segments[s].trainable;
    }
    int most =
        layout->trainable_count > plans->segments ? layout->trainable_count : plans->segments;
    plans->sources = fsdpc_mem_calloc((size_t)most + 1, sizeof *plans->sources);
    plans->order = fsdpc_mem_calloc((size_t)layout->trainable_count + 1, sizeof *plans->order);
    if (!plans->sources || !plans->order) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the gradients of unit %s", unit->name);
    }
    if (layout->trainable_count == 0) {
        return FSDPC_OK;
    }
    list_params(layout, plans->order);
    unit->local_bytes = fsdpc_footprint_local(unit->layout, unit->local_offset);
    FSDPC_TRY(plan_params(unit, SEND, layout->reduce_bytes, &plans->send));
    if (unit->world == 1) {
        FSDPC_TRY(plan_params(unit, DIRECT, layout->grad_bytes, &plans->direct));
        FSDPC_TRY(plan_params(unit, WIDE, layout->grad_bytes, &plans->wide));
    }
    return plans->segments > 1 ? plan_segments(unit, &plans->sum) : FSDPC_OK;
}

int
fsdpc_grad_open(fsdpc_unit *unit)
{
    if (unit->plans) {
        return FSDPC_OK;
    }
    unit->plans = fsdpc_mem_calloc(1, sizeof *unit->plans);
    if (!unit->plans) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the gradients of unit %s", unit->name);
    }
    int status = make_plans(unit, unit->plans);
    if (status != FSDPC_OK) {
        fsdpc_grad_close(unit);
    }
    return status;
}

void
fsdpc_grad_close(fsdpc_unit *unit)
{
    struct fsdpc_grad_plans *plans = unit->plans;
    if (!plans) {
        return;
    }
    fsdpc_device_pack_plan_free(unit->device, plans->send);
    fsdpc_device_pack_plan_free(unit->device, plans->keep);
    fsdpc_device_pack_plan_free(unit->device, plans->direct);
    fsdpc_device_pack_plan_free(unit->device, plans->wide);
    fsdpc_device_pack_plan_free(unit->device, plans->sum);
    fsdpc_mem_free(plans->sources);
    fsdpc_mem_free(plans->order);
    fsdpc_mem_free(plans);
    unit->plans = NULL;
}

/* --- gradients --------------------------------------------------------------------------------- */

static fsdpc_pack_source
source_of(const fsdpc_tensor *grad)
{
    if (!grad || !grad->data) {
        return (fsdpc_pack_source){.dtype = FSDPC_F32};
    }
    return (fsdpc_pack_source){
        .data = grad->data,
        .dtype = grad->dtype,
        .ndim = grad->ndim,
        .shape = grad->shape,
        .strides = grad->contiguous ? NULL : grad->strides,
    };
}

/* True if this rank has a gradient of the parameter: a new one, or one in `local`. */
static bool
contributes(const fsdpc_unit *unit, const fsdpc_tensor *grads, int param)
{
    return (grads && grads[param].data) || unit->grads.local_used[param];
}

int
fsdpc_grad_keep_local(fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    bool any = false;
    FSDPC_TRY(fsdpc_grad_open(unit));
    struct fsdpc_grad_plans *plans = unit->plans;
    for (int k = 0; grads && k < unit->layout->trainable_count; k++) {
        const int i = plans->order[k];
        plans->sources[k] = source_of(&grads[i]);
        /* If there is no new gradient, adding zeros leaves `local` unchanged. */
        plans->sources[k].add = unit->grads.local_used[i] || !grads[i].data;
        any = any || grads[i].data;
    }
    if (!any) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_grad_make_local(unit));
    if (!plans->keep) {
        FSDPC_TRY(plan_params(unit, KEEP, unit->local_bytes, &plans->keep));
    }
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, plans->keep, unit->local, unit->local,
                                     plans->sources, 1.0));
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = plans->order[k];
        unit->grads.local_used[i] = contributes(unit, grads, i);
    }
    unit->grads.local_any = true;
    return FSDPC_OK;
}

static int
pack_with(fsdpc_unit *unit, const fsdpc_pack_plan *plan, const fsdpc_tensor *grads, void *buffer,
          uint8_t *bits)
{
    struct fsdpc_grad_plans *plans = unit->plans;
    if (!plan) {
        return FSDPC_OK;
    }
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = plans->order[k];
        plans->sources[k] = source_of(grads ? &grads[i] : NULL);
        plans->sources[k].add = unit->grads.local_used[i];
        bits[i] = contributes(unit, grads, i);
    }
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, plan, buffer, unit->local, plans->sources, 1.0));
    forget_local(unit);
    return FSDPC_OK;
}

int
fsdpc_grad_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits)
{
    FSDPC_TRY(fsdpc_grad_open(unit));
    return pack_with(unit, unit->plans->send, grads, buffer, bits);
}

int
fsdpc_grad_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits)
{
    FSDPC_TRY(fsdpc_grad_open(unit));
    return pack_with(unit, unit->plans->wide, grads, buffer, bits);
}

/* --- one rank ---------------------------------------------------------------------------------- */

/* Lists the gradients in `local`, and the new gradients of the other parameters. Returns true if some
 * parameter has both a local and a new gradient, so that the caller must add the new one separately. */
static bool
list_first(fsdpc_unit *unit, const fsdpc_tensor *grads, bool add, uint8_t *bits)
{
    bool left = false;
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = unit->plans->order[k];
        fsdpc_pack_source *source = &unit->plans->sources[k];
        *source = source_of(grads ? &grads[i] : NULL);
        if (unit->grads.local_used[i]) {
            left = left || source->data;
            *source = (fsdpc_pack_source){.data = local_at(unit, i),
                                          .dtype = segment_of(unit, i)->accumulate};
        }
        source->add = add;
        bits[i] |= contributes(unit, grads, i);
    }
    return left;
}

static void
list_left(fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = unit->plans->order[k];
        unit->plans->sources[k] = source_of(unit->grads.local_used[i] ? &grads[i] : NULL);
        unit->plans->sources[k].add = true;
    }
}

int
fsdpc_grad_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits)
{
    FSDPC_TRY(fsdpc_grad_open(unit));
    struct fsdpc_grad_plans *plans = unit->plans;
    if (!plans->direct) {
        return FSDPC_OK;
    }
    /* A GPU adds new gradients to `local` first, as fsdpc_grad_widen does for offloaded units, so that sums
     * do not depend on offload. The CPU adds in the order of arrival, as an unsharded model does. */
    if (unit->grads.local_any && grads && fsdpc_device_get_caps(unit->device)->asynchronous) {
        FSDPC_TRY(fsdpc_grad_keep_local(unit, grads));
        grads = NULL;
    }
    const struct fsdpc_grad_target to = fsdpc_grad_target(unit);
    const bool left = list_first(unit, grads, *to.add, bits);
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, plans->direct, to.sum, to.sum, plans->sources,
                                     to.scale));
    if (left) {
        list_left(unit, grads);
        FSDPC_TRY(fsdpc_device_pack_onto(unit->device, plans->direct, to.sum, to.sum,
                                         plans->sources, to.scale));
    }
    forget_local(unit);
    fsdpc_grad_note_sum(unit);
    return FSDPC_OK;
}

/* --- reduced pieces ---------------------------------------------------------------------------- */

/* Sums this rank's pieces in `buffer` into `target`. With `wide` the pieces have the accumulate dtype. */
static int
add_pieces(fsdpc_unit *unit, char *target, const char *buffer, bool wide, double scale, bool add)
{
    int count = 0;
    struct fsdpc_grad_plans *plans = unit->plans;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        const fsdpc_dtype dtype = wide ? seg->accumulate : seg->reduce;
        const size_t skip =
            (size_t)seg->piece_numel * (size_t)unit->rank * fsdpc_dtype_bytes(dtype);
        const void *piece = buffer + (wide ? seg->grad_offset : seg->reduce_offset + skip);
        if (!seg->trainable) {
            continue;
        }
        if (plans->segments == 1) {
            return fsdpc_device_reduce(unit->device, target + seg->grad_offset, seg->accumulate,
                                       &piece, 1, dtype, seg->piece_numel, scale, add);
        }
        plans->sources[count++] = (fsdpc_pack_source){.data = piece, .dtype = dtype, .add = add};
    }
    return plans->sum ? fsdpc_device_pack_onto(unit->device, plans->sum, target, target,
                                               plans->sources, scale)
                      : FSDPC_OK;
}

int
fsdpc_grad_take_pieces(fsdpc_unit *unit, const void *buffer, bool wide)
{
    FSDPC_TRY(fsdpc_grad_open(unit));
    FSDPC_TRY(
        add_pieces(unit, unit->grad, buffer, wide, fsdpc_grad_last_scale(unit), unit->grads.add));
    unit->grads.add = true;
    return FSDPC_OK;
}

int
fsdpc_grad_take_partial(fsdpc_unit *unit)
{
    unit->grads.partial_any = false;
    return fsdpc_grad_take_pieces(unit, unit->partial, true);
}

int
fsdpc_grad_widen_pieces(fsdpc_unit *unit, const void *buffer)
{
    FSDPC_TRY(fsdpc_grad_open(unit));
    return add_pieces(unit, unit->partial, buffer, false, 1.0, false);
}
