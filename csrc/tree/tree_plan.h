/* Computes which slot each unit of a tree gets: pure arithmetic, for the tree and for planners. */
#ifndef FSDPC_TREE_PLAN_H
#define FSDPC_TREE_PLAN_H

#include <stdbool.h>
#include <stddef.h>

/* A prefetch of depth n needs n + 1 slots per level: with fewer slots, the slot that the prefetched unit
 * needs is still in use, and the prefetch is a silent no-op. Two slots allow a depth of 1. Over a wire the
 * default depth is 2, so that the wire is not idle while a rank computes with an early unit. */
enum { FSDPC_DEFAULT_SLOTS = 2, FSDPC_DEFAULT_SLOTS_WIRE = 3 };

/* What one unit needs for its gathered values. */
struct fsdpc_slot_need {
    int depth;   /* nesting level, >= 0 */
    bool shares; /* takes slots in turn with other units; false: one slot is for this unit only */
    bool direct; /* needs no slot */
    size_t bytes;
};

struct fsdpc_slot_plan {
    int *slot_of;       /* per unit; -1: the unit needs no slot */
    size_t *slot_bytes; /* per slot */
    int slot_count;
};

/* `per_level`: slots of each nesting level, >= 1. On success the caller frees the plan
 * (fsdpc_slot_plan_free). FSDPC_E_NOMEM. */
int fsdpc_slot_plan_make(const struct fsdpc_slot_need *needs, int count, int per_level,
                         struct fsdpc_slot_plan *out);
/* Safe on a zeroed plan. */
void fsdpc_slot_plan_free(struct fsdpc_slot_plan *plan);

#endif
