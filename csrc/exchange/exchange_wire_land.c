/* Gathers that land: of the unit that is needed, or all that are in flight. */
#include <stdio.h>

#include "base/status.h"
#include "exchange/exchange_wire_impl.h"

void
fsdpc_wire_name_gather(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES])
{
    snprintf(what, FSDPC_WIRE_WHAT_BYTES, "gather of unit %s", fsdpc_unit_name(unit));
}

bool
fsdpc_wire_is_shared(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    return x->wire->host && !fsdpc_unit_is_spare(unit);
}

int
fsdpc_wire_land_gather(fsdpc_exchange *x, int id)
{
    char what[FSDPC_WIRE_WHAT_BYTES];
    if (id < 0 || !x->wire->gathers[id]) {
        return FSDPC_OK;
    }
    fsdpc_unit *unit = x->units[id];
    const int slot = fsdpc_unit_use(unit)->slot;
    fsdpc_wire_name_gather(unit, what);
    FSDPC_TRY(fsdpc_wire_land(x, &x->wire->gathers[id], what, NULL));
    const bool shared = fsdpc_wire_is_shared(x, unit);
    FSDPC_TRY(fsdpc_wire_decode(x, unit, shared ? FSDPC_BY_CARRIERS : FSDPC_TO_ALL));
    if (shared) {
        fsdpc_wire_say(x, FSDPC_WIRE_FILLED, slot, x->wire->host->fills[slot]);
    }
    return FSDPC_OK;
}

/* All ranks have begun the same prefetches when a pass ends. */
int
fsdpc_wire_land_gathers(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        FSDPC_TRY(fsdpc_wire_land_gather(x, u));
    }
    return FSDPC_OK;
}
