/* Functions about the CPU device's kernels: their number of threads, and the available instruction sets. */
#include "py/base/py_cuda.h"

static PyObject *
set_num_threads(PyObject *Py_UNUSED(module), PyObject *argument)
{
    fsdpc_device *device;
    const long threads = PyLong_AsLong(argument);
    if (threads == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int status = fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        status = fsdpc_device_set_threads(device, threads > 1000 ? 1000 : (int)threads);
    }
    return fsdpc_py_none_or(status);
}

static PyObject *
get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    fsdpc_device *device;
    int status = fsdpc_device_cpu(&device);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return PyLong_FromLong(fsdpc_device_threads(device));
}

static PyObject *
kernel_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    static const char *const names[] = {"plain", "avx2", "avx512"};
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < 3; i++) {
        const fsdpc_kernels *table;
        if (fsdpc_kernels_by_name(names[i], &table) != FSDPC_OK) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(table->name);
        if (name == NULL || PyList_Append(list, name) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(name);
    }
    fsdpc_error_clear();
    return list;
}

PyMethodDef fsdpc_py_thread_methods[] = {
    FSDPC_PY_FUNCTION(set_num_threads, METH_O, "(threads, /)",
                      "Sets how many threads big kernels of this process use."),
    FSDPC_PY_FUNCTION(get_num_threads, METH_NOARGS, "()",
                      "Returns how many threads big kernels of this process use."),
    FSDPC_PY_FUNCTION(
        kernel_names, METH_NOARGS, "()",
        "Returns the names of the instruction sets that this processor's kernels have."),
    {NULL, NULL, 0, NULL},
};
