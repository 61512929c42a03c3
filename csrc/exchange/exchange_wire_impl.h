/* What the files of the "wire" exchange share. See exchange_wire.c. */
#ifndef FSDPC_EXCHANGE_WIRE_IMPL_H
#define FSDPC_EXCHANGE_WIRE_IMPL_H

#include "comm/hosts.h"
#include "exchange/exchange_impl.h"
#include "exchange/exchange_weights.h"

enum { FSDPC_WIRE_WHAT_BYTES = 256 };

/* Packed gradients on their way; behind them in `memory` are the codes of those that travel coded, and room for the other
 * ranks' pieces. */
struct fsdpc_wire_reduce {
    void *memory;
    fsdpc_flight *flight;
    fsdpc_unit *unit; /* NULL: none */
    bool packed;      /* and not sent yet */
    uint64_t uses;
};

struct fsdpc_wire {
    fsdpc_flight **gathers;    /* per unit, NULL: none in flight */
    int *flying, flying_count; /* the units of these, in the order of their flights */
    fsdpc_lander lander;       /* of these flights */
    /* Of this rank's weights, as in exchange_weights.h; NULL: these lie in a device's memory. */
    _Atomic uint64_t *samples;
    _Atomic uint64_t known[FSDPC_KNOWN_WEIGHTS];
    fsdpc_numbers numbers;
    uint64_t weights; /* what marks say of them: the number, or 0 */
    bool checks;      /* the pass before was without gradients */
    struct fsdpc_wire_reduce *reduces;
    int reduce_count, next;
    fsdpc_comm_part *parts; /* of the unit being sent */
    /* Per slot, and one for gathers beside a slot in use: the coded pieces of the unit in flight, of each coded segment
     * those of all ranks, end to end. */
    struct fsdpc_exchange_room *coded;
    int coded_count;
    /* Of its parts, of its segments, of their codes, and of what those lost. */
    size_t *landing_offsets;
    void *sum_room;               /* for chunks of coded pieces, decoded; NULL: there are none */
    uint8_t *used, *bits;         /* of the unit being packed; of all ranks and units at the end */
    size_t bit_count;             /* per rank */
    bool lost;                    /* a flight has not landed: its memory is other ranks' for ever */
    struct fsdpc_wire_host *host; /* NULL: no slots are shared */
};

/* --- exchange_wire_host.c ------------------------------------------------------------------------ */

/* What a rank tells the others of its host, as counts: of a slot, how often this rank was about to fill the slot, and so
 * had no more use for what was there, and how often its part has landed; of a reduce buffer, how often this rank has
 * packed, and how often it had read the others' buffers. */
enum fsdpc_wire_word { FSDPC_WIRE_CLEARED, FSDPC_WIRE_FILLED, FSDPC_WIRE_PACKED, FSDPC_WIRE_READ };

struct fsdpc_wire_host {
    const struct fsdpc_hosts *hosts;
    char *ctl; /* in the host's segment */
    size_t ctl_bytes, words;
    uint64_t ctl_offset;
    int word_at[FSDPC_WIRE_READ + 1];
    char *buffers; /* [rank of this host][reduce buffer] */
    size_t buffers_bytes;
    uint64_t buffers_offset;
    uint64_t *fills; /* per slot: the same on all ranks, which fill slots in one order */
};

/* Before the reduce buffers are made. Without ranks that share this host nothing is made. */
int fsdpc_wire_host_open(fsdpc_exchange *x, int slot_count);
/* `keep`: other ranks may still send to the memory. */
void fsdpc_wire_host_close(fsdpc_exchange *x, bool keep);
/* Reduce buffer `slot` of a rank of this host. */
char *fsdpc_wire_host_buffer(const fsdpc_exchange *x, int rank, int slot);
void fsdpc_wire_say(const fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value);
bool fsdpc_wire_has_said(const fsdpc_exchange *x, int rank, enum fsdpc_wire_word word, int index,
                         uint64_t value);
/* The word that waits sleep on: it changes whenever a rank of this host says something. */
_Atomic uint32_t *fsdpc_wire_changes(const fsdpc_exchange *x);
void fsdpc_wire_say_change(const fsdpc_exchange *x);

/* --- exchange_wire_marks.c ----------------------------------------------------------------------- */

/* What a rank does next, in its marks: FSDPC_WIRE_GATHER (FSDPC_WIRE_APART: to memory of its own) or FSDPC_WIRE_REDUCE
 * of a unit, a communication hook, or the end of a backward. */
enum {
    FSDPC_WIRE_HOOK = INT32_MAX,
    FSDPC_WIRE_END = FSDPC_WIRE_HOOK - 1,
    FSDPC_WIRE_ANY = FSDPC_WIRE_END - 1, /* in no mark */
    FSDPC_WIRE_TURNS = 3
};
#define FSDPC_WIRE_GATHER(id) ((int32_t)(id) * FSDPC_WIRE_TURNS)
#define FSDPC_WIRE_APART(id) (FSDPC_WIRE_GATHER(id) + 1)
#define FSDPC_WIRE_REDUCE(id) (FSDPC_WIRE_GATHER(id) + 2)

/* Fills `mark` and returns `mark`; NULL if the user trusts the order, so that ranks compare nothing. */
const fsdpc_mark *fsdpc_wire_mark(const fsdpc_exchange *x, int32_t next, fsdpc_mark *mark);
/* Counts what a flight of the unit sends. */
void fsdpc_wire_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_flight *flight);
/* The number below zero by which a mark says that its rank unfreezes this parameter. */
int32_t fsdpc_wire_thaw_turn(int unit, int param);
/* fsdpc_exchange_compare. */
void fsdpc_wire_number_weights(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
/* FSDPC_E_MISMATCH: the flight has landed, and another rank's weights have another number. */
int fsdpc_wire_check_weights(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);
/* FSDPC_E_MISMATCH: the marks of a flight that has landed differ; the error says how. */
int fsdpc_wire_compare(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);

/* --- exchange_wire_coded.c ----------------------------------------------------------------------- */

int fsdpc_wire_coded_open(fsdpc_exchange *x, int slot_count);
/* `keep`: other ranks may still send to the memory. */
void fsdpc_wire_coded_close(fsdpc_exchange *x, bool keep);
/* Codes this rank's piece of a segment, and decodes the piece into the slot; *part: the coded pieces. */
int fsdpc_wire_encode(fsdpc_exchange *x, fsdpc_unit *unit, int segment, fsdpc_comm_part *part);
/* Codes the packed gradients of a segment that this rank sends, into room for the pieces of all ranks; *part: these.
 * `lost`: of the first receiver's piece of the segment, or NULL; the next one's is lost_bytes of the footprint behind. */
int fsdpc_wire_encode_grads(const fsdpc_exchange *x, const fsdpc_unit *unit,
                            const fsdpc_segment *seg, const char *packed, fsdpc_route route,
                            char *lost, char *codes, fsdpc_comm_part *part);
/* Error feedback: drops what is kept, receiver by receiver. */
int fsdpc_wire_forget(fsdpc_exchange *x);
/* Decodes what a flight has brought; nothing where the unit is not coded. */
int fsdpc_wire_decode(fsdpc_exchange *x, fsdpc_unit *unit, fsdpc_route route);
/* Elements of another rank that a flight of a gather brings into a slot that the ranks of this host share, or all of them
 * into this rank's own memory; in a reduction, gradients that this rank sends to their owner. */
bool fsdpc_wire_brings(const fsdpc_exchange *x, fsdpc_route route, int owner);

/* --- exchange_wire_land.c ------------------------------------------------------------------------ */

void fsdpc_wire_name_gather(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES]);
/* The unit's values are in a slot that the ranks of this host share. */
bool fsdpc_wire_is_shared(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* A gather has begun: others may wait for it ([Note: landed in order] in flight.h). */
void fsdpc_wire_note_flying(fsdpc_exchange *x, int id);
int fsdpc_wire_land_first(void *exchange);
/* Waits for gathers that began before the flight, then for the flight, and frees the flight, also after a failure.
 * *summed (optional) as fsdpc_flight_is_summed. FSDPC_E_MISMATCH: another rank means another one. */
int fsdpc_wire_land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed);
/* For a rank that knows that another one does something else: instead of its next flight it exchanges with all ranks what
 * each is about to do (`next`, `what`). Returns FSDPC_E_MISMATCH. */
int fsdpc_wire_tell(fsdpc_exchange *x, int32_t next, const char *what);
int fsdpc_wire_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param);
int fsdpc_wire_before_hook(fsdpc_exchange *x, const char *what);
/* Waits until this rank's part of the unit's gather has landed, and those of gathers that began before. A no-op if none is in flight, or if `id` is -1. */
int fsdpc_wire_land_gather(fsdpc_exchange *x, int id);
/* The same for all units. */
int fsdpc_wire_land_gathers(fsdpc_exchange *x);

/* --- exchange_wire_wait.c ------------------------------------------------------------------------ */

/* Waits until all ranks of this host have said at least `value`. `next`: what this rank's next flight is, or
 * FSDPC_WIRE_ANY; if a rank of this host is about to begin another one, all ranks are told: FSDPC_E_MISMATCH. */
int fsdpc_wire_host_wait(fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value,
                         int32_t next, const char *op, const fsdpc_unit *unit);

/* --- exchange_wire_reduce.c ---------------------------------------------------------------------- */

int fsdpc_wire_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_wire_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_wire_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
/* The sums of all units, and used bits; gathers have landed before. */
int fsdpc_wire_end(fsdpc_exchange *x);

#endif
