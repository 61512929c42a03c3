/* The state of the "shared" exchange in the segment, and declarations that its source files share. */
#ifndef FSDPC_EXCHANGE_SHARED_IMPL_H
#define FSDPC_EXCHANGE_SHARED_IMPL_H

#include <stdatomic.h>

#include "exchange/exchange_impl.h"
#include "exchange/exchange_weights.h"

struct fsdpc_rank_ctl {
    _Atomic uint64_t ready; /* tag of the pass for which this rank's masters are final */
    /* number of synchronised backwards in which this rank has made all its first posts */
    _Atomic uint64_t first;
    /* number of synchronised backwards in which this rank has posted all its gradients */
    _Atomic uint64_t ended;
    /* tag of the last forward without a backward that this rank has ended */
    _Atomic uint64_t left;
    /* `thaws`: tag of the training pass before which this rank unfreezes parameters, 0: none. `thawed`: one
     * of these parameters, as unit << 32 | parameter; UINT64_MAX: not known. */
    _Atomic uint64_t thaws, thawed;
    /* `weights`: the number of the version of this rank's weights. The others are tags of passes;
     * `sampled`: of the last pass that took samples. See [Note: changed weights] in
     * exchange_shared_changes.c. */
    _Atomic uint64_t changed, before, touched, sampled, weights;
    _Atomic uint64_t early; /* tag of the last forward whose end did not wait for all ranks */
    char pad[128 - 96];
    /* hashes of this rank's weights, each at its number modulo FSDPC_KNOWN_WEIGHTS; 0: none */
    _Atomic uint64_t known[FSDPC_KNOWN_WEIGHTS];
};

struct fsdpc_slot_ctl {
    _Atomic uint32_t lock; /* rank + 1 of its holder, or 0 */
    _Atomic uint32_t done; /* chunks in place */
    uint32_t total;
    uint32_t holders;
    int32_t unit;
    uint64_t tag;
    uint64_t touched; /* the `touched` tag of rank `claimer` when that rank claimed the slot */
    int32_t claimer;
    char pad[64 - 44];
    /* In memory follow: _Atomic uint32_t next[world] (claimed chunks of each piece), uint8_t held[world]. */
};

struct fsdpc_post_ctl {
    _Atomic uint64_t round; /* number of backward << 8 | n, for the unit's n-th post (1 or 2) */
    uint32_t slot;          /* index of the rank's reduce slot with the gradients */
    char pad[64 - 12];
    /* In memory follows: uint8_t used[param_count]. */
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
    /* For each rank, the samples of its weights that this rank took while that rank waited elsewhere, in the
     * pass with the tag seen_at[rank]. */
    _Atomic uint64_t *seen;
    uint64_t *seen_at; /* per rank */
    uint64_t earlier;  /* the tag that this rank's `changed` had before its present tag */
    uint64_t read_at;  /* tag of the last pass in which this rank has gathered a unit */
    fsdpc_numbers numbers;
    bool checks; /* true: this pass has no gradients, so this rank looks for changed weights */
    /* true: this rank compared its weights with its samples when this pass began */
    bool compared;
    /* number of reduce slots of each rank: base slots, then one overflow slot per unit */
    int reduce_total;
    char *base_map, *over_map;
    uint64_t ctl_offset, base_offset, over_offset; /* in the segment */
    size_t base_bytes, over_bytes, base_stride, over_stride;
    size_t *over_at; /* offset of each unit's overflow slot in a rank's overflow area */
    int next_base;
    /* for each of this rank's reduce slots, the id of the unit that used it last; -1: none */
    int *slot_user;
    bool *over_used;
    int64_t patience_ns; /* how long a wait for a slot lasts before private memory is used */
};

static inline struct fsdpc_slot_ctl *
fsdpc_shared_slot(const fsdpc_exchange *x, int slot)
{
    return (struct fsdpc_slot_ctl *)(x->shared->slots + x->shared->slot_stride * (size_t)slot);
}

/* --- exchange_shared_wait.c ------------------------------------------------------------------ */

/* Wakes all ranks that wait for a change of shared state. */
void fsdpc_shared_notify(fsdpc_exchange *x);
/* To wait, call begin; then read, examine and (if there is no progress) step in a loop; then end. */
struct fsdpc_shared_wait {
    fsdpc_wait what;
    fsdpc_shm_view view;
    int64_t start_ns, deadline_ns;
    /* `quiet_ns`: the time from which on the other ranks may have been idle. `used_ns`: the processor time
     * that they had used by then. */
    int64_t quiet_ns, used_ns;
    bool waiting;
};
void fsdpc_shared_wait_open(fsdpc_exchange *x);
void fsdpc_shared_wait_begin(fsdpc_exchange *x, struct fsdpc_shared_wait *wait, const char *op,
                             const fsdpc_unit *unit);
void fsdpc_shared_wait_read(fsdpc_exchange *x, struct fsdpc_shared_wait *wait);
/* True if this rank must use its fallback, because no other rank can end this wait. For FSDPC_WAY_PRIVATE,
 * also true if the wait has lasted so long that no other rank is likely to end it. */
bool fsdpc_shared_must_act(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           enum fsdpc_shm_way way);
/* Sleeps until shared state has changed since the last read, for at most 20 ms. `way` is this rank's fallback
 * when no rank can end the wait. Fails as fsdpc_shm_wait_word does. */
int fsdpc_shared_wait_step(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           enum fsdpc_shm_way way);
void fsdpc_shared_wait_end(fsdpc_exchange *x, struct fsdpc_shared_wait *wait,
                           const fsdpc_unit *unit);
/* How long a new exchange waits for a slot before it uses private memory; also the upper limit of that time.
 * Tests that expect no private memory raise it, because a loaded machine may delay a rank for longer. */
extern int64_t fsdpc_shared_patience_ns;
/* Makes later waits for slots longer. Call it after a wait that got a slot, before fsdpc_shared_wait_end. */
void fsdpc_shared_wait_was_worth(fsdpc_exchange *x, const struct fsdpc_shared_wait *wait);
/* Returns a timeout error after the deadline has passed. The error names as late those ranks that do not seem
 * to be waiting themselves, or all other ranks if each of them seems to be waiting. */
int fsdpc_shared_name_late(fsdpc_exchange *x, const fsdpc_wait *what);
int fsdpc_shared_announce(fsdpc_exchange *x, uint64_t tag, int unit, int param);

/* --- exchange_shared_changes.c --------------------------------------------------------------- */

size_t fsdpc_shared_samples_bytes(const fsdpc_exchange *x);
/* Implements fsdpc_exchange_compare for the "shared" kind. Call it before a pass begins. */
void fsdpc_shared_compare(fsdpc_exchange *x, uint64_t tag, bool grad, bool touched);
/* Call it once the unit's values are in place. Fails with FSDPC_E_MISMATCH, and ends the group, if the values
 * belong to different weights. Fails with FSDPC_E_PEER if a rank has left before the weights changed. */
int fsdpc_shared_check_changes(fsdpc_exchange *x, const fsdpc_unit *unit);
/* Makes the check of fsdpc_shared_check_changes for a slot that this rank joins. `touched`: the `touched` tag
 * of rank `claimer` when that rank claimed the slot. */
int fsdpc_shared_check_join(fsdpc_exchange *x, const fsdpc_unit *unit, int claimer,
                            uint64_t touched);
/* Call it when a forward without gradients ends. Fails with FSDPC_E_MISMATCH if another rank may have changed
 * its weights while this rank read them. */
int fsdpc_shared_check_end(fsdpc_exchange *x);

/* --- exchange_shared_gather.c ---------------------------------------------------------------- */

int fsdpc_shared_gather(fsdpc_exchange *x, fsdpc_unit *unit, bool may_wait);
int fsdpc_shared_release(fsdpc_exchange *x, fsdpc_unit *unit);
/* Returns the number of bytes from one slot's record to the next record. */
size_t fsdpc_shared_slot_stride(int world);
/* Marks the slot as empty. */
void fsdpc_shared_slot_clear(fsdpc_exchange *x, int slot);
/* Releases prefetched units before any wait: this rank must not wait for a rank that
 * is behind while a prefetch of this rank occupies the slot which that rank needs. */
int fsdpc_shared_drop_prefetched(fsdpc_exchange *x);

/* --- exchange_shared_reduce.c ---------------------------------------------------------------- */

int fsdpc_shared_reduce_open(fsdpc_exchange *x);
/* `last`: no rank uses the memory any more, so the memory is returned to the kernel. */
void fsdpc_shared_reduce_close(fsdpc_exchange *x, bool last);
int fsdpc_shared_reduce(fsdpc_exchange *x, fsdpc_unit *unit, const fsdpc_tensor *grads);
bool fsdpc_shared_summed(fsdpc_exchange *x, const fsdpc_unit *unit);
int fsdpc_shared_end(fsdpc_exchange *x);

#endif
