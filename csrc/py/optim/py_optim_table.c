/* The table of an optimizer's steps, for steps of thousands of small tensors. With the table, a step reads
 * all tensors in one call and steps each group in another, without a line of Python for each parameter.
 *
 * The table records which parameter, state dict and place belong together. A step without a table, in Python,
 * makes the table. Each later step reads everything else again: gradients, states, and where all tensors lie.
 * If anything differs from the table (a parameter has other memory, a state is missing, a type needs Python),
 * optim_table_read() says so before anything is changed, and the step runs in Python.
 *
 * The table holds the addresses of parameters and state dicts without owning them. An address is valid only
 * if the groups and the optimizer's state of the current step still have it.
 */
#include <string.h>

#include "base/mem.h"
#include "optim/optim.h"
#include "py/optim/py_optim.h"
#include "py/optim/py_optim_table_impl.h"
#include "py/unit/py_flat.h"

static const char capsule_name[] = "fsdpc._C.optim_table";

static void
capsule_end(PyObject *capsule)
{
    fsdpc_py_table_free(PyCapsule_GetPointer(capsule, capsule_name));
}

static struct table *
table_of(PyObject *object)
{
    return PyCapsule_GetPointer(object, capsule_name);
}

static PyObject *
optim_table(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError,
                        "optim_table takes two types, groups, state, places and copies");
        return NULL;
    }
    struct table *self = fsdpc_py_table_new(args);
    PyObject *capsule = self == NULL ? NULL : PyCapsule_New(self, capsule_name, capsule_end);
    if (self != NULL && capsule == NULL) {
        fsdpc_py_table_free(self);
    }
    return capsule;
}

static PyObject *
optim_table_read(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    struct table *self = count == 3 ? table_of(args[0]) : NULL;
    if (self == NULL || !PyList_CheckExact(args[1])) {
        (void)fsdpc_py_table_misused(
            "a step needs a table, the groups' lists of parameters and the state");
        return NULL;
    }
    return PyLong_FromLong(fsdpc_py_table_read(self, args[1], args[2]) ? self->count : -1);
}

static PyObject *
optim_table_squares(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    struct table *self = count == 3 ? table_of(args[0]) : NULL;
    if (self == NULL) {
        (void)fsdpc_py_table_misused(
            "a sum of squares needs a table, a part and a number of threads");
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
    status =
        FSDPC_PY_UNLOCKED(fsdpc_optim_sum_squares(data, types, numels, found, (int)threads, &sum));
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
    for (int i = 0; group->counter != NULL && i < group->count; i++) {
        tensors[i].step = (double)*steps[i] + 1; /* an earlier group may have incremented it */
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_optim_step(rule, tensors, group->count, threads));
    for (int i = 0; status == FSDPC_OK && group->counter != NULL && i < group->count; i++) {
        *steps[i] = (float)tensors[i].step;
    }
    return status;
}

static int
averaged_in(const struct table *self, const struct group *group, const fsdpc_optim_rule *rule)
{
    int found = 0;
    for (int i = 0; rule->averages && i < group->count; i++) {
        found += self->tensors[group->first + i].average != NULL;
    }
    return found;
}

static PyObject *
optim_table_step(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    static const struct {
        const char *name;
        fsdpc_optim_kind kind;
    } kinds[] = {
#define KIND(NAME, name, ...) {name, FSDPC_OPTIM_##NAME},
        FSDPC_STEP_ELEMENT_KINDS(KIND)
#undef KIND
    };
    struct table *self = count == 6 ? table_of(args[0]) : NULL;
    fsdpc_optim_rule rule = {.kind = FSDPC_OPTIM_MINI};
    if (self == NULL) {
        (void)fsdpc_py_table_misused(
            "a step needs a table, a group's number, a kind, a rule, threads and a weight");
        return NULL;
    }
    const long number = PyLong_AsLong(args[1]), threads = PyLong_AsLong(args[4]);
    const char *name = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8(args[2]);
    if (name == NULL || fsdpc_py_optim_rule(args[3], &rule) < 0) {
        return NULL;
    }
    rule.averages = args[5] != Py_None;
    rule.average_weight = rule.averages ? PyFloat_AsDouble(args[5]) : 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        rule.kind = strcmp(kinds[i].name, name) == 0 ? kinds[i].kind : rule.kind;
    }
    if (rule.kind == FSDPC_OPTIM_MINI || number < 0 || number >= self->group_count) {
        (void)fsdpc_py_table_misused("the kinds of steps are" FSDPC_STEP_ELEMENT_KINDS(
            FSDPC_PY_STEP_NAME) ", of a group of the table");
        return NULL;
    }
    const struct group *group = &self->groups[number];
    const int status = step_group(self, group, &rule, (int)threads);
    return status == FSDPC_OK ? PyLong_FromLong(averaged_in(self, group, &rule))
                              : fsdpc_py_raise(status);
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
optim_table_changed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    struct table *self = count == 2 ? table_of(args[0]) : NULL;
    const long which = self == NULL ? -1 : PyLong_AsLong(args[1]);
    if (which < 0 || which >= CHANGED) {
        (void)fsdpc_py_table_misused(
            "what a step has changed is asked of a table, by a number from 0 to 2");
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
optim_table_end(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    struct table *self = table_of(capsule);
    if (self == NULL) {
        return NULL;
    }
    fsdpc_py_table_give_up(self);
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_optim_table_methods[] = {
    FSDPC_PY_FUNCTION(
        optim_table, METH_FASTCALL, "($module, plain, cut, groups, state, places, copies, /)",
        "A table of the members of an optimizer's steps in host memory. plain, cut: Tensor,\n"
        "DTensor. groups: a list of (params, name of the counter of steps or None, names of\n"
        "states, name of the average or None). places: (first, key, part) of each parameter.\n"
        "copies: None, or what gets each parameter's new values rounded, or None. The caller "
        "keeps\n"
        "parameters and copies alive."),
    FSDPC_PY_FUNCTION(
        optim_table_read, METH_FASTCALL, "($module, table, params, state, /)",
        "Reads the tensors of a step: how many parameters have a gradient, or -1 if anything is\n"
        "not as the table knows it. Holds gradients and states until optim_table_end."),
    FSDPC_PY_FUNCTION(optim_table_squares, METH_FASTCALL, "($module, table, part, threads, /)",
                      "The sum of squares of the gradients of one part, as optim_sum_squares."),
    FSDPC_PY_FUNCTION(
        optim_table_step, METH_FASTCALL, "($module, table, group, kind, rule, threads, weight, /)",
        "The step of one group, as optim_step. weight: averages move by it, or None.\n"
        "Returns how many did."),
    FSDPC_PY_FUNCTION(optim_table_changed, METH_FASTCALL, "($module, table, which, /)",
                      "A list of the parameters (0) of the step and their local tensors, of the\n"
                      "gradients (1) or of the copies (2)."),
    FSDPC_PY_FUNCTION(optim_table_end, METH_O, "($module, table, /)",
                      "Gives up what optim_table_read holds."),
    {NULL, NULL, 0, NULL},
};
