/* What the files of the "wire" exchange share. See exchange_wire.c. */
#ifndef FSDPC_EXCHANGE_WIRE_IMPL_H
#define FSDPC_EXCHANGE_WIRE_IMPL_H

#include "comm/hosts.h"
#include "exchange/exchange_impl.h"
#include "exchange/exchange_weights.h"

enum { FSDPC_WIRE_WHAT_BYTES = 256 };

/* A reduce buffer: packed gradients on their way. Behind them in `memory` lie
 * the codes of those that travel coded, and room for the other ranks' pieces. */
struct fsdpc_wire_reduce {
    void *memory;
    fsdpc_flight *flight;
    fsdpc_unit *unit; /* NULL: none */
    bool packed;      /* the gradients are packed and not sent yet */
    uint64_t uses;
};

struct fsdpc_wire {
    fsdpc_flight **gathers;    /* per unit, NULL: none in flight */
    int *flying, flying_count; /* units whose gathers are in flight, in the order of the flights */
    fsdpc_lander lander;       /* lands these gathers: [Note: landed in order] in flight.h */
    /* Samples of this rank's weights (exchange_weights.h); NULL: one rank, or weights in device memory. */
    _Atomic uint64_t *samples;
    _Atomic uint64_t known[FSDPC_KNOWN_WEIGHTS];
    fsdpc_numbers numbers;
    uint64_t weights; /* what this rank's marks say of its weights: `numbers.last`, or 0 */
    bool checks;      /* the latest pass is without gradients */
    struct fsdpc_wire_reduce *reduces;
    int reduce_count, next;
    fsdpc_comm_part *parts; /* of the unit being sent */
    /* Per slot, and one more for gathers beside a slot in use: coded pieces of the unit in flight, segment by
     * segment; of each coded segment the pieces of all ranks, end to end. */
    struct fsdpc_exchange_room *coded;
    int coded_count;
    /* Offsets for the unit being sent: where each part lands; per segment: landing, codes, coding loss. */
    size_t *landing_offsets;
    void *sum_room;               /* for decoded chunks of coded pieces; NULL: no piece is coded */
    uint8_t *used, *bits;         /* used bits of the unit being packed, and of all at the end */
    size_t bit_count;             /* of `bits`, per rank */
    bool lost;                    /* a flight never landed: others may still write to its memory */
    struct fsdpc_wire_host *host; /* NULL: no slots are shared */
};

/* --- exchange_wire_host.c ------------------------------------------------------------------------ */

/* What a rank tells the others of its host, as counts. Of a slot: CLEARED, how often this rank was about to
 * fill it, done with the old values; FILLED, how often this rank's part has landed. Of a reduce buffer:
 * PACKED, how often this rank has packed into it; READ, how often this rank has read the others' buffers. */
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
    uint64_t *fills; /* per slot: how often it was filled, equal on all ranks */
};

/* Maps memory that a host's ranks share. Call before open_reduces. No-op if fsdpc_comm_hosts() is NULL. */
int fsdpc_wire_host_open(fsdpc_exchange *x, int slot_count);
/* `keep`: other ranks may still send to the memory, which stays. */
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

/* What a rank does next, as its marks say: FSDPC_WIRE_GATHER of a unit (FSDPC_WIRE_APART: to memory
 * of the rank's own), FSDPC_WIRE_REDUCE of a unit, a communication hook, or the end of a backward. */
enum {
    FSDPC_WIRE_HOOK = INT32_MAX,
    FSDPC_WIRE_END = FSDPC_WIRE_HOOK - 1,
    FSDPC_WIRE_ANY = FSDPC_WIRE_END - 1, /* never in a mark */
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
/* fsdpc_exchange_compare of this kind. */
void fsdpc_wire_number_weights(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
/* For a flight that has landed. FSDPC_E_MISMATCH: the weights of some rank have a different number. */
int fsdpc_wire_check_weights(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);
/* For a flight that landed with different marks: returns FSDPC_E_MISMATCH; the text says how they differ. */
int fsdpc_wire_compare(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);

/* --- exchange_wire_coded.c ----------------------------------------------------------------------- */

int fsdpc_wire_coded_open(fsdpc_exchange *x, int slot_count);
/* `keep`: other ranks may still send to the memory, which stays. */
void fsdpc_wire_coded_close(fsdpc_exchange *x, bool keep);
/* Codes this rank's piece of a segment, and decodes it into the slot; *part: all ranks' coded pieces. */
int fsdpc_wire_encode(fsdpc_exchange *x, fsdpc_unit *unit, int segment, fsdpc_comm_part *part);
/* Codes the packed gradients of a segment that this rank sends into `codes`, room for all ranks; *part: that
 * room. `lost`: the error kept for the first receiver, or NULL; the next ones follow, lost_bytes apart. */
int fsdpc_wire_encode_grads(const fsdpc_exchange *x, const fsdpc_unit *unit,
                            const fsdpc_segment *seg, const char *packed, fsdpc_route route,
                            char *lost, char *codes, fsdpc_comm_part *part);
/* Error feedback: drops the error that is kept for all receivers. */
int fsdpc_wire_forget(fsdpc_exchange *x);
/* Decodes the coded pieces that a flight of the unit brought; a no-op for a unit without coded segments. */
int fsdpc_wire_decode(fsdpc_exchange *x, fsdpc_unit *unit, fsdpc_route route);
/* True if a gather's flight on this rank brings the elements of rank `owner`: any other rank (FSDPC_TO_ALL),
 * or only ranks that this rank carries. In a reduction: true if this rank sends `owner` its gradients. */
bool fsdpc_wire_brings(const fsdpc_exchange *x, fsdpc_route route, int owner);

/* --- exchange_wire_land.c ------------------------------------------------------------------------ */

void fsdpc_wire_name_gather(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES]);
/* True if the unit's values are in a slot that the ranks of this host share. */
bool fsdpc_wire_is_shared(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* A gather has begun: other ranks may wait for it ([Note: landed in order] in flight.h). */
void fsdpc_wire_note_flying(fsdpc_exchange *x, int id);
int fsdpc_wire_land_first(void *exchange);
/* Waits for gathers that began before the flight, then for the flight, which is freed, also after a failure.
 * *summed (optional): fsdpc_flight_is_summed. FSDPC_E_MISMATCH: other turns, or other weights. */
int fsdpc_wire_land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed);
/* For a rank that knows that another rank does something else: instead of its next flight it
 * exchanges with all ranks what each is about to do (`next`, `what`). Returns FSDPC_E_MISMATCH. */
int fsdpc_wire_tell(fsdpc_exchange *x, int32_t next, const char *what);
int fsdpc_wire_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param);
int fsdpc_wire_before_hook(fsdpc_exchange *x, const char *what);
/* Lands unit `id`'s gather and all begun before it. A no-op if that gather is not in flight or `id` is -1. */
int fsdpc_wire_land_gather(fsdpc_exchange *x, int id);
/* Lands all gathers that are in flight. */
int fsdpc_wire_land_gathers(fsdpc_exchange *x);

/* --- exchange_wire_wait.c ------------------------------------------------------------------------ */

/* Waits until all ranks of this host have said at least `value`. `next`: what this rank's next flight is, or
 * FSDPC_WIRE_ANY. FSDPC_E_MISMATCH, on all ranks: a rank of this host is about to begin another flight. */
int fsdpc_wire_host_wait(fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value,
                         int32_t next, const char *op, const fsdpc_unit *unit);

/* --- exchange_wire_reduce.c ---------------------------------------------------------------------- */

int fsdpc_wire_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_wire_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_wire_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
/* Finishes the sums of all units, and shares the used bits. All gathers have landed before. */
int fsdpc_wire_end(fsdpc_exchange *x);

#endif
