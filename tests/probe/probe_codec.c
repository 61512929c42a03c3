/* Codecs (csrc/codec) on arrays, with the names of their dtypes as in probe_kernels.c. */
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
    FSDPC_PY_FUNCTION(codec_bytes, METH_VARARGS, "(codec, rows, row)", "Bytes of coded rows."),
    {NULL, NULL, 0, NULL},
};
