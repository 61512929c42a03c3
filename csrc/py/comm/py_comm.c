/* The Python type Comm: a communicator's methods, its attributes, its life.
 *
 * close() ends the use by Python and marks this rank as gone for its peers; the communicator itself
 * lives as long as the object, because units and buffers borrow it. The constructors are in
 * py_comm_make.c and py_comm_nccl.c, the collectives in py_comm_collectives.c.
 */
#include "py/comm/py_comm_impl.h"

#include <math.h>
#include <stddef.h>
#include <structmember.h>

#include "base/deadline.h"

/* --- methods --------------------------------------------------------------------------------- */

PyDoc_STRVAR(abort_doc, "abort($self, text)\n--\n\n"
                        "Breaks the group: waits of all ranks end with PeerError quoting `text`\n"
                        "(kinds other than 'shm': on this rank only). Local; does not wait.");

static PyObject *
comm_abort(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = NULL;
    const fsdpc_py_arg table[] = {{"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text}};
    if (fsdpc_py_args("abort", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm_abort(((fsdpc_py_comm *)self)->comm, text);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(fail_doc,
             "fail($self, text)\n--\n\n"
             "Breaks the communicator on this rank, because another rank is known to have\n"
             "failed: waits and later collectives raise PeerError(text). Local.");

static PyObject *
comm_fail(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = NULL;
    const fsdpc_py_arg table[] = {{"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text}};
    if (fsdpc_py_args("fail", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm_fail(((fsdpc_py_comm *)self)->comm, FSDPC_E_PEER, text);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc,
             "close($self)\n--\n\n"
             "Leaves the group: peers that still wait for this rank get PeerError. Local;\n"
             "collectives in flight over NCCL get a few seconds to end. Later collectives\n"
             "raise StateError.");

static PyObject *
comm_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    if (!self->closed) {
        self->closed = true;
        Py_BEGIN_ALLOW_THREADS
        fsdpc_comm_close(self->comm);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(late_text_doc,
             "late_text(rank, seconds, what, missing, more='')\n--\n\n"
             "Text of the CommTimeout of a wait in `what` of `rank` for the ranks in the sequence\n"
             "`missing` (none: for the others), and what follows it.");

static PyObject *
comm_late_text(PyObject *Py_UNUSED(type), PyObject *arguments)
{
    enum { MOST = 64 };
    int missing[MOST];
    char text[2048];
    PyObject *ranks;
    fsdpc_late late = {.missing = missing};
    if (!PyArg_ParseTuple(arguments, "idsO|s:late_text", &late.rank, &late.seconds, &late.what,
                          &ranks, &late.more) ||
        (ranks = PySequence_Tuple(ranks)) == NULL) {
        return NULL;
    }
    /* The text shows fewer and counts the rest. */
    late.missing_count = (int)PyTuple_GET_SIZE(ranks);
    for (int i = 0; i < late.missing_count && i < MOST && !PyErr_Occurred(); i++) {
        missing[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(ranks, i));
    }
    Py_DECREF(ranks);
    if (PyErr_Occurred()) {
        return NULL;
    }
    fsdpc_late_text(&late, text, sizeof text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* Documentation of the methods in other files. */

PyDoc_STRVAR(self__doc, "self_($type, device=None)\n--\n\n"
                        "A communicator of this rank alone. device: a GPU's number,\n"
                        "None for the CPU. NotImplementedError where there is no such GPU.");

PyDoc_STRVAR(
    shm_doc,
    "shm($type, rank, world, name, timeout)\n--\n\n"
    "A communicator of ranks of this host over shared memory. Collective: all ranks of the group\n"
    "call it with the same name, which is unique to the group. timeout is in seconds and holds\n"
    "for this call and for every later wait. Raises ValueError, CommTimeout, PeerError, OSError.");

PyDoc_STRVAR(
    c10d_doc,
    "c10d($type, rank, world, callbacks)\n--\n\n"
    "A communicator whose collectives are methods of the object `callbacks`: all_gather(array,\n"
    "piece_bytes, what), reduce_scatter(array, piece_numel, dtype, what), all_reduce(array, "
    "numel,\n"
    "dtype, op, what), broadcast(array, root, what) and barrier(what). array is a 1-D NumPy array\n"
    "of bytes over the memory, valid for the call. What they raise becomes the cause of "
    "CommError.");

#define TEXT(value) #value
#define TEXT_OF(macro) TEXT(macro)

PyDoc_STRVAR(
    nccl_doc,
    "nccl($type, rank, world, id, reduce_id, device, name='', timeout=" TEXT_OF(
        FSDPC_DEFAULT_TIMEOUT_S) ", exchange=None, *, "
                                 "register=False)\n--\n\n"
                                 "A communicator of GPUs over NCCL, and a second one for its "
                                 "reductions. Collective: all ranks\n"
                                 "pass the same two ids of nccl_id(). device: this rank's GPU by "
                                 "number. timeout is in seconds\n"
                                 "and holds for this call and each later collective. "
                                 "exchange(memory, piece_bytes, what):\n"
                                 "an all-gather between hosts, on a 1-D array of bytes, for "
                                 "messages outside of steps; without\n"
                                 "exchange these messages go over the GPU. register: slots are "
                                 "registered with NCCL where NCCL\n"
                                 "supports that; the same on all ranks. Methods take arrays in "
                                 "host memory, sent by exchange,\n"
                                 "and torch's tensors on the GPU, sent by NCCL on torch's current "
                                 "stream.\n"
                                 "Raises ValueError, CommTimeout, CommError, NotImplementedError.");

PyDoc_STRVAR(all_gather_doc,
             "all_gather($self, array, what='')\n--\n\n"
             "In place: the array holds one piece per rank; this rank's piece is set before the\n"
             "call, all pieces after. Any dtype. Collective. `what` is quoted in errors.");

PyDoc_STRVAR(reduce_scatter_doc,
             "reduce_scatter($self, array, what='')\n--\n\n"
             "In place: the array holds one piece per rank; after the call this rank's piece is\n"
             "the sum over ranks and the others are unspecified. Floating point. Collective.");

PyDoc_STRVAR(all_reduce_doc, "all_reduce($self, array, op='sum', what='')\n--\n\n"
                             "In place: every rank gets the sum ('max', 'min') of all arrays.\n"
                             "Floating point. Collective.");

PyDoc_STRVAR(broadcast_doc,
             "broadcast($self, array, root=0, what='')\n--\n\n"
             "In place: every rank gets the array of `root`. Any dtype. Collective.");

PyDoc_STRVAR(barrier_doc, "barrier($self, what='')\n--\n\nReturns when all ranks have called it.");

PyDoc_STRVAR(agree_doc, "agree($self, text, what='')\n--\n\n"
                        "Raises MismatchError on every rank, quoting the first differing line,\n"
                        "unless all ranks pass the same text. Collective.");

PyDoc_STRVAR(
    staged_doc,
    "staged($self, device, /)\n--\n\n"
    "A communicator of the same ranks for the memory of a GPU, given by its number: each\n"
    "collective runs on a copy in host memory, and the host waits for it. Keeps this\n"
    "communicator alive; collectives of the two must not overlap. ValueError if this one is a\n"
    "GPU's, NotImplementedError where there is no such GPU. Local.");

#define FAST(name, function, flags)                                                           \
    {#name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS | (flags), \
     name##_doc}

static PyMethodDef comm_methods[] = {
    FAST(self_, fsdpc_py_comm_self_, METH_CLASS),
    FAST(shm, fsdpc_py_comm_shm, METH_CLASS),
    FAST(c10d, fsdpc_py_comm_c10d, METH_CLASS),
    FAST(nccl, fsdpc_py_comm_nccl, METH_CLASS),
    {"staged", fsdpc_py_comm_staged, METH_O, staged_doc},
    FAST(all_gather, fsdpc_py_comm_all_gather, 0),
    FAST(reduce_scatter, fsdpc_py_comm_reduce_scatter, 0),
    FAST(all_reduce, fsdpc_py_comm_all_reduce, 0),
    FAST(broadcast, fsdpc_py_comm_broadcast, 0),
    FAST(barrier, fsdpc_py_comm_barrier, 0),
    FAST(agree, fsdpc_py_comm_agree, 0),
    FAST(abort, comm_abort, 0),
    FAST(fail, comm_fail, 0),
    {"close", comm_close, METH_NOARGS, close_doc},
    {"late_text", comm_late_text, METH_VARARGS | METH_STATIC, late_text_doc},
    {NULL, NULL, 0, NULL},
};

#undef FAST

/* --- attributes ------------------------------------------------------------------------------ */

static PyObject *
comm_rank(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(fsdpc_comm_rank(((fsdpc_py_comm *)self)->comm));
}

static PyObject *
comm_world(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(fsdpc_comm_world(((fsdpc_py_comm *)self)->comm));
}

static PyObject *
comm_kind(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fsdpc_comm_kind(((fsdpc_py_comm *)self)->comm));
}

static PyObject *
comm_device(PyObject *self, void *Py_UNUSED(closure))
{
    const fsdpc_device *device = fsdpc_comm_device(((fsdpc_py_comm *)self)->comm);
    int ordinal = fsdpc_device_get_caps(device)->ordinal;
    return ordinal < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(ordinal);
}

static PyObject *
comm_one_memory(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fsdpc_comm_get_caps(((fsdpc_py_comm *)self)->comm)->one_memory);
}

static PyObject *
comm_names_absentees(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fsdpc_comm_get_caps(((fsdpc_py_comm *)self)->comm)->names_absentees);
}

static PyObject *
comm_rounds_sums(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fsdpc_comm_get_caps(((fsdpc_py_comm *)self)->comm)->rounds_sums);
}

/* Of the communicator of reductions: the attribute describes how gradients are summed. */
static PyObject *
comm_symmetric(PyObject *self, void *Py_UNUSED(closure))
{
    fsdpc_comm *comm = ((fsdpc_py_comm *)self)->comm;
    return PyBool_FromLong(fsdpc_comm_is_symmetric(fsdpc_comm_for_reductions(comm)));
}

static PyObject *
comm_closed(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((fsdpc_py_comm *)self)->closed);
}

static PyGetSetDef comm_getset[] = {
    {"rank", comm_rank, NULL, "Rank within the group.", NULL},
    {"world", comm_world, NULL, "Number of ranks of the group.", NULL},
    {"kind", comm_kind, NULL, "'self', 'shm', 'c10d' or 'nccl'.", NULL},
    {"device", comm_device, NULL,
     "Number of the GPU whose memory the collectives take; None: the CPU.", NULL},
    {"one_memory", comm_one_memory, NULL, "True if the ranks share memory.", NULL},
    {"names_absentees", comm_names_absentees, NULL,
     "True if agree() and barrier() name the ranks that did not come by the deadline.", NULL},
    {"rounds_sums", comm_rounds_sums, NULL,
     "True if sums of bfloat16 and float16 are rounded after each rank, unless symmetric.", NULL},
    {"symmetric", comm_symmetric, NULL,
     "True if NCCL reduces in symmetric memory of all ranks' GPUs.", NULL},
    {"closed", comm_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* --- the type -------------------------------------------------------------------------------- */

static PyObject *
comm_repr(PyObject *object)
{
    const fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    return PyUnicode_FromFormat("<fsdpc Comm %s, rank %d of %d%s>", fsdpc_comm_kind(self->comm),
                                fsdpc_comm_rank(self->comm), fsdpc_comm_world(self->comm),
                                self->closed ? ", closed" : "");
}

static int
comm_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((fsdpc_py_comm *)object)->callbacks);
    return 0;
}

static void
comm_dealloc(PyObject *object)
{
    fsdpc_py_comm *self = (fsdpc_py_comm *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    /* May wait for NCCL or for peers, seconds long. No thread can find the object here; the callbacks are
     * borrowed by the communicator until it is freed. */
    Py_BEGIN_ALLOW_THREADS
    fsdpc_comm_free(self->comm);
    Py_END_ALLOW_THREADS
    self->callbacks = NULL;
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef comm_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fsdpc_py_comm, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(comm_doc,
             "Collectives among the ranks of a group, in place on arrays and tensors.\n\n"
             "Made by Comm.self_(), Comm.shm(), Comm.c10d() or Comm.nccl(). All\n"
             "collectives are called by all ranks in the same order and end within the deadline.");

static PyType_Slot comm_slots[] = {
    {Py_tp_doc, (void *)comm_doc}, {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},   {Py_tp_members, comm_members},
    {Py_tp_repr, comm_repr},       {Py_tp_traverse, comm_traverse},
    {Py_tp_dealloc, comm_dealloc}, {0, NULL},
};

static PyType_Spec comm_spec = {
    .name = "fsdpc._C.Comm",
    .basicsize = sizeof(fsdpc_py_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = comm_slots,
};

static PyObject *
set_timeout(PyObject *Py_UNUSED(module), PyObject *number)
{
    const double seconds = PyFloat_AsDouble(number);
    if (seconds == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!(seconds > 0) || isinf(seconds)) {
        return PyErr_Format(PyExc_ValueError, "set_timeout: seconds must be above 0, but is %R",
                            number);
    }
    fsdpc_set_timeout(seconds);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_timeout", set_timeout, METH_O,
     "set_timeout(seconds, /)\n--\n\nSets the deadline of waits that belong to no group: for this "
     "rank's GPU, for another thread."},
    {NULL, NULL, 0, NULL},
};

int
fsdpc_py_comm_exec(PyObject *module)
{
    fsdpc_shm_interrupt_check = fsdpc_py_check_signals;
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (fsdpc_py_add_type(module, &comm_spec, &state->comm_type) < 0) {
        return -1;
    }
    if (PyModule_AddFunctions(module, functions) < 0) {
        return -1;
    }
    PyObject *timeout = PyFloat_FromDouble(FSDPC_DEFAULT_TIMEOUT_S);
    int result = PyModule_AddObjectRef(module, "DEFAULT_TIMEOUT", timeout);
    Py_XDECREF(timeout);
    return result;
}
