/* The exchange's insides: common part and the table that each kind fills. */
#ifndef FSDPC_EXCHANGE_IMPL_H
#define FSDPC_EXCHANGE_IMPL_H

#include <stdatomic.h>

#include "exchange.h"
#include "unit_impl.h"

struct fsdpc_exchange_i {
    const char *kind;
    bool any_order;
    int (*open)(fsdpc_exchange *x, const fsdpc_exchange_plan *plan);
    void (*close)(fsdpc_exchange *x);
    int (*begin)(fsdpc_exchange *x, uint64_t tag);
    int (*leave)(fsdpc_exchange *x); /* (optional) nothing to wait for */
    /* Makes the unit readable, or with wait false starts it if possible (unit->begun). */
    int (*gather)(fsdpc_exchange *x, fsdpc_unit *unit, bool wait);
    int (*release)(fsdpc_exchange *x, fsdpc_unit *unit);
    int (*reduce)(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
    int (*end)(fsdpc_exchange *x);
    int (*share)(fsdpc_exchange *x, void *buffer, size_t piece_bytes,
                 const char *what); /* (optional) FSDPC_E_UNAVAILABLE */
};

struct fsdpc_exchange {
    const struct fsdpc_exchange_i *ops;
    fsdpc_comm *comm;
    fsdpc_shm *shm; /* NULL for "wire" */
    int rank, world;
    fsdpc_unit **units;
    int *trace_ids;
    int unit_count;
    fsdpc_arena *arena;
    int *slot_unit; /* "wire", "stream": which unit's values a slot holds, -1 */
    uint64_t *slot_tag;
    uint64_t tag;
    uint64_t backwards; /* synchronised backwards finished */
    bool poison, trust_order;
    bool in_turn; /* "stream": one rank keeps the order, too, for its sums over replicas */
    int reduce_slots;
    size_t max_reduce_bytes, sum_reduce_bytes;
    fsdpc_trace *trace;
    enum fsdpc_phase phase;
    uint32_t step;
    uint64_t copied_bytes; /* by the gather in progress, for the trace */

    struct fsdpc_shared *shared;   /* "shared" kind's own state */
    struct fsdpc_streams *streams; /* "stream" kind's own state */
    void *reduce_buffer;           /* "wire": one packed unit */
};

extern const struct fsdpc_exchange_i fsdpc_exchange_shared;
extern const struct fsdpc_exchange_i fsdpc_exchange_wire;
extern const struct fsdpc_exchange_i fsdpc_exchange_stream;

/* Whether gradients (of this unit, NULL: of any) go through a reduce slot: one rank's do not, but to host
 * memory, so that the caller's stream does not wait for the bus. */
bool fsdpc_exchange_packs(const fsdpc_exchange *x, const fsdpc_unit *unit);
void fsdpc_exchange_note(fsdpc_exchange *x, enum fsdpc_trace_op op, const fsdpc_unit *unit,
                         uint64_t bytes);
/* Casts elements [begin, begin + n) of rank r's piece of a segment from its master into place. */
int fsdpc_exchange_fill(fsdpc_exchange *x, fsdpc_unit *unit, int segment, int r, int64_t begin,
                        int64_t n);

/* --- the shared kind: state in the segment --------------------------------------------------- */

struct fsdpc_rank_ctl {
    _Atomic uint64_t ready;   /* tag for which this rank's masters are final */
    _Atomic uint64_t first;   /* synchronised backwards of which no unit's first post is to come */
    _Atomic uint64_t ended;   /* synchronised backwards whose gradients are all posted */
    _Atomic uint32_t waiting; /* 1 while this rank waits for others */
    _Atomic uint32_t seen;    /* the `turn` at which it last found that it cannot go on */
    _Atomic uint64_t left;    /* tag of its last forward that no backward follows */
    char pad[64 - 40];
};

struct fsdpc_slot_ctl {
    _Atomic uint32_t lock;
    _Atomic uint32_t done; /* chunks in place */
    uint32_t total;
    uint32_t holders;
    int32_t unit;
    uint64_t tag;
    char pad[64 - 32];
    /* followed by: _Atomic uint32_t next[world] (chunks claimed of each piece), uint8_t held[world] */
};

struct fsdpc_post_ctl {
    _Atomic uint64_t round; /* backward << 8 | n-th post of this unit in it, 1 or 2 */
    uint32_t slot;          /* which of the rank's reduce slots */
    char pad[64 - 12];
    /* followed by: uint8_t used[param_count] */
};

struct fsdpc_shared {
    char *ctl; /* the mapped control area */
    size_t ctl_bytes;
    _Atomic uint32_t *turn;     /* grows whenever something changed that others may wait for */
    _Atomic uint32_t *sleepers; /* ranks asleep on turn */
    _Atomic uint32_t *closed;   /* ranks that have closed the exchange */
    struct fsdpc_rank_ctl *ranks;
    char *slots;
    size_t slot_stride;
    char *posts; /* [unit][rank] */
    size_t *post_offset, *post_stride;
    _Atomic uint32_t *acks; /* [rank][reduce slot] */
    int reduce_total;       /* base slots, then one overflow slot per unit */
    char *base_map, *over_map;
    uint64_t ctl_offset, base_offset, over_offset; /* in the segment */
    size_t base_bytes, over_bytes, base_stride, over_stride;
    size_t *over_at; /* per unit */
    int next_base;
    int *slot_user; /* unit in each of this rank's reduce slots, -1 */
    bool *over_used;
};

/* Wakes whoever waits for a change. */
void fsdpc_shared_notify(fsdpc_exchange *x);
/* A wait: begin once, step each time nothing could be done, end. */
struct fsdpc_shared_wait {
    fsdpc_wait what;
    int64_t start_ns, deadline_ns;
    bool waiting;
};
void fsdpc_shared_wait_begin(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const char *op,
                             const fsdpc_unit *unit);
/* Sleeps until `turn` moves on from `seen`, at most a few ms; errors as fsdpc_shm_wait_word. */
int fsdpc_shared_wait_step(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, uint32_t seen);
void fsdpc_shared_wait_end(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           const fsdpc_unit *unit);
/* True when every other rank waits and has found, at the same `turn` as this one (`seen`), that it
 * cannot go on, or is in a barrier that this rank has yet to enter: nothing will change unless
 * someone uses private memory. Every change that a wait may be for moves `turn` on, so this is
 * exact, whatever the scheduler does. */
bool fsdpc_shared_stuck(const fsdpc_exchange *x, uint32_t seen);

/* A rank that is ahead must not wait for one behind it while it holds, ahead of need, the very slot
 * that the other one wants: prefetched units are let go before any wait. */
int fsdpc_shared_drop_prefetched(fsdpc_exchange *x);

int fsdpc_shared_reduce_open(fsdpc_exchange *x);
/* `last`: no rank uses the memory any more. */
void fsdpc_shared_reduce_close(fsdpc_exchange *x, bool last);
int fsdpc_shared_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
int fsdpc_shared_end(fsdpc_exchange *x);
struct fsdpc_post_ctl *fsdpc_shared_post(fsdpc_exchange *x, int unit, int rank);

#endif
