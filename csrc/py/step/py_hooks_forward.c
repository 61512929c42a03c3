/* Hooks of a forward. A pass begins with the forward of the outermost module. A unit's modules show full
 * tensors during the unit's forward.
 */
#include "py/step/py_hooks_impl.h"

/* Returns 1 if this thread runs a backward, 0 if not, -1 with an exception. */
static int
inside_backward(fsdpc_py_tree *tree)
{
    long id;
    return fsdpc_py_graph_task(tree, &id) < 0 ? -1 : id >= 0;
}

/* Calls on_thaw, which allocates gradient memory and makes a new tree. Returns 1, or -1 with an exception. */
static int
call_on_thaw(fsdpc_py_tree *tree)
{
    PyObject *call = tree->on_thaw;
    if (!call) {
        PyErr_SetString(fsdpc_py_current()->state_error,
                        "a parameter that was frozen when the model was wrapped now requires a "
                        "gradient, and this tree cannot allocate memory for one");
        return -1;
    }
    tree->thaws = true;
    int result = fsdpc_py_call(call);
    tree->thaws = false;
    return result < 0 ? -1 : 1;
}

/* Sets what the modules of each unit show to forwards of other units; see fsdpc/_engine/released.py. */
static int
set_in_pass(fsdpc_py_tree *tree, bool in_pass)
{
    for (int i = 0; i < tree->count; i++) {
        if (fsdpc_py_set_in_pass(tree->units[i], in_pass) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Returns true if the pass that begins is to call check_gathered: few do, as it takes 0.5 us a unit. */
static bool
looks_at_gathered(const fsdpc_py_tree *tree)
{
    return tree->passes < 4 || tree->passes % 16 == 0;
}

/* Takes over the user's changes to the parameters. Looks for writes in place only if `compares`. */
static int
take_over_changes(fsdpc_py_flat *flat, bool compares)
{
    int changed = fsdpc_py_uninstall_all(flat) < 0 ? -1 : fsdpc_py_detect_changes(flat);
    int touched = compares && changed >= 0 ? fsdpc_py_was_touched(flat) : 0;
    if (changed > 0 || touched > 0) {
        fsdpc_py_touch(flat);
    }
    return changed < 0 || touched < 0 ? -1 : 0;
}

/* Calls before_pass, if set, to check registered modules and parameters. Clears before_pass on success. */
static int
call_before_pass(fsdpc_py_tree *tree)
{
    PyObject *call = tree->outer_grad ? tree->before_pass : NULL;
    if (!call) {
        return 0;
    }
    tree->before_pass = NULL;
    if (fsdpc_py_call(call) == 0) {
        Py_DECREF(call);
        return 0;
    }
    Py_XSETREF(tree->before_pass, call);
    return -1;
}

/* Begins an outermost pass: clears leftovers of an earlier pass, and takes over the user's changes to the
 * parameters. Returns 0, or 1 if `tree` is no longer the units' tree, or -1 with an exception. */
static int
begin_pass(fsdpc_py_tree *tree)
{
    int thaws = 0, graphs = 0;
    bool compares = fsdpc_tree_compares(tree->tree, tree->outer_grad);
    bool looks = looks_at_gathered(tree);
    if (fsdpc_py_call(tree->refuse_export) < 0 || set_in_pass(tree, false) < 0 ||
        call_before_pass(tree) < 0) {
        return -1;
    }
    if (fsdpc_tree_in_backward(tree->tree) && fsdpc_py_clear_broken_backward(tree) < 0) {
        return -1;
    }
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        Py_CLEAR(flat->call);
        graphs += flat->graphs;
        int flags = take_over_changes(flat, compares) < 0 ? -1 : fsdpc_py_sync_flags(flat);
        if (flags < 0 || (looks && fsdpc_py_check_gathered(flat) < 0) ||
            fsdpc_py_detect_step(flat, true) < 0) {
            return -1;
        }
        thaws |= flags;
        if (tree->outer_grad &&
            fsdpc_py_checked(fsdpc_unit_note_values(flat->unit, tree->poison)) < 0) {
            return -1;
        }
    }
    if (thaws) {
        return call_on_thaw(tree);
    }
    if (graphs == 0) {
        fsdpc_tree_forget_calls(tree->tree);
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_tree_begin_forward(tree->tree, tree->outer_grad));
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark_all(tree) < 0) {
        return -1;
    }
    tree->passes++;
    return set_in_pass(tree, true);
}

/* Begins an outermost forward. A forward inside a backward is a recomputation (activation checkpointing),
 * perhaps in another thread than the backward. Returns what begin_pass returns. */
static int
begin_forward(fsdpc_py_tree *tree)
{
    int inside = inside_backward(tree);
    if (inside < 0) {
        return -1;
    }
    int grad = fsdpc_py_call_truth(tree->grad_enabled);
    if (grad < 0) {
        return -1;
    }
    tree->recompute = inside || fsdpc_py_in_backward(tree);
    tree->outer_grad = grad;
    if (inside) {
        return fsdpc_py_begin_backward(tree);
    }
    return tree->recompute ? 0 : begin_pass(tree);
}

static int
begin_outermost(fsdpc_py_flat *flat)
{
    int begun = 1;
    for (int i = 0; begun > 0 && i < 2; i++) {
        PyObject *tree = Py_NewRef((PyObject *)flat->tree);
        begun = begin_forward((fsdpc_py_tree *)tree);
        Py_DECREF(tree);
        if (begun > 0 && !flat->tree) {
            break;
        }
    }
    if (begun > 0) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "unit %s: requires_grad of a parameter changed while a forward began",
                     fsdpc_unit_name(flat->unit));
    }
    return begun == 0 ? 0 : -1;
}

int
fsdpc_py_attach(fsdpc_py_flat *flat)
{
    if (flat->on_unattached && fsdpc_py_call(flat->on_unattached) < 0) {
        return -1;
    }
    if (!flat->tree) {
        PyErr_Format(fsdpc_py_current()->state_error, "unit %s belongs to no tree",
                     fsdpc_unit_name(flat->unit));
        return -1;
    }
    return 0;
}

/* --- the inputs ------------------------------------------------------------------------------ */

/* Returns true if inputs must be watched: see [Note: when a unit is done] in py_hooks_backward.c. */
static bool
wants_inputs(const fsdpc_py_flat *flat)
{
    if (flat->incomplete && fsdpc_tree_any_order(flat->tree->tree, flat->id)) {
        return true;
    }
    return fsdpc_py_is_used_late(flat) && !fsdpc_py_has_nested(flat);
}

/* Pushes a new pre_backward hook, this forward's record, onto flat->call. Returns it borrowed, or NULL. */
static fsdpc_py_hook *
push_call(fsdpc_py_flat *flat)
{
    fsdpc_py_hook *call =
        (fsdpc_py_hook *)fsdpc_py_hook_new(FSDPC_HOOK_PRE_BACKWARD, (PyObject *)flat, -1);
    if (call) {
        call->again = (PyObject *)flat->call;
        flat->call = call;
    }
    return call;
}

/* Pops the record of the ending forward from flat->call. Returns it owned, or NULL if there is none. */
static fsdpc_py_hook *
pop_call(fsdpc_py_flat *flat)
{
    fsdpc_py_hook *call = flat->call;
    if (call) {
        flat->call = (fsdpc_py_hook *)call->again;
        call->again = NULL;
    }
    return call;
}

struct watched {
    PyObject *done; /* the input_done hook */
    int count;
};

static int
watch_one(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    struct watched *watched = argument;
    int one = fsdpc_py_watch_node(tree, tensor, watched->done);
    watched->count += one > 0;
    return one;
}

/* Gives each tensor among the arguments a new autograd node for this forward. The node has its gradient when
 * the backward of this forward has run, whatever else uses the tensor. *out: (args, kwargs) or args. */
static int
watch_inputs(fsdpc_py_flat *flat, PyObject *const *inputs, Py_ssize_t count, PyObject **out)
{
    fsdpc_py_tree *tree = flat->tree;
    int result = -1, grad = fsdpc_py_call_truth(tree->grad_enabled);
    if (grad <= 0) {
        return grad;
    }
    fsdpc_py_hook *call = push_call(flat);
    struct watched watched = {.done =
                                  fsdpc_py_hook_new(FSDPC_HOOK_INPUT_DONE, (PyObject *)flat, -1)};
    PyObject *aliased = NULL;
    if (!call || !watched.done) {
        goto done;
    }
    ((fsdpc_py_hook *)watched.done)->again = Py_NewRef(call);
    aliased = PyObject_CallFunctionObjArgs(tree->alias_inputs, inputs[0],
                                           count > 1 ? inputs[1] : Py_None, NULL);
    if (!aliased || fsdpc_py_walk(tree, aliased, watch_one, &watched) < 0) {
        goto done;
    }
    call->inputs = watched.count;
    call->input_hook = watched.done;
    *out = Py_NewRef(count > 1 || !PyTuple_Check(aliased) ? aliased : PyTuple_GET_ITEM(aliased, 0));
    result = 0;
done:
    Py_XDECREF(aliased);
    Py_XDECREF(watched.done);
    return result;
}

/* Undoes a forward whose hook fails, because no other code undoes such a forward. Returns -1. */
static int
forward_broke_off(fsdpc_py_flat *flat)
{
    (void)fsdpc_py_forward_failed(flat);
    return -1;
}

/* Ends the pass of a forward that failed before forward_depth counted it: if it is the outermost forward, the
 * modules show their sharded parameters again. Keeps the exception. Returns -1. */
static int
pass_broke_off(fsdpc_py_tree *tree)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (tree->forward_depth == 0 && set_in_pass(tree, false) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    return -1;
}

int
fsdpc_py_pre_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count, PyObject **out)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_tree *tree = flat->tree;
    /* In this state the depth is stale: an earlier forward raised without a call of forward_failed. */
    if (tree->forward_depth > 0 && flat->id == 0 && flat->installed == 0) {
        tree->forward_depth = 0;
    }
    if (tree->forward_depth == 0) {
        PyObject *range = fsdpc_py_range_open(tree, "root_pre_forward", NULL);
        int begun = begin_outermost(flat);
        fsdpc_py_range_close(range);
        if (begun < 0) {
            return -1;
        }
    }
    tree = flat->tree;
    /* Under reentrant checkpointing, a recomputation is the first sign that a backward comes to the unit. */
    if (flat->graphless && tree->recompute && fsdpc_py_finish_those_passed(flat) < 0) {
        return -1;
    }
    int status;
    PyObject *range = fsdpc_py_range_open(tree, "all_gather", flat);
    status = FSDPC_PY_UNLOCKED(fsdpc_tree_forward_enter(tree->tree, flat->id));
    fsdpc_py_range_close(range);
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark(flat) < 0 || fsdpc_py_install(flat) < 0) {
        return pass_broke_off(tree);
    }
    tree->forward_depth++;
    /* args is (module, args) or (module, args, kwargs). */
    int result = 0;
    if (count > 1 && wants_inputs(flat)) {
        result = watch_inputs(flat, args + 1, count - 1, out);
    } else if (flat->call) {
        result = push_call(flat) ? 0 : -1;
    }
    return result < 0 ? forward_broke_off(flat) : 0;
}

/* --- the outputs ----------------------------------------------------------------------------- */

/* Refuses generators: their bodies would run after the unit's release, on sharded parameters. */
static int
check_kind(const fsdpc_py_flat *flat, PyObject *output)
{
    if (!(PyGen_Check(output) || PyCoro_CheckExact(output) || PyAsyncGen_CheckExact(output)) ||
        fsdpc_unit_layout(flat->unit)->param_count == 0) {
        return 0;
    }
    PyErr_Format(fsdpc_py_current()->state_error,
                 "forward of unit %s returned a %s, whose body would run after the unit's "
                 "parameters are released: return the values (for example as a list), or wrap the "
                 "module that uses the generator instead of this one",
                 fsdpc_unit_name(flat->unit), Py_TYPE(output)->tp_name);
    return -1;
}

/* Replaces outputs that are the unit's parameters, or views of them, by differentiable copies: their memory
 * holds other values as soon as the unit is released. *output is owned; returns 1 if it was replaced. */
static int
copy_own_memory(fsdpc_py_flat *flat, PyObject **output)
{
    fsdpc_py_tree *tree = flat->tree;
    if (check_kind(flat, *output) < 0) {
        return -1;
    }
    int found = fsdpc_py_walk(tree, *output, fsdpc_py_lies_in, flat);
    if (found <= 0) {
        return found;
    }
    const char *begin = fsdpc_unit_full(flat->unit);
    PyObject *copied = PyObject_CallFunction(
        tree->copy_outputs, "OKK", *output, (unsigned long long)(uintptr_t)begin,
        (unsigned long long)(uintptr_t)(begin + fsdpc_unit_layout(flat->unit)->full_bytes));
    if (!copied) {
        return -1;
    }
    Py_SETREF(*output, copied);
    return 1;
}

/* The arguments of a forward. */
struct inputs {
    PyObject *const *items;
    Py_ssize_t count;
};

static int
is_same(fsdpc_py_tree *Py_UNUSED(tree), PyObject *tensor, void *argument)
{
    return tensor == argument;
}

/* A visitor that returns 1 if the tensor requires a gradient and is none of the inputs. */
static int
is_new(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    const struct inputs *inputs = argument;
    for (Py_ssize_t i = 0; i < inputs->count; i++) {
        int found = fsdpc_py_walk(tree, inputs->items[i], is_same, tensor);
        if (found != 0) {
            return found < 0 ? -1 : 0;
        }
    }
    PyObject *trains = fsdpc_py_field(tensor, FSDPC_PY_REQUIRES_GRAD);
    int result = trains ? trains == Py_True : -1;
    Py_XDECREF(trains);
    return result;
}

/* A rank may return a unit's inputs unchanged (stochastic depth) where other ranks compute. If all ranks must
 * gather in one order, the backward must come to the unit on this rank as well. So the returned inputs become
 * views, whose autograd nodes belong to the unit. *output is owned; returns 1 if it was replaced. */
static int
own_node(const fsdpc_py_flat *flat, PyObject *const *args, Py_ssize_t count, PyObject **output)
{
    fsdpc_py_tree *tree = flat->tree;
    struct inputs inputs = {args, count};
    if (fsdpc_tree_any_order(tree->tree, flat->id)) {
        return 0;
    }
    int found = fsdpc_py_walk(tree, *output, is_new, &inputs);
    int grad = found == 0 ? fsdpc_py_call_truth(tree->grad_enabled) : 0;
    if (found < 0 || grad <= 0) {
        return found < 0 ? -1 : grad;
    }
    PyObject *args_in = PyTuple_Pack(1, *output);
    PyObject *aliased =
        args_in ? PyObject_CallFunctionObjArgs(tree->alias_inputs, args_in, Py_None, NULL) : NULL;
    Py_XDECREF(args_in);
    if (!aliased) {
        return -1;
    }
    Py_SETREF(*output, Py_NewRef(PyTuple_GET_ITEM(PyTuple_GET_ITEM(aliased, 0), 0)));
    Py_DECREF(aliased);
    return 1;
}

/* Returns the hook that runs when a backward comes to the outputs: owned, or NULL with an exception. An
 * outermost forward gets a new hook, which lives as long as the graph of that forward. */
static fsdpc_py_hook *
backward_hook(fsdpc_py_hook *self, fsdpc_py_hook *call)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    bool counts = flat->tree->forward_depth == 0 && !flat->tree->recompute;
    PyObject *hook;
    if (call && call->inputs > 0) {
        hook = Py_NewRef(call);
    } else if (counts) {
        hook = fsdpc_py_hook_new(FSDPC_HOOK_PRE_BACKWARD, (PyObject *)flat, -1);
    } else {
        hook = Py_XNewRef(fsdpc_py_companion(self, FSDPC_HOOK_PRE_BACKWARD));
    }
    if (hook && counts) {
        ((fsdpc_py_hook *)hook)->counted = true;
        ((fsdpc_py_hook *)hook)->era = flat->era;
        flat->graphs++;
    }
    return (fsdpc_py_hook *)hook;
}

/* Inside torch.func.vmap, jvp and similar transforms, outputs wrap other tensors. The nodes that lead to the
 * parameters are the nodes of the wrapped tensors. */
static int
watch_transformed(fsdpc_py_tree *tree, PyObject *output, fsdpc_py_hook *backward)
{
    int active = fsdpc_py_call_truth(tree->transforms_active);
    if (active <= 0) {
        return active;
    }
    PyObject *inner = PyObject_CallOneArg(tree->inner_tensors, output);
    int hooked = inner ? fsdpc_py_walk(tree, inner, fsdpc_py_watch_output, backward) : -1;
    Py_XDECREF(inner);
    return hooked;
}

/* Registers `hook` on the autograd nodes of the outputs. Steals the reference to `hook`, which may be NULL
 * with an exception. Returns 1 if an output requires grad, so that autograd will call `hook`. */
static int
walk_outputs(fsdpc_py_tree *tree, fsdpc_py_hook *hook, PyObject *input_hook, PyObject *inputs,
             PyObject *output)
{
    PyObject *outer = tree->inputs; /* set by a walk that encloses this one, or NULL */
    tree->inputs = inputs;
    tree->input_hook = input_hook;
    int hooked = hook ? fsdpc_py_walk(tree, output, fsdpc_py_watch_output, hook) : -1;
    int inner = hooked < 0 ? -1 : watch_transformed(tree, output, hook);
    hooked = inner < 0 ? -1 : hooked | inner;
    tree->inputs = outer;
    tree->input_hook = NULL;
    Py_XDECREF(hook);
    return hooked;
}

static int
watch_outputs(fsdpc_py_hook *self, PyObject *inputs, PyObject *output)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_hook *call = pop_call(flat);
    int hooked = fsdpc_py_call_truth(flat->tree->grad_enabled);
    if (hooked > 0) {
        PyObject *input_hook = call && call->inputs > 0 ? call->input_hook : NULL;
        hooked = walk_outputs(flat->tree, backward_hook(self, call), input_hook, inputs, output);
    }
    Py_XDECREF(call);
    return hooked;
}

/* Registers hooks on the outermost outputs for units with modules that have not run: see py_stay.c. */
static int
watch_for_members(fsdpc_py_tree *tree, PyObject *inputs, PyObject *output)
{
    int result = 0;
    for (int i = 0; result >= 0 && i < tree->count; i++) {
        PyObject *unit = (PyObject *)tree->units[i];
        if (tree->units[i]->members_left > 0) {
            PyObject *hook = fsdpc_py_hook_new(FSDPC_HOOK_PRE_BACKWARD, unit, -1);
            result = walk_outputs(tree, (fsdpc_py_hook *)hook, NULL, inputs, output);
        }
    }
    return result < 0 ? -1 : 0;
}

/* Makes the modules show what they showed before this forward, unless the unit `stays`. */
static int
leave_pass(fsdpc_py_flat *flat, bool stays)
{
    int result = 0;
    if (stays && !flat->stays) {
        flat->stays = flat->lent = true;
    } else {
        result = fsdpc_py_uninstall(flat);
    }
    if (--flat->tree->forward_depth == 0 && set_in_pass(flat->tree, false) < 0) {
        return -1;
    }
    return result;
}

/* `hooked`: an output requires grad, so autograd will call the hook on that output. */
static int
leave_forward(fsdpc_py_flat *flat, bool stays, int hooked)
{
    fsdpc_py_tree *tree = flat->tree;
    flat->graphless = hooked == 0;
    /* Reentrant checkpointing runs a forward without gradients, yet a backward will follow. */
    bool backward = hooked > 0 || (tree->outer_grad && !tree->recompute);
    int status = stays ? fsdpc_tree_forward_stay(tree->tree, flat->id)
                       : fsdpc_tree_forward_leave(tree->tree, flat->id, backward);
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    bool all_ran = flat->stays && !stays && flat->installed == 1 && !tree->recompute;
    return all_ran ? fsdpc_py_release_stay(flat) : fsdpc_py_mark(flat);
}

static int
end_outermost(fsdpc_py_tree *tree, int hooked, PyObject *inputs, PyObject *output)
{
    int status;
    if ((hooked > 0 && watch_for_members(tree, inputs, output) < 0) ||
        fsdpc_py_end_stays(tree, hooked > 0) < 0) {
        return -1;
    }
    if (hooked > 0) {
        return 0;
    }
    status = FSDPC_PY_UNLOCKED(fsdpc_tree_end_forward(tree->tree));
    return fsdpc_py_checked(status) < 0 ? -1 : fsdpc_py_mark_all(tree);
}

int
fsdpc_py_post_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count, PyObject **out)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || tree->forward_depth == 0) {
        return 0;
    }
    PyObject *output = Py_NewRef(args[count - 1]);
    int copied = copy_own_memory(flat, &output);
    copied = copied == 0 ? own_node(flat, args, count - 1, &output) : copied;
    if (copied < 0) {
        Py_DECREF(output);
        return forward_broke_off(flat);
    }
    bool stays = fsdpc_py_will_stay(flat);
    PyObject *inputs = count > 1 ? args[count - 2] : Py_None;
    int result = leave_pass(flat, stays);
    int hooked = result < 0 ? -1 : watch_outputs(self, inputs, output);
    result = hooked < 0 ? -1 : leave_forward(flat, stays, hooked);
    if (result == 0 && tree->forward_depth == 0 && !tree->recompute) {
        result = end_outermost(tree, hooked, inputs, output);
    }
    if (result == 0 && copied) {
        *out = Py_NewRef(output);
    }
    Py_DECREF(output);
    return result;
}

int
fsdpc_py_forward_failed(fsdpc_py_flat *flat)
{
    fsdpc_py_tree *tree = flat->tree;
    if (!tree || tree->forward_depth == 0) {
        return 0;
    }
    fsdpc_py_enter_quietly(fsdpc_unit_device(flat->unit));
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    fsdpc_py_hook *call = pop_call(flat);
    Py_XDECREF(call);
    int result = leave_pass(flat, false);
    int status = fsdpc_tree_forward_failed(tree->tree, flat->id);
    if (result == 0) {
        result = fsdpc_py_checked(status);
    }
    result = result == 0 ? fsdpc_py_mark(flat) : result;
    if (result == 0 && tree->forward_depth == 0 && !tree->recompute) {
        result = fsdpc_py_end_stays(tree, false);
    }
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    return result;
}
