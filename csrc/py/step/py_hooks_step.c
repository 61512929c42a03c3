/* An optimizer that steps in backward: each unit is stepped as soon as its gradients are summed over all
 * ranks.
 *
 * On shared memory the sum is complete when every rank has posted the unit. Then no rank needs the unit's
 * values, and a rank that uses them again in the same backward gets an error from the tree. A unit that some
 * rank did not run, or that has replicas or a communication hook, is stepped at the end of backward.
 *
 * On a GPU a step is queued on the caller's stream, after the stream's wait for the unit's sum. In a group of
 * one rank, the step is queued at once; in others, just before another unit takes the same reduce slot.
 * The last units step at the end of backward. So does a unit if this rank left some parameters of it unused.
 *
 * On a GPU the units' gradients share memory (grad_slots.h): a unit takes a slot before it is sent, and gives
 * the slot back when its step is queued.
 *
 * On a GPU with values in host memory the units are stepped at the end, when the host has queued all of
 * backward. Each unit steps as soon as its sum is complete, while the GPU computes the other units' sums. */
#include "py/step/py_hooks_impl.h"

/* Steps the unit. Discards its gradients unless tree->step_unit returns true or the program holds them. */
static int
step_unit(fsdpc_py_tree *tree, int unit)
{
    PyObject *result = PyObject_CallFunction(tree->step_unit, "i", unit);
    fsdpc_py_flat *flat = tree->units[unit];
    int viewed = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    if (viewed < 0) {
        return -1;
    }
    bool kept = viewed || fsdpc_py_keeps_grads(flat);
    return kept ? 0 : fsdpc_py_checked(fsdpc_unit_discard_grads(flat->unit));
}

static int
show_and_step(fsdpc_py_tree *tree, int unit)
{
    fsdpc_py_flat *flat = tree->units[unit];
    PyObject *listened = NULL;
    int result = fsdpc_py_show_grads(flat, true, &listened);
    if (result == 0 && flat->after_backward) {
        result = fsdpc_py_call(flat->after_backward);
    }
    if (result == 0) {
        result = fsdpc_py_call_listeners(tree, listened);
    }
    Py_XDECREF(listened);
    if (result < 0 || step_unit(tree, unit) < 0) {
        return -1;
    }
    return fsdpc_py_enter(flat); /* hooks and the step may have used another stream or GPU */
}

int
fsdpc_py_step_summed(fsdpc_py_tree *tree)
{
    while (tree->step_unit && tree->tree) {
        int unit;
        if (fsdpc_py_checked(fsdpc_tree_next_summed(tree->tree, &unit)) < 0) {
            return -1;
        }
        if (unit < 0) {
            return 0;
        }
        if (show_and_step(tree, unit) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_step_before(fsdpc_py_tree *tree, int unit)
{
    return fsdpc_py_checked(fsdpc_tree_make_room(tree->tree, unit)) < 0
               ? -1
               : fsdpc_py_step_summed(tree);
}

int
fsdpc_py_step_late(fsdpc_py_tree *tree)
{
    while (tree->step_unit && tree->tree) {
        int unit, status;
        status = FSDPC_PY_UNLOCKED(fsdpc_tree_next_late(tree->tree, &unit));
        if (fsdpc_py_checked(status) < 0) {
            return -1;
        }
        if (unit < 0) {
            return 0;
        }
        if (!fsdpc_unit_withholds(tree->units[unit]->unit) && show_and_step(tree, unit) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_step_rest(fsdpc_py_tree *tree)
{
    for (int i = 0; tree->step_unit && tree->tree && i < tree->count; i++) {
        bool left =
            !fsdpc_tree_was_taken(tree->tree, i) && !fsdpc_unit_withholds(tree->units[i]->unit);
        if (left && step_unit(tree, i) < 0) {
            return -1;
        }
    }
    return 0;
}
