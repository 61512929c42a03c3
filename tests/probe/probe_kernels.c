/* Python functions of fsdpc._probe that run the kernels.
 *
 * Each array is passed with the name of its dtype, because NumPy has no bfloat16: an array of uint16 holds
 * bfloat16 values. The number of elements follows from the number of bytes. `kernels` is the name of a
 * kernel table, None or "cuda:N". None means the CPU device, which chooses the table and uses its
 * threads. "cuda:N" is for torch tensors on that GPU, on which the work is only queued. The GIL is
 * released while a kernel runs.
 */
#include "probe_kernels.h"

#include "base/mem.h"
#include "probe.h"

static int
check_same_count(const fsdpc_py_buffer *a, const fsdpc_py_buffer *b)
{
    if (a->n != b->n) {
        PyErr_Format(PyExc_ValueError, "the arrays differ in length: %lld and %lld elements",
                     (long long)a->n, (long long)b->n);
        return -1;
    }
    return 0;
}

/* Checks an argument of a kernel of a kernel table, because these kernels check nothing. For a device this
 * is not needed: its functions check their arguments, and their status becomes an exception. */
static int
check_arithmetic(const fsdpc_py_buffer *buffer, bool accumulator)
{
    const fsdpc_dtype type = buffer->dtype;
    if (type == FSDPC_BYTES || (accumulator && type != FSDPC_F32 && type != FSDPC_F64)) {
        PyErr_Format(PyExc_ValueError, "the kernels cannot compute with, or sum in, %s",
                     fsdpc_dtype_name(type));
        return -1;
    }
    return 0;
}

/* --- cast, accumulate, scale ----------------------------------------------------------------- */

struct pair {
    fsdpc_py_buffer dst, src;
    fsdpc_py_kernels kernels;
    double scale;
};

/* Parses (dst, dst_dtype, src, src_dtype, scale=1.0, kernels=None). */
static int
open_pair(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
          struct pair *pair)
{
    PyObject *dst = NULL, *src = NULL;
    const char *dst_dtype = NULL, *src_dtype = NULL, *kernels = NULL;
    const fsdpc_py_arg table[] = {
        {"dst", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &dst},
        {"dst_dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &dst_dtype},
        {"src", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &src},
        {"src_dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &src_dtype},
        {"scale", FSDPC_PY_DOUBLE, FSDPC_PY_OPTIONAL, &pair->scale},
        {"kernels", FSDPC_PY_STR_OR_NONE, FSDPC_PY_OPTIONAL, &kernels},
    };
    pair->scale = 1.0;
    if (fsdpc_py_args(function, table, 6, args, count, keywords) < 0) {
        return -1;
    }
    if (fsdpc_py_kernels_find(kernels, &pair->kernels) < 0 ||
        fsdpc_py_buffer_open(dst, dst_dtype, true, &pair->kernels, &pair->dst) < 0 ||
        fsdpc_py_buffer_open(src, src_dtype, false, &pair->kernels, &pair->src) < 0) {
        return -1;
    }
    return check_same_count(&pair->dst, &pair->src);
}

static int
run_cast(const struct pair *pair)
{
    const fsdpc_py_buffer *dst = &pair->dst, *src = &pair->src;
    if (pair->kernels.table == NULL) {
        return fsdpc_device_cast(pair->kernels.device, dst->view.data, dst->dtype, src->view.data,
                                 src->dtype, dst->n, pair->scale);
    }
    pair->kernels.table->cast(dst->view.data, dst->dtype, src->view.data, src->dtype, dst->n,
                              pair->scale);
    return FSDPC_OK;
}

static int
run_accumulate(const struct pair *pair)
{
    const fsdpc_py_buffer *acc = &pair->dst, *src = &pair->src;
    if (pair->kernels.table == NULL) {
        return fsdpc_device_accumulate(pair->kernels.device, acc->view.data, acc->dtype,
                                       src->view.data, src->dtype, acc->n, pair->scale);
    }
    pair->kernels.table->accumulate(acc->view.data, acc->dtype, src->view.data, src->dtype, acc->n,
                                    pair->scale);
    return FSDPC_OK;
}

static int
check_cast(const struct pair *pair)
{
    if (pair->dst.dtype == FSDPC_BYTES && pair->src.dtype == FSDPC_BYTES) {
        return 0;
    }
    return check_arithmetic(&pair->dst, false) < 0 ? -1 : check_arithmetic(&pair->src, false);
}

static int
check_accumulate(const struct pair *pair)
{
    return check_arithmetic(&pair->dst, true) < 0 ? -1 : check_arithmetic(&pair->src, false);
}

static PyObject *
call_on_pair(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
             int (*check)(const struct pair *), int (*run)(const struct pair *))
{
    struct pair pair = {0};
    PyObject *result = NULL;
    if (open_pair(function, args, count, keywords, &pair) == 0 && check(&pair) == 0) {
        PyThreadState *saved = PyEval_SaveThread();
        int status = run(&pair);
        PyEval_RestoreThread(saved);
        result = fsdpc_py_kernels_finish(status);
    }
    fsdpc_py_buffer_close(&pair.dst);
    fsdpc_py_buffer_close(&pair.src);
    return result;
}

static PyObject *
kernel_cast(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    return call_on_pair("kernel_cast", args, count, keywords, check_cast, run_cast);
}

static PyObject *
kernel_accumulate(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                  PyObject *keywords)
{
    return call_on_pair("kernel_accumulate", args, count, keywords, check_accumulate,
                        run_accumulate);
}

/* --- reduce ---------------------------------------------------------------------------------- */

struct reduction {
    fsdpc_py_buffer acc;
    fsdpc_py_buffer *sources; /* an array of `count` buffers, freed with this struct */
    const void **list;        /* the sources' addresses (NULL for None), freed with this struct */
    int count;
    fsdpc_dtype src_dtype;
    fsdpc_py_kernels kernels;
    double scale;
    bool add;
};

static int
open_sources(PyObject *sequence, const char *dtype, struct reduction *out)
{
    PyObject *items = PySequence_Tuple(sequence); /* a copy: opening an item may change the list */
    if (items == NULL) {
        return -1;
    }
    int result = -1;
    out->count = (int)PyTuple_GET_SIZE(items);
    out->sources = fsdpc_mem_calloc((size_t)out->count, sizeof *out->sources);
    out->list = fsdpc_mem_calloc((size_t)out->count, sizeof *out->list);
    if (out->sources == NULL || out->list == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (int s = 0; s < out->count; s++) {
        PyObject *item = PyTuple_GET_ITEM(items, s);
        fsdpc_py_buffer *source = &out->sources[s];
        if (item == Py_None) {
            continue;
        }
        if (fsdpc_py_buffer_open(item, dtype, false, &out->kernels, source) < 0 ||
            check_same_count(source, &out->acc) < 0 || check_arithmetic(source, false) < 0) {
            goto done;
        }
        out->list[s] = source->view.data;
    }
    result = 0;
done:
    Py_DECREF(items);
    return result;
}

static void
close_reduction(struct reduction *reduction)
{
    for (int s = 0; reduction->sources != NULL && s < reduction->count; s++) {
        fsdpc_py_buffer_close(&reduction->sources[s]);
    }
    fsdpc_py_buffer_close(&reduction->acc);
    fsdpc_mem_free(reduction->sources);
    fsdpc_mem_free(reduction->list);
}

static int
open_reduction(PyObject *const *args, Py_ssize_t count, PyObject *keywords,
               struct reduction *reduction)
{
    PyObject *acc = NULL, *src = NULL;
    const char *acc_dtype = NULL, *src_dtype = NULL, *kernels = NULL;
    const fsdpc_py_arg table[] = {
        {"acc", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &acc},
        {"acc_dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &acc_dtype},
        {"src", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &src},
        {"src_dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &src_dtype},
        {"scale", FSDPC_PY_DOUBLE, FSDPC_PY_OPTIONAL, &reduction->scale},
        {"add", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &reduction->add},
        {"kernels", FSDPC_PY_STR_OR_NONE, FSDPC_PY_OPTIONAL, &kernels},
    };
    reduction->scale = 1.0;
    if (fsdpc_py_args("kernel_reduce", table, 7, args, count, keywords) < 0 ||
        fsdpc_py_kernels_find(kernels, &reduction->kernels) < 0 ||
        fsdpc_py_buffer_open(acc, acc_dtype, true, &reduction->kernels, &reduction->acc) < 0 ||
        check_arithmetic(&reduction->acc, true) < 0) {
        return -1;
    }
    int status = fsdpc_dtype_from_name(src_dtype, &reduction->src_dtype);
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    return open_sources(src, src_dtype, reduction);
}

static int
run_reduction(const struct reduction *r)
{
    if (r->kernels.table == NULL) {
        return fsdpc_device_reduce(r->kernels.device, r->acc.view.data, r->acc.dtype, r->list,
                                   r->count, r->src_dtype, r->acc.n, r->scale, r->add);
    }
    r->kernels.table->reduce(r->acc.view.data, r->acc.dtype, r->list, r->count, r->src_dtype,
                             r->acc.n, r->scale, r->add);
    return FSDPC_OK;
}

static PyObject *
kernel_reduce(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
              PyObject *keywords)
{
    struct reduction reduction = {0};
    PyObject *result = NULL;
    if (open_reduction(args, count, keywords, &reduction) == 0) {
        PyThreadState *saved = PyEval_SaveThread();
        int status = run_reduction(&reduction);
        PyEval_RestoreThread(saved);
        result = fsdpc_py_kernels_finish(status);
    }
    close_reduction(&reduction);
    return result;
}

/* --- norm ------------------------------------------------------------------------------------ */

static PyObject *
norm_of(const fsdpc_py_buffer *src, const fsdpc_py_kernels *kernels)
{
    fsdpc_norm norm = {0};
    int status = FSDPC_OK;
    if (check_arithmetic(src, false) < 0) {
        return NULL;
    }
    PyThreadState *saved = PyEval_SaveThread();
    if (kernels->table != NULL) {
        norm = kernels->table->norm2(src->view.data, src->dtype, src->n);
    } else {
        status = fsdpc_device_norm2(kernels->device, src->view.data, src->dtype, src->n, &norm);
    }
    PyEval_RestoreThread(saved);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return Py_BuildValue("(ddN)", norm.sum, norm.max, PyBool_FromLong(norm.nonfinite));
}

static PyObject *
kernel_norm2(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
             PyObject *keywords)
{
    PyObject *src = NULL, *result = NULL;
    const char *dtype = NULL, *kernels = NULL;
    fsdpc_py_buffer buffer = {0};
    fsdpc_py_kernels where;
    const fsdpc_py_arg table[] = {
        {"src", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &src},
        {"dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &dtype},
        {"kernels", FSDPC_PY_STR_OR_NONE, FSDPC_PY_OPTIONAL, &kernels},
    };
    if (fsdpc_py_args("kernel_norm2", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    if (fsdpc_py_kernels_find(kernels, &where) == 0 &&
        fsdpc_py_buffer_open(src, dtype, false, &where, &buffer) == 0) {
        result = norm_of(&buffer, &where);
    }
    fsdpc_py_buffer_close(&buffer);
    return result;
}

/* --- tables ---------------------------------------------------------------------------------- */

PyMethodDef fsdpc_probe_kernel_methods[] = {
    FSDPC_PY_FUNCTION(kernel_cast, FSDPC_PY_KEYWORDS,
                      "(dst, dst_dtype, src, src_dtype, scale=1.0, kernels=None)",
                      "dst[i] = convert(src[i] * scale)."),
    FSDPC_PY_FUNCTION(kernel_accumulate, FSDPC_PY_KEYWORDS,
                      "(dst, dst_dtype, src, src_dtype, scale=1.0, kernels=None)",
                      "dst[i] += src[i] * scale."),
    FSDPC_PY_FUNCTION(
        kernel_reduce, FSDPC_PY_KEYWORDS,
        "(acc, acc_dtype, src, src_dtype, scale=1.0, add=False, kernels=None)",
        "acc[i] = (src[0][i] + src[1][i] + ...) * scale, added to acc[i] if add. None is skipped."),
    FSDPC_PY_FUNCTION(
        kernel_norm2, FSDPC_PY_KEYWORDS, "(src, dtype, kernels=None)",
        "Returns (sum of squares, largest magnitude, whether any element is not finite)."),
    FSDPC_PY_METHOD(
        kernel_pack_plan, fsdpc_py_kernel_pack_plan, FSDPC_PY_KEYWORDS,
        "(targets, bytes, kernels=None)",
        "A plan for packing tensors into a buffer of `bytes` bytes. targets: (elements, offset in\n"
        "bytes, dtype) each, by rising offset; gaps between them are zeroed."),
    FSDPC_PY_METHOD(kernel_pack, fsdpc_py_kernel_pack, FSDPC_PY_KEYWORDS,
                    "(plan, dst, src, scale=1.0)",
                    "Packs tensors of any strides, one for each of the plan's targets (None: "
                    "zeros), times scale."),
    FSDPC_PY_METHOD(kernel_scale_by, fsdpc_py_kernel_scale_by, FSDPC_PY_KEYWORDS,
                    "(x, dtype, factor, kernels=None)",
                    "x[i] *= factor, one float64 in GPU memory, without a host sync."),
    {NULL, NULL, 0, NULL},
};
