/* This rank's memory of the parameters and gradients that the optimizer sees. If parameters are sharded by
 * rows, both are DTensors. A DTensor has no memory: it wraps the tensor `_local_tensor`. The user,
 * load_state_dict(assign=True) or Module.to() may replace that tensor.
 */
#include "py/unit/py_flat.h"

PyObject *
fsdpc_py_local(const fsdpc_py_flat *flat, PyObject *tensor)
{
    if (!flat->dtensors) {
        return Py_NewRef(tensor);
    }
    PyObject *local = PyObject_GetAttr(tensor, fsdpc_py_name.local_tensor);
    if (!local && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Format(
            PyExc_TypeError,
            "unit %s: its sharded parameters are DTensors, and so must be their values and "
            "gradients, but found a %.100s: use torch.distributed.tensor.distribute_tensor",
            fsdpc_unit_name(flat->unit), Py_TYPE(tensor)->tp_name);
    }
    return local;
}

/* Looks up an attribute. *out is NULL if there is none, so that plain tensors do not cost an exception. */
static int
look_up(PyObject *object, PyObject *name, PyObject **out)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyObject_GetOptionalAttr(object, name, out);
#else
    return _PyObject_LookupAttr(object, name, out);
#endif
}

PyObject *
fsdpc_py_any_local(PyObject *tensor)
{
    PyObject *local = NULL;
    if (look_up(tensor, fsdpc_py_name.local_tensor, &local) < 0) {
        return NULL;
    }
    return local ? local : Py_NewRef(tensor);
}

PyObject *
fsdpc_py_full_local(const fsdpc_py_flat *flat, PyObject *tensor)
{
    return flat->full_dtensors ? fsdpc_py_any_local(tensor) : Py_NewRef(tensor);
}

int
fsdpc_py_local_data(const fsdpc_py_flat *flat, PyObject *tensor, const void **out)
{
    PyObject *local = fsdpc_py_local(flat, tensor);
    int result = local ? fsdpc_py_torch_data(local, out) : -1;
    Py_XDECREF(local);
    return result;
}

int
fsdpc_py_full_data(const fsdpc_py_flat *flat, int param, const void **out)
{
    PyObject *local = fsdpc_py_full_local(flat, flat->full[param]);
    int result = local ? fsdpc_py_torch_data(local, out) : -1;
    Py_XDECREF(local);
    return result;
}

static long
version_of(PyObject *tensor)
{
    PyObject *number = fsdpc_py_field(tensor, FSDPC_PY_VERSION);
    long value = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    if (value < 0 && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "a tensor has a negative version");
    }
    return value;
}

/* torch counts writes to a DTensor and writes to its local tensor separately. Returns the sum of both. */
long
fsdpc_py_local_version(const fsdpc_py_flat *flat, PyObject *tensor)
{
    long outer = version_of(tensor);
    if (outer < 0 || !flat->dtensors) {
        return outer;
    }
    PyObject *local = fsdpc_py_local(flat, tensor);
    long inner = local ? version_of(local) : -1;
    Py_XDECREF(local);
    return inner < 0 ? -1 : outer + inner;
}
