/* The norm of all gradients, and clipping by it, without a host sync.
 *
 * All work is queued on the caller's stream. The units write partial sums to adjacent memory. One small
 * launch adds the partial sums of an exchange; the ranks of the exchange all-gather their sums and add them
 * in rank order. An all-reduce of NCCL would suffice for sums of squares, but its maximum may drop a NaN. The
 * order of ranks also gives the same bits on all ranks.
 */
#include "base/mem.h"
#include "base/status.h"
#include "tree/tree_impl.h"

struct fsdpc_norm_room {
    fsdpc_device *device;
    size_t bytes;
    char *parts, *ranks, *total; /* sums of one group's units; one sum per rank; the total */
};

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int
make_room(fsdpc_tree *tree, struct fsdpc_norm_room *room)
{
    int64_t parts = 0, ranks = 0;
    void *block;
    for (int i = 0; i < tree->exchange_count; i++) {
        const fsdpc_exchange *x = tree->exchanges[i];
        int64_t own = 0;
        for (int u = 0; u < fsdpc_exchange_unit_count(x); u++) {
            own += fsdpc_unit_norm_room(fsdpc_exchange_unit(x, u));
        }
        parts = larger(parts, own);
        ranks = larger(ranks, fsdpc_comm_world(fsdpc_exchange_comm(x)));
    }
    room->bytes = (size_t)(parts + ranks + 1) * FSDPC_NORM_PART_BYTES;
    FSDPC_TRY(fsdpc_device_alloc(room->device, room->bytes, &block));
    room->parts = block;
    room->ranks = room->parts + parts * FSDPC_NORM_PART_BYTES;
    room->total = room->ranks + ranks * FSDPC_NORM_PART_BYTES;
    return FSDPC_OK;
}

static int
open_room(fsdpc_tree *tree)
{
    if (tree->norm_room) {
        return FSDPC_OK;
    }
    struct fsdpc_norm_room *room = fsdpc_mem_calloc(1, sizeof *room);
    if (!room) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a norm");
    }
    room->device = fsdpc_unit_device(tree->nodes[0].unit);
    int status = make_room(tree, room);
    if (status != FSDPC_OK) {
        fsdpc_mem_free(room);
        return status;
    }
    tree->norm_room = room;
    return FSDPC_OK;
}

void
fsdpc_tree_norm_free(fsdpc_tree *tree)
{
    if (tree->norm_room) {
        fsdpc_device_free(tree->norm_room->device, tree->norm_room->parts, tree->norm_room->bytes);
    }
    fsdpc_mem_free(tree->norm_room);
}

static int
measure_units(const fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan, const fsdpc_exchange *x,
              int64_t *count)
{
    *count = 0;
    for (int i = 0; i < tree->count; i++) {
        const struct fsdpc_node *node = &tree->nodes[i];
        int64_t more = 0;
        if (node->exchange == x && plan->masks[i]) {
            char *next = tree->norm_room->parts + *count * FSDPC_NORM_PART_BYTES;
            FSDPC_TRY(fsdpc_unit_norm_parts(node->unit, plan->masks[i], plan->p, next, &more));
        }
        *count += more;
    }
    return FSDPC_OK;
}

/* Adds the group's sum to the total. With `add` false, the group is the first and sets the total. */
static int
measure_group(const fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan, fsdpc_exchange *x, bool add)
{
    const struct fsdpc_norm_room *room = tree->norm_room;
    int64_t count;
    FSDPC_TRY(measure_units(tree, plan, x, &count));
    if (fsdpc_comm_world(fsdpc_exchange_comm(x)) == 1) {
        return fsdpc_device_norm_total(room->device, room->parts, count, add, room->total);
    }
    char *own = room->ranks + fsdpc_comm_rank(fsdpc_exchange_comm(x)) * FSDPC_NORM_PART_BYTES;
    FSDPC_TRY(fsdpc_device_norm_total(room->device, room->parts, count, false, own));
    FSDPC_TRY(fsdpc_exchange_share(x, room->ranks, FSDPC_NORM_PART_BYTES, "norm of gradients"));
    return fsdpc_device_norm_total(room->device, room->ranks,
                                   fsdpc_comm_world(fsdpc_exchange_comm(x)), add, room->total);
}

static int
check_device(const fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        const fsdpc_unit *unit = tree->nodes[i].unit;
        if (!fsdpc_device_get_caps(fsdpc_unit_device(unit))->asynchronous ||
            fsdpc_unit_is_offloaded(unit)) {
            return fsdpc_error(
                FSDPC_E_UNAVAILABLE,
                "unit %s has its gradients in host memory: compute their norm on the CPU",
                fsdpc_unit_name(unit));
        }
    }
    return tree->count > 0 ? FSDPC_OK : fsdpc_error(FSDPC_E_INVAL, "norm: the tree has no units");
}

static int
scale_units(const fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan)
{
    for (int i = 0; i < tree->count; i++) {
        if (plan->masks[i]) {
            FSDPC_TRY(fsdpc_unit_scale_by(tree->nodes[i].unit, plan->masks[i], plan->out + 1));
        }
    }
    return FSDPC_OK;
}

int
fsdpc_tree_clip(fsdpc_tree *tree, const fsdpc_tree_clip_plan *plan)
{
    FSDPC_TRY(check_device(tree));
    FSDPC_TRY(open_room(tree));
    const struct fsdpc_norm_room *room = tree->norm_room;
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_TRY(measure_group(tree, plan, tree->exchanges[i], i > 0));
    }
    if (plan->extra_count > 0) {
        FSDPC_TRY(fsdpc_device_norm_total(room->device, plan->extra, plan->extra_count, true,
                                          room->total));
    }
    FSDPC_TRY(
        fsdpc_device_clip_factor(room->device, room->total, plan->p, plan->max_norm, plan->out));
    return plan->scale ? scale_units(tree, plan) : FSDPC_OK;
}
