/* The order of events of a training step: set-up, clock, forward. See tree.h; backward is in
 * tree_backward.c.
 */
#include "tree/tree.h"

#include <string.h>

#include "base/mem.h"
#include "base/status.h"
#include "tree/tree_impl.h"

enum { TRACE_ENTRIES = 1 << 14 };

/* --- set-up ---------------------------------------------------------------------------------- */

static int
fill_exchange_plan(fsdpc_tree *tree, const int *members, int count, fsdpc_unit **units,
                   struct fsdpc_slot_plan *slots)
{
    fsdpc_exchange_plan plan = {
        .comm = fsdpc_unit_comm(units[0]),
        .units = units,
        .unit_ids = members,
        .unit_count = count,
        .slot_of = slots->slot_of,
        .slot_bytes = slots->slot_bytes,
        .slot_count = slots->slot_count,
        .reduce_slots = tree->reduce_slots,
        .poison = tree->poison,
        .trust_order = tree->trust_order,
        .trace = tree->trace,
    };
    fsdpc_exchange *x;
    FSDPC_TRY(fsdpc_exchange_new(&plan, &x));
    tree->exchanges[tree->exchange_count++] = x;
    tree->takes_turns = tree->takes_turns || !fsdpc_exchange_any_order(x);
    for (int m = 0; m < count; m++) {
        tree->nodes[members[m]].exchange = x;
    }
    return FSDPC_OK;
}

static int
slots_per_level(const fsdpc_tree *tree, const fsdpc_unit *unit)
{
    if (tree->gather_slots > 0) {
        return tree->gather_slots;
    }
    return fsdpc_exchange_prefetches(fsdpc_unit_comm(unit)) ? FSDPC_DEFAULT_SLOTS_WIRE
                                                            : FSDPC_DEFAULT_SLOTS;
}

static int
plan_slots(const fsdpc_tree *tree, const int *members, int count, struct fsdpc_slot_plan *out)
{
    struct fsdpc_slot_need *needs = fsdpc_mem_calloc((size_t)count, sizeof *needs);
    if (!needs) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for the plan of gather slots");
    }
    for (int m = 0; m < count; m++) {
        const struct fsdpc_node *node = &tree->nodes[members[m]];
        needs[m] = (struct fsdpc_slot_need){
            .depth = node->depth,
            .shares = fsdpc_unit_reshards(node->unit) && !fsdpc_unit_keeps(node->unit),
            .direct = fsdpc_unit_is_direct(node->unit),
            .bytes = fsdpc_unit_footprint(node->unit)->range_bytes,
        };
    }
    const int per_level = slots_per_level(tree, tree->nodes[members[0]].unit);
    int status = fsdpc_slot_plan_make(needs, count, per_level, out);
    fsdpc_mem_free(needs);
    return status;
}

/* Makes one exchange for all units that have the communicator of unit `first`. */
static int
make_exchange(fsdpc_tree *tree, int first)
{
    int status = FSDPC_OK;
    struct fsdpc_slot_plan slots = {0};
    int *members = fsdpc_mem_calloc((size_t)tree->count, sizeof *members);
    fsdpc_unit **units = fsdpc_mem_calloc((size_t)tree->count, sizeof *units);
    int count = 0;
    if (!members || !units) {
        FSDPC_GOTO(fsdpc_error(FSDPC_E_NOMEM, "no memory for a tree of units"), done);
    }
    for (int i = first; i < tree->count; i++) {
        if (fsdpc_unit_comm(tree->nodes[i].unit) == fsdpc_unit_comm(tree->nodes[first].unit)) {
            units[count] = tree->nodes[i].unit;
            members[count++] = i;
        }
    }
    FSDPC_GOTO(plan_slots(tree, members, count, &slots), done);
    FSDPC_GOTO(fill_exchange_plan(tree, members, count, units, &slots), done);
done:
    fsdpc_slot_plan_free(&slots);
    fsdpc_mem_free(members);
    fsdpc_mem_free(units);
    return status;
}

static int
make_nodes(fsdpc_tree *tree, fsdpc_unit *const *units, const int *depths, int count)
{
    size_t n = (size_t)count;
    tree->nodes = fsdpc_mem_calloc(n, sizeof *tree->nodes);
    tree->exchanges = fsdpc_mem_calloc(n, sizeof(fsdpc_exchange *));
    tree->grad_slots = fsdpc_mem_calloc(n, sizeof *tree->grad_slots);
    tree->order = fsdpc_mem_calloc(n, sizeof *tree->order);
    tree->last_order = fsdpc_mem_calloc(n, sizeof *tree->last_order);
    if (!tree->nodes || !tree->exchanges || !tree->grad_slots || !tree->order ||
        !tree->last_order) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a tree of %d units", count);
    }
    tree->count = count;
    tree->opened = -1;
    for (int i = 0; i < count; i++) {
        tree->nodes[i] = (struct fsdpc_node){.unit = units[i], .depth = depths[i], .order = -1};
        tree->replicates = tree->replicates || fsdpc_unit_replicate(units[i]);
    }
    return FSDPC_OK;
}

int
fsdpc_tree_new(fsdpc_unit *const *units, const int *depths, int count,
               const fsdpc_tree_options *options, fsdpc_tree **out)
{
    int status = FSDPC_OK;
    *out = NULL;
    fsdpc_tree *tree = fsdpc_mem_calloc(1, sizeof *tree);
    if (!tree) {
        return fsdpc_error(FSDPC_E_NOMEM, "no memory for a tree of units");
    }
    tree->backward_prefetch = options->backward_prefetch;
    tree->forward_prefetch = options->forward_prefetch;
    tree->gather_slots = options->gather_slots;
    tree->reduce_slots = options->reduce_slots > 0 ? options->reduce_slots : FSDPC_DEFAULT_SLOTS;
    tree->poison = options->poison;
    tree->trust_order = options->trust_order;
    FSDPC_GOTO(fsdpc_trace_new(TRACE_ENTRIES, &tree->trace), fail);
    FSDPC_GOTO(make_nodes(tree, units, depths, count), fail);
    for (int i = 0; i < count; i++) {
        if (!tree->nodes[i].exchange) {
            FSDPC_GOTO(make_exchange(tree, i), fail);
        }
    }
    *out = tree;
    return FSDPC_OK;
fail:
    fsdpc_tree_free(tree);
    return status;
}

void
fsdpc_tree_free(fsdpc_tree *tree)
{
    if (!tree) {
        return;
    }
    for (int i = 0; i < tree->exchange_count; i++) {
        fsdpc_exchange_free(tree->exchanges[i]);
        fsdpc_grad_slots_drop(tree->grad_slots[i]);
    }
    fsdpc_tree_norm_free(tree);
    fsdpc_trace_free(tree->trace);
    fsdpc_mem_free(tree->nodes);
    fsdpc_mem_free(tree->exchanges);
    fsdpc_mem_free(tree->grad_slots);
    fsdpc_mem_free(tree->order);
    fsdpc_mem_free(tree->last_order);
    fsdpc_mem_free(tree);
}

/* --- clock ----------------------------------------------------------------------------------- */

void
fsdpc_tree_set_phase(fsdpc_tree *tree, enum fsdpc_phase phase)
{
    tree->phase = phase;
    for (int i = 0; i < tree->exchange_count; i++) {
        fsdpc_exchange_set_clock(tree->exchanges[i], phase, (uint32_t)tree->backwards);
    }
}

static uint64_t
current_tag(const fsdpc_tree *tree)
{
    return tree->backwards << FSDPC_TAG_BITS | tree->pass;
}

int
fsdpc_tree_publish_tag(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_TRY(fsdpc_exchange_begin(tree->exchanges[i], current_tag(tree)));
    }
    return FSDPC_OK;
}

/* --- forward --------------------------------------------------------------------------------- */

void
fsdpc_tree_set_floor(struct fsdpc_node *node)
{
    fsdpc_unit_set_floor(node->unit, node->running + (node->kept && node->held ? 1 : 0));
}

void
fsdpc_tree_forget_kept(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        tree->nodes[i].kept = false;
        fsdpc_tree_set_floor(&tree->nodes[i]);
    }
}

/* Drops every reference to gathered values, because the values of an earlier pass may be stale. */
static int
drop_all(fsdpc_tree *tree)
{
    int status = FSDPC_OK;
    for (int i = 0; i < tree->count; i++) {
        struct fsdpc_node *node = &tree->nodes[i];
        node->held = node->kept = false;
        node->running = 0;
        fsdpc_unit_set_floor(node->unit, 0);
    }
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_KEEP(fsdpc_exchange_drop(tree->exchanges[i]));
    }
    return status;
}

int
fsdpc_tree_detach(fsdpc_tree *tree)
{
    int status = FSDPC_OK;
    FSDPC_KEEP(drop_all(tree));
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_KEEP(fsdpc_exchange_detach(tree->exchanges[i]));
    }
    return status;
}

static const uint64_t pass_step = (uint64_t)1 << FSDPC_PASS_BITS,
                      last_step = ((uint64_t)1 << FSDPC_TAG_BITS) / 2;

/* Ranks may run different numbers of forwards without gradients, and change their weights afterwards. So a
 * forward with gradients gets a number that no rank gives to a forward without gradients. Then the forward
 * uses no values that another rank gathered before such a change of weights. After 2^15 forwards with
 * gradients and without a backward, half of the numbers are used. Then each forward takes the next number. */
static uint64_t
next_pass(uint64_t pass, bool grad)
{
    return grad && pass < last_step ? (pass / pass_step + 1) * pass_step : pass + 1;
}

/* Returns a pass number for a rank that has ended its evaluation and does not train yet. The number is above
 * the numbers of evaluation passes that other ranks may still run, and below that of a training pass. */
static uint64_t
last_pass(uint64_t pass)
{
    const uint64_t middle = pass / pass_step * pass_step + pass_step / 2;
    return pass < middle ? middle : pass + 1;
}

void
fsdpc_tree_meet(fsdpc_tree *tree)
{
    if (tree->exchange_count == 1 && tree->pass % pass_step != 0 && tree->pass < last_step) {
        tree->pass = next_pass(tree->pass, true);
    }
}

int
fsdpc_tree_meet_all(fsdpc_tree *tree)
{
    if (tree->pass >= last_step) {
        return fsdpc_error(FSDPC_E_STATE,
                           "ranks have met %lld times since the last backward: the "
                           "numbers of their passes end",
                           (long long)(last_step / pass_step));
    }
    tree->pass = (tree->pass / pass_step + 1) * pass_step;
    return FSDPC_OK;
}

bool
fsdpc_tree_compares(const fsdpc_tree *tree, bool grad)
{
    return !grad || tree->without_grad;
}

void
fsdpc_tree_touch(fsdpc_tree *tree)
{
    tree->touched = true;
}

static void
begin_pass(fsdpc_tree *tree, uint64_t pass, bool grad)
{
    tree->pass = pass;
    for (int i = 0; i < tree->exchange_count; i++) {
        fsdpc_exchange_compare(tree->exchanges[i], current_tag(tree), grad, tree->touched);
    }
    tree->without_grad = !grad;
    tree->touched = false;
}

int
fsdpc_tree_begin_forward(fsdpc_tree *tree, bool grad)
{
    FSDPC_TRY(drop_all(tree));
    tree->forwards++;
    begin_pass(tree, next_pass(tree->pass, grad), grad);
    fsdpc_tree_set_phase(tree, FSDPC_PHASE_FORWARD);
    fsdpc_trace_add(tree->trace, FSDPC_TRACE_STEP, tree->phase, (uint32_t)tree->backwards, -1,
                    tree->forwards);
    return fsdpc_tree_publish_tag(tree);
}

void
fsdpc_tree_forget_calls(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        tree->nodes[i].first = tree->nodes[i].last = 0;
    }
}

static void
note_order(fsdpc_tree *tree, int unit)
{
    if (tree->nodes[unit].order < 0) {
        tree->nodes[unit].order = tree->order_count;
        tree->order[tree->order_count++] = unit;
    }
}

int
fsdpc_tree_reach(const fsdpc_tree *tree, const struct fsdpc_node *node)
{
    const int slots = slots_per_level(tree, node->unit);
    return slots > 2 && fsdpc_exchange_prefetches(fsdpc_unit_comm(node->unit)) ? slots - 1 : 1;
}

static int
prefetch_after(fsdpc_tree *tree, int unit)
{
    const int reach = fsdpc_tree_reach(tree, &tree->nodes[unit]);
    int at = 0;
    while (at < tree->last_order_count && tree->last_order[at] != unit) {
        at++;
    }
    for (int k = at + 1; k <= at + reach && k < tree->last_order_count; k++) {
        struct fsdpc_node *next = &tree->nodes[tree->last_order[k]];
        FSDPC_TRY(fsdpc_exchange_prefetch(next->exchange, next->unit));
    }
    return FSDPC_OK;
}

int
fsdpc_tree_check_not_stepped(const fsdpc_tree *tree, const struct fsdpc_node *node)
{
    if (!tree->steps_inside || !node->reduced) {
        return FSDPC_OK;
    }
    return fsdpc_error(FSDPC_E_STATE,
                       "unit %s is needed again in a backward in which its optimizer steps as soon "
                       "as its gradients are sent (its module runs again, or a second gradient "
                       "arrives): step such a model after backward, not in it",
                       fsdpc_unit_name(node->unit));
}

/* Begins the gathers of this unit and of the next units before any wait for values: the wire stays busy. */
static int
begin_both(fsdpc_tree *tree, int unit)
{
    const struct fsdpc_node *node = &tree->nodes[unit];
    if (tree->in_backward || !fsdpc_exchange_prefetches(fsdpc_unit_comm(node->unit))) {
        return FSDPC_OK;
    }
    FSDPC_TRY(fsdpc_exchange_prefetch(node->exchange, node->unit));
    return prefetch_after(tree, unit);
}

int
fsdpc_tree_forward_enter(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    if (tree->in_backward) {
        FSDPC_TRY(fsdpc_tree_check_not_stepped(tree, node));
    }
    FSDPC_TRY(begin_both(tree, unit));
    FSDPC_TRY(fsdpc_exchange_gather(node->exchange, node->unit));
    node->running++;
    fsdpc_tree_set_floor(node);
    if (!tree->in_backward) {
        note_order(tree, unit);
        node->first = node->first ? node->first : ++tree->clock;
        if (tree->forward_prefetch) {
            return prefetch_after(tree, unit);
        }
    }
    return FSDPC_OK;
}

bool
fsdpc_tree_in_forward(const fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        if (tree->nodes[i].running > 0) {
            return true;
        }
    }
    return false;
}

/* Notes the end of a forward. After the outermost forward, calls fsdpc_exchange_rest (see exchange.h). */
static int
forward_over(fsdpc_tree *tree, struct fsdpc_node *node)
{
    int status = FSDPC_OK;
    node->running -= node->running > 0;
    fsdpc_tree_set_floor(node);
    if (tree->in_backward) {
        return FSDPC_OK;
    }
    node->last = ++tree->clock;
    if (fsdpc_tree_in_forward(tree)) {
        return FSDPC_OK;
    }
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_KEEP(fsdpc_exchange_rest(tree->exchanges[i]));
    }
    return status;
}

static int
leave(fsdpc_tree *tree, struct fsdpc_node *node, bool keep)
{
    int status = forward_over(tree, node);
    if (keep && !node->held && fsdpc_unit_refs(node->unit) > 0) {
        node->held = true;
    } else if (fsdpc_unit_refs(node->unit) > 0) {
        FSDPC_KEEP(fsdpc_exchange_release(node->exchange, node->unit));
    }
    return status;
}

int
fsdpc_tree_forward_leave(fsdpc_tree *tree, int unit, bool grad)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    /* A forward inside a backward is a recomputation: its backward follows at once, so the unit is held. */
    return leave(tree, node, grad && (!fsdpc_unit_reshards(node->unit) || tree->in_backward));
}

int
fsdpc_tree_forward_stay(fsdpc_tree *tree, int unit)
{
    return leave(tree, &tree->nodes[unit], true);
}

int
fsdpc_tree_end_stay(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    if (!node->held) {
        return FSDPC_OK;
    }
    node->held = false;
    node->last = ++tree->clock;
    fsdpc_tree_set_floor(node);
    return fsdpc_exchange_release(node->exchange, node->unit);
}

int
fsdpc_tree_end_forward(fsdpc_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        tree->nodes[i].held = false;
    }
    fsdpc_tree_forget_kept(tree);
    for (int i = 0; i < tree->exchange_count; i++) {
        /* Units that were prefetched and not used are released at the end of the pass. */
        FSDPC_TRY(fsdpc_exchange_drop(tree->exchanges[i]));
        FSDPC_TRY(fsdpc_exchange_leave(tree->exchanges[i]));
    }
    fsdpc_tree_set_phase(tree, FSDPC_PHASE_IDLE);
    return FSDPC_OK;
}

int
fsdpc_tree_forward_failed(fsdpc_tree *tree, int unit)
{
    struct fsdpc_node *node = &tree->nodes[unit];
    int floor = node->held ? 1 : 0;
    int status = forward_over(tree, node);
    if (fsdpc_unit_refs(node->unit) > floor) {
        FSDPC_KEEP(fsdpc_exchange_release(node->exchange, node->unit));
    }
    return status;
}

/* --- reading --------------------------------------------------------------------------------- */

bool
fsdpc_tree_is_held(const fsdpc_tree *tree, int unit)
{
    return tree->nodes[unit].held;
}

int
fsdpc_tree_depth(const fsdpc_tree *tree, int unit)
{
    return tree->nodes[unit].depth;
}

bool
fsdpc_tree_is_running(const fsdpc_tree *tree, int unit)
{
    return tree->nodes[unit].running > 0;
}

bool
fsdpc_tree_any_order(const fsdpc_tree *tree, int unit)
{
    return fsdpc_exchange_any_order(tree->nodes[unit].exchange);
}

void
fsdpc_tree_note(fsdpc_tree *tree, int unit, enum fsdpc_trace_op op, uint64_t bytes)
{
    fsdpc_exchange_note(tree->nodes[unit].exchange, op, tree->nodes[unit].unit, bytes);
}

fsdpc_trace *
fsdpc_tree_trace(const fsdpc_tree *tree)
{
    return tree->trace;
}

uint64_t
fsdpc_tree_sent_bytes(const fsdpc_tree *tree)
{
    uint64_t bytes = tree->swapped_bytes;
    for (int i = 0; i < tree->exchange_count; i++) {
        bytes += fsdpc_exchange_sent_bytes(tree->exchanges[i]);
    }
    return bytes;
}

void
fsdpc_tree_get_memory(const fsdpc_tree *tree, fsdpc_tree_memory *out)
{
    *out = (fsdpc_tree_memory){0};
    for (int i = 0; i < tree->exchange_count; i++) {
        const fsdpc_exchange *x = tree->exchanges[i];
        out->gather_bytes += fsdpc_exchange_gather_bytes(x);
        out->reduce_bytes += fsdpc_exchange_reduce_bytes(x);
        out->coded_bytes += fsdpc_exchange_coded_bytes(x);
        out->grad_bytes += fsdpc_grad_slots_bytes(tree->grad_slots[i]);
        out->spare_bytes += fsdpc_exchange_spare_bytes(x);
        out->spare_count += fsdpc_exchange_spare_count(x);
        out->gather_slots += fsdpc_exchange_slot_count(x);
        size_t largest = fsdpc_exchange_largest_slot(x);
        out->gather_slot_bytes =
            largest > out->gather_slot_bytes ? largest : out->gather_slot_bytes;
        out->reduce_slots += fsdpc_exchange_reduce_slots(x);
    }
    for (int i = 0; i < tree->count; i++) {
        const fsdpc_unit_memory memory = fsdpc_unit_get_memory(tree->nodes[i].unit);
        out->master_bytes += memory.master;
        out->grad_bytes += memory.grad;
        out->local_bytes += memory.local;
    }
}

const char *
fsdpc_tree_kind(const fsdpc_tree *tree)
{
    const char *kind = tree->exchange_count ? fsdpc_exchange_kind(tree->exchanges[0]) : "none";
    for (int i = 1; i < tree->exchange_count; i++) {
        if (strcmp(kind, fsdpc_exchange_kind(tree->exchanges[i])) != 0) {
            return "mixed";
        }
    }
    return kind;
}

int
fsdpc_tree_announce(fsdpc_tree *tree, int unit, int param)
{
    /* The announcement counts as a pass without gradients. So this rank publishes samples of its weights, and
     * ranks that still evaluate can compare them. */
    begin_pass(tree, last_pass(tree->pass), false);
    for (int i = 0; i < tree->exchange_count; i++) {
        fsdpc_exchange *x = tree->exchanges[i];
        bool here = tree->nodes[unit].exchange == x;
        FSDPC_TRY(fsdpc_exchange_announce(x, current_tag(tree),
                                          here ? tree->nodes[unit].unit : NULL, param));
    }
    return FSDPC_OK;
}

int
fsdpc_tree_forget(fsdpc_tree *tree)
{
    int status = FSDPC_OK;
    for (int i = 0; i < tree->exchange_count; i++) {
        FSDPC_KEEP(fsdpc_exchange_forget(tree->exchanges[i]));
    }
    return status;
}

int
fsdpc_tree_before_hook(fsdpc_tree *tree, int unit, const char *what)
{
    return fsdpc_exchange_before_hook(tree->nodes[unit].exchange, what);
}
