/* Views of torch tensors from C, without torch's headers or libraries.
 *
 * This code runs once per gradient in a training step. Newer torch publishes C functions on the tensor
 * type (DLPack's exchange interface, py_tensor_type.c): one call fills a struct. If the functions are
 * missing, or refuse a tensor, the tensor's Python methods are called instead, which also give better
 * error texts.
 *
 * A lazily negated or conjugated tensor has memory that does not hold its values. The C functions
 * do not report that, so the tensor's is_neg() and is_conj() are called as well.
 */
#include <stdio.h>
#include <string.h>

#include "py/base/py.h"

int
fsdpc_py_view_finish(fsdpc_py_view *view)
{
    int64_t numel = 1, bytes;
    bool fits = true, empty = false;
    for (int i = 0; i < view->ndim; i++) {
        fits = fits && view->shape[i] >= 0;
        empty = empty || view->shape[i] == 0;
    }
    for (int i = 0; fits && !empty && i < view->ndim; i++) {
        fits = !__builtin_mul_overflow(numel, view->shape[i], &numel);
    }
    if (!fits || __builtin_mul_overflow(numel, (int64_t)view->itemsize, &bytes)) {
        PyErr_SetString(PyExc_BufferError, "the tensor's shape overflows the size of memory");
        return -1;
    }
    numel = empty ? 0 : numel;
    view->numel = numel;
    view->contiguous = true;
    int64_t expected = 1;
    for (int i = view->ndim - 1; numel > 0 && i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != expected) {
            view->contiguous = false;
        }
        expected *= view->shape[i];
    }
    if (numel > 0 && view->data == NULL) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor has no memory: it is fake, or its storage was freed");
        return -1;
    }
    return 0;
}

static void
set_dlpack_type(const dlpack_tensor *tensor, fsdpc_py_view *out)
{
    out->dtype = FSDPC_BYTES;
    out->itemsize = ((size_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
    for (int type = 0; type < FSDPC_DTYPE_COUNT; type++) {
        if (fsdpc_dtype_dlpack_code((fsdpc_dtype)type) == tensor->dtype.code &&
            fsdpc_dtype_dlpack_bits((fsdpc_dtype)type) == tensor->dtype.bits &&
            tensor->dtype.lanes == 1) {
            out->dtype = (fsdpc_dtype)type;
        }
    }
}

const fsdpc_py_device fsdpc_py_host = {DLPACK_DEVICE_CPU, 0};

fsdpc_py_device
fsdpc_py_device_of(const fsdpc_device *device)
{
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(device);
    if (!caps->asynchronous || caps->stand_in) {
        return fsdpc_py_host;
    }
    return (fsdpc_py_device){DLPACK_DEVICE_CUDA, caps->ordinal};
}

static const char *
device_text(fsdpc_py_device place, char *text, size_t bytes)
{
    if (place.type == DLPACK_DEVICE_CPU) {
        return "host memory";
    }
    snprintf(text, bytes, "cuda:%d", (int)place.id);
    return text;
}

int
fsdpc_py_check_device(const fsdpc_py_view *view, fsdpc_py_device place)
{
    char have[32], want[32];
    if (view->place.type == place.type && view->place.id == place.id) {
        return 0;
    }
    PyErr_Format(PyExc_BufferError, "the tensor must be in %s, but is in %s",
                 device_text(place, want, sizeof want),
                 device_text(view->place, have, sizeof have));
    return -1;
}

static int
read_dlpack_device(const dlpack_tensor *tensor, fsdpc_py_device *out)
{
    switch (tensor->device.type) {
    case DLPACK_DEVICE_CPU:
    case DLPACK_DEVICE_CUDA_HOST:
    case DLPACK_DEVICE_ROCM_HOST:
        *out = fsdpc_py_host;
        return 0;
    case DLPACK_DEVICE_CUDA:
        *out = (fsdpc_py_device){DLPACK_DEVICE_CUDA, tensor->device.id};
        return 0;
    default:
        PyErr_Format(
            PyExc_BufferError,
            "the tensor is neither in host memory nor in CUDA memory (DLPack device type %d)",
            (int)tensor->device.type);
        return -1;
    }
}

int
fsdpc_py_view_from_dlpack(const dlpack_tensor *tensor, fsdpc_py_view *out)
{
    if (read_dlpack_device(tensor, &out->place) < 0) {
        return -1;
    }
    if (tensor->ndim < 0 || tensor->ndim > FSDPC_PY_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "the tensor has %d dimensions; %d are supported",
                     (int)tensor->ndim, FSDPC_PY_MAX_DIMS);
        return -1;
    }
    out->data = tensor->data == NULL ? NULL : (char *)tensor->data + tensor->byte_offset;
    out->ndim = tensor->ndim;
    out->readonly = false;
    out->owner = NULL;
    set_dlpack_type(tensor, out);
    int64_t stride = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        out->shape[i] = tensor->shape[i];
        out->strides[i] = tensor->strides == NULL ? stride : tensor->strides[i];
        stride *= tensor->shape[i];
    }
    return fsdpc_py_view_finish(out);
}

/* --- by C functions -------------------------------------------------------------------------- */

static const dlpack_exchange *
exchange_of(PyTypeObject *type)
{
    const fsdpc_py_tensor_type *known = fsdpc_py_tensor_type_of(type);
    return known != NULL ? known->exchange : fsdpc_py_look_up_exchange(type);
}

/* Returns the truth of a method's result, 1 or 0, and drops its reference; -1 with an exception set. */
static int
truth_of(PyObject *answer)
{
    if (answer == NULL || answer == Py_False) {
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    int truth = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

/* Refuses a tensor with torch's negative bit or conjugate bit. A complex tensor can have both, a real one
 * only the negative bit. */
static int
check_plain(PyObject *tensor, fsdpc_dtype dtype)
{
    int lazy = truth_of(fsdpc_py_call_field(tensor, FSDPC_PY_IS_NEG));
    if (lazy == 0 && dtype == FSDPC_BYTES) {
        lazy = truth_of(PyObject_CallMethodNoArgs(tensor, fsdpc_py_current()->name_is_conj));
    }
    if (lazy > 0) {
        PyErr_SetString(PyExc_BufferError, "the tensor is lazily negated or conjugated; call "
                                           "resolve_neg() or resolve_conj() first");
    }
    return lazy == 0 ? 0 : -1;
}

/* --- by methods ------------------------------------------------------------------------------ */

/* Returns str() of an attribute as text, which is borrowed from *held. NULL with an exception set. */
static const char *
attribute_text(PyObject *object, const char *name, PyObject **held)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    *held = value == NULL ? NULL : PyObject_Str(value);
    Py_XDECREF(value);
    return *held == NULL ? NULL : PyUnicode_AsUTF8(*held);
}

static int
read_type(PyObject *tensor, fsdpc_py_view *out)
{
    PyObject *held = NULL;
    const char *text = attribute_text(tensor, "dtype", &held);
    if (text == NULL) {
        Py_XDECREF(held);
        return -1;
    }
    text += strncmp(text, "torch.", 6) == 0 ? 6 : 0;
    if (fsdpc_dtype_from_name(text, &out->dtype) != FSDPC_OK) {
        out->dtype = FSDPC_BYTES;
    }
    Py_DECREF(held);
    PyObject *size = PyObject_CallMethod(tensor, "element_size", NULL);
    out->itemsize = size == NULL ? 0 : PyLong_AsSize_t(size);
    Py_XDECREF(size);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* Reads a sequence of integers and drops its reference. Returns its length, or -1. */
static int
read_numbers(PyObject *sequence, int64_t *out)
{
    if (sequence == NULL) {
        return -1;
    }
    PyObject *tuple = PySequence_Tuple(sequence);
    Py_DECREF(sequence);
    if (tuple == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count > FSDPC_PY_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "the tensor has %zd dimensions; %d are supported", count,
                     FSDPC_PY_MAX_DIMS);
        count = -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    }
    Py_DECREF(tuple);
    return PyErr_Occurred() == NULL ? (int)count : -1;
}

static int
read_ordinal(PyObject *device, int32_t *out)
{
    PyObject *index = PyObject_GetAttrString(device, "index");
    *out = index == NULL || index == Py_None ? 0 : (int32_t)PyLong_AsLong(index);
    Py_XDECREF(index);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

static int
read_device(PyObject *tensor, fsdpc_py_device *out)
{
    PyObject *device = PyObject_GetAttrString(tensor, "device");
    PyObject *held = NULL;
    const char *text = device == NULL ? NULL : attribute_text(device, "type", &held);
    *out = fsdpc_py_host;
    if (text != NULL && strcmp(text, "cuda") == 0) {
        out->type = DLPACK_DEVICE_CUDA;
        (void)read_ordinal(device, &out->id);
    } else if (text != NULL && strcmp(text, "cpu") != 0) {
        PyErr_Format(PyExc_BufferError,
                     "the tensor is neither in host memory nor in CUDA memory (device %.50s)",
                     text);
    }
    Py_XDECREF(held);
    Py_XDECREF(device);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* Raises an error that says why a tensor without plain memory (sparse, meta, ...) has no view. Returns -1. */
static int
no_memory(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return -1;
    }
    char text[256];
    fsdpc_py_exception_text(text, sizeof text);
    PyErr_Clear();
    PyErr_Format(PyExc_BufferError, "the tensor is not a dense array in memory (%s)", text);
    return -1;
}

static int
view_by_methods(PyObject *tensor, fsdpc_py_view *out)
{
    if (!fsdpc_py_is_torch(tensor)) {
        PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, not %.100s",
                     Py_TYPE(tensor)->tp_name);
        return -1;
    }
    if (read_device(tensor, &out->place) < 0 || read_type(tensor, out) < 0 ||
        check_plain(tensor, out->dtype) < 0) {
        return -1;
    }
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    if (address == NULL) {
        return no_memory();
    }
    out->data = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    out->ndim = read_numbers(PyObject_GetAttrString(tensor, "shape"), out->shape);
    PyObject *strides = out->ndim < 0 ? NULL : PyObject_CallMethod(tensor, "stride", NULL);
    if (read_numbers(strides, out->strides) < 0) {
        return -1;
    }
    out->owner = NULL;
    out->readonly = false;
    return fsdpc_py_view_finish(out);
}

/* --- entry ----------------------------------------------------------------------------------- */

int
fsdpc_py_torch_view(PyObject *tensor, fsdpc_py_view *out)
{
    return fsdpc_py_torch_view_on(tensor, fsdpc_py_host, out);
}

int
fsdpc_py_torch_view_slow(PyObject *tensor, fsdpc_py_view *out)
{
    return view_by_methods(tensor, out) < 0 ? -1 : fsdpc_py_check_device(out, fsdpc_py_host);
}

int
fsdpc_py_torch_view_on(PyObject *tensor, fsdpc_py_device place, fsdpc_py_view *out)
{
    return fsdpc_py_torch_view_any(tensor, out) < 0 ? -1 : fsdpc_py_check_device(out, place);
}

int
fsdpc_py_torch_view_any(PyObject *tensor, fsdpc_py_view *out)
{
    const dlpack_exchange *exchange = exchange_of(Py_TYPE(tensor));
    if (exchange == NULL) {
        return view_by_methods(tensor, out);
    }
    dlpack_tensor borrowed;
    if (exchange->borrow(tensor, &borrowed) != 0) {
        PyErr_Clear();
        return view_by_methods(tensor, out);
    }
    if (fsdpc_py_view_from_dlpack(&borrowed, out) < 0) {
        return -1;
    }
    return check_plain(tensor, out->dtype);
}

int
fsdpc_py_torch_data(PyObject *tensor, const void **out)
{
    const dlpack_exchange *exchange = exchange_of(Py_TYPE(tensor));
    dlpack_tensor borrowed;
    if (exchange != NULL && exchange->borrow(tensor, &borrowed) == 0) {
        *out = borrowed.data == NULL ? NULL : (const char *)borrowed.data + borrowed.byte_offset;
        return 0;
    }
    PyErr_Clear();
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    *out = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    return PyErr_Occurred() == NULL ? 0 : -1;
}
