/* Gradients that the optimizer sees: finds out what the user did to them since the last backward (cleared or
 * replaced them, or pointed them at other memory), and sets .grad after this backward.
 */
#include "py/step/py_step.h"
#include "unit/grad.h"

static int64_t
numel_of(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    int64_t numel = 0;
    for (int c = 0; c < sharded->cover_count; c++) {
        numel += fsdpc_unit_layout(flat->unit)->params[sharded->covers[c]].numel;
    }
    return numel;
}

int
fsdpc_py_set_grad(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad)
{
    fsdpc_py_view view;
    PyObject *local = fsdpc_py_local(flat, grad), *alias = NULL;
    if (local && fsdpc_py_torch_view_on(local, fsdpc_py_own_device(flat), &view) == 0) {
        alias = PyObject_CallMethodNoArgs(local, fsdpc_py_name.detach);
    }
    if (!alias) {
        Py_XDECREF(local);
        return -1;
    }
    Py_XSETREF(sharded->shown, Py_NewRef(grad));
    Py_XSETREF(sharded->grad, local);
    Py_XSETREF(sharded->alias, alias);
    sharded->grad_data = view.data;
    sharded->strided = !view.contiguous;
    sharded->broken = -1;
    /* Operations on a DTensor are collective, so a DTensor's gradient is shown on every rank. */
    sharded->holds_nothing = !flat->dtensors && view.numel == 0 && numel_of(flat, sharded) > 0;
    return 0;
}

enum grad_state { GRAD_NONE, GRAD_OURS, GRAD_ERROR };

static int64_t
piece_of(const fsdpc_layout *layout, int param)
{
    return layout->segments[layout->params[param].segment].piece_numel;
}

/* Views the local tensor of a gradient. *out describes memory that `grad` keeps alive. */
static int
local_view(const fsdpc_py_flat *flat, PyObject *grad, fsdpc_py_view *out)
{
    PyObject *local = fsdpc_py_local(flat, grad);
    int result = local ? fsdpc_py_torch_view_on(local, fsdpc_py_own_device(flat), out) : -1;
    Py_XDECREF(local);
    return result;
}

static int
reload_sharded(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    for (int c = 0; c < sharded->cover_count; c++) {
        int status = fsdpc_unit_reload_grad(flat->unit, sharded->covers[c]);
        if (fsdpc_py_checked(status) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Copies `grad` into the unit's gradient by torch's copy_, because the two tensors' strides may differ. */
static int
take_strided(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad)
{
    PyObject *local = fsdpc_py_local(flat, grad);
    PyObject *done =
        local ? PyObject_CallMethodOneArg(sharded->alias, fsdpc_py_name.copy, local) : NULL;
    Py_XDECREF(local);
    Py_XDECREF(done);
    return done ? reload_sharded(flat, sharded) : -1;
}

/* Copies the values of a tensor that the user has assigned to .grad into the unit's gradient. */
static int
take_foreign(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad)
{
    fsdpc_py_view view;
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    if (local_view(flat, grad, &view) < 0) {
        return -1;
    }
    int64_t at = 0;
    for (int c = 0; c < sharded->cover_count; c++) {
        int i = sharded->covers[c];
        int64_t length;
        fsdpc_unit_grad_part(flat->unit, i, &length);
        fsdpc_span span = fsdpc_layout_span(layout, i, fsdpc_unit_rank(flat->unit));
        at = sharded->cover_count > 1 ? span.piece_begin : 0;
        bool fits = view.contiguous ? view.numel == length || view.numel == piece_of(layout, i)
                                    : sharded->strided && view.numel == length;
        if (!fits) {
            PyErr_Format(PyExc_ValueError,
                         "the gradient assigned to parameter %s of unit %s does not fit its shard: "
                         "it must be contiguous with %lld elements",
                         layout->params[i].name, fsdpc_unit_name(flat->unit), (long long)length);
            return -1;
        }
        if (sharded->strided) {
            return take_strided(flat, sharded, grad);
        }
        const char *values = (const char *)view.data + (size_t)at * view.itemsize;
        int status = FSDPC_OK;
        if (length > 0) {
            status = fsdpc_unit_take_grad(flat->unit, i, values, view.dtype);
        }
        if (fsdpc_py_checked(status) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Called if the user set the `data` of the tensor in .grad: points the tensor at the unit's memory again. */
static int
point_back(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    if (fsdpc_py_set_field(sharded->grad, FSDPC_PY_DATA, sharded->alias) < 0) {
        return -1;
    }
    return flat->dtensors
               ? PyObject_SetAttr(sharded->shown, fsdpc_py_name.local_tensor, sharded->grad)
               : 0;
}

/* Takes over the user's writes to .grad. If grad.data is other memory, copies the values from there. */
static int
check_ours(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded)
{
    fsdpc_py_view view;
    if (local_view(flat, sharded->shown, &view) < 0) {
        return -1;
    }
    if (view.data == sharded->grad_data || view.numel == 0) {
        return reload_sharded(flat, sharded);
    }
    return take_foreign(flat, sharded, sharded->shown) < 0 ? -1 : point_back(flat, sharded);
}

/* Returns whether the program still refers to a gradient that it has cleared or replaced. The engine's
 * references are in `sharded`, in a row of Unit.optim_params, and from a DTensor to its local tensor. */
static bool
is_kept(const fsdpc_py_sharded *sharded)
{
    bool same = sharded->shown == sharded->grad;
    return Py_REFCNT(sharded->shown) > (same ? 3 : 2) || (!same && Py_REFCNT(sharded->grad) > 2);
}

bool
fsdpc_py_keeps_grads(const fsdpc_py_flat *flat)
{
    for (int i = 0; i < flat->sharded_count; i++) {
        if (flat->sharded[i].grad && is_kept(&flat->sharded[i])) {
            return true;
        }
    }
    return false;
}

static int
leave_kept(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    return flat->on_kept && is_kept(sharded) ? fsdpc_py_call(flat->on_kept) : 0;
}

int
fsdpc_py_take_slot(fsdpc_py_flat *flat)
{
    bool moved;
    const int status = fsdpc_unit_take_slot(flat->unit, &moved);
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    return moved && flat->on_moved ? fsdpc_py_call(flat->on_moved) : 0;
}

static int
replace_foreign(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad)
{
    if (leave_kept(flat, sharded) < 0 || fsdpc_py_take_slot(flat) < 0 ||
        take_foreign(flat, sharded, grad) < 0) {
        return -1;
    }
    return fsdpc_py_set_field(sharded->param, FSDPC_PY_GRAD, sharded->shown);
}

static enum grad_state
adopt_grad(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded)
{
    PyObject *grad = fsdpc_py_field(sharded->param, FSDPC_PY_GRAD);
    if (!grad) {
        return GRAD_ERROR;
    }
    enum grad_state state = grad == Py_None ? GRAD_NONE : GRAD_OURS;
    if (grad != Py_None && (grad == sharded->shown ? check_ours(flat, sharded)
                                                   : replace_foreign(flat, sharded, grad)) < 0) {
        state = GRAD_ERROR;
    }
    Py_DECREF(grad);
    return state;
}

PyObject *
fsdpc_py_flat_adopt_grads(fsdpc_py_flat *flat, PyObject *Py_UNUSED(unused))
{
    for (int i = 0; i < flat->sharded_count && !flat->shown; i++) {
        if (flat->sharded[i].grad && adopt_grad(flat, &flat->sharded[i]) == GRAD_ERROR) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* Called if the user cleared .grad. Drops gradients kept by no_sync. `zero`: zeroes the unit's gradient. */
static int
start_from_zero(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded, bool zero)
{
    for (int c = 0; c < sharded->cover_count; c++) {
        fsdpc_grad_drop_local(flat->unit, sharded->covers[c]);
        int status = zero ? fsdpc_unit_zero_grad(flat->unit, sharded->covers[c]) : FSDPC_OK;
        if (fsdpc_py_checked(status) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
fsdpc_py_flat_replace_grad(fsdpc_py_flat *self, PyObject *args)
{
    int number;
    PyObject *grad;
    if (!PyArg_ParseTuple(args, "iO:replace_grad", &number, &grad)) {
        return NULL;
    }
    if (number < 0 || number >= self->sharded_count || !self->sharded[number].grad) {
        PyErr_SetString(PyExc_IndexError, "replace_grad: no gradient with this index");
        return NULL;
    }
    return fsdpc_py_set_grad(self, &self->sharded[number], grad) < 0 ? NULL : Py_NewRef(Py_None);
}

int
fsdpc_py_prepare_grads(fsdpc_py_flat *flat)
{
    if (flat->backward.prepared) {
        return 0;
    }
    flat->backward.prepared = true;
    if (flat->shown) { /* in summon_full_params: .grad belongs to the full values, not to the unit */
        return 0;
    }
    if (fsdpc_unit_has_local(flat->unit) && fsdpc_py_drop_zeroed(flat) < 0) {
        return -1;
    }
    bool any_ours = false;
    for (int i = 0; i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        enum grad_state state = sharded->grad ? adopt_grad(flat, sharded) : GRAD_NONE;
        if (state == GRAD_ERROR) {
            return -1;
        }
        sharded->cleared = sharded->grad && state == GRAD_NONE;
        any_ours = any_ours || state == GRAD_OURS;
        if (sharded->cleared && leave_kept(flat, sharded) < 0) {
            return -1;
        }
    }
    for (int i = 0; i < flat->sharded_count; i++) {
        if (flat->sharded[i].cleared && start_from_zero(flat, &flat->sharded[i], any_ours) < 0) {
            return -1;
        }
    }
    fsdpc_unit_set_add(flat->unit, any_ours);
    return 0;
}

/* --- after a backward ------------------------------------------------------------------------ */

static bool
any_used(const fsdpc_py_sharded *sharded, const uint8_t *used)
{
    for (int c = 0; c < sharded->cover_count; c++) {
        if (used[sharded->covers[c]]) {
            return true;
        }
    }
    return false;
}

/* Shows the unit's gradient in .grad. If the loss uses the sharded parameter itself (a penalty on weights),
 * autograd has put a gradient into .grad, which is added to the unit's gradient. */
static int
show_with(fsdpc_py_sharded *sharded, PyObject *own)
{
    if (fsdpc_py_set_field(sharded->param, FSDPC_PY_GRAD, sharded->shown) < 0) {
        return -1;
    }
    if (own == Py_None || own == sharded->shown) {
        return 0;
    }
    PyObject *plain = PyObject_CallMethod(own, "detach", NULL);
    PyObject *sum = plain ? PyObject_CallMethod(sharded->shown, "add_", "O", plain) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(sum);
    return sum ? 0 : -1;
}

/* Shows one gradient. After no_sync there is no sum yet, so zeros stand for the gradients that are kept. */
static int
show_one(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, bool sync)
{
    sharded->cleared = false;
    if (!sync && fsdpc_py_show_waiting(flat, sharded) < 0) {
        return -1;
    }
    /* The user may have pointed the tensor at other memory before clearing .grad. */
    const void *data;
    if (fsdpc_py_local_data(flat, sharded->shown, &data) < 0 ||
        (data != sharded->grad_data && point_back(flat, sharded) < 0)) {
        return -1;
    }
    PyObject *own = fsdpc_py_field(sharded->param, FSDPC_PY_GRAD);
    int result = own ? show_with(sharded, own) : -1;
    Py_XDECREF(own);
    return result;
}

/* A rank without elements of a parameter shows no gradient, as torch does. (While gradients of no_sync are
 * kept, .grad is shown, so that the user can discard them by clearing .grad.) Listeners are called on every
 * rank, here with an empty gradient, which fsdpc/_engine/listeners.py removes afterwards. */
static int
show_nothing(fsdpc_py_sharded *sharded, PyObject **listened)
{
    int some = fsdpc_py_note_listeners(sharded, listened);
    sharded->cleared = false;
    return some < 0
               ? -1
               : fsdpc_py_set_field(sharded->param, FSDPC_PY_GRAD, some ? sharded->grad : Py_None);
}

int
fsdpc_py_show_grads(fsdpc_py_flat *flat, bool sync, PyObject **listened)
{
    fsdpc_unit *unit = flat->unit;
    const uint8_t *used = sync ? fsdpc_unit_used(unit) : fsdpc_unit_local_used(unit);
    int result = 0;
    for (int i = 0; result == 0 && i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        if (!sharded->grad || flat->shown || !any_used(sharded, used)) {
            continue;
        }
        if (sync && sharded->holds_nothing) {
            result = show_nothing(sharded, listened);
            continue;
        }
        if (sharded->cleared) {
            result = show_one(flat, sharded, sync);
        }
        if (result == 0 && sync) {
            result = fsdpc_py_note_listeners(sharded, listened) < 0 ? -1 : 0;
        }
    }
    if (sync) {
        fsdpc_unit_clear_used(unit);
    }
    if (result == 0 && flat->backward.prepared && fsdpc_unit_has_local(unit)) {
        result = fsdpc_py_note_waiting(flat);
    }
    return result;
}
