/* Ranges of torch's profilers, with the names that torch's FSDP gives them: "FSDP::pre_forward (blocks.3)".
 * While no profiler runs, a range costs one look-up of torch's flag.
 */
#include "py/step/py_step.h"

PyObject *
fsdpc_py_range_open(const fsdpc_py_tree *tree, const char *what, const fsdpc_py_flat *flat)
{
    if (!tree || !tree->profiler ||
        PyDict_GetItem(tree->profiler, fsdpc_py_name.profiles) != Py_True) {
        return NULL;
    }
    const char *name = flat ? fsdpc_unit_name(flat->unit) : "";
    PyObject *range =
        PyObject_CallFunction(tree->record, "N",
                              *name ? PyUnicode_FromFormat("FSDP::%s (%s)", what, name)
                                    : PyUnicode_FromFormat("FSDP::%s", what));
    PyObject *entered = range ? PyObject_CallMethod(range, "__enter__", NULL) : NULL;
    if (!entered) { /* an error of the profiler must not fail the step */
        PyErr_Clear();
        Py_CLEAR(range);
    }
    Py_XDECREF(entered);
    return range;
}

void
fsdpc_py_range_close(PyObject *range)
{
    if (!range) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left = PyObject_CallMethod(range, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (!left) {
        PyErr_Clear();
    }
    Py_XDECREF(left);
    Py_DECREF(range);
    PyErr_Restore(type, value, traceback);
}
