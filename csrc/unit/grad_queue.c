/* The gradient side of a unit on a device that queues: one launch for all of a unit's gradients.
 *
 * Where everything goes never changes, so it is laid down once in plans: into the reduce buffer,
 * into `local` (no_sync), straight into the shard gradient (one rank), and from the summed pieces
 * into it. What waits in `local` is the base that a plan adds to.
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

struct fsdpc_grad_queue {
    fsdpc_pack_plan *send;   /* trainable parameters into a reduce buffer, on top of `local` */
    fsdpc_pack_plan *keep;   /* into `local`; made when it is first needed */
    fsdpc_pack_plan *direct; /* one rank: into the shard gradient */
    fsdpc_pack_plan *wide;   /* one rank, offloaded: into a buffer like the shard gradient */
    fsdpc_pack_plan *sum; /* trainable segments into the shard gradient, where there are several */
    fsdpc_pack_source *sources;
    int *order;   /* the trainable parameters in the order of their places, segment by segment */
    int segments; /* trainable */
};

static const fsdpc_segment *
segment_of(const fsdpc_unit *unit, int param)
{
    return &unit->layout->segments[unit->layout->params[param].segment];
}

/* --- plans ------------------------------------------------------------------------------------ */

enum plan_kind { SEND, KEEP, DIRECT, WIDE };

static void
place(const fsdpc_unit *unit, int param, enum plan_kind kind, fsdpc_pack_target *target,
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
        place(unit, unit->queue->order[count], kind, &targets[count], &bases[count]);
    }
    /* Reduce buffers serve many units: what lies between parameters there must become zero. */
    FSDPC_GOTO(fsdpc_device_pack_plan_onto(unit->device, targets, bases, count, bytes,
                                           kind == KEEP || kind == DIRECT, out),
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
    FSDPC_GOTO(fsdpc_device_pack_plan_onto(unit->device, targets, bases, count,
                                           unit->layout->grad_bytes, true, out),
               done);
done:
    fsdpc_mem_free(targets);
    fsdpc_mem_free(bases);
    return status;
}

static void
list_params(const fsdpc_layout *layout, int *order)
{
    for (int s = 0; s < layout->segment_count; s++) {
        for (int i = 0; i < layout->param_count; i++) {
            if (layout->params[i].segment == s && layout->params[i].trainable_index >= 0) {
                *order++ = i;
            }
        }
    }
}

static int
make_plans(fsdpc_unit *unit, struct fsdpc_grad_queue *queue)
{
    const fsdpc_layout *layout = unit->layout;
    for (int s = 0; s < layout->segment_count; s++) {
        queue->segments += layout->segments[s].trainable;
    }
    int most =
        layout->trainable_count > queue->segments ? layout->trainable_count : queue->segments;
    queue->sources = fsdpc_mem_calloc((size_t)most + 1, sizeof *queue->sources);
    queue->order = fsdpc_mem_calloc((size_t)layout->trainable_count + 1, sizeof *queue->order);
    if (!queue->sources || !queue->order) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the gradients of unit %s", unit->name);
    }
    if (layout->trainable_count == 0) {
        return FSDPC_OK;
    }
    list_params(layout, queue->order);
    fsdpc_grad_lay_local(unit);
    FSDPC_TRY(plan_params(unit, SEND, layout->reduce_bytes, &queue->send));
    if (unit->world == 1) {
        FSDPC_TRY(plan_params(unit, DIRECT, layout->grad_bytes, &queue->direct));
        FSDPC_TRY(plan_params(unit, WIDE, layout->grad_bytes, &queue->wide));
    }
    return queue->segments > 1 ? plan_segments(unit, &queue->sum) : FSDPC_OK;
}

int
fsdpc_grad_queue_open(fsdpc_unit *unit)
{
    if (unit->queue) {
        return FSDPC_OK;
    }
    unit->queue = fsdpc_mem_calloc(1, sizeof *unit->queue);
    if (!unit->queue) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the gradients of unit %s", unit->name);
    }
    int status = make_plans(unit, unit->queue);
    if (status != FSDPC_OK) {
        fsdpc_grad_queue_close(unit);
    }
    return status;
}

void
fsdpc_grad_queue_close(fsdpc_unit *unit)
{
    struct fsdpc_grad_queue *queue = unit->queue;
    if (!queue) {
        return;
    }
    fsdpc_device_pack_plan_free(unit->device, queue->send);
    fsdpc_device_pack_plan_free(unit->device, queue->keep);
    fsdpc_device_pack_plan_free(unit->device, queue->direct);
    fsdpc_device_pack_plan_free(unit->device, queue->wide);
    fsdpc_device_pack_plan_free(unit->device, queue->sum);
    fsdpc_mem_free(queue->sources);
    fsdpc_mem_free(queue->order);
    fsdpc_mem_free(queue);
    unit->queue = NULL;
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

int
fsdpc_grad_queue_keep(fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    bool any = false;
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    struct fsdpc_grad_queue *queue = unit->queue;
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = queue->order[k];
        queue->sources[k] = source_of(&grads[i]);
        queue->sources[k].add = unit->local_used[i];
        any = any || grads[i].data;
    }
    if (!any) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_grad_make_local(unit));
    if (!queue->keep) {
        FSDPC_TRY(plan_params(unit, KEEP, unit->local_bytes, &queue->keep));
    }
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, queue->keep, unit->local, unit->local,
                                     queue->sources, 1.0));
    for (int i = 0; i < unit->layout->param_count; i++) {
        unit->local_used[i] |= unit->layout->params[i].trainable_index >= 0 && grads[i].data;
    }
    unit->local_any = true;
    return FSDPC_OK;
}

static void
forget_local(fsdpc_unit *unit)
{
    memset(unit->local_used, 0, (size_t)unit->layout->param_count);
    unit->local_any = false;
}

static int
pack_with(fsdpc_unit *unit, const fsdpc_pack_plan *plan, const fsdpc_tensor *grads, void *buffer,
          uint8_t *bits)
{
    struct fsdpc_grad_queue *queue = unit->queue;
    if (!plan) {
        return FSDPC_OK;
    }
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = queue->order[k];
        queue->sources[k] = source_of(grads ? &grads[i] : NULL);
        queue->sources[k].add = unit->local_used[i];
        bits[i] = (grads && grads[i].data) || unit->local_used[i];
    }
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, plan, buffer, unit->local, queue->sources, 1.0));
    forget_local(unit);
    return FSDPC_OK;
}

int
fsdpc_grad_queue_pack(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits)
{
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    return pack_with(unit, unit->queue->send, grads, buffer, bits);
}

int
fsdpc_grad_queue_widen(fsdpc_unit *unit, const fsdpc_tensor *grads, void *buffer, uint8_t *bits)
{
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    return pack_with(unit, unit->queue->wide, grads, buffer, bits);
}

/* --- one rank ---------------------------------------------------------------------------------- */

/* What waits in `local` has taken the new gradients, too. */
static void
list_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, bool add, uint8_t *bits)
{
    for (int k = 0; k < unit->layout->trainable_count; k++) {
        const int i = unit->queue->order[k];
        fsdpc_pack_source *source = &unit->queue->sources[k];
        *source = source_of(grads && !unit->local_used[i] ? &grads[i] : NULL);
        if (unit->local_used[i]) {
            source->data = fsdpc_grad_local_at(unit, i);
            source->dtype = segment_of(unit, i)->accumulate;
        }
        source->add = add;
        bits[i] |= source->data != NULL;
    }
}

int
fsdpc_grad_queue_direct(fsdpc_unit *unit, const fsdpc_tensor *grads, uint8_t *bits)
{
    void *target = unit->replicate ? unit->partial : unit->grad;
    bool *any = unit->replicate ? &unit->partial_any : &unit->add;
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    if (!unit->queue->direct) {
        return FSDPC_OK;
    }
    if (unit->local_any && grads) {
        FSDPC_TRY(fsdpc_grad_queue_keep(unit, grads));
    }
    list_direct(unit, grads, *any, bits);
    FSDPC_TRY(fsdpc_device_pack_onto(unit->device, unit->queue->direct, target, target,
                                     unit->queue->sources, unit->replicate ? 1.0 : unit->scale));
    forget_local(unit);
    *any = true;
    return FSDPC_OK;
}

/* --- sums -------------------------------------------------------------------------------------- */

/* `pieces` in order of trainable segments; of the wide dtype, or of the segment's reduce dtype. */
static int
add_pieces(fsdpc_unit *unit, char *target, const char *buffer, bool wide, double scale, bool add)
{
    int count = 0;
    struct fsdpc_grad_queue *queue = unit->queue;
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        const fsdpc_dtype dtype = wide ? seg->accumulate : seg->reduce;
        const size_t skip =
            (size_t)seg->piece_numel * (size_t)unit->rank * fsdpc_dtype_bytes(dtype);
        const void *piece = buffer + (wide ? seg->grad_offset : seg->reduce_offset + skip);
        if (!seg->trainable) {
            continue;
        }
        if (queue->segments == 1) {
            return fsdpc_device_reduce(unit->device, target + seg->grad_offset, seg->accumulate,
                                       &piece, 1, dtype, seg->piece_numel, scale, add);
        }
        queue->sources[count++] = (fsdpc_pack_source){.data = piece, .dtype = dtype, .add = add};
    }
    return queue->sum ? fsdpc_device_pack_onto(unit->device, queue->sum, target, target,
                                               queue->sources, scale)
                      : FSDPC_OK;
}

int
fsdpc_grad_queue_sum(fsdpc_unit *unit, void *target, const void *buffer, bool wide, double scale,
                     bool add)
{
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    return add_pieces(unit, target, buffer, wide, scale, add);
}

int
fsdpc_grad_queue_replicas(fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_grad_queue_open(unit));
    FSDPC_TRY(add_pieces(unit, unit->grad, unit->partial, true, unit->scale, unit->add));
    unit->add = true;
    return FSDPC_OK;
}
