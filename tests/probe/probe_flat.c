/* Functions that gather, release and reduce a flat parameter without a tree of modules, with NumPy
 * only. The first use creates a tree that has only this unit.
 */
#include "probe.h"
#include "py/unit/py_flat.h"

#include "base/mem.h"

/* Makes a tree that has only this unit, at the first use. Fails if the unit belongs to another tree.
 * Collective. */
static int
own_tree(fsdpc_py_flat *self)
{
    if (self->tree && !self->own_tree) {
        fsdpc_py_raise(fsdpc_error(FSDPC_E_STATE,
                                   "unit %s belongs to a tree, whose hooks gather and reduce it",
                                   fsdpc_unit_name(self->unit)));
        return -1;
    }
    if (self->tree) {
        return 0;
    }
    PyObject *type = (PyObject *)fsdpc_py_current()->tree_type;
    PyObject *tree = PyObject_CallFunction(type, "[O](i)", self, 0);
    if (!tree) {
        return -1;
    }
    /* The tree has stored a new reference to itself in self->tree, which now keeps the tree alive. */
    Py_DECREF(tree);
    self->own_tree = true;
    return 0;
}

static PyObject *
run_gather(fsdpc_py_flat *self)
{
    fsdpc_py_use use;
    if (own_tree(self) < 0 || fsdpc_py_enter(self) < 0 || fsdpc_py_use_flat(self, &use) < 0) {
        return NULL;
    }
    int status = FSDPC_OK;
    fsdpc_tree *tree = self->tree->tree;
    Py_BEGIN_ALLOW_THREADS
    if (fsdpc_unit_refs(self->unit) == 0) {
        status = fsdpc_tree_begin_forward(tree, true);
    }
    if (status == FSDPC_OK) {
        status = fsdpc_tree_forward_enter(tree, 0);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = fsdpc_py_none_or(status);
    fsdpc_py_end_use(&use);
    return result;
}

static PyObject *
run_release(fsdpc_py_flat *self)
{
    if (!self->own_tree || fsdpc_unit_refs(self->unit) == 0) {
        return fsdpc_py_none_or(fsdpc_error(FSDPC_E_STATE,
                                            "release() of unit %s without a preceding gather()",
                                            fsdpc_unit_name(self->unit)));
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_tree_forward_leave(self->tree->tree, 0, false));
    return fsdpc_py_none_or(status);
}

static int
view_grads(fsdpc_py_flat *self, PyObject *list, fsdpc_py_view *views, fsdpc_tensor *grads)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    PyObject *items = PySequence_Tuple(list);
    if (!items) {
        return -1;
    }
    int result = PyTuple_GET_SIZE(items) == layout->param_count ? 0 : -1;
    if (result < 0) {
        PyErr_Format(PyExc_ValueError,
                     "reduce: grads must have one gradient or None per parameter of unit %s (%d)",
                     fsdpc_unit_name(self->unit), layout->param_count);
    }
    for (int i = 0; result == 0 && i < layout->param_count; i++) {
        if (PyTuple_GET_ITEM(items, i) == Py_None) {
            continue;
        }
        result = fsdpc_py_tensor_view_any(PyTuple_GET_ITEM(items, i), &views[i]);
        if (result == 0) {
            result = fsdpc_py_check_device(&views[i], fsdpc_py_full_device(self));
        }
        if (result == 0 && views[i].numel != layout->params[i].numel) {
            PyErr_Format(PyExc_ValueError,
                         "the gradient of parameter %s of unit %s has %lld elements, not %lld",
                         layout->params[i].name, fsdpc_unit_name(self->unit),
                         (long long)views[i].numel, (long long)layout->params[i].numel);
            result = -1;
        } else if (result == 0 && views[i].dtype == FSDPC_BYTES &&
                   layout->params[i].trainable_index >= 0) {
            PyErr_Format(PyExc_ValueError,
                         "the gradient of parameter %s of unit %s is not of a floating dtype",
                         layout->params[i].name, fsdpc_unit_name(self->unit));
            result = -1;
        }
        grads[i] = (fsdpc_tensor){views[i].data,  views[i].dtype,   views[i].ndim,
                                  views[i].shape, views[i].strides, views[i].contiguous};
    }
    Py_DECREF(items);
    return result;
}

static PyObject *
run_reduce(fsdpc_py_flat *self, PyObject *list, bool add)
{
    PyObject *result = NULL;
    if (own_tree(self) < 0 || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    int params = fsdpc_unit_layout(self->unit)->param_count, status = FSDPC_OK;
    fsdpc_py_view *views = fsdpc_mem_calloc((size_t)params, sizeof *views);
    fsdpc_tensor *grads = fsdpc_mem_calloc((size_t)params, sizeof *grads);
    if (!views || !grads) {
        PyErr_NoMemory();
    } else if (view_grads(self, list, views, grads) == 0) {
        fsdpc_tree *tree = self->tree->tree;
        fsdpc_unit_set_add(self->unit, add);
        Py_BEGIN_ALLOW_THREADS
        status = fsdpc_tree_begin_backward(tree);
        status = status ? status : fsdpc_tree_backward_done(tree, 0, true);
        status = status ? status : fsdpc_tree_reduce(tree, 0, grads);
        status = status ? status : fsdpc_tree_end_backward(tree, true);
        Py_END_ALLOW_THREADS
        result = fsdpc_py_none_or(status);
    }
    for (int i = 0; views && i < params; i++) {
        if (views[i].owner) {
            fsdpc_py_view_release(&views[i]);
        }
    }
    fsdpc_mem_free(views);
    fsdpc_mem_free(grads);
    return result;
}

/* --- functions ------------------------------------------------------------------------------- */

static PyObject *
call_on_unit(PyObject *unit, PyObject *(*run)(fsdpc_py_flat *))
{
    fsdpc_py_flat *flat;
    fsdpc_py_use use;
    if (fsdpc_py_flat_get(unit, &flat) < 0 || fsdpc_py_use_flat(flat, &use) < 0) {
        return NULL;
    }
    PyObject *result = run(flat);
    fsdpc_py_end_use(&use);
    return result;
}

static PyObject *
gather(PyObject *Py_UNUSED(module), PyObject *unit)
{
    return call_on_unit(unit, run_gather);
}

static PyObject *
release(PyObject *Py_UNUSED(module), PyObject *unit)
{
    return call_on_unit(unit, run_release);
}

static PyObject *
reduce(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *unit, *grads;
    fsdpc_py_flat *flat;
    fsdpc_py_use use;
    bool add = false;
    const fsdpc_py_arg table[] = {
        {"unit", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &unit},
        {"grads", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &grads},
        {"add", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &add},
    };
    if (fsdpc_py_args("reduce", table, 3, args, count, keywords) < 0 ||
        fsdpc_py_flat_get(unit, &flat) < 0 || fsdpc_py_use_flat(flat, &use) < 0) {
        return NULL;
    }
    PyObject *result = run_reduce(flat, grads, add);
    fsdpc_py_end_use(&use);
    return result;
}

PyMethodDef fsdpc_probe_flat_methods[] = {
    FSDPC_PY_FUNCTION(gather, METH_O, "(unit, /)",
                      "Makes all ranks' values readable in `unit.full`; counted. The unit must be\n"
                      "in no tree of the caller's. Collective. StateError."),
    FSDPC_PY_FUNCTION(release, METH_O, "(unit, /)", "Undoes one gather(). Local. StateError."),
    FSDPC_PY_FUNCTION(
        reduce, FSDPC_PY_KEYWORDS, "(unit, grads, add=False)",
        "Sums full gradients (one array or None per parameter) over ranks, divides, keeps this\n"
        "rank's piece in `unit.grad`. Collective. StateError, ValueError."),
    {NULL, NULL, 0, NULL},
};
