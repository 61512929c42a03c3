/* Detects what users do, outside of a step, to the parameters and gradients that the optimizer sees.
 *
 * A parameter that points at other memory (p.data = ...), or whose entry in its module was replaced, is
 * detected when the next pass begins; Python then takes the parameter's values over
 * (fsdpc/_engine/writeback.py).
 *
 * [Note: negative zeros] After no_sync, .grad is a tensor of zeros that stands for the gradients kept on this
 * rank. zero_grad(set_to_none=False) must discard these gradients, but it leaves zeros as well. So the zeros
 * that the engine shows are negative: scaling and clipping keep the sign, zero_() does not. A gradient
 * without elements has no sign and is treated like the rest of its unit.
 */
#include "py/step/py_step.h"

#include "unit/grad.h"

/* --- parameters ------------------------------------------------------------------------------ */

static int
place_has_changed(const fsdpc_py_flat *flat, const fsdpc_py_site *site)
{
    PyObject *now = PyDict_GetItemWithError(site->dict, site->key);
    if (!now && PyErr_Occurred()) {
        return -1;
    }
    bool full = flat->by_gather && (flat->marked || fsdpc_unit_is_direct(flat->unit));
    return now != (full ? site->full : site->sharded);
}

static int
param_has_changed(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    const void *data;
    if (flat->foreign) { /* on_values reads the parameters wherever they lie */
        return 0;
    }
    if (sharded->dict && PyDict_GetItemWithError(sharded->dict, sharded->key) != sharded->param) {
        return PyErr_Occurred() ? -1 : 1;
    }
    if (fsdpc_py_local_data(flat, sharded->param, &data) < 0) {
        return -1;
    }
    return data != sharded->param_data;
}

int
fsdpc_py_check_gathered(const fsdpc_py_flat *flat)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    for (int i = 0; !flat->foreign && i < layout->param_count; i++) {
        const void *data = NULL;
        if (flat->full[i] && fsdpc_py_full_data(flat, i, &data) < 0) {
            return -1;
        }
        if (flat->full[i] && data != flat->full_data[i]) {
            PyErr_Format(fsdpc_py_current()->state_error,
                         "parameter %s of unit %s got other memory (weight.data = ...) during "
                         "forward or backward on rank %d, where modules show copies for reading: "
                         "change parameters between steps, or compute with a tensor of your own "
                         "(weight = self.weight.clamp(-1, 1)); make the model again",
                         layout->params[i].name, fsdpc_unit_name(flat->unit),
                         fsdpc_unit_rank(flat->unit));
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_detect_changes(fsdpc_py_flat *flat)
{
    int changed = 0;
    if (flat->shown) {
        return 0;
    }
    for (int i = 0; changed == 0 && i < flat->site_count; i++) {
        changed = place_has_changed(flat, &flat->sites[i]);
    }
    for (int i = 0; changed == 0 && i < flat->sharded_count; i++) {
        changed = param_has_changed(flat, &flat->sharded[i]);
    }
    if (changed <= 0 || !flat->on_changed) {
        return changed < 0 ? -1 : 0;
    }
    return fsdpc_py_call(flat->on_changed) < 0 ? -1 : 1;
}

/* replace_param(number, param): from now on `param`, an object over the same memory, stands for the sharded
 * parameter with this number. */
PyObject *
fsdpc_py_flat_replace_param(fsdpc_py_flat *self, PyObject *args)
{
    int number;
    PyObject *param;
    if (!PyArg_ParseTuple(args, "iO:replace_param", &number, &param)) {
        return NULL;
    }
    if (number < 0 || number >= self->sharded_count) {
        PyErr_SetString(PyExc_IndexError, "replace_param: the parameter's index is out of range");
        return NULL;
    }
    fsdpc_py_sharded *sharded = &self->sharded[number];
    if (!self->foreign && fsdpc_py_local_data(self, param, &sharded->param_data) < 0) {
        return NULL;
    }
    for (int i = 0; i < self->site_count; i++) {
        if (self->sites[i].sharded == sharded->param) {
            Py_SETREF(self->sites[i].sharded, Py_NewRef(param));
        }
    }
    Py_SETREF(sharded->param, Py_NewRef(param));
    Py_RETURN_NONE;
}

PyObject *
fsdpc_py_flat_place_param(fsdpc_py_flat *self, PyObject *args)
{
    int number;
    PyObject *dict, *key;
    if (!PyArg_ParseTuple(args, "iO!U:place_param", &number, &PyDict_Type, &dict, &key)) {
        return NULL;
    }
    if (number < 0 || number >= self->sharded_count) {
        PyErr_SetString(PyExc_IndexError, "place_param: the parameter's index is out of range");
        return NULL;
    }
    Py_XSETREF(self->sharded[number].dict, Py_NewRef(dict));
    Py_XSETREF(self->sharded[number].key, Py_NewRef(key));
    Py_RETURN_NONE;
}

/* --- gradients that wait --------------------------------------------------------------------- */

long
fsdpc_py_grad_version(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    return fsdpc_py_local_version(flat, sharded->shown);
}

static bool
waits(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    for (int c = 0; c < sharded->cover_count; c++) {
        if (fsdpc_unit_local_used(flat->unit)[sharded->covers[c]]) {
            return true;
        }
    }
    return false;
}

int
fsdpc_py_show_waiting(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    for (int c = 0; c < sharded->cover_count; c++) {
        int status = fsdpc_unit_zero_grad(flat->unit, sharded->covers[c]);
        if (status == FSDPC_OK) {
            status = fsdpc_unit_scale_grad(flat->unit, sharded->covers[c], -1.0);
        }
        if (fsdpc_py_checked(status) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_note_waiting(fsdpc_py_flat *flat)
{
    for (int i = 0; i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        sharded->waits = sharded->grad && waits(flat, sharded);
        if (sharded->waits && (sharded->version = fsdpc_py_grad_version(flat, sharded)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Returns the truth of tensor.any(). On a GPU that is a host sync, so this function is called only if the
 * user wrote into a gradient between two backwards of no_sync. */
static int
has_any(PyObject *tensor)
{
    PyObject *any = PyObject_CallMethodNoArgs(tensor, fsdpc_py_name.any);
    int result = any ? PyObject_IsTrue(any) : -1;
    Py_XDECREF(any);
    return result;
}

static int
holds_positive_zeros(PyObject *grad)
{
    int other = has_any(grad);
    if (other == 0) {
        PyObject *signs = PyObject_CallMethodNoArgs(grad, fsdpc_py_name.signbit);
        other = signs ? has_any(signs) : -1;
        Py_XDECREF(signs);
    }
    return other < 0 ? -1 : !other;
}

static bool
has_elements(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded)
{
    int64_t length = 0;
    for (int c = 0; length == 0 && c < sharded->cover_count; c++) {
        (void)fsdpc_unit_grad_part(flat->unit, sharded->covers[c], &length);
    }
    return length > 0;
}

/* Returns whether the user wrote zeros into the gradient since the last backward. If the user wrote to a
 * gradient without elements, returns `empty`. */
static int
was_zeroed(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded, bool empty)
{
    long version = fsdpc_py_grad_version(flat, sharded);
    if (version < 0 || version == sharded->version) {
        return version < 0 ? -1 : 0;
    }
    return has_elements(flat, sharded) ? holds_positive_zeros(sharded->grad) : empty;
}

static int
drop_if_zeroed(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded, bool empty)
{
    int zeroed = was_zeroed(flat, sharded, empty);
    for (int c = 0; zeroed > 0 && c < sharded->cover_count; c++) {
        fsdpc_grad_drop_local(flat->unit, sharded->covers[c]);
    }
    return zeroed;
}

/* Examines gradients without elements last, because the others decide about them: [Note: negative zeros]. */
int
fsdpc_py_drop_zeroed(fsdpc_py_flat *flat)
{
    bool all = true;
    for (int empty = 0; empty < 2; empty++) {
        for (int i = 0; i < flat->sharded_count; i++) {
            fsdpc_py_sharded *sharded = &flat->sharded[i];
            bool has = sharded->waits && has_elements(flat, sharded);
            if (!sharded->waits || !waits(flat, sharded) || has != !empty) {
                continue;
            }
            int zeroed = drop_if_zeroed(flat, sharded, all);
            if (zeroed < 0) {
                return -1;
            }
            all = all && zeroed;
        }
    }
    return 0;
}
