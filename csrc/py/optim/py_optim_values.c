/* Functions that fsdpc/optim needs besides steps: sums of squares, and conversions of 8-bit states. */
#include "base/mem.h"
#include "optim/optim.h"
#include "py/base/py_numpy.h"
#include "py/optim/py_optim.h"

static int
float_view(PyObject *tensor, bool only_f32, fsdpc_py_view *out)
{
    if (fsdpc_py_torch_view(tensor, out) < 0) {
        return -1;
    }
    if (!out->contiguous || !fsdpc_dtype_is_float(out->dtype) ||
        (only_f32 && out->dtype != FSDPC_F32)) {
        PyErr_Format(PyExc_ValueError, "the tensor must be contiguous and in %s",
                     only_f32 ? "float32" : "a float type");
        return -1;
    }
    return 0;
}

/* --- sums of squares --------------------------------------------------------------------------- */

static PyObject *
sum_of(PyObject *tuple, int32_t threads)
{
    const int count = (int)PyTuple_GET_SIZE(tuple);
    void **data = fsdpc_mem_calloc((size_t)count, sizeof *data);
    fsdpc_dtype *types = fsdpc_mem_calloc((size_t)count, sizeof *types);
    int64_t *numels = fsdpc_mem_calloc((size_t)count, sizeof *numels);
    PyObject *result = NULL;
    double sum = 0;
    if (data == NULL || types == NULL || numels == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (int i = 0; i < count; i++) {
        fsdpc_py_view view;
        if (float_view(PyTuple_GET_ITEM(tuple, i), false, &view) < 0) {
            goto done;
        }
        data[i] = view.data;
        types[i] = view.dtype;
        numels[i] = view.numel;
    }
    int status =
        FSDPC_PY_UNLOCKED(fsdpc_optim_sum_squares(data, types, numels, count, threads, &sum));
    result = status == FSDPC_OK ? PyFloat_FromDouble(sum) : fsdpc_py_raise(status);
done:
    fsdpc_mem_free(numels);
    fsdpc_mem_free(types);
    fsdpc_mem_free(data);
    return result;
}

static PyObject *
optim_sum_squares(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                  PyObject *keywords)
{
    PyObject *tensors;
    int32_t threads = 1;
    const fsdpc_py_arg table[] = {
        {"tensors", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &tensors},
        {"threads", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &threads},
    };
    if (fsdpc_py_args("optim_sum_squares", table, 2, args, count, keywords) < 0) {
        return NULL;
    }
    PyObject *tuple = PySequence_Tuple(tensors);
    PyObject *result = tuple ? sum_of(tuple, threads) : NULL;
    Py_XDECREF(tuple);
    return result;
}

static int64_t
blocks_between(int64_t first, int64_t n, int64_t block)
{
    return n == 0 ? 0 : (first + n - 1) / block - first / block + 1;
}

static int
check_place(int64_t first, int64_t block)
{
    if (first < 0 || block < 1) {
        PyErr_SetString(PyExc_ValueError,
                        "the first index must be at least 0, and the block at least 1");
        return -1;
    }
    return 0;
}

static int
check_count(const fsdpc_py_view *view, int64_t expected, const char *what)
{
    if (view->numel != expected || !view->contiguous) {
        PyErr_Format(PyExc_ValueError, "%s must be contiguous with %lld elements", what,
                     (long long)expected);
        return -1;
    }
    return 0;
}

static PyObject *
optim_block_squares(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                    PyObject *keywords)
{
    PyObject *tensor, *sums;
    int64_t first, block;
    int32_t threads = 1;
    fsdpc_py_view data, out;
    const fsdpc_py_arg table[] = {
        {"tensor", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &tensor},
        {"first", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &first},
        {"block", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &block},
        {"sums", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &sums},
        {"threads", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &threads},
    };
    if (fsdpc_py_args("optim_block_squares", table, 5, args, count, keywords) < 0 ||
        check_place(first, block) < 0 || float_view(tensor, false, &data) < 0 ||
        float_view(sums, false, &out) < 0 ||
        check_count(&out, blocks_between(first, data.numel, block), "sums") < 0) {
        return NULL;
    }
    if (out.dtype != FSDPC_F64) {
        PyErr_SetString(PyExc_ValueError, "sums must be float64");
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_optim_block_squares(data.data, data.dtype, first,
                                                             data.numel, block, threads, out.data));
    return fsdpc_py_none_or(status);
}

/* --- 8 bits ------------------------------------------------------------------------------------ */

struct eight {
    int32_t which;
    int64_t first;
    fsdpc_py_view values, codes, scales;
    float *edges; /* as fsdpc_optim_quantise takes them, or NULL */
};

/* Reads the edges: a float32 array of shape (2, 3). None is allowed unless `needed`. */
static int
read_edges(PyObject *object, bool needed, struct eight *out)
{
    PyArrayObject *array = (PyArrayObject *)object;
    out->edges = NULL;
    if (object == Py_None && !needed) {
        return 0;
    }
    if (!PyArray_Check(object) || PyArray_TYPE(array) != NPY_FLOAT32 ||
        PyArray_SIZE(array) != 2 * FSDPC_OPTIM_EDGE || !PyArray_ISCARRAY(array)) {
        PyErr_Format(PyExc_ValueError, "edges must be a float32 array of (2, %d)",
                     FSDPC_OPTIM_EDGE);
        return -1;
    }
    out->edges = PyArray_DATA(array);
    return 0;
}

static int
check_eight(const struct eight *eight, bool with_codes)
{
    if (eight->which < 0 || eight->which > 1) {
        PyErr_SetString(PyExc_ValueError, "which must be 0 (m) or 1 (v)");
        return -1;
    }
    if (check_place(eight->first, 1) < 0) {
        return -1;
    }
    if (!with_codes) {
        return 0;
    }
    if (eight->codes.itemsize != 1) {
        PyErr_SetString(PyExc_ValueError, "codes must be uint8");
        return -1;
    }
    const int64_t n = eight->values.numel;
    if (check_count(&eight->codes, n, "codes") < 0) {
        return -1;
    }
    return check_count(&eight->scales, blocks_between(eight->first, n, FSDPC_OPTIM_BLOCK),
                       "scales");
}

/* Parses (which, values, first, codes, scales, edges=None). */
static int
open_eight(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
           struct eight *out)
{
    PyObject *values, *codes, *scales, *edges = Py_None;
    const fsdpc_py_arg table[] = {
        {"which", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &out->which},
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"first", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &out->first},
        {"codes", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &codes},
        {"scales", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &scales},
        {"edges", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &edges},
    };
    if (fsdpc_py_args(function, table, 6, args, count, keywords) < 0 ||
        float_view(values, true, &out->values) < 0 || fsdpc_py_torch_view(codes, &out->codes) < 0 ||
        float_view(scales, true, &out->scales) < 0 || read_edges(edges, false, out) < 0) {
        return -1;
    }
    return check_eight(out, true);
}

static PyObject *
optim_quantise(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
               PyObject *keywords)
{
    struct eight e;
    if (open_eight("optim_quantise", args, count, keywords, &e) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fsdpc_optim_quantise(e.which, e.values.data, e.first, e.values.numel, e.edges, e.codes.data,
                         e.scales.data);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
optim_dequantise(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                 PyObject *keywords)
{
    struct eight e;
    if (open_eight("optim_dequantise", args, count, keywords, &e) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fsdpc_optim_dequantise(e.which, e.codes.data, e.scales.data, e.first, e.values.numel,
                           e.values.data);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
optim_edges_of(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
               PyObject *keywords)
{
    struct eight e;
    PyObject *values, *edges;
    const fsdpc_py_arg table[] = {
        {"which", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &e.which},
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"first", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &e.first},
        {"edges", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &edges},
    };
    if (fsdpc_py_args("optim_edges_of", table, 4, args, count, keywords) < 0 ||
        float_view(values, true, &e.values) < 0 || read_edges(edges, true, &e) < 0 ||
        check_eight(&e, false) < 0) {
        return NULL;
    }
    if (e.values.numel > 0) {
        fsdpc_optim_edges_of(e.which, e.values.data, e.first, e.values.numel, e.edges);
    }
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_optim_value_methods[] = {
    FSDPC_PY_FUNCTION(
        optim_sum_squares, FSDPC_PY_KEYWORDS, "(tensors, threads=1)",
        "The sum of the squares of all elements, in float64; equal on any number of threads."),
    FSDPC_PY_FUNCTION(optim_block_squares, FSDPC_PY_KEYWORDS,
                      "(tensor, first, block, sums, threads=1)",
                      "The sum of squares of each block of `block` elements of a whole parameter,\n"
                      "of which `tensor` is the range from `first` on; into `sums` (float64, one\n"
                      "per block that the range touches)."),
    FSDPC_PY_FUNCTION(
        optim_quantise, FSDPC_PY_KEYWORDS, "(which, values, first, codes, scales, edges=None)",
        "Codes and scales of float32 values; which: 0 for exp_avg, 1 for exp_avg_sq."),
    FSDPC_PY_FUNCTION(optim_dequantise, FSDPC_PY_KEYWORDS, "(which, values, first, codes, scales)",
                      "The values of codes and scales."),
    FSDPC_PY_FUNCTION(
        optim_edges_of, FSDPC_PY_KEYWORDS, "(which, values, first, edges)",
        "The extremes of the first and the last block of values that will be quantised."),
    {NULL, NULL, 0, NULL},
};
