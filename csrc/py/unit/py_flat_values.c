/* Copies whole parameters and gradients of a unit from and to tensors, and computes the norm of this rank's
 * gradients and scales them.
 */
#include "py/unit/py_flat.h"

#include "base/mem.h"

int
fsdpc_py_side(const fsdpc_py_flat *flat, const fsdpc_py_view *view, int *side)
{
    fsdpc_py_device device = fsdpc_py_full_device(flat);
    bool on_device = view->place.type == device.type && view->place.id == device.id;
    if (view->numel == 0) {
        return 0;
    }
    if (!on_device && view->place.type != DLPACK_DEVICE_CPU) {
        return fsdpc_py_check_device(view, device);
    }
    if (*side >= 0 && (*side == FSDPC_ON_DEVICE) != on_device) {
        PyErr_Format(PyExc_ValueError,
                     "unit %s: the tensors must be all on the GPU or all in host memory",
                     fsdpc_unit_name(flat->unit));
        return -1;
    }
    *side = on_device ? FSDPC_ON_DEVICE : FSDPC_ON_HOST;
    return 0;
}

static int
check_full_tensor(const fsdpc_py_flat *self, enum fsdpc_which which, int i, PyObject *object,
                  bool writable, fsdpc_py_view *view)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    fsdpc_dtype dtype = which == FSDPC_GRAD ? fsdpc_unit_grad_dtype(self->unit, i)
                                            : layout->segments[layout->params[i].segment].storage;
    if (fsdpc_py_tensor_view_any(object, view) < 0) {
        return -1;
    }
    bool fits = dtype == FSDPC_BYTES
                    ? view->numel * (int64_t)view->itemsize == layout->params[i].numel
                    : view->dtype == dtype && view->numel == layout->params[i].numel;
    if (fits && view->contiguous && !(writable && view->readonly)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "parameter %s of unit %s needs a contiguous%s %s tensor of %lld elements",
                 layout->params[i].name, fsdpc_unit_name(self->unit), writable ? ", writable" : "",
                 fsdpc_dtype_name(dtype), (long long)layout->params[i].numel);
    fsdpc_py_view_release(view);
    return -1;
}

PyObject *
fsdpc_py_flat_write(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count,
                    PyObject *keywords)
{
    PyObject *index, *tensor;
    bool grad = false;
    const fsdpc_py_arg table[] = {
        {"param", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &index},
        {"tensor", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &tensor},
        {"grad", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &grad},
    };
    int i, side = -1;
    fsdpc_py_view view;
    enum fsdpc_which which;
    if (fsdpc_py_args("write", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    which = grad ? FSDPC_GRAD : FSDPC_MASTER;
    if (fsdpc_py_flat_index(self, index, &i) < 0 || fsdpc_py_enter(self) < 0 ||
        check_full_tensor(self, which, i, tensor, false, &view) < 0) {
        return NULL;
    }
    int failed = fsdpc_py_side(self, &view, &side), status = FSDPC_OK;
    fsdpc_py_touch(self);
    if (!failed) {
        status = FSDPC_PY_UNLOCKED(
            fsdpc_unit_write(self->unit, which, i, view.data,
                             side == FSDPC_ON_HOST ? FSDPC_ON_HOST : FSDPC_ON_DEVICE));
    }
    fsdpc_py_view_release(&view);
    if (failed) {
        return NULL;
    }
    return fsdpc_py_none_or(status);
}

static PyObject *
read_into(fsdpc_py_flat *self, enum fsdpc_which which, PyObject *tensors)
{
    int count = fsdpc_unit_layout(self->unit)->param_count, held = 0, status = FSDPC_OK;
    int side = -1;
    PyObject *result = NULL;
    fsdpc_py_view *views = fsdpc_mem_calloc((size_t)count, sizeof *views);
    void **full = fsdpc_mem_calloc((size_t)count, sizeof *full);
    if (!views || !full) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, held);
        if (tensor != Py_None &&
            check_full_tensor(self, which, held, tensor, true, &views[held]) < 0) {
            goto done;
        }
        full[held] = views[held].data;
        if (tensor != Py_None && fsdpc_py_side(self, &views[held], &side) < 0) {
            held++;
            goto done;
        }
    }
    status = FSDPC_PY_UNLOCKED(fsdpc_unit_read(
        self->unit, which, full, side == FSDPC_ON_HOST ? FSDPC_ON_HOST : FSDPC_ON_DEVICE));
    result = fsdpc_py_met(self, status);
done:
    for (int i = 0; i < held; i++) {
        if (views[i].owner) {
            fsdpc_py_view_release(&views[i]);
        }
    }
    fsdpc_mem_free(views);
    fsdpc_mem_free(full);
    return result;
}

PyObject *
fsdpc_py_flat_read(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *list;
    bool grad = false;
    const fsdpc_py_arg table[] = {
        {"tensors", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"grad", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &grad},
    };
    if (fsdpc_py_args("read", table, 2, args, count, keywords) < 0 || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    PyObject *tensors = PySequence_Tuple(list);
    if (!tensors) {
        return NULL;
    }
    PyObject *result = NULL;
    if (PyTuple_GET_SIZE(tensors) == fsdpc_unit_layout(self->unit)->param_count) {
        result = read_into(self, grad ? FSDPC_GRAD : FSDPC_MASTER, tensors);
    } else {
        PyErr_Format(PyExc_ValueError,
                     "read: tensors must have one tensor or None per parameter of unit %s",
                     fsdpc_unit_name(self->unit));
    }
    Py_DECREF(tensors);
    return result;
}

/* --- gradients ------------------------------------------------------------------------------- */

static const uint8_t *
parse_mask(const fsdpc_py_flat *self, PyObject *object)
{
    if (!PyBytes_Check(object) ||
        PyBytes_GET_SIZE(object) != fsdpc_unit_layout(self->unit)->param_count) {
        PyErr_SetString(PyExc_TypeError, "mask must be bytes with one byte per parameter");
        return NULL;
    }
    return (const uint8_t *)PyBytes_AS_STRING(object);
}

PyObject *
fsdpc_py_flat_grad_norm(fsdpc_py_flat *self, PyObject *args)
{
    PyObject *object;
    double p;
    if (!PyArg_ParseTuple(args, "Od:grad_norm", &object, &p) || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    const uint8_t *mask = parse_mask(self, object);
    if (!mask) {
        return NULL;
    }
    fsdpc_norm norm;
    int status = FSDPC_PY_UNLOCKED(fsdpc_unit_grad_norm(self->unit, mask, p, &norm));
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return Py_BuildValue("ddO", norm.sum, norm.max, norm.nonfinite ? Py_True : Py_False);
}

PyObject *
fsdpc_py_flat_scale_grads(fsdpc_py_flat *self, PyObject *args)
{
    PyObject *object;
    double factor;
    if (!PyArg_ParseTuple(args, "Od:scale_grads", &object, &factor) || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    const uint8_t *mask = parse_mask(self, object);
    if (!mask) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_unit_scale_grads(self->unit, mask, factor));
    return fsdpc_py_none_or(status);
}
