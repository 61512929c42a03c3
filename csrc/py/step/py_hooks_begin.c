/* The beginning of a backward.
 *
 * [Note: gradients inside a forward] A forward may compute gradients (forces as gradients of an energy) by a
 * backward that begins inside the forward and computes no parameter's gradient. Such a backward is a part of
 * the forward. Its end does not synchronise the ranks. Ranks that skip the module do not run this backward,
 * so they would synchronise at the end of another backward.
 */
#include "py/step/py_hooks_impl.h"

int
fsdpc_py_graph_task(const fsdpc_py_tree *tree, long *id)
{
    *id = -1;
    PyObject *number = tree->graph_task ? PyObject_CallNoArgs(tree->graph_task) : NULL;
    if (!number) {
        return tree->graph_task ? -1 : 0;
    }
    *id = PyLong_AsLong(number);
    Py_DECREF(number);
    return *id == -1 && PyErr_Occurred() ? -1 : 0;
}

bool
fsdpc_py_in_backward(const fsdpc_py_tree *tree)
{
    return fsdpc_tree_in_backward(tree->tree) && tree->backward.end_pending;
}

/* Queues the end hook. torch owns the hook until the hook has run or the backward has failed. */
static int
queue_end(fsdpc_py_tree *tree)
{
    PyObject *end = fsdpc_py_hook_new(FSDPC_HOOK_END, (PyObject *)tree, -1);
    PyObject *result = end ? PyObject_CallOneArg(tree->queue_callback, end) : NULL;
    tree->backward.end_pending = result ? end : NULL;
    Py_XDECREF(result);
    Py_XDECREF(end);
    return result ? 0 : -1;
}

bool
fsdpc_py_any_sync(const fsdpc_py_tree *tree)
{
    bool some = false;
    for (int i = 0; i < tree->count; i++) {
        const fsdpc_py_flat *flat = tree->units[i];
        if (fsdpc_unit_layout(flat->unit)->param_count > 0) {
            some = true;
            if (!fsdpc_unit_withholds(flat->unit)) {
                return true;
            }
        }
    }
    return !some;
}

/* Returns 1 if this backward is a part of a forward ([Note: gradients inside a forward]), else 0, or -1. */
static int
is_part_of_forward(const fsdpc_py_tree *tree)
{
    if (tree->forward_depth == 0 || !tree->makes_grads) {
        return 0;
    }
    PyObject *params = PyList_New(0);
    int result = params ? 0 : -1;
    for (int u = 0; result == 0 && u < tree->count; u++) {
        const fsdpc_py_flat *flat = tree->units[u];
        for (int i = 0; result == 0 && i < fsdpc_unit_layout(flat->unit)->param_count; i++) {
            result = flat->full[i] ? PyList_Append(params, flat->full[i]) : 0;
        }
    }
    PyObject *makes = result == 0 ? PyObject_CallOneArg(tree->makes_grads, params) : NULL;
    result = makes ? makes == Py_False : -1;
    Py_XDECREF(makes);
    Py_XDECREF(params);
    return result;
}

int
fsdpc_py_begin_backward(fsdpc_py_tree *tree)
{
    if (fsdpc_tree_in_backward(tree->tree)) {
        if (tree->backward.end_pending) {
            return 0;
        }
        if (fsdpc_py_clear_broken_backward(tree) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < tree->count; i++) {
        tree->units[i]->backward.open_calls = 0;
        tree->units[i]->backward.unwatched = false;
        tree->units[i]->withheld = fsdpc_unit_withholds(tree->units[i]->unit);
        if (fsdpc_py_sync_flags(tree->units[i]) < 0 ||
            fsdpc_py_detect_step(tree->units[i], false) < 0) {
            return -1;
        }
    }
    int local = is_part_of_forward(tree);
    int keeps = local < 0 ? -1 : fsdpc_py_call_truth(tree->keeps_graph);
    if (keeps < 0) {
        return -1;
    }
    for (int i = 0; !local && !keeps && i < tree->count; i++) {
        tree->units[i]->graphs = 0;
        tree->units[i]->era++;
    }
    tree->backward.number++;
    tree->backward.entered = tree->backward.lingers = -1;
    tree->backward.twice = false;
    tree->backward.kind = local                     ? FSDPC_BACKWARD_LOCAL
                          : fsdpc_py_any_sync(tree) ? FSDPC_BACKWARD_SUMS
                                                    : FSDPC_BACKWARD_KEEPS;
    int status = FSDPC_PY_UNLOCKED(fsdpc_tree_begin_backward(tree->tree));
    return fsdpc_py_checked(status) < 0 ? -1 : queue_end(tree);
}
