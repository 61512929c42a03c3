/* Sums over replicas, on devices that do not queue.
 *
 * Over a wire replicas swap sums in the background, by two flights (transfers). In the first one each replica
 * receives its share of the other replicas' sums, and adds the shares in the order of replicas. In the second
 * flight all replicas gather the added shares. A unit's swap begins in the backward, once all ranks of the
 * shard group have reduced the unit. Replicas may run units in different orders, so flights are matched by
 * key. In the backward no replica waits for another: the second flight begins only if the first has arrived.
 * At the end each replica sends one message: which parameters got a gradient, which units were swapped, and
 * which sums have changed since their swap began. Changed sums are swapped once more, so the values do not
 * depend on timing. Without flights, each unit's sum is a blocking collective after that message.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "comm/flight.h"
#include "unit/unit_impl.h"

enum {
    SWAPPED = 1, /* the replica has begun to swap the unit */
    CHANGED = 2, /* the replica's sum has changed since the swap began */
};

static bool
takes_part(const fsdpc_unit *unit)
{
    /* On a device that queues, exchange_stream_replicas.c sums over replicas after each unit's reduction. */
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

/* --- a unit's sum, in the background -------------------------------------------------------------- */

enum { WHAT_BYTES = 160 };

static void
name_swap(const fsdpc_unit *unit, char what[WHAT_BYTES])
{
    snprintf(what, WHAT_BYTES, "sum over replicas of unit %s", unit->name);
}

/* Returns a replica's shares, which lie after the sum over the shard group. */
static char *
shares_of(const fsdpc_unit *unit, int replica, size_t *bytes)
{
    size_t begin;
    *bytes = fsdpc_footprint_shares(unit->layout, fsdpc_comm_world(unit->replicate), &begin);
    return (char *)unit->partial + begin + *bytes * (size_t)replica;
}

/* Begins a flight of the swap: the first one, or, with `landing` NULL, the second one, a gather. */
static int
fly(fsdpc_unit *unit, const fsdpc_comm_part *parts, int count, const fsdpc_landing *landing)
{
    char what[WHAT_BYTES];
    struct fsdpc_swap *swap = &unit->swap;
    name_swap(unit, what);
    FSDPC_TRY(fsdpc_flight_by_key(unit->replicate, parts, count, landing,
                                  swap->key + (landing ? 0 : 1), what, &swap->flight));
    swap->gathers = landing == NULL;
    swap->sent_bytes += fsdpc_flight_sent_bytes(swap->flight);
    return FSDPC_OK;
}

static int
land(fsdpc_unit *unit)
{
    char what[WHAT_BYTES];
    fsdpc_flight *flight = unit->swap.flight;
    unit->swap.flight = NULL;
    name_swap(unit, what);
    const int status = fsdpc_flight_land(flight, what, NULL);
    unit->swap.lost = !fsdpc_flight_free(flight) || unit->swap.lost;
    return status;
}

/* Begins the first flight. The other replicas' sums of this replica's share land where the shares begin. */
static int
begin_scatter(fsdpc_unit *unit)
{
    int status = FSDPC_OK, count = 0;
    size_t bytes;
    const size_t most = (size_t)unit->layout->segment_count;
    fsdpc_comm_part *parts = fsdpc_mem_calloc(most, sizeof *parts);
    size_t *offsets = fsdpc_mem_calloc(most, sizeof *offsets);
    fsdpc_share share = {.end = 0};
    if (!parts || !offsets) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of %zu segments", most), done);
    }
    const int replicas = fsdpc_comm_world(unit->replicate);
    for (int s = 0; fsdpc_footprint_next_share(unit->layout, replicas, &s, &share); count++) {
        parts[count] = (fsdpc_comm_part){(char *)unit->partial + share.run.offset, share.numel,
                                         share.run.dtype};
        offsets[count] = share.offset;
    }
    const fsdpc_landing landing = {shares_of(unit, 0, &bytes), bytes, offsets};
    FSDPC_GOTO(fly(unit, parts, count, &landing), done);
    unit->swap.sums = unit->grads.sums;
done:
    fsdpc_mem_free(parts);
    fsdpc_mem_free(offsets);
    return status;
}

/* Sums this replica's shares in the order of replicas. Writes the sums where the second flight reads them. */
static int
sum_shares(fsdpc_unit *unit, const void **sources)
{
    size_t bytes;
    fsdpc_share share = {.end = 0};
    const int own = fsdpc_comm_rank(unit->replicate), count = fsdpc_comm_world(unit->replicate);
    char *landed = shares_of(unit, 0, &bytes), *to = landed + bytes * (size_t)own;
    for (int s = 0; fsdpc_footprint_next_share(unit->layout, count, &s, &share);) {
        const size_t item = fsdpc_dtype_bytes(share.run.dtype);
        for (int r = 0; r < count; r++) {
            sources[r] = landed + bytes * (size_t)(r < own ? r : r - 1) + share.offset;
        }
        sources[own] =
            (char *)unit->partial + share.run.offset + item * (size_t)(share.numel * own);
        FSDPC_TRY(fsdpc_device_reduce(unit->device, to + share.offset, share.run.dtype, sources,
                                      count, share.run.dtype, share.numel, 1.0, false));
    }
    return FSDPC_OK;
}

/* Waits for the first flight, sums this replica's shares, and begins the second flight. */
static int
begin_gather(fsdpc_unit *unit)
{
    int status = FSDPC_OK;
    size_t bytes;
    char *shares = shares_of(unit, 0, &bytes);
    const fsdpc_comm_part part = {shares, (int64_t)bytes, FSDPC_BYTES};
    const size_t replicas = (size_t)fsdpc_comm_world(unit->replicate);
    const void **sources = fsdpc_mem_calloc(replicas, sizeof *sources);
    if (!sources) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of %zu replicas", replicas);
    }
    FSDPC_GOTO(land(unit), done);
    FSDPC_GOTO(sum_shares(unit, sources), done);
    FSDPC_GOTO(fly(unit, &part, 1, NULL), done);
done:
    fsdpc_mem_free(sources);
    return status;
}

/* Copies all summed shares, which have landed, to `partial`, and takes `partial` into the shard gradient. */
static int
take_shares(fsdpc_unit *unit)
{
    size_t bytes;
    fsdpc_share share = {.end = 0};
    const int count = fsdpc_comm_world(unit->replicate);
    for (int s = 0; fsdpc_footprint_next_share(unit->layout, count, &s, &share);) {
        char *to = (char *)unit->partial + share.run.offset;
        int64_t left = share.run.numel;
        for (int r = 0; left > 0; r++, left -= share.numel) {
            const int64_t n = left < share.numel ? left : share.numel;
            const size_t wanted = (size_t)n * fsdpc_dtype_bytes(share.run.dtype);
            memcpy(to, shares_of(unit, r, &bytes) + share.offset, wanted);
            to += wanted;
        }
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
    return begin_scatter(unit);
}

int
fsdpc_unit_advance_swap(fsdpc_unit *unit)
{
    const struct fsdpc_swap *swap = &unit->swap;
    return swap->flight && !swap->gathers && fsdpc_flight_is_here(swap->flight) ? begin_gather(unit)
                                                                                : FSDPC_OK;
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
    /* If a flight was lost, other replicas may still send into `partial`, so `partial` is not freed. */
    if (!unit->swap.lost && !fsdpc_comm_has_lost(unit->replicate)) {
        fsdpc_device_free(unit->device, unit->partial, unit->footprint.partial_bytes);
    }
}

/* --- the end of a backward ------------------------------------------------------------------------- */

/* Units with the same replicas, in an order that is the same on all replicas. */
struct group {
    fsdpc_unit **units;
    int count;
    fsdpc_comm *comm;
    uint8_t *flags; /* per unit: SWAPPED or CHANGED if they are set on any replica */
    bool *used;     /* per unit: a parameter got a gradient on any replica */
};

/* A record has, per unit, a byte of flags and one byte per parameter. */
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
    for (int i = 0; fsdpc_comm_flies(s->comm) && i < s->count; i++) {
        if (s->units[i]->swap.key == 0) {
            FSDPC_GOTO(fsdpc_comm_next_keys(s->comm, &s->units[i]->swap.key), done);
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

static bool
is_wanted(const struct group *s, int i, bool again)
{
    return again ? moves_again(s, i) : moves(s, i);
}

/* Every replica begins all its swaps before it waits for any. With `again`, swaps only sums that changed. */
static int
swap_units(const struct group *s, bool again)
{
    for (int i = 0; i < s->count; i++) {
        if (is_wanted(s, i, again) && !s->units[i]->swap.flight) {
            FSDPC_TRY(fsdpc_unit_begin_swap(s->units[i]));
        }
    }
    for (int i = 0; i < s->count; i++) {
        if (is_wanted(s, i, again) && !s->units[i]->swap.gathers) {
            FSDPC_TRY(begin_gather(s->units[i]));
        }
    }
    for (int i = 0; i < s->count; i++) {
        if (is_wanted(s, i, again)) {
            FSDPC_TRY(land(s->units[i]));
            const bool complete = again || (s->used[i] && !moves_again(s, i));
            FSDPC_TRY(complete ? take_shares(s->units[i]) : FSDPC_OK);
        }
    }
    return FSDPC_OK;
}

static int
swap_all(const struct group *s)
{
    FSDPC_TRY(swap_units(s, false));
    return swap_units(s, true);
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

/* Sums over the replicas of the first unit: this unit, and all other units that have the same replicas. */
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
    FSDPC_GOTO(fsdpc_comm_flies(s.comm) ? swap_all(&s) : sum_all_now(&s), done);
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
