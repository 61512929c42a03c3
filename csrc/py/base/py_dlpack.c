/* DLPack and the buffer protocol: export of tensors to Python, import of tensors from Python.
 *
 * Export: unversioned "dltensor" capsules, which every torch release consumes. A consumer may drop
 * its tensor on any thread and at any time, even after the interpreter has ended. After that end the
 * owner is leaked on purpose, because Python may not be called any more.
 *
 * Import: torch tensors by functions of py_tensor.c, because __dlpack__ refuses tensors that require grad;
 * other objects by the buffer protocol (NumPy, bytearray, memoryview) where possible, else by __dlpack__.
 */
#include <string.h>

#include "base/mem.h"
#include "py/base/py.h"

/* --- out ------------------------------------------------------------------------------------- */

typedef struct exported {
    dlpack_managed managed;
    PyObject *owner;
    int64_t shape[FSDPC_PY_MAX_DIMS];
    int64_t strides[FSDPC_PY_MAX_DIMS];
} exported;

static void
drop_export(dlpack_managed *managed)
{
    exported *self = managed->context;
    if (fsdpc_py_finalizing()) {
        return;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(self->owner);
    PyGILState_Release(gil);
    fsdpc_mem_free(self);
}

/* Frees the tensor if no consumer has taken it: a consumer renames the capsule. */
static void
drop_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

static void
describe(exported *self, void *data, fsdpc_dtype dtype, int ndim, const int64_t *shape,
         fsdpc_py_device place)
{
    dlpack_tensor *tensor = &self->managed.tensor;
    tensor->data = data;
    tensor->device.type = place.type;
    tensor->device.id = place.id;
    tensor->ndim = ndim;
    tensor->dtype.code = fsdpc_dtype_dlpack_code(dtype);
    tensor->dtype.bits = fsdpc_dtype_dlpack_bits(dtype);
    tensor->dtype.lanes = 1;
    tensor->shape = self->shape;
    tensor->strides = self->strides;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        self->shape[i] = shape[i];
        self->strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
}

PyObject *
fsdpc_py_dlpack_export(void *data, fsdpc_dtype dtype, int ndim, const int64_t *shape,
                       fsdpc_py_device place, PyObject *owner)
{
    if (ndim < 0 || ndim > FSDPC_PY_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a tensor of %d dimensions cannot be exported", ndim);
        return NULL;
    }
    exported *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    describe(self, data, dtype, ndim, shape, place);
    self->managed.context = self;
    self->managed.deleter = drop_export;
    PyObject *capsule = PyCapsule_New(&self->managed, "dltensor", drop_capsule);
    if (capsule == NULL) {
        fsdpc_mem_free(self);
        return NULL;
    }
    self->owner = Py_NewRef(owner);
    return capsule;
}

/* --- in: buffer protocol ---------------------------------------------------------------------- */

static fsdpc_dtype
dtype_of_format(const char *format)
{
    if (format == NULL) {
        return FSDPC_BYTES;
    }
    format += *format == '@' || *format == '=' || *format == '<' ? 1 : 0;
    if (strcmp(format, "f") == 0) {
        return FSDPC_F32;
    }
    if (strcmp(format, "d") == 0) {
        return FSDPC_F64;
    }
    return strcmp(format, "e") == 0 ? FSDPC_F16 : FSDPC_BYTES;
}

/* True for a buffer format with Python objects. The items are then addresses, which must be neither sent nor
 * overwritten. In a format, names of fields are between colons. */
static bool
holds_objects(const char *format)
{
    bool name = false;
    for (; format != NULL && *format; format++) {
        name = *format == ':' ? !name : name;
        if (*format == 'O' && !name) {
            return true;
        }
    }
    return false;
}

static int
view_from_buffer(const Py_buffer *buffer, fsdpc_py_view *out)
{
    if (holds_objects(buffer->format) || buffer->suboffsets != NULL) {
        PyErr_SetString(PyExc_BufferError,
                        "the array holds Python objects or pointers, not values");
        return -1;
    }
    if (buffer->ndim > FSDPC_PY_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "the array has %d dimensions; %d are supported",
                     buffer->ndim, FSDPC_PY_MAX_DIMS);
        return -1;
    }
    out->data = buffer->buf;
    out->dtype = dtype_of_format(buffer->format);
    out->itemsize = (size_t)buffer->itemsize;
    out->ndim = buffer->ndim;
    out->readonly = buffer->readonly != 0;
    for (int i = 0; i < buffer->ndim; i++) {
        if (buffer->itemsize == 0 || buffer->strides[i] % buffer->itemsize != 0) {
            PyErr_SetString(PyExc_BufferError, "the array's strides are not whole elements");
            return -1;
        }
        out->shape[i] = buffer->shape[i];
        out->strides[i] = buffer->strides[i] / buffer->itemsize;
    }
    return fsdpc_py_view_finish(out);
}

/* The view's owner is a memoryview, which keeps the buffer alive. */
static int
view_by_buffer(PyObject *object, fsdpc_py_view *out)
{
    PyObject *memory = PyMemoryView_FromObject(object);
    if (memory == NULL) {
        return -1;
    }
    if (view_from_buffer(PyMemoryView_GET_BUFFER(memory), out) < 0) {
        Py_DECREF(memory);
        return -1;
    }
    out->owner = memory;
    return 0;
}

/* --- in: __dlpack__ --------------------------------------------------------------------------- */

/* The capsule becomes the view's owner without being renamed or consumed, so that the capsule's destructor
 * calls the producer's deleter. */
static int
view_from_capsule(PyObject *capsule, fsdpc_py_view *out)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dlpack_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->version.major != DLPACK_MAJOR) {
            PyErr_Format(PyExc_BufferError, "DLPack version %u.%u is not supported",
                         (unsigned)managed->version.major, (unsigned)managed->version.minor);
            return -1;
        }
        if (fsdpc_py_view_from_dlpack(&managed->tensor, out) < 0) {
            return -1;
        }
        out->readonly = (managed->flags & DLPACK_FLAG_READ_ONLY) != 0;
        return fsdpc_py_check_device(out, fsdpc_py_host);
    }
    dlpack_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (managed == NULL || fsdpc_py_view_from_dlpack(&managed->tensor, out) < 0) {
        return -1;
    }
    return fsdpc_py_check_device(out, fsdpc_py_host);
}

static int
view_by_dlpack(PyObject *object, fsdpc_py_view *out)
{
    PyObject *capsule = PyObject_CallMethod(object, "__dlpack__", NULL);
    if (capsule == NULL) {
        return -1;
    }
    if (view_from_capsule(capsule, out) < 0) {
        Py_DECREF(capsule);
        return -1;
    }
    out->owner = capsule;
    return 0;
}

/* --- in: entry ------------------------------------------------------------------------------- */

int
fsdpc_py_tensor_view_any(PyObject *object, fsdpc_py_view *out)
{
    memset(out, 0, sizeof *out);
    out->place = fsdpc_py_host;
    if (fsdpc_py_is_torch(object)) {
        if (fsdpc_py_torch_view_any(object, out) < 0) {
            return -1;
        }
        out->owner = Py_NewRef(object);
        return 0;
    }
    bool dlpack = PyObject_HasAttrString(object, "__dlpack__");
    if (PyObject_CheckBuffer(object)) {
        if (view_by_buffer(object, out) == 0) {
            return 0;
        }
        /* NumPy refuses to export arrays with element types of other packages (bfloat16) as buffers. */
        if (!dlpack || !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear();
    }
    if (dlpack) {
        return view_by_dlpack(object, out);
    }
    PyErr_Format(PyExc_TypeError,
                 "expected a tensor or an array (DLPack or buffer protocol), not %.100s",
                 Py_TYPE(object)->tp_name);
    return -1;
}

void
fsdpc_py_view_release(fsdpc_py_view *view)
{
    Py_CLEAR(view->owner);
}
