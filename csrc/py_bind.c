/* The torch objects that a unit stands for: gathered tensors, places in modules, the parameters and
 * gradients that the optimizer sees. Set once by bind(); what runs in a step is dictionary stores
 * and attribute reads over prepared arrays. The gradients are in py_grads_full.c and
 * py_grads_seen.c.
 */
#include "py_engine.h"

#include "mem.h"

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
