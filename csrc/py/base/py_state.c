/* The base of the Python layer: the module state, the types that the state owns, and callbacks into
 * Python from the middle of a core call.
 */
#include "py/base/py.h"

static fsdpc_py_module_state *current_state;

/* How many calls from the core into Python are in progress in this thread. They may be nested. */
static _Thread_local int in_core;

/* --- module state ---------------------------------------------------------------------------- */

fsdpc_py_module_state *
fsdpc_py_state(PyObject *module)
{
    return PyModule_GetState(module);
}

fsdpc_py_module_state *
fsdpc_py_current(void)
{
    return current_state;
}

void
fsdpc_py_set_current(fsdpc_py_module_state *state)
{
    current_state = state;
}

bool
fsdpc_py_finalizing(void)
{
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsInitialized() || Py_IsFinalizing();
#else
    return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

int
fsdpc_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) {
        return -1;
    }
    *slot = (PyTypeObject *)type;
    return PyModule_AddType(module, *slot);
}

/* --- callbacks ------------------------------------------------------------------------------- */

void
fsdpc_py_core_calls_python(int more)
{
    in_core += more;
}

bool
fsdpc_py_is_in_core(void)
{
    return in_core > 0;
}

int
fsdpc_py_callback_enter(fsdpc_py_entered *self)
{
    if (fsdpc_py_finalizing()) {
        return fsdpc_error(FSDPC_E_STATE, "the interpreter is shutting down");
    }
    self->gil = PyGILState_Ensure();
    fsdpc_py_core_calls_python(1);
    PyErr_Fetch(&self->type, &self->value, &self->trace);
    return FSDPC_OK;
}

int
fsdpc_py_callback_leave(fsdpc_py_entered *self, int status)
{
    if (self->type != NULL) {
        PyErr_Restore(self->type, self->value, self->trace);
    }
    fsdpc_py_core_calls_python(-1);
    PyGILState_Release(self->gil);
    return status;
}
