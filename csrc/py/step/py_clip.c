/* Tree.clip(): computes the norm of all gradients and clips the gradients, as work queued on a GPU. */
#include "base/mem.h"
#include "py/step/py_step.h"

/* Sets *out to a view of a contiguous float64 tensor on the units' device. 0, or -1 with an exception. */
static int
doubles(const fsdpc_py_tree *self, PyObject *tensor, const char *what, fsdpc_py_view *out)
{
    const fsdpc_py_device place = fsdpc_py_device_of(fsdpc_unit_device(self->units[0]->unit));
    if (fsdpc_py_torch_view_on(tensor, place, out) < 0) {
        return -1;
    }
    if (out->dtype == FSDPC_F64 && out->contiguous) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "clip: %s must be a contiguous float64 tensor", what);
    return -1;
}

static int
take_tensors(const fsdpc_py_tree *self, PyObject *out, PyObject *extra, fsdpc_tree_clip_plan *plan)
{
    fsdpc_py_view view;
    if (doubles(self, out, "out", &view) < 0) {
        return -1;
    }
    if (view.numel != 2) {
        PyErr_SetString(PyExc_ValueError, "clip: out must have two elements");
        return -1;
    }
    plan->out = view.data;
    if (extra == Py_None) {
        return 0;
    }
    if (doubles(self, extra, "extra", &view) < 0) {
        return -1;
    }
    if (view.ndim != 2 || view.shape[1] * 8 != FSDPC_NORM_PART_BYTES) {
        PyErr_SetString(PyExc_ValueError, "clip: extra must be 2-D with rows of (sum, largest, 0)");
        return -1;
    }
    plan->extra = view.data;
    plan->extra_count = view.shape[0];
    return 0;
}

static int
take_masks(const fsdpc_py_tree *self, PyObject *list, const uint8_t **masks)
{
    if (!PyTuple_Check(list) || PyTuple_GET_SIZE(list) != self->count) {
        PyErr_Format(PyExc_ValueError,
                     "clip: masks must be a tuple of %d items, one mask or None per unit",
                     self->count);
        return -1;
    }
    for (int i = 0; i < self->count; i++) {
        PyObject *mask = PyTuple_GET_ITEM(list, i);
        const int params = fsdpc_unit_layout(self->units[i]->unit)->param_count;
        if (mask != Py_None && (!PyBytes_Check(mask) || PyBytes_GET_SIZE(mask) != params)) {
            PyErr_Format(PyExc_TypeError, "clip: the mask of unit %s must be %d bytes",
                         fsdpc_unit_name(self->units[i]->unit), params);
            return -1;
        }
        masks[i] = mask == Py_None ? NULL : (const uint8_t *)PyBytes_AS_STRING(mask);
    }
    return 0;
}

static PyObject *
clip(fsdpc_py_tree *self, PyObject *masks, PyObject *out, PyObject *extra,
     fsdpc_tree_clip_plan *plan)
{
    PyObject *result = NULL;
    const uint8_t **list = fsdpc_mem_calloc((size_t)self->count, sizeof *list);
    if (!list) {
        return PyErr_NoMemory();
    }
    if (take_masks(self, masks, list) < 0 || take_tensors(self, out, extra, plan) < 0 ||
        fsdpc_py_enter(self->units[0]) < 0) {
        goto done;
    }
    plan->masks = list;
    int status = FSDPC_PY_UNLOCKED(fsdpc_tree_clip(self->tree, plan));
    result = fsdpc_py_none_or(status);
done:
    fsdpc_mem_free(list);
    return result;
}

PyObject *
fsdpc_py_tree_clip(fsdpc_py_tree *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *masks, *out, *extra = Py_None;
    fsdpc_tree_clip_plan plan = {.scale = true};
    const fsdpc_py_arg table[] = {
        {"masks", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &masks},
        {"p", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &plan.p},
        {"max_norm", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &plan.max_norm},
        {"out", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &out},
        {"extra", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &extra},
        {"scale", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &plan.scale},
    };
    if (fsdpc_py_args("clip", table, 6, args, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_py_use use;
    if (fsdpc_py_use_tree(self, &use) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (!self->tree || self->count == 0) {
        PyErr_SetString(fsdpc_py_current()->state_error, "the tree is closed or has no units");
    } else {
        result = clip(self, masks, out, extra, &plan);
    }
    fsdpc_py_end_use(&use);
    return result;
}
