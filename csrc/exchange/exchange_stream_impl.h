/* What the files of the "stream" exchange share. See exchange_stream.c. */
#ifndef FSDPC_EXCHANGE_STREAM_IMPL_H
#define FSDPC_EXCHANGE_STREAM_IMPL_H

#include "exchange/exchange_impl.h"

enum { FSDPC_STREAM_WHAT_BYTES = 256, FSDPC_STREAM_PATIENCE_S = 60 };

struct fsdpc_reduce_slot {
    void *buffer;
    fsdpc_event *packed, *summed;
    bool busy; /* the caller's stream has not waited for `summed` yet */
};

/* The last reader of a gather slot, unless what the gather stream has waited for covers it. */
struct fsdpc_reader {
    fsdpc_event *done;
    fsdpc_stream *stream;
    uint64_t capture; /* in which `done` was recorded */
    bool pending;
};

/* A unit's values in its slot. */
struct fsdpc_filling {
    fsdpc_event *done;
    uint64_t capture; /* in which `done` was recorded */
    uint64_t number;  /* the gather stream makes them in this order, from 1 on */
};

/* Where the caller's stream is: behind all fillings of the capture up to this number. */
struct fsdpc_behind {
    const fsdpc_stream *stream;
    uint64_t capture, number;
};

/* Of the order of units; [0] gathers, [1] reductions. See exchange_stream_turns.c. */
enum { FSDPC_STREAM_TURN_FLOATS = 4 };
struct fsdpc_turns {
    bool off, awaited;
    uint64_t path[2];  /* since the pass began, since the last backward ended */
    uint64_t fresh[2]; /* the pass before ended where none did: to be compared with the next turn */
    uint64_t digest[2]; /* since the last backward ended */
    uint64_t *known;
    int known_count;
    uint64_t *pinned, *device; /* a word of each rank */
    size_t words;
    struct {
        float own[FSDPC_STREAM_TURN_FLOATS], got[FSDPC_STREAM_TURN_FLOATS];
    } *digests; /* pinned */
    fsdpc_event *put, *told;
};

struct fsdpc_streams {
    fsdpc_device *device;
    fsdpc_comm *reduce_comm;
    fsdpc_stream *gather, *reduce;
    fsdpc_event *masters;         /* all that the caller had queued when the pass began */
    bool masters_awaited;         /* by the gather stream, in this pass */
    bool begun;                   /* `tag` is one */
    uint64_t tag;                 /* of this pass */
    uint64_t capture;             /* that the pass is recorded in; 0: it runs */
    struct fsdpc_reader *readers; /* per gather slot */
    int slot_count;
    struct fsdpc_filling *fillings; /* per unit */
    uint64_t filled;                /* the last one's number */
    struct fsdpc_behind behind;
    fsdpc_pack_plan **gathers; /* per unit, NULL where one cast does */
    fsdpc_pack_source *pieces; /* of the unit being gathered, per segment */
    fsdpc_comm_part *parts;    /* of the unit being gathered or reduced */
    bool replicas;             /* some unit has them */
    struct fsdpc_turns turns;
    struct fsdpc_reduce_slot *slots;
    fsdpc_arena *reduce_arena; /* their memory */
    int next_slot;
    int sent;      /* reductions in this backward */
    uint8_t *mask; /* of the unit being packed */
    /* Used bits, one float each: pinned here; on the device; there those of all that trains. */
    float *bits, *device_bits, *all;
    int64_t bit_count;
    fsdpc_event *settled;        /* for the waits of the host */
    fsdpc_event *ready, *shared; /* what is shared with the other ranks, before and after */
    bool all_offloaded;          /* every unit that trains has its gradients in host memory */
    fsdpc_event *copied; /* the last gather that read an offloaded master; NULL: no unit has one */
};

int fsdpc_stream_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
int fsdpc_stream_end(fsdpc_exchange *x);
int fsdpc_stream_share(fsdpc_exchange *x, void *buffer, size_t piece_bytes, const char *what);

/* --- exchange_stream_wait.c ------------------------------------------------------------------- */

/* The failure of a communicator that the exchange uses, replicas' among them. */
int fsdpc_stream_check(const fsdpc_exchange *x);
/* The host waits for the event, for as long as the collectives before it have: until one of their
 * communicators has failed. Ctrl-C ends it. */
int fsdpc_stream_await_host(fsdpc_exchange *x, fsdpc_event *event, const char *what);
/* The same for all that the current stream holds. */
int fsdpc_stream_settle(fsdpc_exchange *x, const char *what);

/* --- exchange_stream_slots.c ------------------------------------------------------------------ */

int fsdpc_stream_slots_open(fsdpc_exchange *x);
void fsdpc_stream_slots_close(fsdpc_exchange *x);
/* Where collectives find a unit's values. */
char *fsdpc_stream_address(const fsdpc_exchange *x, const fsdpc_unit *unit);

/* --- exchange_stream_capture.c ---------------------------------------------------------------- */

/* FSDPC_E_STATE inside a capture: `what` needs the host. */
int fsdpc_stream_refuse_capture(const struct fsdpc_streams *s, const char *what);
/* Inside a capture: the caller's stream waits for both own streams. */
int fsdpc_stream_join_capture(struct fsdpc_streams *s);

/* --- exchange_stream_turns.c ------------------------------------------------------------------ */

int fsdpc_stream_turns_open(fsdpc_exchange *x);
void fsdpc_stream_turns_close(fsdpc_exchange *x);
/* On the stream of the collective that would follow: FSDPC_E_MISMATCH if ranks mean other ones. */
int fsdpc_stream_turn(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce);
int fsdpc_stream_turns_begin(fsdpc_exchange *x);
/* On the reduce stream: before the used bits are joined; into those of a rank that used all, and (after)
 * what all ranks made of it. */
int fsdpc_stream_turns_end(fsdpc_exchange *x);
int fsdpc_stream_turns_put(fsdpc_exchange *x, float *bits);
int fsdpc_stream_turns_take(fsdpc_exchange *x, const float *bits);

/* --- exchange_stream_gather.c ----------------------------------------------------------------- */

int fsdpc_stream_gather_open(fsdpc_exchange *x);
void fsdpc_stream_gather_close(fsdpc_exchange *x);
/* On the gather stream: this rank's pieces into the slot, then everybody's. */
int fsdpc_stream_fill(fsdpc_exchange *x, fsdpc_unit *unit);

/* --- exchange_stream_replicas.c --------------------------------------------------------------- */

bool fsdpc_stream_has_replicas(const fsdpc_exchange *x);
/* On the reduce stream: this rank's pieces of a reduced slot, summed over replicas if there are any,
 * are added to the shard gradient. */
int fsdpc_stream_sum(fsdpc_unit *unit, char *buffer, const char *what);
/* The same where `partial` holds them (one rank). */
int fsdpc_stream_sum_partial(fsdpc_unit *unit, const char *what);
/* The used bits, joined over the shard ranks already, over replicas. */
int fsdpc_stream_join_replicas(fsdpc_exchange *x, const char *what);

/* --- exchange_stream_offload.c ---------------------------------------------------------------- */

int fsdpc_stream_offload_open(fsdpc_exchange *x);
/* The end of a synchronised backward: the host waits until all sums are in the gradients and nothing
 * reads masters any more. Nothing without offloaded units. */
int fsdpc_stream_offload_end(fsdpc_exchange *x);
/* The end of a forward that no backward follows: nothing reads masters any more. */
int fsdpc_stream_offload_leave(fsdpc_exchange *x);

#endif
