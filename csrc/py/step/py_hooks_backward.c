/* Hooks of a backward. A unit is gathered and held when a gradient reaches its outputs. The unit is done when
 * nothing of its graph can run any more; then the units whose turn it is are reduced.
 *
 * [Note: when a unit is done] Each path through a unit's graph ends at a parameter of the unit, at a
 * parameter of a nested unit, or at an input. A parameter's gradient arrives when all nodes that use the
 * parameter have run. A node that makes the gradient of a trainable parameter needs no value of the unit
 * afterwards. So a unit whose parameters are all trainable is done when all parameters have their gradients.
 * A frozen parameter gets no gradient. So a unit with a frozen parameter must also wait for the gradients of
 * the inputs of each forward that the backward has reached (`open_calls`). To detect these gradients, each
 * input tensor gets a new autograd node in each forward. If units are nested in such a unit, the hold lasts
 * until the backward has ended. The same rules hold for a unit whose modules have backward hooks of the user
 * (`observed`), because these hooks may read parameters. Autograd refuses uses that escape these rules
 * (inputs that are not arguments, detached parameters): see py_versions.c.
 *
 * [Note: backwards inside a backward] Reentrant checkpointing recomputes a part of a unit and runs an inner
 * backward for that part, inside the backward that entered the unit. When all gradients have arrived in the
 * inner backward, another part may still follow (a module that is called several times). So the unit's inputs
 * are watched from the next forward on. Until then, the unit is done when the outer backward enters another
 * unit, or ends.
 *
 * [Note: units that are passed] A parameter that this rank does not use gets no gradient, and ranks that use
 * the parameter do not wait for this rank. If ranks match collectives by their order only, this rank must
 * gather and reduce in the same order as those ranks. So a unit counts as done when the backward comes to
 * another unit that ran earlier in forward.
 *
 * [Note: a second backward] Under create_graph=True, the nodes that the backward makes save values for a
 * second backward, which enters the unit at nodes that have no hook. So units that such a backward reaches
 * stay gathered until a backward without create_graph has ended, or a new pass begins.
 *
 * [Note: watched parameters] A gradient hook takes torch half a microsecond, so not every parameter has a
 * hook. As a rule, the module that is registered first runs first in forward, and its parameters get their
 * gradients last. When these gradients have arrived and every other parameter has its gradient too, the unit
 * is done. If the order differs or parameters are unused, every parameter is watched and counted from then
 * on. Gradients of parameters without a hook are found at the end of backward.
 */
#include "py/step/py_hooks_impl.h"

#include <string.h>

static int
model_is_gone(const fsdpc_py_flat *flat)
{
    PyErr_Format(fsdpc_py_current()->state_error,
                 "backward reached unit %s, whose model was deleted or reinitialised since its "
                 "forward; keep the model until backward has ended",
                 fsdpc_unit_name(flat->unit));
    return -1;
}

/* Asks torch whether this backward makes a graph: see [Note: a second backward]. All nodes of a graph task
 * would get the same answer, so the function asks once per task. */
static int
detect_second(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    if (tree->backward.asked_number != tree->backward.number ||
        tree->backward.asked_task != flat->task) {
        int again = fsdpc_py_call_truth(tree->grad_enabled);
        if (again < 0) {
            return -1;
        }
        tree->backward.asked_number = tree->backward.number;
        tree->backward.asked_task = flat->task;
        tree->backward.makes_graph = again;
    }
    if (tree->backward.makes_graph) {
        tree->backward.twice = true;
        fsdpc_tree_keep_hold(tree->tree, flat->id);
    }
    return 0;
}

static void
open_call(fsdpc_py_flat *flat, fsdpc_py_hook *call)
{
    flat->backward.unwatched = flat->backward.unwatched || call->inputs == 0;
    if (call->inputs > 0 && call->backward != flat->tree->backward.number) {
        call->backward = flat->tree->backward.number;
        call->inputs_left = call->inputs;
        flat->backward.open_calls++;
    }
}

/* The backward enters `flat`: finishes the unit that lingers ([Note: backwards inside a backward]). */
static int
finish_lingering(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    fsdpc_py_flat *other = tree->backward.lingers >= 0 ? tree->units[tree->backward.lingers] : NULL;
    if (fsdpc_py_graph_task(tree, &flat->task) < 0) {
        return -1;
    }
    if (!other || other == flat || other->task != flat->task) {
        return 0;
    }
    tree->backward.lingers = -1;
    return other->backward.complete ? fsdpc_py_finish_unit(other) : 0;
}

/* If a backward enters a unit again, gradients whose sum is not due yet may still be there. So the presence
 * of a gradient does not show that a new gradient has arrived, and hooks count the new gradients. */
static int
count_again(fsdpc_py_flat *flat)
{
    if (!flat->backward.entered || flat->watch_all) {
        return 0;
    }
    int some = fsdpc_py_full_grads(flat, NULL, fsdpc_unit_layout(flat->unit)->param_count, false);
    return some > 0 ? fsdpc_py_watch_all(flat) : some;
}

int
fsdpc_py_pre_backward(fsdpc_py_hook *self)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_tree *tree = flat->tree;
    if (!tree) {
        return model_is_gone(flat);
    }
    if (fsdpc_py_begin_backward(tree) < 0 || finish_lingering(flat) < 0 ||
        fsdpc_py_finish_those_passed(flat) < 0) {
        return -1;
    }
    if (!flat->backward.entered && fsdpc_py_check_values(flat) < 0) {
        return -1;
    }
    tree->backward.entered = flat->id;
    tree->backward.entered_done = false;
    int status;
    PyObject *range = fsdpc_py_range_open(tree, "all_gather", flat);
    status = FSDPC_PY_UNLOCKED(fsdpc_tree_backward_enter(tree->tree, flat->id));
    fsdpc_py_range_close(range);
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark(flat) < 0 || detect_second(flat) < 0) {
        return -1;
    }
    if (!flat->hold_installed && count_again(flat) < 0) {
        return -1;
    }
    open_call(flat, self);
    flat->backward.entered = true;
    if (flat->hold_installed) {
        return 0;
    }
    flat->hold_installed = true;
    return fsdpc_py_install(flat);
}

/* --- sending --------------------------------------------------------------------------------- */

/* Calls the unit's communication hook. If the hook has run in this backward already, keeps the later
 * gradients on this rank; the end of backward sends them. */
static int
send_by_hook(fsdpc_py_flat *flat)
{
    fsdpc_tree *tree = flat->tree->tree;
    if (fsdpc_tree_was_reduced(tree, flat->id)) {
        return fsdpc_py_checked(fsdpc_tree_keep_local(tree, flat->id, flat->grads)) < 0 ? -1 : 1;
    }
    int sent = fsdpc_py_call_comm_hook(flat);
    if (sent > 0) {
        fsdpc_tree_set_reduced(tree, flat->id);
    }
    return sent;
}

/* Packs the gradients that autograd has made and sends them, or, without `sync`, keeps them on this rank. */
static int
send_grads(fsdpc_py_flat *flat, bool sync)
{
    int status, result = -1;
    fsdpc_tree *tree = flat->tree->tree;
    PyObject *range = fsdpc_py_range_open(
        flat->tree, sync ? "post_backward_reduce" : "post_backward_accumulate", flat);
    if ((sync && fsdpc_py_take_slot(flat) < 0) || fsdpc_py_prepare_grads(flat) < 0 ||
        fsdpc_py_collect_grads(flat) < 0) {
        goto done;
    }
    if (sync && flat->comm_hook) {
        int sent = send_by_hook(flat);
        result = sent > 0 ? fsdpc_py_clear_full_grads(flat, false) : sent;
        goto done;
    }
    if (sync) {
        status = FSDPC_PY_UNLOCKED(fsdpc_tree_reduce(tree, flat->id, flat->grads));
    } else {
        status = FSDPC_PY_UNLOCKED(fsdpc_tree_keep_local(tree, flat->id, flat->grads));
    }
    result = fsdpc_py_checked(status) < 0 ? -1 : fsdpc_py_clear_full_grads(flat, false);
done:
    fsdpc_py_drop_held(flat);
    fsdpc_py_range_close(range);
    return result;
}

int
fsdpc_py_send_what_is_due(fsdpc_py_tree *tree, bool at_end)
{
    for (;;) {
        int due = fsdpc_tree_next_due(tree->tree, at_end);
        if (due < 0) {
            return 0;
        }
        if (tree->step_unit && fsdpc_py_step_before(tree, due) < 0) {
            return -1;
        }
        if (send_grads(tree->units[due], true) < 0) {
            return -1;
        }
    }
}

/* --- gradients that arrive ------------------------------------------------------------------- */

/* Raises StateError: the parameter's gradient was computed while the unit was not gathered. Returns -1. */
static int
not_gathered(const fsdpc_py_flat *flat, int param)
{
    /* autograd runs one thread's operations in reverse order, but keeps no order among several threads. */
    bool early = flat->tree && flat->closed == flat->tree->backward.number;
    const char *why =
        early ? "a part of its forward ran in a thread that forward had started, and autograd came "
                "to the forward's inputs first. Run the whole forward in one thread, or wrap the "
                "module that the other thread runs as well"
              : "a tensor that its forward computed reaches the loss without being returned from "
                "forward (an attribute, a global, a custom class). Return it, or wrap the module "
                "that uses that tensor as well";
    PyErr_Format(fsdpc_py_current()->state_error,
                 "a gradient of parameter %s of unit %s was computed while the unit was not "
                 "gathered: %s",
                 fsdpc_unit_layout(flat->unit)->params[param].name, fsdpc_unit_name(flat->unit),
                 why);
    return -1;
}

int
fsdpc_py_finish_unit(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    memset(flat->arrived, 0, (size_t)fsdpc_unit_layout(flat->unit)->param_count);
    flat->backward.arrived_count = 0;
    flat->backward.complete = false;
    if (fsdpc_py_end_hold(flat) < 0) {
        return -1;
    }
    int status;
    bool sync = !fsdpc_unit_withholds(flat->unit);
    status = fsdpc_tree_backward_done(tree->tree, flat->id, sync);
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark(flat) < 0) {
        return -1;
    }
    if (!sync && tree->step_unit) {
        PyErr_Format(PyExc_RuntimeError,
                     "unit %s runs under no_sync, but its optimizer steps in backward "
                     "(fsdpc.optim.in_backward): gradients cannot be accumulated then",
                     fsdpc_unit_name(flat->unit));
        return -1;
    }
    int sent = sync ? fsdpc_py_send_what_is_due(tree, false) : send_grads(flat, false);
    tree->backward.entered_done |= sent == 0 && tree->backward.entered == flat->id;
    return sent < 0 || !sync ? sent : fsdpc_py_step_summed(tree);
}

/* Called when gradients arrive in another order than expected. Counts the gradients that have arrived. The
 * caller then registers hooks, which count the gradients that are still to come. */
static void
count_from_now_on(fsdpc_py_flat *flat)
{
    for (int i = 0; i < fsdpc_unit_layout(flat->unit)->param_count; i++) {
        flat->arrived[i] = flat->held[i] != NULL;
        flat->backward.arrived_count += flat->arrived[i];
    }
    fsdpc_py_drop_held(flat);
}

static bool
has_frozen(const fsdpc_py_flat *flat)
{
    return flat->expected < fsdpc_unit_layout(flat->unit)->param_count;
}

bool
fsdpc_py_has_nested(const fsdpc_py_flat *flat)
{
    const fsdpc_tree *tree = flat->tree->tree;
    return flat->id + 1 < flat->tree->count &&
           fsdpc_tree_depth(tree, flat->id + 1) > fsdpc_tree_depth(tree, flat->id);
}

bool
fsdpc_py_is_used_late(const fsdpc_py_flat *flat)
{
    return flat->observed || has_frozen(flat) || (flat->reentrant && !fsdpc_py_has_nested(flat));
}

/* Returns 1 if this backward runs inside the backward that entered the unit, 0 if not, or -1. */
static int
arrived_inside(const fsdpc_py_flat *flat)
{
    long task;
    return fsdpc_py_graph_task(flat->tree, &task) < 0
               ? -1
               : flat->backward.entered && task != flat->task;
}

/* Called when all gradients have arrived: finishes the unit if [Note: when a unit is done] allows it. */
static int
all_arrived(fsdpc_py_flat *flat)
{
    int inside = arrived_inside(flat);
    if (inside < 0) {
        return -1;
    }
    bool lingers = inside && flat->backward.unwatched;
    flat->reentrant |= inside;
    flat->backward.complete = flat->backward.open_calls > 0 || lingers ||
                              (fsdpc_py_is_used_late(flat) && fsdpc_py_has_nested(flat));
    if (!flat->backward.complete) {
        return fsdpc_py_finish_unit(flat);
    }
    if (lingers) {
        flat->tree->backward.lingers = flat->id;
    }
    fsdpc_py_drop_held(flat);
    return 0;
}

/* Called at each watched gradient. Acts when all of these have arrived: see [Note: watched parameters]. */
static int
watched_arrived(fsdpc_py_flat *flat)
{
    int all = fsdpc_py_full_grads(flat, flat->watched, flat->watched_count, true);
    if (all <= 0) {
        return all;
    }
    if (fsdpc_py_collect_grads(flat) < 0) {
        return -1;
    }
    if (fsdpc_py_count_held(flat) >= flat->expected) {
        return all_arrived(flat);
    }
    count_from_now_on(flat);
    return fsdpc_py_watch_all(flat);
}

/* Returns whether the parameter requires a gradient: 1, 0, or -1. torch calls hooks of frozen tensors too. */
static int
still_trains(const fsdpc_py_flat *flat, int param)
{
    if (!flat->full[param]) {
        return 1; /* the unit was unbound; the caller goes on as for a trained parameter */
    }
    PyObject *flag = fsdpc_py_field(flat->full[param], FSDPC_PY_REQUIRES_GRAD);
    int trains = flag ? flag == Py_True : -1;
    Py_XDECREF(flag);
    return trains;
}

int
fsdpc_py_grad_arrived(fsdpc_py_hook *self)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    if (!flat->tree) {
        return model_is_gone(flat);
    }
    if (fsdpc_py_begin_backward(flat->tree) < 0) {
        return -1;
    }
    if (fsdpc_unit_refs(flat->unit) == 0) {
        return not_gathered(flat, self->param);
    }
    int expects = has_frozen(flat) ? still_trains(flat, self->param) : 1;
    if (expects <= 0) {
        return expects;
    }
    if (!flat->watch_all) {
        return watched_arrived(flat);
    }
    if (!flat->arrived[self->param]) {
        flat->arrived[self->param] = 1;
        flat->backward.arrived_count++;
    }
    return flat->backward.arrived_count >= flat->expected ? all_arrived(flat) : 0;
}

static int
drop_hold(fsdpc_py_flat *flat)
{
    if (fsdpc_py_end_hold(flat) < 0) {
        return -1;
    }
    int status = fsdpc_tree_drop_hold(flat->tree->tree, flat->id);
    return fsdpc_py_checked(status) < 0 ? -1 : fsdpc_py_mark(flat);
}

/* Called when the backward has reached the inputs of all forwards of the unit whose outputs it reached. */
static int
all_closed(fsdpc_py_flat *flat)
{
    int some = flat->backward.arrived_count > 0;
    flat->closed = flat->tree->backward.number;
    flat->incomplete = flat->incomplete && flat->backward.arrived_count < flat->expected;
    if (!some && !flat->watch_all) {
        some = fsdpc_py_full_grads(flat, NULL, fsdpc_unit_layout(flat->unit)->param_count, false);
    }
    if (some != 0) {
        return some < 0 ? -1 : fsdpc_py_finish_unit(flat);
    }
    return drop_hold(flat);
}

int
fsdpc_py_find_unwatched(fsdpc_py_flat *flat)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    int some = flat->watch_all ? 0 : fsdpc_py_full_grads(flat, NULL, count, false);
    if (some <= 0 || flat->collected) {
        return some < 0 ? -1 : 0;
    }
    if (!flat->backward.entered) {
        return not_gathered(flat, 0);
    }
    flat->backward.arrived_count = 1;
    return fsdpc_py_watch_all(flat);
}

static int
finish_passed(fsdpc_py_flat *flat)
{
    flat->closed = flat->tree->backward.number;
    /* From now on all parameters are watched: a late gradient raises an error that names its parameter. */
    if (!flat->backward.complete &&
        (fsdpc_py_find_unwatched(flat) < 0 || fsdpc_py_watch_all(flat) < 0)) {
        return -1;
    }
    /* Other ranks may have gradients of this unit, which they send at this point of the common order. */
    bool sends = fsdpc_unit_layout(flat->unit)->trainable_count > 0 &&
                 (flat->backward.complete || flat->backward.arrived_count > 0 ||
                  !fsdpc_unit_withholds(flat->unit));
    return sends ? fsdpc_py_finish_unit(flat) : drop_hold(flat);
}

int
fsdpc_py_finish_those_passed(const fsdpc_py_flat *next)
{
    const fsdpc_py_tree *tree = next->tree;
    int unit = -1;
    while (tree->backward.kind != FSDPC_BACKWARD_LOCAL &&
           (unit = fsdpc_tree_next_passed(tree->tree, next->id)) >= 0) {
        if (finish_passed(tree->units[unit]) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_input_done(fsdpc_py_hook *self)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_hook *call = (fsdpc_py_hook *)self->again;
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || !call || call->backward != tree->backward.number || call->inputs_left == 0 ||
        --call->inputs_left > 0 || --flat->backward.open_calls > 0 ||
        !fsdpc_tree_is_held(tree->tree, flat->id)) {
        return 0;
    }
    /* If the unit is neither complete nor closed, this backward will bring gradients of another forward. */
    bool closed = !flat->backward.unwatched && (flat->incomplete || flat->expected == 0);
    if (flat->backward.complete || closed) {
        return all_closed(flat);
    }
    return 0;
}
