/* The attributes of FlatParameter objects: getters and setters. */
#include "py/step/py_step.h"

#include <limits.h>

static bool
is_readable(const fsdpc_py_flat *self)
{
    return fsdpc_unit_refs(self->unit) > 0 || (fsdpc_unit_is_direct(self->unit) && !self->foreign);
}

static int
set_name(fsdpc_py_flat *self, PyObject *value, void *Py_UNUSED(closure))
{
    const char *name = value ? PyUnicode_AsUTF8(value) : NULL;
    if (!name) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a unit's name cannot be deleted");
        }
        return -1;
    }
    fsdpc_py_use use;
    if (fsdpc_py_use_flat(self, &use) < 0) {
        return -1;
    }
    int status = fsdpc_unit_rename(self->unit, name);
    fsdpc_py_end_use(&use);
    return fsdpc_py_checked(status);
}

/* Returns the truth of an attribute's new value, or `deleted` if the attribute is deleted: 1, 0, or -1. */
static int
truth_of(PyObject *value, int deleted)
{
    return value ? PyObject_IsTrue(value) : deleted;
}

/* Returns the new value, 1 or 0, of a flag on which slots depend; -1 with StateError if there is a tree. */
static int
read_slot_flag(const fsdpc_py_flat *self, PyObject *value, int otherwise, const char *name)
{
    const int truth = truth_of(value, otherwise);
    if (truth >= 0 && self->tree) {
        PyErr_Format(fsdpc_py_current()->state_error,
                     "%s: unit %s belongs to a tree, whose slots depend on the flag", name,
                     fsdpc_unit_name(self->unit));
        return -1;
    }
    return truth;
}

/* Defines the setter set_<name> of a boolean attribute. The setter runs `action` with `truth`, 1 or 0. */
#define SET(name, reading, action)                                                        \
    static int set_##name(fsdpc_py_flat *self, PyObject *value, void *Py_UNUSED(closure)) \
    {                                                                                     \
        const int truth = reading;                                                        \
        if (truth >= 0) {                                                                 \
            action;                                                                       \
        }                                                                                 \
        return truth < 0 ? -1 : 0;                                                        \
    }

/* clang-format off */
SET(sync, truth_of(value, 1), fsdpc_unit_set_withholds(self->unit, !truth))
SET(observed, truth_of(value, 0), self->observed = truth)
SET(shown, truth_of(value, 0), self->shown = truth)
SET(reshards, read_slot_flag(self, value, 1, "reshards"), fsdpc_unit_set_reshards(self->unit, truth))
SET(keeps, read_slot_flag(self, value, 0, "keeps"), fsdpc_unit_set_keeps(self->unit, truth))
/* clang-format on */

static int
set_divide(fsdpc_py_flat *self, PyObject *value, void *Py_UNUSED(closure))
{
    double divide = value ? PyFloat_AsDouble(value) : 0.0;
    if (PyErr_Occurred()) {
        return -1;
    }
    if (!(divide > 0) || (self->tree && fsdpc_tree_in_backward(self->tree->tree))) {
        PyErr_Format(
            PyExc_ValueError,
            "divide: the factor of unit %s must be a positive number, set between backwards",
            fsdpc_unit_name(self->unit));
        return -1;
    }
    fsdpc_unit_set_divide(self->unit, divide);
    return 0;
}

static int
set_members_left(fsdpc_py_flat *self, PyObject *value, void *Py_UNUSED(closure))
{
    long number = value ? PyLong_AsLong(value) : 0;
    if (number < 0 || number > INT_MAX || PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError, "members_left must be a number of modules");
        return -1;
    }
    self->members_left = (int)number;
    return 0;
}

/* Attributes whose value is one expression: X(name, expression, setter or NULL, docstring). */
/* clang-format off */
#define ATTRIBUTES(X) \
    X(name, PyUnicode_FromString(fsdpc_unit_name(self->unit)), set_name, "Name of the unit.") \
    X(readable, PyBool_FromLong(is_readable(self)), NULL, \
      "True if the gathered tensors hold the parameters' values now.") \
    X(refs, PyLong_FromLong(fsdpc_unit_refs(self->unit)), NULL, \
      "Number of references to the gathered values.") \
    X(offloaded, PyBool_FromLong(fsdpc_unit_is_offloaded(self->unit)), NULL, \
      "Shard and gradient lie in pinned host memory of a GPU.") \
    X(attached, PyBool_FromLong(self->tree != NULL && !self->own_tree), NULL, \
      "True when a tree drives the unit.") \
    X(reshards, PyBool_FromLong(fsdpc_unit_reshards(self->unit)), set_reshards, \
      "Released after forward and gathered again for backward. Set without a tree only.") \
    X(keeps, PyBool_FromLong(fsdpc_unit_keeps(self->unit)), set_keeps, \
      "The values stay in a slot of the unit's own until backward. Set without a tree only.") \
    X(divide, PyFloat_FromDouble(fsdpc_unit_divide(self->unit)), set_divide, \
      "Gradients are divided by this number, once.") \
    X(unsharded, PyBool_FromLong(self->unsharded), NULL, "True after unshard().") \
    X(members_left, PyLong_FromLong(self->members_left), set_members_left, \
      "How many of the unit's modules have yet to run in this pass; 0 when the pass ends. " \
      "The unit stays gathered until then.") \
    X(sync, PyBool_FromLong(!fsdpc_unit_withholds(self->unit)), set_sync, \
      "False: a backward keeps the unit's gradients on this rank (no_sync). Set alike on " \
      "all ranks.") \
    X(observed, PyBool_FromLong(self->observed), set_observed, \
      "Backward hooks of the user see the unit's modules: forwards from now on keep the " \
      "unit gathered until the gradients of their inputs are there.") \
    X(in_use, PyBool_FromLong(self->installed > 0), NULL, \
      "A forward or backward runs on the gathered values.") \
    X(in_pass, PyBool_FromLong(self->in_pass), NULL, \
      "True while forwards of other units see placeholders instead of sharded parameters.") \
    X(shown, PyBool_FromLong(self->shown), set_shown, \
      "The modules show full values of the caller: a pass leaves the modules' entries " \
      "alone.") \
    X(grads_kept, PyBool_FromLong(fsdpc_py_keeps_grads(self)), NULL, \
      "True if the program refers to a gradient of the sharded parameters, as .grad does.") \
    X(kept, PyBool_FromLong(fsdpc_unit_has_local(self->unit)), NULL, \
      "True if this rank holds gradients of no_sync.")
/* clang-format on */

#define GET(name, value, ...) FSDPC_PY_GETTER(fsdpc_py_flat, name, value)
#define ROW(name, value, set, doc) FSDPC_PY_ATTRIBUTE(name, set, doc),

ATTRIBUTES(GET)

PyGetSetDef fsdpc_py_flat_getset[] = {
    /* clang-format off */
    ATTRIBUTES(ROW)
    /* clang-format on */
    {"shard", (getter)fsdpc_py_flat_get_shard, NULL,
     "This rank's values as a NumPy array, no copy.", NULL},
    {"full", (getter)fsdpc_py_flat_get_full, NULL,
     "The gathered values as a NumPy array, no copy; valid only between gather and release.", NULL},
    {"grad", (getter)fsdpc_py_flat_get_grad, NULL,
     "This rank's gradient as a NumPy array, no copy.", NULL},
    FSDPC_PY_MEMBER(fsdpc_py_flat, on_unattached,
                    "Called by the first forward of a unit without a tree."),
    FSDPC_PY_MEMBER(fsdpc_py_flat, after_backward,
                    "Called when a backward has ended and gradients are shown."),
    FSDPC_PY_MEMBER(fsdpc_py_flat, on_changed,
                    "Called before a pass when the user has pointed the optimizer's parameters at "
                    "other memory or replaced them in their modules."),
    FSDPC_PY_MEMBER(
        fsdpc_py_flat, on_kept,
        "Called before a backward writes gradients that the user has cleared, but keeps."),
    FSDPC_PY_MEMBER(fsdpc_py_flat, on_values,
                    "Of a foreign unit: called with True when its gathered values have to be made, "
                    "with False when they can be dropped."),
    FSDPC_PY_MEMBER(fsdpc_py_flat, on_moved,
                    "Called when the gradients, which are not shown, have got another address: "
                    "grad_part and grad_segment have the memory."),
    {"comm_hook", (getter)fsdpc_py_flat_get_comm_hook, (setter)fsdpc_py_flat_set_comm_hook,
     "Called, in the same order on all ranks, to sum the unit's gradients instead of the engine; "
     "returns true if it did, false to be called again at the end of backward.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
