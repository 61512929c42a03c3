/* Norm and scaling of a unit's gradients on a device that queues, without a host sync and by one launch each.
 * Padding is neither measured nor scaled: a NaN would stay in the padding for ever, because zeroing a
 * gradient leaves the padding as it is.
 */
#include <math.h>

#include "base/mem.h"
#include "base/status.h"
#include "unit/unit_impl.h"

/* The masked parameters' gradients as stretches of memory, by segment; adjacent stretches are merged. */
typedef struct stretches {
    fsdpc_stretch *list;
    int count;
} stretches;

static void
append(stretches *to, fsdpc_stretch next)
{
    fsdpc_stretch *last = to->count > 0 ? &to->list[to->count - 1] : NULL;
    if (next.n == 0) {
        return;
    }
    if (last && last->dtype == next.dtype &&
        (char *)last->data + (size_t)last->n * fsdpc_dtype_bytes(next.dtype) == next.data) {
        last->n += next.n;
        return;
    }
    to->list[to->count++] = next;
}

/* Lists the masked parameters' gradients, by segment and rising address. The caller frees the list. */
static int
list_grads(const fsdpc_unit *unit, const uint8_t *mask, stretches *out)
{
    const fsdpc_layout *layout = unit->layout;
    *out = (stretches){fsdpc_mem_calloc((size_t)layout->param_count + 1, sizeof *out->list), 0};
    if (!out->list) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the norm of unit %s", unit->name);
    }
    for (int k = 0; k < layout->param_count; k++) {
        const int i = layout->order[k];
        if (mask[i] && layout->params[i].trainable_index >= 0) {
            fsdpc_stretch next = {.dtype = fsdpc_unit_grad_dtype(unit, i)};
            next.data = fsdpc_unit_grad_part(unit, i, &next.n);
            append(out, next);
        }
    }
    return FSDPC_OK;
}

int64_t
fsdpc_unit_norm_room(const fsdpc_unit *unit)
{
    int64_t room = 0;
    for (int i = 0; i < unit->layout->param_count; i++) {
        fsdpc_span span = fsdpc_layout_span(unit->layout, i, unit->rank);
        room += fsdpc_device_norm_parts(unit->device, span.length);
    }
    return room;
}

int
fsdpc_unit_norm_parts(fsdpc_unit *unit, const uint8_t *mask, double p, void *out, int64_t *count)
{
    int status = FSDPC_OK;
    stretches grads;
    FSDPC_TRY(list_grads(unit, mask, &grads));
    FSDPC_GOTO(fsdpc_device_norm_into(unit->device, grads.list, grads.count, isinf(p) ? 2 : p, out),
               done);
    *count = 0;
    for (int i = 0; i < grads.count; i++) {
        *count += fsdpc_device_norm_parts(unit->device, grads.list[i].n);
    }
done:
    fsdpc_mem_free(grads.list);
    return status;
}

int
fsdpc_unit_scale_by(fsdpc_unit *unit, const uint8_t *mask, const double *factor)
{
    stretches grads;
    FSDPC_TRY(list_grads(unit, mask, &grads));
    const int status = fsdpc_device_scale_by(unit->device, grads.list, grads.count, factor);
    fsdpc_mem_free(grads.list);
    return status;
}
