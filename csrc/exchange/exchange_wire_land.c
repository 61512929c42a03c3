/* Lands flights (gathers in their order). Begins flights without data that compare what ranks do next. */
#include <stdio.h>
#include <string.h>

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

/* Marks the slot as empty, because a failed gather leaves no values in it. */
static void
forget_gather(fsdpc_exchange *x, int id)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(x->units[id]);
    if (x->slot_unit[use->slot] == id) {
        x->slot_unit[use->slot] = -1;
    }
    use->begun = false;
}

static void
show_first(struct fsdpc_wire *wire)
{
    wire->lander.first =
        wire->flying_count > 0 ? fsdpc_flight_number(wire->gathers[wire->flying[0]]) : UINT64_MAX;
}

void
fsdpc_wire_note_flying(fsdpc_exchange *x, int id)
{
    x->wire->flying[x->wire->flying_count++] = id;
    show_first(x->wire);
}

int
fsdpc_wire_land_first(void *exchange)
{
    char what[FSDPC_WIRE_WHAT_BYTES];
    fsdpc_exchange *x = exchange;
    struct fsdpc_wire *wire = x->wire;
    const int id = wire->flying[0];
    memmove(wire->flying, wire->flying + 1, (size_t)--wire->flying_count * sizeof *wire->flying);
    show_first(wire);
    fsdpc_unit *unit = x->units[id];
    const int slot = fsdpc_unit_use(unit)->slot;
    fsdpc_wire_name_gather(unit, what);
    int status = fsdpc_wire_land(x, &wire->gathers[id], what, NULL);
    const bool shared = fsdpc_wire_is_shared(x, unit);
    const fsdpc_route route = shared ? FSDPC_BY_CARRIERS : FSDPC_TO_ALL;
    FSDPC_KEEP(status == FSDPC_OK ? fsdpc_wire_decode(x, unit, route) : FSDPC_OK);
    if (status != FSDPC_OK) {
        forget_gather(x, id);
        return status;
    }
    if (shared) {
        fsdpc_wire_say(x, FSDPC_WIRE_FILLED, slot, wire->host->fills[slot]);
    }
    return FSDPC_OK;
}

int
fsdpc_wire_land_gather(fsdpc_exchange *x, int id)
{
    const fsdpc_flight *flight = id < 0 ? NULL : x->wire->gathers[id];
    return flight ? fsdpc_comm_land_before(x->comm, fsdpc_flight_number(flight) + 1) : FSDPC_OK;
}

/* All ranks have begun the same prefetches when a pass ends, so all these prefetches can land. */
int
fsdpc_wire_land_gathers(fsdpc_exchange *x)
{
    const int count = x->wire->flying_count;
    return count > 0 ? fsdpc_wire_land_gather(x, x->wire->flying[count - 1]) : FSDPC_OK;
}

int
fsdpc_wire_land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed)
{
    bool agreed = true;
    fsdpc_flight *landed = *flight;
    *flight = NULL;
    int status = fsdpc_comm_land_before(x->comm, fsdpc_flight_number(landed));
    FSDPC_KEEP(status == FSDPC_OK ? fsdpc_flight_land(landed, what, &agreed) : FSDPC_OK);
    FSDPC_KEEP(status == FSDPC_OK && !agreed ? fsdpc_wire_compare(x, landed, what) : FSDPC_OK);
    FSDPC_KEEP(status == FSDPC_OK ? fsdpc_wire_check_weights(x, landed, what) : FSDPC_OK);
    if (summed) {
        *summed = fsdpc_flight_is_summed(landed);
    }
    x->wire->lost = !fsdpc_flight_free(landed) || x->wire->lost;
    return status;
}

/* Compares the ranks' turns, because mismatched collectives would end the process or give wrong values. */
static int
compare_turns(fsdpc_exchange *x, int32_t next, bool without_data, const char *what)
{
    fsdpc_mark mark;
    fsdpc_flight *flight;
    if (x->world == 1 || x->trust_order) {
        return FSDPC_OK;
    }
    (void)fsdpc_wire_mark(x, next, &mark);
    mark.without_data = without_data;
    FSDPC_TRY(fsdpc_flight_gather(x->comm, NULL, 0, FSDPC_TO_ALL, &mark, what, &flight));
    return fsdpc_wire_land(x, &flight, what, NULL);
}

int
fsdpc_wire_tell(fsdpc_exchange *x, int32_t next, const char *what)
{
    return compare_turns(x, next, true, what);
}

int
fsdpc_wire_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param)
{
    (void)tag;
    return compare_turns(x, fsdpc_wire_thaw_turn(unit, param), false, "unfreezing");
}

int
fsdpc_wire_before_hook(fsdpc_exchange *x, const char *what)
{
    return compare_turns(x, FSDPC_WIRE_HOOK, false, what);
}
