/* Wraps a communicator in a Comm object, and gets the communicator of a Comm. The type is in py_comm.c. */
#include "py/comm/py_comm_impl.h"

int
fsdpc_py_comm_get(PyObject *object, fsdpc_comm **out)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    if (state == NULL || !Py_IS_TYPE(object, state->comm_type)) {
        PyErr_Format(PyExc_TypeError, "expected a fsdpc._C.Comm, not %.100s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    if (self->closed) {
        fsdpc_py_raise(fsdpc_error(FSDPC_E_STATE, "the communicator is closed"));
        return -1;
    }
    *out = self->comm;
    return 0;
}

PyObject *
fsdpc_py_comm_wrap(PyObject *type, fsdpc_comm *comm, PyObject *callbacks)
{
    PyTypeObject *comm_type = (PyTypeObject *)type;
    fsdpc_py_comm *self = (fsdpc_py_comm *)comm_type->tp_alloc(comm_type, 0);
    if (self == NULL) {
        fsdpc_comm_free(comm);
        return NULL;
    }
    self->comm = comm;
    self->callbacks = callbacks;
    return (PyObject *)self;
}
