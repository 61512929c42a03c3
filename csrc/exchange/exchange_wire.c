/* Gathering and reducing over a communicator that carries bytes: each rank has its own slots.
 *
 * A gather casts this rank's pieces into their place in the slot and all-gathers the segments in
 * place; a reduce packs into one buffer and reduce-scatters its segments in place. Collectives match by order
 * alone, so before each of them the ranks compare their units (one small all-gather): ranks at
 * different units get an error that names both units instead of wrong values. With one rank there
 * is no communication.
 */
#include <stdio.h>
#include <string.h>

#include "exchange/exchange_impl.h"
#include "base/mem.h"
#include "base/status.h"

enum { WHAT_BYTES = 256 };

static int
open_wire(fsdpc_exchange *x, const fsdpc_exchange_plan *plan)
{
    (void)plan;
    int most = 1;
    for (int u = 0; u < x->unit_count; u++) {
        const int count = fsdpc_unit_layout(x->units[u])->segment_count;
        most = count > most ? count : most;
    }
    x->parts = fsdpc_mem_calloc((size_t)most, sizeof *x->parts);
    if (!x->parts) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for an exchange");
    }
    if (x->world == 1 || x->max_reduce_bytes == 0) {
        return FSDPC_OK;
    }
    return fsdpc_device_alloc(fsdpc_comm_device(x->comm), x->max_reduce_bytes, &x->reduce_buffer);
}

static void
close_wire(fsdpc_exchange *x)
{
    fsdpc_device_free(fsdpc_comm_device(x->comm), x->reduce_buffer, x->max_reduce_bytes);
    fsdpc_mem_free(x->parts);
}

static int
begin(fsdpc_exchange *x, uint64_t tag)
{
    (void)x;
    (void)tag;
    return FSDPC_OK;
}

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

/* All ranks' turns are compared before a collective: collectives of different turns that meet would end the
 * process or give wrong values. */
static int
compare_turns(fsdpc_exchange *x, int32_t next, const char *what)
{
    int status = FSDPC_OK;
    const struct turn own = {next, fsdpc_unit_born(x->units[0])};
    if (x->world == 1 || x->trust_order) {
        return FSDPC_OK;
    }
    struct turn *turns = fsdpc_mem_calloc((size_t)x->world, sizeof *turns);
    if (!turns) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory to compare the ranks' turns");
    }
    for (int r = 0; r < x->world; r++) {
        turns[r] = own; /* a process group may be a fake, which writes nothing */
    }
    FSDPC_GOTO(fsdpc_comm_all_gather(x->comm, turns, sizeof *turns, what), done);
    for (int r = 0; r < x->world && status == FSDPC_OK; r++) {
        status = compare_turn(x, own, what, r, turns[r]);
    }
done:
    fsdpc_mem_free(turns);
    return status;
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

static int
gather_segments(fsdpc_exchange *x, fsdpc_unit *unit)
{
    char what[WHAT_BYTES];
    snprintf(what, sizeof what, "gather of unit %s", fsdpc_unit_name(unit));
    FSDPC_TRY(compare_turns(x, fsdpc_unit_use(unit)->id * 2, what));
    const fsdpc_layout *layout = fsdpc_unit_layout(unit);
    for (int s = 0; s < layout->segment_count; s++) {
        const fsdpc_segment *seg = &layout->segments[s];
        FSDPC_TRY(fsdpc_exchange_cast_piece(x, unit, s, x->rank, 0, seg->piece_numel));
        x->parts[s] = (fsdpc_comm_part){fsdpc_exchange_values(x, unit) + seg->full_offset,
                                        seg->piece_numel, seg->compute};
    }
    return x->world > 1
               ? fsdpc_comm_all_gather_parts(x->comm, x->parts, layout->segment_count, what)
               : FSDPC_OK;
}

static int
gather(fsdpc_exchange *x, fsdpc_unit *unit, bool wait)
{
    /* No prefetch: the collective blocks. */
    if (!wait || fsdpc_unit_use(unit)->ready) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_arena_unveil(x->arena, fsdpc_unit_range(unit)));
    if (fsdpc_exchange_slot_is_in_use(x, unit)) {
        FSDPC_TRY(fsdpc_arena_spare(x->arena, fsdpc_unit_range(unit)));
        fsdpc_exchange_note(x, FSDPC_TRACE_SPARE, unit, fsdpc_unit_range(unit)->bytes);
        FSDPC_TRY(gather_segments(x, unit));
    } else if (x->slot_unit[fsdpc_unit_use(unit)->slot] != fsdpc_unit_use(unit)->id ||
               x->slot_tag[fsdpc_unit_use(unit)->slot] != x->tag) {
        x->slot_unit[fsdpc_unit_use(unit)->slot] = -1;
        FSDPC_TRY(gather_segments(x, unit));
        x->slot_unit[fsdpc_unit_use(unit)->slot] = fsdpc_unit_use(unit)->id;
        x->slot_tag[fsdpc_unit_use(unit)->slot] = x->tag;
    }
    fsdpc_unit_use(unit)->begun = fsdpc_unit_use(unit)->ready = true;
    return FSDPC_OK;
}

static int
release(fsdpc_exchange *x, fsdpc_unit *unit)
{
    fsdpc_unit_use(unit)->begun = fsdpc_unit_use(unit)->ready = false;
    if (fsdpc_unit_is_spare(unit)) {
        FSDPC_TRY(fsdpc_arena_restore(x->arena, fsdpc_unit_range(unit)));
    }
    return x->poison ? fsdpc_exchange_veil(x, unit) : FSDPC_OK;
}

/* This rank's pieces of the reduced buffer are added to the shard gradient. */
static int
take_sums(fsdpc_exchange *x, fsdpc_unit *unit)
{
    const void *source = x->reduce_buffer;
    return fsdpc_grad_sum(unit, &source, 1);
}

static int
pack(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    int status = FSDPC_OK;
    uint8_t *bits = fsdpc_mem_calloc((size_t)fsdpc_unit_layout(unit)->param_count, 1);
    if (!bits) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the used bits of unit %s",
                           fsdpc_unit_name(unit));
    }
    FSDPC_GOTO(fsdpc_grad_pack(unit, grads, x->reduce_buffer, bits), done);
    fsdpc_unit_add_used(unit, bits);
done:
    fsdpc_mem_free(bits);
    return status;
}

/* The gradients of one unit; every rank calls it at the same time. */
static int
send(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
    char what[WHAT_BYTES];
    snprintf(what, sizeof what, "reduce of unit %s", fsdpc_unit_name(unit));
    fsdpc_unit_use(unit)->posted++;
    FSDPC_TRY(compare_turns(x, fsdpc_unit_use(unit)->id * 2 + 1, what));
    FSDPC_TRY(pack(x, unit, grads));
    fsdpc_exchange_note(x, FSDPC_TRACE_PACK, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    int count = 0;
    for (int s = 0; s < fsdpc_unit_layout(unit)->segment_count; s++) {
        const fsdpc_segment *seg = &fsdpc_unit_layout(unit)->segments[s];
        if (seg->trainable) {
            x->parts[count++] = (fsdpc_comm_part){(char *)x->reduce_buffer + seg->reduce_offset,
                                                  seg->piece_numel, seg->reduce};
        }
    }
    FSDPC_TRY(fsdpc_comm_reduce_scatter_parts(x->comm, x->parts, count, what));
    FSDPC_TRY(take_sums(x, unit));
    fsdpc_exchange_note(x, FSDPC_TRACE_REDUCE, unit, fsdpc_unit_layout(unit)->reduce_bytes);
    return FSDPC_OK;
}

static int
reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads)
{
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

/* All-reduces which parameters got a gradient on any rank. Sends units of which some rank has kept
 * gradients locally after the unit was sent (*again: the bits must then be all-reduced once more). */
static int
share_used(fsdpc_exchange *x, bool *again)
{
    static const char what[] = "used bits at the end of backward";
    int status = FSDPC_OK;
    size_t count = (size_t)x->unit_count, at = 0;
    FSDPC_TRY(compare_turns(x, TURN_END, what));
    for (int u = 0; u < x->unit_count; u++) {
        count += (size_t)fsdpc_unit_layout(x->units[u])->param_count;
    }
    float *bits = fsdpc_mem_calloc(count, sizeof *bits);
    if (!bits) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for %zu used bits", count);
    }
    for (int u = 0; u < x->unit_count; u++) {
        for (int i = 0; i < fsdpc_unit_layout(x->units[u])->param_count; i++) {
            bits[at++] = fsdpc_unit_used(x->units[u])[i];
        }
        bits[at++] = fsdpc_unit_sends_local(x->units[u]);
    }
    FSDPC_GOTO(fsdpc_comm_all_reduce(x->comm, bits, (int64_t)count, FSDPC_F32, FSDPC_MAX, what),
               done);
    at = 0;
    for (int u = 0; u < x->unit_count; u++) {
        for (int i = 0; i < fsdpc_unit_layout(x->units[u])->param_count; i++) {
            fsdpc_unit_used(x->units[u])[i] = bits[at++] > 0;
        }
        if (bits[at++] > 0) {
            *again = true;
            FSDPC_GOTO(send(x, x->units[u], NULL), done);
        }
    }
done:
    fsdpc_mem_free(bits);
    return status;
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
    for (bool again = true; again;) {
        again = false;
        FSDPC_TRY(share_used(x, &again));
    }
    for (int u = 0; u < x->unit_count; u++) {
        x->uses[u].posted = 0;
    }
    return FSDPC_OK;
}

/* A reduction is a collective, which ends with the sum. */
static bool
summed(fsdpc_exchange *x, const fsdpc_unit *unit)
{
    (void)x;
    (void)unit;
    return true;
}

const struct fsdpc_exchange_i fsdpc_exchange_wire = {
    .kind = "wire",
    .any_order = false,
    .open = open_wire,
    .close = close_wire,
    .begin = begin,
    .gather = gather,
    .release = release,
    .reduce = reduce,
    .summed = summed,
    .end = end,
    .announce = announce,
    .before_hook = before_hook,
};
