/* See exchange_used.h. */
#include "exchange/exchange_used.h"

static bool
trains(const fsdpc_unit *unit, int param)
{
    return fsdpc_unit_layout(unit)->params[param].trainable_index >= 0;
}

size_t
fsdpc_used_count(const fsdpc_exchange *x)
{
    size_t count = 0;
    for (int u = 0; u < x->unit_count; u++) {
        count += (size_t)fsdpc_unit_layout(x->units[u])->param_count;
    }
    return count;
}

bool
fsdpc_used_all(const fsdpc_unit *unit)
{
    for (int i = 0; i < fsdpc_unit_layout(unit)->param_count; i++) {
        if (trains(unit, i) && !fsdpc_unit_used(unit)[i]) {
            return false;
        }
    }
    return true;
}

void
fsdpc_used_write(const fsdpc_exchange *x, uint8_t *bits)
{
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_unit *unit = x->units[u];
        for (int i = 0; i < fsdpc_unit_layout(unit)->param_count; i++) {
            *bits++ = fsdpc_unit_use(unit)->consumed ? trains(unit, i) : fsdpc_unit_used(unit)[i];
        }
    }
}

void
fsdpc_used_read(fsdpc_exchange *x, const uint8_t *bits)
{
    for (int u = 0; u < x->unit_count; u++) {
        for (int i = 0; i < fsdpc_unit_layout(x->units[u])->param_count; i++, bits++) {
            if (!fsdpc_unit_use(x->units[u])->consumed) {
                fsdpc_unit_used(x->units[u])[i] = *bits > 0;
            }
        }
    }
}
