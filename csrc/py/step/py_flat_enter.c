/* enter_forward() and leave_forward(): take and drop a reference to the gathered values without a module's
 * forward, for callers that gather several units before they use them.
 */
#include "py/step/py_step.h"

/* Returns None, or NULL with an exception if `status` is an error or fsdpc_py_mark fails. */
static PyObject *
finish(fsdpc_py_flat *self, int status)
{
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return fsdpc_py_mark(self) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
fsdpc_py_flat_enter_forward(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    if (!self->tree) {
        return fsdpc_py_raise(
            fsdpc_error(FSDPC_E_STATE, "unit %s belongs to no tree", fsdpc_unit_name(self->unit)));
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    fsdpc_tree *tree = self->tree->tree;
    int status = FSDPC_PY_UNLOCKED(fsdpc_tree_forward_enter(tree, self->id));
    return finish(self, status);
}

PyObject *
fsdpc_py_flat_leave_forward(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    int status = FSDPC_OK;
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    if (self->tree) {
        status = fsdpc_tree_forward_leave(self->tree->tree, self->id, false);
    }
    return finish(self, status);
}
