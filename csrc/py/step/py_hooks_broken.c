/* Clean-up after a failed backward: what units drop at once, and what needs a wait for the other ranks. */
#include "py/step/py_hooks_impl.h"

#include <string.h>

void
fsdpc_py_forget_backward(fsdpc_py_flat *flat)
{
    memset(flat->arrived, 0, (size_t)fsdpc_unit_layout(flat->unit)->param_count);
    flat->backward = (fsdpc_py_backward){0};
}

/* [Note: touched gradients] When a backward fails, gradients of some ranks may still be in reduce slots. The
 * ranks add them to the shard gradient at the next pass at the latest. The shard gradient then has a part of
 * the failed backward, like the .grad of an unsharded model. But if the user has meanwhile cleared .grad or
 * changed it in place, the sum must leave the user's value unchanged. So the versions of the .grad tensors
 * are noted when the backward fails. After the sum, a tensor gets its old value back if its version had
 * changed before the sum, or was not noted. */

static int
note_versions(fsdpc_py_flat *flat)
{
    for (int i = 0; i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        sharded->broken = sharded->grad ? fsdpc_py_grad_version(flat, sharded) : -1;
        if (sharded->grad && sharded->broken < 0) {
            return -1;
        }
    }
    /* Gradients that no_sync has kept are dropped when the user clears the .grad that stands for them. */
    return fsdpc_unit_has_local(flat->unit) && !flat->shown ? fsdpc_py_note_waiting(flat) : 0;
}

int
fsdpc_py_drop_half_made(fsdpc_py_flat *flat)
{
    fsdpc_py_drop_held(flat);
    return fsdpc_py_end_hold(flat) < 0 || fsdpc_py_clear_full_grads(flat, true) < 0
               ? -1
               : note_versions(flat);
}

/* Returns 0 if .grad is None, or surely unchanged since the backward failed; else 1. -1 with an exception. */
static int
was_touched(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    PyObject *grad = fsdpc_py_field(sharded->param, FSDPC_PY_GRAD);
    if (!grad) {
        return -1;
    }
    int touched = grad != Py_None;
    if (touched && grad == sharded->shown && sharded->broken >= 0) {
        const void *data;
        long version = fsdpc_py_grad_version(flat, sharded);
        touched = version < 0 || fsdpc_py_local_data(flat, grad, &data) < 0
                      ? -1
                      : version != sharded->broken || data != sharded->grad_data;
    }
    Py_DECREF(grad);
    return touched;
}

/* Appends (gradient, copy) of each touched gradient to the list. The gradients are the unit's own tensors. */
static int
keep_touched(fsdpc_py_flat *flat, PyObject *list)
{
    for (int i = 0; i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        int touched = sharded->grad && !flat->shown ? was_touched(flat, sharded) : 0;
        if (touched < 0) {
            return -1;
        }
        sharded->touched = touched > 0;
    }
    flat->backward.prepared = false;
    int result = fsdpc_py_prepare_grads(flat);
    for (int i = 0; result == 0 && i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        if (sharded->touched) {
            PyObject *copy = PyObject_CallMethod(sharded->grad, "clone", NULL);
            PyObject *pair = copy ? PyTuple_Pack(2, sharded->grad, copy) : NULL;
            result = pair ? PyList_Append(list, pair) : -1;
            Py_XDECREF(pair);
            Py_XDECREF(copy);
        }
        sharded->broken = -1;
    }
    return result;
}

static int
give_back_touched(PyObject *list)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *pair = PyList_GET_ITEM(list, i);
        PyObject *done =
            PyObject_CallMethod(PyTuple_GET_ITEM(pair, 0), "copy_", "O", PyTuple_GET_ITEM(pair, 1));
        if (!done) {
            return -1;
        }
        Py_DECREF(done);
    }
    return 0;
}

static int
put_away(fsdpc_py_tree *tree, PyObject *touched)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_drop_held(tree->units[i]);
        /* A forward in which autograd.grad has failed goes on, so its modules keep the gathered tensors. */
        bool runs = fsdpc_tree_is_running(tree->tree, i);
        if ((runs ? fsdpc_py_end_hold(tree->units[i]) : fsdpc_py_uninstall_all(tree->units[i])) <
                0 ||
            fsdpc_py_clear_full_grads(tree->units[i], true) < 0 ||
            keep_touched(tree->units[i], touched) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Swaps the units' current no_sync flags with those that they had when the broken backward began. */
static void
swap_sync_flags(fsdpc_py_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        bool now = fsdpc_unit_withholds(flat->unit);
        fsdpc_unit_set_withholds(flat->unit, flat->withheld);
        flat->withheld = now;
    }
}

int
fsdpc_py_clear_broken_backward(fsdpc_py_tree *tree)
{
    PyObject *touched = PyList_New(0);
    int result = -1, status;
    swap_sync_flags(tree);
    if (!touched || put_away(tree, touched) < 0) {
        goto done;
    }
    status = FSDPC_PY_UNLOCKED(
        fsdpc_tree_end_backward(tree->tree, tree->backward.kind == FSDPC_BACKWARD_SUMS));
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_forget_backward(tree->units[i]);
        fsdpc_unit_clear_used(tree->units[i]->unit);
    }
    if (fsdpc_py_checked(status) == 0 && give_back_touched(touched) == 0) {
        result = fsdpc_py_mark_all(tree);
    }
done:
    swap_sync_flags(tree);
    Py_XDECREF(touched);
    return result;
}
