/* What every kind of exchange uses: the trace, the cast of a piece, poison, slots, errors. */
#include "exchange/exchange_impl.h"
#include "base/status.h"

void
fsdpc_exchange_note(fsdpc_exchange *x, enum fsdpc_trace_op op, const fsdpc_unit *unit,
                    uint64_t bytes)
{
    if (unit && unit->layout->param_count == 0) {
        return; /* it only marks a pass */
    }
    fsdpc_trace_add(x->trace, op, x->phase, x->step, unit ? x->trace_ids[unit->id] : -1, bytes);
}

int
fsdpc_exchange_poison(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        const fsdpc_segment *seg = &unit->layout->segments[s];
        FSDPC_TRY(fsdpc_device_poison(unit->device, (char *)unit->range.address + seg->full_offset,
                                      seg->compute, seg->piece_numel * x->world));
    }
    return FSDPC_OK;
}

/* Peers may still read the slot, so the pattern goes into private memory behind this rank's range:
 * what this rank reads too late is found whatever the peers do. */
int
fsdpc_exchange_veil(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_arena_veil(&unit->range));
    return fsdpc_exchange_poison(x, unit);
}

int
fsdpc_exchange_cast_piece(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int r, int64_t begin,
                          int64_t n)
{
    const fsdpc_segment *seg = &unit->layout->segments[segment];
    size_t storage = fsdpc_dtype_bytes(seg->storage), compute = fsdpc_dtype_bytes(seg->compute);
    const char *src = (char *)unit->peers[r] + seg->shard_offset + (size_t)begin * storage;
    char *dst = (char *)unit->range.address + seg->full_offset +
                (size_t)((int64_t)r * seg->piece_numel + begin) * compute;
    x->copied_bytes += (uint64_t)n * compute;
    if (unit->offload && seg->compute == seg->storage) {
        return fsdpc_device_copy_in(unit->device, dst, src, (size_t)n * compute);
    }
    return fsdpc_device_cast(unit->device, dst, seg->compute, src, seg->storage, n, 1.0);
}

bool
fsdpc_exchange_slot_is_in_use(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    int other = x->slot_unit[unit->slot];
    return other >= 0 && other != unit->id && x->units[other]->begun;
}

bool
fsdpc_exchange_packs(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    bool any = x->world > 1 || (unit && unit->offload);
    for (int i = 0; !unit && i < x->unit_count; i++) {
        any = any || x->units[i]->offload;
    }
    return any;
}

int
fsdpc_exchange_thaw_error(const fsdpc_exchange *x, int unit, int param, int who, int other)
{
    const bool known = unit >= 0 && unit < x->unit_count && param >= 0 &&
                       param < x->units[unit]->layout->param_count;
    return fsdpc_error(
        FSDPC_E_MISMATCH,
        "rank %d trains parameter %s of unit %s from now on, which was frozen before, "
        "and rank %d does not: set requires_grad alike on every rank",
        who, known ? x->units[unit]->layout->params[param].name : "(unknown)",
        known ? x->units[unit]->name : "(unknown)", other);
}
