/* Functions that find the gradients that autograd made for the gathered tensors, collect these gradients for
 * a reduction, and drop them. */
#include "py/step/py_step.h"

static int
check_size(const fsdpc_py_flat *flat, int i)
{
    const fsdpc_param_place *place = &fsdpc_unit_layout(flat->unit)->params[i];
    if (flat->views[i].numel == place->numel && flat->views[i].dtype != FSDPC_BYTES) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "the gradient of parameter %s of unit %s has %lld elements of %s, not %lld",
                 place->name, fsdpc_unit_name(flat->unit), (long long)flat->views[i].numel,
                 fsdpc_dtype_name(flat->views[i].dtype), (long long)place->numel);
    return -1;
}

static int
is_sparse(PyObject *grad)
{
    PyObject *sparse = PyObject_GetAttrString(grad, "is_sparse");
    int result = sparse ? sparse == Py_True : -1;
    Py_XDECREF(sparse);
    return result;
}

/* Returns true for a tensor that wraps other tensors. Keeps the exception that is set. */
static bool
is_a_wrapper(PyObject *tensor)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    const bool wraps = PyObject_HasAttrString(tensor, "__tensor_flatten__");
    PyErr_Restore(type, value, traceback);
    return wraps;
}

/* Views a parameter's gradient. A lazily negated gradient (complex arithmetic makes it) is copied first. */
static int
view_grad(fsdpc_py_flat *flat, int i)
{
    if (fsdpc_py_torch_view_on(flat->held[i], fsdpc_py_full_device(flat), &flat->views[i]) == 0) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_BufferError)) {
        return -1;
    }
    PyErr_Clear();
    int sparse = is_sparse(flat->held[i]);
    if (sparse != 0) {
        if (sparse > 0) {
            PyErr_Format(fsdpc_py_current()->state_error,
                         "the gradient of parameter %s of unit %s is sparse, and only dense ones "
                         "are summed over the ranks: make its nn.Embedding with sparse=False, or "
                         "list the parameter as ignored",
                         fsdpc_unit_layout(flat->unit)->params[i].name,
                         fsdpc_unit_name(flat->unit));
        }
        return -1;
    }
    PyObject *plain = PyObject_CallMethod(flat->held[i], "resolve_neg", NULL);
    if (!plain) {
        return -1;
    }
    Py_SETREF(flat->held[i], plain);
    int result = fsdpc_py_torch_view_on(plain, fsdpc_py_full_device(flat), &flat->views[i]);
    if (result < 0 && PyErr_ExceptionMatches(PyExc_BufferError) && is_a_wrapper(plain)) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "the gradient of parameter %s of unit %s is a %.100s, which only its own code "
                     "reads, as an input of the module was one: pass plain tensors to the module",
                     fsdpc_unit_layout(flat->unit)->params[i].name, fsdpc_unit_name(flat->unit),
                     Py_TYPE(plain)->tp_name);
    }
    return result;
}

/* Moves the view's sharded dimension to the front, where the unit's memory has it. */
static int
put_rows_first(const fsdpc_py_flat *flat, int i)
{
    fsdpc_py_view *view = &flat->views[i];
    int dim = flat->row_dims ? (unsigned char)PyBytes_AS_STRING(flat->row_dims)[i] : 0;
    if (dim == 0 || dim >= view->ndim) {
        return 0;
    }
    int64_t size = view->shape[dim], stride = view->strides[dim];
    for (int d = dim; d > 0; d--) {
        view->shape[d] = view->shape[d - 1];
        view->strides[d] = view->strides[d - 1];
    }
    view->shape[0] = size;
    view->strides[0] = stride;
    return fsdpc_py_view_finish(view);
}

int
fsdpc_py_collect_grads(fsdpc_py_flat *flat)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    if (flat->collected) {
        return 0;
    }
    flat->collected = true;
    for (int i = 0; i < layout->param_count; i++) {
        fsdpc_py_view *view = &flat->views[i];
        flat->grads[i].data = NULL;
        if (!flat->full[i] || layout->params[i].trainable_index < 0) {
            continue;
        }
        PyObject *grad = fsdpc_py_field(flat->full[i], FSDPC_PY_GRAD);
        if (!grad) {
            return -1;
        }
        if (grad == Py_None) {
            Py_DECREF(grad);
            continue;
        }
        flat->held[i] = fsdpc_py_full_local(flat, grad);
        Py_DECREF(grad);
        if (!flat->held[i] || view_grad(flat, i) < 0 || put_rows_first(flat, i) < 0 ||
            check_size(flat, i) < 0) {
            return -1;
        }
        /* An empty gradient counts as a gradient, so its address is not NULL; nothing reads the address. */
        const void *data = view->numel > 0 ? view->data : view;
        flat->grads[i] = (fsdpc_tensor){data,        view->dtype,   view->ndim,
                                        view->shape, view->strides, view->contiguous};
    }
    return 0;
}

void
fsdpc_py_drop_held(fsdpc_py_flat *flat)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    flat->collected = false;
    for (int i = 0; i < count; i++) {
        Py_CLEAR(flat->held[i]);
    }
}

int
fsdpc_py_count_held(const fsdpc_py_flat *flat)
{
    int held = 0;
    for (int i = 0; i < fsdpc_unit_layout(flat->unit)->param_count; i++) {
        held += flat->held[i] != NULL;
    }
    return held;
}

int
fsdpc_py_full_grads(fsdpc_py_flat *flat, const int *params, int count, bool all)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    for (int k = 0; k < count; k++) {
        int i = params ? params[k] : k;
        if (!flat->full[i] || layout->params[i].trainable_index < 0) {
            continue;
        }
        PyObject *grad = fsdpc_py_field(flat->full[i], FSDPC_PY_GRAD);
        if (!grad) {
            return -1;
        }
        bool some = grad != Py_None;
        Py_DECREF(grad);
        if (some != all) {
            return some;
        }
    }
    return all;
}

int
fsdpc_py_clear_full_grads(fsdpc_py_flat *flat, bool all)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    for (int i = 0; i < count; i++) {
        bool trains =
            flat->full[i] && fsdpc_unit_layout(flat->unit)->params[i].trainable_index >= 0;
        if (trains && (all || flat->held[i]) &&
            fsdpc_py_set_field(flat->full[i], FSDPC_PY_GRAD, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}
