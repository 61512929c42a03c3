/* Marks of flights, which say what each rank does next, and the errors of ranks that do different things. */
#include <stdio.h>

#include "base/status.h"
#include "exchange/exchange_wire_impl.h"

/* A negative turn says that a rank unfreezes a parameter: it encodes the unit and the parameter's number. */
enum { THAWS_UNKNOWN = -1, THAWS = -2, THAW_PARAMS = 1 << 12 };

int32_t
fsdpc_wire_thaw_turn(int unit, int param)
{
    bool fits = unit >= 0 && param < THAW_PARAMS && unit < INT32_MAX / THAW_PARAMS - 1;
    return fits ? THAWS - (unit * THAW_PARAMS + param) : THAWS_UNKNOWN;
}

/* Returns the error for the case that only one of two ranks unfreezes a parameter. */
static int
thaw_mismatch(const fsdpc_exchange *x, int32_t own, int rank, int32_t other)
{
    const int32_t which = own < 0 ? own : other;
    const int number = THAWS - which, who = own < 0 ? x->rank : rank;
    return fsdpc_exchange_thaw_error(x, which == THAWS_UNKNOWN ? -1 : number / THAW_PARAMS,
                                     number % THAW_PARAMS, who, own < 0 ? rank : x->rank);
}

static const char *
turn_text(const fsdpc_exchange *x, int32_t turn, const char *hook, char text[FSDPC_WIRE_WHAT_BYTES])
{
    if (turn == FSDPC_WIRE_HOOK) {
        snprintf(text, FSDPC_WIRE_WHAT_BYTES, hook ? "the %s" : "a communication hook", hook);
        return text;
    }
    if (turn == FSDPC_WIRE_END) {
        return "the end of backward";
    }
    const int unit = turn / FSDPC_WIRE_TURNS;
    if (unit >= x->unit_count) {
        return "a unit that this rank's model does not have";
    }
    snprintf(text, FSDPC_WIRE_WHAT_BYTES, "the %s of unit %s%s",
             turn == FSDPC_WIRE_REDUCE(unit) ? "reduce" : "gather", fsdpc_unit_name(x->units[unit]),
             turn == FSDPC_WIRE_APART(unit) ? " (beside another unit in use)" : "");
    return text;
}

/* The part of a mark that the ranks compare. `model` differs between models, whose turns may be equal. */
struct turn {
    int32_t next, model;
};

static int
compare_turn(const fsdpc_exchange *x, struct turn mine, const char *what, int rank,
             struct turn theirs)
{
    char here[FSDPC_WIRE_WHAT_BYTES], there[FSDPC_WIRE_WHAT_BYTES];
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
        "every rank gathers all units below it. All ranks must run equally many batches, also in "
        "an evaluation",
        x->rank, turn_text(x, own, what, here), rank, turn_text(x, other, NULL, there));
}

const fsdpc_mark *
fsdpc_wire_mark(const fsdpc_exchange *x, int32_t next, fsdpc_mark *mark)
{
    const uint64_t weights = x->wire->weights;
    *mark = (fsdpc_mark){
        {next, fsdpc_unit_born(x->units[0])}, 0, {(uint32_t)weights, (uint32_t)(weights >> 32)}};
    return x->trust_order ? NULL : mark;
}

void
fsdpc_wire_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_flight *flight)
{
    fsdpc_exchange_sent(x, unit, fsdpc_flight_sent_bytes(flight));
}

int
fsdpc_wire_compare(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what)
{
    const fsdpc_mark *marks = fsdpc_flight_marks(landed);
    const struct turn own = {marks[x->rank].words[0], marks[x->rank].words[1]};
    for (int r = 0; r < x->world; r++) {
        const struct turn other = {marks[r].words[0], marks[r].words[1]};
        FSDPC_TRY(compare_turn(x, own, what, r, other));
    }
    return fsdpc_error(FSDPC_E_MISMATCH,
                       "%s: the ranks run different units, or one of them differs from the "
                       "other ranks of its host",
                       what);
}

/* --- numbers of weights -------------------------------------------------------------------------- */

/* Samples are compared in passes without gradients, and in the first training step after such a pass. */
void
fsdpc_wire_number_weights(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched)
{
    struct fsdpc_wire *wire = x->wire;
    const bool samples = wire->samples && (!grad || wire->checks);
    wire->checks = !grad;
    wire->weights = 0;
    if (samples) {
        const fsdpc_pass pass = {tag, grad, touched};
        const enum fsdpc_found found = fsdpc_weights_compare(x, x->rank, wire->samples, true);
        fsdpc_weights_number(x, &wire->numbers, wire->known, &pass, found);
        wire->weights = wire->numbers.last;
    }
}

static uint64_t
weights_of(const fsdpc_mark *mark)
{
    return mark->note[0] | (uint64_t)mark->note[1] << 32;
}

int
fsdpc_wire_check_weights(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what)
{
    const fsdpc_mark *marks = fsdpc_flight_marks(landed);
    const uint64_t own = weights_of(&marks[x->rank]);
    for (int r = 0; own && r < x->world; r++) {
        const uint64_t other = weights_of(&marks[r]);
        if (other != own && fsdpc_weights_alike(x, r, own, other)) {
            return fsdpc_error(
                FSDPC_E_MISMATCH,
                "%s: rank %d and rank %d have weights of before and after a change (averages "
                "swapped in or out, an optimizer step): one of them runs more batches. All ranks "
                "must run equally many batches before parameters change, also in an evaluation",
                what, x->rank, r);
        }
    }
    return FSDPC_OK;
}
