/* Declarations that the source files of the "stream" exchange share. See exchange_stream.c. */
#ifndef FSDPC_EXCHANGE_STREAM_IMPL_H
#define FSDPC_EXCHANGE_STREAM_IMPL_H

#include "exchange/exchange_impl.h"

enum { FSDPC_STREAM_WHAT_BYTES = 256 };

struct fsdpc_reduce_slot {
    void *buffer;
    fsdpc_event *packed, *summed;
    bool busy;              /* true: the caller's stream has not waited for `summed` yet */
    const fsdpc_unit *unit; /* the unit whose gradients were sent last through the slot */
};

/* The last reader of a gather slot: `stream` has used the values until the event `done`. `pending`: the
 * gather stream has not waited for `done` yet, and must do so before it fills the slot again. */
struct fsdpc_reader {
    fsdpc_event *done;
    fsdpc_stream *stream;
    uint64_t capture; /* id of the capture in which `done` was recorded; 0: none */
    bool pending;
};

/* The gather of a unit's values into its slot. */
struct fsdpc_filling {
    fsdpc_event *done;
    uint64_t capture; /* id of the capture in which `done` was recorded; 0: none */
    uint64_t number;  /* position of this gather on the gather stream, counted from 1 */
};

/* The caller's `stream` has waited for all fillings of `capture` whose number is at most `number`. */
struct fsdpc_behind {
    const fsdpc_stream *stream;
    uint64_t capture, number;
};

/* Paths on which the ranks have agreed: a hash set that is cleared before it gets more than `most` paths. */
struct fsdpc_paths {
    uint64_t *table;
    int count, most;
    int64_t cleared; /* number of times that the set was cleared */
};

/* The check that all ranks use units in one order. In each array, [0] is for gathers and [1] is for
 * reductions. See exchange_stream_turns.c, which explains turns and paths. */
enum { FSDPC_STREAM_TURN_FLOATS = 4 };
struct fsdpc_turns {
    bool off, awaited;
    /* the path since the pass began ([0]), or since the last backward ended ([1]) */
    uint64_t path[2];
    /* The path of the whole last pass if this path is not in `known` yet, else 0. The ranks compare it at
     * the next turn. */
    uint64_t fresh[2];
    uint64_t digest[2]; /* hash of all turns since the last backward ended */
    struct fsdpc_paths known[2];
    uint64_t *pinned, *device; /* the words that the ranks compare, one per rank */
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
    fsdpc_event *masters; /* recorded when a pass begins, after the optimizer's work */
    /* true: the gather stream has waited for `masters` in this pass */
    bool masters_awaited;
    bool begun;                   /* true: a pass has begun, so `tag` is valid */
    uint64_t tag;                 /* of this pass */
    uint64_t capture;             /* id of the capture that records the pass; 0: none */
    struct fsdpc_reader *readers; /* per gather slot */
    int slot_count;
    struct fsdpc_filling *fillings; /* per unit */
    uint64_t filled;                /* number of the last filling */
    struct fsdpc_behind behind;
    /* for each unit, the plan of its casts; NULL: it needs at most one cast */
    fsdpc_pack_plan **gathers;
    fsdpc_pack_source *pieces; /* this rank's pieces of the unit being gathered */
    fsdpc_comm_part *parts;    /* parts of the unit being gathered or reduced */
    /* codings of the unit being gathered or reduced, at most two per segment */
    fsdpc_coding *codings;
    fsdpc_landed *landed; /* one entry per segment of the unit being reduced */
    size_t *offsets;      /* offsets of segments' coded pieces, then of their coding errors */
    char *coded;          /* all ranks' coded pieces of the unit being gathered */
    size_t coded_bytes;   /* size of `coded`: codes of the largest unit; 0: no unit is coded */
    bool replicas;        /* true: some unit has replicas */
    struct fsdpc_turns turns;
    struct fsdpc_reduce_slot *slots;
    fsdpc_arena *reduce_arena; /* the memory of `slots` */
    int next_slot;
    int sent;      /* number of reductions sent in this backward */
    uint8_t *mask; /* used bits of the unit being packed */
    /* Used bits, one float each: `bits` in pinned memory, `device_bits` on the device; `all`, on the device,
     * holds the bits of a rank that used every trainable parameter. */
    float *bits, *device_bits, *all;
    uint8_t *used; /* the used bits as bytes */
    int64_t bit_count;
    fsdpc_event *sync_event;     /* for host syncs */
    fsdpc_event *ready, *shared; /* recorded before and after fsdpc_exchange_share's gather */
    /* true: all trainable units are offloaded, so all gradients are in host memory */
    bool all_offloaded;
    /* recorded after the last gather that reads an offloaded master; NULL: no unit is offloaded */
    fsdpc_event *copied;
};

int fsdpc_stream_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_stream_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_stream_make_room(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_stream_end(fsdpc_exchange *x);
int fsdpc_stream_share(fsdpc_exchange *x, void *buffer, size_t piece_bytes, const char *what);

/* --- exchange_stream_wait.c ------------------------------------------------------------------- */

/* Fails if any communicator of the exchange has failed. Communicators over replicas are included. */
int fsdpc_stream_check(const fsdpc_exchange *x);
/* Waits on the host for the event. Each collective has its own deadline, so the wait needs none. The wait
 * fails when a communicator of the exchange has failed. Ctrl-C ends the wait. */
int fsdpc_stream_await_host(fsdpc_exchange *x, fsdpc_event *event, const char *what);
/* Waits on the host for the current stream. */
int fsdpc_stream_sync(fsdpc_exchange *x, const char *what);
/* Counts the bytes that this rank sends over NCCL. Each of `parts` goes to all other ranks. An all-reduce
 * sends 2 / world times as many bytes. Bytes that other kinds of communicator send are not counted. */
void fsdpc_stream_count(fsdpc_exchange *x, const fsdpc_unit *unit, const fsdpc_comm *comm,
                        const fsdpc_comm_part *parts, int count, bool all_reduce);

/* --- exchange_stream_slots.c ------------------------------------------------------------------ */

int fsdpc_stream_slots_open(fsdpc_exchange *x);
void fsdpc_stream_slots_close(fsdpc_exchange *x);
/* Returns the address at which collectives access the unit's values. */
char *fsdpc_stream_address(const fsdpc_exchange *x, const fsdpc_unit *unit);

/* --- exchange_stream_capture.c ---------------------------------------------------------------- */

/* Fails with FSDPC_E_STATE inside a capture, because `what` needs a host sync. */
int fsdpc_stream_refuse_capture(const struct fsdpc_streams *s, const char *what);
/* Inside a capture, makes the caller's stream wait for the gather stream and the reduce stream. */
int fsdpc_stream_join_capture(struct fsdpc_streams *s);

/* --- exchange_stream_turns.c ------------------------------------------------------------------ */

int fsdpc_stream_turns_open(fsdpc_exchange *x);
void fsdpc_stream_turns_close(fsdpc_exchange *x);
/* Call it while the stream of the next collective is current. FSDPC_E_MISMATCH: the ranks are at different
 * collectives. */
int fsdpc_stream_turn(fsdpc_exchange *x, const fsdpc_unit *unit, bool reduce);
int fsdpc_stream_turns_begin(fsdpc_exchange *x);
/* Call these on the reduce stream. The used bits are all-reduced together with the digests of this
 * backward's order. `end` completes the digests before the all-reduce, `put` writes them after the bits of a
 * rank that used all parameters, and `take` fetches the reduced digests. The host checks the digests
 * when they have arrived. */
int fsdpc_stream_turns_end(fsdpc_exchange *x);
int fsdpc_stream_turns_put(fsdpc_exchange *x, float *bits);
int fsdpc_stream_turns_take(fsdpc_exchange *x, const float *bits);

/* --- exchange_stream_gather.c ----------------------------------------------------------------- */

int fsdpc_stream_gather_open(fsdpc_exchange *x);
void fsdpc_stream_gather_close(fsdpc_exchange *x);
/* On the gather stream, casts this rank's pieces into the slot, then all-gathers the pieces of all ranks. */
int fsdpc_stream_fill(fsdpc_exchange *x, fsdpc_unit *unit);

/* --- exchange_stream_coded.c ------------------------------------------------------------------ */

int fsdpc_stream_coded_open(fsdpc_exchange *x);
void fsdpc_stream_coded_close(fsdpc_exchange *x);
/* True if some gradients of the unit travel coded. All its gradients then go through an all-to-all. */
bool fsdpc_stream_sends_codes(const fsdpc_exchange *x, const fsdpc_unit *unit);
/* On the reduce stream, codes the gradients packed in `buffer`, sends and receives pieces, and adds the sum
 * of all ranks' pieces to the shard gradient. With replicas, that sum is first summed over the replicas. */
int fsdpc_stream_sum_coded(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what);
/* Sets the coding error that is kept for error feedback to zero. */
int fsdpc_stream_forget(fsdpc_exchange *x);

/* --- exchange_stream_replicas.c --------------------------------------------------------------- */

bool fsdpc_stream_has_replicas(const fsdpc_exchange *x);
/* On the reduce stream, adds this rank's pieces of a reduced slot to the shard gradient. If there are
 * replicas, the pieces are first summed over the replicas. */
int fsdpc_stream_sum(fsdpc_exchange *x, fsdpc_unit *unit, char *buffer, const char *what);
/* Does the work of fsdpc_stream_sum for pieces that are in `partial`, in the accumulate dtype. */
int fsdpc_stream_sum_partial(fsdpc_exchange *x, fsdpc_unit *unit, const char *what);
/* Reduces the used bits over replicas. Call it after the used bits have been reduced over the shard group. */
int fsdpc_stream_join_replicas(fsdpc_exchange *x, const char *what);

/* --- exchange_stream_offload.c ---------------------------------------------------------------- */

int fsdpc_stream_offload_open(fsdpc_exchange *x);
/* Call it at the end of a synchronised backward: waits on the host until all sums are in the gradients and no
 * gather reads a master shard. A no-op if no unit is offloaded. */
int fsdpc_stream_offload_end(fsdpc_exchange *x);
int fsdpc_stream_offload_settle(fsdpc_exchange *x, fsdpc_unit *unit);
/* Call it at the end of a forward without a backward: the host waits until no gather reads a master shard. */
int fsdpc_stream_offload_leave(fsdpc_exchange *x);

#endif
