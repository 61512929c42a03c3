/* Creation and destruction of the table of an optimizer's steps, and the release of a step's references. */
#include "base/mem.h"
#include "py/optim/py_optim_table_impl.h"
#include "py/unit/py_flat.h"

static void
drop_held(struct table *self)
{
    const Py_ssize_t count = self->held_count;
    self->held_count = self->count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF(self->held[i]);
    }
}

/* Dropping references may run Python code, which must not read the table, so `busy` is cleared last. */
void
fsdpc_py_table_give_up(struct table *self)
{
    drop_held(self);
    self->busy = false;
}

void
fsdpc_py_table_free(struct table *self)
{
    drop_held(self);
    for (int g = 0; g < self->group_count; g++) {
        Py_XDECREF(self->groups[g].counter);
        Py_XDECREF(self->groups[g].average);
        for (int s = 0; s < self->groups[g].name_count; s++) {
            Py_XDECREF(self->groups[g].names[s]);
        }
    }
    for (int i = 0; self->members != NULL && i < self->member_count; i++) {
        for (int s = 0; s < SEEN; s++) {
            Py_XDECREF(self->members[i].seen[s].weak);
        }
    }
    Py_XDECREF(self->plain);
    Py_XDECREF(self->cut);
    fsdpc_mem_free(self->members);
    fsdpc_mem_free(self->groups);
    fsdpc_mem_free(self->entries);
    fsdpc_mem_free(self->tensors);
    fsdpc_mem_free(self->steps);
    fsdpc_mem_free(self->numbers);
    fsdpc_mem_free(self->grads);
    fsdpc_mem_free(self->locals);
    fsdpc_mem_free(self->held);
    fsdpc_mem_free(self);
}

int
fsdpc_py_table_misused(const char *problem)
{
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "optim_table: %s", problem);
    }
    return -1;
}

/* Takes a group from a tuple (params, counter or None, names of states, average or None). */
static int
take_group(struct table *self, PyObject *tuple, struct group *out)
{
    PyObject *params, *counter, *names, *average;
    if (!PyTuple_Check(tuple) ||
        !PyArg_ParseTuple(tuple, "OOOO", &params, &counter, &names, &average) ||
        !PyList_CheckExact(params) || !PyTuple_Check(names) ||
        PyTuple_GET_SIZE(names) > FSDPC_OPTIM_STATES) {
        return fsdpc_py_table_misused(
            "a group is a list of parameters, a name or None, names of states, and a name or None");
    }
    out->begin = self->member_count;
    self->member_count += (int)PyList_GET_SIZE(params);
    out->end = self->member_count;
    out->counter = counter == Py_None ? NULL : Py_NewRef(counter);
    out->average = average == Py_None ? NULL : Py_NewRef(average);
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(names); s++) {
        out->names[out->name_count++] = Py_NewRef(PyTuple_GET_ITEM(names, s));
    }
    return 0;
}

static int
allocate(struct table *self, Py_ssize_t entries)
{
    const size_t n = (size_t)self->member_count;
    self->members = fsdpc_mem_calloc(n, sizeof *self->members);
    self->entries = fsdpc_mem_calloc((size_t)entries, sizeof *self->entries);
    self->tensors = fsdpc_mem_calloc(n, sizeof *self->tensors);
    self->steps = fsdpc_mem_calloc(n, sizeof *self->steps);
    self->numbers = fsdpc_mem_calloc(n, sizeof *self->numbers);
    self->grads = fsdpc_mem_calloc(n, sizeof *self->grads);
    self->locals = fsdpc_mem_calloc(n, sizeof *self->locals);
    self->held = fsdpc_mem_calloc(n * HELD, sizeof *self->held);
    if (!self->members || !self->entries || !self->tensors || !self->steps || !self->numbers ||
        !self->grads || !self->locals || !self->held) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyObject *
fsdpc_py_table_local(const struct table *self, PyObject *tensor)
{
    PyObject *local =
        Py_IS_TYPE(tensor, self->cut) ? fsdpc_py_any_local(tensor) : Py_NewRef(tensor);
    if (local == NULL) {
        PyErr_Clear();
    }
    return local;
}

static int
take_view(const struct table *self, PyObject *param, fsdpc_py_view *out)
{
    PyObject *local = fsdpc_py_table_local(self, param);
    const int result = local == NULL ? -1 : fsdpc_py_torch_view(local, out);
    Py_XDECREF(local);
    return result;
}

static int
take_member(const struct table *self, struct member *out, PyObject *param, PyObject *place,
            PyObject *copy)
{
    fsdpc_py_view view;
    long long first;
    unsigned long long key;
    if (!PyTuple_Check(place) || !PyArg_ParseTuple(place, "LKi", &first, &key, &out->part) ||
        take_view(self, param, &view) < 0) {
        return fsdpc_py_table_misused("a place is (first, key, part)");
    }
    if (!view.contiguous) {
        return fsdpc_py_table_misused("a parameter is not contiguous");
    }
    out->param = param;
    out->copy = copy == Py_None ? NULL : copy;
    out->data = view.data;
    out->numel = view.numel;
    out->type = view.dtype;
    out->first = first;
    out->key = key;
    return 0;
}

static int
take_members(struct table *self, PyObject *groups, PyObject *places, PyObject *copies)
{
    const Py_ssize_t n = self->member_count;
    if (!PyList_CheckExact(places) || PyList_GET_SIZE(places) != n ||
        (copies != Py_None && (!PyList_CheckExact(copies) || PyList_GET_SIZE(copies) != n))) {
        return fsdpc_py_table_misused("one place and one copy per parameter are needed");
    }
    int number = 0;
    for (int g = 0; g < self->group_count; g++) {
        PyObject *params = PyTuple_GET_ITEM(PyList_GET_ITEM(groups, g), 0);
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params) && number < n; i++, number++) {
            PyObject *copy = copies == Py_None ? Py_None : PyList_GET_ITEM(copies, number);
            if (take_member(self, &self->members[number], PyList_GET_ITEM(params, i),
                            PyList_GET_ITEM(places, number), copy) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Takes all entries of the optimizer's state, and finds each member's state by the parameter's address. A
 * look-up by the parameter would call the tensor's hash, which is Python code and might change the state. */
static int
take_entries(struct table *self, PyObject *state, Py_ssize_t count)
{
    PyObject *key, *value, *of = PyDict_New();
    Py_ssize_t at = 0;
    int status = of == NULL ? -1 : 0;
    if (status == 0 && PyDict_Size(state) != count) { /* Python code ran meanwhile */
        status = fsdpc_py_table_misused("the optimizer's state has changed");
    }
    while (status == 0 && PyDict_Next(state, &at, &key, &value)) {
        PyObject *address = PyLong_FromVoidPtr(key);
        self->entries[self->entry_count++] = (struct entry){key, value};
        status = address == NULL ? -1 : PyDict_SetItem(of, address, value);
        Py_XDECREF(address);
    }
    for (int i = 0; status == 0 && i < self->member_count; i++) {
        PyObject *address = PyLong_FromVoidPtr((void *)self->members[i].param);
        PyObject *own = address == NULL ? NULL : PyDict_GetItemWithError(of, address);
        Py_XDECREF(address);
        if (own == NULL && PyErr_Occurred()) {
            status = -1;
        } else if (own != NULL && !PyDict_CheckExact(own)) {
            status = fsdpc_py_table_misused("a state is not a dict");
        }
        self->members[i].state = own;
    }
    Py_XDECREF(of);
    return status;
}

static int
fill_table(struct table *self, PyObject *plain, PyObject *cut, PyObject *groups, PyObject *state,
           PyObject *places, PyObject *copies)
{
    if (!PyType_Check(plain) || !PyType_Check(cut) || !PyList_CheckExact(groups) ||
        !PyDict_Check(state)) {
        return fsdpc_py_table_misused(
            "two types, a list of groups and the optimizer's state are needed");
    }
    self->plain = (PyTypeObject *)Py_NewRef(plain);
    self->cut = (PyTypeObject *)Py_NewRef(cut);
    self->exchange = fsdpc_py_look_up_exchange(self->plain);
    if (self->exchange == NULL) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "optim_table: this torch has no C functions that tell where tensors lie");
        return -1;
    }
    const Py_ssize_t count = PyList_GET_SIZE(groups), entries = PyDict_Size(state);
    self->groups = fsdpc_mem_calloc((size_t)count, sizeof *self->groups);
    if (self->groups == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t g = 0; g < count; g++) {
        if (take_group(self, PyList_GET_ITEM(groups, g), &self->groups[self->group_count++]) < 0) {
            return -1;
        }
    }
    if (allocate(self, entries) < 0 || take_members(self, groups, places, copies) < 0) {
        return -1;
    }
    return take_entries(self, state, entries);
}

struct table *
fsdpc_py_table_new(PyObject *const *args)
{
    struct table *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        PyErr_NoMemory();
    } else if (fill_table(self, args[0], args[1], args[2], args[3], args[4], args[5]) < 0) {
        fsdpc_py_table_free(self);
        self = NULL;
    }
    return self;
}
