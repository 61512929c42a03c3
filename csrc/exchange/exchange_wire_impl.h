/* Declarations that the source files of the "wire" exchange share. See exchange_wire.c. */
#ifndef FSDPC_EXCHANGE_WIRE_IMPL_H
#define FSDPC_EXCHANGE_WIRE_IMPL_H

#include "comm/hosts.h"
#include "exchange/exchange_impl.h"
#include "exchange/exchange_weights.h"

enum { FSDPC_WIRE_WHAT_BYTES = 256 };

/* A reduce buffer with packed gradients that are being sent. After them, `memory` holds the codes of coded
 * gradients, and room for the pieces that other ranks send. */
struct fsdpc_wire_reduce {
    void *memory;
    fsdpc_flight *flight;
    fsdpc_unit *unit; /* NULL: none */
    bool packed;      /* true: the gradients are packed and not sent yet */
    uint64_t uses;
};

struct fsdpc_wire {
    /* for each unit, the flight of its gather; NULL: none is in flight */
    fsdpc_flight **gathers;
    int *flying, flying_count; /* units whose gathers are in flight, in the order of the flights */
    /* lands the gathers in `flying`: [Note: landed in order] in flight.h */
    fsdpc_lander lander;
    /* Samples of this rank's weights (exchange_weights.h). NULL: one rank, or the weights are on a device. */
    _Atomic uint64_t *samples;
    _Atomic uint64_t known[FSDPC_KNOWN_WEIGHTS];
    fsdpc_numbers numbers;
    uint64_t weights; /* what this rank's marks say about its weights: `numbers.last`; 0: nothing */
    /* true: the latest pass has no gradients; so the latest pass and the next one compare samples */
    bool checks;
    struct fsdpc_wire_reduce *reduces;
    int reduce_count, next;
    fsdpc_comm_part *parts; /* parts of the unit being sent */
    /* Memory for coded pieces of the unit in flight: one per slot, and one for gathers into spare memory.
     * Each holds, segment after segment, the coded pieces of all ranks, end to end. */
    struct fsdpc_exchange_room *coded;
    int coded_count;
    /* Four arrays of offsets for the unit being sent. The first one has an entry per part: where received
     * pieces of the part land. The others have an entry per segment: where its received pieces land, where
     * its codes lie, and where its kept coding error lies. */
    size_t *landing_offsets;
    /* holds decoded chunks of coded pieces during a sum; NULL: no piece is coded */
    void *sum_room;
    /* Used bits. `used`: of the unit being packed. `bits`: of all units and all ranks, at the end of a
     * backward. */
    uint8_t *used, *bits;
    size_t bit_count; /* size of `bits` per rank */
    /* true: a flight never landed, so other ranks may still write to its memory */
    bool lost;
    struct fsdpc_wire_host *host; /* NULL if no slots are shared */
};

/* --- exchange_wire_host.c ------------------------------------------------------------------------ */

/* Counts that a rank publishes to the other ranks of its host. Of a slot: CLEARED, how often this rank has
 * given up the old values; FILLED, how often this rank's flight into the slot has landed. Of a reduce buffer:
 * PACKED, how often this rank has packed into it; READ, how often this rank has read the others' buffers. */
enum fsdpc_wire_word { FSDPC_WIRE_CLEARED, FSDPC_WIRE_FILLED, FSDPC_WIRE_PACKED, FSDPC_WIRE_READ };

struct fsdpc_wire_host {
    const struct fsdpc_hosts *hosts;
    char *ctl; /* control memory; in the host's segment if ranks share it */
    size_t ctl_bytes, words;
    uint64_t ctl_offset;
    int word_at[FSDPC_WIRE_READ + 1];
    char *buffers; /* [rank of this host][reduce buffer] */
    size_t buffers_bytes;
    uint64_t buffers_offset;
    /* for each slot, how many gathers were begun in it; equal on all ranks of the host */
    uint64_t *fills;
};

/* Maps memory that a host's ranks share. Call it before open_reduces. No-op if fsdpc_comm_hosts() is NULL. */
int fsdpc_wire_host_open(fsdpc_exchange *x, int slot_count);
/* `keep`: the memory is not freed, because other ranks may still send to it. */
void fsdpc_wire_host_close(fsdpc_exchange *x, bool keep);
/* Returns reduce buffer `slot` of a rank of this host. */
char *fsdpc_wire_host_buffer(const fsdpc_exchange *x, int rank, int slot);
void fsdpc_wire_say(const fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value);
bool fsdpc_wire_has_said(const fsdpc_exchange *x, int rank, enum fsdpc_wire_word word, int index,
                         uint64_t value);
/* Returns the word on which waits sleep. It changes whenever a rank of this host publishes a count. */
_Atomic uint32_t *fsdpc_wire_changes(const fsdpc_exchange *x);
void fsdpc_wire_say_change(const fsdpc_exchange *x);

/* --- exchange_wire_marks.c ----------------------------------------------------------------------- */

/* What a rank does next, as its marks say: FSDPC_WIRE_GATHER of a unit (FSDPC_WIRE_APART: into private
 * memory), FSDPC_WIRE_REDUCE of a unit, a communication hook, or the end of a backward. */
enum {
    FSDPC_WIRE_HOOK = INT32_MAX,
    FSDPC_WIRE_END = FSDPC_WIRE_HOOK - 1,
    /* stands for any flight in fsdpc_wire_host_wait; never in a mark */
    FSDPC_WIRE_ANY = FSDPC_WIRE_END - 1,
    FSDPC_WIRE_TURNS = 3
};
#define FSDPC_WIRE_GATHER(id) ((int32_t)(id) * FSDPC_WIRE_TURNS)
#define FSDPC_WIRE_APART(id) (FSDPC_WIRE_GATHER(id) + 1)
#define FSDPC_WIRE_REDUCE(id) (FSDPC_WIRE_GATHER(id) + 2)

/* Fills and returns `mark`. Returns NULL if the user trusts the order, so that ranks compare no marks. */
const fsdpc_mark *fsdpc_wire_mark(const fsdpc_exchange *x, int32_t next, fsdpc_mark *mark);
/* Counts the bytes that a flight of the unit sends. */
void fsdpc_wire_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_flight *flight);
/* Returns the negative number by which a mark says that its rank unfreezes this parameter. */
int32_t fsdpc_wire_thaw_turn(int unit, int param);
/* Implements fsdpc_exchange_compare for the "wire" kind. */
void fsdpc_wire_number_weights(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
/* Call it for a landed flight. FSDPC_E_MISMATCH: the weights of some rank have a different number. */
int fsdpc_wire_check_weights(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);
/* Returns FSDPC_E_MISMATCH for a flight that landed with different marks. The text says how they differ. */
int fsdpc_wire_compare(const fsdpc_exchange *x, const fsdpc_flight *landed, const char *what);

/* --- exchange_wire_coded.c ----------------------------------------------------------------------- */

int fsdpc_wire_coded_open(fsdpc_exchange *x, int slot_count);
/* `keep`: the memory is not freed, because other ranks may still send to it. */
void fsdpc_wire_coded_close(fsdpc_exchange *x, bool keep);
/* Codes this rank's piece of a segment, and decodes it into the slot. *part: all ranks' coded pieces. */
int fsdpc_wire_encode(fsdpc_exchange *x, fsdpc_unit *unit, int segment, fsdpc_comm_part *part);
/* Codes a segment's packed gradients for each receiver into `codes`, which has room for all ranks, and sets
 * *part. `lost`: the kept coding error for the first receiver, or NULL. The errors for the other receivers
 * follow, each `lost_bytes` of the unit's footprint after the one before. */
int fsdpc_wire_encode_grads(const fsdpc_exchange *x, const fsdpc_unit *unit,
                            const fsdpc_segment *seg, const char *packed, fsdpc_route route,
                            char *lost, char *codes, fsdpc_comm_part *part);
/* Sets the coding errors that are kept for error feedback, for all receivers, to zero. */
int fsdpc_wire_forget(fsdpc_exchange *x);
/* Decodes the coded pieces that a flight of the unit brought; a no-op for a unit without coded segments. */
int fsdpc_wire_decode(fsdpc_exchange *x, fsdpc_unit *unit, fsdpc_route route);
/* In a gather: true if the flight brings rank `owner`'s elements to this rank. FSDPC_TO_ALL brings those of
 * each other rank. Otherwise the flight brings those of each rank that this rank carries. In a reduction:
 * true if this rank sends gradients to rank `owner`. */
bool fsdpc_wire_brings(const fsdpc_exchange *x, fsdpc_route route, int owner);

/* --- exchange_wire_land.c ------------------------------------------------------------------------ */

void fsdpc_wire_name_gather(const fsdpc_unit *unit, char what[FSDPC_WIRE_WHAT_BYTES]);
/* True if the unit's values are in a slot that the ranks of this host share. */
bool fsdpc_wire_is_shared(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* Adds unit `id` to `flying` when its gather has begun, because other ranks may wait for this gather ([Note:
 * landed in order] in flight.h). */
void fsdpc_wire_note_flying(fsdpc_exchange *x, int id);
int fsdpc_wire_land_first(void *exchange);
/* Lands the gathers that began before the flight, then the flight, and frees the flight even after a failure.
 * *summed (optional): fsdpc_flight_is_summed. FSDPC_E_MISMATCH: the ranks' turns or weights differ. */
int fsdpc_wire_land(fsdpc_exchange *x, fsdpc_flight **flight, const char *what, bool *summed);
/* A rank that knows that another rank does something else calls this function instead of its next flight. All
 * ranks exchange what they do next (this rank: `next`, named `what`). Returns FSDPC_E_MISMATCH. */
int fsdpc_wire_tell(fsdpc_exchange *x, int32_t next, const char *what);
int fsdpc_wire_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param);
int fsdpc_wire_before_hook(fsdpc_exchange *x, const char *what);
/* Lands unit `id`'s gather and all earlier gathers. No-op if that gather is not in flight or `id` is -1. */
int fsdpc_wire_land_gather(fsdpc_exchange *x, int id);
/* Lands all gathers that are in flight. */
int fsdpc_wire_land_gathers(fsdpc_exchange *x);

/* --- exchange_wire_wait.c ------------------------------------------------------------------------ */

/* Waits until the `word` of all ranks of this host is at least `value`. `next`: this rank's next flight, or
 * FSDPC_WIRE_ANY. FSDPC_E_MISMATCH, on all ranks: a rank of this host is about to begin another flight. */
int fsdpc_wire_host_wait(fsdpc_exchange *x, enum fsdpc_wire_word word, int index, uint64_t value,
                         int32_t next, const char *op, const fsdpc_unit *unit);

/* --- exchange_wire_reduce.c ---------------------------------------------------------------------- */

int fsdpc_wire_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_wire_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_wire_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
/* Finishes the sums of all units, and shares the used bits. All gathers must have landed. */
int fsdpc_wire_end(fsdpc_exchange *x);

#endif
