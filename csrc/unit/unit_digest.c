/* Detects changes of this rank's master shard between a forward and its backward.  Autograd's counts of
 * writes show a step of the optimizer (py_versions.c), but not a write to only some parameters, or a
 * write through `.data`. After such a write, units that are gathered again for backward would have
 * other values than in the forward. So a pass notes a digest of each trainable parameter, over three
 * of its elements or, with `whole`, over all. A device's memory is not read, because that would be a host
 * sync.
 */
#include "base/mem.h"
#include "base/status.h"
#include "ckpt/crc32c.h"
#include "unit/unit_impl.h"

/* Returns the bits of one element as a number. */
static uint64_t
bits(const char *value, size_t bytes)
{
    uint64_t result = 0;
    for (size_t i = 0; i < bytes; i++) {
        result = result << 8 | (unsigned char)value[i];
    }
    return result;
}

static uint32_t
digest(const fsdpc_unit *unit, int param, bool whole)
{
    int64_t length;
    const char *values = fsdpc_unit_master_part(unit, param, &length);
    const fsdpc_layout *layout = unit->layout;
    const size_t item = fsdpc_dtype_bytes(layout->segments[layout->params[param].segment].storage);
    if (whole || length < 3) {
        return fsdpc_crc32c(0, values, (size_t)length * item);
    }
    const uint64_t odd = UINT64_C(0x9E3779B97F4A7C15);
    const size_t last = (size_t)(length - 1);
    uint64_t sum = bits(values, item) * odd;
    sum = (sum ^ bits(values + last / 2 * item, item)) * odd;
    sum = (sum ^ bits(values + last * item, item)) * odd;
    return (uint32_t)(sum >> 32);
}

int
fsdpc_unit_note_values(fsdpc_unit *unit, bool whole)
{
    const fsdpc_layout *layout = unit->layout;
    if (unit->direct || layout->trainable_count == 0 ||
        fsdpc_device_get_caps(unit->device)->asynchronous) {
        return FSDPC_OK;
    }
    if (!unit->digests) {
        unit->digests = fsdpc_mem_calloc((size_t)layout->param_count, sizeof *unit->digests);
        if (!unit->digests) {
            return fsdpc_error(FSDPC_E_NOMEM, "no memory for digests of unit %s", unit->name);
        }
    }
    for (int i = 0; i < layout->param_count; i++) {
        if (layout->params[i].trainable_index >= 0) {
            unit->digests[i] = digest(unit, i, whole);
        }
    }
    unit->noted = true;
    return FSDPC_OK;
}

void
fsdpc_unit_forget_values(fsdpc_unit *unit)
{
    unit->noted = false;
}

int
fsdpc_unit_next_changed(const fsdpc_unit *unit, int from, bool whole)
{
    for (int i = from; unit->noted && i < unit->layout->param_count; i++) {
        if (unit->layout->params[i].trainable_index >= 0 &&
            unit->digests[i] != digest(unit, i, whole)) {
            return i;
        }
    }
    return -1;
}
