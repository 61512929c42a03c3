/* A flat parameter's memory as DLPack capsules (for torch) and NumPy arrays: views, never copies.
 * Each view keeps the flat parameter alive.
 */
#define PY_SSIZE_T_CLEAN
#include "py/unit/py_flat.h"

#include "py/base/py_numpy.h"

/* --- memory as tensors ----------------------------------------------------------------------- */

static PyObject *
capsule(fsdpc_py_flat *self, void *data, fsdpc_dtype dtype, int64_t length)
{
    return fsdpc_py_dlpack_export(data, dtype, 1, &length, fsdpc_py_own_device(self),
                                  (PyObject *)self);
}

/* Raises ValueError for a frozen segment: only trainable segments have memory for gradients. */
static int
check_trainable(const fsdpc_py_flat *self, int segment)
{
    if (fsdpc_unit_layout(self->unit)->segments[segment].trainable) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "unit %s: segment %d is frozen and has no gradient",
                 fsdpc_unit_name(self->unit), segment);
    return -1;
}

PyObject *
fsdpc_py_flat_shard_part(fsdpc_py_flat *self, PyObject *index)
{
    int i;
    if (fsdpc_py_flat_index(self, index, &i) < 0) {
        return NULL;
    }
    int64_t length;
    void *data = fsdpc_unit_master_part(self->unit, i, &length);
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    return capsule(self, data, layout->segments[layout->params[i].segment].storage, length);
}

PyObject *
fsdpc_py_flat_grad_part(fsdpc_py_flat *self, PyObject *index)
{
    int i;
    if (fsdpc_py_flat_index(self, index, &i) < 0) {
        return NULL;
    }
    int64_t length;
    if (check_trainable(self, fsdpc_unit_layout(self->unit)->params[i].segment) < 0) {
        return NULL;
    }
    void *data = fsdpc_unit_grad_part(self->unit, i, &length);
    return capsule(self, data, fsdpc_unit_grad_dtype(self->unit, i), length);
}

/* Raises StateError for a foreign unit: the engine has no memory for its gathered values. 0, or -1. */
static int
refuse_foreign(const fsdpc_py_flat *self)
{
    if (self->foreign) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "the gathered values of unit %s are not in the engine's memory",
                     fsdpc_unit_name(self->unit));
    }
    return self->foreign ? -1 : 0;
}

PyObject *
fsdpc_py_flat_full_param(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count)
{
    int i;
    if (count != 2 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) > FSDPC_PY_MAX_DIMS) {
        PyErr_SetString(PyExc_TypeError,
                        "full_param takes a parameter's index and a shape (tuple)");
        return NULL;
    }
    if (fsdpc_py_flat_index(self, args[0], &i) < 0) {
        return NULL;
    }
    int64_t shape[FSDPC_PY_MAX_DIMS], numel = 1;
    int ndim = (int)PyTuple_GET_SIZE(args[1]);
    for (int d = 0; d < ndim; d++) {
        shape[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], d));
        if (shape[d] < 0) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError,
                             "parameter %s of unit %s: the shape has the dimension %lld",
                             fsdpc_unit_layout(self->unit)->params[i].name,
                             fsdpc_unit_name(self->unit), (long long)shape[d]);
            }
            return NULL;
        }
        if (__builtin_mul_overflow(numel, shape[d], &numel)) {
            numel = -1;
            break;
        }
    }
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    if (numel != layout->params[i].numel) {
        PyErr_Format(PyExc_ValueError,
                     "parameter %s of unit %s has %lld elements, but the shape has %lld",
                     layout->params[i].name, fsdpc_unit_name(self->unit),
                     (long long)layout->params[i].numel, (long long)numel);
        return NULL;
    }
    if (refuse_foreign(self) < 0) {
        return NULL;
    }
    char *base = fsdpc_unit_full(self->unit);
    return fsdpc_py_dlpack_export(base + fsdpc_layout_full_offset(layout, i),
                                  layout->segments[layout->params[i].segment].compute, ndim, shape,
                                  fsdpc_py_full_device(self), (PyObject *)self);
}

static int
parse_segment(const fsdpc_py_flat *self, PyObject *object, int *out)
{
    long index = PyLong_AsLong(object);
    if (index < 0 || index >= fsdpc_unit_layout(self->unit)->segment_count) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_IndexError, "unit %s has %d segments; index %ld is out of range",
                         fsdpc_unit_name(self->unit), fsdpc_unit_layout(self->unit)->segment_count,
                         index);
        }
        return -1;
    }
    *out = (int)index;
    return 0;
}

PyObject *
fsdpc_py_flat_shard_segment(fsdpc_py_flat *self, PyObject *index)
{
    int s;
    if (parse_segment(self, index, &s) < 0) {
        return NULL;
    }
    const fsdpc_segment *seg = &fsdpc_unit_layout(self->unit)->segments[s];
    return capsule(self, (char *)fsdpc_unit_master(self->unit) + seg->shard_offset, seg->storage,
                   seg->piece_numel);
}

PyObject *
fsdpc_py_flat_grad_segment(fsdpc_py_flat *self, PyObject *index)
{
    int s;
    if (parse_segment(self, index, &s) < 0 || check_trainable(self, s) < 0) {
        return NULL;
    }
    fsdpc_dtype dtype;
    void *data = fsdpc_unit_grad_out(self->unit, s, &dtype);
    return capsule(self, data, dtype, fsdpc_unit_layout(self->unit)->segments[s].piece_numel);
}

static int
numpy_type(fsdpc_dtype dtype)
{
    switch (dtype) {
    case FSDPC_F32:
        return NPY_FLOAT32;
    case FSDPC_F64:
        return NPY_FLOAT64;
    case FSDPC_F16:
        return NPY_FLOAT16;
    case FSDPC_BF16: /* NumPy has no bfloat16: the array has the bits */
        return NPY_UINT16;
    default:
        return NPY_UINT8;
    }
}

/* Returns a NumPy array over memory of the unit. The array keeps the unit alive. */
static PyObject *
host_view(fsdpc_py_flat *self, void *data, fsdpc_dtype dtype, int64_t numel)
{
    npy_intp shape = (npy_intp)numel;
    static char nothing[8];
    if (fsdpc_py_own_device(self).type != DLPACK_DEVICE_CPU) {
        PyErr_Format(
            PyExc_BufferError,
            "unit %s is in GPU memory, which NumPy cannot view; use shard_part, grad_part or "
            "full_param for tensors over it",
            fsdpc_unit_name(self->unit));
        return NULL;
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    PyObject *array =
        PyArray_SimpleNewFromData(1, &shape, numpy_type(dtype), numel ? data : nothing);
    if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *
whole_view(fsdpc_py_flat *self, bool full)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    char *base = full ? fsdpc_unit_full(self->unit) : fsdpc_unit_master(self->unit);
    if (layout->segment_count != 1) {
        size_t bytes = full ? layout->full_bytes : layout->shard_bytes;
        return host_view(self, base, FSDPC_BYTES, (int64_t)bytes);
    }
    const fsdpc_segment *seg = &layout->segments[0];
    return host_view(self, base, full ? seg->compute : seg->storage,
                     full ? seg->piece_numel * layout->world : seg->piece_numel);
}

PyObject *
fsdpc_py_flat_get_shard(fsdpc_py_flat *self, void *Py_UNUSED(closure))
{
    return whole_view(self, false);
}

PyObject *
fsdpc_py_flat_get_full(fsdpc_py_flat *self, void *Py_UNUSED(closure))
{
    return refuse_foreign(self) < 0 ? NULL : whole_view(self, true);
}

PyObject *
fsdpc_py_flat_get_grad(fsdpc_py_flat *self, void *Py_UNUSED(closure))
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    if (layout->segment_count != 1) {
        return host_view(self, fsdpc_unit_grad(self->unit), FSDPC_BYTES,
                         (int64_t)layout->grad_bytes);
    }
    const fsdpc_segment *seg = &layout->segments[0];
    return host_view(self, fsdpc_unit_grad(self->unit), seg->accumulate,
                     seg->trainable ? seg->piece_numel : 0);
}
