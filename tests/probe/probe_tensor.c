/* Functions that describe the extension's view of a tensor as a Python dictionary, and that export memory by
 * DLPack. */
#include "probe.h"

#include <string.h>
#include <time.h>

enum { LONGEST_REPEAT = 10000000 };

static double
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static PyObject *
numbers(const int64_t *values, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

static PyObject *
describe(const fsdpc_py_view *view, double ns)
{
    return Py_BuildValue("{s:K, s:s, s:n, s:L, s:N, s:N, s:O, s:O, s:d}", "data",
                         (unsigned long long)(uintptr_t)view->data, "dtype",
                         fsdpc_dtype_name(view->dtype), "itemsize", (Py_ssize_t)view->itemsize,
                         "numel", (long long)view->numel, "shape", numbers(view->shape, view->ndim),
                         "strides", numbers(view->strides, view->ndim), "contiguous",
                         view->contiguous ? Py_True : Py_False, "readonly",
                         view->readonly ? Py_True : Py_False, "ns", ns);
}

typedef int (*open_function)(PyObject *object, fsdpc_py_view *out);

static open_function
function_of(const char *how)
{
    if (strcmp(how, "any") == 0) {
        return fsdpc_py_tensor_view_any;
    }
    if (strcmp(how, "torch") == 0) {
        return fsdpc_py_torch_view;
    }
    if (strcmp(how, "methods") == 0) {
        return fsdpc_py_torch_view_slow;
    }
    PyErr_Format(PyExc_ValueError, "how must be 'any', 'torch' or 'methods', not '%.50s'", how);
    return NULL;
}

static PyObject *
tensor_info(PyObject *Py_UNUSED(module), PyObject *const *values, Py_ssize_t count,
            PyObject *keywords)
{
    PyObject *tensor = NULL;
    const char *how = "any";
    int64_t repeat = 1;
    const fsdpc_py_arg table[] = {
        {"tensor", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &tensor},
        {"how", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &how},
        {"repeat", FSDPC_PY_INT, FSDPC_PY_OPTIONAL, &repeat},
    };
    if (fsdpc_py_args("tensor_info", table, 3, values, count, keywords) < 0) {
        return NULL;
    }
    if (repeat > LONGEST_REPEAT) {
        PyErr_Format(PyExc_ValueError, "repeat is %lld; the maximum is %d", (long long)repeat,
                     LONGEST_REPEAT);
        return NULL;
    }
    open_function open = function_of(how);
    fsdpc_py_view view;
    if (open == NULL || open(tensor, &view) < 0) {
        return NULL;
    }
    double begin = now_ns();
    for (int64_t i = 0; i < repeat; i++) {
        fsdpc_py_view_release(&view);
        if (open(tensor, &view) < 0) {
            return NULL;
        }
    }
    PyObject *result = describe(&view, (now_ns() - begin) / (double)(repeat > 0 ? repeat : 1));
    fsdpc_py_view_release(&view);
    return result;
}

static PyObject *
export_dlpack(PyObject *Py_UNUSED(module), PyObject *const *values, Py_ssize_t count,
              PyObject *keywords)
{
    PyObject *array = NULL;
    const fsdpc_py_arg table[] = {{"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array}};
    fsdpc_py_view view;
    if (fsdpc_py_args("export_dlpack", table, 1, values, count, keywords) < 0 ||
        fsdpc_py_tensor_view_any(array, &view) < 0) {
        return NULL;
    }
    PyObject *capsule = NULL;
    if (!view.contiguous || view.readonly) {
        PyErr_Format(PyExc_ValueError, "the array is %s",
                     view.readonly ? "read-only, and what is exported can be written"
                                   : "not contiguous");
    } else if (view.dtype == FSDPC_BYTES) {
        int64_t bytes = view.numel * (int64_t)view.itemsize;
        capsule =
            fsdpc_py_dlpack_export(view.data, FSDPC_BYTES, 1, &bytes, fsdpc_py_host, view.owner);
    } else {
        capsule = fsdpc_py_dlpack_export(view.data, view.dtype, view.ndim, view.shape,
                                         fsdpc_py_host, view.owner);
    }
    fsdpc_py_view_release(&view);
    return capsule;
}

PyMethodDef fsdpc_probe_tensor_methods[] = {
    FSDPC_PY_FUNCTION(tensor_info, FSDPC_PY_KEYWORDS, "(tensor, how='any', repeat=1)",
                      "What the extension sees of a tensor or an array: data, dtype, itemsize,\n"
                      "numel, shape, strides (in elements), contiguous, readonly. how: 'any'\n"
                      "(DLPack, buffer), 'torch' (fast), 'methods' (by the tensor's methods). ns:\n"
                      "time per view over `repeat` views."),
    FSDPC_PY_FUNCTION(
        export_dlpack, FSDPC_PY_KEYWORDS, "(array)",
        "A 'dltensor' capsule over the memory of a contiguous array or tensor, which lives as\n"
        "long as the consumer's tensor. Types fsdpc does not compute with become bytes."),
    {NULL, NULL, 0, NULL},
};
