/* The end of a backward: units with partial gradients, the ranks' common end, what the optimizer and
 * the user's hooks see. And of one that broke off.
 */
#include "py/step/py_hooks_impl.h"

#include <string.h>

static void
forget_backward(fsdpc_py_flat *flat)
{
    memset(flat->arrived, 0, (size_t)fsdpc_unit_layout(flat->unit)->param_count);
    flat->arrived_count = flat->open_calls = 0;
    flat->prepared = flat->entered = flat->complete = flat->unseen = false;
}

/* --- a backward that broke off --------------------------------------------------------------- */

/* [Note: touched gradients] When a backward has broken off, a unit's gradients of some ranks may lie
 * in reduce slots. They are summed when the peers are here for it, at the next pass at the latest, into
 * the shard gradient, which holds then what an unsharded model's would: part of the failed backward. But
 * a user who has cleared or changed .grad in place since must find it as it was left. So the versions of
 * these tensors are noted when the backward breaks off, and what has another one by then, or was
 * not looked at, gets its values back afterwards. */

static int
look_at_broken(fsdpc_py_flat *flat)
{
    for (int i = 0; i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        seen->broken = seen->grad ? fsdpc_py_grad_version(seen) : -1;
        if (seen->grad && seen->broken < 0) {
            return -1;
        }
    }
    /* What waits of it (no_sync) goes when the user clears what stands for it. */
    return flat->unit->local_any && !flat->shown ? fsdpc_py_note_waiting(flat) : 0;
}

int
fsdpc_py_drop_half_made(fsdpc_py_flat *flat)
{
    fsdpc_py_drop_held(flat);
    return fsdpc_py_end_hold(flat) < 0 || fsdpc_py_clear_full_grads(flat, true) < 0
               ? -1
               : look_at_broken(flat);
}

/* 1: the user has done something to the gradient since; -1 with an exception. */
static int
was_touched(const fsdpc_py_seen *seen)
{
    PyObject *grad = PyObject_GetAttr(seen->param, fsdpc_py_name.grad);
    if (!grad) {
        return -1;
    }
    int touched = grad != Py_None;
    if (touched && grad == seen->grad && seen->broken >= 0) {
        const void *data;
        long version = fsdpc_py_grad_version(seen);
        touched = version < 0 || fsdpc_py_torch_data(grad, &data) < 0
                      ? -1
                      : version != seen->broken || data != seen->grad_data;
    }
    Py_DECREF(grad);
    return touched;
}

/* Adds (gradient, copy) of those to the list. They are all the unit's own tensors afterwards. */
static int
keep_touched(fsdpc_py_flat *flat, PyObject *list)
{
    for (int i = 0; i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        int touched = seen->grad && !flat->shown ? was_touched(seen) : 0;
        if (touched < 0) {
            return -1;
        }
        seen->touched = touched > 0;
    }
    flat->prepared = false;
    int result = fsdpc_py_prepare_grads(flat);
    for (int i = 0; result == 0 && i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        if (seen->touched) {
            PyObject *copy = PyObject_CallMethod(seen->grad, "clone", NULL);
            PyObject *pair = copy ? PyTuple_Pack(2, seen->grad, copy) : NULL;
            result = pair ? PyList_Append(list, pair) : -1;
            Py_XDECREF(pair);
            Py_XDECREF(copy);
        }
        seen->broken = -1;
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
        /* A forward around a broken autograd.grad goes on with what its modules show. */
        bool runs = tree->tree->nodes[i].running > 0;
        if ((runs ? fsdpc_py_end_hold(tree->units[i]) : fsdpc_py_uninstall_all(tree->units[i])) <
                0 ||
            fsdpc_py_clear_full_grads(tree->units[i], true) < 0 ||
            keep_touched(tree->units[i], touched) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_clear_broken_backward(fsdpc_py_tree *tree)
{
    PyObject *touched = PyList_New(0);
    int result = -1, status;
    if (!touched || put_away(tree, touched) < 0) {
        goto done;
    }
    FSDPC_PY_CORE(status, fsdpc_tree_end_backward(tree->tree, tree->sums));
    for (int i = 0; i < tree->count; i++) {
        forget_backward(tree->units[i]);
        memset(tree->units[i]->unit->used, 0,
               (size_t)fsdpc_unit_layout(tree->units[i]->unit)->param_count);
    }
    if (fsdpc_py_checked(status) == 0 && give_back_touched(touched) == 0) {
        result = fsdpc_py_mark_all(tree);
    }
done:
    Py_XDECREF(touched);
    return result;
}

/* --- the end --------------------------------------------------------------------------------- */

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
        return fsdpc_py_not_gathered(flat, 0);
    }
    flat->arrived_count = 1;
    return fsdpc_py_watch_all(flat);
}

/* Units that ran with some parameters unused. */
static int
finish_partial_units(fsdpc_py_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        if (flat->complete) {
            flat->incomplete = false;
            if (fsdpc_py_finish_unit(flat) < 0) {
                return -1;
            }
            continue;
        }
        if (find_unwatched(flat) < 0) {
            return -1;
        }
        flat->incomplete = flat->arrived_count > 0;
        if ((flat->arrived_count > 0 && fsdpc_py_finish_unit(flat) < 0) ||
            fsdpc_py_end_hold(flat) < 0) {
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
        if (fsdpc_py_show_grads(flat, sync, &listened) < 0) {
            result = -1;
            break;
        }
        forget_backward(flat);
        result = flat->after_backward ? fsdpc_py_call(flat->after_backward) : 0;
    }
    if (result == 0) {
        result = fsdpc_py_call_listeners(tree, listened);
    }
    Py_XDECREF(listened);
    return result;
}

int
fsdpc_py_end_backward(fsdpc_py_tree *tree)
{
    if (!tree->tree) {
        return 0; /* closed meanwhile */
    }
    bool sync = tree->count == 0 || tree->units[0]->sync;
    int status;
    if (finish_partial_units(tree) < 0 || (sync && fsdpc_py_send_what_is_due(tree, true) < 0)) {
        return -1;
    }
    for (int i = 0; sync && i < tree->count; i++) {
        if (fsdpc_py_prepare_grads(tree->units[i]) < 0) {
            return -1;
        }
    }
    if (sync && tree->before_end && fsdpc_py_call(tree->before_end) < 0) {
        return -1;
    }
    if (!tree->twice) {
        fsdpc_tree_forget_kept(tree->tree);
    }
    FSDPC_PY_CORE(status, fsdpc_tree_end_backward(tree->tree, sync));
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark_all(tree) < 0) {
        return -1;
    }
    return show_all_grads(tree, sync);
}
