/* The shared kind: its state in the segment, and what its files share. */
#ifndef FSDPC_EXCHANGE_SHARED_IMPL_H
#define FSDPC_EXCHANGE_SHARED_IMPL_H

#include <stdatomic.h>

#include "exchange/exchange_impl.h"
#include "exchange/exchange_weights.h"

struct fsdpc_rank_ctl {
    _Atomic uint64_t ready; /* tag for which this rank's masters are final */
    _Atomic uint64_t first; /* count of synchronised backwards in which all first posts are made */
    _Atomic uint64_t ended; /* count of synchronised backwards whose gradients are all posted */
    _Atomic uint64_t left;  /* tag of the last forward without a backward that has ended here */
    /* `thaws`: tag of the training pass before which this rank unfreezes parameters, or 0.
     * `thawed`: one of these parameters, as unit << 32 | parameter; UINT64_MAX if unknown. */
    _Atomic uint64_t thaws, thawed;
    /* Tags of passes: [Note: changed weights] in exchange_shared_changes.c. */
    _Atomic uint64_t changed, before, touched, sampled, weights;
    _Atomic uint64_t early; /* tag of the last forward whose end did not wait for all ranks */
    char pad[128 - 96];
    _Atomic uint64_t known[FSDPC_KNOWN_WEIGHTS]; /* hashes of weights by their numbers, or 0 */
};

struct fsdpc_slot_ctl {
    _Atomic uint32_t lock; /* rank + 1 of its holder, or 0 */
    _Atomic uint32_t done; /* chunks in place */
    uint32_t total;
    uint32_t holders;
    int32_t unit;
    uint64_t tag;
    uint64_t touched; /* `touched` of the rank `claimer` when it claimed the slot */
    int32_t claimer;
    char pad[64 - 44];
    /* followed by: _Atomic uint32_t next[world] (chunks claimed of each piece), uint8_t held[world] */
};

struct fsdpc_post_ctl {
    _Atomic uint64_t round; /* backward << 8 | n, the unit's n-th post (1 or 2) in that backward */
    uint32_t slot;          /* which of the rank's reduce slots */
    char pad[64 - 12];
    /* followed by: uint8_t used[param_count] */
};

struct fsdpc_shared {
    char *ctl; /* the mapped control area */
    size_t ctl_bytes;
    _Atomic uint32_t *closed; /* how many ranks have closed the exchange */
    struct fsdpc_rank_ctl *ranks;
    char *slots;
    size_t slot_stride;
    int slot_count;
    char *posts; /* [unit][rank] */
    size_t *post_offset, *post_stride;
    _Atomic uint32_t *acks; /* [rank][reduce slot] */
    _Atomic uint64_t *samples;
    /* Samples of ranks that waited elsewhere, which this rank read in the pass with the tag seen_at[rank]. */
    _Atomic uint64_t *seen;
    uint64_t *seen_at; /* per rank */
    uint64_t earlier;  /* what `changed` of this rank was before it was set last */
    uint64_t read_at;  /* the last pass in which this rank has gathered */
    fsdpc_numbers numbers;
    bool checks;      /* this pass is without gradients, see exchange_shared_changes.c */
    bool compared;    /* samples were taken before this pass */
    int reduce_total; /* a rank's reduce slots: base slots, then one overflow slot per unit */
    char *base_map, *over_map;
    uint64_t ctl_offset, base_offset, over_offset; /* in the segment */
    size_t base_bytes, over_bytes, base_stride, over_stride;
    size_t *over_at; /* per unit: where its overflow slot begins */
    int next_base;
    int *slot_user; /* unit in each of this rank's reduce slots, -1: none */
    bool *over_used;
    int64_t patience_ns; /* how long a wait for a slot lasts before private memory is used */
};

static inline struct fsdpc_slot_ctl *
fsdpc_shared_slot(const fsdpc_exchange *x, int slot)
{
    return (struct fsdpc_slot_ctl *)(x->shared->slots + x->shared->slot_stride * (size_t)slot);
}

/* --- exchange_shared_wait.c ------------------------------------------------------------------ */

/* Wakes all ranks that wait for a change. */
void fsdpc_shared_notify(fsdpc_exchange *x);
/* A wait is: begin; then in a loop read, examine, and (without progress) step; then end. */
struct fsdpc_shared_wait {
    fsdpc_wait what;
    fsdpc_shm_view view;
    int64_t start_ns, deadline_ns;
    int64_t quiet_ns,
        used_ns; /* since when the other ranks may be idle; their processor time then */
    bool waiting;
};
void fsdpc_shared_wait_open(fsdpc_exchange *x);
void fsdpc_shared_wait_begin(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const char *op,
                             const fsdpc_unit *unit);
void fsdpc_shared_wait_read(fsdpc_exchange *x, struct fsdpc_shared_wait *wait);
/* True when this rank must use its fallback: no other rank can end this wait, or (WAY_PRIVATE) the wait
 * has lasted so long that none is likely to. */
bool fsdpc_shared_must_act(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           enum fsdpc_shm_way way);
/* Sleeps until a change since the read, at most a few ms; `way`: this rank's fallback when it must act.
 * Fails as fsdpc_shm_wait_word does. */
int fsdpc_shared_wait_step(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           enum fsdpc_shm_way way);
void fsdpc_shared_wait_end(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           const fsdpc_unit *unit);
/* The patience of a new exchange, which is also its upper limit. Tests that expect no private memory raise this limit,
 * because a loaded machine may hold a rank up for longer. */
extern int64_t fsdpc_shared_patience_ns;
/* Call it when a wait for a slot was successful, before fsdpc_shared_wait_end: the patience grows. */
void fsdpc_shared_wait_was_worth(fsdpc_exchange *x, const struct fsdpc_shared_wait *wait);
/* The deadline has passed: makes a timeout error that names as late the ranks that do
 * not seem to wait themselves, or all other ranks if each of them seems to wait. */
int fsdpc_shared_name_late(fsdpc_exchange *x, const fsdpc_wait *what);
int fsdpc_shared_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param);

/* --- exchange_shared_changes.c --------------------------------------------------------------- */

size_t fsdpc_shared_samples_bytes(const fsdpc_exchange *x);
/* fsdpc_exchange_compare of this kind. Call it before a pass begins. */
void fsdpc_shared_compare(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
/* Call it once the unit's values are in place. FSDPC_E_MISMATCH: they are of different weights, and the group
 * ends. FSDPC_E_PEER: a rank has left before the weights changed. */
int fsdpc_shared_check_changes(fsdpc_exchange *x, const fsdpc_unit *unit);
/* The same check for a slot with values of this pass. `touched`: the claimer's when it claimed the slot. */
int fsdpc_shared_check_join(fsdpc_exchange *x, const fsdpc_unit *unit, int claimer,
                            uint64_t touched);
/* Before a forward without gradients ends. FSDPC_E_MISMATCH: this rank may have read half of a change. */
int fsdpc_shared_check_end(fsdpc_exchange *x);

/* --- exchange_shared_gather.c ---------------------------------------------------------------- */

int fsdpc_shared_gather(fsdpc_exchange *x, fsdpc_unit *unit, bool may_wait);
int fsdpc_shared_release(fsdpc_exchange *x, fsdpc_unit *unit);
/* Bytes from one slot's record to the next. */
size_t fsdpc_shared_slot_stride(int world);
/* Marks the slot as empty. */
void fsdpc_shared_slot_clear(fsdpc_exchange *x, int slot);
/* Releases prefetched units before any wait: this rank must not wait for a rank that
 * is behind while a prefetch of this rank occupies the slot which that rank needs. */
int fsdpc_shared_drop_prefetched(fsdpc_exchange *x);

/* --- exchange_shared_reduce.c ---------------------------------------------------------------- */

int fsdpc_shared_reduce_open(fsdpc_exchange *x);
/* `last`: no rank uses the memory any more, so it goes back to the kernel. */
void fsdpc_shared_reduce_close(fsdpc_exchange *x, bool last);
int fsdpc_shared_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_shared_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_shared_end(fsdpc_exchange *x);

#endif
