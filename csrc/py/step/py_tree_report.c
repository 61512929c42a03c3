/* The reports of a Tree: bytes, events, references, and calls of an observer.
 *
 * Errors of failed allocations quote these reports when memory is short, so each report takes little memory.
 */
#include "py/step/py_hooks_impl.h"

#include "base/mem.h"

int
fsdpc_py_check_open(const fsdpc_py_tree *self)
{
    if (self->tree) {
        return 0;
    }
    PyErr_SetString(fsdpc_py_current()->state_error, "the tree is closed");
    return -1;
}

PyObject *
fsdpc_py_tree_memory(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_check_open(self) < 0) {
        return NULL;
    }
    fsdpc_tree_memory memory;
    fsdpc_tree_get_memory(self->tree, &memory);
    return Py_BuildValue(
        "{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:i,s:n,s:i,s:K}", "gather_bytes",
        (Py_ssize_t)memory.gather_bytes, "coded_bytes", (Py_ssize_t)memory.coded_bytes,
        "reduce_bytes", (Py_ssize_t)memory.reduce_bytes, "master_bytes",
        (Py_ssize_t)memory.master_bytes, "grad_bytes", (Py_ssize_t)memory.grad_bytes, "local_bytes",
        (Py_ssize_t)memory.local_bytes, "spare_bytes", (Py_ssize_t)memory.spare_bytes,
        "spare_count", (unsigned long long)memory.spare_count, "gather_slots", memory.gather_slots,
        "gather_slot_bytes", (Py_ssize_t)memory.gather_slot_bytes, "reduce_slots",
        memory.reduce_slots, "sent_bytes", (unsigned long long)fsdpc_tree_sent_bytes(self->tree));
}

static PyObject *
entry_dict(fsdpc_py_tree *self, const fsdpc_trace_entry *entry)
{
    PyObject *unit = entry->unit < 0
                         ? Py_NewRef(Py_None)
                         : PyUnicode_FromString(fsdpc_unit_name(self->units[entry->unit]->unit));
    return Py_BuildValue("{s:s,s:s,s:I,s:N,s:K,s:L}", "op", fsdpc_trace_op_name(entry->op), "phase",
                         fsdpc_phase_name(entry->phase), "step", entry->step, "unit", unit, "bytes",
                         (unsigned long long)entry->bytes, "time_ns", (long long)entry->time_ns);
}

PyObject *
fsdpc_py_tree_trace(fsdpc_py_tree *self, PyObject *args)
{
    int last = 0;
    if (fsdpc_py_check_open(self) < 0 || !PyArg_ParseTuple(args, "|i:trace", &last)) {
        return NULL;
    }
    enum { ROOM = 1 << 14 };
    const size_t room = last > 0 && last < ROOM ? (size_t)last : ROOM;
    fsdpc_trace_entry *entries = fsdpc_mem_calloc(room, sizeof *entries);
    if (!entries) {
        return PyErr_NoMemory();
    }
    size_t count = fsdpc_trace_copy(fsdpc_tree_trace(self->tree), entries, room);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = entry_dict(self, &entries[i]);
        if (!item) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    fsdpc_mem_free(entries);
    return list;
}

PyObject *
fsdpc_py_tree_references(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    PyObject *counts = fsdpc_py_check_open(self) < 0 ? NULL : PyTuple_New(self->count);
    for (int i = 0; counts && i < self->count; i++) {
        PyObject *count = PyLong_FromLong(fsdpc_unit_refs(self->units[i]->unit));
        if (!count) {
            Py_CLEAR(counts);
            break;
        }
        PyTuple_SET_ITEM(counts, i, count);
    }
    return counts;
}

void
fsdpc_py_observe(const fsdpc_py_tree *tree, const char *kind, int unit)
{
    PyObject *observer = Py_NewRef(tree->observer);
    PyObject *result = PyObject_CallFunction(observer, "si", kind, unit);
    if (!result) {
        PyErr_WriteUnraisable(observer);
    }
    Py_XDECREF(result);
    Py_DECREF(observer);
}
