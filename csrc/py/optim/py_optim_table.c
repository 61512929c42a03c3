/* The members of an optimizer's steps as a table, for steps of thousands of small tensors: a step reads
 * all tensors in one call and steps each group in another, without a line of Python for each parameter.
 *
 * The table knows which parameter, state dict and place belong together; it is made by a step that went
 * the long way. Everything else is read again in every step: gradients, states, where all of them lie.
 * Whatever is not as the table knows it (a parameter elsewhere, a missing state, a type that needs Python)
 * makes read() say so, before anything is changed, and the step goes the long way.
 *
 * The table holds addresses of parameters and state dicts and owns neither: an address counts only where
 * the groups and the optimizer's state of this step still have it.
 */
#include <string.h>

#include "base/mem.h"
#include "optim/optim.h"
#include "py/optim/py_optim.h"
#include "py/unit/py_engine.h"

static const char capsule_name[] = "fsdpc._C.optim_table";

/* A tensor as it was seen last: see is_plain. The shape lies in what torch has behind the object. */
struct seen {
    const void *object, *data, *shape;
};

enum { GRAD, PARAM, COUNTER, FIRST_STATE, SEEN = FIRST_STATE + FSDPC_OPTIM_STATES };
enum { HELD = SEEN + 1 }; /* for each member: local tensors of what is seen, and the gradient */

enum { AHEAD = 4 }; /* members */

struct member {
    const PyObject *param; /* an address */
    PyObject *state;       /* an address, held in a step; NULL: the optimizer has no state of it */
    PyObject *copy;        /* an address, kept alive by the caller; NULL: none */
    const void *data;
    int64_t numel, first;
    uint64_t key;
    fsdpc_dtype type;
    int part;
    struct seen seen[SEEN];
};

struct group {
    int begin, end;    /* members */
    int first, count;  /* of this step's tensors */
    PyObject *counter; /* owned: the name of the number of steps; NULL: there is none */
    PyObject *names[FSDPC_OPTIM_STATES]; /* owned */
    int name_count;
};

/* An entry of the optimizer's state, by addresses. */
struct pair {
    const PyObject *param;
    PyObject *state;
};

struct table {
    PyTypeObject *cut;   /* owned: DTensor, around a local tensor of the plain type */
    PyTypeObject *plain; /* owned: the type of tensors that are not looked at in another way */
    const dlpack_exchange *exchange; /* of that type */
    struct member *members;
    int member_count;
    struct group *groups;
    int group_count;
    struct pair *pairs;
    int pair_count;
    /* of the step that is being done */
    bool
        busy; /* from the beginning of a read to the end of its step: Python code may run in between */
    fsdpc_optim_tensor *tensors;
    float **steps;
    int *numbers;      /* the member of each tensor */
    PyObject **locals; /* of parameters that are DTensors, held below; else NULL */
    PyObject **grads;  /* of each tensor, held below */
    int count;
    PyObject **held; /* owned: gradients, states, local tensors */
    Py_ssize_t held_count;
};

static void
drop_held(struct table *self)
{
    const Py_ssize_t count = self->held_count;
    self->held_count = self->count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_DECREF(self->held[i]);
    }
}

/* Dropping may run Python code, which must not read meanwhile. */
static void
give_up(struct table *self)
{
    drop_held(self);
    self->busy = false;
}

static void
table_free(struct table *self)
{
    drop_held(self);
    for (int g = 0; g < self->group_count; g++) {
        Py_XDECREF(self->groups[g].counter);
        for (int s = 0; s < self->groups[g].name_count; s++) {
            Py_XDECREF(self->groups[g].names[s]);
        }
    }
    Py_XDECREF(self->plain);
    Py_XDECREF(self->cut);
    fsdpc_mem_free(self->members);
    fsdpc_mem_free(self->groups);
    fsdpc_mem_free(self->pairs);
    fsdpc_mem_free(self->tensors);
    fsdpc_mem_free(self->steps);
    fsdpc_mem_free(self->numbers);
    fsdpc_mem_free(self->grads);
    fsdpc_mem_free(self->locals);
    fsdpc_mem_free(self->held);
    fsdpc_mem_free(self);
}

static void
capsule_end(PyObject *capsule)
{
    table_free(PyCapsule_GetPointer(capsule, capsule_name));
}

static struct table *
table_of(PyObject *object)
{
    return PyCapsule_GetPointer(object, capsule_name);
}

/* --- making ------------------------------------------------------------------------------------ */

static int
misused(const char *problem)
{
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "optim_table: %s", problem);
    }
    return -1;
}

/* A group is (params, counter or None, names of states). */
static int
take_group(struct table *self, PyObject *tuple, struct group *out)
{
    PyObject *params, *counter, *names;
    if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "OOO", &params, &counter, &names) ||
        !PyList_CheckExact(params) || !PyTuple_Check(names) ||
        PyTuple_GET_SIZE(names) > FSDPC_OPTIM_STATES) {
        return misused("a group is a list of parameters, a name or None, and names of states");
    }
    out->begin = self->member_count;
    self->member_count += (int)PyList_GET_SIZE(params);
    out->end = self->member_count;
    out->counter = counter == Py_None ? NULL : Py_NewRef(counter);
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(names); s++) {
        out->names[out->name_count++] = Py_NewRef(PyTuple_GET_ITEM(names, s));
    }
    return 0;
}

static int
allocate(struct table *self, Py_ssize_t pairs)
{
    const size_t n = (size_t)self->member_count;
    self->members = fsdpc_mem_calloc(n, sizeof *self->members);
    self->pairs = fsdpc_mem_calloc((size_t)pairs, sizeof *self->pairs);
    self->tensors = fsdpc_mem_calloc(n, sizeof *self->tensors);
    self->steps = fsdpc_mem_calloc(n, sizeof *self->steps);
    self->numbers = fsdpc_mem_calloc(n, sizeof *self->numbers);
    self->grads = fsdpc_mem_calloc(n, sizeof *self->grads);
    self->locals = fsdpc_mem_calloc(n, sizeof *self->locals);
    self->held = fsdpc_mem_calloc(n * HELD + (size_t)pairs, sizeof *self->held);
    if (!self->members || !self->pairs || !self->tensors || !self->steps || !self->numbers ||
        !self->grads || !self->locals || !self->held) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* A DTensor's local tensor, any other one itself: a new reference, or NULL without an exception. */
static PyObject *
local_of(const struct table *self, PyObject *tensor)
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
    PyObject *local = local_of(self, param);
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
        return misused("a place is (first, key, part)");
    }
    if (!view.contiguous) {
        return misused("a parameter is not contiguous");
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
        return misused("one place and one copy per parameter are needed");
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

/* All entries of the state, and the state of each member: by the parameters' addresses, since a tensor's
 * hash is Python code, which could change the state in between. */
static int
take_pairs(struct table *self, PyObject *state, Py_ssize_t count)
{
    PyObject *key, *value, *of = PyDict_New();
    Py_ssize_t at = 0;
    int status = of == NULL ? -1 : 0;
    if (status == 0 && PyDict_Size(state) != count) { /* looking at tensors has run Python code */
        status = misused("the optimizer's state has changed");
    }
    while (status == 0 && PyDict_Next(state, &at, &key, &value)) {
        PyObject *address = PyLong_FromVoidPtr(key);
        self->pairs[self->pair_count++] = (struct pair){key, value};
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
            status = misused("a state is not a dict");
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
        return misused("two types, a list of groups and the optimizer's state are needed");
    }
    self->plain = (PyTypeObject *)Py_NewRef(plain);
    self->cut = (PyTypeObject *)Py_NewRef(cut);
    self->exchange = fsdpc_py_look_up_exchange(self->plain);
    if (self->exchange == NULL) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "optim_table: this torch has no C functions that tell where tensors lie");
        return -1;
    }
    const Py_ssize_t count = PyList_GET_SIZE(groups), pairs = PyDict_Size(state);
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
    if (allocate(self, pairs) < 0 || take_members(self, groups, places, copies) < 0) {
        return -1;
    }
    return take_pairs(self, state, pairs);
}

static PyObject *
optim_table(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError,
                        "optim_table takes two types, groups, state, places and copies");
        return NULL;
    }
    struct table *self = fsdpc_mem_calloc(1, sizeof *self);
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *capsule = fill_table(self, args[0], args[1], args[2], args[3], args[4], args[5]) == 0
                            ? PyCapsule_New(self, capsule_name, capsule_end)
                            : NULL;
    if (capsule == NULL) {
        table_free(self);
    }
    return capsule;
}

/* --- reading ----------------------------------------------------------------------------------- */

/* Where a tensor lies, if that is in host memory and contiguous. Never raises. */
static bool
find(const struct table *self, PyObject *tensor, dlpack_tensor *out, int64_t *numel)
{
    if (self->exchange->borrow(tensor, out) != 0) {
        PyErr_Clear();
        return false;
    }
    if (out->device.type != DLPACK_DEVICE_CPU || out->dtype.lanes != 1) {
        return false;
    }
    int64_t expected = 1;
    bool dense = true;
    for (int i = out->ndim - 1; i >= 0; i--) {
        dense =
            dense && (out->strides == NULL || out->shape[i] == 1 || out->strides[i] == expected);
        expected *= out->shape[i];
    }
    out->data = out->data == NULL ? NULL : (char *)out->data + out->byte_offset;
    *numel = expected;
    return expected == 0 || (dense && out->data != NULL);
}

static bool
float_type(const dlpack_tensor *tensor, fsdpc_dtype *out)
{
    static const fsdpc_dtype types[] = {FSDPC_F32, FSDPC_BF16, FSDPC_F64, FSDPC_F16};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (fsdpc_dtype_dlpack_code(types[i]) == tensor->dtype.code &&
            fsdpc_dtype_dlpack_bits(types[i]) == tensor->dtype.bits) {
            *out = types[i];
            return true;
        }
    }
    return false;
}

/* False for a lazily negated tensor. */
static bool
is_plain(PyObject *tensor)
{
    PyObject *lazy = fsdpc_py_call_field(tensor, FSDPC_PY_IS_NEG);
    const bool plain = lazy == Py_False;
    if (lazy == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(lazy);
    return plain;
}

static bool
same_state(const struct table *self, PyObject *state)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int i = 0;
    if (PyDict_GET_SIZE(state) != self->pair_count) {
        return false;
    }
    while (PyDict_Next(state, &at, &key, &value)) {
        if (i == self->pair_count || self->pairs[i].param != key || self->pairs[i].state != value) {
            return false;
        }
        i++;
    }
    return true;
}

/* Reading gradients may run Python code, which may replace states: holds those that same_state saw. */
static void
hold_states(struct table *self)
{
    for (int i = 0; i < self->pair_count; i++) {
        if (i + 2 * AHEAD < self->pair_count) {
            __builtin_prefetch(self->pairs[i + 2 * AHEAD].state, 1);
        }
        self->held[self->held_count++] = Py_NewRef(self->pairs[i].state);
    }
}

/* Whether the parameter lies where it lay; its type may be any that DLPack's functions take. Whether its
 * values are lazily negated was asked when the table was made, see lies(). */
static bool
is_in_place(const struct table *self, PyObject *param, struct member *member)
{
    dlpack_tensor where;
    int64_t numel;
    fsdpc_dtype type;
    if (!find(self, param, &where, &numel) || numel != member->numel ||
        where.data != member->data || !float_type(&where, &type) || type != member->type) {
        return false;
    }
    member->seen[PARAM] = (struct seen){param, where.data, where.shape};
    return true;
}

/* A tensor of the plain type that a step may use. The same one at the same place is not asked twice
 * whether its values are lazily negated: a tenth of the time of a step of small tensors. So setting the
 * `data` of a state to a negated view of itself is not detected. */
static bool
lies(const struct table *self, PyObject *tensor, int64_t numel, struct seen *seen,
     fsdpc_dtype *type, void **out)
{
    dlpack_tensor where;
    int64_t found;
    if (!Py_IS_TYPE(tensor, self->plain) || !find(self, tensor, &where, &found) || found != numel ||
        !float_type(&where, type)) {
        return false;
    }
    if ((seen->object != tensor || seen->data != where.data) && !is_plain(tensor)) {
        return false;
    }
    *seen = (struct seen){tensor, where.data, where.shape};
    *out = where.data;
    return true;
}

/* Holds the tensor (a DTensor's local one) until the end of the step. */
static bool
read_state(struct table *self, PyObject *tensor, struct seen *seen, int64_t numel,
           fsdpc_dtype *type, void **out)
{
    if (tensor == NULL) {
        return false;
    }
    Py_INCREF(tensor); /* a state dict may give it up while Python code runs */
    PyObject *local = local_of(self, tensor);
    Py_DECREF(tensor);
    if (local == NULL) {
        return false;
    }
    self->held[self->held_count++] = local;
    return lies(self, local, numel, seen, type, out);
}

static bool
read_states(struct table *self, const struct group *group, struct member *member,
            fsdpc_optim_tensor *tensor, float **step)
{
    fsdpc_dtype type;
    void *counter;
    tensor->state_type = member->type;
    tensor->step = 2; /* for rules that only tell a first step from later ones */
    if (group->counter == NULL && group->name_count == 0) {
        return true;
    }
    if (member->state == NULL) {
        return false;
    }
    for (int s = 0; s < group->name_count; s++) {
        PyObject *state = PyDict_GetItemWithError(member->state, group->names[s]);
        if (!read_state(self, state, &member->seen[FIRST_STATE + s], member->numel, &type,
                        &tensor->states[s]) ||
            (s > 0 && type != tensor->state_type)) {
            return false;
        }
        tensor->state_type = type;
    }
    if (group->counter == NULL) {
        return true;
    }
    PyObject *found = PyDict_GetItemWithError(member->state, group->counter);
    if (!read_state(self, found, &member->seen[COUNTER], 1, &type, &counter) || type != FSDPC_F32) {
        return false;
    }
    *step = counter; /* step_group reads it */
    return true;
}

static bool
read_copy(const struct table *self, const struct member *member, fsdpc_optim_tensor *tensor)
{
    dlpack_tensor where;
    int64_t numel;
    if (member->copy == NULL) {
        return true;
    }
    if (!find(self, member->copy, &where, &numel) || numel != member->numel ||
        !float_type(&where, &tensor->copy_type) || !is_plain(member->copy)) {
        return false;
    }
    tensor->copy = where.data;
    return true;
}

/* Asks for the memory of a member that is read soon, where its objects were last: thousands of them are
 * in no cache, and each hides where the next thing lies. */
static void
ask_for(const struct table *self, int number)
{
    if (number >= self->member_count) {
        return;
    }
    const struct member *member = &self->members[number];
    __builtin_prefetch(member->state);
    for (int i = 0; i < SEEN; i++) {
        const struct seen *seen = &member->seen[i];
        __builtin_prefetch(seen->object);
        for (int line = -2; line <= 1; line++) {
            __builtin_prefetch((const void *)((uintptr_t)seen->shape + (uintptr_t)(line * 64)));
        }
    }
}

static bool
read_param(struct table *self, PyObject *param, struct member *member)
{
    self->locals[self->count] = NULL;
    if (!Py_IS_TYPE(param, self->cut)) {
        return is_in_place(self, param, member);
    }
    PyObject *local = local_of(self, param);
    if (local == NULL) {
        return false;
    }
    self->held[self->held_count++] = self->locals[self->count] = local;
    return is_in_place(self, local, member);
}

/* The tensors of one parameter's step, or nothing where it has no gradient. */
static bool
read_member(struct table *self, const struct group *group, int number, PyObject *param)
{
    struct member *member = &self->members[number];
    fsdpc_optim_tensor *tensor = &self->tensors[self->count];
    PyObject *grad = fsdpc_py_field(param, FSDPC_PY_GRAD);
    if (grad == NULL) {
        PyErr_Clear();
        return false;
    }
    if (grad == Py_None) {
        Py_DECREF(grad);
        return true;
    }
    self->held[self->held_count++] = grad;
    member->seen[GRAD].data = NULL; /* another object may have the address of the last step's */
    *tensor = (fsdpc_optim_tensor){.param = (void *)member->data,
                                   .param_type = member->type,
                                   .numel = member->numel,
                                   .first = member->first,
                                   .block = 1,
                                   .key = member->key};
    if (Py_IS_TYPE(grad, self->cut) != Py_IS_TYPE(param, self->cut) ||
        !read_state(self, grad, &member->seen[GRAD], member->numel, &tensor->grad_type,
                    &tensor->grad) ||
        !read_param(self, param, member) ||
        !read_states(self, group, member, tensor, &self->steps[self->count]) ||
        !read_copy(self, member, tensor)) {
        return false;
    }
    self->grads[self->count] = grad;
    self->numbers[self->count++] = number;
    return true;
}

static bool
read_group(struct table *self, struct group *group, PyObject *params)
{
    if (!PyList_CheckExact(params)) {
        return false;
    }
    group->first = self->count;
    for (int number = group->begin; number < group->end; number++) {
        const Py_ssize_t i = number - group->begin;
        if (PyList_GET_SIZE(params) != group->end - group->begin ||
            PyList_GET_ITEM(params, i) != self->members[number].param) {
            return false;
        }
        ask_for(self, number + AHEAD);
        PyObject *param = Py_NewRef(PyList_GET_ITEM(params, i));
        const bool read = read_member(self, group, number, param);
        Py_DECREF(param);
        if (!read) {
            return false;
        }
    }
    group->count = self->count - group->first;
    return true;
}

static PyObject *
optim_table_read(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    struct table *self = count == 3 ? table_of(args[0]) : NULL;
    if (self == NULL || !PyList_CheckExact(args[1])) {
        (void)misused("a step needs a table, the groups' lists of parameters and the state");
        return NULL;
    }
    if (self->busy) { /* another thread's step, or one that this step's Python code has begun */
        return PyLong_FromLong(-1);
    }
    self->busy = true;
    bool same = PyDict_Check(args[2]) && PyList_GET_SIZE(args[1]) == self->group_count &&
                same_state(self, args[2]);
    if (same) {
        hold_states(self);
    }
    for (int g = 0; same && g < self->group_count; g++) {
        same = g < PyList_GET_SIZE(args[1]) &&
               read_group(self, &self->groups[g], PyList_GET_ITEM(args[1], g));
    }
    if (!same) {
        PyErr_Clear();
        give_up(self);
        return PyLong_FromLong(-1);
    }
    return PyLong_FromLong(self->count);
}

/* --- what a step does with what was read --------------------------------------------------------- */

static PyObject *
optim_table_squares(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    struct table *self = count == 3 ? table_of(args[0]) : NULL;
    if (self == NULL) {
        (void)misused("a sum of squares needs a table, a part and a number of threads");
        return NULL;
    }
    const long part = PyLong_AsLong(args[1]), threads = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const size_t n = (size_t)self->count;
    void **data = fsdpc_mem_calloc(n, sizeof *data);
    fsdpc_dtype *types = fsdpc_mem_calloc(n, sizeof *types);
    int64_t *numels = fsdpc_mem_calloc(n, sizeof *numels);
    PyObject *result = NULL;
    double sum = 0;
    int found = 0, status;
    if (data == NULL || types == NULL || numels == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (int i = 0; i < self->count; i++) {
        if (self->members[self->numbers[i]].part == part) {
            data[found] = self->tensors[i].grad;
            types[found] = self->tensors[i].grad_type;
            numels[found++] = self->tensors[i].numel;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_optim_sum_squares(data, types, numels, found, (int)threads, &sum);
    Py_END_ALLOW_THREADS
    result = status == FSDPC_OK ? PyFloat_FromDouble(sum) : fsdpc_py_raise(status);
done:
    fsdpc_mem_free(numels);
    fsdpc_mem_free(types);
    fsdpc_mem_free(data);
    return result;
}

static int
step_group(struct table *self, const struct group *group, const fsdpc_optim_rule *rule, int threads)
{
    fsdpc_optim_tensor *tensors = self->tensors + group->first;
    float *const *steps = self->steps + group->first;
    int status;
    for (int i = 0; group->counter != NULL && i < group->count; i++) {
        tensors[i].step = (double)*steps[i] + 1; /* a group before this one may share the counter */
    }
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_optim_step(rule, tensors, group->count, threads);
    Py_END_ALLOW_THREADS
    for (int i = 0; status == FSDPC_OK && group->counter != NULL && i < group->count; i++) {
        *steps[i] = (float)tensors[i].step;
    }
    return status;
}

static PyObject *
optim_table_step(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    static const struct {
        const char *name;
        fsdpc_optim_kind kind;
    } kinds[] = {{"adam", FSDPC_OPTIM_ADAM}, {"sgd", FSDPC_OPTIM_SGD}, {"lion", FSDPC_OPTIM_LION}};
    (void)module;
    struct table *self = count == 5 ? table_of(args[0]) : NULL;
    fsdpc_optim_rule rule = {.kind = FSDPC_OPTIM_MINI};
    if (self == NULL) {
        (void)misused("a step needs a table, a group's number, a kind, a rule and threads");
        return NULL;
    }
    const long number = PyLong_AsLong(args[1]), threads = PyLong_AsLong(args[4]);
    const char *name = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8(args[2]);
    if (name == NULL || fsdpc_py_optim_rule(args[3], &rule) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        rule.kind = strcmp(kinds[i].name, name) == 0 ? kinds[i].kind : rule.kind;
    }
    if (rule.kind == FSDPC_OPTIM_MINI || number < 0 || number >= self->group_count) {
        (void)misused("the kinds of steps are adam, sgd and lion, of a group of the table");
        return NULL;
    }
    return fsdpc_py_none_or(step_group(self, &self->groups[number], &rule, (int)threads));
}

enum changed { PARAMS, GRADS, COPIES, CHANGED };

static PyObject *
changed_of(const struct table *self, int i, enum changed which)
{
    const struct member *member = &self->members[self->numbers[i]];
    return which == PARAMS  ? (PyObject *)member->param
           : which == GRADS ? self->grads[i]
                            : member->copy;
}

static PyObject *
optim_table_changed(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    struct table *self = count == 2 ? table_of(args[0]) : NULL;
    const long which = self == NULL ? -1 : PyLong_AsLong(args[1]);
    if (which < 0 || which >= CHANGED) {
        (void)misused("what a step has changed is asked of a table, by a number from 0 to 2");
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < self->count; i++) {
        PyObject *changed = changed_of(self, i, (enum changed)which);
        PyObject *local = which == PARAMS ? self->locals[i] : NULL;
        if ((changed != NULL && PyList_Append(list, changed) < 0) ||
            (local != NULL && PyList_Append(list, local) < 0)) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
optim_table_end(PyObject *module, PyObject *capsule)
{
    (void)module;
    struct table *self = table_of(capsule);
    if (self == NULL) {
        return NULL;
    }
    give_up(self);
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

PyMethodDef fsdpc_py_optim_table_methods[] = {
    {"optim_table", FAST(optim_table),
     "optim_table($module, plain, cut, groups, state, places, copies, /)\n--\n\n"
     "A table of the members of an optimizer's steps in host memory. plain, cut: Tensor, DTensor.\n"
     "groups: a list of (params, name of the counter of steps or None, names of states). places:\n"
     "(first, key, part) of each parameter. copies: None, or what gets each parameter's new "
     "values\n"
     "rounded, or None. The caller keeps parameters and copies alive."},
    {"optim_table_read", FAST(optim_table_read),
     "optim_table_read($module, table, params, state, /)\n--\n\n"
     "Reads the tensors of a step: how many parameters have a gradient, or -1 if anything is not "
     "as\n"
     "the table knows it. Holds gradients and states until optim_table_end."},
    {"optim_table_squares", FAST(optim_table_squares),
     "optim_table_squares($module, table, part, threads, /)\n--\n\n"
     "The sum of squares of the gradients of one part, as optim_sum_squares."},
    {"optim_table_step", FAST(optim_table_step),
     "optim_table_step($module, table, group, kind, rule, threads, /)\n--\n\n"
     "The step of one group, as optim_step."},
    {"optim_table_changed", FAST(optim_table_changed),
     "optim_table_changed($module, table, which, /)\n--\n\n"
     "A list of the parameters (0) of the step and their local tensors, of the gradients (1) or "
     "of\n"
     "the copies (2)."},
    {"optim_table_end", optim_table_end, METH_O,
     "optim_table_end($module, table, /)\n--\n\nGives up what optim_table_read holds."},
    {NULL, NULL, 0, NULL},
};
