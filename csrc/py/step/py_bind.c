/* The torch objects of a unit: gathered tensors, their entries in modules, and the parameters and gradients
 * that the optimizer sees. bind() sets these objects once. A step then only stores dictionary entries and
 * reads attributes, and finds both in prepared arrays. The functions for gradients are in py_grads_full.c and
 * py_grads_sharded.c.
 */
#include "py/step/py_step.h"

#include "base/mem.h"

/* --- bind ------------------------------------------------------------------------------------ */

static int
note_full(fsdpc_py_flat *flat)
{
    const int count = fsdpc_unit_layout(flat->unit)->param_count;
    for (int i = 0; !flat->foreign && i < count; i++) {
        if (flat->full[i] && fsdpc_py_full_data(flat, i, &flat->full_data[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
bind_full(fsdpc_py_flat *flat, PyObject *full)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    if (PyTuple_GET_SIZE(full) != count) {
        PyErr_SetString(PyExc_ValueError, "bind: full must have one entry per parameter");
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(full, i);
        if (tensor != Py_None && !fsdpc_py_is_torch(tensor)) {
            PyErr_Format(PyExc_TypeError, "bind: full[%d] must be a tensor or None, not %.100s", i,
                         Py_TYPE(tensor)->tp_name);
            return -1;
        }
        flat->full[i] = tensor == Py_None ? NULL : Py_NewRef(tensor);
        flat->full_dtensors =
            flat->full_dtensors ||
            (flat->dtensors && PyObject_HasAttr(tensor, fsdpc_py_name.local_tensor));
    }
    return note_full(flat);
}

PyObject *
fsdpc_py_flat_note_full(fsdpc_py_flat *self, PyObject *Py_UNUSED(ignored))
{
    return note_full(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* replace_full(number, tensor): `tensor` becomes parameter `number`'s gathered tensor. Foreign units only. */
PyObject *
fsdpc_py_flat_replace_full(fsdpc_py_flat *self, PyObject *args)
{
    int number;
    PyObject *tensor;
    if (!PyArg_ParseTuple(args, "iO:replace_full", &number, &tensor)) {
        return NULL;
    }
    const bool exists = number >= 0 && number < fsdpc_unit_layout(self->unit)->param_count;
    if (!self->foreign || !exists || !self->full[number] || !fsdpc_py_is_torch(tensor)) {
        PyErr_SetString(PyExc_ValueError, "replace_full: a unit that is bound as foreign, the "
                                          "index of a parameter of it, and a tensor are needed");
        return NULL;
    }
    PyObject *old = self->full[number];
    for (int i = 0; i < self->site_count; i++) {
        if (self->sites[i].full == old) {
            Py_SETREF(self->sites[i].full, Py_NewRef(tensor));
        }
    }
    self->full[number] = Py_NewRef(tensor);
    Py_DECREF(old);
    if (fsdpc_py_watch_again(self, number) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Checks that a row of one of bind's lists is a tuple. */
static int
check_row(PyObject *row, const char *list)
{
    if (PyTuple_Check(row)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "bind: the rows of %s must be tuples, not %.100s", list,
                 Py_TYPE(row)->tp_name);
    return -1;
}

/* Checks a parameter's index from Python, and that its gathered tensor exists. */
static int
check_number(const fsdpc_py_flat *flat, long number)
{
    if (PyErr_Occurred()) {
        return -1;
    }
    if (number < 0 || number >= fsdpc_unit_layout(flat->unit)->param_count || !flat->full[number]) {
        PyErr_Format(PyExc_ValueError, "bind: parameter %ld does not exist or has no full tensor",
                     number);
        return -1;
    }
    return 0;
}

/* Takes the rows of `sites`: (dict, key, param number, sharded object[, placeholder or None]). */
static int
bind_sites(fsdpc_py_flat *flat, PyObject *sites)
{
    Py_ssize_t count = PyTuple_GET_SIZE(sites);
    flat->sites = fsdpc_mem_calloc((size_t)count, sizeof *flat->sites);
    if (!flat->sites) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *dict, *key, *sharded, *placeholder = Py_None;
        int param;
        if (check_row(PyTuple_GET_ITEM(sites, i), "sites") < 0 ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(sites, i), "O!OiO|O", &PyDict_Type, &dict, &key,
                              &param, &sharded, &placeholder)) {
            return -1;
        }
        if (check_number(flat, param) < 0) {
            return -1;
        }
        flat->sites[i] = (fsdpc_py_site){Py_NewRef(dict), Py_NewRef(key),
                                         Py_NewRef(flat->full[param]), Py_NewRef(sharded),
                                         placeholder == Py_None ? NULL : Py_NewRef(placeholder)};
        flat->site_count++;
    }
    return 0;
}

static int
bind_covers(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *indices)
{
    Py_ssize_t count = PyTuple_GET_SIZE(indices);
    sharded->covers = fsdpc_mem_calloc((size_t)count, sizeof *sharded->covers);
    if (!sharded->covers) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t c = 0; c < count; c++) {
        long index = PyLong_AsLong(PyTuple_GET_ITEM(indices, c));
        if (check_number(flat, index) < 0) {
            return -1;
        }
        sharded->covers[c] = (int)index;
    }
    sharded->cover_count = (int)count;
    return 0;
}

/* Sets *out to the address of a parameter's memory, or leaves *out unchanged on the meta device. is_meta is
 * read first: for a meta tensor DLPack raises a C++ exception, whose backtrace takes torch milliseconds. */
static int
bound_data(const fsdpc_py_flat *flat, PyObject *param, const void **out)
{
    PyObject *local = fsdpc_py_local(flat, param);
    PyObject *meta = local ? PyObject_GetAttr(local, fsdpc_py_name.is_meta) : NULL;
    int result = !meta ? -1 : meta == Py_True ? 0 : fsdpc_py_torch_data(local, out);
    Py_XDECREF(meta);
    Py_XDECREF(local);
    return result;
}

/* Takes the rows of `sharded`: (param, grad tensor or None, (param numbers)). */
static int
bind_sharded(fsdpc_py_flat *flat, PyObject *list)
{
    Py_ssize_t count = PyTuple_GET_SIZE(list);
    flat->sharded = fsdpc_mem_calloc((size_t)count, sizeof *flat->sharded);
    if (!flat->sharded) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *param, *grad, *indices;
        if (check_row(PyTuple_GET_ITEM(list, i), "sharded") < 0 ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(list, i), "OOO!", &param, &grad, &PyTuple_Type,
                              &indices)) {
            return -1;
        }
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        if (!fsdpc_py_is_torch(param) || PyTuple_GET_SIZE(indices) == 0) {
            PyErr_SetString(PyExc_ValueError,
                            "bind: a row of sharded must be a tensor, its gradient or None, and a "
                            "tuple of at least one parameter's index");
            return -1;
        }
        sharded->param = Py_NewRef(param);
        flat->sharded_count++;
        if (bind_covers(flat, sharded, indices) < 0 ||
            (grad != Py_None && fsdpc_py_set_grad(flat, sharded, grad) < 0)) {
            return -1;
        }
        sharded->requires_grad = sharded->grad != NULL;
        sharded->param_version = -1;
        if (!flat->foreign && bound_data(flat, param, &sharded->param_data) < 0) {
            return -1;
        }
        flat->expected += sharded->grad ? sharded->cover_count : 0;
    }
    return 0;
}

/* Takes the numbers of the parameters whose gathered tensors have a gradient hook from the start. */
static int
bind_watched(fsdpc_py_flat *flat, PyObject *list)
{
    Py_ssize_t count = PyTuple_GET_SIZE(list);
    flat->watched = fsdpc_mem_calloc((size_t)count, sizeof *flat->watched);
    if (!flat->watched) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t w = 0; w < count; w++) {
        long index = PyLong_AsLong(PyTuple_GET_ITEM(list, w));
        if (check_number(flat, index) < 0) {
            return -1;
        }
        flat->watched[w] = (int)index;
        flat->hooked[index] = 1;
        flat->watched_count++;
    }
    flat->watch_all = flat->watched_count >= fsdpc_unit_layout(flat->unit)->trainable_count;
    return 0;
}

static int
bind_all(fsdpc_py_flat *flat, PyObject *const rows[4], bool dtensors)
{
    fsdpc_py_flat_unbind(flat);
    flat->dtensors = dtensors;
    flat->full_dtensors = false;
    if (bind_full(flat, rows[0]) == 0 && bind_sites(flat, rows[1]) == 0 &&
        bind_sharded(flat, rows[2]) == 0 && bind_watched(flat, rows[3]) == 0) {
        return 0;
    }
    fsdpc_py_flat_unbind(flat);
    return -1;
}

/* Takes the tensor whose version counter all gathered tensors share: [Note: versions] in py_versions.c. */
static int
bind_versions(fsdpc_py_flat *flat, PyObject *counter, bool by_gather)
{
    PyObject *once = NULL, *thrice = NULL;
    if (counter != Py_None) {
        once = PyTuple_Pack(1, counter);
        thrice = once ? PyTuple_Pack(3, counter, counter, counter) : NULL;
        if (!thrice) {
            Py_XDECREF(once);
            return -1;
        }
    }
    Py_XSETREF(flat->versions, once);
    Py_XSETREF(flat->versions_thrice, thrice);
    flat->by_gather = by_gather;
    flat->marked = false;
    flat->gathered_version = 2;
    flat->released_version = 1;
    return 0;
}

static int
check_row_dims(const fsdpc_py_flat *flat, PyObject *row_dims)
{
    int count = fsdpc_unit_layout(flat->unit)->param_count;
    if (row_dims == Py_None || (PyBytes_Check(row_dims) && PyBytes_GET_SIZE(row_dims) == count)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "bind: row_dims must be %d bytes or None", count);
    return -1;
}

PyObject *
fsdpc_py_flat_bind(fsdpc_py_flat *flat, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *full, *sites, *sharded, *watched, *versions = Py_None;
    PyObject *row_dims = Py_None;
    bool by_gather = false, dtensors = false;
    const fsdpc_py_arg table[] = {
        {"full", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &full},
        {"sites", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &sites},
        {"sharded", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &sharded},
        {"watched", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &watched},
        {"versions", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &versions},
        {"by_gather", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &by_gather},
        {"dtensors", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &dtensors},
        {"row_dims", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &row_dims},
    };
    if (fsdpc_py_args("bind", table, 8, args, count, keywords) < 0) {
        return NULL;
    }
    if (check_row_dims(flat, row_dims) < 0) {
        return NULL;
    }
    if (!PyList_Check(full) || !PyList_Check(sites) || !PyList_Check(sharded) ||
        !PyList_Check(watched)) {
        PyErr_SetString(PyExc_TypeError, "bind: full, sites, sharded and watched must be lists");
        return NULL;
    }
    if (fsdpc_py_flat_in_use(flat)) {
        PyErr_Format(fsdpc_py_current()->state_error, "bind: unit %s is in use",
                     fsdpc_unit_name(flat->unit));
        return NULL;
    }
    /* Reading the lists may run Python code that changes them or calls bind() again, so they are copied. */
    PyObject *rows[4] = {PyList_AsTuple(full), PyList_AsTuple(sites), PyList_AsTuple(sharded),
                         PyList_AsTuple(watched)};
    bool whole = rows[0] && rows[1] && rows[2] && rows[3];
    int result = whole ? fsdpc_py_try_flat(flat) : -1;
    if (result == 0) {
        result = bind_all(flat, rows, dtensors);
        Py_XSETREF(flat->row_dims, row_dims == Py_None ? NULL : Py_NewRef(row_dims));
        result = result == 0 ? bind_versions(flat, versions, by_gather) : result;
        fsdpc_py_leave_flat(flat);
    }
    for (int i = 0; i < 4; i++) {
        Py_XDECREF(rows[i]);
    }
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* Dropping references may run Python code, which must not find the references that are being
 * dropped. */
void
fsdpc_py_flat_unbind(fsdpc_py_flat *flat)
{
    int params = flat->unit ? fsdpc_unit_layout(flat->unit)->param_count : 0;
    fsdpc_py_site *sites = flat->sites;
    fsdpc_py_sharded *sharded = flat->sharded;
    const int site_count = flat->site_count, sharded_count = flat->sharded_count;
    flat->sites = NULL;
    flat->sharded = NULL;
    flat->site_count = flat->sharded_count = flat->expected = 0;
    flat->unbinds = flat->in_pass = false;
    Py_CLEAR(flat->versions);
    Py_CLEAR(flat->versions_thrice);
    Py_CLEAR(flat->row_dims);
    fsdpc_mem_free(flat->watched);
    flat->watched = NULL;
    flat->watched_count = 0;
    for (int i = 0; flat->full && i < params; i++) {
        Py_CLEAR(flat->full[i]);
    }
    for (int i = 0; i < site_count; i++) {
        Py_CLEAR(sites[i].dict);
        Py_CLEAR(sites[i].key);
        Py_CLEAR(sites[i].full);
        Py_CLEAR(sites[i].sharded);
        Py_CLEAR(sites[i].placeholder);
    }
    for (int i = 0; i < sharded_count; i++) {
        Py_CLEAR(sharded[i].param);
        Py_CLEAR(sharded[i].grad);
        Py_CLEAR(sharded[i].shown);
        Py_CLEAR(sharded[i].alias);
        Py_CLEAR(sharded[i].dict);
        Py_CLEAR(sharded[i].key);
        fsdpc_mem_free(sharded[i].covers);
    }
    fsdpc_mem_free(sites);
    fsdpc_mem_free(sharded);
}

/* --- swapping the modules' entries ----------------------------------------------------------- */

int
fsdpc_py_install(fsdpc_py_flat *flat)
{
    if (flat->installed++ > 0 || flat->shown || flat->by_gather) {
        return 0;
    }
    for (int i = 0; i < flat->site_count; i++) {
        if (PyDict_SetItem(flat->sites[i].dict, flat->sites[i].key, flat->sites[i].full) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Takes the gathered tensors out of the modules' entries; `own`: only if the entry still shows the tensor. */
static int
put_back(fsdpc_py_flat *flat, bool own)
{
    for (int i = 0; i < flat->site_count && !flat->shown && !flat->by_gather; i++) {
        const fsdpc_py_site *site = &flat->sites[i];
        if (own && PyDict_GetItemWithError(site->dict, site->key) != site->full) {
            if (PyErr_Occurred()) {
                return -1;
            }
            continue;
        }
        PyObject *shown = flat->in_pass && site->placeholder ? site->placeholder : site->sharded;
        if (PyDict_SetItem(site->dict, site->key, shown) < 0) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_set_in_pass(fsdpc_py_flat *flat, bool in_pass)
{
    if (flat->in_pass == in_pass || flat->site_count == 0 || !flat->sites[0].placeholder) {
        return 0;
    }
    flat->in_pass = in_pass;
    return flat->installed > 0 ? 0 : put_back(flat, false);
}

int
fsdpc_py_uninstall(fsdpc_py_flat *flat)
{
    if (flat->installed == 0 || --flat->installed > 0) {
        return 0;
    }
    return put_back(flat, false);
}

int
fsdpc_py_end_stay(fsdpc_py_flat *flat)
{
    if (flat->stays && flat->installed == 1 && fsdpc_py_take_shown_flags(flat) < 0) {
        return -1;
    }
    bool last = flat->stays && flat->installed > 0 && --flat->installed == 0;
    flat->stays = false;
    return last ? put_back(flat, true) : 0;
}

int
fsdpc_py_uninstall_all(fsdpc_py_flat *flat)
{
    flat->hold_installed = flat->unsharded = flat->stays = false;
    flat->members_left = 0;
    if (flat->installed == 0) {
        return 0;
    }
    if (fsdpc_py_take_shown_flags(flat) < 0) {
        return -1;
    }
    flat->installed = 0;
    return put_back(flat, true);
}

int
fsdpc_py_end_hold(fsdpc_py_flat *flat)
{
    bool held = flat->hold_installed,
         forward_goes_on = flat->tree && flat->tree->backward.kind == FSDPC_BACKWARD_LOCAL;
    flat->hold_installed = false;
    if (held && fsdpc_py_uninstall(flat) < 0) {
        return -1;
    }
    return forward_goes_on ? 0 : fsdpc_py_end_stay(flat);
}
