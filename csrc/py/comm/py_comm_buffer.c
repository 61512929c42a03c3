/* The Python type CommBuffer: shared memory of a group as NumPy arrays.
 *
 * Arrays keep the buffer, the buffer keeps its Comm, and the Comm keeps the communicator.
 */
#include "py/comm/py_comm.h"
#include "py/base/py_numpy.h"

typedef struct buffer_object {
    PyObject_HEAD
    fsdpc_comm_buffer *buffer;
    PyObject *comm;
    size_t bytes;
    int rank, world;
    bool common;
} buffer_object;

PyObject *
fsdpc_py_comm_buffer_new(PyObject *comm_object, size_t bytes, bool common)
{
    PyTypeObject *type = fsdpc_py_current()->comm_buffer_type;
    fsdpc_comm *comm = NULL;
    if (fsdpc_py_comm_get(comm_object, &comm) < 0) {
        return NULL;
    }
    buffer_object *self = (buffer_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->comm = Py_NewRef(comm_object);
    self->bytes = bytes;
    self->common = common;
    self->rank = fsdpc_comm_rank(comm);
    self->world = fsdpc_comm_world(comm);
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_comm_buffer_new(comm, bytes, common, &self->buffer);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
        Py_DECREF(self);
        return fsdpc_py_raise(status);
    }
    return (PyObject *)self;
}

PyDoc_STRVAR(view_doc, "view($self, rank=None)\n--\n\n"
                       "The part of `rank` (None: this rank's) as a 1-D NumPy array of bytes. A\n"
                       "`common` buffer has one part for all ranks.");

static PyObject *
buffer_view(PyObject *object, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const buffer_object *self = (buffer_object *)object;
    PyObject *asked = Py_None;
    const fsdpc_py_arg table[] = {{"rank", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &asked}};
    if (fsdpc_py_args("view", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    long rank = asked == Py_None ? self->rank : PyLong_AsLong(asked);
    if (rank == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (rank < 0 || rank >= self->world) {
        PyErr_Format(PyExc_ValueError, "rank %ld is not in the group of %d", rank, self->world);
        return NULL;
    }
    npy_intp length = (npy_intp)self->bytes;
    PyObject *array = PyArray_SimpleNewFromData(1, &length, NPY_UINT8,
                                                fsdpc_comm_buffer_view(self->buffer, (int)rank));
    if (array == NULL) {
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(object)) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

static PyObject *
buffer_bytes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((buffer_object *)self)->bytes);
}

static PyObject *
buffer_common(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((buffer_object *)self)->common);
}

static void
buffer_dealloc(PyObject *object)
{
    buffer_object *self = (buffer_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    fsdpc_comm_buffer_free(self->buffer);
    Py_XDECREF(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef buffer_methods[] = {
    {"view", (PyCFunction)(void (*)(void))buffer_view, METH_FASTCALL | METH_KEYWORDS, view_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"bytes", buffer_bytes, NULL, "Bytes a rank.", NULL},
    {"common", buffer_common, NULL, "True if there is one part for all ranks.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(buffer_doc, "Memory that all ranks of a group see; made by Comm.buffer().");

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)buffer_doc},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_dealloc, buffer_dealloc},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "fsdpc._C.CommBuffer",
    .basicsize = sizeof(buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = buffer_slots,
};

int
fsdpc_py_comm_buffer_exec(PyObject *module)
{
    return fsdpc_py_add_type(module, &buffer_spec, &fsdpc_py_state(module)->comm_buffer_type);
}
