/* A tree of units, which decides when each unit is gathered, held, reduced and released.
 *
 * The tree implements the order of events of a training step, independent of any language above it.
 * References are counted: a unit may be entered any number of times before a backward,
 * backward may run twice, a forward may run inside a backward (activation checkpointing), and a
 * pass that failed is cleaned up when the next pass begins.
 *
 *   forward_enter  gathers the unit, notes the order of units, prefetches the next unit
 *   forward_leave  releases the unit. If a backward may follow, the unit is held instead in two cases: the
 *                  unit stays gathered after forward, or the forward runs inside a backward
 *   backward_enter gathers and holds the unit for backward, prefetches the unit before it in forward order
 *   backward_done  the unit's gradients are complete: its hold is dropped, its reduction becomes due
 *   next_due       returns which unit may be reduced now: in any order on shared memory, in one agreed order
 *                  on a wire
 *   end_backward   sums all remaining gradients, sums replicas, increments the count of backwards
 */
#ifndef FSDPC_TREE_H
#define FSDPC_TREE_H

#include "exchange/exchange.h"

typedef struct fsdpc_tree fsdpc_tree;

enum fsdpc_prefetch { FSDPC_PREFETCH_NONE = 0, FSDPC_PREFETCH_PRE = 1, FSDPC_PREFETCH_POST = 2 };

typedef struct fsdpc_tree_options {
    enum fsdpc_prefetch backward_prefetch;
    bool forward_prefetch;
    int gather_slots; /* slots per nesting level, >= 1; 0: the default (2; 3 over a wire) */
    int reduce_slots; /* buffers for packed gradients per rank, >= 1; 0: the default, 2 */
    bool poison;
    bool trust_order; /* see fsdpc_exchange_plan */
} fsdpc_tree_options;

/* Makes a tree of `units`. They are in module order, are borrowed and must outlive the tree. depths[i] >= 0
 * is the nesting level of units[i]. Collective over the communicators of all units. */
int fsdpc_tree_new(fsdpc_unit *const *units, const int *depths, int count,
                   const fsdpc_tree_options *options, fsdpc_tree **out);
void fsdpc_tree_free(fsdpc_tree *tree);

/* Drops all references to units, whatever is in progress. Another tree may take the units afterwards. See
 * fsdpc_exchange_detach. Local. */
int fsdpc_tree_detach(fsdpc_tree *tree);
/* Begins a pass and drops references that a failed pass left. Call it outside of any forward and backward.
 * `grad` says whether a backward may follow, and is the same on all ranks. */
int fsdpc_tree_begin_forward(fsdpc_tree *tree, bool grad);
/* Call both functions before begin_forward. fsdpc_tree_compares returns true if begin_forward will compare
 * this rank's masters with the masters of the previous pass (fsdpc_exchange_compare). fsdpc_tree_touch
 * notes that masters were written since that pass. */
bool fsdpc_tree_compares(const fsdpc_tree *tree, bool grad);
void fsdpc_tree_touch(fsdpc_tree *tree);
/* Call this between passes when the ranks of a unit have met in a collective. Later passes get equal numbers
 * on all ranks again, and use no values that were gathered before the call. A no-op if not all units have
 * the same ranks. */
void fsdpc_tree_meet(fsdpc_tree *tree);
/* Call this when the ranks of all units have met in a collective. Later passes get new numbers, even if no
 * forward has run since the last call. Fails with FSDPC_E_STATE after too many calls without a backward. */
int fsdpc_tree_meet_all(fsdpc_tree *tree);
int fsdpc_tree_forward_enter(fsdpc_tree *tree, int unit);
/* `grad` is true if a backward may reach the outputs. */
int fsdpc_tree_forward_leave(fsdpc_tree *tree, int unit, bool grad);
/* Call this in place of forward_leave if other forwards of the pass read the unit's values. The unit is held
 * until end_stay, until its backward is done, or until a pass without a backward ends. */
int fsdpc_tree_forward_stay(fsdpc_tree *tree, int unit);
int fsdpc_tree_end_stay(fsdpc_tree *tree, int unit);
/* Call this when the outermost forward has ended and no backward will follow. May wait for other ranks. */
int fsdpc_tree_end_forward(fsdpc_tree *tree);
/* Call this when a forward has failed inside this unit. */
int fsdpc_tree_forward_failed(fsdpc_tree *tree, int unit);
/* Begins a backward. Further calls within that backward are no-ops. */
int fsdpc_tree_begin_backward(fsdpc_tree *tree);
int fsdpc_tree_backward_enter(fsdpc_tree *tree, int unit);
/* Call this when the backward reaches the outputs of unit `next`. The function returns a unit that the
 * backward has entered and that is not done, although autograd has run all nodes of the unit; or -1.
 * Only units that all ranks must reduce in one order are considered. */
int fsdpc_tree_next_passed(const fsdpc_tree *tree, int next);
/* Call this before a pass if no backward will run through graphs of earlier passes. Without this call
 * next_passed returns -1 for units whose forwards in several graphs interleave. */
void fsdpc_tree_forget_calls(fsdpc_tree *tree);
/* The unit's gradients are complete for now. If `sync` is false, they stay on this rank, unreduced. */
int fsdpc_tree_backward_done(fsdpc_tree *tree, int unit, bool sync);
/* Keeps the unit gathered after this backward (retain_graph). The unit stays gathered until a pass begins, or
 * until the end of a later backward that does not call this function. */
void fsdpc_tree_keep_hold(fsdpc_tree *tree, int unit);
/* Turns the holds that keep_hold keeps into ordinary holds. */
void fsdpc_tree_forget_kept(fsdpc_tree *tree);
/* Drops the hold of a unit that gets no gradients (for example a frozen one). */
int fsdpc_tree_drop_hold(fsdpc_tree *tree, int unit);
/* Returns the next unit that must be reduced now, or -1. `at_end`: no further unit will become complete. */
int fsdpc_tree_next_due(fsdpc_tree *tree, bool at_end);
/* Reduces the unit that next_due has returned. */
int fsdpc_tree_reduce(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads);
/* With `hooked`, the caller sums this unit's gradients over the ranks, and the exchange does not. When
 * next_due returns the unit, call fsdpc_unit_take_sums, then set_reduced. was_reduced returns true if the
 * unit was reduced in this backward; later gradients of the unit are then kept until the backward ends. */
void fsdpc_tree_set_hooked(fsdpc_tree *tree, int unit, bool hooked);
bool fsdpc_tree_was_reduced(const fsdpc_tree *tree, int unit);
void fsdpc_tree_set_reduced(fsdpc_tree *tree, int unit);
/* During a backward, next_summed sets *unit to the next unit whose shard gradient already holds the sum of
 * all ranks, or to -1. It returns each unit once, and no unit with replicas or a communication hook.
 * was_taken returns true if next_summed returned the unit in the latest backward. With steps_inside, a unit
 * that is needed again after its reduction in the same backward fails with FSDPC_E_STATE. */
void fsdpc_tree_set_steps_inside(fsdpc_tree *tree, bool inside);
int fsdpc_tree_next_summed(fsdpc_tree *tree, int *unit);
/* With steps_inside, on a device with streams: moves gradients into common slots (grad_slots.h), one per
 * reduce slot. `units` has a byte per unit: set it to ask for the move. On return the byte is set if the
 * gradient has moved. The values are lost. Host sync. Errors: FSDPC_E_NOMEM, FSDPC_E_DEVMEM. */
int fsdpc_tree_share_grads(fsdpc_tree *tree, uint8_t *units);
/* With steps_inside, call make_room, then next_summed, then fsdpc_tree_reduce. See
 * fsdpc_exchange_make_room. */
int fsdpc_tree_make_room(fsdpc_tree *tree, int unit);
bool fsdpc_tree_was_taken(const fsdpc_tree *tree, int unit);
/* With steps_inside, after end_backward: sets *unit to the next offloaded unit that was not taken, in reverse
 * module order, or to -1. The unit counts as taken from then on. Host sync for this unit only. */
int fsdpc_tree_next_late(fsdpc_tree *tree, int *unit);
/* Keeps gradients on this rank (no_sync). */
int fsdpc_tree_keep_local(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads);
/* Drops the references of a backward that has failed, so that peers need not wait for this rank. Local. */
int fsdpc_tree_backward_broke(fsdpc_tree *tree);
/* Ends a backward, also a failed one. With `sync`, other ranks see that this rank sends no more gradients. */
int fsdpc_tree_end_backward(fsdpc_tree *tree, bool sync);

/* For units that run on some ranks only: with `defer`, all reductions that ranks match by order are made at
 * the end of backward, so that the order of collectives is the same on all ranks. */
void fsdpc_tree_defer_reduces(fsdpc_tree *tree, bool defer);

bool fsdpc_tree_in_backward(const fsdpc_tree *tree);
bool fsdpc_tree_is_held(const fsdpc_tree *tree, int unit);
/* Returns the unit's nesting level, as given to fsdpc_tree_new. */
int fsdpc_tree_depth(const fsdpc_tree *tree, int unit);
/* True if forwards of the unit have begun and not ended. */
bool fsdpc_tree_is_running(const fsdpc_tree *tree, int unit);
/* Returns fsdpc_exchange_any_order of the unit's exchange. */
bool fsdpc_tree_any_order(const fsdpc_tree *tree, int unit);
/* Adds an entry of the unit to the trace. */
void fsdpc_tree_note(fsdpc_tree *tree, int unit, enum fsdpc_trace_op op, uint64_t bytes);
fsdpc_trace *fsdpc_tree_trace(const fsdpc_tree *tree);

typedef struct fsdpc_tree_clip_plan {
    /* masks[u][i] is not 0 if parameter i of unit u has a gradient. masks[u] is NULL if none of the unit's
     * parameters has one. */
    const uint8_t *const *masks;
    double p;        /* order of the norm: > 0, or infinite */
    double max_norm; /* gradients are multiplied by min(1, max_norm / (norm + 1e-6)) */
    bool scale;      /* false: gradients are not multiplied */
    /* `extra_count` parts of the norm (device.h), for gradients that every rank has in full. */
    const void *extra;
    int64_t extra_count;
    double *out; /* two doubles in device memory: receives the norm and the factor */
} fsdpc_tree_clip_plan;
/* Computes the norm of all gradients over all ranks, on a device with streams, without a host sync. Each unit
 * counts once, however many replicas it has. Collective, between steps. The first call allocates memory.
 * Fails with FSDPC_E_UNAVAILABLE if gradients are in host memory: see fsdpc_unit_grad_norm. */
int fsdpc_tree_clip(fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan);

typedef struct fsdpc_tree_memory {
    size_t gather_bytes; /* of the gather slots, which all ranks of a host share on shared memory */
    size_t reduce_bytes; /* of this rank's buffers for packed gradients */
    size_t master_bytes, grad_bytes, local_bytes; /* per rank */
    size_t coded_bytes;                           /* fsdpc_exchange_coded_bytes */
    size_t spare_bytes;
    uint64_t spare_count;
    size_t gather_slot_bytes; /* the largest slot */
    int gather_slots, reduce_slots;
} fsdpc_tree_memory;
void fsdpc_tree_get_memory(const fsdpc_tree *tree, fsdpc_tree_memory *out);
/* Returns the bytes that this rank has sent since the tree was made: by all exchanges, and to replicas. */
uint64_t fsdpc_tree_sent_bytes(const fsdpc_tree *tree);
/* See fsdpc_exchange_announce. */
int fsdpc_tree_announce(fsdpc_tree *tree, int unit, int param);
/* See fsdpc_exchange_forget. */
int fsdpc_tree_forget(fsdpc_tree *tree);
/* See fsdpc_exchange_before_hook. */
int fsdpc_tree_before_hook(fsdpc_tree *tree, int unit, const char *what);
/* Returns "shared", "wire" or "stream"; "none" if there are no units; "mixed" if the exchanges differ. */
const char *fsdpc_tree_kind(const fsdpc_tree *tree);

#endif
