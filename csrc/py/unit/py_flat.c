/* Interned strings, and functions about a unit that many files call. */
#include "py/unit/py_flat.h"

fsdpc_py_names fsdpc_py_name;

int
fsdpc_py_make_names(void)
{
    struct {
        PyObject **slot;
        const char *text;
    } table[] = {
        {&fsdpc_py_name.register_prehook, "register_prehook"},
        {&fsdpc_py_name.is_view, "_is_view"},
        {&fsdpc_py_name.sequence, "_sequence_nr"},
        {&fsdpc_py_name.register_hook_dict, "_register_hook_dict"},
        {&fsdpc_py_name.detach, "detach"},
        {&fsdpc_py_name.backward_optimizers, "_in_backward_optimizers"},
        {&fsdpc_py_name.local_tensor, "_local_tensor"},
        {&fsdpc_py_name.copy, "copy_"},
        {&fsdpc_py_name.any, "any"},
        {&fsdpc_py_name.signbit, "signbit"},
        {&fsdpc_py_name.is_meta, "is_meta"},
        {&fsdpc_py_name.flatten_fn, "flatten_fn"},
        {&fsdpc_py_name.profiles, "_is_profiler_enabled"},
        {&fsdpc_py_name.dataclass_fields, "__dataclass_fields__"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        *table[i].slot = PyUnicode_InternFromString(table[i].text);
        if (!*table[i].slot) {
            return -1;
        }
    }
    return 0;
}

/* --- a unit ---------------------------------------------------------------------------------- */

int
fsdpc_py_flat_get(PyObject *object, fsdpc_py_flat **out)
{
    if (!PyObject_TypeCheck(object, fsdpc_py_current()->unit_type)) {
        PyErr_Format(PyExc_TypeError, "expected a FlatParameter, got %.100s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = (fsdpc_py_flat *)object;
    return 0;
}

fsdpc_py_device
fsdpc_py_full_device(const fsdpc_py_flat *flat)
{
    return fsdpc_py_device_of(fsdpc_unit_device(flat->unit));
}

fsdpc_py_device
fsdpc_py_own_device(const fsdpc_py_flat *flat)
{
    return fsdpc_unit_is_offloaded(flat->unit) ? fsdpc_py_host
                                               : fsdpc_py_device_of(fsdpc_unit_device(flat->unit));
}

int
fsdpc_py_enter(const fsdpc_py_flat *flat)
{
    return fsdpc_py_enter_device(fsdpc_unit_device(flat->unit));
}

int
fsdpc_py_flat_index(const fsdpc_py_flat *self, PyObject *object, int *out)
{
    long index = PyLong_AsLong(object);
    int count = fsdpc_unit_layout(self->unit)->param_count;
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < 0 || index >= count) {
        PyErr_Format(PyExc_IndexError, "unit %s has %d parameters; index %ld is out of range",
                     fsdpc_unit_name(self->unit), count, index);
        return -1;
    }
    *out = (int)index;
    return 0;
}

void
fsdpc_py_touch(const fsdpc_py_flat *flat)
{
    if (flat->tree && flat->tree->tree) {
        fsdpc_tree_touch(flat->tree->tree);
    }
}

PyObject *
fsdpc_py_met(const fsdpc_py_flat *flat, int status)
{
    if (status == FSDPC_OK && flat->tree && flat->tree->tree) {
        fsdpc_tree_meet(flat->tree->tree);
    }
    return fsdpc_py_none_or(status);
}
