/* Sums over replicas, where the device does not queue.
 *
 * Over a wire two replicas swap their sums in the background: a unit's swap begins in the backward, as soon as all
 * ranks of the shard group have reduced the unit. Replicas run their units each in its own order, so swaps are
 * matched by key and not by order. At the end all replicas compare in one message what they have: which parameters got a
 * gradient, which units were swapped, and which sums have changed since (a second gradient of the unit in this
 * backward). Those are swapped once more, so that the values do not depend on what began when.
 * Everywhere else each unit's sum is a blocking collective behind that message.
 */
#include <stdio.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/flight.h"
#include "unit/unit_impl.h"

enum {
    SWAPPED = 1, /* the replica has begun to swap the unit */
    CHANGED = 2, /* what it has swapped is not its sum any more */
};

static bool
takes_part(const fsdpc_unit *unit)
{
    /* On a device that queues the sum follows each unit's reduction (exchange_stream_replicas.c). */
    return unit->replicate && unit->layout->trainable_count > 0 && !unit->grads.hooked &&
           !fsdpc_device_get_caps(unit->device)->asynchronous;
}

static int
make_partial(fsdpc_unit *unit)
{
    return unit->grads.partial_any
               ? FSDPC_OK
               : fsdpc_device_zero(unit->device, unit->partial, unit->layout->grad_bytes);
}

static int
sum_now(fsdpc_unit *unit)
{
    fsdpc_grad_run run;
    FSDPC_TRY(make_partial(unit));
    for (int s = 0; fsdpc_layout_next_run(unit->layout, &s, &run);) {
        FSDPC_TRY(fsdpc_comm_all_reduce(unit->replicate, (char *)unit->partial + run.offset,
                                        run.numel, run.dtype, FSDPC_SUM, unit->name));
    }
    return fsdpc_grad_take_partial(unit);
}

/* --- a unit's sum, swapped in the background ------------------------------------------------------ */

enum { WHAT_BYTES = 160 };

static void
name_swap(const fsdpc_unit *unit, char what[WHAT_BYTES])
{
    snprintf(what, WHAT_BYTES, "sum over replicas of unit %s", unit->name);
}

/* The other replica's sum lies behind this one's, in the same order. */
static int
begin_swap(fsdpc_unit *unit, uint32_t key)
{
    int status = FSDPC_OK;
    char what[WHAT_BYTES];
    const size_t most = (size_t)unit->layout->segment_count;
    fsdpc_comm_part *parts = fsdpc_mem_calloc(most, sizeof *parts);
    size_t *offsets = fsdpc_mem_calloc(most, sizeof *offsets);
    if (!parts || !offsets) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of %zu segments", most), done);
    }
    int count = 0;
    fsdpc_grad_run run;
    for (int s = 0; fsdpc_layout_next_run(unit->layout, &s, &run); count++) {
        parts[count] = (fsdpc_comm_part){(char *)unit->partial + run.offset, run.numel, run.dtype};
        offsets[count] = run.offset;
    }
    const fsdpc_landing landing = {(char *)unit->partial + unit->layout->grad_bytes, 0, offsets};
    name_swap(unit, what);
    FSDPC_GOTO(
        fsdpc_flight_swap(unit->replicate, parts, count, &landing, key, what, &unit->swap.flight),
        done);
    unit->swap.sums = unit->grads.sums;
    unit->swap.sent_bytes += fsdpc_flight_sent_bytes(unit->swap.flight);
done:
    fsdpc_mem_free(parts);
    fsdpc_mem_free(offsets);
    return status;
}

static int
land_swap(fsdpc_unit *unit)
{
    char what[WHAT_BYTES];
    fsdpc_flight *flight = unit->swap.flight;
    unit->swap.flight = NULL;
    name_swap(unit, what);
    const int status = fsdpc_flight_land(flight, what, NULL);
    unit->swap.lost = !fsdpc_flight_free(flight) || unit->swap.lost;
    return status;
}

/* Of two summands the order is all one. */
static int
add_up(fsdpc_unit *unit)
{
    fsdpc_grad_run run;
    for (int s = 0; fsdpc_layout_next_run(unit->layout, &s, &run);) {
        char *own = (char *)unit->partial + run.offset;
        const void *other = own + unit->layout->grad_bytes;
        FSDPC_TRY(fsdpc_device_reduce(unit->device, own, run.dtype, &other, 1, run.dtype, run.numel,
                                      1.0, true));
    }
    return fsdpc_grad_take_partial(unit);
}

bool
fsdpc_unit_may_swap(const fsdpc_unit *unit)
{
    return unit->swap.key > 0 && !unit->swap.flight && !unit->grads.withheld && takes_part(unit);
}

int
fsdpc_unit_begin_swap(fsdpc_unit *unit)
{
    FSDPC_TRY(make_partial(unit));
    return begin_swap(unit, unit->swap.key);
}

uint64_t
fsdpc_unit_take_swapped_bytes(fsdpc_unit *unit)
{
    const uint64_t bytes = unit->swap.sent_bytes;
    unit->swap.sent_bytes = 0;
    return bytes;
}

void
fsdpc_unit_free_partial(fsdpc_unit *unit)
{
    unit->swap.lost = !fsdpc_flight_free(unit->swap.flight) || unit->swap.lost;
    if (!unit->swap.lost) { /* else the other replica may still send into the memory */
        fsdpc_device_free(unit->device, unit->partial, unit->footprint.partial_bytes);
    }
}

/* --- the end of a backward ------------------------------------------------------------------------- */

/* Units with the same replicas, in an order that is the same on them. */
struct group {
    fsdpc_unit **units;
    int count;
    fsdpc_comm *comm;
    uint8_t *flags; /* of any replica, one per unit */
    bool *used;     /* got a gradient on any replica */
};

/* Per unit a byte of flags and one byte per parameter. */
static void
write_record(const struct group *s, uint8_t *to)
{
    for (int i = 0; i < s->count; i++) {
        const fsdpc_unit *unit = s->units[i];
        const struct fsdpc_swap *swap = &unit->swap;
        const bool changed = swap->sums != unit->grads.sums;
        *to++ = (uint8_t)(swap->flight ? SWAPPED + (changed ? CHANGED : 0) : 0);
        for (int p = 0; p < unit->layout->param_count; p++) {
            *to++ = unit->grads.used[p];
        }
    }
}

static void
read_record(const struct group *s, const uint8_t *from)
{
    for (int i = 0; i < s->count; i++) {
        fsdpc_unit *unit = s->units[i];
        s->flags[i] |= *from++;
        for (int p = 0; p < unit->layout->param_count; p++) {
            unit->grads.used[p] |= *from++;
            s->used[i] = s->used[i] || unit->grads.used[p];
        }
    }
}

static int
compare(const struct group *s)
{
    int status = FSDPC_OK;
    const size_t own = (size_t)fsdpc_comm_rank(s->comm), world = (size_t)fsdpc_comm_world(s->comm);
    size_t bytes = (size_t)s->count;
    for (int i = 0; i < s->count; i++) {
        bytes += (size_t)s->units[i]->layout->param_count;
    }
    uint8_t *records = fsdpc_mem_calloc(world, bytes);
    if (!records) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the used bits of %d units", s->count);
    }
    write_record(s, records + bytes * own);
    FSDPC_GOTO(fsdpc_comm_all_gather(s->comm, records, bytes, "sums over replicas"), done);
    for (size_t r = 0; r < world; r++) {
        read_record(s, records + bytes * r);
    }
    for (int i = 0; fsdpc_comm_swaps(s->comm) && i < s->count; i++) {
        if (s->units[i]->swap.key == 0) {
            FSDPC_GOTO(fsdpc_comm_next_swap(s->comm, &s->units[i]->swap.key), done);
        }
    }
done:
    fsdpc_mem_free(records);
    return status;
}

static bool
moves(const struct group *s, int i)
{
    return s->used[i] || (s->flags[i] & SWAPPED);
}

static bool
moves_again(const struct group *s, int i)
{
    return s->used[i] && (s->flags[i] & CHANGED);
}

/* All swaps begin before one is waited for; those of changed sums go once more. */
static int
land_all(const struct group *s)
{
    for (int i = 0; i < s->count; i++) {
        if (moves(s, i) && !s->units[i]->swap.flight) {
            FSDPC_TRY(fsdpc_unit_begin_swap(s->units[i]));
        }
    }
    for (int i = 0; i < s->count; i++) {
        fsdpc_unit *unit = s->units[i];
        FSDPC_TRY(moves(s, i) ? land_swap(unit) : FSDPC_OK);
        if (moves_again(s, i)) {
            FSDPC_TRY(make_partial(unit));
            FSDPC_TRY(begin_swap(unit, unit->swap.key + 1));
        } else if (s->used[i]) {
            FSDPC_TRY(add_up(unit));
        }
    }
    for (int i = 0; i < s->count; i++) {
        if (moves_again(s, i)) {
            FSDPC_TRY(land_swap(s->units[i]));
            FSDPC_TRY(add_up(s->units[i]));
        }
    }
    return FSDPC_OK;
}

static int
sum_all_now(const struct group *s)
{
    for (int i = 0; i < s->count; i++) {
        const int status = s->used[i] ? sum_now(s->units[i]) : FSDPC_OK;
        if (status != FSDPC_OK) {
            return fsdpc_error_prepend(status, "sum over replicas of unit %s", s->units[i]->name);
        }
    }
    return FSDPC_OK;
}

/* Of the units that have the replicas of the first one. */
static int
sum_group(fsdpc_unit **units, int count)
{
    int status = FSDPC_OK;
    struct group s = {.comm = units[0]->replicate};
    s.units = fsdpc_mem_calloc((size_t)count, sizeof(fsdpc_unit *));
    s.flags = fsdpc_mem_calloc((size_t)count, sizeof *s.flags);
    s.used = fsdpc_mem_calloc((size_t)count, sizeof *s.used);
    if (!s.units || !s.flags || !s.used) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of %d units", count), done);
    }
    for (int i = 0; i < count; i++) {
        if (takes_part(units[i]) && units[i]->replicate == s.comm) {
            s.units[s.count++] = units[i];
        }
    }
    FSDPC_GOTO(compare(&s), done);
    FSDPC_GOTO(fsdpc_comm_swaps(s.comm) ? land_all(&s) : sum_all_now(&s), done);
done:
    for (int i = 0; i < s.count; i++) {
        s.units[i]->grads.partial_any = false;
    }
    fsdpc_mem_free(s.units);
    fsdpc_mem_free(s.flags);
    fsdpc_mem_free(s.used);
    return status;
}

static bool
is_first(fsdpc_unit *const *units, int at)
{
    for (int i = 0; i < at; i++) {
        if (takes_part(units[i]) && units[i]->replicate == units[at]->replicate) {
            return false;
        }
    }
    return true;
}

int
fsdpc_unit_reduce_replicas(fsdpc_unit **units, int count)
{
    for (int i = 0; i < count; i++) {
        if (takes_part(units[i]) && is_first(units, i)) {
            FSDPC_TRY(sum_group(units + i, count - i));
        }
    }
    return FSDPC_OK;
}
