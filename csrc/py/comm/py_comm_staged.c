/* Comm.staged(): makes a Comm of the same ranks for GPU memory. The new Comm keeps the old one alive. */
#include "py/base/py_cuda.h"
#include "py/comm/py_comm_impl.h"

static void
release(void *context)
{
    if (fsdpc_py_finalizing()) {
        return; /* a deliberate leak: Python may not be called while the interpreter ends */
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)context);
    PyGILState_Release(gil);
}

PyObject *
fsdpc_py_comm_staged(PyObject *self, PyObject *device)
{
    fsdpc_comm *inner, *comm = NULL;
    fsdpc_device *gpu = NULL;
    if (fsdpc_py_comm_get(self, &inner) < 0 || fsdpc_py_find_gpu(device, &gpu) < 0) {
        return NULL;
    }
    Py_INCREF(self);
    const int status = fsdpc_comm_staged(gpu, inner, release, self, &comm);
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return fsdpc_py_comm_wrap((PyObject *)Py_TYPE(self), comm, self);
}
