/* The torch objects that a unit stands for: gathered tensors, places in modules, the parameters and
 * gradients that the optimizer sees. Set once by bind(); what runs in a step is dictionary stores
 * and attribute reads over prepared arrays.
 */
#include "py_engine.h"

#include <string.h>

#include "mem.h"
#include "unit_impl.h"

/* --- bind ------------------------------------------------------------------------------------ */

static int
bind_full(fsdpc_py_flat *flat, PyObject *full)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    if (PyList_GET_SIZE(full) != count) {
        PyErr_SetString(PyExc_ValueError, "bind: one full tensor per parameter, please");
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *tensor = PyList_GET_ITEM(full, i);
        flat->full[i] = tensor == Py_None ? NULL : Py_NewRef(tensor);
    }
    return 0;
}

/* (dict, key, param number, sharded object) each. */
static int
bind_sites(fsdpc_py_flat *flat, PyObject *sites)
{
    Py_ssize_t count = PyList_GET_SIZE(sites);
    flat->sites = fsdpc_mem_calloc((size_t)count, sizeof *flat->sites);
    if (!flat->sites) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *dict, *key, *sharded;
        int param;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(sites, i), "O!OiO", &PyDict_Type, &dict, &key, &param,
                              &sharded)) {
            return -1;
        }
        if (param < 0 || param >= fsdpc_unit_layout(flat->unit)->param_count) {
            PyErr_SetString(PyExc_ValueError, "bind: no such parameter");
            return -1;
        }
        flat->sites[i] = (fsdpc_py_site){Py_NewRef(dict), Py_NewRef(key),
                                         Py_NewRef(flat->full[param]), Py_NewRef(sharded)};
        flat->site_count++;
    }
    return 0;
}

static int
bind_covers(fsdpc_py_flat *flat, fsdpc_py_seen *seen, PyObject *indices)
{
    Py_ssize_t count = PyTuple_GET_SIZE(indices);
    seen->covers = fsdpc_mem_calloc((size_t)count, sizeof *seen->covers);
    if (!seen->covers) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t c = 0; c < count; c++) {
        long index = PyLong_AsLong(PyTuple_GET_ITEM(indices, c));
        if (index < 0 || index >= fsdpc_unit_layout(flat->unit)->param_count) {
            PyErr_SetString(PyExc_ValueError, "bind: no such parameter");
            return -1;
        }
        seen->covers[c] = (int)index;
    }
    seen->cover_count = (int)count;
    return 0;
}

static int
bind_grad(const fsdpc_py_flat *flat, fsdpc_py_seen *seen, PyObject *grad)
{
    fsdpc_py_view view;
    if (grad == Py_None) {
        return 0;
    }
    if (fsdpc_py_torch_view_on(grad, fsdpc_py_own_place(flat), &view) < 0) {
        return -1;
    }
    seen->grad = Py_NewRef(grad);
    seen->grad_data = view.data;
    seen->alias = PyObject_CallMethodNoArgs(grad, fsdpc_py_name.detach);
    return seen->alias ? 0 : -1;
}

/* (param, grad tensor or None, (param numbers)) each. */
static int
bind_seen(fsdpc_py_flat *flat, PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    flat->seen = fsdpc_mem_calloc((size_t)count, sizeof *flat->seen);
    if (!flat->seen) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *param, *grad, *indices;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "OOO!", &param, &grad, &PyTuple_Type,
                              &indices)) {
            return -1;
        }
        fsdpc_py_seen *seen = &flat->seen[i];
        seen->param = Py_NewRef(param);
        flat->seen_count++;
        if (bind_grad(flat, seen, grad) < 0 || bind_covers(flat, seen, indices) < 0) {
            return -1;
        }
        seen->requires_grad = seen->grad != NULL;
        if (fsdpc_py_torch_data(param, &seen->param_data) < 0) {
            return -1;
        }
        flat->expected += seen->grad ? seen->cover_count : 0;
    }
    return 0;
}

/* Numbers of the parameters whose gathered tensors get a gradient hook to begin with. */
static int
bind_watched(fsdpc_py_flat *flat, PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    flat->watched = fsdpc_mem_calloc((size_t)count, sizeof *flat->watched);
    if (!flat->watched) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t w = 0; w < count; w++) {
        long index = PyLong_AsLong(PyList_GET_ITEM(list, w));
        if (index < 0 || index >= fsdpc_unit_layout(flat->unit)->param_count) {
            PyErr_SetString(PyExc_ValueError, "bind: no such parameter");
            return -1;
        }
        flat->watched[w] = (int)index;
        flat->watched_count++;
    }
    flat->watch_all = flat->watched_count >= fsdpc_unit_layout(flat->unit)->trainable_count;
    return 0;
}

PyObject *
fsdpc_py_flat_bind(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_py_flat *flat = (fsdpc_py_flat *)self;
    PyObject *full, *sites, *seen, *watched;
    const fsdpc_py_arg table[] = {
        {"full", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &full},
        {"sites", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &sites},
        {"seen", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &seen},
        {"watched", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &watched},
    };
    if (fsdpc_py_args("bind", table, 4, args, count, keywords) < 0) {
        return NULL;
    }
    if (!PyList_Check(full) || !PyList_Check(sites) || !PyList_Check(seen) ||
        !PyList_Check(watched)) {
        PyErr_SetString(PyExc_TypeError, "bind takes four lists");
        return NULL;
    }
    fsdpc_py_flat_unbind(flat);
    if (bind_full(flat, full) < 0 || bind_sites(flat, sites) < 0 || bind_seen(flat, seen) < 0 ||
        bind_watched(flat, watched) < 0) {
        fsdpc_py_flat_unbind(flat);
        return NULL;
    }
    Py_RETURN_NONE;
}

void
fsdpc_py_flat_unbind(fsdpc_py_flat *flat)
{
    int params = flat->unit ? fsdpc_unit_layout(flat->unit)->param_count : 0;
    for (int i = 0; flat->full && i < params; i++) {
        Py_CLEAR(flat->full[i]);
    }
    for (int i = 0; i < flat->site_count; i++) {
        Py_CLEAR(flat->sites[i].dict);
        Py_CLEAR(flat->sites[i].key);
        Py_CLEAR(flat->sites[i].full);
        Py_CLEAR(flat->sites[i].sharded);
    }
    for (int i = 0; i < flat->seen_count; i++) {
        Py_CLEAR(flat->seen[i].param);
        Py_CLEAR(flat->seen[i].grad);
        Py_CLEAR(flat->seen[i].alias);
        fsdpc_mem_free(flat->seen[i].covers);
    }
    fsdpc_mem_free(flat->watched);
    flat->watched = NULL;
    flat->watched_count = 0;
    fsdpc_mem_free(flat->sites);
    fsdpc_mem_free(flat->seen);
    flat->sites = NULL;
    flat->seen = NULL;
    flat->site_count = flat->seen_count = flat->expected = 0;
}

/* --- swapping the modules' entries ----------------------------------------------------------- */

int
fsdpc_py_install(fsdpc_py_flat *flat)
{
    if (flat->installed++ > 0 || flat->shown) {
        return 0;
    }
    for (int i = 0; i < flat->site_count; i++) {
        if (PyDict_SetItem(flat->sites[i].dict, flat->sites[i].key, flat->sites[i].full) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
put_back(fsdpc_py_flat *flat)
{
    for (int i = 0; i < flat->site_count && !flat->shown; i++) {
        if (PyDict_SetItem(flat->sites[i].dict, flat->sites[i].key, flat->sites[i].sharded) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_uninstall(fsdpc_py_flat *flat)
{
    if (flat->installed == 0 || --flat->installed > 0) {
        return 0;
    }
    return put_back(flat);
}

int
fsdpc_py_uninstall_all(fsdpc_py_flat *flat)
{
    flat->hold_installed = false;
    if (flat->installed == 0) {
        return 0;
    }
    flat->installed = 0;
    return put_back(flat);
}

int
fsdpc_py_watch_all(fsdpc_py_flat *flat)
{
    if (flat->watch_all) {
        return 0;
    }
    flat->watch_all = true;
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    for (int i = 0; i < layout->param_count; i++) {
        bool has = !flat->full[i] || layout->params[i].trainable_index < 0;
        for (int w = 0; w < flat->watched_count; w++) {
            has = has || flat->watched[w] == i;
        }
        if (has) {
            continue;
        }
        PyObject *hook = fsdpc_py_hook_new(FSDPC_HOOK_GRAD, (PyObject *)flat, i);
        PyObject *handle =
            hook ? PyObject_CallMethod(flat->full[i], "register_post_accumulate_grad_hook", "N",
                                       hook)
                 : NULL;
        if (!handle) {
            return -1;
        }
        Py_DECREF(handle);
    }
    return 0;
}

/* --- flags ----------------------------------------------------------------------------------- */

static int
carry_flag(fsdpc_py_flat *flat, fsdpc_py_seen *seen, PyObject *flag)
{
    bool wanted = flag == Py_True;
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    if (wanted && !seen->grad) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "parameter %s of unit %s was frozen when it was wrapped and requires a "
                     "gradient now; set requires_grad before wrapping",
                     layout->params[seen->covers[0]].name, fsdpc_unit_name(flat->unit));
        return -1;
    }
    for (int c = 0; c < seen->cover_count; c++) {
        if (PyObject_SetAttr(flat->full[seen->covers[c]], fsdpc_py_name.requires_grad, flag) < 0) {
            return -1;
        }
    }
    flat->expected += wanted ? seen->cover_count : -seen->cover_count;
    seen->requires_grad = wanted;
    return 0;
}

int
fsdpc_py_sync_flags(fsdpc_py_flat *flat)
{
    int result = 0;
    for (int i = 0; result == 0 && i < flat->seen_count; i++) {
        PyObject *flag = PyObject_GetAttr(flat->seen[i].param, fsdpc_py_name.requires_grad);
        if (!flag) {
            return -1;
        }
        if ((flag == Py_True) != flat->seen[i].requires_grad) {
            result = carry_flag(flat, &flat->seen[i], flag);
        }
        Py_DECREF(flag);
    }
    return result;
}

/* --- gradients that the optimizer sees ------------------------------------------------------- */

enum grad_state { GRAD_NONE, GRAD_OURS, GRAD_ERROR };

/* The user put another tensor into .grad: its values become ours. */
static int
take_foreign(fsdpc_py_flat *flat, fsdpc_py_seen *seen, PyObject *grad)
{
    fsdpc_py_view view;
    const fsdpc_layout *layout = fsdpc_unit_layout(flat->unit);
    if (fsdpc_py_torch_view_on(grad, fsdpc_py_own_place(flat), &view) < 0) {
        return -1;
    }
    int64_t at = 0;
    for (int c = 0; c < seen->cover_count; c++) {
        int i = seen->covers[c];
        int64_t length;
        fsdpc_unit_grad_part(flat->unit, i, &length);
        fsdpc_span span = fsdpc_layout_span(layout, i, fsdpc_unit_rank(flat->unit));
        at = seen->cover_count > 1 ? span.piece_begin : 0;
        if (!view.contiguous || at + length > view.numel) {
            PyErr_Format(PyExc_ValueError,
                         "the gradient put into parameter %s of unit %s does not fit its shard: "
                         "it must be contiguous with %lld elements",
                         layout->params[i].name, fsdpc_unit_name(flat->unit), (long long)length);
            return -1;
        }
        const char *values = (const char *)view.data + (size_t)at * view.itemsize;
        if (length > 0 && fsdpc_unit_take_grad(flat->unit, i, values, view.dtype) != FSDPC_OK) {
            fsdpc_py_raise(FSDPC_E_INVAL);
            return -1;
        }
    }
    return 0;
}

static int
reload_seen(fsdpc_py_flat *flat, const fsdpc_py_seen *seen)
{
    for (int c = 0; c < seen->cover_count; c++) {
        int status = fsdpc_unit_reload_grad(flat->unit, seen->covers[c]);
        if (status != FSDPC_OK) {
            fsdpc_py_raise(status);
            return -1;
        }
    }
    return 0;
}

/* Our gradient tensor, but the user may have pointed it at other memory (grad.data = ...). */
static int
check_ours(fsdpc_py_flat *flat, fsdpc_py_seen *seen)
{
    fsdpc_py_view view;
    if (fsdpc_py_torch_view_on(seen->grad, fsdpc_py_own_place(flat), &view) < 0) {
        return -1;
    }
    if (view.data == seen->grad_data || view.numel == 0) {
        return reload_seen(flat, seen);
    }
    if (take_foreign(flat, seen, seen->grad) < 0) {
        return -1;
    }
    return PyObject_SetAttr(seen->grad, fsdpc_py_name.data, seen->alias);
}

static int
replace_foreign(fsdpc_py_flat *flat, fsdpc_py_seen *seen, PyObject *grad)
{
    if (take_foreign(flat, seen, grad) < 0) {
        return -1;
    }
    return PyObject_SetAttr(seen->param, fsdpc_py_name.grad, seen->grad);
}

static enum grad_state
look_at(fsdpc_py_flat *flat, fsdpc_py_seen *seen)
{
    PyObject *grad = PyObject_GetAttr(seen->param, fsdpc_py_name.grad);
    if (!grad) {
        return GRAD_ERROR;
    }
    enum grad_state state = grad == Py_None ? GRAD_NONE : GRAD_OURS;
    if (grad != Py_None &&
        (grad == seen->grad ? check_ours(flat, seen) : replace_foreign(flat, seen, grad)) < 0) {
        state = GRAD_ERROR;
    }
    Py_DECREF(grad);
    return state;
}

/* Cleared gradients start from zero, and what no_sync kept for them is cleared with them. */
static int
start_from_zero(fsdpc_py_flat *flat, const fsdpc_py_seen *seen, bool zero)
{
    for (int c = 0; c < seen->cover_count; c++) {
        fsdpc_grad_drop_local(flat->unit, seen->covers[c]);
        if (zero && fsdpc_unit_zero_grad(flat->unit, seen->covers[c]) != FSDPC_OK) {
            fsdpc_py_raise(FSDPC_E_INTERNAL);
            return -1;
        }
    }
    return 0;
}

PyObject *
fsdpc_py_flat_adopt(fsdpc_py_flat *flat, PyObject *unused)
{
    (void)unused;
    for (int i = 0; i < flat->seen_count; i++) {
        if (flat->seen[i].grad && look_at(flat, &flat->seen[i]) == GRAD_ERROR) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

int
fsdpc_py_prepare_grads(fsdpc_py_flat *flat)
{
    if (flat->prepared) {
        return 0;
    }
    flat->prepared = true;
    if (flat->unit->local_any && fsdpc_py_drop_zeroed(flat) < 0) {
        return -1;
    }
    bool any_ours = false;
    for (int i = 0; i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        enum grad_state state = seen->grad ? look_at(flat, seen) : GRAD_NONE;
        if (state == GRAD_ERROR) {
            return -1;
        }
        seen->cleared = seen->grad && state == GRAD_NONE;
        any_ours = any_ours || state == GRAD_OURS;
    }
    for (int i = 0; i < flat->seen_count; i++) {
        if (flat->seen[i].cleared && start_from_zero(flat, &flat->seen[i], any_ours) < 0) {
            return -1;
        }
    }
    flat->unit->add = any_ours;
    return 0;
}

static bool
any_used(const fsdpc_py_seen *seen, const uint8_t *used)
{
    for (int c = 0; c < seen->cover_count; c++) {
        if (used[seen->covers[c]]) {
            return true;
        }
    }
    return false;
}

/* After no_sync nothing was summed yet: a zero gradient stands for what waits. */
static int
show_one(fsdpc_py_flat *flat, fsdpc_py_seen *seen, bool sync)
{
    seen->cleared = false;
    if (!sync && fsdpc_py_show_waiting(flat, seen) < 0) {
        return -1;
    }
    /* The user may have pointed it elsewhere before clearing it. */
    const void *data;
    if (fsdpc_py_torch_data(seen->grad, &data) < 0 ||
        (data != seen->grad_data &&
         PyObject_SetAttr(seen->grad, fsdpc_py_name.data, seen->alias) < 0)) {
        return -1;
    }
    return PyObject_SetAttr(seen->param, fsdpc_py_name.grad, seen->grad);
}

int
fsdpc_py_show_grads(fsdpc_py_flat *flat, bool sync)
{
    fsdpc_unit *unit = flat->unit;
    const uint8_t *used = sync ? unit->used : unit->local_used;
    int result = 0;
    for (int i = 0; result == 0 && i < flat->seen_count; i++) {
        fsdpc_py_seen *seen = &flat->seen[i];
        if (seen->cleared && any_used(seen, used)) {
            result = show_one(flat, seen, sync);
        }
    }
    if (sync) {
        memset(unit->used, 0, (size_t)unit->layout->param_count);
    }
    if (result == 0 && flat->prepared && unit->local_any) {
        result = fsdpc_py_note_waiting(flat);
    }
    return result;
}

/* --- gradients that autograd made ------------------------------------------------------------ */

/* A lazily negated gradient (complex arithmetic makes them) is written out first. */
static int
view_grad(fsdpc_py_flat *flat, int i)
{
    if (fsdpc_py_torch_view_on(flat->held[i], fsdpc_py_full_place(flat), &flat->views[i]) == 0) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_BufferError)) {
        return -1;
    }
    PyErr_Clear();
    PyObject *plain = PyObject_CallMethod(flat->held[i], "resolve_neg", NULL);
    if (!plain) {
        return -1;
    }
    Py_SETREF(flat->held[i], plain);
    return fsdpc_py_torch_view_on(plain, fsdpc_py_full_place(flat), &flat->views[i]);
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
        PyObject *grad = PyObject_GetAttr(flat->full[i], fsdpc_py_name.grad);
        if (!grad) {
            return -1;
        }
        if (grad == Py_None) {
            Py_DECREF(grad);
            continue;
        }
        flat->held[i] = grad;
        if (view_grad(flat, i) < 0) {
            return -1;
        }
        flat->grads[i] = (fsdpc_tensor){view->data,  view->dtype,   view->ndim,
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
        PyObject *grad = PyObject_GetAttr(flat->full[i], fsdpc_py_name.grad);
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
            PyObject_SetAttr(flat->full[i], fsdpc_py_name.grad, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}
