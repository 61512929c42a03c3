/* A flat parameter without a tree of modules: gather, release and reduce by hand, with NumPy alone.
 * The first use creates a tree of this one unit.
 */
#define PY_SSIZE_T_CLEAN
#include "py/unit/py_engine.h"

#include "base/mem.h"

/* --- standing alone -------------------------------------------------------------------------- */

/* A tree of this one unit, made on first use. Collective. */
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
    /* The tree has set self->tree; this unit alone keeps it. */
    Py_DECREF(tree);
    self->own_tree = true;
    return 0;
}

static PyObject *
run_core(int status)
{
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

PyObject *
fsdpc_py_flat_gather(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    fsdpc_py_use use;
    if (own_tree(self) < 0 || fsdpc_py_enter(self) < 0 || fsdpc_py_use_flat(self, &use) < 0) {
        return NULL;
    }
    int status = FSDPC_OK;
    fsdpc_tree *tree = self->tree->tree;
    Py_BEGIN_ALLOW_THREADS
    if (fsdpc_unit_refs(self->unit) == 0) {
        status = fsdpc_tree_begin_forward(tree);
    }
    if (status == FSDPC_OK) {
        status = fsdpc_tree_forward_enter(tree, 0);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = run_core(status);
    fsdpc_py_end_use(&use);
    return result;
}

PyObject *
fsdpc_py_flat_release(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    if (!self->own_tree || fsdpc_unit_refs(self->unit) == 0) {
        return run_core(fsdpc_error(FSDPC_E_STATE,
                                    "release() of unit %s without a preceding gather()",
                                    fsdpc_unit_name(self->unit)));
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_tree_forward_leave(self->tree->tree, 0, false);
    Py_END_ALLOW_THREADS
    return run_core(status);
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
            result = fsdpc_py_check_place(&views[i], fsdpc_py_full_place(self));
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

/* reduce(grads, add=False): full gradients in, their mean over ranks in `grad` afterwards. */
PyObject *
fsdpc_py_flat_reduce(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count,
                     PyObject *keywords)
{
    PyObject *list, *result = NULL;
    bool add = false;
    const fsdpc_py_arg table[] = {
        {"grads", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"add", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &add},
    };
    if (fsdpc_py_args("reduce", table, 2, args, count, keywords) < 0 || own_tree(self) < 0 ||
        fsdpc_py_enter(self) < 0) {
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
        result = run_core(status);
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

/* enter_forward(), leave_forward(): a reference without a module's forward, for callers that gather
 * several units ahead of use. */
PyObject *
fsdpc_py_flat_enter(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    int status;
    if (!self->tree) {
        return fsdpc_py_raise(
            fsdpc_error(FSDPC_E_STATE, "unit %s belongs to no tree", fsdpc_unit_name(self->unit)));
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    fsdpc_tree *tree = self->tree->tree;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_tree_forward_enter(tree, self->id);
    Py_END_ALLOW_THREADS
    return status == FSDPC_OK && fsdpc_py_mark(self) < 0 ? NULL : run_core(status);
}

PyObject *
fsdpc_py_flat_leave(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    int status = FSDPC_OK;
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    if (self->tree) {
        status = fsdpc_tree_forward_leave(self->tree->tree, self->id, false);
    }
    return status == FSDPC_OK && fsdpc_py_mark(self) < 0 ? NULL : run_core(status);
}
