/* Norm and scaling of a unit's gradients on a device that queues, without a host sync. One launch for
 * adjacent parameters, which are all of a segment when their sizes are multiples of the alignment. Padding
 * is not scaled: a NaN would stay in the padding for ever, because gradients are zeroed by parameter.
 */
#include <math.h>

#include "base/status.h"
#include "unit/unit_impl.h"

typedef struct stretch {
    char *data;
    fsdpc_dtype dtype;
    int64_t n;
} stretch;

typedef int (*visitor)(fsdpc_unit *unit, stretch grads, void *argument);

static bool
continues(const stretch *grads, stretch next)
{
    return grads->n > 0 && grads->dtype == next.dtype &&
           grads->data + (size_t)grads->n * fsdpc_dtype_bytes(next.dtype) == next.data;
}

/* Parameters of one segment come by rising address. */
static int
visit_segment(fsdpc_unit *unit, const uint8_t *mask, const fsdpc_segment *segment, visitor visit,
              void *argument)
{
    stretch grads = {0};
    for (int k = 0; k < segment->count; k++) {
        const int i = unit->layout->order[segment->first + k];
        stretch next = {.dtype = fsdpc_unit_grad_dtype(unit, i)};
        if (!mask[i]) {
            continue;
        }
        next.data = fsdpc_unit_grad_part(unit, i, &next.n);
        if (continues(&grads, next)) {
            grads.n += next.n;
        } else if (next.n > 0) {
            FSDPC_TRY(grads.n > 0 ? visit(unit, grads, argument) : FSDPC_OK);
            grads = next;
        }
    }
    return grads.n > 0 ? visit(unit, grads, argument) : FSDPC_OK;
}

static int
visit_grads(fsdpc_unit *unit, const uint8_t *mask, visitor visit, void *argument)
{
    for (int s = 0; s < unit->layout->segment_count; s++) {
        if (unit->layout->segments[s].trainable) {
            FSDPC_TRY(visit_segment(unit, mask, &unit->layout->segments[s], visit, argument));
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

struct parts {
    char *next;
    int64_t count;
    double p;
};

static int
measure(fsdpc_unit *unit, stretch grads, void *argument)
{
    struct parts *parts = argument;
    int64_t count = fsdpc_device_norm_parts(unit->device, grads.n);
    FSDPC_TRY(fsdpc_device_norm_into(unit->device, grads.data, grads.dtype, grads.n,
                                     isinf(parts->p) ? 2 : parts->p, parts->next));
    parts->next += count * FSDPC_NORM_PART_BYTES;
    parts->count += count;
    return FSDPC_OK;
}

int
fsdpc_unit_norm_parts(fsdpc_unit *unit, const uint8_t *mask, double p, void *out, int64_t *count)
{
    struct parts parts = {.next = out, .p = p};
    FSDPC_TRY(visit_grads(unit, mask, measure, &parts));
    *count = parts.count;
    return FSDPC_OK;
}

static int
multiply(fsdpc_unit *unit, stretch grads, void *argument)
{
    return fsdpc_device_scale_by(unit->device, grads.data, grads.dtype, grads.n, argument);
}

int
fsdpc_unit_scale_by(fsdpc_unit *unit, const uint8_t *mask, const double *factor)
{
    return visit_grads(unit, mask, multiply, (void *)(uintptr_t)factor);
}
