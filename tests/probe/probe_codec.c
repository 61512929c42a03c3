/* Python functions that run the codecs (csrc/codec) on arrays. Each array is passed with the name of its
 * dtype, as in probe_kernels.c. */
#include "codec/codec.h"
#include "probe.h"
#include "probe_kernels.h"

struct request {
    fsdpc_codec codec;
    int64_t row;
    fsdpc_py_buffer values, coded, rounded;
};

static int
check(const struct request *r, bool round)
{
    const int64_t rows = r->row > 0 ? r->values.n / r->row : 0;
    const bool fits = r->row > 0 && r->row <= INT32_MAX && rows * r->row == r->values.n &&
                      r->values.dtype != FSDPC_BYTES &&
                      (round ? r->rounded.n == r->values.n && r->rounded.dtype != FSDPC_BYTES
                             : (size_t)r->coded.n == fsdpc_codec_bytes(r->codec, rows, r->row));
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "floating-point rows need codec_bytes() bytes");
    }
    return fits ? 0 : -1;
}

enum way { ENCODE, DECODE, ROUND };

static int
run(const struct request *r, enum way way)
{
    const int64_t rows = r->values.n / r->row;
    return way == ENCODE ? fsdpc_codec_encode(r->codec, r->values.view.data, r->values.dtype, rows,
                                              r->row, NULL, r->coded.view.data)
           : way == DECODE
               ? fsdpc_codec_decode(r->codec, r->coded.view.data, rows, r->row, 0, r->values.n,
                                    r->values.view.data, r->values.dtype)
               : fsdpc_codec_round(r->codec, r->values.view.data, r->values.dtype, r->row, 0,
                                   r->values.n, r->rounded.view.data, r->rounded.dtype);
}

static PyObject *
call(const char *function, enum way way, PyObject *const *args, Py_ssize_t count,
     PyObject *keywords)
{
    const fsdpc_py_kernels host = {0};
    const char *codec = NULL, *dtype = NULL, *out_dtype = "uint8";
    PyObject *values = NULL, *out = NULL, *result = NULL;
    struct request r = {0};
    const fsdpc_py_arg table[] = {
        {"codec", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &codec},
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &dtype},
        {"row", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &r.row},
        {"out", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &out},
        {"out_dtype", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &out_dtype},
    };
    if (fsdpc_py_args(function, table, way == ROUND ? 6 : 5, args, count, keywords) == 0 &&
        fsdpc_py_checked(fsdpc_codec_from_name(codec, &r.codec)) == 0 &&
        fsdpc_py_buffer_open(values, dtype, way == DECODE, &host, &r.values) == 0 &&
        fsdpc_py_buffer_open(out, out_dtype, way != DECODE, &host,
                             way == ROUND ? &r.rounded : &r.coded) == 0 &&
        check(&r, way == ROUND) == 0) {
        result = fsdpc_py_none_or(run(&r, way));
    }
    fsdpc_py_buffer_close(&r.values);
    fsdpc_py_buffer_close(&r.coded);
    fsdpc_py_buffer_close(&r.rounded);
    return result;
}

static PyObject *
codec_encode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
             PyObject *keywords)
{
    return call("codec_encode", ENCODE, args, count, keywords);
}

static PyObject *
codec_decode(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
             PyObject *keywords)
{
    return call("codec_decode", DECODE, args, count, keywords);
}

static PyObject *
codec_round(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    return call("codec_round", ROUND, args, count, keywords);
}

/* The sum of one segment over several ranks, with the codes that a reduction on a GPU uses. `values` has
 * the pieces of all ranks; `coded` gets the coded pieces of the other ranks, end to end. */
struct sum {
    fsdpc_py_kernels kernels;
    fsdpc_codec codec;
    int64_t row;
    int32_t own;
    bool add;
    double scale;
    fsdpc_py_buffer values, coded, sums;
};

static int
run_sum(const struct sum *s)
{
    const int64_t n = s->sums.n;
    const int senders = (int)(s->values.n / n);
    const size_t bytes = fsdpc_codec_bytes(s->codec, n / s->row, s->row);
    const size_t piece = (size_t)n * fsdpc_dtype_bytes(s->values.dtype);
    char *values = s->values.view.data, *coded = s->coded.view.data;
    fsdpc_coding coding = {.codec = s->codec,
                           .pieces = 1,
                           .rows = n / s->row,
                           .row = s->row,
                           .type = s->values.dtype,
                           .stride = bytes};
    for (int r = 0, at = 0; r < senders; r++) {
        coding.values = values + piece * (size_t)r;
        coding.coded = coded + bytes * (size_t)at;
        FSDPC_TRY(r == s->own ? FSDPC_OK : fsdpc_device_encode(s->kernels.device, &coding, 1));
        at += r != s->own;
    }
    coding.values = values + piece * (size_t)s->own;
    coding.coded = coded;
    const fsdpc_landed landed = {coding, s->sums.view.data, s->sums.dtype};
    return fsdpc_device_sum_landed(s->kernels.device, &landed, 1, senders, s->own, s->scale,
                                   s->add);
}

static int
check_sum(const struct sum *s)
{
    const int64_t n = s->sums.n, others = n > 0 ? s->values.n / n - 1 : -1;
    const bool fits =
        s->kernels.device && s->codec != FSDPC_UNCODED && s->row > 0 && n > 0 && n % s->row == 0 &&
        (others + 1) * n == s->values.n && s->own >= 0 && s->own <= others &&
        (size_t)s->coded.n == (size_t)others * fsdpc_codec_bytes(s->codec, n / s->row, s->row);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "codec_sum: sizes that do not fit, or no GPU");
    }
    return fits ? 0 : -1;
}

static PyObject *
codec_sum(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    const char *codec = NULL, *dtype = NULL, *sums_dtype = NULL, *kernels = NULL;
    PyObject *values = NULL, *coded = NULL, *sums = NULL, *result = NULL;
    struct sum s = {.scale = 1};
    const fsdpc_py_arg table[] = {
        {"codec", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &codec},
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &dtype},
        {"row", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &s.row},
        {"own", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &s.own},
        {"coded", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &coded},
        {"sums", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &sums},
        {"sums_dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &sums_dtype},
        {"kernels", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &kernels},
        {"scale", FSDPC_PY_DOUBLE, FSDPC_PY_OPTIONAL, &s.scale},
        {"add", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &s.add},
    };
    if (fsdpc_py_args("codec_sum", table, 11, args, count, keywords) == 0 &&
        fsdpc_py_checked(fsdpc_codec_from_name(codec, &s.codec)) == 0 &&
        fsdpc_py_kernels_find(kernels, &s.kernels) == 0 &&
        fsdpc_py_buffer_open(values, dtype, false, &s.kernels, &s.values) == 0 &&
        fsdpc_py_buffer_open(coded, "uint8", true, &s.kernels, &s.coded) == 0 &&
        fsdpc_py_buffer_open(sums, sums_dtype, true, &s.kernels, &s.sums) == 0 &&
        check_sum(&s) == 0) {
        result = fsdpc_py_kernels_finish(run_sum(&s));
    }
    fsdpc_py_buffer_close(&s.values);
    fsdpc_py_buffer_close(&s.coded);
    fsdpc_py_buffer_close(&s.sums);
    return result;
}

static PyObject *
codec_bytes(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    long long rows, row;
    fsdpc_codec codec;
    if (!PyArg_ParseTuple(args, "sLL", &name, &rows, &row) ||
        fsdpc_py_checked(fsdpc_codec_from_name(name, &codec)) < 0) {
        return NULL;
    }
    if (rows < 0 || row <= 0 || rows > INT32_MAX || row > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "codec_bytes: rows and their elements out of range");
        return NULL;
    }
    return PyLong_FromSize_t(fsdpc_codec_bytes(codec, rows, row));
}

PyMethodDef fsdpc_probe_codec_methods[] = {
    FSDPC_PY_FUNCTION(codec_encode, FSDPC_PY_KEYWORDS, "(codec, values, dtype, row, out)",
                      "Codes rows of values into the bytes of `out`."),
    FSDPC_PY_FUNCTION(codec_decode, FSDPC_PY_KEYWORDS, "(codec, values, dtype, row, out)",
                      "Writes the values of the codes in `out` to `values`."),
    FSDPC_PY_FUNCTION(codec_round, FSDPC_PY_KEYWORDS, "(codec, values, dtype, row, out, out_dtype)",
                      "Writes to `out` what decoding gives of the values."),
    FSDPC_PY_FUNCTION(
        codec_sum, FSDPC_PY_KEYWORDS,
        "(codec, values, dtype, row, own, coded, sums, sums_dtype, kernels, scale=1.0, add=False)",
        "On a GPU: the pieces in `values` of all ranks but `own` are coded and summed with it."),
    FSDPC_PY_FUNCTION(codec_bytes, METH_VARARGS, "(codec, rows, row)", "Bytes of coded rows."),
    {NULL, NULL, 0, NULL},
};
