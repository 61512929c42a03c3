/* What torch calls in a step: C callables for module hooks, gradient hooks and the end of backward.
 *
 * One heap type, Hook, with a kind; calls go through vectorcall, so no Python frame runs per unit
 * or per parameter. The order of events:
 *
 *   pre_forward   first unit of a pass: the pass begins. Gather; the modules show full tensors.
 *   post_forward  (inputs, output). The modules show sharded parameters again; release or hold; a
 *                 pre-hook on the autograd nodes of the outputs waits for backward.
 *   pre_backward  a gradient reaches an output: gather and hold; full tensors are shown again, for
 *                 recomputation inside the unit (activation checkpointing).
 *   grad          a full parameter has its gradient: after the last one the unit is done: release,
 *                 then pack and reduce.
 *   input_done    for units without trainable parameters: the gradient of the input exists.
 *   end           after backward: units with partial gradients, the ranks' common end, .grad.
 *
 * [Note: watched parameters] A gradient hook costs half a microsecond of torch's time, so not every
 * parameter has one. Those of the module that is registered first run first in forward as a rule,
 * and get their gradients last: when they have arrived and every other parameter has its gradient
 * too, the unit is done. Where that is not so (other order, parameters unused) every parameter is
 * watched and counted from then on; what no hook has told of is found at the end of backward.
 *
 * The GIL is let go around everything that copies, casts or waits; a release is a few stores and
 * keeps it.
 */
#include "py_engine.h"

#include <structmember.h>

#include <stddef.h>
#include <string.h>

#include "mem.h"
#include "tree_impl.h"
#include "unit_impl.h"

typedef struct hook {
    PyObject_HEAD
    vectorcallfunc call;
    enum fsdpc_py_hook_kind kind;
    int param;
    PyObject *owner;
    PyObject *again; /* the pre_backward or input_done hook that this one registers, made once */
} hook;

#define CORE(status, expression)       \
    do {                               \
        Py_BEGIN_ALLOW_THREADS(status) \
        = (expression);                \
        Py_END_ALLOW_THREADS           \
    } while (0)

static int
checked(int status)
{
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

/* 1, 0, or -1 with an exception. */
static int
call_truth(PyObject *function)
{
    PyObject *result = PyObject_CallNoArgs(function);
    if (!result) {
        return -1;
    }
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

/* 1 inside a backward, 0 outside, -1 with an exception. */
static int
inside_backward(fsdpc_py_tree *tree)
{
    if (!tree->graph_task) {
        return 0;
    }
    PyObject *id = PyObject_CallNoArgs(tree->graph_task);
    if (!id) {
        return -1;
    }
    long value = PyLong_AsLong(id);
    Py_DECREF(id);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    return value >= 0;
}

/* --- beginnings ------------------------------------------------------------------------------ */

/* Runs once per backward; the end callback runs when the whole graph has. */
static int
begin_backward(fsdpc_py_tree *tree)
{
    if (fsdpc_tree_in_backward(tree->tree)) {
        return 0;
    }
    int status;
    CORE(status, fsdpc_tree_begin_backward(tree->tree));
    if (checked(status) < 0) {
        return -1;
    }
    PyObject *result = PyObject_CallOneArg(tree->queue_callback, tree->end_hook);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static void
forget_backward(fsdpc_py_flat *flat)
{
    memset(flat->arrived, 0, (size_t)fsdpc_unit_layout(flat->unit)->param_count);
    flat->arrived_count = 0;
    flat->prepared = flat->entered = false;
}

/* A backward that raised: its half-made gradients are dropped and the peers are told. */
static int
clear_broken_backward(fsdpc_py_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_drop_held(tree->units[i]);
        if (fsdpc_py_uninstall_all(tree->units[i]) < 0 ||
            fsdpc_py_clear_full_grads(tree->units[i], true) < 0 ||
            fsdpc_py_prepare_grads(tree->units[i]) < 0) {
            return -1;
        }
    }
    int status;
    bool sync = tree->count == 0 || tree->units[0]->sync;
    CORE(status, fsdpc_tree_end_backward(tree->tree, sync));
    for (int i = 0; i < tree->count; i++) {
        forget_backward(tree->units[i]);
        memset(tree->units[i]->unit->used, 0,
               (size_t)fsdpc_unit_layout(tree->units[i]->unit)->param_count);
    }
    return checked(status);
}

static int
begin_forward(fsdpc_py_tree *tree)
{
    int inside = inside_backward(tree);
    if (inside < 0) {
        return -1;
    }
    int grad = call_truth(tree->grad_enabled);
    if (grad < 0) {
        return -1;
    }
    tree->recompute = inside;
    tree->outer_grad = grad;
    if (inside) {
        return begin_backward(tree);
    }
    if (fsdpc_tree_in_backward(tree->tree) && clear_broken_backward(tree) < 0) {
        return -1;
    }
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        if (fsdpc_py_uninstall_all(flat) < 0 || fsdpc_py_look_for_changes(flat) < 0 ||
            fsdpc_py_sync_flags(flat) < 0) {
            return -1;
        }
    }
    int status;
    CORE(status, fsdpc_tree_begin_forward(tree->tree));
    return checked(status);
}

static int
attach(fsdpc_py_flat *flat)
{
    if (flat->tree) {
        return 0;
    }
    if (flat->on_unattached) {
        PyObject *result = PyObject_CallNoArgs(flat->on_unattached);
        if (!result) {
            return -1;
        }
        Py_DECREF(result);
    }
    if (!flat->tree) {
        PyErr_Format(fsdpc_py_current()->state_error, "unit %s belongs to no tree",
                     fsdpc_unit_name(flat->unit));
        return -1;
    }
    return 0;
}

static PyObject *
companion(hook *self, enum fsdpc_py_hook_kind kind)
{
    if (!self->again) {
        self->again = fsdpc_py_hook_new(kind, self->owner, -1);
    }
    return self->again;
}

/* --- forward --------------------------------------------------------------------------------- */

/* Units whose backward cannot be seen to end by their own gradients watch their inputs'. */
static int
watch_inputs(hook *self, fsdpc_py_flat *flat, PyObject *const *inputs, Py_ssize_t count)
{
    bool adaptive =
        flat->incomplete && fsdpc_exchange_any_order(flat->tree->tree->nodes[flat->id].exchange);
    if (flat->expected > 0 && !adaptive) {
        return 0;
    }
    int grad = call_truth(flat->tree->grad_enabled);
    if (grad <= 0) {
        return grad;
    }
    PyObject *done = companion(self, FSDPC_HOOK_INPUT_DONE);
    for (Py_ssize_t i = 0; done && i < count; i++) {
        if (fsdpc_py_walk(flat->tree, inputs[i], fsdpc_py_watch_node, done, 0) < 0) {
            return -1;
        }
    }
    return done ? 0 : -1;
}

static int
pre_forward(hook *self, PyObject *const *args, Py_ssize_t count)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    if (attach(flat) < 0) {
        return -1;
    }
    fsdpc_py_tree *tree = flat->tree;
    /* A depth left over by a forward that broke off outside of our sight. */
    if (tree->forward_depth > 0 && flat->id == 0 && flat->installed == 0) {
        tree->forward_depth = 0;
    }
    if (tree->forward_depth == 0 && begin_forward(tree) < 0) {
        return -1;
    }
    int status;
    CORE(status, fsdpc_tree_forward_enter(tree->tree, flat->id));
    if (checked(status) < 0 || fsdpc_py_install(flat) < 0) {
        return -1;
    }
    tree->forward_depth++;
    /* (module, args) or (module, args, kwargs) */
    return count > 1 && !tree->recompute ? watch_inputs(self, flat, args + 1, count - 1) : 0;
}

static int
post_forward(hook *self, PyObject *const *args, Py_ssize_t count)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || tree->forward_depth == 0) {
        return 0;
    }
    tree->forward_depth--;
    if (fsdpc_py_uninstall(flat) < 0) {
        return -1;
    }
    int hooked = call_truth(tree->grad_enabled);
    if (hooked > 0) {
        PyObject *backward = companion(self, FSDPC_HOOK_PRE_BACKWARD);
        tree->inputs = count > 1 ? args[0] : Py_None;
        hooked = backward ? fsdpc_py_walk(tree, args[count - 1], fsdpc_py_watch_output, backward, 0)
                          : -1;
        tree->inputs = NULL;
    }
    if (hooked < 0) {
        return -1;
    }
    int status;
    /* Reentrant checkpointing runs forwards without gradients that a backward will follow. */
    bool backward = hooked > 0 || (tree->outer_grad && !tree->recompute);
    status = fsdpc_tree_forward_leave(tree->tree, flat->id, backward);
    if (status == FSDPC_OK && tree->forward_depth == 0 && !tree->recompute && hooked == 0) {
        CORE(status, fsdpc_tree_end_forward(tree->tree));
    }
    return checked(status);
}

int
fsdpc_py_forward_failed(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || tree->forward_depth == 0) {
        return 0;
    }
    fsdpc_py_enter_quietly(flat->unit->device);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    tree->forward_depth--;
    int result = fsdpc_py_uninstall(flat);
    int status = fsdpc_tree_forward_failed(tree->tree, flat->id);
    if (result == 0) {
        result = checked(status);
    }
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    return result;
}

/* --- backward -------------------------------------------------------------------------------- */

static int
model_is_gone(const fsdpc_py_flat *flat)
{
    PyErr_Format(fsdpc_py_current()->state_error,
                 "backward reached unit %s, whose model was deleted or initialised anew since its "
                 "forward; keep the model until backward has run",
                 fsdpc_unit_name(flat->unit));
    return -1;
}

static int
pre_backward(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    if (!tree) {
        return model_is_gone(flat);
    }
    if (begin_backward(tree) < 0) {
        return -1;
    }
    int status;
    CORE(status, fsdpc_tree_backward_enter(tree->tree, flat->id));
    if (checked(status) < 0) {
        return -1;
    }
    flat->entered = true;
    if (flat->hold_installed) {
        return 0;
    }
    flat->hold_installed = true;
    return fsdpc_py_install(flat);
}

static int
end_hold(fsdpc_py_flat *flat)
{
    if (!flat->hold_installed) {
        return 0;
    }
    flat->hold_installed = false;
    return fsdpc_py_uninstall(flat);
}

/* A unit with a communication hook that had its turn keeps what comes later in the same backward;
 * the end of backward sends it. */
static int
send_by_hook(fsdpc_py_flat *flat)
{
    fsdpc_tree *tree = flat->tree->tree;
    if (fsdpc_tree_was_reduced(tree, flat->id)) {
        return checked(fsdpc_tree_keep_local(tree, flat->id, flat->grads)) < 0 ? -1 : 1;
    }
    int sent = fsdpc_py_call_comm_hook(flat);
    if (sent > 0) {
        fsdpc_tree_set_reduced(tree, flat->id);
    }
    return sent;
}

/* Packs and sends (or, with sync false, keeps) the gradients that autograd has made. */
static int
send_grads(fsdpc_py_flat *flat, bool sync)
{
    int status, result = -1;
    fsdpc_tree *tree = flat->tree->tree;
    if (fsdpc_py_prepare_grads(flat) < 0 || fsdpc_py_collect_grads(flat) < 0) {
        goto done;
    }
    if (sync && flat->comm_hook) {
        int sent = send_by_hook(flat);
        result = sent > 0 ? fsdpc_py_clear_full_grads(flat, false) : sent;
        goto done;
    }
    if (sync) {
        CORE(status, fsdpc_tree_reduce(tree, flat->id, flat->grads));
    } else {
        CORE(status, fsdpc_tree_keep_local(tree, flat->id, flat->grads));
    }
    result = checked(status) < 0 ? -1 : fsdpc_py_clear_full_grads(flat, false);
done:
    fsdpc_py_drop_held(flat);
    return result;
}

static int
send_what_is_due(fsdpc_py_tree *tree, bool at_end)
{
    for (;;) {
        int due = fsdpc_tree_next_due(tree->tree, at_end);
        if (due < 0) {
            return 0;
        }
        if (send_grads(tree->units[due], true) < 0) {
            return -1;
        }
    }
}

static int
not_gathered(const fsdpc_py_flat *flat, int param)
{
    PyErr_Format(fsdpc_py_current()->state_error,
                 "a gradient of parameter %s of unit %s was computed while the unit was not "
                 "gathered: something that its forward computed reaches the loss without being "
                 "returned from forward (an attribute, a global, a custom class). Return it, "
                 "or wrap the module that uses it as well",
                 fsdpc_unit_layout(flat->unit)->params[param].name, fsdpc_unit_name(flat->unit));
    return -1;
}

/* The unit has all gradients that it will get for now. */
static int
finish_unit(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    memset(flat->arrived, 0, (size_t)fsdpc_unit_layout(flat->unit)->param_count);
    flat->arrived_count = 0;
    if (end_hold(flat) < 0) {
        return -1;
    }
    int status;
    status = fsdpc_tree_backward_done(tree->tree, flat->id, flat->sync);
    if (checked(status) < 0) {
        return -1;
    }
    return flat->sync ? send_what_is_due(tree, false) : send_grads(flat, false);
}

/* Another order than supposed: hooks put on the parameters now still see what is to come. */
static void
count_from_now_on(fsdpc_py_flat *flat)
{
    for (int i = 0; i < fsdpc_unit_layout(flat->unit)->param_count; i++) {
        flat->arrived[i] = flat->held[i] != NULL;
        flat->arrived_count += flat->arrived[i];
    }
    fsdpc_py_drop_held(flat);
}

/* See [Note: watched parameters]. */
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
        return finish_unit(flat);
    }
    count_from_now_on(flat);
    return fsdpc_py_watch_all(flat);
}

/* Gradients that no hook has told of. */
static int
find_unwatched(fsdpc_py_flat *flat)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    int some = flat->watch_all ? 0 : fsdpc_py_full_grads(flat, NULL, count, false);
    if (some <= 0 || flat->collected) {
        return some < 0 ? -1 : 0;
    }
    if (!flat->entered) {
        return not_gathered(flat, 0);
    }
    flat->arrived_count = 1;
    return fsdpc_py_watch_all(flat);
}

static int
grad_arrived(hook *self)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    if (!flat->tree) {
        return model_is_gone(flat);
    }
    if (begin_backward(flat->tree) < 0) {
        return -1;
    }
    if (fsdpc_unit_refs(flat->unit) == 0) {
        return not_gathered(flat, self->param);
    }
    if (!flat->watch_all) {
        return watched_arrived(flat);
    }
    if (!flat->arrived[self->param]) {
        flat->arrived[self->param] = 1;
        flat->arrived_count++;
    }
    return flat->arrived_count >= flat->expected ? finish_unit(flat) : 0;
}

static int
input_done(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || !fsdpc_tree_is_held(tree->tree, flat->id)) {
        return 0;
    }
    int some = flat->arrived_count > 0;
    if (!some && !flat->watch_all) {
        some = fsdpc_py_full_grads(flat, NULL, fsdpc_unit_layout(flat->unit)->param_count, false);
    }
    if (some != 0) {
        return some < 0 ? -1 : finish_unit(flat);
    }
    if (end_hold(flat) < 0) {
        return -1;
    }
    int status;
    status = fsdpc_tree_drop_hold(tree->tree, flat->id);
    return checked(status);
}

/* --- the end of backward --------------------------------------------------------------------- */

/* Units that ran with some parameters unused. */
static int
finish_partial_units(fsdpc_py_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        if (find_unwatched(flat) < 0) {
            return -1;
        }
        flat->incomplete = flat->arrived_count > 0;
        if ((flat->arrived_count > 0 && finish_unit(flat) < 0) || end_hold(flat) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The optimizer's parameters show their gradients; who listens is told when all do. */
static int
show_all_grads(fsdpc_py_tree *tree, bool sync)
{
    PyObject *listened = NULL;
    int result = 0;
    for (int i = 0; result == 0 && i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        if ((sync && fsdpc_py_collect_listeners(flat, &listened) < 0) ||
            fsdpc_py_show_grads(flat, sync) < 0) {
            result = -1;
            break;
        }
        forget_backward(flat);
        PyObject *after = flat->after_backward;
        PyObject *called = after ? PyObject_CallNoArgs(after) : Py_NewRef(Py_None);
        Py_XDECREF(called);
        result = called ? 0 : -1;
    }
    if (result == 0) {
        result = fsdpc_py_call_listeners(tree, listened);
    }
    Py_XDECREF(listened);
    return result;
}

static int
end_backward(fsdpc_py_tree *tree)
{
    if (!tree->tree) {
        return 0; /* closed meanwhile */
    }
    bool sync = tree->count == 0 || tree->units[0]->sync;
    int status;
    if (finish_partial_units(tree) < 0 || (sync && send_what_is_due(tree, true) < 0)) {
        return -1;
    }
    for (int i = 0; sync && i < tree->count; i++) {
        if (fsdpc_py_prepare_grads(tree->units[i]) < 0) {
            return -1;
        }
    }
    if (sync && tree->before_end) {
        PyObject *done = PyObject_CallNoArgs(tree->before_end);
        if (!done) {
            return -1;
        }
        Py_DECREF(done);
    }
    CORE(status, fsdpc_tree_end_backward(tree->tree, sync));
    if (checked(status) < 0) {
        return -1;
    }
    return show_all_grads(tree, sync);
}

/* --- the type -------------------------------------------------------------------------------- */

static int
enter(const hook *self)
{
    if (self->kind != FSDPC_HOOK_END) {
        return fsdpc_py_enter((fsdpc_py_flat *)self->owner);
    }
    const fsdpc_py_tree *tree = (fsdpc_py_tree *)self->owner;
    return tree->count > 0 ? fsdpc_py_enter(tree->units[0]) : 0;
}

static PyObject *
hook_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *keywords)
{
    (void)keywords;
    hook *self = (hook *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    int result = -1;
    if (enter(self) < 0) {
        return NULL;
    }
    switch (self->kind) {
    case FSDPC_HOOK_PRE_FORWARD:
        result = pre_forward(self, args, count);
        break;
    case FSDPC_HOOK_POST_FORWARD:
        result = count > 0 ? post_forward(self, args, count) : 0;
        break;
    case FSDPC_HOOK_PRE_BACKWARD:
        result = pre_backward((fsdpc_py_flat *)self->owner);
        break;
    case FSDPC_HOOK_INPUT_DONE:
        result = input_done((fsdpc_py_flat *)self->owner);
        break;
    case FSDPC_HOOK_GRAD:
        result = grad_arrived(self);
        break;
    case FSDPC_HOOK_END:
        result = end_backward((fsdpc_py_tree *)self->owner);
        break;
    }
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *
fsdpc_py_hook_new(enum fsdpc_py_hook_kind kind, PyObject *owner, int param)
{
    PyTypeObject *type = fsdpc_py_current()->hook_type;
    hook *self = (hook *)type->tp_alloc(type, 0);
    if (self) {
        self->call = hook_call;
        self->kind = kind;
        self->param = param;
        self->owner = Py_NewRef(owner);
    }
    return (PyObject *)self;
}

static int
hook_traverse(hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->owner);
    Py_VISIT(self->again);
    return 0;
}

static int
hook_clear(hook *self)
{
    Py_CLEAR(self->owner);
    Py_CLEAR(self->again);
    return 0;
}

static void
hook_dealloc(hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
hook_repr(hook *self)
{
    static const char *const names[] = {"pre_forward", "post_forward", "pre_backward",
                                        "input_done",  "grad",         "end"};
    return PyUnicode_FromFormat("<fsdpc %s hook>", names[self->kind]);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(hook, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_repr, hook_repr},
    {Py_tp_members, members},
    {Py_tp_doc, "A C callable that torch calls; made by FlatParameter.hook()."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpc._C.Hook",
    .basicsize = sizeof(hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int
fsdpc_py_hook_exec(PyObject *module)
{
    return fsdpc_py_add_type(module, &spec, &fsdpc_py_state(module)->hook_type);
}
