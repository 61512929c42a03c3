/* Hooks that the user put on the parameters that the optimizer sees, and optimizers that are to step
 * in backward (torch.distributed.optim._apply_optimizer_in_backward).
 *
 * Such a parameter takes part in no graph, so autograd never calls what hangs on it. The end of
 * backward collects the parameters that got a gradient and have listeners; torch's side calls them
 * when all units are done (fsdpc/_listeners.py). Not earlier: ranks that are behind may still
 * gather this rank's values for their backward.
 */
#include "py_engine.h"
#include "unit_impl.h"

/* A key of the instance's own dictionary; unlike an attribute, its absence costs no exception. */
static int
has_own(PyObject *object, PyObject *key)
{
    PyObject **dict = _PyObject_GetDictPtr(object);
    return dict && *dict ? PyDict_Contains(*dict, key) : 0;
}

static int
has_listeners(PyObject *param)
{
    int own = has_own(param, fsdpc_py_name.backward_optimizers);
    if (own != 0) {
        return own;
    }
    PyObject *hooks = PyObject_GetAttr(param, fsdpc_py_name.accumulated);
    int some = hooks ? PyObject_IsTrue(hooks) : -1;
    Py_XDECREF(hooks);
    return some;
}

static bool
got_gradient(const fsdpc_py_seen *seen, const uint8_t *used)
{
    for (int c = 0; seen->grad && c < seen->cover_count; c++) {
        if (used[seen->covers[c]]) {
            return true;
        }
    }
    return false;
}

int
fsdpc_py_collect_listeners(fsdpc_py_flat *flat, PyObject **list)
{
    for (int i = 0; i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        int some = got_gradient(seen, flat->unit->used) ? has_listeners(seen->param) : 0;
        if (some > 0 && !*list) {
            *list = PyList_New(0);
        }
        if (some < 0 || (some > 0 && (!*list || PyList_Append(*list, seen->param) < 0))) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_call_listeners(fsdpc_py_tree *tree, PyObject *list)
{
    PyObject *result =
        list && tree->listeners ? PyObject_CallOneArg(tree->listeners, list) : Py_NewRef(Py_None);
    Py_XDECREF(result);
    return result ? 0 : -1;
}
