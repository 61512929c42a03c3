/* Comm.staged(): the same ranks' communicator for a GPU's memory. It keeps the Comm that carries it. */
#include <limits.h>

#include "py_comm.h"

static void
release(void *context)
{
    if (fsdpc_py_finalizing()) {
        return; /* leaked on purpose: nothing may be called any more */
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)context);
    PyGILState_Release(gil);
}

static int
find_gpu(long ordinal, fsdpc_device **out)
{
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_device_cuda(ordinal < 0 || ordinal > INT_MAX ? -1 : (int)ordinal, out);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

PyObject *
fsdpc_py_comm_staged(PyObject *self, PyObject *device)
{
    fsdpc_comm *inner, *comm = NULL;
    fsdpc_device *gpu = NULL;
    const long ordinal = PyLong_AsLong(device);
    if ((ordinal == -1 && PyErr_Occurred()) || fsdpc_py_comm_get(self, &inner) < 0 ||
        find_gpu(ordinal, &gpu) < 0) {
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
