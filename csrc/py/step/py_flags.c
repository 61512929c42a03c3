/* Copies requires_grad from the sharded parameters, which the optimizer sees, to the gathered tensors. Also
 * registers the gradient hooks of the gathered tensors.
 *
 * Flags are read when a pass begins, and again when a backward begins. So a parameter gets a gradient if its
 * flag is set when the backward begins, like a leaf of an unsharded model. Between forward and backward, the
 * program may freeze the parameter for another pass (for example, to get a model's outputs without its
 * adapters). A parameter that was frozen when its unit was made has no gradient memory. When such a parameter
 * is to be trained, the tree's `on_thaw`, a collective call, allocates the memory (fsdpc/_engine/thaw.py).
 */
#include "py/step/py_step.h"

/* --- gradient hooks -------------------------------------------------------------------------- */

/* torch refuses a hook on a frozen tensor; a tensor that is frozen later keeps its hook. */
static int
watch_one(fsdpc_py_flat *flat, int i)
{
    if (flat->hooked[i] || !flat->full[i]) {
        return 0;
    }
    PyObject *trains = fsdpc_py_field(flat->full[i], FSDPC_PY_REQUIRES_GRAD);
    if (trains != Py_True) {
        Py_XDECREF(trains);
        return trains ? 0 : -1;
    }
    Py_DECREF(trains);
    PyObject *hook = fsdpc_py_hook_new(FSDPC_HOOK_GRAD, (PyObject *)flat, i);
    PyObject *handle =
        hook ? PyObject_CallMethod(flat->full[i], "register_post_accumulate_grad_hook", "N", hook)
             : NULL;
    if (!handle) {
        return -1;
    }
    Py_DECREF(handle);
    flat->hooked[i] = 1;
    return 0;
}

int
fsdpc_py_watch_all(fsdpc_py_flat *flat)
{
    if (flat->watch_all) {
        return 0;
    }
    flat->watch_all = true;
    for (int i = 0; i < fsdpc_unit_layout(flat->unit)->param_count; i++) {
        if (watch_one(flat, i) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_watch_again(fsdpc_py_flat *flat, int param)
{
    const bool watched = flat->hooked[param];
    flat->hooked[param] = 0;
    return watched || flat->watch_all ? watch_one(flat, param) : 0;
}

/* --- flags ----------------------------------------------------------------------------------- */

static int
carry_flag(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *flag)
{
    bool wanted = flag == Py_True;
    for (int c = 0; c < sharded->cover_count; c++) {
        int i = sharded->covers[c];
        if (fsdpc_py_set_field(flat->full[i], FSDPC_PY_REQUIRES_GRAD, flag) < 0 ||
            (wanted && flat->watch_all && watch_one(flat, i) < 0)) {
            return -1;
        }
    }
    flat->expected += wanted ? sharded->cover_count : -sharded->cover_count;
    sharded->requires_grad = wanted;
    flat->incomplete = false; /* it described the parameters that were trained before */
    return 0;
}

/* If the program has changed the gathered tensor's requires_grad, copies it to the sharded parameter. */
static int
take_shown_flag(const fsdpc_py_sharded *sharded, PyObject *full)
{
    PyObject *shown = fsdpc_py_field(full, FSDPC_PY_REQUIRES_GRAD);
    int result = shown ? 0 : -1;
    if (shown && (shown == Py_True) != sharded->requires_grad) {
        result = fsdpc_py_set_field(sharded->param, FSDPC_PY_REQUIRES_GRAD, shown);
    }
    Py_XDECREF(shown);
    return result;
}

int
fsdpc_py_take_shown_flags(fsdpc_py_flat *flat)
{
    int result = 0;
    const bool seen = flat->installed > 0 || flat->lent;
    for (int i = 0; seen && result == 0 && i < flat->sharded_count; i++) {
        const fsdpc_py_sharded *sharded = &flat->sharded[i];
        PyObject *full = sharded->cover_count == 1 ? flat->full[sharded->covers[0]] : NULL;
        result = full ? take_shown_flag(sharded, full) : 0;
    }
    return result;
}

int
fsdpc_py_sync_flags(fsdpc_py_flat *flat)
{
    int result = fsdpc_py_take_shown_flags(flat);
    for (int i = 0; result >= 0 && i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        PyObject *flag = fsdpc_py_field(sharded->param, FSDPC_PY_REQUIRES_GRAD);
        if (!flag) {
            return -1;
        }
        bool wanted = flag == Py_True;
        if (wanted && !sharded->grad) {
            result = 1;
        } else if (wanted != sharded->requires_grad && carry_flag(flat, sharded, flag) < 0) {
            result = -1;
        }
        Py_DECREF(flag);
    }
    return result;
}

/* --- unfreezing ------------------------------------------------------------------------------ */

PyObject *
fsdpc_py_flat_thaw(fsdpc_py_flat *self, PyObject *args)
{
    const char *segments;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y#:thaw", &segments, &length)) {
        return NULL;
    }
    if (length != fsdpc_unit_layout(self->unit)->segment_count) {
        PyErr_SetString(PyExc_ValueError, "thaw: segments must have one byte per segment");
        return NULL;
    }
    if (self->tree) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "thaw: unit %s belongs to a tree; detach the tree first",
                     fsdpc_unit_name(self->unit));
        return NULL;
    }
    if (fsdpc_py_enter(self) < 0 ||
        (fsdpc_unit_has_local(self->unit) && fsdpc_py_drop_zeroed(self) < 0)) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_unit_thaw(self->unit, (const uint8_t *)segments));
    return fsdpc_py_none_or(status);
}

PyObject *
fsdpc_py_flat_renew_grads(fsdpc_py_flat *self, PyObject *list)
{
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != self->sharded_count) {
        PyErr_SetString(
            PyExc_ValueError,
            "renew_grads: grads must be a list of one tensor or None per row of bind's `sharded`");
        return NULL;
    }
    for (int i = 0; i < self->sharded_count; i++) {
        PyObject *grad = PyList_GET_ITEM(list, i);
        if (grad != Py_None && fsdpc_py_set_grad(self, &self->sharded[i], grad) < 0) {
            return NULL;
        }
    }
    /* It is no longer known which parameters get their gradients last, so all parameters are watched. */
    if (fsdpc_py_watch_all(self) < 0 || fsdpc_py_note_waiting(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
