/* The order of events of a training step: backward. A unit is gathered again, is done when its gradients are
 * complete, and is reduced when its reduction is due. The end of a backward synchronises all ranks.
 */
#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "tree/tree_impl.h"

/* --- a unit's backward ----------------------------------------------------------------------- */

bool
fsdpc_tree_in_backward(const fsdpc_tree *tree)
{
    return tree->in_backward;
}

int
fsdpc_tree_begin_backward(fsdpc_tree *tree)
{
    if (tree->in_backward) {
        return FSDPC_OK;
    }
    tree->in_backward = true;
    for (int i = 0; i < tree->count; i++) {
        tree->nodes[i].taken = false;
    }
    fsdpc_tree_set_phase(tree, FSDPC_PHASE_BACKWARD);
    /* Publish the tag again, because a second backward may follow the first one without a forward. */
    return fsdpc_tree_publish_tag(tree);
}

static int
prefetch_before(fsdpc_tree *tree, int unit)
{
    const int at = tree->nodes[unit].order;
    const int reach = fsdpc_tree_reach(tree, &tree->nodes[unit]);
    for (int k = at - 1; k >= at - reach && k >= 0; k--) {
        struct fsdpc_node *previous = &tree->nodes[tree->order[k]];
        if (!previous->held && !previous->done) {
            FSDPC_TRY(fsdpc_exchange_prefetch(previous->exchange, previous->unit));
        }
    }
    return FSDPC_OK;
}

static void
open_node(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    if (!node->open) {
        node->open = true;
        node->below = tree->opened;
        tree->opened = unit;
    }
}

/* Searches the list of open units. Most units are done before another is entered, so the list is short. */
static void
close_node(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    for (int *at = &tree->opened; node->open; at = &tree->nodes[*at].below) {
        if (*at == unit) {
            *at = node->below;
            node->open = false;
        }
    }
}

int
fsdpc_tree_backward_enter(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    FSDPC_TRY(fsdpc_tree_check_not_stepped(tree, node));
    const bool early = tree->backward_prefetch == FSDPC_PREFETCH_PRE;
    if (!node->held) {
        /* Begin both gathers before the wait, see begin_both in tree.c. */
        if (early && fsdpc_exchange_prefetches(fsdpc_unit_comm(node->unit))) {
            FSDPC_TRY(fsdpc_exchange_prefetch(node->exchange, node->unit));
            FSDPC_TRY(prefetch_before(tree, unit));
        }
        FSDPC_TRY(fsdpc_exchange_gather(node->exchange, node->unit));
        node->held = true;
    }
    open_node(tree, unit);
    return early ? prefetch_before(tree, unit) : FSDPC_OK;
}

void
fsdpc_tree_keep_hold(fsdpc_tree *tree, int unit)
{
    tree->nodes[unit].kept = true;
    fsdpc_tree_set_floor(&tree->nodes[unit]);
}

int
fsdpc_tree_drop_hold(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    close_node(tree, unit);
    if (!node->held || node->kept) {
        return FSDPC_OK;
    }
    node->held = false;
    return fsdpc_exchange_release(node->exchange, node->unit);
}

static void
set_complete(fsdpc_tree *tree, struct fsdpc_node *node, bool complete)
{
    tree->complete_count += (int)complete - (int)node->complete;
    node->complete = complete;
}

int
fsdpc_tree_backward_done(fsdpc_tree *tree, int unit, bool sync)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    FSDPC_TRY(fsdpc_tree_drop_hold(tree, unit));
    node->done = true;
    set_complete(tree, node, sync);
    return tree->backward_prefetch == FSDPC_PREFETCH_POST ? prefetch_before(tree, unit) : FSDPC_OK;
}

/* --- whose turn it is ------------------------------------------------------------------------ */

/* True if the unit's reduction is a collective that the ranks match only by the order of their calls. */
static bool
goes_in_turn(const struct fsdpc_node *node)
{
    return fsdpc_unit_is_hooked(node->unit) || !fsdpc_exchange_any_order(node->exchange);
}

static bool
awaits_turn(const struct fsdpc_node *node)
{
    return !node->reduced && fsdpc_unit_layout(node->unit)->trainable_count > 0 &&
           !fsdpc_unit_withholds(node->unit) && goes_in_turn(node);
}

/* Returns the next unit to reduce in the one order that all ranks keep, or -1. That order is the reverse
 * forward order, followed by the units that did not run. Deferred reductions are made in module order. */
static int
next_in_turn(fsdpc_tree *tree, bool at_end)
{
    for (int k = tree->order_count - 1; k >= 0 && !tree->defer_reduces; k--) {
        const struct fsdpc_node *node = &tree->nodes[tree->order[k]];
        if (awaits_turn(node)) {
            return node->complete || at_end ? tree->order[k] : -1;
        }
    }
    for (int i = 0; at_end && i < tree->count; i++) {
        if (awaits_turn(&tree->nodes[i])) {
            return i;
        }
    }
    return -1;
}

int
fsdpc_tree_next_due(fsdpc_tree *tree, bool at_end)
{
    for (int i = 0; tree->complete_count > 0 && i < tree->count; i++) {
        struct fsdpc_node *node = &tree->nodes[i];
        /* A second reduction in one backward only accumulates on this rank, so its order does not matter. */
        if (node->complete && (node->reduced || !goes_in_turn(node))) {
            return i;
        }
    }
    return tree->takes_turns ? next_in_turn(tree, at_end) : -1;
}

/* If one thread has created all nodes, autograd runs them in reverse order of creation. If the first
 * forward of a unit began after the last forward of `next` had ended, all nodes of the unit have run when a
 * backward reaches the outputs of `next`. So parameters of the unit that have no gradient by then are unused,
 * and the unit can be reduced in its turn. Of several such units, returns the one that was entered first. */
int
fsdpc_tree_next_passed(const fsdpc_tree *tree, int next)
{
    const struct fsdpc_node *nodes = tree->nodes;
    int found = -1;
    for (int at = tree->opened; nodes[next].last > 0 && at >= 0; at = nodes[at].below) {
        if (nodes[at].first > nodes[next].last && !fsdpc_exchange_any_order(nodes[at].exchange)) {
            found = at;
        }
    }
    return found;
}

void
fsdpc_tree_defer_reduces(fsdpc_tree *tree, bool defer)
{
    tree->defer_reduces = defer;
}

/* --- reducing -------------------------------------------------------------------------------- */

static void
note_swap(fsdpc_tree *tree, struct fsdpc_node *node)
{
    const uint64_t sent = fsdpc_unit_take_swapped_bytes(node->unit);
    if (sent > 0) {
        fsdpc_exchange_note(node->exchange, FSDPC_TRACE_SEND, node->unit, sent);
    }
    tree->swapped_bytes += sent;
}

static int
move_swaps(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        struct fsdpc_node *node = &tree->nodes[i];
        FSDPC_TRY(fsdpc_unit_advance_swap(node->unit));
        if (node->reduced && fsdpc_unit_may_swap(node->unit) &&
            fsdpc_exchange_is_summed(node->exchange, node->unit)) {
            FSDPC_TRY(fsdpc_unit_begin_swap(node->unit));
        }
        note_swap(tree, node);
    }
    return FSDPC_OK;
}

int
fsdpc_tree_reduce(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    set_complete(tree, node, false);
    FSDPC_TRY(fsdpc_tree_check_not_stepped(tree, node));
    node->reduced = true;
    FSDPC_TRY(fsdpc_exchange_reduce(node->exchange, node->unit, grads));
    return tree->replicates ? move_swaps(tree) : FSDPC_OK;
}

int
fsdpc_tree_make_room(fsdpc_tree *tree, int unit)
{
    return fsdpc_exchange_make_room(tree->nodes[unit].exchange, tree->nodes[unit].unit);
}

int
fsdpc_tree_next_summed(fsdpc_tree *tree, int *unit)
{
    *unit = -1;
    for (int i = 0; i < tree->count; i++) {
        struct fsdpc_node *node = &tree->nodes[i];
        if (node->reduced && !node->taken && !fsdpc_unit_replicate(node->unit) &&
            !fsdpc_unit_is_hooked(node->unit) &&
            fsdpc_exchange_is_summed(node->exchange, node->unit)) {
            FSDPC_TRY(fsdpc_unit_finish_grad(node->unit));
            node->taken = true;
            *unit = i;
            return FSDPC_OK;
        }
    }
    return FSDPC_OK;
}

/* False in host memory, whose pages are given back one by one, and for units with replicas or a hook. */
static bool
may_share(const struct fsdpc_node *node)
{
    const fsdpc_unit *unit = node->unit;
    return fsdpc_device_get_caps(fsdpc_unit_device(unit))->asynchronous &&
           !fsdpc_unit_is_offloaded(unit) && !fsdpc_unit_replicate(unit) &&
           !fsdpc_unit_is_hooked(unit) && fsdpc_unit_layout(unit)->trainable_count > 0;
}

static int
share_in(fsdpc_tree *tree, int exchange, fsdpc_unit **units, uint8_t *mask)
{
    int count = 0;
    const fsdpc_exchange *x = tree->exchanges[exchange];
    for (int i = 0; i < tree->count; i++) {
        if (tree->nodes[i].exchange == x) {
            mask[i] = mask[i] && may_share(&tree->nodes[i]);
            if (mask[i]) {
                units[count++] = tree->nodes[i].unit;
            }
        }
    }
    fsdpc_grad_slots *shared;
    FSDPC_TRY(fsdpc_grad_slots_share(units, count, fsdpc_exchange_reduce_slots(x), &shared));
    for (int i = 0; !shared && i < tree->count; i++) {
        mask[i] = mask[i] && tree->nodes[i].exchange != x;
    }
    if (shared) {
        fsdpc_grad_slots_drop(tree->grad_slots[exchange]);
        tree->grad_slots[exchange] = shared;
    }
    return FSDPC_OK;
}

int
fsdpc_tree_share_grads(fsdpc_tree *tree, uint8_t *mask)
{
    int status = FSDPC_OK;
    fsdpc_unit **units = fsdpc_mem_calloc((size_t)tree->count, sizeof(fsdpc_unit *));
    if (!units) {
        return fsdpc_error(FSDPC_E_NOMEM,
                           "no memory for the list of units whose gradients share slots");
    }
    for (int i = 0; i < tree->exchange_count && status == FSDPC_OK; i++) {
        status = share_in(tree, i, units, mask);
    }
    fsdpc_mem_free(units);
    return status;
}

void
fsdpc_tree_set_steps_inside(fsdpc_tree *tree, bool inside)
{
    tree->steps_inside = inside;
    for (int i = 0; i < tree->exchange_count; i++) {
        fsdpc_exchange_settle_apart(tree->exchanges[i], inside);
    }
}

int
fsdpc_tree_next_late(fsdpc_tree *tree, int *unit)
{
    *unit = -1;
    for (int i = tree->count - 1; i >= 0; i--) {
        struct fsdpc_node *node = &tree->nodes[i];
        if (node->late) {
            node->late = false;
            FSDPC_TRY(fsdpc_exchange_settle(node->exchange, node->unit));
            FSDPC_TRY(fsdpc_unit_finish_grad(node->unit));
            node->taken = true;
            *unit = i;
            return FSDPC_OK;
        }
    }
    return FSDPC_OK;
}

bool
fsdpc_tree_was_taken(const fsdpc_tree *tree, int unit)
{
    return tree->nodes[unit].taken;
}

bool
fsdpc_tree_was_reduced(const fsdpc_tree *tree, int unit)
{
    return tree->nodes[unit].reduced;
}

void
fsdpc_tree_set_reduced(fsdpc_tree *tree, int unit)
{
    set_complete(tree, &tree->nodes[unit], false);
    tree->nodes[unit].reduced = true;
}

void
fsdpc_tree_set_hooked(fsdpc_tree *tree, int unit, bool hooked)
{
    fsdpc_unit_set_hooked(tree->nodes[unit].unit, hooked);
    tree->takes_turns = tree->takes_turns || hooked;
}

int
fsdpc_tree_keep_local(fsdpc_tree *tree, int unit, const fsdpc_tensor *grads)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    set_complete(tree, node, false);
    return fsdpc_grad_keep_local(node->unit, grads);
}

/* --- the end --------------------------------------------------------------------------------- */

static int
drop_holds(fsdpc_tree *tree)
{
    int status = FSDPC_OK;
    for (int i = 0; i < tree->count; i++) {
        FSDPC_KEEP(fsdpc_tree_drop_hold(tree, i));
    }
    return status;
}

static int
sum_replicas(fsdpc_tree *tree)
{
    fsdpc_unit **units = fsdpc_mem_calloc((size_t)tree->count, sizeof(fsdpc_unit *));
    if (!units) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a list of %d units", tree->count);
    }
    for (int i = 0; i < tree->count; i++) {
        units[i] = tree->nodes[i].unit;
    }
    const int status = fsdpc_unit_reduce_replicas(units, tree->count);
    for (int i = 0; i < tree->count; i++) {
        note_swap(tree, &tree->nodes[i]);
    }
    fsdpc_mem_free(units);
    return status;
}

static int
finish_sync(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_TRY(fsdpc_exchange_end(tree->exchanges[i]));
    }
    FSDPC_TRY(tree->replicates ? sum_replicas(tree) : FSDPC_OK);
    for (int i = 0; i < tree->count; i++) {
        struct fsdpc_node *node = &tree->nodes[i];
        node->late = tree->steps_inside && !node->taken &&
                     fsdpc_unit_in_flight(node->unit, FSDPC_GRAD) != NULL;
        if (!node->taken && !node->late) {
            FSDPC_TRY(fsdpc_unit_finish_grad(node->unit));
        }
    }
    tree->backwards++;
    tree->forwards = tree->pass = 0;
    return FSDPC_OK;
}

static void
forget_order(fsdpc_tree *tree)
{
    if (tree->order_count > 0) {
        memcpy(tree->last_order, tree->order, (size_t)tree->order_count * sizeof *tree->order);
        tree->last_order_count = tree->order_count;
    }
    tree->order_count = tree->complete_count = 0;
    for (int i = 0; i < tree->count; i++) {
        close_node(tree, i);
        tree->nodes[i].order = -1;
        tree->nodes[i].done = tree->nodes[i].complete = tree->nodes[i].reduced = false;
    }
}

static int
drop_for_backward(fsdpc_tree *tree)
{
    int status = FSDPC_OK;
    FSDPC_KEEP(drop_holds(tree));
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_KEEP(fsdpc_exchange_drop(tree->exchanges[i]));
    }
    return status;
}

int
fsdpc_tree_backward_broke(fsdpc_tree *tree)
{
    fsdpc_tree_forget_kept(tree);
    return drop_for_backward(tree);
}

int
fsdpc_tree_end_backward(fsdpc_tree *tree, bool sync)
{
    int status = FSDPC_OK;
    FSDPC_KEEP(drop_for_backward(tree));
    if (sync && status == FSDPC_OK) {
        FSDPC_KEEP(finish_sync(tree));
    }
    tree->in_backward = false;
    forget_order(tree);
    bool inside = fsdpc_tree_in_forward(tree); /* true if autograd.grad ran inside a forward */
    fsdpc_tree_set_phase(tree, inside ? FSDPC_PHASE_FORWARD : FSDPC_PHASE_IDLE);
    return status;
}
