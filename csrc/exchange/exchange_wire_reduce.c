/* The reducing half of the "wire" exchange: sending packed gradients, summing, and the end of a backward. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "exchange/exchange_used.h"
#include "exchange/exchange_wire_impl.h"

static void
name_reduce(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES])
{
    snprintf(what, FSDPC_WIRE_WHAT_BYTES, "reduce of unit %s", fsdpc_unit_name(unit));
}

static char *
codes_room(const struct fsdpc_wire_reduce *to, const fsdpc_unit *unit)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    return (char *)to->memory + fsdpc_footprint_packed(layout);
}

static char *
landing_room(const struct fsdpc_wire_reduce *to, const fsdpc_unit *unit)
{
    return codes_room(to, unit) + fsdpc_footprint_codes(fsdpc_unit_layout(unit), NULL);
}

/* Lists *count parts and where received pieces land. Parts that a blocking collective sums are not coded. */
static int
list_parts(fsdpc_exchange *x, const struct fsdpc_wire_reduce *to, fsdpc_route route, int *count)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(to->unit);
    const size_t segments = (size_t)layout->segment_count;
    size_t *offsets = x->wire->landing_offsets, *landings = offsets + segments;
    size_t *codes = landings + segments, *lost = codes + segments;
    char *kept = x->lost[fsdpc_unit_use(to->unit)->id].memory;
    fsdpc_footprint_landing(layout, landings);
    fsdpc_footprint_codes(layout, codes);
    fsdpc_footprint_lost(layout, lost);
    *count = 0;
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        if (!seg->trainable) {
            continue;
        }
        fsdpc_comm_part *part = &x->wire->parts[*count];
        offsets[(*count)++] = landings[s];
        *part = (fsdpc_comm_part){(char *)to->memory + seg->reduce_offset, seg->piece_numel,
                                  seg->reduce};
        if (seg->reduce_coded_bytes > 0 && fsdpc_comm_flies(x->comm)) {
            FSDPC_TRY(fsdpc_wire_encode_grads(x, to->unit, seg, to->memory, route,
                                              kept && seg->feedback ? kept + lost[s] : NULL,
                                              codes_room(to, to->unit) + codes[s], part));
        }
    }
    return FSDPC_OK;
}

static int
post(fsdpc_exchange *x, struct fsdpc_wire_reduce *to)
{
    int count;
    char what[FSDPC_WIRE_WHAT_BYTES];
    fsdpc_mark mark;
    const fsdpc_unit *unit = to->unit;
    const fsdpc_route route = x->wire->host ? FSDPC_BY_CARRIERS : FSDPC_TO_ALL;
    const size_t stride = fsdpc_footprint_landing(fsdpc_unit_layout(unit), NULL);
    const fsdpc_landing landing = {landing_room(to, unit), stride, x->wire->landing_offsets};
    FSDPC_TRY(list_parts(x, to, route, &count));
    to->packed = false;
    name_reduce(unit, what);
    FSDPC_TRY(fsdpc_flight_reduce(
        x->comm, x->wire->parts, count, &landing, route,
        fsdpc_wire_mark(x, FSDPC_WIRE_REDUCE(fsdpc_unit_use(unit)->id), &mark), what, &to->flight));
    fsdpc_wire_count(x, unit, to->flight);
    return FSDPC_OK;
}

/* Sums this rank's pieces, and those of the ranks whose carrier this rank is, over the ranks of this host. */
static int
sum_host(fsdpc_exchange *x, struct fsdpc_wire_reduce *to, int slot)
{
    const fsdpc_hosts *hosts = x->wire->host->hosts;
    const char *buffers[FSDPC_SHM_MAX_RANKS];
    for (int rank = 0; rank < hosts->local_world; rank++) {
        buffers[rank] = fsdpc_wire_host_buffer(x, rank, slot);
    }
    for (int r = 0; hosts->local_world > 1 && r < x->world; r++) {
        if (r == x->rank || fsdpc_hosts_carries(x->comm, x->rank, r)) {
            FSDPC_TRY(fsdpc_grad_sum_pieces(to->unit, r, buffers, hosts->local_world, to->memory));
        }
    }
    fsdpc_wire_say(x, FSDPC_WIRE_READ, slot, to->uses);
    return FSDPC_OK;
}

/* Sends the gradients that this rank packed last, after all other ranks of this host have packed theirs. The
 * call comes one reduction after the packing, so that ranks rarely wait for each other here. */
static int
post_packed(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    for (int i = 0; wire->host && i < wire->reduce_count; i++) {
        struct fsdpc_wire_reduce *to = &wire->reduces[i];
        if (to->packed) {
            FSDPC_TRY(fsdpc_wire_host_wait(x, FSDPC_WIRE_PACKED, i, to->uses,
                                           FSDPC_WIRE_REDUCE(fsdpc_unit_use(to->unit)->id),
                                           "reduce", to->unit));
            FSDPC_TRY(sum_host(x, to, i));
            FSDPC_TRY(post(x, to));
        }
    }
    return FSDPC_OK;
}

/* Lands a reduction, and adds this rank's pieces of all ranks' gradients to the shard gradient. */
static int
land_reduce(fsdpc_exchange *x, struct fsdpc_wire_reduce *from)
{
    bool summed;
    char what[FSDPC_WIRE_WHAT_BYTES];
    const struct fsdpc_wire_host *host = x->wire->host;
    FSDPC_TRY(from->packed ? post_packed(x) : FSDPC_OK);
    fsdpc_unit *unit = from->unit;
    from->unit = NULL;
    if (!unit) {
        return FSDPC_OK;
    }
    name_reduce(unit, what);
    FSDPC_TRY(fsdpc_wire_land(x, &from->flight, what, &summed));
    FSDPC_TRY(fsdpc_grad_sum_landed(unit, from->memory, summed ? NULL : landing_room(from, unit),
                                    host ? host->hosts->host : x->rank,
                                    host ? host->hosts->host_count : x->world, x->wire->sum_room));
    fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    return FSDPC_OK;
}

/* Waits until the buffer is free. Other ranks of this host may still read the gradients packed before. */
static int
take_buffer(fsdpc_exchange *x, const fsdpc_unit *unit, struct fsdpc_wire_reduce *to, int slot)
{
    FSDPC_TRY(post_packed(x));
    FSDPC_TRY(land_reduce(x, to));
    return x->wire->host ? fsdpc_wire_host_wait(x, FSDPC_WIRE_READ, slot, to->uses, FSDPC_WIRE_ANY,
                                                "buffer for a reduce", unit)
                         : FSDPC_OK;
}

/* Packs the gradients of one unit and begins to send them. All ranks must send units in one order. */
static int
send(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    struct fsdpc_wire *wire = x->wire;
    const int slot = wire->next;
    struct fsdpc_wire_reduce *to = &wire->reduces[slot];
    fsdpc_unit_use(unit)->posted++;
    FSDPC_TRY(take_buffer(x, unit, to, slot));
    wire->next = (slot + 1) % wire->reduce_count;
    memset(wire->used, 0, (size_t)fsdpc_unit_layout(unit)->param_count);
    FSDPC_TRY(fsdpc_grad_pack(unit, grads, to->memory, wire->used));
    fsdpc_unit_add_used(unit, wire->used);
    fsdpc_exchange_note(x, FSDPC_TRACE_PACK, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    to->unit = unit;
    if (wire->host) {
        to->packed = true;
        fsdpc_wire_say(x, FSDPC_WIRE_PACKED, slot, ++to->uses);
        return FSDPC_OK;
    }
    FSDPC_TRY(post(x, to));
    return fsdpc_comm_flies(x->comm) ? FSDPC_OK : land_reduce(x, to);
}

int
fsdpc_wire_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
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

int
fsdpc_wire_make_room(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    const bool packs =
        x->world > 1 && !fsdpc_unit_is_hooked(unit) && fsdpc_unit_layout(unit)->trainable_count > 0;
    FSDPC_TRY(packs ? post_packed(x) : FSDPC_OK);
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

/* With several ranks, false if this rank left parameters unused: others' bits are known only at the end. */
bool
fsdpc_wire_summed(fsdpc_exchange *x, const fsdpc_unit *unit)
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

/* Writes this rank's used bits, and one bit per unit that has local gradients which were not sent yet. */
static void
write_bits(fsdpc_exchange *x)
{
    struct fsdpc_wire *wire = x->wire;
    uint8_t *own = wire->bits + wire->bit_count * (size_t)x->rank;
    /* All bits are zeroed, because a fake process group writes none of them. */
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

/* Gathers the bits of all ranks while the last reductions land. */
static int
share_bits(fsdpc_exchange *x)
{
    static const char what[] = "used bits at the end of backward";
    int status = FSDPC_OK;
    const fsdpc_comm_part part = {x->wire->bits, (int64_t)x->wire->bit_count, FSDPC_BYTES};
    fsdpc_mark mark;
    fsdpc_flight *flight;
    FSDPC_TRY(post_packed(x));
    write_bits(x);
    FSDPC_TRY(fsdpc_flight_gather(x->comm, &part, 1, FSDPC_TO_ALL,
                                  fsdpc_wire_mark(x, FSDPC_WIRE_END, &mark), what, &flight));
    FSDPC_GOTO(land_reduces(x), fail);
    return fsdpc_wire_land(x, &flight, what, NULL);
fail:
    x->wire->lost = !fsdpc_flight_free(flight) || x->wire->lost;
    return status;
}

/* Tells every rank which parameters got a gradient on any rank. *again is set if some rank had kept local
 * gradients of a unit. They are sent now, and the ranks must share their bits once more. */
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
            FSDPC_TRY(fsdpc_wire_reduce(x, x->units[u], NULL));
        }
    }
    return FSDPC_OK;
}

int
fsdpc_wire_end(fsdpc_exchange *x)
{
    if (x->world == 1) {
        return end_alone(x);
    }
    for (bool again = true; again;) {
        again = false;
        FSDPC_TRY(share_used(x, &again));
    }
    for (int u = 0; u < x->unit_count; u++) {
        x->uses[u].posted = x->uses[u].consumed = 0;
    }
    return FSDPC_OK;
}
