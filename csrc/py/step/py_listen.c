/* Listeners: hooks that the user put on the parameters that the optimizer sees, and optimizers that are to
 * step in backward (torch.distributed.optim._apply_optimizer_in_backward).
 *
 * Such a parameter is in no autograd graph, so autograd never calls its hooks. The end of backward collects
 * the parameters that got a gradient and have listeners. Python calls the listeners when all units are done
 * (fsdpc/_engine/listeners.py), because slower ranks may still gather this rank's values for their backward.
 * With step_unit, each unit's listeners are called before the unit's step (py_hooks_step.c).
 */
#include "py/step/py_step.h"

/* Returns a number that is new after each change of the dictionary; 0 if this Python has no such number. */
static uint64_t
state_of(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
}

/* Returns whether the parameter's __dict__ has backward optimizers. The look-up of a missing key raises no
 * exception, unlike that of a missing attribute. The dictionary is searched only if it has changed. */
static int
has_optimizers(fsdpc_py_sharded *sharded)
{
    PyObject **dict = _PyObject_GetDictPtr(sharded->param);
    if (!dict || !*dict) {
        return 0;
    }
    uint64_t state = state_of(*dict);
    if (state != 0 && state == sharded->without_optimizers) {
        return 0;
    }
    int has = PyDict_Contains(*dict, fsdpc_py_name.backward_optimizers);
    sharded->without_optimizers = has == 0 ? state : 0;
    return has;
}

static int
has_listeners(fsdpc_py_sharded *sharded)
{
    int own = has_optimizers(sharded);
    if (own != 0) {
        return own;
    }
    PyObject *hooks = fsdpc_py_field(sharded->param, FSDPC_PY_ACCUMULATED_HOOKS);
    int some = hooks ? PyObject_IsTrue(hooks) : -1;
    Py_XDECREF(hooks);
    return some;
}

int
fsdpc_py_note_listeners(fsdpc_py_sharded *sharded, PyObject **list)
{
    int some = has_listeners(sharded);
    if (some <= 0) {
        return some;
    }
    if (!*list) {
        *list = PyList_New(0);
    }
    return *list && PyList_Append(*list, sharded->param) == 0 ? 1 : -1;
}

int
fsdpc_py_call_listeners(fsdpc_py_tree *tree, PyObject *list)
{
    PyObject *result =
        list && tree->listeners ? PyObject_CallOneArg(tree->listeners, list) : Py_NewRef(Py_None);
    Py_XDECREF(result);
    return result ? 0 : -1;
}
