/* Gathering and reducing over a communicator that carries bytes: each rank has its own slots.
 *
 * A gather casts this rank's pieces into their place in the slot, and a flight (comm/flight.h) brings the
 * others' there. A prefetch only begins the flight, which lands when the values are needed. A reduction packs
 * into the next of a few buffers and begins a flight that brings every rank its own pieces of all ranks'
 * gradients; the sum over ranks, in their order, follows when the buffer is needed again, or at the end of
 * backward. So transfers go on while the caller computes.
 *
 *   gather slot     begin: cast, post           ... compute ...   land
 *   reduce buffer   begin: pack, post           ... compute ...   land, sum
 *
 * Flights match by order alone, so each has a mark of its unit: ranks at different units get an error that
 * names both units, instead of wrong values. With one rank there is no communication.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/flight.h"
#include "exchange/exchange_impl.h"
#include "exchange/exchange_used.h"

enum { WHAT_BYTES = 256 };

/* Packed gradients on their way; behind them in `memory` is room for the other ranks' pieces. */
struct fsdpc_wire_reduce {
    void *memory;
    fsdpc_flight *flight;
    fsdpc_unit *unit; /* NULL with the flight */
};

struct fsdpc_wire {
    fsdpc_flight **gathers; /* per unit, NULL: none in flight */
    struct fsdpc_wire_reduce *reduces;
    int reduce_count, next;
    fsdpc_comm_part *parts;  /* of the unit being sent */
    size_t *landing_offsets; /* of its parts, and of its segments */
    uint8_t *used, *bits;    /* of the unit being packed; of all ranks and units at the end */
    size_t bit_count;        /* of one rank */
    bool lost;               /* a flight has not landed: its memory is other ranks' for ever */
};

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

/* --- marks --------------------------------------------------------------------------------------- */

/* What a rank does next: 2 * unit for a gather, 2 * unit + 1 for a reduction, TURN_HOOK, or the end of
 * a backward. Below zero: the unit and number of a parameter that is unfrozen. */
enum {
    TURN_HOOK = INT32_MAX,
    TURN_END = TURN_HOOK - 1,
    THAWS_UNKNOWN = -1,
    THAWS = -2,
    THAW_PARAMS = 1 << 12
};

static int32_t
thaw_turn(int unit, int param)
{
    bool fits = unit >= 0 && param < THAW_PARAMS && unit < INT32_MAX / THAW_PARAMS - 1;
    return fits ? THAWS - (unit * THAW_PARAMS + param) : THAWS_UNKNOWN;
}

/* One of two ranks unfreezes a parameter, the other does not. */
static int
thaw_mismatch(const fsdpc_exchange *x, int32_t own, int rank, int32_t other)
{
    const int32_t which = own < 0 ? own : other;
    const int number = THAWS - which, who = own < 0 ? x->rank : rank;
    return fsdpc_exchange_thaw_error(x, which == THAWS_UNKNOWN ? -1 : number / THAW_PARAMS,
                                     number % THAW_PARAMS, who, own < 0 ? rank : x->rank);
}

static const char *
turn_text(const fsdpc_exchange *x, int32_t turn, const char *hook, char text[WHAT_BYTES])
{
    if (turn == TURN_HOOK) {
        snprintf(text, WHAT_BYTES, hook ? "the %s" : "a communication hook", hook);
        return text;
    }
    if (turn == TURN_END) {
        return "the end of backward";
    }
    if (turn / 2 >= x->unit_count) {
        return "a unit that this rank's model does not have";
    }
    snprintf(text, WHAT_BYTES, "the %s of unit %s", turn % 2 ? "reduce" : "gather",
             fsdpc_unit_name(x->units[turn / 2]));
    return text;
}

/* What the ranks compare: two models over the same ranks have the same turns. */
struct turn {
    int32_t next, model;
};

static int
compare_turn(const fsdpc_exchange *x, struct turn mine, const char *what, int rank,
             struct turn theirs)
{
    char here[WHAT_BYTES], there[WHAT_BYTES];
    const int32_t own = mine.next, other = theirs.next;
    if (other < FSDPC_NOW_END) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "rank %d is at %s while rank %d makes a collective of another kind (a "
                           "state dict, a norm, a checkpoint): all ranks must make the same calls "
                           "in one order",
                           x->rank, own < 0 ? "unfreezing" : turn_text(x, own, what, here), rank);
    }
    if (mine.model != theirs.model) {
        return fsdpc_error(FSDPC_E_MISMATCH,
                           "rank %d is at %s while rank %d runs another model: all ranks must run "
                           "the models that they have in common in one order",
                           x->rank, own < 0 ? "unfreezing" : turn_text(x, own, what, here), rank);
    }
    if (own < 0 && other < 0) {
        return FSDPC_OK;
    }
    if (own < 0 || other < 0) {
        return thaw_mismatch(x, own, rank, other);
    }
    if (own == other) {
        return FSDPC_OK;
    }
    return fsdpc_error(
        FSDPC_E_MISMATCH,
        "rank %d is at %s while rank %d is at %s: the ranks run different units. If a module "
        "chooses by data what it runs, mark it with fsdpc.mark_data_dependent(module), so that "
        "every rank gathers all units below it",
        x->rank, turn_text(x, own, what, here), rank, turn_text(x, other, NULL, there));
}

/* NULL: nothing is compared. */
static const fsdpc_mark *
mark_of(const fsdpc_exchange *x, int32_t next, fsdpc_mark *mark)
{
    *mark = (fsdpc_mark){{next, fsdpc_unit_born(x->units[0])}};
    return x->trust_order ? NULL : mark;
}

/* Waits for the flight, which is freed whatever comes; *summed as fsdpc_flight_is_summed. */
static int
land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed)
{
    bool agreed = true;
    fsdpc_flight *landed = *flight;
    *flight = NULL;
    int status = fsdpc_flight_land(landed, what, &agreed);
    const fsdpc_mark *marks = fsdpc_flight_marks(landed);
    for (int r = 0; r < x->world && status == FSDPC_OK && !agreed; r++) {
        const struct turn own = {marks[x->rank].words[0], marks[x->rank].words[1]};
        const struct turn other = {marks[r].words[0], marks[r].words[1]};
        status = compare_turn(x, own, what, r, other);
    }
    if (summed) {
        *summed = fsdpc_flight_is_summed(landed);
    }
    x->wire->lost = !fsdpc_flight_free(landed) || x->wire->lost;
    return status;
}

/* Collectives of different turns that meet would end the process or give wrong values. */
static int
compare_turns(fsdpc_exchange *x, int32_t next, const char *what)
{
    fsdpc_mark mark;
    fsdpc_flight *flight;
    if (x->world == 1 || x->trust_order) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_flight_gather(x->comm, NULL, 0, mark_of(x, next, &mark), what, &flight));
    return land(x, &flight, what, NULL);
}

static int
announce(fsdpc_exchange *x, int unit, int param)
{
    return compare_turns(x, thaw_turn(unit, param), "unfreezing");
}

static int
before_hook(fsdpc_exchange *x, const char *what)
{
    return compare_turns(x, TURN_HOOK, what);
}

/* --- gathers ------------------------------------------------------------------------------------- */

static bool
prefetches(const fsdpc_exchange *x)
{
    return x->world > 1 && fsdpc_comm_flies(x->comm);
}

static void
name_gather(const fsdpc_unit *unit, char what[WHAT_BYTES])
{
    snprintf(what, WHAT_BYTES, "gather of unit %s", fsdpc_unit_name(unit));
}

static int
fill(fsdpc_exchange *x, fsdpc_unit *unit)
{
    char what[WHAT_BYTES];
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
                               mark_of(x, id * 2, &mark), what, &x->wire->gathers[id]);
}

static int
land_gather(fsdpc_exchange *x, int id)
{
    char what[WHAT_BYTES];
    if (id < 0 || !x->wire->gathers[id]) {
        return FSDPC_OK;
    }
    name_gather(x->units[id], what);
    return land(x, &x->wire->gathers[id], what, NULL);
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

/* --- reductions ---------------------------------------------------------------------------------- */

static void
name_reduce(const fsdpc_unit *unit, char what[WHAT_BYTES])
{
    snprintf(what, WHAT_BYTES, "reduce of unit %s", fsdpc_unit_name(unit));
}

static char *
landing_room(const struct fsdpc_wire_reduce *to, const fsdpc_unit *unit)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    return (char *)to->memory + fsdpc_round_up(layout->reduce_bytes, layout->align_bytes);
}

/* This rank's pieces of all ranks' gradients are added to the shard gradient. */
static int
land_reduce(fsdpc_exchange *x, struct fsdpc_wire_reduce *from)
{
    bool summed;
    char what[WHAT_BYTES];
    fsdpc_unit *unit = from->unit;
    from->unit = NULL;
    if (!unit) {
        return FSDPC_OK;
    }
    name_reduce(unit, what);
    FSDPC_TRY(land(x, &from->flight, what, &summed));
    FSDPC_TRY(fsdpc_grad_sum_landed(unit, from->memory, summed ? NULL : landing_room(from, unit)));
    fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    return FSDPC_OK;
}

static int
post(fsdpc_exchange *x, fsdpc_unit *unit, struct fsdpc_wire_reduce *to)
{
    int count = 0;
    char what[WHAT_BYTES];
    fsdpc_mark mark;
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    size_t *offsets = x->wire->landing_offsets, *of_segment = offsets + layout->segment_count;
    const size_t stride = fsdpc_footprint_landing(layout, of_segment);
    const fsdpc_landing landing = {landing_room(to, unit), stride, offsets};
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (seg->trainable) {
            offsets[count] = of_segment[s];
            x->wire->parts[count++] = (fsdpc_comm_part){(char *)to->memory + seg->reduce_offset,
                                                        seg->piece_numel, seg->reduce};
        }
    }
    name_reduce(unit, what);
    return fsdpc_flight_reduce(x->comm, x->wire->parts, count, &landing,
                               mark_of(x, fsdpc_unit_use(unit)->id * 2 + 1, &mark), what,
                               &to->flight);
}

/* The gradients of one unit; every rank calls it at the same time. */
static int
send(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    struct fsdpc_wire *wire = x->wire;
    struct fsdpc_wire_reduce *to = &wire->reduces[wire->next];
    fsdpc_unit_use(unit)->posted++;
    FSDPC_TRY(land_reduce(x, to));
    wire->next = (wire->next + 1) % wire->reduce_count;
    memset(wire->used, 0, (size_t)fsdpc_unit_layout(unit)->param_count);
    FSDPC_TRY(fsdpc_grad_pack(unit, grads, to->memory, wire->used));
    fsdpc_unit_add_used(unit, wire->used);
    fsdpc_exchange_note(x, FSDPC_TRACE_PACK, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    FSDPC_TRY(post(x, unit, to));
    to->unit = unit;
    return fsdpc_comm_flies(x->comm) ? FSDPC_OK : land_reduce(x, to);
}

static int
reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    fsdpc_unit_use(unit)->consumed = 0;
    if (x->world == 1) {
        FSDPC_TRY(fsdpc_grad_direct(unit, grads, fsdpc_unit_used(unit)));
        fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->grad_bytes);
        return FSDPC_OK;
    }
    if (fsdpc_unit_use(unit)->posted > 0) {
        return fsdpc_grad_keep_local(unit, grads);
    }
    return send(x, unit, grads);
}

static int
make_room(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const bool packs =
        x->world > 1 && !fsdpc_unit_is_hooked(unit) && fsdpc_unit_layout(unit)->trainable_count > 0;
    return packs ? land_reduce(x, &x->wire->reduces[x->wire->next]) : FSDPC_OK;
}

static bool
is_landed(const struct fsdpc_wire *wire, const fsdpc_unit *unit)
{
    for (int i = 0; i < wire->reduce_count; i++) {
        if (wire->reduces[i].unit == unit) {
            return false;
        }
    }
    return true;
}

/* Whether other ranks used a parameter is known at the end only. */
static bool
summed(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    struct fsdpc_unit_use *use = fsdpc_unit_use(unit);
    const bool over =
        x->world == 1 || (use->posted == 1 && fsdpc_used_all(unit) && is_landed(x->wire, unit));
    use->consumed = x->world > 1 && over;
    return over;
}

/* --- the end of backward ------------------------------------------------------------------------- */

static int
land_reduces(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int i = 0; i < wire->reduce_count; i++) {
        FSDPC_TRY(land_reduce(x, &wire->reduces[(wire->next + i) % wire->reduce_count]));
    }
    return FSDPC_OK;
}

/* This rank's bits: of parameters, and of units with gradients that were kept after the unit was sent. */
static void
write_bits(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    uint8_t *own = wire->bits + wire->bit_count * (size_t)x->rank;
    /* A process group may be a fake, which writes nothing. */
    memset(wire->bits, 0, wire->bit_count * (size_t)x->world);
    fsdpc_used_write(x, own);
    own += fsdpc_used_count(x);
    for (int u = 0; u < x->unit_count; u++) {
        own[u] = fsdpc_unit_sends_local(x->units[u]);
    }
}

static const uint8_t *
join_bits(const fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int r = 1; r < x->world; r++) {
        for (size_t i = 0; i < wire->bit_count; i++) {
            wire->bits[i] |= wire->bits[wire->bit_count * (size_t)r + i];
        }
    }
    return wire->bits;
}

/* All ranks' bits, while the last reductions land. */
static int
share_bits(fsdpc_exchange *x)
{
    static const char what[] = "used bits at the end of backward";
    int status = FSDPC_OK;
    const fsdpc_comm_part part = {x->wire->bits, (int64_t)x->wire->bit_count, FSDPC_BYTES};
    fsdpc_mark mark;
    fsdpc_flight *flight;
    write_bits(x);
    FSDPC_TRY(fsdpc_flight_gather(x->comm, &part, 1, mark_of(x, TURN_END, &mark), what, &flight));
    FSDPC_GOTO(land_reduces(x), fail);
    return land(x, &flight, what, NULL);
fail:
    x->wire->lost = !fsdpc_flight_free(flight) || x->wire->lost;
    return status;
}

/* Every rank learns which parameters got a gradient on any rank. *again: some rank had kept gradients of units,
 * which have been sent, and the ranks must compare once more. */
static int
share_used(fsdpc_exchange *x, bool *again)
{
    FSDPC_TRY(share_bits(x));
    const uint8_t *bits = join_bits(x), *kept = bits + fsdpc_used_count(x);
    fsdpc_used_read(x, bits);
    for (int u = 0; u < x->unit_count; u++) {
        if (kept[u]) {
            *again = true;
            FSDPC_TRY(send(x, x->units[u], NULL));
        }
    }
    return FSDPC_OK;
}

static int
end_alone(fsdpc_exchange *x)
{
    for (int u = 0; u < x->unit_count; u++) {
        if (fsdpc_unit_sends_local(x->units[u])) {
            FSDPC_TRY(reduce(x, x->units[u], NULL));
        }
    }
    return FSDPC_OK;
}

static int
end(fsdpc_exchange *x)
{
    if (x->world == 1) {
        return end_alone(x);
    }
    FSDPC_TRY(land_gathers(x));
    for (bool again = true; again;) {
        again = false;
        FSDPC_TRY(share_used(x, &again));
    }
    for (int u = 0; u < x->unit_count; u++) {
        x->uses[u].posted = x->uses[u].consumed = 0;
    }
    return FSDPC_OK;
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
    .reduce = reduce,
    .summed = summed,
    .make_room = make_room,
    .end = end,
    .prefetches = prefetches,
    .announce = announce,
    .before_hook = before_hook,
};
