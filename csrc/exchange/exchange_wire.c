/* Gathering and reducing over a communicator that carries bytes: each rank has its
 * own slots, or shares slots with the other ranks of its host (exchange_wire_host.c).
 *
 * A gather casts this rank's pieces into their place in the slot, and a flight (comm/flight.h) brings the
 * other ranks' pieces there. A prefetch only begins a flight. The flight lands when its values, or the values
 * of a later flight, are needed. A reduction packs into the next of a few buffers and begins a flight that
 * brings every rank its own pieces of all ranks' gradients. Each rank sums its pieces in rank order when the
 * buffer is needed again, or at the end of backward. So transfers overlap with computation. The codes of
 * gradients that travel coded follow the packed gradients in the buffer (exchange_wire_coded.c).
 *
 *   gather slot     begin: cast, post           ... compute ...   land
 *   reduce buffer   begin: pack, post           ... compute ...   land, sum
 *
 * Only the order of flights decides which flights match. So a flight carries a mark of its unit, and ranks at
 * different units get an error that names both units. With one rank there is no communication.
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
        if (wire->host) {
            wire->reduces[i].memory = fsdpc_wire_host_buffer(x, wire->host->hosts->local_rank, i);
        } else {
            FSDPC_TRY(fsdpc_device_alloc(fsdpc_comm_device(x->comm), x->max_reduce_bytes,
                                         &wire->reduces[i].memory));
        }
    }
    return FSDPC_OK;
}

static int
open_wire(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
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
    wire->lander = (fsdpc_lander){.land_first = fsdpc_wire_land_first, .context = x};
    fsdpc_comm_add_lander(x->comm, &wire->lander);
    wire->bit_count = fsdpc_used_count(x) + (size_t)x->unit_count;
    wire->gathers = fsdpc_mem_calloc((size_t)x->unit_count, sizeof(fsdpc_flight *));
    wire->flying = fsdpc_mem_calloc((size_t)x->unit_count, sizeof *wire->flying);
    wire->parts = fsdpc_mem_calloc(parts, sizeof *wire->parts);
    wire->landing_offsets = fsdpc_mem_calloc(4 * parts, sizeof *wire->landing_offsets);
    wire->used = fsdpc_mem_calloc(params, 1);
    wire->bits = fsdpc_mem_calloc(wire->bit_count, (size_t)x->world);
    if (!wire->gathers || !wire->flying || !wire->parts || !wire->landing_offsets || !wire->used ||
        !wire->bits) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    if (x->world > 1 && fsdpc_device_get_caps(fsdpc_unit_device(x->units[0]))->host_memory) {
        wire->samples = fsdpc_mem_calloc(1, fsdpc_weights_bytes(x));
        FSDPC_TRY(wire->samples ? FSDPC_OK
                                : fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange"));
    }
    FSDPC_TRY(fsdpc_wire_host_open(x, plan->slot_count));
    FSDPC_TRY(fsdpc_wire_coded_open(x, plan->slot_count));
    return open_reduces(x, wire);
}

/* Frees all flights. True if no other rank may still write to the memory of this rank. Flights are left only
 * after a failure: at the end of each pass all flights have landed. */
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
    return !wire->lost && !fsdpc_comm_has_lost(x->comm);
}

static void
free_buffers(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int i = 0; wire->reduces && !wire->host && i < wire->reduce_count; i++) {
        fsdpc_device_free(fsdpc_comm_device(x->comm), wire->reduces[i].memory, x->max_reduce_bytes);
    }
    fsdpc_mem_free(wire->bits);
}

/* If a flight was lost, the memory of flights and slots is never freed: others may still write to it. */
static void
close_wire(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    if (!wire) {
        return;
    }
    fsdpc_comm_remove_lander(x->comm, &wire->lander);
    const bool landed = give_up_flights(x);
    if (landed) {
        free_buffers(x);
    }
    fsdpc_wire_coded_close(x, !landed);
    fsdpc_wire_host_close(x, !landed);
    if (!landed) {
        fsdpc_mem_leave(x->arena);
        fsdpc_mem_leave(wire->bits);
        x->arena = NULL;
    }
    fsdpc_mem_free(wire->gathers);
    fsdpc_mem_free(wire->flying);
    fsdpc_mem_free(wire->reduces);
    fsdpc_mem_free(wire->parts);
    fsdpc_mem_free(wire->landing_offsets);
    fsdpc_mem_free(wire->used);
    fsdpc_mem_free((void *)wire->samples);
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

/* Writes NaN where this rank's flight will put values, so that these are NaN until the flight lands. */
static int
poison_flight(fsdpc_exchange *x, fsdpc_unit *unit, fsdpc_route route)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        const size_t bytes = (size_t)seg->piece_numel * fsdpc_dtype_bytes(seg->compute);
        char *first = fsdpc_exchange_values(x, unit) + seg->full_offset;
        for (int r = 0; r < x->world; r++) {
            if (fsdpc_wire_brings(x, route, r)) {
                FSDPC_TRY(fsdpc_device_poison(fsdpc_unit_device(unit), first + bytes * (size_t)r,
                                              seg->compute, seg->piece_numel));
            }
        }
    }
    return FSDPC_OK;
}

static int
fill(fsdpc_exchange *x, fsdpc_unit *unit, int32_t turn, fsdpc_route route)
{
    char what[FSDPC_WIRE_WHAT_BYTES];
    fsdpc_mark mark;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    if (x->poison) {
        FSDPC_TRY(poison_flight(x, unit, route));
    }
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->coded_bytes > 0 && x->world > 1) {
            FSDPC_TRY(fsdpc_wire_encode(x, unit, s, &x->wire->parts[s]));
            continue;
        }
        FSDPC_TRY(fsdpc_exchange_cast_piece(x, unit, s, x->rank, 0, seg->piece_numel));
        x->wire->parts[s] = (fsdpc_comm_part){fsdpc_exchange_values(x, unit) + seg->full_offset,
                                              seg->piece_numel, seg->compute};
    }
    if (x->world == 1) {
        return FSDPC_OK;
    }
    fsdpc_wire_name_gather(unit, what);
    const int id = fsdpc_unit_use(unit)->id;
    fsdpc_flight **flight = &x->wire->gathers[id];
    FSDPC_TRY(fsdpc_flight_gather(x->comm, x->wire->parts, layout->segment_count, route,
                                  fsdpc_wire_mark(x, turn, &mark), what, flight));
    fsdpc_wire_note_flying(x, id);
    fsdpc_wire_count(x, unit, *flight);
    return FSDPC_OK;
}

/* Waits for the pieces that the flights of the other ranks of this host bring into a shared slot. */
static int
await_others(fsdpc_exchange *x, fsdpc_unit *unit)
{
    const int slot = fsdpc_unit_use(unit)->slot;
    return fsdpc_wire_is_shared(x, unit)
               ? fsdpc_wire_host_wait(x, FSDPC_WIRE_FILLED, slot, x->wire->host->fills[slot],
                                      FSDPC_WIRE_ANY, "gather", unit)
               : FSDPC_OK;
}

static bool
slot_shows(const fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    return x->slot_unit[use->slot] == use->id && x->slot_tag[use->slot] == x->tag;
}

/* First lands a prefetch into the slot, if one is in flight: later it would overwrite the new values. */
static int
empty_slot(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    struct fsdpc_wire_host *host = x->wire->host;
    const int slot = fsdpc_unit_use(unit)->slot, before = x->slot_unit[slot];
    FSDPC_TRY(fsdpc_wire_land_gather(x, before));
    x->slot_unit[slot] = -1;
    if (!host) {
        return FSDPC_OK;
    }
    fsdpc_wire_say(x, FSDPC_WIRE_CLEARED, slot, ++host->fills[slot]);
    return fsdpc_wire_host_wait(x, FSDPC_WIRE_CLEARED, slot, host->fills[slot],
                                FSDPC_WIRE_GATHER(fsdpc_unit_use(unit)->id), "slot for a gather",
                                unit);
}

/* Gathers into private memory, because the slot is in use by another unit. The unit's release frees that
 * memory. Gathers in flight land first, so that their errors are not reported as errors of this gather. */
static int
start_apart(fsdpc_exchange *x, fsdpc_unit *unit)
{
    const int id = fsdpc_unit_use(unit)->id;
    FSDPC_TRY(fsdpc_wire_land_gathers(x));
    FSDPC_TRY(fsdpc_arena_spare(x->arena, fsdpc_unit_range(unit)));
    fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, fsdpc_unit_range(unit)->bytes);
    return fill(x, unit, x->wire->host ? FSDPC_WIRE_APART(id) : FSDPC_WIRE_GATHER(id),
                FSDPC_TO_ALL);
}

static int
start_in_slot(fsdpc_exchange *x, fsdpc_unit *unit)
{
    const struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (slot_shows(x, unit)) {
        return FSDPC_OK;
    }
    FSDPC_TRY(empty_slot(x, unit));
    FSDPC_TRY(fill(x, unit, FSDPC_WIRE_GATHER(use->id),
                   x->wire->host ? FSDPC_BY_CARRIERS : FSDPC_TO_ALL));
    x->slot_unit[use->slot] = use->id;
    x->slot_tag[use->slot] = x->tag;
    return FSDPC_OK;
}

static int
start(fsdpc_exchange *x, fsdpc_unit *unit)
{
    FSDPC_TRY(fsdpc_arena_unveil(x->arena, fsdpc_unit_range(unit)));
    FSDPC_TRY(fsdpc_exchange_slot_is_in_use(x, unit) ? start_apart(x, unit)
                                                     : start_in_slot(x, unit));
    fsdpc_unit_use(unit)->begun = true;
    return FSDPC_OK;
}

/* Earlier gathers must land first. If one of them fails, this unit's gather stays in flight. */
static int
gather(fsdpc_exchange *x, fsdpc_unit *unit, bool wait)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    if (!use->begun) {
        if (!wait &&
            (!fsdpc_exchange_prefetches(x->comm) || fsdpc_exchange_slot_is_in_use(x, unit))) {
            return FSDPC_OK;
        }
        FSDPC_TRY(start(x, unit));
    }
    if (wait && !use->ready) {
        int status = fsdpc_wire_land_gather(x, use->id);
        FSDPC_KEEP(status == FSDPC_OK ? await_others(x, unit) : FSDPC_OK);
        if (status != FSDPC_OK && x->wire->gathers[use->id]) {
            return status;
        }
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
    if (fsdpc_unit_is_spare(unit)) { /* its gather has landed: prefetches use no spare memory */
        FSDPC_TRY(fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit)));
    }
    return x->poison ? fsdpc_exchange_veil(x, unit) : FSDPC_OK;
}

static int
leave(fsdpc_exchange *x)
{
    return fsdpc_wire_land_gathers(x);
}

static int
end(fsdpc_exchange *x)
{
    FSDPC_TRY(fsdpc_wire_land_gathers(x));
    return fsdpc_wire_end(x);
}

const struct fsdpc_exchange_i fsdpc_exchange_wire = {
    .kind = "wire",
    .any_order = false,
    .open = open_wire,
    .close = close_wire,
    .compare = fsdpc_wire_number_weights,
    .begin = begin,
    .leave = leave,
    .gather = gather,
    .release = release,
    .reduce = fsdpc_wire_reduce,
    .summed = fsdpc_wire_summed,
    .make_room = fsdpc_wire_make_room,
    .end = end,
    .announce = fsdpc_wire_announce,
    .before_hook = fsdpc_wire_before_hook,
    .forget = fsdpc_wire_forget,
};
