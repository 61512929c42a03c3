/* Finds parameters and gradients in a unit's memory, and allocates the memory of its gradients. */
#include "unit/unit_impl.h"

#include "base/status.h"
#include "comm/flight.h"
#include "unit/grad_slots.h"

char *
fsdpc_unit_grad_out(const fsdpc_unit *unit, int segment, fsdpc_dtype *dtype)
{
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    *dtype = unit->grad_out ? seg->storage : seg->accumulate;
    return unit->grad_out ? (char *)unit->grad_out + seg->shard_offset
                          : (char *)unit->grad + seg->grad_offset;
}

char *
fsdpc_unit_shard_piece(const fsdpc_unit *unit, enum fsdpc_which which, int segment, size_t *item)
{
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    fsdpc_dtype dtype = seg->storage;
    char *piece = which == FSDPC_MASTER ? (char *)unit->master + seg->shard_offset
                                        : fsdpc_unit_grad_out(unit, segment, &dtype);
    *item = fsdpc_dtype_bytes(dtype);
    return piece;
}

static void *
part(const fsdpc_unit *unit, enum fsdpc_which which, int param, int64_t *length)
{
    fsdpc_span span = fsdpc_layout_span(unit->layout, param, unit->rank);
    *length = span.length;
    size_t item;
    char *piece = fsdpc_unit_shard_piece(unit, which, unit->layout->params[param].segment, &item);
    return piece + (size_t)span.piece_begin * item;
}

void *
fsdpc_unit_master_part(const fsdpc_unit *unit, int param, int64_t *length)
{
    return part(unit, FSDPC_MASTER, param, length);
}

void *
fsdpc_unit_grad_part(const fsdpc_unit *unit, int param, int64_t *length)
{
    return part(unit, FSDPC_GRAD, param, length);
}

fsdpc_dtype
fsdpc_unit_grad_dtype(const fsdpc_unit *unit, int param)
{
    fsdpc_dtype dtype;
    fsdpc_unit_grad_out(unit, unit->layout->params[param].segment, &dtype);
    return dtype;
}

static int
senders_of(const fsdpc_unit *unit)
{
    const bool travels =
        unit->layout->world > 1 && (fsdpc_device_get_caps(unit->device)->asynchronous ||
                                    !fsdpc_comm_get_caps(unit->shard)->one_memory);
    return travels ? fsdpc_comm_senders(unit->shard) : 0;
}

/* Returns the footprint's option `replicas`. unit_replicas.c explains how sums over replicas travel. */
static int
replicas_of(const fsdpc_unit *unit)
{
    const bool queued = fsdpc_device_get_caps(unit->device)->asynchronous;
    return !unit->replicate                               ? 0
           : queued || !fsdpc_comm_flies(unit->replicate) ? 1
                                                          : fsdpc_comm_world(unit->replicate);
}

void
fsdpc_unit_plan(fsdpc_unit *unit)
{
    size_t page = fsdpc_shm_page_bytes();
    fsdpc_footprint_options options = {
        .replicas = replicas_of(unit),
        .offload = unit->offload,
        .foreign = unit->foreign,
        .senders = senders_of(unit),
        .to_all = fsdpc_device_get_caps(unit->device)->asynchronous,
        .range_grain = fsdpc_device_get_caps(unit->device)->host_memory
                           ? page
                           : fsdpc_device_grain(unit->device),
        .page_bytes = page,
    };
    unit->footprint = fsdpc_footprint_of(unit->layout, &options);
}

int
fsdpc_unit_make_grads(fsdpc_unit *unit)
{
    fsdpc_unit_plan(unit); /* parameters may have been unfrozen since the last call */
    const fsdpc_footprint *print = &unit->footprint;
    FSDPC_TRY(fsdpc_unit_shard_alloc(unit, print->grad_bytes, &unit->grad));
    if (print->grad_out_bytes) {
        FSDPC_TRY(fsdpc_unit_shard_alloc(unit, print->grad_out_bytes, &unit->grad_out));
    }
    if (unit->replicate) {
        FSDPC_TRY(fsdpc_device_alloc(unit->device, print->partial_bytes, &unit->partial));
    }
    return FSDPC_OK;
}

int
fsdpc_unit_discard_grads(fsdpc_unit *unit)
{
    if (unit->slots) {
        return fsdpc_unit_leave_slot(unit);
    }
    if (unit->offload) { /* pinned memory stays */
        return FSDPC_OK;
    }
    if (unit->grad) {
        FSDPC_TRY(fsdpc_device_discard(unit->device, unit->grad, unit->footprint.grad_bytes));
    }
    return unit->grad_out
               ? fsdpc_device_discard(unit->device, unit->grad_out, unit->footprint.grad_out_bytes)
               : FSDPC_OK;
}
