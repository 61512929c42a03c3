/* Reads the tensors of a step: checks that everything is as in the table, and finds where the tensors lie. */
#include "py/optim/py_optim_table_impl.h"
#include "py/unit/py_flat.h"

enum { AHEAD = 4 }; /* prefetching is this many members ahead of reading */

/* Finds where a tensor lies. Returns false unless the tensor is contiguous in host memory. Never raises. */
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

/* Returns false for a tensor whose values are lazily negated. Never raises. */
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
    if (PyDict_GET_SIZE(state) != self->entry_count) {
        return false;
    }
    while (PyDict_Next(state, &at, &key, &value)) {
        if (i == self->entry_count || self->entries[i].param != key ||
            self->entries[i].state != value) {
            return false;
        }
        i++;
    }
    return true;
}

/* Takes a reference to each state that same_state has compared. Reading gradients may run Python code that
 * replaces states, so the references are kept until the table has been read. */
static void
hold_states(struct table *self)
{
    for (int i = 0; i < self->entry_count; i++) {
        if (i + 2 * AHEAD < self->entry_count) {
            __builtin_prefetch(self->entries[i + 2 * AHEAD].state, 1);
        }
        Py_INCREF(self->entries[i].state);
    }
}

static void
drop_states(struct table *self)
{
    for (int i = 0; i < self->entry_count; i++) {
        Py_DECREF(self->entries[i].state);
    }
}

/* Returns whether the parameter still lies at the table's address. The parameter may have any type that
 * DLPack's functions take. The table was made only after a check that no parameter is lazily negated. */
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
    member->seen[PARAM] = (struct seen){param, where.data, where.shape, NULL};
    return true;
}

/* Returns whether `weak` refers to `object`. An equal address is no proof: a new object may reuse it. */
static bool
refers_to(PyObject *weak, const PyObject *object)
{
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *found = NULL;
    (void)PyWeakref_GetRef(weak, &found);
    Py_XDECREF(found); /* never the last reference: the caller has one to `object` */
#else
    const PyObject *found = PyWeakref_GET_OBJECT(weak);
#endif
    return found == object;
}

/* Returns true if a step may use the tensor: its type is self->plain, and its values are floats, contiguous
 * and not lazily negated. The check for negation takes a tenth of a step of small tensors. So it is skipped
 * for a state that the last step found at this address. A `data` set to its own negated view is missed. */
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
    const bool known =
        seen->weak != NULL && seen->data == where.data && refers_to(seen->weak, tensor);
    if (!known && !is_plain(tensor)) {
        return false;
    }
    seen->object = tensor;
    seen->data = where.data;
    seen->shape = where.shape;
    *out = where.data;
    return true;
}

/* Reads a tensor and takes over the caller's reference to the tensor. The table holds the tensor, and the
 * local tensor of a DTensor, until the end of the step. */
static bool
read_tensor(struct table *self, PyObject *tensor, struct seen *seen, int64_t numel,
            fsdpc_dtype *type, void **out)
{
    self->held[self->held_count++] = tensor;
    if (Py_IS_TYPE(tensor, self->cut)) {
        tensor = fsdpc_py_table_local(self, tensor);
        if (tensor == NULL) {
            return false;
        }
        self->held[self->held_count++] = tensor;
    }
    return lies(self, tensor, numel, seen, type, out);
}

static bool
read_state(struct table *self, struct member *member, PyObject *name, int which, int64_t numel,
           fsdpc_dtype *type, void **out)
{
    struct seen *seen = &member->seen[which];
    PyObject *state = PyDict_GetItemWithError(member->state, name);
    if (state == NULL || !read_tensor(self, Py_NewRef(state), seen, numel, type, out)) {
        return false;
    }
    if (seen->weak == NULL || !refers_to(seen->weak, seen->object)) {
        Py_XSETREF(seen->weak, PyWeakref_NewRef((PyObject *)seen->object, NULL));
        PyErr_Clear();
    }
    return true;
}

static bool
read_states(struct table *self, const struct group *group, struct member *member,
            fsdpc_optim_tensor *tensor, float **step)
{
    fsdpc_dtype type;
    void *counter;
    tensor->state_type = member->type;
    tensor->step = 2; /* not the first step; a rule without a counter needs to know no more */
    if (group->counter == NULL && group->name_count == 0) {
        return true;
    }
    if (member->state == NULL) {
        return false;
    }
    for (int s = 0; s < group->name_count; s++) {
        if (!read_state(self, member, group->names[s], FIRST_STATE + s, member->numel, &type,
                        &tensor->states[s]) ||
            (s > 0 && type != tensor->state_type)) {
            return false;
        }
        tensor->state_type = type;
    }
    if (group->counter == NULL) {
        return true;
    }
    if (!read_state(self, member, group->counter, COUNTER, 1, &type, &counter) ||
        type != FSDPC_F32) {
        return false;
    }
    *step = counter; /* step_group reads the number at this address */
    return true;
}

/* Reads the average that the step updates. Until averaging begins, the state dict holds no average. */
static bool
read_average(struct table *self, const struct group *group, struct member *member,
             fsdpc_optim_tensor *tensor)
{
    fsdpc_dtype type;
    if (group->average == NULL || member->state == NULL ||
        PyDict_GetItemWithError(member->state, group->average) == NULL) {
        return true;
    }
    return read_state(self, member, group->average, AVERAGE, member->numel, &type,
                      &tensor->average) &&
           type == (member->type == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32);
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

/* Prefetches a member's objects at the addresses that the last step found. The objects of thousands of
 * members fit in no cache. Without prefetching, each object must be read to find the next address. */
static void
ask_for(const struct table *self, int number)
{
    if (number >= self->member_count) {
        return;
    }
    const struct member *member = &self->members[number];
    for (int i = 0; i < SEEN; i++) {
        const struct seen *seen = &member->seen[i];
        if (seen->object == NULL) { /* prefetching an unmapped address is slow */
            continue;
        }
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
    PyObject *local = fsdpc_py_table_local(self, param);
    if (local == NULL) {
        return false;
    }
    self->held[self->held_count++] = self->locals[self->count] = local;
    return is_in_place(self, local, member);
}

/* Reads the tensors of one parameter's step. Reads nothing if the parameter has no gradient. */
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
    *tensor = (fsdpc_optim_tensor){.param = (void *)member->data,
                                   .param_type = member->type,
                                   .numel = member->numel,
                                   .first = member->first,
                                   .block = 1,
                                   .key = member->key};
    if (!read_tensor(self, grad, &member->seen[GRAD], member->numel, &tensor->grad_type,
                     &tensor->grad) ||
        Py_IS_TYPE(grad, self->cut) != Py_IS_TYPE(param, self->cut) ||
        !read_param(self, param, member) ||
        !read_states(self, group, member, tensor, &self->steps[self->count]) ||
        !read_average(self, group, member, tensor) || !read_copy(self, member, tensor)) {
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

bool
fsdpc_py_table_read(struct table *self, PyObject *groups, PyObject *state)
{
    if (self->busy) { /* another thread steps, or Python code in this step has begun a step */
        return false;
    }
    self->busy = true;
    bool same = PyDict_Check(state) && PyList_GET_SIZE(groups) == self->group_count &&
                same_state(self, state);
    if (same) {
        hold_states(self);
        for (int g = 0; same && g < self->group_count; g++) {
            same = g < PyList_GET_SIZE(groups) &&
                   read_group(self, &self->groups[g], PyList_GET_ITEM(groups, g));
        }
        drop_states(self);
    }
    if (!same) {
        PyErr_Clear();
        fsdpc_py_table_give_up(self);
    }
    return same;
}
