/* The functions activation_pack and activation_unpack, in host memory or on a GPU. They release the GIL. */
#include "py/activation/py_activation.h"

#include "activation/activation.h"
#include "device/device.h"

struct request {
    fsdpc_device *device; /* NULL: host memory */
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
        PyErr_Format(
            PyExc_ValueError,
            "values, codes and scales must be contiguous: %lld values need as many codes of "
            "one byte and %lld float32 scales",
            (long long)n, (long long)blocks);
        return -1;
    }
    return 0;
}

int
fsdpc_py_activation_device(int32_t ordinal, fsdpc_device **out)
{
    *out = NULL;
    if (ordinal < 0) {
        return 0;
    }
    return fsdpc_py_checked(fsdpc_device_cuda(ordinal, out)) < 0 ? -1 : fsdpc_py_enter_device(*out);
}

static int
request_open(const char *function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
             struct request *out)
{
    PyObject *values, *codes, *scales;
    int32_t device = -1;
    const fsdpc_py_arg table[] = {
        {"values", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &values},
        {"codes", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &codes},
        {"scales", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &scales},
        {"device", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &device},
    };
    if (fsdpc_py_args(function, table, 4, args, count, keywords) < 0 ||
        fsdpc_py_activation_device(device, &out->device) < 0) {
        return -1;
    }
    const fsdpc_py_device place = out->device ? fsdpc_py_device_of(out->device) : fsdpc_py_host;
    if (fsdpc_py_torch_view_on(values, place, &out->values) < 0 ||
        fsdpc_py_torch_view_on(codes, place, &out->codes) < 0 ||
        fsdpc_py_torch_view_on(scales, place, &out->scales) < 0) {
        return -1;
    }
    return check(out);
}

static int
run_request(bool pack, const struct request *r)
{
    const fsdpc_py_view *values = &r->values;
    if (r->device) {
        return pack ? fsdpc_device_pack8(r->device, values->data, values->dtype, values->numel,
                                         r->codes.data, r->scales.data)
                    : fsdpc_device_unpack8(r->device, r->codes.data, r->scales.data, values->numel,
                                           values->data, values->dtype);
    }
    return pack ? fsdpc_activation_pack(values->data, values->dtype, values->numel, r->codes.data,
                                        r->scales.data)
                : fsdpc_activation_unpack(r->codes.data, r->scales.data, values->numel,
                                          values->data, values->dtype);
}

static PyObject *
run(bool pack, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    struct request r = {0};
    if (request_open(pack ? "activation_pack" : "activation_unpack", args, count, keywords, &r) <
        0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(run_request(pack, &r));
    return fsdpc_py_none_or(status);
}

static PyObject *
activation_pack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                PyObject *keywords)
{
    return run(true, args, count, keywords);
}

static PyObject *
activation_unpack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                  PyObject *keywords)
{
    return run(false, args, count, keywords);
}

PyMethodDef fsdpc_py_activation_methods[] = {
    FSDPC_PY_FUNCTION(
        activation_pack, FSDPC_PY_KEYWORDS, "(values, codes, scales, device=-1)",
        "Codes of 8 bits (int8) and a float32 scale per 256 elements, of contiguous memory: the\n"
        "host's, or that of the GPU with the ordinal `device`, on its current stream."),
    FSDPC_PY_FUNCTION(activation_unpack, FSDPC_PY_KEYWORDS, "(values, codes, scales, device=-1)",
                      "Writes the values of codes and scales into `values`."),
    {NULL, NULL, 0, NULL},
};
