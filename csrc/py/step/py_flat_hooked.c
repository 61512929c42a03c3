/* Functions for a unit whose gradients are summed by a communication hook. They pack the gradients for the
 * hook's caller in Python, and take over the sums. The tree decides when the hook runs (tree.h).
 * py_hooks_backward.c decides the order of calls in a backward.
 */
#include "py/step/py_step.h"

#include "base/mem.h"
#include "unit/grad.h"

PyObject *
fsdpc_py_flat_get_comm_hook(fsdpc_py_flat *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->comm_hook ? self->comm_hook : Py_None);
}

int
fsdpc_py_flat_set_comm_hook(fsdpc_py_flat *self, PyObject *value, void *Py_UNUSED(closure))
{
    if (!self->tree || !self->tree->tree) {
        PyErr_Format(fsdpc_py_current()->state_error, "unit %s belongs to no tree",
                     fsdpc_unit_name(self->unit));
        return -1;
    }
    Py_XSETREF(self->comm_hook, value && value != Py_None ? Py_NewRef(value) : NULL);
    fsdpc_tree_set_hooked(self->tree->tree, self->id, self->comm_hook != NULL);
    return 0;
}

int
fsdpc_py_call_comm_hook(fsdpc_py_flat *flat)
{
    PyObject *hook = Py_NewRef(flat->comm_hook); /* a hook may remove itself */
    PyObject *result = PyObject_CallNoArgs(hook);
    Py_DECREF(hook);
    if (!result) {
        return -1;
    }
    int sent = PyObject_IsTrue(result);
    Py_DECREF(result);
    return sent;
}

/* Returns the collected gradients, or NULL if the gradients have not been collected (self->grads). */
static const fsdpc_tensor *
collected(const fsdpc_py_flat *self)
{
    return self->collected ? self->grads : NULL;
}

PyObject *
fsdpc_py_flat_grad_bits(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    const fsdpc_tensor *grads = collected(self);
    PyObject *bits = PyBytes_FromStringAndSize(NULL, layout->param_count);
    for (int i = 0; bits && i < layout->param_count; i++) {
        PyBytes_AS_STRING(bits)[i] =
            fsdpc_unit_local_used(self->unit)[i] || (grads && grads[i].data);
    }
    return bits;
}

static void
note(fsdpc_py_flat *self, enum fsdpc_trace_op op)
{
    if (self->tree && self->tree->tree) {
        fsdpc_tree_note(self->tree->tree, self->id, op,
                        fsdpc_unit_layout(self->unit)->reduce_bytes);
    }
}

static int
pack(fsdpc_py_flat *self, void *buffer)
{
    uint8_t *bits = fsdpc_mem_calloc((size_t)fsdpc_unit_layout(self->unit)->param_count, 1);
    if (!bits) {
        PyErr_NoMemory();
        return -1;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_grad_pack(self->unit, collected(self), buffer, bits));
    fsdpc_mem_free(bits);
    return fsdpc_py_checked(status);
}

PyObject *
fsdpc_py_flat_pack_grads(fsdpc_py_flat *self, PyObject *buffer)
{
    fsdpc_py_view view;
    size_t bytes = fsdpc_unit_layout(self->unit)->reduce_bytes;
    if (fsdpc_py_enter(self) < 0 ||
        fsdpc_py_torch_view_on(buffer, fsdpc_py_full_device(self), &view) < 0) {
        return NULL;
    }
    if (!view.contiguous || (size_t)view.numel * view.itemsize != bytes) {
        PyErr_Format(PyExc_ValueError, "pack_grads: unit %s needs a contiguous buffer of %zu bytes",
                     fsdpc_unit_name(self->unit), bytes);
        return NULL;
    }
    if (pack(self, view.data) < 0) {
        return NULL;
    }
    note(self, FSDPC_TRACE_PACK);
    Py_RETURN_NONE;
}

/* Fills `sums` from `pieces`, whose k-th item belongs to the k-th trainable segment. */
static int
view_pieces(const fsdpc_py_flat *self, PyObject *pieces, fsdpc_tensor *sums)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    Py_ssize_t k = 0;
    for (int s = 0; s < layout->segment_count; s++) {
        fsdpc_py_view view;
        if (!layout->segments[s].trainable) {
            continue;
        }
        if (k == PyTuple_GET_SIZE(pieces)) {
            PyErr_SetString(PyExc_ValueError,
                            "take_sums: pieces must have one entry per trainable segment");
            return -1;
        }
        if (fsdpc_py_torch_view_on(PyTuple_GET_ITEM(pieces, k++), fsdpc_py_full_device(self),
                                   &view) < 0) {
            return -1;
        }
        if (!view.contiguous || view.dtype == FSDPC_BYTES ||
            view.numel != layout->segments[s].piece_numel) {
            PyErr_Format(
                PyExc_ValueError,
                "the communication hook of unit %s left a gradient that does not fit: it "
                "must be contiguous, of a floating dtype, with %lld elements, and has %lld",
                fsdpc_unit_name(self->unit), (long long)layout->segments[s].piece_numel,
                (long long)view.numel);
            return -1;
        }
        sums[s] = (fsdpc_tensor){.data = view.data, .dtype = view.dtype, .contiguous = true};
    }
    return 0;
}

static int
take(fsdpc_py_flat *self, const fsdpc_tensor *sums, const char *used)
{
    int status = FSDPC_PY_UNLOCKED(fsdpc_unit_take_sums(self->unit, sums));
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    for (int i = 0; i < fsdpc_unit_layout(self->unit)->param_count; i++) {
        fsdpc_unit_used(self->unit)[i] |= used[i] != 0;
    }
    note(self, FSDPC_TRACE_REDUCE);
    return 0;
}

PyObject *
fsdpc_py_flat_take_sums(fsdpc_py_flat *self, PyObject *args)
{
    PyObject *pieces;
    const char *used;
    Py_ssize_t length;
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    if (!PyArg_ParseTuple(args, "O!y#:take_sums", &PyList_Type, &pieces, &used, &length)) {
        return NULL;
    }
    if (length != layout->param_count) {
        PyErr_SetString(PyExc_ValueError, "take_sums: used must have one byte per parameter");
        return NULL;
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    fsdpc_tensor *sums = fsdpc_mem_calloc((size_t)layout->segment_count, sizeof *sums);
    if (!sums) {
        return PyErr_NoMemory();
    }
    pieces = PyList_AsTuple(pieces);
    int result = pieces ? view_pieces(self, pieces, sums) : -1;
    if (result == 0) {
        result = take(self, sums, used);
    }
    Py_XDECREF(pieces);
    fsdpc_mem_free(sums);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
