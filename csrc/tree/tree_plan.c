/* Computes which slot each unit gets. See tree_plan.h.
 *
 * Units of one nesting level that are released after forward take `per_level` slots in turn; a unit that
 * stays gathered, or whose values stay in place until backward, has a slot of its own. A slot is as large
 * as its largest unit. Everything follows from the list of units, so that all ranks compute the same plan.
 */
#include "tree/tree_plan.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"

static int
deepest(const struct fsdpc_slot_need *needs, int count)
{
    int depth = 0;
    for (int i = 0; i < count; i++) {
        depth = needs[i].depth > depth ? needs[i].depth : depth;
    }
    return depth;
}

static void
use_slot(struct fsdpc_slot_plan *plan, int unit, int slot, size_t bytes)
{
    plan->slot_of[unit] = slot;
    if (bytes > plan->slot_bytes[slot]) {
        plan->slot_bytes[slot] = bytes;
    }
}

/* `shared[depth * per_level + k]` is the k-th slot of level `depth`, or -1 before its first use. */
static void
assign(const struct fsdpc_slot_need *needs, int count, int per_level, int *shared, int *next,
       struct fsdpc_slot_plan *plan)
{
    for (int i = 0; i < count; i++) {
        const struct fsdpc_slot_need *need = &needs[i];
        if (need->direct) {
            plan->slot_of[i] = -1;
            continue;
        }
        if (!need->shares) {
            use_slot(plan, i, plan->slot_count++, need->bytes);
            continue;
        }
        int *slot = &shared[need->depth * per_level + next[need->depth]];
        next[need->depth] = (next[need->depth] + 1) % per_level;
        if (*slot < 0) {
            *slot = plan->slot_count++;
        }
        use_slot(plan, i, *slot, need->bytes);
    }
}

int
fsdpc_slot_plan_make(const struct fsdpc_slot_need *needs, int count, int per_level,
                     struct fsdpc_slot_plan *out)
{
    memset(out, 0, sizeof *out);
    size_t levels = (size_t)deepest(needs, count) + 1, slots = levels * (size_t)per_level;
    int *shared = fsdpc_mem_calloc(slots, sizeof *shared);
    int *next = fsdpc_mem_calloc(levels, sizeof *next);
    out->slot_of = fsdpc_mem_calloc((size_t)count, sizeof *out->slot_of);
    out->slot_bytes = fsdpc_mem_calloc((size_t)count, sizeof *out->slot_bytes);
    bool ok = shared && next && out->slot_of && out->slot_bytes;
    if (ok) {
        for (size_t i = 0; i < slots; i++) {
            shared[i] = -1;
        }
        assign(needs, count, per_level, shared, next, out);
    } else {
        fsdpc_slot_plan_free(out);
    }
    fsdpc_mem_free(shared);
    fsdpc_mem_free(next);
    return ok ? FSDPC_OK : fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of gather slots");
}

void
fsdpc_slot_plan_free(struct fsdpc_slot_plan *plan)
{
    fsdpc_mem_free(plan->slot_of);
    fsdpc_mem_free(plan->slot_bytes);
    memset(plan, 0, sizeof *plan);
}
