/* places() returns bytes that say where tensors lie; at_places() compares tensors with such bytes. The bytes
 * hold each object's address, and the address, dtype, shape and strides of its memory on this rank. A program
 * may give any tensor other memory between two steps. So a step checks all its tensors. This must be fast.
 */
#include <string.h>

#include "py/unit/py_flat.h"

enum { WORDS = 4 + 2 * FSDPC_PY_MAX_DIMS };

/* Describes a tensor or None. Returns the number of words, -1 with an exception. */
static int
describe(PyObject *object, uint64_t words[WORDS])
{
    fsdpc_py_view view;
    if (object == Py_None) {
        words[0] = 0;
        return 1;
    }
    PyObject *local = fsdpc_py_any_local(object);
    int result = local ? fsdpc_py_torch_view(local, &view) : -1;
    Py_XDECREF(local);
    if (result < 0) {
        return -1;
    }
    words[0] = (uint64_t)(uintptr_t)object;
    words[1] = (uint64_t)(uintptr_t)view.data;
    words[2] = (uint64_t)view.dtype << 32 | (uint64_t)view.itemsize;
    words[3] = (uint64_t)view.ndim;
    size_t bytes = (size_t)view.ndim * sizeof(int64_t);
    memcpy(words + 4, view.shape, bytes);
    memcpy(words + 4 + view.ndim, view.strides, bytes);
    return 4 + 2 * view.ndim;
}

/* True if the exception says that a tensor has no plain view in host memory. Clears such an exception. */
static bool
lies_nowhere(void)
{
    if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return false;
    }
    PyErr_Clear();
    return true;
}

static bool
check_list(PyObject *object, const char *function)
{
    if (!PyList_CheckExact(object)) {
        PyErr_Format(PyExc_TypeError, "%s takes a list of tensors, not %.100s", function,
                     Py_TYPE(object)->tp_name);
        return false;
    }
    return true;
}

static PyObject *
places(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    uint64_t words[WORDS];
    if (!check_list(tensors, "places")) {
        return NULL;
    }
    /* Reading entries may run Python code that changes the list. */
    PyObject *all = PyList_AsTuple(tensors);
    Py_ssize_t count = all ? PyTuple_GET_SIZE(all) : 0, used = 0;
    PyObject *result =
        all ? PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof words) : NULL;
    for (Py_ssize_t i = 0; result && i < count; i++) {
        int filled = describe(PyTuple_GET_ITEM(all, i), words);
        if (filled < 0) {
            Py_SETREF(result, lies_nowhere() ? Py_NewRef(Py_None) : NULL);
            break;
        }
        memcpy(PyBytes_AS_STRING(result) + used, words, (size_t)filled * sizeof *words);
        used += filled * (Py_ssize_t)sizeof *words;
    }
    Py_XDECREF(all);
    if (result && PyBytes_Check(result)) {
        _PyBytes_Resize(&result, used);
    }
    return result;
}

/* Returns 1 if all tensors lie as `expected` says, 0 if not, or -1 with an exception. */
static int
lie_at(PyObject *all, const char *expected, Py_ssize_t size)
{
    uint64_t words[WORDS];
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all); i++) {
        int filled = describe(PyTuple_GET_ITEM(all, i), words);
        if (filled < 0) {
            return lies_nowhere() ? 0 : -1;
        }
        Py_ssize_t bytes = filled * (Py_ssize_t)sizeof *words;
        if (bytes > size || memcmp(expected, words, (size_t)bytes) != 0) {
            return 0;
        }
        expected += bytes;
        size -= bytes;
    }
    return size == 0;
}

static PyObject *
at_places(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "at_places takes a list of tensors and bytes of places()");
        return NULL;
    }
    if (!check_list(args[0], "at_places")) {
        return NULL;
    }
    PyObject *all = PyList_AsTuple(args[0]);
    int result = all ? lie_at(all, PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1])) : -1;
    Py_XDECREF(all);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

PyMethodDef fsdpc_py_places_methods[] = {
    FSDPC_PY_FUNCTION(
        places, METH_O, "($module, tensors, /)",
        "Bytes that tell which tensors (or None) a list has and where each lies: address, dtype,\n"
        "shape and strides, of a DTensor's local tensor. None: one is not in host memory."),
    FSDPC_PY_FUNCTION(at_places, METH_FASTCALL, "($module, tensors, places, /)",
                      "Whether the list is still what places() described."),
    {NULL, NULL, 0, NULL},
};
