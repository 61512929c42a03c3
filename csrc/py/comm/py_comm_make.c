/* The class methods Comm.self_(), for one rank, and Comm.shm() and Comm.c10d(), for several ranks that
 * exchange host memory; the methods set_hosts() and set_numbers(). */
#include "base/mem.h"
#include "py/base/py_cuda.h"
#include "py/comm/py_comm_impl.h"

/* Returns a Comm over `comm` if `status` is FSDPC_OK, else raises the exception for `status`. */
static PyObject *
made(PyObject *type, int status, fsdpc_comm *comm, PyObject *callbacks)
{
    return status == FSDPC_OK ? fsdpc_py_comm_wrap(type, comm, callbacks) : fsdpc_py_raise(status);
}

/* Finds the device with this number; None stands for the CPU. Returns 0, or -1 with an exception. */
static int
find_device(PyObject *number, fsdpc_device **out)
{
    if (number != Py_None) {
        return fsdpc_py_find_gpu(number, out);
    }
    const int status = fsdpc_device_cpu(out);
    return fsdpc_py_checked(status);
}

PyObject *
fsdpc_py_comm_self_(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    PyObject *number = Py_None;
    fsdpc_device *device = NULL;
    fsdpc_comm *comm = NULL;
    const fsdpc_py_arg table[] = {
        {"device", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &number},
    };
    if (fsdpc_py_args("self_", table, 1, values, count, keywords) < 0 ||
        find_device(number, &device) < 0) {
        return NULL;
    }
    int status = fsdpc_comm_self(device, &comm);
    return made(type, status, comm, NULL);
}

PyObject *
fsdpc_py_comm_shm(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    int32_t rank = 0;
    int32_t world = 0;
    const char *name = NULL;
    double timeout = 0.0;
    const fsdpc_py_arg table[] = {
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &rank},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"name", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &name},
        {"timeout", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &timeout},
    };
    if (fsdpc_py_args("shm", table, 4, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm *comm = NULL;
    fsdpc_device *device = NULL;
    int status = fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        status = FSDPC_PY_UNLOCKED(fsdpc_comm_shm(device, rank, world, name, timeout, &comm));
    }
    return made(type, status, comm, NULL);
}

PyObject *
fsdpc_py_comm_c10d(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    int32_t rank = 0;
    int32_t world = 0;
    PyObject *object = NULL;
    const fsdpc_py_arg table[] = {
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &rank},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"callbacks", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
    };
    if (fsdpc_py_args("c10d", table, 3, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm_callbacks callbacks;
    if (fsdpc_py_c10d_callbacks(object, world, &callbacks) < 0) {
        return NULL;
    }
    fsdpc_comm *comm = NULL;
    fsdpc_device *device = NULL;
    int status = fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        status = fsdpc_comm_c10d(device, rank, world, &callbacks, &comm);
    }
    if (status != FSDPC_OK) {
        callbacks.release(callbacks.context);
    }
    return made(type, status, comm, object);
}

/* Reads one number per rank. Returns an array that the caller frees, or NULL with an exception. */
static int *
read_hosts(PyObject *list, int world)
{
    PyObject *items = PySequence_Fast(list, "set_hosts: hosts must be a sequence of numbers");
    int *hosts = items != NULL ? fsdpc_mem_calloc((size_t)world, sizeof *hosts) : NULL;
    if (items != NULL && hosts == NULL) {
        PyErr_NoMemory();
    } else if (items != NULL && PySequence_Fast_GET_SIZE(items) != world) {
        PyErr_Format(PyExc_ValueError, "set_hosts: %zd hosts for %d ranks",
                     PySequence_Fast_GET_SIZE(items), world);
    }
    for (int r = 0; r < world && !PyErr_Occurred(); r++) {
        hosts[r] = (int)PyLong_AsLong(PySequence_Fast_GET_ITEM(items, r));
    }
    Py_XDECREF(items);
    if (PyErr_Occurred()) {
        fsdpc_mem_free(hosts);
        return NULL;
    }
    return hosts;
}

PyObject *
fsdpc_py_comm_set_hosts(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *keywords)
{
    PyObject *list = NULL;
    const char *name = NULL;
    double timeout = 0.0;
    fsdpc_comm *comm;
    const fsdpc_py_arg table[] = {
        {"hosts", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"name", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &name},
        {"timeout", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &timeout},
    };
    if (fsdpc_py_args("set_hosts", table, 3, values, count, keywords) < 0 ||
        fsdpc_py_comm_get(self, &comm) < 0) {
        return NULL;
    }
    int *hosts = read_hosts(list, fsdpc_comm_world(comm));
    if (hosts == NULL) {
        return NULL;
    }
    const int status = FSDPC_PY_UNLOCKED(fsdpc_comm_set_hosts(comm, hosts, name, timeout));
    fsdpc_mem_free(hosts);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

PyObject *
fsdpc_py_comm_set_numbers(PyObject *self, PyObject *text)
{
    fsdpc_comm *comm;
    const char *numbers = PyUnicode_AsUTF8(text);
    if (numbers == NULL || fsdpc_py_comm_get(self, &comm) < 0) {
        return NULL;
    }
    return fsdpc_py_none_or(fsdpc_comm_set_numbers(comm, numbers));
}
