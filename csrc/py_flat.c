/* fsdpc._C.FlatParameter: one unit as a Python object.
 *
 * Memory goes out as DLPack capsules and NumPy arrays over the unit's own buffers, so nothing is
 * copied and torch is not needed. A flat parameter that stands alone can gather(), release() and
 * reduce(); one that belongs to a Tree is driven by the tree's hooks.
 */
#define PY_SSIZE_T_CLEAN
#include "py_engine.h"

#include <string.h>

#include "mem.h"
#include "py_comm.h"
#include "py_layout.h"
#include "py_numpy.h"
#include "unit_impl.h"

fsdpc_py_names fsdpc_py_name;

int
fsdpc_py_flat_get(PyObject *object, fsdpc_py_flat **out)
{
    if (!PyObject_TypeCheck(object, fsdpc_py_current()->unit_type)) {
        PyErr_Format(PyExc_TypeError, "expected a FlatParameter, got %.100s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = (fsdpc_py_flat *)object;
    return 0;
}

/* --- life ------------------------------------------------------------------------------------ */

static int
make_unit(fsdpc_py_flat *self, const char *name, double divide, bool reshard, PyObject *params)
{
    fsdpc_py_specs specs = {0};
    fsdpc_unit_options options = {.name = name, .divide = divide, .reshard = reshard};
    int result = -1;
    if (fsdpc_py_comm_get(self->shard_comm, &options.shard) < 0 ||
        (self->replicate_comm && fsdpc_py_comm_get(self->replicate_comm, &options.replicate) < 0) ||
        fsdpc_py_specs_parse(params, &specs) < 0) {
        goto done;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS status = fsdpc_unit_new(&options, specs.specs, specs.count, &self->unit);
    Py_END_ALLOW_THREADS if (status != FSDPC_OK)
    {
        fsdpc_py_raise(status);
        goto done;
    }
    self->full = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->full);
    self->arrived = fsdpc_mem_calloc((size_t)specs.count, 1);
    self->grads = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->grads);
    self->views = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->views);
    self->held = fsdpc_mem_calloc((size_t)specs.count, sizeof *self->held);
    if (!self->full || !self->arrived || !self->grads || !self->views || !self->held) {
        PyErr_NoMemory();
        goto done;
    }
    result = 0;
done:
    fsdpc_py_specs_release(&specs);
    return result;
}

static PyObject *
flat_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"name", "comm", "params", "replicate", "divide", "reshard", NULL};
    const char *name;
    PyObject *comm, *params, *replicate = Py_None;
    double divide = 1.0;
    int reshard = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sOO|Odp:FlatParameter", names, &name, &comm,
                                     &params, &replicate, &divide, &reshard)) {
        return NULL;
    }
    fsdpc_py_flat *self = (fsdpc_py_flat *)type->tp_alloc(type, 0);
    if (!self) {
        return NULL;
    }
    self->id = -1;
    self->sync = true;
    self->shard_comm = Py_NewRef(comm);
    self->replicate_comm = replicate == Py_None ? NULL : Py_NewRef(replicate);
    if (make_unit(self, name, divide, reshard != 0, params) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
flat_traverse(fsdpc_py_flat *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->shard_comm);
    Py_VISIT(self->replicate_comm);
    Py_VISIT((PyObject *)self->tree);
    Py_VISIT(self->on_unattached);
    Py_VISIT(self->after_backward);
    int count = self->unit ? fsdpc_unit_layout(self->unit)->param_count : 0;
    for (int i = 0; self->full && i < count; i++) {
        Py_VISIT(self->full[i]);
    }
    for (int i = 0; i < self->site_count; i++) {
        Py_VISIT(self->sites[i].dict);
        Py_VISIT(self->sites[i].full);
        Py_VISIT(self->sites[i].sharded);
    }
    for (int i = 0; i < self->seen_count; i++) {
        Py_VISIT(self->seen[i].param);
        Py_VISIT(self->seen[i].grad);
        Py_VISIT(self->seen[i].alias);
    }
    return 0;
}

static int
flat_clear(fsdpc_py_flat *self)
{
    fsdpc_py_flat_unbind(self);
    Py_CLEAR(self->on_unattached);
    Py_CLEAR(self->after_backward);
    Py_CLEAR(self->tree);
    return 0;
}

static void
flat_dealloc(fsdpc_py_flat *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    flat_clear(self);
    fsdpc_mem_free(self->full);
    fsdpc_mem_free(self->arrived);
    fsdpc_mem_free(self->grads);
    fsdpc_mem_free(self->views);
    fsdpc_mem_free(self->held);
    fsdpc_unit_free(self->unit);
    Py_XDECREF(self->shard_comm);
    Py_XDECREF(self->replicate_comm);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- memory as tensors ----------------------------------------------------------------------- */

static int
parse_index(const fsdpc_py_flat *self, PyObject *object, int *out)
{
    long index = PyLong_AsLong(object);
    int count = fsdpc_unit_layout(self->unit)->param_count;
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < 0 || index >= count) {
        PyErr_Format(PyExc_IndexError, "unit %s has %d parameters, there is no number %ld",
                     fsdpc_unit_name(self->unit), count, index);
        return -1;
    }
    *out = (int)index;
    return 0;
}

static PyObject *
capsule(fsdpc_py_flat *self, void *data, fsdpc_dtype dtype, int64_t length)
{
    return fsdpc_py_dlpack_export(data, dtype, 1, &length, (PyObject *)self);
}

static PyObject *
shard_part(fsdpc_py_flat *self, PyObject *index)
{
    int i;
    if (parse_index(self, index, &i) < 0) {
        return NULL;
    }
    int64_t length;
    void *data = fsdpc_unit_master_part(self->unit, i, &length);
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    return capsule(self, data, layout->segments[layout->params[i].segment].storage, length);
}

static PyObject *
grad_part(fsdpc_py_flat *self, PyObject *index)
{
    int i;
    if (parse_index(self, index, &i) < 0) {
        return NULL;
    }
    int64_t length;
    void *data = fsdpc_unit_grad_part(self->unit, i, &length);
    return capsule(self, data, fsdpc_unit_grad_dtype(self->unit, i), length);
}

/* full_param(i, shape): shape in elements of the compute dtype. */
static PyObject *
full_param(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count)
{
    int i;
    if (count != 2 || !PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) > FSDPC_PY_MAX_DIMS) {
        PyErr_SetString(PyExc_TypeError, "full_param takes a number and a shape (tuple)");
        return NULL;
    }
    if (parse_index(self, args[0], &i) < 0) {
        return NULL;
    }
    int64_t shape[FSDPC_PY_MAX_DIMS], numel = 1;
    int ndim = (int)PyTuple_GET_SIZE(args[1]);
    for (int d = 0; d < ndim; d++) {
        shape[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], d));
        if (shape[d] < 0) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "parameter %s of unit %s: a dimension of %lld",
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
        PyErr_Format(PyExc_ValueError, "parameter %s of unit %s has %lld elements, the shape %lld",
                     layout->params[i].name, fsdpc_unit_name(self->unit),
                     (long long)layout->params[i].numel, (long long)numel);
        return NULL;
    }
    char *base = fsdpc_unit_full(self->unit);
    return fsdpc_py_dlpack_export(base + fsdpc_layout_full_offset(layout, i),
                                  layout->segments[layout->params[i].segment].compute, ndim, shape,
                                  (PyObject *)self);
}

static int
parse_segment(const fsdpc_py_flat *self, PyObject *object, int *out)
{
    long index = PyLong_AsLong(object);
    if (index < 0 || index >= fsdpc_unit_layout(self->unit)->segment_count) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_IndexError, "unit %s has %d segments, there is no number %ld",
                         fsdpc_unit_name(self->unit), fsdpc_unit_layout(self->unit)->segment_count,
                         index);
        }
        return -1;
    }
    *out = (int)index;
    return 0;
}

static PyObject *
shard_segment(fsdpc_py_flat *self, PyObject *index)
{
    int s;
    if (parse_segment(self, index, &s) < 0) {
        return NULL;
    }
    const fsdpc_segment *seg = &fsdpc_unit_layout(self->unit)->segments[s];
    return capsule(self, (char *)fsdpc_unit_master(self->unit) + seg->shard_offset, seg->storage,
                   seg->piece_numel);
}

static PyObject *
grad_segment(fsdpc_py_flat *self, PyObject *index)
{
    int s;
    if (parse_segment(self, index, &s) < 0) {
        return NULL;
    }
    fsdpc_dtype dtype;
    void *data = fsdpc_unit_seen_grad(self->unit, s, &dtype);
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
    case FSDPC_BF16: /* NumPy has none: the bits */
        return NPY_UINT16;
    default:
        return NPY_UINT8;
    }
}

/* A NumPy array over memory of the unit, which it keeps alive. */
static PyObject *
host_view(fsdpc_py_flat *self, void *data, fsdpc_dtype dtype, int64_t numel)
{
    npy_intp shape = (npy_intp)numel;
    static char nothing[8];
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

static PyObject *
get_shard(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return whole_view(self, false);
}

static PyObject *
get_full(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return whole_view(self, true);
}

static PyObject *
get_grad(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    if (layout->segment_count != 1) {
        return host_view(self, fsdpc_unit_grad(self->unit), FSDPC_BYTES,
                         (int64_t)layout->grad_bytes);
    }
    const fsdpc_segment *seg = &layout->segments[0];
    return host_view(self, fsdpc_unit_grad(self->unit), seg->accumulate,
                     seg->trainable ? seg->piece_numel : 0);
}

/* --- values ---------------------------------------------------------------------------------- */

static int
check_full_tensor(const fsdpc_py_flat *self, enum fsdpc_which which, int i, PyObject *object,
                  fsdpc_py_view *view)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    fsdpc_dtype dtype = which == FSDPC_GRAD ? fsdpc_unit_grad_dtype(self->unit, i)
                                            : layout->segments[layout->params[i].segment].storage;
    if (fsdpc_py_tensor_view(object, view) < 0) {
        return -1;
    }
    bool fits = dtype == FSDPC_BYTES
                    ? view->numel * (int64_t)view->itemsize == layout->params[i].numel
                    : view->dtype == dtype && view->numel == layout->params[i].numel;
    if (fits && view->contiguous) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "parameter %s of unit %s wants a contiguous %s tensor of %lld elements",
                 layout->params[i].name, fsdpc_unit_name(self->unit), fsdpc_dtype_name(dtype),
                 (long long)layout->params[i].numel);
    fsdpc_py_view_release(view);
    return -1;
}

static PyObject *
flat_write(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *index, *tensor;
    bool grad = false;
    const fsdpc_py_arg table[] = {
        {"param", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &index},
        {"tensor", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &tensor},
        {"grad", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &grad},
    };
    int i;
    fsdpc_py_view view;
    enum fsdpc_which which;
    if (fsdpc_py_args("write", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    which = grad ? FSDPC_GRAD : FSDPC_MASTER;
    if (parse_index(self, index, &i) < 0 || check_full_tensor(self, which, i, tensor, &view) < 0) {
        return NULL;
    }
    int status = fsdpc_unit_write(self->unit, which, i, view.data);
    fsdpc_py_view_release(&view);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

static PyObject *
read_into(fsdpc_py_flat *self, enum fsdpc_which which, PyObject *tensors)
{
    int count = fsdpc_unit_layout(self->unit)->param_count, held = 0, status = FSDPC_OK;
    PyObject *result = NULL;
    fsdpc_py_view *views = fsdpc_mem_calloc((size_t)count, sizeof *views);
    void **full = fsdpc_mem_calloc((size_t)count, sizeof *full);
    if (!views || !full) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, held);
        if (tensor != Py_None && check_full_tensor(self, which, held, tensor, &views[held]) < 0) {
            goto done;
        }
        full[held] = views[held].data;
    }
    Py_BEGIN_ALLOW_THREADS status = fsdpc_unit_read(self->unit, which, full);
    Py_END_ALLOW_THREADS result = status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
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

static PyObject *
flat_read(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *list;
    bool grad = false;
    const fsdpc_py_arg table[] = {
        {"tensors", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"grad", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &grad},
    };
    if (fsdpc_py_args("read", table, 2, args, count, keywords) < 0) {
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
        PyErr_Format(PyExc_ValueError, "read wants one tensor or None per parameter of unit %s",
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
        PyErr_SetString(PyExc_TypeError, "mask must be bytes, one per parameter");
        return NULL;
    }
    return (const uint8_t *)PyBytes_AS_STRING(object);
}

static PyObject *
grad_norm(fsdpc_py_flat *self, PyObject *args)
{
    PyObject *object;
    double p;
    if (!PyArg_ParseTuple(args, "Od:grad_norm", &object, &p)) {
        return NULL;
    }
    const uint8_t *mask = parse_mask(self, object);
    if (!mask) {
        return NULL;
    }
    fsdpc_norm norm;
    int status;
    Py_BEGIN_ALLOW_THREADS status = fsdpc_unit_grad_norm(self->unit, mask, p, &norm);
    Py_END_ALLOW_THREADS if (status != FSDPC_OK)
    {
        return fsdpc_py_raise(status);
    }
    return Py_BuildValue("ddO", norm.sum, norm.max, norm.nonfinite ? Py_True : Py_False);
}

static PyObject *
scale_grads(fsdpc_py_flat *self, PyObject *args)
{
    PyObject *object;
    double factor;
    if (!PyArg_ParseTuple(args, "Od:scale_grads", &object, &factor)) {
        return NULL;
    }
    const uint8_t *mask = parse_mask(self, object);
    if (!mask) {
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS status = fsdpc_unit_scale_grads(self->unit, mask, factor);
    Py_END_ALLOW_THREADS if (status != FSDPC_OK)
    {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

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

static PyObject *
flat_gather(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    if (own_tree(self) < 0) {
        return NULL;
    }
    int status = FSDPC_OK;
    fsdpc_tree *tree = self->tree->tree;
    Py_BEGIN_ALLOW_THREADS if (fsdpc_unit_refs(self->unit) == 0)
    {
        status = fsdpc_tree_begin_forward(tree);
    }
    if (status == FSDPC_OK) {
        status = fsdpc_tree_forward_enter(tree, 0);
    }
    Py_END_ALLOW_THREADS return run_core(status);
}

static PyObject *
flat_release(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    if (!self->own_tree || fsdpc_unit_refs(self->unit) == 0) {
        return run_core(fsdpc_error(FSDPC_E_STATE,
                                    "release() of unit %s without a gather() before it",
                                    fsdpc_unit_name(self->unit)));
    }
    int status;
    Py_BEGIN_ALLOW_THREADS status = fsdpc_tree_forward_leave(self->tree->tree, 0, false);
    Py_END_ALLOW_THREADS return run_core(status);
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
                     "reduce wants one gradient or None per parameter of unit %s (%d)",
                     fsdpc_unit_name(self->unit), layout->param_count);
    }
    for (int i = 0; result == 0 && i < layout->param_count; i++) {
        if (PyTuple_GET_ITEM(items, i) == Py_None) {
            continue;
        }
        result = fsdpc_py_tensor_view(PyTuple_GET_ITEM(items, i), &views[i]);
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
static PyObject *
flat_reduce(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *list, *result = NULL;
    bool add = false;
    const fsdpc_py_arg table[] = {
        {"grads", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"add", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &add},
    };
    if (fsdpc_py_args("reduce", table, 2, args, count, keywords) < 0 || own_tree(self) < 0) {
        return NULL;
    }
    int params = fsdpc_unit_layout(self->unit)->param_count, status = FSDPC_OK;
    fsdpc_py_view *views = fsdpc_mem_calloc((size_t)params, sizeof *views);
    fsdpc_tensor *grads = fsdpc_mem_calloc((size_t)params, sizeof *grads);
    if (!views || !grads) {
        PyErr_NoMemory();
    } else if (view_grads(self, list, views, grads) == 0) {
        fsdpc_tree *tree = self->tree->tree;
        self->unit->add = add;
        Py_BEGIN_ALLOW_THREADS status = fsdpc_tree_begin_backward(tree);
        status = status ? status : fsdpc_tree_backward_done(tree, 0, true);
        status = status ? status : fsdpc_tree_reduce(tree, 0, grads);
        status = status ? status : fsdpc_tree_end_backward(tree, true);
        Py_END_ALLOW_THREADS result = run_core(status);
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

/* --- small things ---------------------------------------------------------------------------- */

static PyObject *
flat_layout(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    return fsdpc_py_layout_dict(fsdpc_unit_layout(self->unit), true);
}

static PyObject *
flat_forward_failed(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    if (fsdpc_py_forward_failed(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* enter_forward(), leave_forward(): a reference without any module's forward, for those who gather
 * several units ahead of use. */
static PyObject *
flat_enter(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    int status;
    if (!self->tree) {
        return fsdpc_py_raise(
            fsdpc_error(FSDPC_E_STATE, "unit %s belongs to no tree", fsdpc_unit_name(self->unit)));
    }
    fsdpc_tree *tree = self->tree->tree;
    Py_BEGIN_ALLOW_THREADS status = fsdpc_tree_forward_enter(tree, self->id);
    Py_END_ALLOW_THREADS return run_core(status);
}

static PyObject *
flat_leave(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    int status = FSDPC_OK;
    if (self->tree) {
        status = fsdpc_tree_forward_leave(self->tree->tree, self->id, false);
    }
    return run_core(status);
}

static PyObject *
hook_of(fsdpc_py_flat *self, PyObject *args)
{
    const char *kind;
    int param = -1;
    static const char *const names[] = {"pre_forward", "post_forward", "pre_backward", "input_done",
                                        "grad"};
    if (!PyArg_ParseTuple(args, "s|i:hook", &kind, &param)) {
        return NULL;
    }
    for (int k = 0; k < 5; k++) {
        if (strcmp(kind, names[k]) == 0) {
            return fsdpc_py_hook_new((enum fsdpc_py_hook_kind)k, (PyObject *)self, param);
        }
    }
    PyErr_Format(PyExc_ValueError, "there is no hook '%s'", kind);
    return NULL;
}

static PyObject *
get_name(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyUnicode_FromString(fsdpc_unit_name(self->unit));
}

static int
set_name(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    const char *name = value ? PyUnicode_AsUTF8(value) : NULL;
    if (!name) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a unit's name cannot be deleted");
        }
        return -1;
    }
    int status = fsdpc_unit_rename(self->unit, name);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

static PyObject *
get_after_backward(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self->after_backward ? self->after_backward : Py_None);
}

static int
set_after_backward(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    Py_XSETREF(self->after_backward, value && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}

static PyObject *
get_world(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(fsdpc_unit_layout(self->unit)->world);
}

static PyObject *
get_rank(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(fsdpc_unit_rank(self->unit));
}

static PyObject *
get_refs(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyLong_FromLong(fsdpc_unit_refs(self->unit));
}

static PyObject *
get_attached(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->tree != NULL && !self->own_tree);
}

/* (padded number of elements of the gathered unit,) when it has one segment, else bytes. */
static PyObject *
get_shape(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    long long numel = layout->segment_count == 1
                          ? (long long)layout->segments[0].piece_numel * layout->world
                          : (long long)layout->full_bytes;
    return Py_BuildValue("(L)", numel);
}

static PyObject *
get_dtype(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    return PyUnicode_FromString(
        fsdpc_dtype_name(layout->segment_count == 1 ? layout->segments[0].storage : FSDPC_BYTES));
}

static PyObject *
get_sync(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->sync);
}

static int
set_sync(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    int truth = value ? PyObject_IsTrue(value) : 1;
    if (truth < 0) {
        return -1;
    }
    self->sync = truth != 0;
    return 0;
}

static PyObject *
get_on_unattached(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self->on_unattached ? self->on_unattached : Py_None);
}

static int
set_on_unattached(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    Py_XSETREF(self->on_unattached, value && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}

#define FAST(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef methods[] = {
    {"gather", FAST(flat_gather), METH_NOARGS,
     "gather()\n--\n\nMakes all ranks' values readable in `full`; counted. Collective."},
    {"release", FAST(flat_release), METH_NOARGS, "release()\n--\n\nUndoes one gather(). Local."},
    {"reduce", FAST(flat_reduce), METH_FASTCALL | METH_KEYWORDS,
     "reduce(grads, add=False)\n--\n\nSums full gradients (one array or None per parameter) over "
     "ranks, divides, keeps this rank's piece in `grad`. Collective."},
    {"layout", FAST(flat_layout), METH_NOARGS, "layout()\n--\n\nThe placement of all parameters."},
    {"shard_part", FAST(shard_part), METH_O,
     "shard_part(i)\n--\n\nDLPack capsule: this rank's part of parameter i (1-D, storage dtype)."},
    {"grad_part", FAST(grad_part), METH_O,
     "grad_part(i)\n--\n\nDLPack capsule: gradient of this rank's part of parameter i (1-D)."},
    {"shard_segment", FAST(shard_segment), METH_O,
     "shard_segment(s)\n--\n\nDLPack capsule: this rank's piece of segment s."},
    {"grad_segment", FAST(grad_segment), METH_O,
     "grad_segment(s)\n--\n\nDLPack capsule: gradient of this rank's piece of segment s."},
    {"full_param", FAST(full_param), METH_FASTCALL,
     "full_param(i, shape)\n--\n\nDLPack capsule over the gathered parameter i: valid while the "
     "unit is gathered, at an address that never changes."},
    {"write", FAST(flat_write), METH_FASTCALL | METH_KEYWORDS,
     "write(param, tensor, grad=False)\n--\n\nTakes this rank's part out of a full tensor. Local."},
    {"read", FAST(flat_read), METH_FASTCALL | METH_KEYWORDS,
     "read(tensors, grad=False)\n--\n\nFills full tensors (None: skipped) from all ranks' parts. "
     "Collective."},
    {"grad_norm", FAST(grad_norm), METH_VARARGS,
     "grad_norm(mask, p)\n--\n\n(sum |g|^p, max |g|, non-finite seen) over this rank's part."},
    {"scale_grads", FAST(scale_grads), METH_VARARGS,
     "scale_grads(mask, factor)\n--\n\nMultiplies this rank's gradients in place."},
    {"adopt_grads", FAST(fsdpc_py_flat_adopt), METH_NOARGS,
     "adopt_grads()\n--\n\nCopies gradients that the user put into .grad into the unit's own."},
    {"bind", FAST(fsdpc_py_flat_bind), METH_FASTCALL | METH_KEYWORDS,
     "bind(full, sites, seen, watched)\n--\n\nThe torch objects that this unit stands for."},
    {"hook", FAST(hook_of), METH_VARARGS, "hook(kind, param=-1)\n--\n\nA C callable for torch."},
    {"enter_forward", FAST(flat_enter), METH_NOARGS,
     "enter_forward()\n--\n\nOne more reference to the gathered values, within a pass."},
    {"leave_forward", FAST(flat_leave), METH_NOARGS, "leave_forward()\n--\n\nUndoes it."},
    {"forward_failed", FAST(flat_forward_failed), METH_NOARGS,
     "forward_failed()\n--\n\nTo be called when the module's forward raised."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"name", (getter)get_name, (setter)set_name, "Name of the unit.", NULL},
    {"world", (getter)get_world, NULL, "Ranks that share the unit.", NULL},
    {"rank", (getter)get_rank, NULL, "This rank among them.", NULL},
    {"shape", (getter)get_shape, NULL, "Shape of `full`, padding included.", NULL},
    {"dtype", (getter)get_dtype, NULL, "Storage dtype; 'uint8' when the unit has several.", NULL},
    {"shard", (getter)get_shard, NULL, "This rank's values as a NumPy array, no copy.", NULL},
    {"full", (getter)get_full, NULL,
     "The gathered values as a NumPy array, no copy; only meaningful between gather and release.",
     NULL},
    {"grad", (getter)get_grad, NULL, "This rank's gradient as a NumPy array, no copy.", NULL},
    {"refs", (getter)get_refs, NULL, "How often the unit is gathered at the moment.", NULL},
    {"attached", (getter)get_attached, NULL, "True when a tree drives the unit.", NULL},
    {"sync", (getter)get_sync, (setter)set_sync, "False inside no_sync.", NULL},
    {"on_unattached", (getter)get_on_unattached, (setter)set_on_unattached,
     "Called by the first forward of a unit without a tree.", NULL},
    {"after_backward", (getter)get_after_backward, (setter)set_after_backward,
     "Called when a backward has ended and gradients are shown.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, flat_new},
    {Py_tp_dealloc, flat_dealloc},
    {Py_tp_traverse, flat_traverse},
    {Py_tp_clear, flat_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc,
     "FlatParameter(name, comm, params, replicate=None, divide=1.0, reshard=True)\n--\n\n"
     "The parameters of one unit laid end to end and cut into equal pieces, one per rank of comm.\n"
     "params: (name, numel, storage, compute, reduce, trainable) each. Collective over comm."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpc._C.FlatParameter",
    .basicsize = sizeof(fsdpc_py_flat),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
fsdpc_py_flat_exec(PyObject *module)
{
    return fsdpc_py_add_type(module, &spec, &fsdpc_py_state(module)->unit_type);
}

static int
make_names(void)
{
    struct {
        PyObject **slot;
        const char *text;
    } table[] = {
        {&fsdpc_py_name.grad, "grad"},
        {&fsdpc_py_name.grad_fn, "grad_fn"},
        {&fsdpc_py_name.requires_grad, "requires_grad"},
        {&fsdpc_py_name.register_prehook, "register_prehook"},
        {&fsdpc_py_name.data, "data"},
        {&fsdpc_py_name.is_view, "_is_view"},
        {&fsdpc_py_name.base, "_base"},
        {&fsdpc_py_name.sequence, "_sequence_nr"},
        {&fsdpc_py_name.detach, "detach"},
        {&fsdpc_py_name.dataclass_fields, "__dataclass_fields__"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        *table[i].slot = PyUnicode_InternFromString(table[i].text);
        if (!*table[i].slot) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_engine_exec(PyObject *module)
{
    if (make_names() < 0 || fsdpc_py_flat_exec(module) < 0 || fsdpc_py_tree_exec(module) < 0) {
        return -1;
    }
    return fsdpc_py_hook_exec(module);
}
