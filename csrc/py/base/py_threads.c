/* How many threads the CPU device's kernels use. */
#include "py/base/py_cuda.h"

static PyObject *
set_num_threads(PyObject *module, PyObject *argument)
{
    fsdpc_device *device;
    const long threads = PyLong_AsLong(argument);
    (void)module;
    if (threads == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int status = fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        status = fsdpc_device_set_threads(device, threads > 1000 ? 1000 : (int)threads);
    }
    return status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
}

static PyObject *
get_num_threads(PyObject *module, PyObject *ignored)
{
    fsdpc_device *device;
    (void)module;
    (void)ignored;
    int status = fsdpc_device_cpu(&device);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return PyLong_FromLong(fsdpc_device_threads(device));
}

PyMethodDef fsdpc_py_thread_methods[] = {
    {"set_num_threads", set_num_threads, METH_O,
     "set_num_threads(threads, /)\n--\n\nSets how many threads big kernels of this process use."},
    {"get_num_threads", get_num_threads, METH_NOARGS,
     "get_num_threads()\n--\n\nReturns how many threads big kernels of this process use."},
    {NULL, NULL, 0, NULL},
};
