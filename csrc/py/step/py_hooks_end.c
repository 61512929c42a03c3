/* The end of a backward: finishes units with partial gradients, ends the backward on all ranks, and shows the
 * gradients to the optimizer and the user's hooks.
 */
#include "py/step/py_hooks_impl.h"

/* Finishes the units that are not done yet: all, or only some, of their gradients have arrived. */
static int
finish_partial_units(fsdpc_py_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        if (flat->backward.complete) {
            flat->incomplete = false;
            if (fsdpc_py_finish_unit(flat) < 0) {
                return -1;
            }
            continue;
        }
        if (fsdpc_py_find_unwatched(flat) < 0) {
            return -1;
        }
        /* A unit whose graph the backward has left or passed stays incomplete: its inputs stay watched. */
        flat->incomplete = flat->backward.arrived_count > 0 ||
                           (flat->incomplete && flat->closed == tree->backward.number);
        if ((flat->backward.arrived_count > 0 && fsdpc_py_finish_unit(flat) < 0) ||
            fsdpc_py_end_hold(flat) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Shows all gradients in .grad of the optimizer's parameters, then calls the listeners. */
static int
show_all_grads(fsdpc_py_tree *tree)
{
    PyObject *listened = NULL;
    int result = 0;
    for (int i = 0; result == 0 && i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        bool sync = !fsdpc_unit_withholds(flat->unit);
        if (fsdpc_py_show_grads(flat, sync, &listened) < 0) {
            result = -1;
            break;
        }
        fsdpc_py_forget_backward(flat);
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
    bool sync = tree->backward.kind != FSDPC_BACKWARD_LOCAL && fsdpc_py_any_sync(tree);
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
    if (!tree->backward.twice) {
        fsdpc_tree_forget_kept(tree->tree);
    }
    status = FSDPC_PY_UNLOCKED(fsdpc_tree_end_backward(tree->tree, sync));
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark_all(tree) < 0) {
        return -1;
    }
    if (sync && fsdpc_py_step_late(tree) < 0) {
        return -1;
    }
    return show_all_grads(tree) < 0 ? -1 : sync ? fsdpc_py_step_rest(tree) : 0;
}
