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

fsdpc_py_place
fsdpc_py_full_place(const fsdpc_py_flat *flat)
{
    return fsdpc_py_place_of(flat->unit->device);
}

fsdpc_py_place
fsdpc_py_own_place(const fsdpc_py_flat *flat)
{
    return flat->unit->offload ? fsdpc_py_host : fsdpc_py_place_of(flat->unit->device);
}

int
fsdpc_py_enter(const fsdpc_py_flat *flat)
{
    return fsdpc_py_enter_device(flat->unit->device);
}

int
fsdpc_py_side(const fsdpc_py_flat *flat, const fsdpc_py_view *view, int *side)
{
    fsdpc_py_place device = fsdpc_py_full_place(flat);
    bool on_device = view->place.type == device.type && view->place.id == device.id;
    if (view->numel == 0) {
        return 0;
    }
    if (!on_device && view->place.type != DLPACK_DEVICE_CPU) {
        return fsdpc_py_check_place(view, device);
    }
    if (*side >= 0 && (*side == FSDPC_ON_DEVICE) != on_device) {
        PyErr_Format(PyExc_ValueError,
                     "unit %s: some tensors are on the GPU and some in host memory, choose one",
                     fsdpc_unit_name(flat->unit));
        return -1;
    }
    *side = on_device ? FSDPC_ON_DEVICE : FSDPC_ON_HOST;
    return 0;
}

/* --- life ------------------------------------------------------------------------------------ */

static int
make_unit(fsdpc_py_flat *self, fsdpc_unit_options options, PyObject *params)
{
    fsdpc_py_specs specs = {0};
    int result = -1;
    if (fsdpc_py_comm_get(self->shard_comm, &options.shard) < 0 ||
        (self->replicate_comm && fsdpc_py_comm_get(self->replicate_comm, &options.replicate) < 0) ||
        fsdpc_py_specs_parse(params, &specs) < 0 ||
        fsdpc_py_enter_device(fsdpc_comm_device(options.shard)) < 0) {
        goto done;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_unit_new(&options, specs.specs, specs.count, &self->unit);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
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
    static char *names[] = {"name",   "comm",    "params",  "replicate",
                            "divide", "reshard", "offload", NULL};
    const char *name;
    PyObject *comm, *params, *replicate = Py_None;
    double divide = 1.0;
    int reshard = 1, offload = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sOO|Odpp:FlatParameter", names, &name, &comm,
                                     &params, &replicate, &divide, &reshard, &offload)) {
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
    const fsdpc_unit_options options = {
        .name = name, .divide = divide, .reshard = reshard != 0, .offload = offload != 0};
    if (make_unit(self, options, params) < 0) {
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
    Py_VISIT(self->comm_hook);
    Py_VISIT(self->on_changed);
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
    Py_CLEAR(self->comm_hook);
    Py_CLEAR(self->on_changed);
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
    if (self->unit) {
        fsdpc_py_enter_quietly(self->unit->device);
    }
    fsdpc_unit_free(self->unit);
    Py_XDECREF(self->shard_comm);
    Py_XDECREF(self->replicate_comm);
    type->tp_free(self);
    Py_DECREF(type);
}

int
fsdpc_py_flat_index(const fsdpc_py_flat *self, PyObject *object, int *out)
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

/* --- values ---------------------------------------------------------------------------------- */

static int
check_full_tensor(const fsdpc_py_flat *self, enum fsdpc_which which, int i, PyObject *object,
                  fsdpc_py_view *view)
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
    int i, side = -1;
    fsdpc_py_view view;
    enum fsdpc_which which;
    if (fsdpc_py_args("write", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    which = grad ? FSDPC_GRAD : FSDPC_MASTER;
    if (fsdpc_py_flat_index(self, index, &i) < 0 || fsdpc_py_enter(self) < 0 ||
        check_full_tensor(self, which, i, tensor, &view) < 0) {
        return NULL;
    }
    int failed = fsdpc_py_side(self, &view, &side), status = FSDPC_OK;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        status = fsdpc_unit_write(self->unit, which, i, view.data,
                                  side == FSDPC_ON_HOST ? FSDPC_ON_HOST : FSDPC_ON_DEVICE);
        Py_END_ALLOW_THREADS
    }
    fsdpc_py_view_release(&view);
    if (failed) {
        return NULL;
    }
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
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
        if (tensor != Py_None && check_full_tensor(self, which, held, tensor, &views[held]) < 0) {
            goto done;
        }
        full[held] = views[held].data;
        if (tensor != Py_None && fsdpc_py_side(self, &views[held], &side) < 0) {
            held++;
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_unit_read(self->unit, which, full,
                             side == FSDPC_ON_HOST ? FSDPC_ON_HOST : FSDPC_ON_DEVICE);
    Py_END_ALLOW_THREADS
    result = status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
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
    if (!PyArg_ParseTuple(args, "Od:grad_norm", &object, &p) || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    const uint8_t *mask = parse_mask(self, object);
    if (!mask) {
        return NULL;
    }
    fsdpc_norm norm;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_unit_grad_norm(self->unit, mask, p, &norm);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return Py_BuildValue("ddO", norm.sum, norm.max, norm.nonfinite ? Py_True : Py_False);
}

static PyObject *
scale_grads(fsdpc_py_flat *self, PyObject *args)
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
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_unit_scale_grads(self->unit, mask, factor);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

/* --- small things ---------------------------------------------------------------------------- */

static PyObject *
flat_unbind(fsdpc_py_flat *self, PyObject *unused)
{
    (void)unused;
    fsdpc_py_flat_unbind(self);
    Py_RETURN_NONE;
}

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

static PyObject *
get_offloaded(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(fsdpc_unit_is_offloaded(self->unit));
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

static PyObject *
get_in_use(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->installed > 0);
}

static PyObject *
get_shown(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->shown);
}

static int
set_shown(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    int truth = value ? PyObject_IsTrue(value) : 0;
    self->shown = truth > 0;
    return truth < 0 ? -1 : 0;
}

static PyObject *
get_on_changed(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return Py_NewRef(self->on_changed ? self->on_changed : Py_None);
}

static int
set_on_changed(fsdpc_py_flat *self, PyObject *value, void *closure)
{
    (void)closure;
    Py_XSETREF(self->on_changed, value && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}

static PyObject *
get_kept(fsdpc_py_flat *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->unit->local_any);
}

#define FAST(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef methods[] = {
    {"gather", FAST(fsdpc_py_flat_gather), METH_NOARGS,
     "gather()\n--\n\nMakes all ranks' values readable in `full`; counted. Collective."},
    {"release", FAST(fsdpc_py_flat_release), METH_NOARGS,
     "release()\n--\n\nUndoes one gather(). Local."},
    {"reduce", FAST(fsdpc_py_flat_reduce), METH_FASTCALL | METH_KEYWORDS,
     "reduce(grads, add=False)\n--\n\nSums full gradients (one array or None per parameter) over "
     "ranks, divides, keeps this rank's piece in `grad`. Collective."},
    {"layout", FAST(flat_layout), METH_NOARGS, "layout()\n--\n\nThe placement of all parameters."},
    {"shard_part", FAST(fsdpc_py_flat_shard_part), METH_O,
     "shard_part(i)\n--\n\nDLPack capsule: this rank's part of parameter i (1-D, storage dtype)."},
    {"grad_part", FAST(fsdpc_py_flat_grad_part), METH_O,
     "grad_part(i)\n--\n\nDLPack capsule: gradient of this rank's part of parameter i (1-D)."},
    {"shard_segment", FAST(fsdpc_py_flat_shard_segment), METH_O,
     "shard_segment(s)\n--\n\nDLPack capsule: this rank's piece of segment s."},
    {"grad_segment", FAST(fsdpc_py_flat_grad_segment), METH_O,
     "grad_segment(s)\n--\n\nDLPack capsule: gradient of this rank's piece of segment s."},
    {"full_param", FAST(fsdpc_py_flat_full_param), METH_FASTCALL,
     "full_param(i, shape)\n--\n\nDLPack capsule over the gathered parameter i: valid while the "
     "unit is gathered, at an address that never changes."},
    {"write", FAST(flat_write), METH_FASTCALL | METH_KEYWORDS,
     "write(param, tensor, grad=False)\n--\n\nTakes this rank's part out of a full tensor. Local."},
    {"read", FAST(flat_read), METH_FASTCALL | METH_KEYWORDS,
     "read(tensors, grad=False)\n--\n\nFills full tensors (None: skipped) from all ranks' parts. "
     "Collective."},
    {"read_blocks", FAST(fsdpc_py_flat_read_blocks), METH_VARARGS,
     "read_blocks(blocks, tensors)\n--\n\nFills this rank's block of each parameter: elements "
     "[rank * blocks[i], (rank + 1) * blocks[i]) as far as there are; 0 and None: skipped. "
     "Collective."},
    {"write_blocks", FAST(fsdpc_py_flat_write_blocks), METH_VARARGS,
     "write_blocks(blocks, tensors)\n--\n\nReplaces values by all ranks' blocks. Collective."},
    {"grad_norm", FAST(grad_norm), METH_VARARGS,
     "grad_norm(mask, p)\n--\n\n(sum |g|^p, max |g|, non-finite seen) over this rank's part."},
    {"scale_grads", FAST(scale_grads), METH_VARARGS,
     "scale_grads(mask, factor)\n--\n\nMultiplies this rank's gradients in place."},
    {"replace_param", FAST(fsdpc_py_flat_replace), METH_VARARGS,
     "replace_param(number, param)\n--\n\nAnother object stands for the number-th parameter of "
     "bind()'s `seen`."},
    {"grad_bits", FAST(fsdpc_py_flat_grad_bits), METH_NOARGS,
     "grad_bits()\n--\n\nOne byte per parameter: this rank has a gradient of it to send."},
    {"pack_grads", FAST(fsdpc_py_flat_pack_grads), METH_O,
     "pack_grads(buffer)\n--\n\nWrites them into a buffer of layout()['reduce_bytes'] bytes, each "
     "segment in rank order, gaps and absent ones as zeros."},
    {"take_sums", FAST(fsdpc_py_flat_take_sums), METH_VARARGS,
     "take_sums(pieces, used)\n--\n\nAdds this rank's pieces (one per trainable segment) of sums "
     "made elsewhere to the gradient; `used`: bytes as of grad_bits() over all ranks."},
    {"unbind", FAST(flat_unbind), METH_NOARGS,
     "unbind()\n--\n\nForgets the torch objects: torch's hooks on them hold the unit, unseen by "
     "gc."},
    {"adopt_grads", FAST(fsdpc_py_flat_adopt), METH_NOARGS,
     "adopt_grads()\n--\n\nCopies gradients that the user put into .grad into the unit's own."},
    {"bind", FAST(fsdpc_py_flat_bind), METH_FASTCALL | METH_KEYWORDS,
     "bind(full, sites, seen, watched)\n--\n\nThe torch objects that this unit stands for."},
    {"hook", FAST(hook_of), METH_VARARGS, "hook(kind, param=-1)\n--\n\nA C callable for torch."},
    {"enter_forward", FAST(fsdpc_py_flat_enter), METH_NOARGS,
     "enter_forward()\n--\n\nOne more reference to the gathered values, within a pass."},
    {"leave_forward", FAST(fsdpc_py_flat_leave), METH_NOARGS, "leave_forward()\n--\n\nUndoes it."},
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
    {"shard", (getter)fsdpc_py_flat_get_shard, NULL,
     "This rank's values as a NumPy array, no copy.", NULL},
    {"full", (getter)fsdpc_py_flat_get_full, NULL,
     "The gathered values as a NumPy array, no copy; only meaningful between gather and release.",
     NULL},
    {"grad", (getter)fsdpc_py_flat_get_grad, NULL,
     "This rank's gradient as a NumPy array, no copy.", NULL},
    {"refs", (getter)get_refs, NULL, "How often the unit is gathered at the moment.", NULL},
    {"offloaded", (getter)get_offloaded, NULL,
     "Shard and gradient lie in pinned host memory of a GPU.", NULL},
    {"attached", (getter)get_attached, NULL, "True when a tree drives the unit.", NULL},
    {"sync", (getter)get_sync, (setter)set_sync, "False inside no_sync.", NULL},
    {"on_unattached", (getter)get_on_unattached, (setter)set_on_unattached,
     "Called by the first forward of a unit without a tree.", NULL},
    {"after_backward", (getter)get_after_backward, (setter)set_after_backward,
     "Called when a backward has ended and gradients are shown.", NULL},
    {"in_use", (getter)get_in_use, NULL, "A forward or backward runs on the gathered values.",
     NULL},
    {"shown", (getter)get_shown, (setter)set_shown,
     "The modules show whole values of the caller's: a pass does not touch their entries.", NULL},
    {"on_changed", (getter)get_on_changed, (setter)set_on_changed,
     "Called before a pass when the user has changed what the optimizer's parameters point at, or "
     "what is in their places.",
     NULL},
    {"comm_hook", (getter)fsdpc_py_flat_get_comm_hook, (setter)fsdpc_py_flat_set_comm_hook,
     "Called, in one order on all ranks, to sum the unit's gradients in the engine's place; true "
     "when it did so, false to be called again at the end of backward.",
     NULL},
    {"kept", (getter)get_kept, NULL, "Gradients of this unit wait on this rank.", NULL},
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
     "FlatParameter(name, comm, params, replicate=None, divide=1.0, reshard=True, "
     "offload=False)\n--\n\n"
     "The parameters of one unit laid end to end and cut into equal pieces, one per rank of comm.\n"
     "params: (name, numel, storage, compute, reduce, trainable) each. offload: shard and "
     "gradient\n"
     "lie in host memory (where comm's device has other). Collective over comm."},
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
        {&fsdpc_py_name.backward_hooks, "_backward_hooks"},
        {&fsdpc_py_name.register_hook_dict, "_register_hook_dict"},
        {&fsdpc_py_name.detach, "detach"},
        {&fsdpc_py_name.version, "_version"},
        {&fsdpc_py_name.accumulated, "_post_accumulate_grad_hooks"},
        {&fsdpc_py_name.backward_optimizers, "_in_backward_optimizers"},
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
