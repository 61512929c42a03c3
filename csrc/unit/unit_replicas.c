/* Sums over replicas at the end of a backward, where the device does not queue. */
#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

/* All-reduces which parameters got a gradient on any replica; *any: at least one did. */
static int
share_used(fsdpc_unit *unit, bool *any)
{
    int status = FSDPC_OK;
    int count = unit->layout->param_count;
    float *bits = fsdpc_mem_calloc((size_t)count, sizeof *bits);
    if (!bits) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the used bits of unit %s", unit->name);
    }
    for (int i = 0; i < count; i++) {
        bits[i] = unit->used[i];
    }
    FSDPC_GOTO(
        fsdpc_comm_all_reduce(unit->replicate, bits, count, FSDPC_F32, FSDPC_MAX, unit->name),
        done);
    *any = false;
    for (int i = 0; i < count; i++) {
        unit->used[i] = bits[i] > 0;
        *any = *any || unit->used[i];
    }
done:
    fsdpc_mem_free(bits);
    return status;
}

static int
sum_partials(fsdpc_unit *unit)
{
    if (!unit->partial_any) {
        FSDPC_TRY(fsdpc_device_zero(unit->device, unit->partial, unit->layout->grad_bytes));
    }
    fsdpc_grad_run run;
    for (int s = 0; fsdpc_layout_next_run(unit->layout, &s, &run);) {
        FSDPC_TRY(fsdpc_comm_all_reduce(unit->replicate, (char *)unit->partial + run.offset,
                                        run.numel, run.dtype, FSDPC_SUM, unit->name));
    }
    return fsdpc_grad_take_partial(unit);
}

int
fsdpc_unit_reduce_replicas(fsdpc_unit *unit)
{
    bool any = false;
    /* On a device that queues the sum follows each unit's reduction (exchange_stream_replicas.c). */
    bool queued = fsdpc_device_get_caps(unit->device)->asynchronous;
    if (!unit->replicate || unit->layout->trainable_count == 0 || unit->hooked || queued) {
        return FSDPC_OK;
    }
    int status = share_used(unit, &any);
    if (status == FSDPC_OK && any) {
        status = sum_partials(unit);
    }
    unit->partial_any = false;
    return status == FSDPC_OK
               ? FSDPC_OK
               : fsdpc_error_prepend(status, "sum over replicas of unit %s", unit->name);
}
