/* The functions row_codes_bytes, encode_rows and decode_rows, in host memory or on a GPU, without the GIL.
 * Each row is coded by itself, so that a rank that has a row can compute the row's codes and scales. */
#include "base/status.h"
#include "codec/codec.h"
#include "py/activation/py_activation.h"

struct request {
    fsdpc_device *device; /* NULL: host memory */
    fsdpc_codec codec;
    int64_t rows, row;
    size_t row_bytes;
    fsdpc_py_view values, coded;
};

static int
find_codec(const char *name, int64_t row, fsdpc_codec *out)
{
    if (fsdpc_py_checked(fsdpc_codec_from_name(name, out)) < 0) {
        return -1;
    }
    if (*out == FSDPC_UNCODED || row < 1 || row > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "codec '%s' cannot code rows of %lld elements", name,
                     (long long)row);
        return -1;
    }
    return 0;
}

static int
check(const char *name, struct request *r)
{
    const fsdpc_py_view *values = &r->values, *coded = &r->coded;
    r->row = values->ndim > 0 ? values->shape[values->ndim - 1] : 0;
    if (find_codec(name, r->row, &r->codec) < 0) {
        return -1;
    }
    r->rows = values->numel / r->row;
    r->row_bytes = fsdpc_codec_bytes(r->codec, 1, r->row);
    if (!values->contiguous || !coded->contiguous || values->dtype == FSDPC_BYTES ||
        coded->itemsize != 1 || coded->numel != r->rows * (int64_t)r->row_bytes) {
        PyErr_Format(PyExc_ValueError,
                     "values and codes must be contiguous: %lld rows of %lld values of a "
                     "floating-point dtype need %zu codes of one byte each",
                     (long long)r->rows, (long long)r->row, r->row_bytes);
        return -1;
    }
    return 0;
}

static int
run_rows(bool encode, const struct request *r)
{
    const size_t step = (size_t)r->row * fsdpc_dtype_bytes(r->values.dtype);
    for (int64_t i = 0; i < r->rows; i++) {
        char *values = (char *)r->values.data + step * (size_t)i;
        char *coded = (char *)r->coded.data + r->row_bytes * (size_t)i;
        FSDPC_TRY(
            encode ? fsdpc_codec_encode(r->codec, values, r->values.dtype, 1, r->row, NULL, coded)
                   : fsdpc_codec_decode(r->codec, coded, 1, r->row, 0, r->row, values,
                                        r->values.dtype));
    }
    return FSDPC_OK;
}

/* On a GPU each row is passed to the codec as a separate piece. */
static int
run_request(bool encode, const struct request *r)
{
    if (!r->device) {
        return run_rows(encode, r);
    }
    if (r->rows > INT32_MAX) {
        return fsdpc_error(FSDPC_E_INVAL, "a GPU codes at most %d rows at once, not %lld",
                           INT32_MAX, (long long)r->rows);
    }
    const fsdpc_coding coding = {.codec = r->codec,
                                 .pieces = (int)r->rows,
                                 .rows = 1,
                                 .row = r->row,
                                 .values = r->values.data,
                                 .type = r->values.dtype,
                                 .coded = r->coded.data,
                                 .stride = r->row_bytes};
    return r->rows == 0 ? FSDPC_OK
           : encode     ? fsdpc_device_encode(r->device, &coding, 1)
                        : fsdpc_device_decode(r->device, &coding, 1);
}

static PyObject *
run(bool encode, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    struct request r = {0};
    const char *codec = NULL;
    PyObject *values = NULL, *coded = NULL;
    int32_t device = -1;
    const fsdpc_py_arg table[] = {
        {"codec", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &codec},
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"coded", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &coded},
        {"device", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &device},
    };
    if (fsdpc_py_args(encode ? "encode_rows" : "decode_rows", table, 4, args, count, keywords) <
            0 ||
        fsdpc_py_activation_device(device, &r.device) < 0) {
        return NULL;
    }
    const fsdpc_py_device place = r.device ? fsdpc_py_device_of(r.device) : fsdpc_py_host;
    if (fsdpc_py_torch_view_on(values, place, &r.values) < 0 ||
        fsdpc_py_torch_view_on(coded, place, &r.coded) < 0 || check(codec, &r) < 0) {
        return NULL;
    }
    const int status = FSDPC_PY_UNLOCKED(run_request(encode, &r));
    return fsdpc_py_none_or(status);
}

static PyObject *
encode_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    return run(true, args, count, keywords);
}

static PyObject *
decode_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    return run(false, args, count, keywords);
}

static PyObject *
row_codes_bytes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                PyObject *keywords)
{
    const char *name = NULL;
    int64_t row = 0;
    fsdpc_codec codec;
    const fsdpc_py_arg table[] = {
        {"codec", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &name},
        {"row", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &row},
    };
    if (fsdpc_py_args("row_codes_bytes", table, 2, args, count, keywords) < 0 ||
        find_codec(name, row, &codec) < 0) {
        return NULL;
    }
    return PyLong_FromSize_t(fsdpc_codec_bytes(codec, 1, row));
}

#define ROW(with, codec, name, block, bits, scale, weights, gradients) \
    {name, block, bits, weights, gradients},

int
fsdpc_py_codec_exec(PyObject *module)
{
    static const struct {
        const char *name;
        int block, bits, weights, gradients;
    } rows[] = {FSDPC_CODEC_LIST(ROW, )};
    enum { COUNT = sizeof rows / sizeof *rows };
    PyObject *codecs = PyTuple_New(COUNT);
    for (int i = 0; codecs && i < COUNT; i++) {
        PyObject *row =
            Py_BuildValue("(siiNN)", rows[i].name, rows[i].block, rows[i].bits,
                          PyBool_FromLong(rows[i].weights), PyBool_FromLong(rows[i].gradients));
        if (!row) {
            Py_CLEAR(codecs);
        } else {
            PyTuple_SET_ITEM(codecs, i, row);
        }
    }
    const int result = codecs ? PyModule_AddObjectRef(module, "CODECS", codecs) : -1;
    Py_XDECREF(codecs);
    return result;
}

PyMethodDef fsdpc_py_codec_methods[] = {
    FSDPC_PY_FUNCTION(
        row_codes_bytes, FSDPC_PY_KEYWORDS, "(codec, row)",
        "Bytes of a row of so many values: its codes, then, from a multiple of 16 on,\n"
        "its scales; a multiple of 16."),
    FSDPC_PY_FUNCTION(
        encode_rows, FSDPC_PY_KEYWORDS, "(codec, values, coded, device=-1)",
        "Codes each row (last dimension) of `values` into `coded`, row_codes_bytes each; both\n"
        "are contiguous tensors in host memory, or in that of the GPU with the ordinal `device`,\n"
        "on its current stream; there `coded` begins at a multiple of 16 bytes."),
    FSDPC_PY_FUNCTION(decode_rows, FSDPC_PY_KEYWORDS, "(codec, values, coded, device=-1)",
                      "Writes what the codes mean to `values`."),
    {NULL, NULL, 0, NULL},
};
