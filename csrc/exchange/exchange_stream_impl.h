/* What the files of the "stream" exchange share. See exchange_stream.c. */
#ifndef FSDPC_EXCHANGE_STREAM_IMPL_H
#define FSDPC_EXCHANGE_STREAM_IMPL_H

#include "exchange/exchange_impl.h"

enum { FSDPC_STREAM_WHAT_BYTES = 256 };

struct fsdpc_reduce_slot {
    void *buffer;
    fsdpc_event *packed, *summed;
    bool busy;              /* the caller's stream has not waited for `summed` yet */
    const fsdpc_unit *unit; /* the unit whose gradients were sent last through the slot */
};

/* The last reader of a gather slot. `pending`: the gather stream has not waited for the reader yet. */
struct fsdpc_reader {
    fsdpc_event *done;
    fsdpc_stream *stream;
    uint64_t capture; /* the capture in which `done` was recorded, 0: none */
    bool pending;
};

/* The gather of a unit's values into its slot. */
struct fsdpc_filling {
    fsdpc_event *done;
    uint64_t capture; /* the capture in which `done` was recorded, 0: none */
    uint64_t number;  /* in the order of the gather stream, from 1 on */
};

/* The caller's `stream` has waited for all fillings of `capture` up to `number`. */
struct fsdpc_behind {
    const fsdpc_stream *stream;
    uint64_t capture, number;
};

/* Paths on which the ranks have agreed: a hash set that is cleared before it gets more than `most`. */
struct fsdpc_paths {
    uint64_t *table;
    int count, most;
    int64_t cleared; /* how often the set was cleared */
};

/* The check of the order of units; [0] gathers, [1] reductions. See exchange_stream_turns.c. */
enum { FSDPC_STREAM_TURN_FLOATS = 4 };
struct fsdpc_turns {
    bool off, awaited;
    uint64_t path[2];   /* [0] since the pass began, [1] since the last backward ended */
    uint64_t fresh[2];  /* path at the last pass's end, if new: compared with the next turn */
    uint64_t digest[2]; /* of all turns since the last backward ended */
    struct fsdpc_paths known[2];
    uint64_t *pinned, *device; /* one word per rank */
    size_t words;
    struct {
        float own[FSDPC_STREAM_TURN_FLOATS], got[FSDPC_STREAM_TURN_FLOATS];
    } *digests; /* in pinned memory */
    fsdpc_event *put, *arrived;
};

struct fsdpc_streams {
    fsdpc_device *device;
    fsdpc_comm *reduce_comm;
    fsdpc_stream *gather, *reduce;
    fsdpc_event *masters;         /* behind the caller's work before the pass (the optimizer's) */
    bool masters_awaited;         /* the gather stream has waited for `masters` in this pass */
    bool begun;                   /* a pass has begun: `tag` is valid */
    uint64_t tag;                 /* of this pass */
    uint64_t capture;             /* the capture that records the pass, 0: none */
    struct fsdpc_reader *readers; /* per gather slot */
    int slot_count;
    struct fsdpc_filling *fillings; /* per unit */
    uint64_t filled;                /* the last filling's number */
    struct fsdpc_behind behind;
    fsdpc_pack_plan **gathers; /* per unit the plan of its casts; NULL where one cast is enough */
    fsdpc_pack_source *pieces; /* of the unit being gathered, per segment */
    fsdpc_comm_part *parts;    /* of the unit being gathered or reduced */
    fsdpc_coding *codings;     /* of the unit being gathered or reduced, two per segment */
    fsdpc_landed *landed;      /* of the unit being reduced, per segment */
    size_t *offsets;           /* of the reduced unit's pieces as sent, and of what coding lost */
    char *coded;               /* of the unit being gathered: all ranks' coded pieces, by segment */
    size_t coded_bytes;        /* size of `coded`: the largest unit's codes; 0: no unit is coded */
    bool replicas;             /* some unit has replicas */
    struct fsdpc_turns turns;
    struct fsdpc_reduce_slot *slots;
    fsdpc_arena *reduce_arena; /* the memory of `slots` */
    int next_slot;
    int sent;      /* count of reductions sent in this backward */
    uint8_t *mask; /* used bits of the unit being packed */
    /* Used bits, one float each: in pinned memory, on the device, and (on the device) the bits of a rank
     * that used every trainable parameter. */
    float *bits, *device_bits, *all;
    uint8_t *used; /* the bits in host memory */
    int64_t bit_count;
    fsdpc_event *sync_event;     /* for host syncs */
    fsdpc_event *ready, *shared; /* recorded before and after fsdpc_exchange_share */
    bool all_offloaded;          /* every unit that trains has its gradients in host memory */
    fsdpc_event *copied; /* behind the last gather of an offloaded master; NULL: none offloaded */
};

int fsdpc_stream_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_stream_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_stream_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_stream_end(fsdpc_exchange *x);
int fsdpc_stream_share(fsdpc_exchange *x, void *buffer, size_t piece_bytes, const char *what);

/* --- exchange_stream_wait.c ------------------------------------------------------------------- */

/* Fails if any communicator of the exchange has failed, those of replicas included. */
int fsdpc_stream_check(const fsdpc_exchange *x);
/* Host sync with the event. The deadline is that of the collectives before it: the wait fails when one of
 * their communicators fails. Ctrl-C ends the wait. */
int fsdpc_stream_await_host(fsdpc_exchange *x, fsdpc_event *event, const char *what);
/* Host sync with the current stream. */
int fsdpc_stream_sync(fsdpc_exchange *x, const char *what);
/* Counts what this rank sends over NCCL: each of `parts` to all other ranks; if the parts are
 * all-reduced, 2 / world of that. What other kinds of communicator send is not counted. */
void fsdpc_stream_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_comm *comm,
                        const fsdpc_comm_part *parts, int count, bool all_reduce);

/* --- exchange_stream_slots.c ------------------------------------------------------------------ */

int fsdpc_stream_slots_open(fsdpc_exchange *x);
void fsdpc_stream_slots_close(fsdpc_exchange *x);
/* The address of a unit's values for collectives. */
char *fsdpc_stream_address(const fsdpc_exchange *x, const fsdpc_unit *unit);

/* --- exchange_stream_capture.c ---------------------------------------------------------------- */

/* FSDPC_E_STATE inside a capture: `what` needs a host sync. */
int fsdpc_stream_refuse_capture(const struct fsdpc_streams *s, const char *what);
/* Inside a capture: the caller's stream waits for the gather stream and the reduce stream. */
int fsdpc_stream_join_capture(struct fsdpc_streams *s);

/* --- exchange_stream_turns.c ------------------------------------------------------------------ */

int fsdpc_stream_turns_open(fsdpc_exchange *x);
void fsdpc_stream_turns_close(fsdpc_exchange *x);
/* On the stream of the next collective: FSDPC_E_MISMATCH if the ranks are at different collectives. */
int fsdpc_stream_turn(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce);
int fsdpc_stream_turns_begin(fsdpc_exchange *x);
/* On the reduce stream. The digests of this backward's order travel with the used bits: end closes them
 * before the all-reduce, put adds them to the bits of a rank that used all parameters, take fetches the
 * reduced digests, which are checked when they have arrived. */
int fsdpc_stream_turns_end(fsdpc_exchange *x);
int fsdpc_stream_turns_put(fsdpc_exchange *x, float *bits);
int fsdpc_stream_turns_take(fsdpc_exchange *x, const float *bits);

/* --- exchange_stream_gather.c ----------------------------------------------------------------- */

int fsdpc_stream_gather_open(fsdpc_exchange *x);
void fsdpc_stream_gather_close(fsdpc_exchange *x);
/* On the gather stream: casts this rank's pieces into the slot, then all-gathers. */
int fsdpc_stream_fill(fsdpc_exchange *x, fsdpc_unit *unit);

/* --- exchange_stream_coded.c ------------------------------------------------------------------ */

int fsdpc_stream_coded_open(fsdpc_exchange *x);
void fsdpc_stream_coded_close(fsdpc_exchange *x);
/* True if some of the unit's gradients travel coded: then all of its pieces go from rank to rank. */
bool fsdpc_stream_sends_codes(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* On the reduce stream: codes what is packed in `buffer`, sends and receives pieces, and adds the sum
 * of all ranks' pieces to the shard gradient; with replicas that sum is summed over them first. */
int fsdpc_stream_sum_coded(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what);
/* Error feedback: drops the error that is kept. */
int fsdpc_stream_forget(fsdpc_exchange *x);

/* --- exchange_stream_replicas.c --------------------------------------------------------------- */

bool fsdpc_stream_has_replicas(const fsdpc_exchange *x);
/* On the reduce stream: this rank's pieces of a reduced slot, summed over replicas if there are any,
 * are added to the shard gradient. */
int fsdpc_stream_sum(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what);
/* fsdpc_stream_sum for pieces that are in `partial`, in the accumulate dtype. */
int fsdpc_stream_sum_partial(fsdpc_exchange *x, fsdpc_unit *unit, const char *what);
/* Reduces the used bits over replicas, after the reduction over the shard group. */
int fsdpc_stream_join_replicas(fsdpc_exchange *x, const char *what);

/* --- exchange_stream_offload.c ---------------------------------------------------------------- */

int fsdpc_stream_offload_open(fsdpc_exchange *x);
/* The end of a synchronised backward: host sync until all sums are in the gradients and no gather reads a
 * master shard. A no-op without offloaded units. */
int fsdpc_stream_offload_end(fsdpc_exchange *x);
int fsdpc_stream_offload_settle(fsdpc_exchange *x, fsdpc_unit *unit);
/* The end of a forward without a backward: host sync until no gather reads a master shard. */
int fsdpc_stream_offload_leave(fsdpc_exchange *x);

#endif
