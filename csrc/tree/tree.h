/* A tree of units: when each is gathered, held, reduced and released.
 *
 * The tree implements the order of events of a training step, independent of any language above it.
 * References are counted: a unit may be entered any number of times before a backward,
 * backward may run twice, a forward may run inside a backward (activation checkpointing), and a
 * pass that failed is cleaned up when the next one begins.
 *
 *   forward_enter  gathers, notes the order, prefetches the next unit
 *   forward_leave  releases, or (unit kept after forward, or forward inside backward) holds
 *   backward_enter gathers and holds for backward, prefetches the unit before it in forward order
 *   backward_done  gradients complete: the hold is dropped, reduction becomes due
 *   next_due       which unit may be reduced now: any order on shared memory, one agreed order on
 *                  a wire
 *   end_backward   everything is summed; replicas are summed; the count of backwards grows
 */
#ifndef FSDPC_TREE_H
#define FSDPC_TREE_H

#include "exchange/exchange.h"

typedef struct fsdpc_tree fsdpc_tree;

enum fsdpc_prefetch { FSDPC_PREFETCH_NONE = 0, FSDPC_PREFETCH_PRE = 1, FSDPC_PREFETCH_POST = 2 };

typedef struct fsdpc_tree_options {
    enum fsdpc_prefetch backward_prefetch;
    bool forward_prefetch;
    int gather_slots; /* per nesting level, >= 1; 0 = the default 2, over a wire 3 */
    int reduce_slots; /* per rank, >= 1; 0 = the default 2 */
    bool poison;
    bool trust_order; /* see fsdpc_exchange_plan */
} fsdpc_tree_options;

/* `units` in module order (borrowed, must outlive the tree), depths[i] >= 0 their nesting levels.
 * Collective over every communicator involved. */
int fsdpc_tree_new(fsdpc_unit *const *units, const int *depths, int count,
                   const fsdpc_tree_options *options, fsdpc_tree **out);
void fsdpc_tree_free(fsdpc_tree *tree);

/* Drops every reference, whatever is in progress; another tree may take the units afterwards. See
 * fsdpc_exchange_detach. Local. */
int fsdpc_tree_detach(fsdpc_tree *tree);
/* Outside of any forward and backward: begins a pass and drops references that a failed pass left. `grad`,
 * the same on all ranks: a backward may follow. */
int fsdpc_tree_begin_forward(fsdpc_tree *tree, bool grad);
/* Before begin_forward. compares: true if begin_forward will compare this rank's masters with those of the
 * pass before (fsdpc_exchange_compare). touch: the caller knows of a write to the masters since that pass. */
bool fsdpc_tree_compares(const fsdpc_tree *tree, bool grad);
void fsdpc_tree_touch(fsdpc_tree *tree);
/* Between passes: the ranks of a unit have met, however many forwards each has run. Later passes of the ranks have
 * equal numbers again, and join no values that were gathered before. A no-op where units have different ranks. */
void fsdpc_tree_meet(fsdpc_tree *tree);
/* fsdpc_tree_meet where the ranks of all units have met, also if they have run no forward since
 * the last meeting: each call counts. FSDPC_E_STATE: too many meetings without a backward. */
int fsdpc_tree_meet_all(fsdpc_tree *tree);
int fsdpc_tree_forward_enter(fsdpc_tree *tree, int unit);
/* `grad`: the outputs may see a backward. */
int fsdpc_tree_forward_leave(fsdpc_tree *tree, int unit, bool grad);
/* forward_leave of a unit whose values other forwards of the pass read: the unit is held until end_stay, its
 * backward, or the end of a pass without a backward. */
int fsdpc_tree_forward_stay(fsdpc_tree *tree, int unit);
int fsdpc_tree_end_stay(fsdpc_tree *tree, int unit);
/* The outermost forward has ended and no backward will follow. May wait for other ranks. */
int fsdpc_tree_end_forward(fsdpc_tree *tree);
/* The forward failed inside this unit. */
int fsdpc_tree_forward_failed(fsdpc_tree *tree, int unit);
/* Begins a backward. Further calls within that backward are no-ops. */
int fsdpc_tree_begin_backward(fsdpc_tree *tree);
int fsdpc_tree_backward_enter(fsdpc_tree *tree, int unit);
/* A unit that this backward has entered, that is not done, and no part of whose graph can still run once the
 * backward has come to outputs of unit `next`; -1: none. Only units that all ranks must reduce in one order. */
int fsdpc_tree_next_passed(const fsdpc_tree *tree, int next);
/* Call it before a pass if no backward will come to graphs of earlier passes. Without
 * it next_passed is -1 for units whose forwards in several graphs interleave. */
void fsdpc_tree_forget_calls(fsdpc_tree *tree);
/* Gradients of the unit are complete for now; `sync` false: they stay local, nothing is due. */
int fsdpc_tree_backward_done(fsdpc_tree *tree, int unit, bool sync);
/* The unit stays gathered after this backward (retain_graph), until a backward ends without this call or
 * a pass begins. */
void fsdpc_tree_keep_hold(fsdpc_tree *tree, int unit);
/* Holds that keep_hold kept become ordinary holds. */
void fsdpc_tree_forget_kept(fsdpc_tree *tree);
/* Drops the hold without gradients (frozen units): the unit is done. */
int fsdpc_tree_drop_hold(fsdpc_tree *tree, int unit);
/* The next unit that must be reduced now, or -1. at_end: no further unit will become complete. */
int fsdpc_tree_next_due(fsdpc_tree *tree, bool at_end);
/* Reduces the unit that next_due named. */
int fsdpc_tree_reduce(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads);
/* With `hooked` the caller sums this unit's gradients over the ranks (fsdpc_unit_take_sums) when next_due
 * names the unit, on any exchange. set_reduced: the caller has summed them; was_reduced: true if the unit was
 * reduced in this backward (later gradients of the unit are kept until the end). */
void fsdpc_tree_set_hooked(fsdpc_tree *tree, int unit, bool hooked);
bool fsdpc_tree_was_reduced(const fsdpc_tree *tree, int unit);
void fsdpc_tree_set_reduced(fsdpc_tree *tree, int unit);
/* The next unit whose sum over all ranks is in its shard gradient before the backward has ended, or -1;
 * each is named once. Units with replicas or a communication hook are not named. was_taken: true if the
 * unit was named in the latest backward. With steps_inside, a unit that is needed again after its reduction
 * in the same backward is FSDPC_E_STATE. */
void fsdpc_tree_set_steps_inside(fsdpc_tree *tree, bool inside);
int fsdpc_tree_next_summed(fsdpc_tree *tree, int *unit);
/* With steps_inside, on a device with streams: the gradients of these units (one byte per unit), whose values are
 * not needed, take turns in the slots of grad_slots.h, one per reduce slot. A gradient whose unit's byte is
 * still set afterwards has a new address. Host sync. FSDPC_E_NOMEM, FSDPC_E_DEVMEM. */
int fsdpc_tree_share_grads(fsdpc_tree *tree, uint8_t *units);
/* With steps_inside, before fsdpc_tree_reduce: after it next_summed may name units (fsdpc_exchange_make_room). */
int fsdpc_tree_make_room(fsdpc_tree *tree, int unit);
bool fsdpc_tree_was_taken(const fsdpc_tree *tree, int unit);
/* With steps_inside, after end_backward: the next offloaded unit that was not taken, the last one in module
 * order first, or -1. Host sync for that unit alone; then it counts as taken. */
int fsdpc_tree_next_late(fsdpc_tree *tree, int *unit);
/* Keeps gradients on this rank (no_sync). */
int fsdpc_tree_keep_local(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads);
/* A backward has failed: drops its references, so that peers need not wait for this rank. Local. */
int fsdpc_tree_backward_broke(fsdpc_tree *tree);
/* Also cleans up a failed backward: with `sync` the other ranks see that this rank sends no more. */
int fsdpc_tree_end_backward(fsdpc_tree *tree, bool sync);

/* For units that run on some ranks only: with `defer` all reductions that match by order are made at the
 * end of backward, so that the order of collectives is the same on all ranks. */
void fsdpc_tree_defer_reduces(fsdpc_tree *tree, bool defer);

bool fsdpc_tree_in_backward(const fsdpc_tree *tree);
bool fsdpc_tree_is_held(const fsdpc_tree *tree, int unit);
/* The nesting level that fsdpc_tree_new was given. */
int fsdpc_tree_depth(const fsdpc_tree *tree, int unit);
/* True if forwards of the unit have begun and not ended. */
bool fsdpc_tree_is_running(const fsdpc_tree *tree, int unit);
/* fsdpc_exchange_any_order of the unit's exchange. */
bool fsdpc_tree_any_order(const fsdpc_tree *tree, int unit);
/* Adds an entry of the unit to the trace. */
void fsdpc_tree_note(fsdpc_tree *tree, int unit, enum fsdpc_trace_op op, uint64_t bytes);
fsdpc_trace *fsdpc_tree_trace(const fsdpc_tree *tree);

typedef struct fsdpc_tree_clip_plan {
    const uint8_t *const *masks; /* per unit: its parameters that have a gradient; NULL: none */
    double p;                    /* order: > 0, or infinite */
    double max_norm;             /* gradients are multiplied by min(1, max_norm / (norm + 1e-6)) */
    bool scale;                  /* false: only the norm is taken */
    const void *extra;           /* parts of a norm of other gradients, whole on every rank */
    int64_t extra_count;
    double *out; /* on the device: the norm, the factor */
} fsdpc_tree_clip_plan;
/* On a device with streams, without a host sync: the norm of all gradients over all ranks; each
 * unit counts once, however many replicas it has. Collective, between steps. Allocates when called
 * first. FSDPC_E_UNAVAILABLE where gradients are in host memory: see fsdpc_unit_grad_norm. */
int fsdpc_tree_clip(fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan);

typedef struct fsdpc_tree_memory {
    size_t gather_bytes;                          /* slots, once per host on shared memory */
    size_t reduce_bytes;                          /* packed gradients, per rank */
    size_t master_bytes, grad_bytes, local_bytes; /* per rank */
    size_t coded_bytes;                           /* fsdpc_exchange_coded_bytes */
    size_t spare_bytes;
    uint64_t spare_count;
    size_t gather_slot_bytes; /* the largest slot */
    int gather_slots, reduce_slots;
} fsdpc_tree_memory;
void fsdpc_tree_get_memory(const fsdpc_tree *tree, fsdpc_tree_memory *out);
/* fsdpc_exchange_sent_bytes of all exchanges, plus bytes of swaps with replicas, since the tree was made. */
uint64_t fsdpc_tree_sent_bytes(const fsdpc_tree *tree);
/* See fsdpc_exchange_announce. */
int fsdpc_tree_announce(fsdpc_tree *tree, int unit, int param);
/* See fsdpc_exchange_forget. */
int fsdpc_tree_forget(fsdpc_tree *tree);
/* See fsdpc_exchange_before_hook. */
int fsdpc_tree_before_hook(fsdpc_tree *tree, int unit, const char *what);
/* "shared", "wire", "stream"; "none" without units; "mixed" if the exchanges differ. */
const char *fsdpc_tree_kind(const fsdpc_tree *tree);

#endif
