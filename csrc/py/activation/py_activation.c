/* activation_pack and activation_unpack, without the GIL while they run. */
#include "py/activation/py_activation.h"

#include "activation/activation.h"

struct request {
    fsdpc_py_view values, codes, scales;
};

static int
check(const struct request *request)
{
    const int64_t n = request->values.numel;
    const int64_t blocks = (n + FSDPC_ACTIVATION_BLOCK - 1) / FSDPC_ACTIVATION_BLOCK;
    if (!request->values.contiguous || !request->codes.contiguous || !request->scales.contiguous ||
        request->codes.itemsize != 1 || request->codes.numel != n ||
        request->scales.dtype != FSDPC_F32 || request->scales.numel != blocks) {
        PyErr_Format(PyExc_ValueError,
                     "contiguous tensors of %lld values, as many codes of a byte and %lld float32 "
                     "scales are needed",
                     (long long)n, (long long)blocks);
        return -1;
    }
    return 0;
}

static int
request_open(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
             struct request *out)
{
    PyObject *values, *codes, *scales;
    const fsdpc_py_arg table[] = {
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"codes", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &codes},
        {"scales", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &scales},
    };
    if (fsdpc_py_args(function, table, 3, args, count, keywords) < 0 ||
        fsdpc_py_torch_view(values, &out->values) < 0 ||
        fsdpc_py_torch_view(codes, &out->codes) < 0 ||
        fsdpc_py_torch_view(scales, &out->scales) < 0) {
        return -1;
    }
    return check(out);
}

static PyObject *
run(bool pack, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    struct request r;
    int status;
    if (request_open(pack ? "activation_pack" : "activation_unpack", args, count, keywords, &r) <
        0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = pack ? fsdpc_activation_pack(r.values.data, r.values.dtype, r.values.numel,
                                          r.codes.data, r.scales.data)
                  : fsdpc_activation_unpack(r.codes.data, r.scales.data, r.values.numel,
                                            r.values.data, r.values.dtype);
    Py_END_ALLOW_THREADS
    return status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
}

static PyObject *
activation_pack(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    (void)module;
    return run(true, args, count, keywords);
}

static PyObject *
activation_unpack(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    (void)module;
    return run(false, args, count, keywords);
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

PyMethodDef fsdpc_py_activation_methods[] = {
    {"activation_pack", KEYWORDS(activation_pack),
     "activation_pack(values, codes, scales)\n--\n\n"
     "Codes of 8 bits (int8) and a float32 scale per 256 elements, of contiguous host memory."},
    {"activation_unpack", KEYWORDS(activation_unpack),
     "activation_unpack(values, codes, scales)\n--\n\n"
     "Writes the values of codes and scales into `values`."},
    {NULL, NULL, 0, NULL},
};
