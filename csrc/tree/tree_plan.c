/* Which slot each unit gets. Part of tree.c's set-up.
 *
 * Units of one nesting level that are released after forward share K slots in turn; a unit that
 * stays gathered has a slot of its own. A slot is as large as its largest unit. Everything follows from
 * the list of units, so that all ranks compute the same plan.
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "tree/tree_impl.h"

static int
deepest(const fsdpc_tree *tree)
{
    int depth = 0;
    for (int i = 0; i < tree->count; i++) {
        depth = tree->nodes[i].depth > depth ? tree->nodes[i].depth : depth;
    }
    return depth;
}

static void
use_slot(struct fsdpc_slot_plan *plan, int position, int slot, size_t bytes)
{
    plan->slot_of[position] = slot;
    if (bytes > plan->slot_bytes[slot]) {
        plan->slot_bytes[slot] = bytes;
    }
}

/* `shared[depth * per_level + k]` is the k-th slot of a level, -1 until used. */
static void
assign(const fsdpc_tree *tree, struct fsdpc_slot_plan *plan, const int *members, int count,
       int *shared, int *turn)
{
    for (int m = 0; m < count; m++) {
        const struct fsdpc_node *node = &tree->nodes[members[m]];
        size_t bytes = fsdpc_unit_is_direct(node->unit) ? 0 : fsdpc_unit_range(node->unit)->bytes;
        if (fsdpc_unit_is_direct(node->unit)) {
            plan->slot_of[m] = -1;
            continue;
        }
        if (!fsdpc_unit_reshards(node->unit)) {
            use_slot(plan, m, plan->slot_count++, bytes);
            continue;
        }
        int *slot = &shared[node->depth * tree->gather_slots + turn[node->depth]];
        turn[node->depth] = (turn[node->depth] + 1) % tree->gather_slots;
        if (*slot < 0) {
            *slot = plan->slot_count++;
        }
        use_slot(plan, m, *slot, bytes);
    }
}

int
fsdpc_tree_plan_slots(const fsdpc_tree *tree, const int *members, int count,
                      struct fsdpc_slot_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    size_t levels = (size_t)deepest(tree) + 1;
    int *shared = fsdpc_mem_calloc(levels * (size_t)tree->gather_slots, sizeof *shared);
    int *turn = fsdpc_mem_calloc(levels, sizeof *turn);
    plan->slot_of = fsdpc_mem_calloc((size_t)count, sizeof *plan->slot_of);
    plan->slot_bytes = fsdpc_mem_calloc((size_t)count, sizeof *plan->slot_bytes);
    bool ok = shared && turn && plan->slot_of && plan->slot_bytes;
    if (ok) {
        for (size_t i = 0; i < levels * (size_t)tree->gather_slots; i++) {
            shared[i] = -1;
        }
        assign(tree, plan, members, count, shared, turn);
    } else {
        fsdpc_tree_plan_free(plan);
    }
    fsdpc_mem_free(shared);
    fsdpc_mem_free(turn);
    return ok ? FSDPC_OK : fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of gather slots");
}

void
fsdpc_tree_plan_free(struct fsdpc_slot_plan *plan)
{
    fsdpc_mem_free(plan->slot_of);
    fsdpc_mem_free(plan->slot_bytes);
    memset(plan, 0, sizeof *plan);
}
