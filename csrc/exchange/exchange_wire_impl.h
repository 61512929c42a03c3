/* What the files of the "wire" exchange share. See exchange_wire.c. */
#ifndef FSDPC_EXCHANGE_WIRE_IMPL_H
#define FSDPC_EXCHANGE_WIRE_IMPL_H

#include "comm/flight.h"
#include "exchange/exchange_impl.h"

enum { FSDPC_WIRE_WHAT_BYTES = 256 };

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

/* --- exchange_wire_marks.c ----------------------------------------------------------------------- */

/* What a rank does next, in its marks: FSDPC_WIRE_GATHER or FSDPC_WIRE_REDUCE of a unit, a communication hook, or
 * the end of a backward. */
enum { FSDPC_WIRE_HOOK = INT32_MAX, FSDPC_WIRE_END = FSDPC_WIRE_HOOK - 1 };
#define FSDPC_WIRE_GATHER(id) ((int32_t)(id) * 2)
#define FSDPC_WIRE_REDUCE(id) ((int32_t)(id) * 2 + 1)

/* Fills `mark` and returns `mark`; NULL if the user trusts the order, so that ranks compare nothing. */
const fsdpc_mark *fsdpc_wire_mark(const fsdpc_exchange *x, int32_t next, fsdpc_mark *mark);
/* Waits for the flight, and frees the flight, also after a failure. *summed (optional) as fsdpc_flight_is_summed.
 * FSDPC_E_MISMATCH: another rank means another one. */
int fsdpc_wire_land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed);
int fsdpc_wire_announce(fsdpc_exchange *x, int unit, int param);
int fsdpc_wire_before_hook(fsdpc_exchange *x, const char *what);

/* --- exchange_wire_reduce.c ---------------------------------------------------------------------- */

int fsdpc_wire_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_wire_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_wire_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
/* The sums of all units, and used bits; gathers have landed before. */
int fsdpc_wire_end(fsdpc_exchange *x);

#endif
