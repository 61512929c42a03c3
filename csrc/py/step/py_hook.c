/* Functions that make hooks, and helpers for all kinds of hooks. The type Hook and its call function are in
 * py_hooks.c, which stores the function's address in the module state.
 */
#include "py/step/py_hooks_impl.h"

PyObject *
fsdpc_py_hook_new(enum fsdpc_py_hook_kind kind, PyObject *owner, int param)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    PyTypeObject *type = state->hook_type;
    fsdpc_py_hook *self = (fsdpc_py_hook *)type->tp_alloc(type, 0);
    if (self) {
        self->call = state->hook_call;
        self->kind = kind;
        self->param = param;
        self->owner = Py_NewRef(owner);
    }
    return (PyObject *)self;
}

PyObject *
fsdpc_py_companion(fsdpc_py_hook *self, enum fsdpc_py_hook_kind kind)
{
    if (!self->again) {
        self->again = fsdpc_py_hook_new(kind, self->owner, -1);
    }
    return self->again;
}

int
fsdpc_py_call_truth(PyObject *function)
{
    PyObject *result = PyObject_CallNoArgs(function);
    if (!result) {
        return -1;
    }
    int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}
