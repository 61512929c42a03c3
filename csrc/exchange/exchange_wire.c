/* Gathering and reducing over a communicator that carries bytes: each rank has its own slots.
 *
 * A gather casts this rank's pieces into their place in the slot, and a flight (comm/flight.h) brings the
 * others' there. A prefetch only begins the flight, which lands when the values are needed. A reduction packs
 * into the next of a few buffers and begins a flight that brings every rank its own pieces of all ranks'
 * gradients; this rank sums them in the order of ranks when the buffer is needed again, or at the end of
 * backward. So transfers go on while the caller computes.
 *
 *   gather slot     begin: cast, post           ... compute ...   land
 *   reduce buffer   begin: pack, post           ... compute ...   land, sum
 *
 * Flights match by order alone, so each has a mark of its unit: ranks at different units get an error that
 * names both units, instead of wrong values. With one rank there is no communication.
 */
#include <stdio.h>

#include "base/mem.h"
#include "base/status.h"
#include "exchange/exchange_used.h"
#include "exchange/exchange_wire_impl.h"

/* --- set-up -------------------------------------------------------------------------------------- */

static int
open_reduces(fsdpc_exchange *x, struct fsdpc_wire *wire)
{
    wire->reduce_count = x->world > 1 && x->max_reduce_bytes > 0 ? x->reduce_slots : 0;
    wire->reduces = fsdpc_mem_calloc((size_t)wire->reduce_count + 1, sizeof *wire->reduces);
    if (!wire->reduces) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    for (int i = 0; i < wire->reduce_count; i++) {
        FSDPC_TRY(fsdpc_device_alloc(fsdpc_comm_device(x->comm), x->max_reduce_bytes,
                                     &wire->reduces[i].memory));
    }
    return FSDPC_OK;
}

static int
open_wire(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    (void)plan;
    size_t parts = 1, params = 1;
    struct fsdpc_wire *wire = x->wire = fsdpc_mem_calloc(1, sizeof *wire);
    for (int u = 0; u < x->unit_count; u++) {
        const fsdpc_layout *layout = fsdpc_unit_layout(x->units[u]);
        parts = (size_t)layout->segment_count > parts ? (size_t)layout->segment_count : parts;
        params = (size_t)layout->param_count > params ? (size_t)layout->param_count : params;
    }
    if (!wire) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    wire->bit_count = fsdpc_used_count(x) + (size_t)x->unit_count;
    wire->gathers = fsdpc_mem_calloc((size_t)x->unit_count, sizeof(fsdpc_flight *));
    wire->parts = fsdpc_mem_calloc(parts, sizeof *wire->parts);
    wire->landing_offsets = fsdpc_mem_calloc(2 * parts, sizeof *wire->landing_offsets);
    wire->used = fsdpc_mem_calloc(params, 1);
    wire->bits = fsdpc_mem_calloc(wire->bit_count, (size_t)x->world);
    if (!wire->gathers || !wire->parts || !wire->landing_offsets || !wire->used || !wire->bits) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    return open_reduces(x, wire);
}

/* Flights are left only after a failure: at the end of each pass they have landed. True: this rank's memory is
 * its own. */
static bool
give_up_flights(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int u = 0; wire->gathers && u < x->unit_count; u++) {
        wire->lost = !fsdpc_flight_free(wire->gathers[u]) || wire->lost;
    }
    for (int i = 0; wire->reduces && i < wire->reduce_count; i++) {
        wire->lost = !fsdpc_flight_free(wire->reduces[i].flight) || wire->lost;
    }
    return !wire->lost;
}

static void
free_buffers(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int i = 0; wire->reduces && i < wire->reduce_count; i++) {
        fsdpc_device_free(fsdpc_comm_device(x->comm), wire->reduces[i].memory, x->max_reduce_bytes);
    }
    fsdpc_mem_free(wire->bits);
}

/* Memory of lost flights stays as long as the process, the slots' too. */
static void
close_wire(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    if (!wire) {
        return;
    }
    if (give_up_flights(x)) {
        free_buffers(x);
    } else {
        fsdpc_mem_leave(x->arena);
        fsdpc_mem_leave(wire->bits);
        x->arena = NULL;
    }
    fsdpc_mem_free(wire->gathers);
    fsdpc_mem_free(wire->reduces);
    fsdpc_mem_free(wire->parts);
    fsdpc_mem_free(wire->landing_offsets);
    fsdpc_mem_free(wire->used);
    fsdpc_mem_free(wire);
    x->wire = NULL;
}

static int
begin(fsdpc_exchange *x, uint64_t tag)
{
    (void)x;
    (void)tag;
    return FSDPC_OK;
}

/* --- gathers ------------------------------------------------------------------------------------- */

static bool
prefetches(const fsdpc_exchange *x)
{
    return x->world > 1 && fsdpc_comm_flies(x->comm);
}

static void
name_gather(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES])
{
    snprintf(what, FSDPC_WIRE_WHAT_BYTES, "gather of unit %s", fsdpc_unit_name(unit));
}

static int
fill(fsdpc_exchange *x, fsdpc_unit *unit)
{
    char what[FSDPC_WIRE_WHAT_BYTES];
    fsdpc_mark mark;
    const int id = fsdpc_unit_use(unit)->id;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    if (x->poison) {
        FSDPC_TRY(fsdpc_exchange_poison(x, unit)); /* until the flight lands */
    }
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        FSDPC_TRY(fsdpc_exchange_cast_piece(x, unit, s, x->rank, 0, seg->piece_numel));
        x->wire->parts[s] = (fsdpc_comm_part){fsdpc_exchange_values(x, unit) + seg->full_offset,
                                              seg->piece_numel, seg->compute};
    }
    if (x->world == 1) {
        return FSDPC_OK;
    }
    name_gather(unit, what);
    return fsdpc_flight_gather(x->comm, x->wire->parts, layout->segment_count,
                               fsdpc_wire_mark(x, FSDPC_WIRE_GATHER(id), &mark), what,
                               &x->wire->gathers[id]);
}

static int
land_gather(fsdpc_exchange *x, int id)
{
    char what[FSDPC_WIRE_WHAT_BYTES];
    if (id < 0 || !x->wire->gathers[id]) {
        return FSDPC_OK;
    }
    name_gather(x->units[id], what);
    return fsdpc_wire_land(x, &x->wire->gathers[id], what, NULL);
}

static bool
slot_shows(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    return x->slot_unit[use->slot] == use->id && x->slot_tag[use->slot] == x->tag;
}

/* What was prefetched into the slot and not used has to come first: it would overwrite the values. */
static int
empty_slot(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const int slot = fsdpc_unit_use(unit)->slot, before = x->slot_unit[slot];
    x->slot_unit[slot] = -1;
    return land_gather(x, before);
}

static int
start(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    FSDPC_TRY(fsdpc_arena_unveil(x->arena, fsdpc_unit_range(unit)));
    if (fsdpc_exchange_slot_is_in_use(x, unit)) {
        FSDPC_TRY(land_gather(x, use->id));
        FSDPC_TRY(fsdpc_arena_spare(x->arena, fsdpc_unit_range(unit)));
        fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, fsdpc_unit_range(unit)->bytes);
        FSDPC_TRY(fill(x, unit));
    } else if (!slot_shows(x, unit)) {
        FSDPC_TRY(empty_slot(x, unit));
        FSDPC_TRY(fill(x, unit));
        x->slot_unit[use->slot] = use->id;
        x->slot_tag[use->slot] = x->tag;
    }
    use->begun = true;
    return FSDPC_OK;
}

/* A failed gather leaves no values in the slot. */
static int
gather(fsdpc_exchange *x, fsdpc_unit *unit, bool wait)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (!use->begun) {
        if (!wait && (!prefetches(x) || fsdpc_exchange_slot_is_in_use(x, unit))) {
            return FSDPC_OK;
        }
        FSDPC_TRY(start(x, unit));
    }
    if (wait && !use->ready) {
        int status = land_gather(x, use->id);
        if (status != FSDPC_OK) {
            x->slot_unit[use->slot] = -1;
            use->begun = false;
            return status;
        }
        use->ready = true;
    }
    return FSDPC_OK;
}

static int
release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    use->begun = use->ready = false;
    if (fsdpc_unit_is_spare(unit)) { /* its values have landed: a prefetch takes no spare memory */
        FSDPC_TRY(fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit)));
    }
    return x->poison ? fsdpc_exchange_veil(x, unit) : FSDPC_OK;
}

/* All ranks have begun the same prefetches when a pass ends. */
static int
land_gathers(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        FSDPC_TRY(land_gather(x, u));
    }
    return FSDPC_OK;
}

static int
leave(fsdpc_exchange *x)
{
    return land_gathers(x);
}

static int
end(fsdpc_exchange *x)
{
    FSDPC_TRY(land_gathers(x));
    return fsdpc_wire_end(x);
}

const struct fsdpc_exchange_i fsdpc_exchange_wire = {
    .kind = "wire",
    .any_order = false,
    .open = open_wire,
    .close = close_wire,
    .begin = begin,
    .leave = leave,
    .gather = gather,
    .release = release,
    .reduce = fsdpc_wire_reduce,
    .summed = fsdpc_wire_summed,
    .make_room = fsdpc_wire_make_room,
    .end = end,
    .prefetches = prefetches,
    .announce = fsdpc_wire_announce,
    .before_hook = fsdpc_wire_before_hook,
};
