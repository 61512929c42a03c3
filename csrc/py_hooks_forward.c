/* A pass: it begins with the outermost module's forward; a unit's modules show full tensors during
 * its own.
 */
#include "py_hooks_impl.h"

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
    tree->recompute = inside;
    tree->outer_grad = grad;
    if (inside) {
        return fsdpc_py_begin_backward(tree);
    }
    if (fsdpc_tree_in_backward(tree->tree) && fsdpc_py_clear_broken_backward(tree) < 0) {
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
    FSDPC_PY_CORE(status, fsdpc_tree_begin_forward(tree->tree));
    return fsdpc_py_checked(status);
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

/* Units whose backward cannot be seen to end by their own gradients watch their inputs'. */
static int
watch_inputs(fsdpc_py_hook *self, fsdpc_py_flat *flat, PyObject *const *inputs, Py_ssize_t count)
{
    bool adaptive =
        flat->incomplete && fsdpc_exchange_any_order(flat->tree->tree->nodes[flat->id].exchange);
    if (flat->expected > 0 && !adaptive) {
        return 0;
    }
    int grad = fsdpc_py_call_truth(flat->tree->grad_enabled);
    if (grad <= 0) {
        return grad;
    }
    PyObject *done = fsdpc_py_companion(self, FSDPC_HOOK_INPUT_DONE);
    for (Py_ssize_t i = 0; done && i < count; i++) {
        if (fsdpc_py_walk(flat->tree, inputs[i], fsdpc_py_watch_node, done, 0) < 0) {
            return -1;
        }
    }
    return done ? 0 : -1;
}

int
fsdpc_py_pre_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count)
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
    FSDPC_PY_CORE(status, fsdpc_tree_forward_enter(tree->tree, flat->id));
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_install(flat) < 0) {
        return -1;
    }
    tree->forward_depth++;
    /* (module, args) or (module, args, kwargs) */
    return count > 1 && !tree->recompute ? watch_inputs(self, flat, args + 1, count - 1) : 0;
}

int
fsdpc_py_post_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count)
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
    int hooked = fsdpc_py_call_truth(tree->grad_enabled);
    if (hooked > 0) {
        PyObject *backward = fsdpc_py_companion(self, FSDPC_HOOK_PRE_BACKWARD);
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
        FSDPC_PY_CORE(status, fsdpc_tree_end_forward(tree->tree));
    }
    return fsdpc_py_checked(status);
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
        result = fsdpc_py_checked(status);
    }
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    return result;
}
