/* The Python type Comm: a communicator's methods, attributes and lifetime.
 *
 * close() ends the use by Python and marks this rank as gone for its peers. The communicator itself
 * exists as long as the object, because units and buffers borrow it. The constructors are in
 * py_comm_make.c and py_comm_nccl.c, the collectives in py_comm_collectives.c.
 */
#include "py/comm/py_comm_impl.h"

#include <math.h>
#include <stddef.h>
#include <structmember.h>

#include "base/deadline.h"
#include "comm/flight.h"

/* --- methods --------------------------------------------------------------------------------- */

/* Parses the one argument (text) of a method. Returns NULL with an exception set on failure. */
static const char *
read_text(const char *function, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = NULL;
    const fsdpc_py_arg table[] = {{"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text}};
    return fsdpc_py_args(function, table, 1, values, count, keywords) < 0 ? NULL : text;
}

static PyObject *
comm_abort(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = read_text("abort", values, count, keywords);
    if (text == NULL) {
        return NULL;
    }
    fsdpc_comm_abort(((fsdpc_py_comm *)self)->comm, text);
    Py_RETURN_NONE;
}

static PyObject *
comm_fail(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = read_text("fail", values, count, keywords);
    if (text == NULL) {
        return NULL;
    }
    fsdpc_comm_fail(((fsdpc_py_comm *)self)->comm, FSDPC_E_PEER, text);
    Py_RETURN_NONE;
}

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
    /* The text names fewer ranks than MOST and counts the others, so MOST ranks are copied at most. */
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

#define TEXT(value) #value
#define TEXT_OF(macro) TEXT(macro)
#define METHOD(name, flags, arguments, doc) \
    FSDPC_PY_METHOD(name, fsdpc_py_comm_##name, FSDPC_PY_KEYWORDS | (flags), arguments, doc)

static PyMethodDef comm_methods[] = {
    METHOD(self_, METH_CLASS, "($type, device=None)",
           "A communicator of this rank alone. device: a GPU's number, None for the CPU.\n"
           "NotImplementedError where there is no such GPU."),
    METHOD(shm, METH_CLASS, "($type, rank, world, name, timeout)",
           "A communicator of ranks of this host over shared memory. Collective: all ranks of the\n"
           "group call it with the same name, which is unique to the group. timeout is in seconds\n"
           "and holds for this call and for every later wait. Raises ValueError, CommTimeout,\n"
           "PeerError, OSError."),
    METHOD(c10d, METH_CLASS, "($type, rank, world, callbacks)",
           "A communicator whose collectives are methods of the object `callbacks`:\n"
           "all_gather(array, piece_bytes, what), reduce_scatter(array, piece_numel, dtype,\n"
           "what), all_reduce(array, numel, dtype, op, what), broadcast(array, root, what) and\n"
           "barrier(what). array is a 1-D NumPy array of bytes over the memory, valid for the\n"
           "call. What they raise becomes the cause of CommError."),
    METHOD(set_hosts, 0, "($self, hosts, name, timeout)",
           "For a communicator whose callbacks send in the background: hosts[r] is a number that\n"
           "ranks of one host have in common. They share memory from now on, and each byte of a\n"
           "unit travels once per host. name and timeout as for shm; each host has another name.\n"
           "Collective over the ranks of each host. Raises as shm does, and RuntimeError."),
    FSDPC_PY_METHOD(
        set_numbers, fsdpc_py_comm_set_numbers, METH_O, "($self, text, /)",
        "The text that errors begin with where this group's ranks have other numbers than in the\n"
        "whole program: 'ranks 2-3 are called 0-1 here'. RuntimeError on the second call. Local."),
    METHOD(nccl, METH_CLASS,
           "($type, rank, world, id, reduce_id, device, name='', timeout=" TEXT_OF(
               FSDPC_DEFAULT_TIMEOUT_S) ", exchange=None, *, register=False)",
           "A communicator of GPUs over NCCL, and a second one for its reductions. Collective:\n"
           "all ranks pass the same two ids of nccl_id(). device: this rank's GPU by number.\n"
           "timeout is in seconds and holds for this call and each later collective.\n"
           "exchange(memory, piece_bytes, what): an all-gather between hosts, on a 1-D array of\n"
           "bytes, for messages outside of steps; without exchange these messages go over the\n"
           "GPU. register: slots are registered with NCCL where NCCL supports that; the same on\n"
           "all ranks. Methods take arrays in host memory, sent by exchange, and torch's tensors\n"
           "on the GPU, sent by NCCL on torch's current stream. Raises ValueError, CommTimeout,\n"
           "CommError, NotImplementedError."),
    FSDPC_PY_METHOD(
        staged, fsdpc_py_comm_staged, METH_O, "($self, device, /)",
        "A communicator of the same ranks for the memory of a GPU, given by its number: each\n"
        "collective runs on a copy in host memory, and the host waits for it. Keeps this\n"
        "communicator alive; collectives of the two must not overlap. ValueError if this one is a\n"
        "GPU's, NotImplementedError where there is no such GPU. Local."),
    METHOD(all_gather, 0, "($self, array, what='')",
           "In place: the array holds one piece per rank; this rank's piece is set before the\n"
           "call, all pieces after. Any dtype. Collective. `what` is quoted in errors."),
    METHOD(reduce_scatter, 0, "($self, array, what='')",
           "In place: the array holds one piece per rank; after the call this rank's piece is the\n"
           "sum over ranks and the others are unspecified. Floating point. Collective."),
    METHOD(all_reduce, 0, "($self, array, op='sum', what='')",
           "In place: every rank gets the sum ('max', 'min') of all arrays. Floating point.\n"
           "Collective."),
    METHOD(broadcast, 0, "($self, array, root=0, what='')",
           "In place: every rank gets the array of `root`. Any dtype. Collective."),
    METHOD(barrier, 0, "($self, what='')", "Returns when all ranks have called it."),
    METHOD(agree, 0, "($self, text, what='')",
           "Raises MismatchError on every rank, quoting the first differing line, unless all\n"
           "ranks pass the same text. Collective."),
    FSDPC_PY_METHOD(abort, comm_abort, FSDPC_PY_KEYWORDS, "($self, text)",
                    "Breaks the group: waits of all ranks end with PeerError quoting `text`\n"
                    "(kinds other than 'shm': on this rank only). Local; does not wait."),
    FSDPC_PY_METHOD(fail, comm_fail, FSDPC_PY_KEYWORDS, "($self, text)",
                    "Breaks the communicator on this rank, because another rank is known to have\n"
                    "failed: waits and later collectives raise PeerError(text). Local."),
    FSDPC_PY_METHOD(close, comm_close, METH_NOARGS, "($self)",
                    "Leaves the group: peers that still wait for this rank get PeerError. Local;\n"
                    "collectives in flight over NCCL get a few seconds to end. Later collectives\n"
                    "raise StateError."),
    FSDPC_PY_METHOD(late_text, comm_late_text, METH_VARARGS | METH_STATIC,
                    "(rank, seconds, what, missing, more='')",
                    "Text of the CommTimeout of a wait in `what` of `rank` for the ranks in the\n"
                    "sequence `missing` (none: for the others), and what follows it."),
    {NULL, NULL, 0, NULL},
};

/* --- attributes ------------------------------------------------------------------------------ */

#define CAPS(self) fsdpc_comm_get_caps((self)->comm)

/* Attributes whose value is one expression: X(name, value, docstring). */
/* clang-format off */
#define ATTRIBUTES(X) \
    X(rank, PyLong_FromLong(fsdpc_comm_rank(self->comm)), "Rank within the group.") \
    X(world, PyLong_FromLong(fsdpc_comm_world(self->comm)), "Number of ranks of the group.") \
    X(kind, PyUnicode_FromString(fsdpc_comm_kind(self->comm)), "'self', 'shm', 'c10d' or 'nccl'.") \
    X(one_memory, PyBool_FromLong(CAPS(self)->one_memory), "True if the ranks share memory.") \
    X(flies, PyBool_FromLong(fsdpc_comm_flies(self->comm)), \
      "True if units travel by sends and receives in the background.") \
    X(senders, PyLong_FromLong(fsdpc_comm_senders(self->comm)), \
      "Ranks whose gradients of a unit travel to this rank over a wire; for kind 'c10d'.") \
    X(receivers, PyLong_FromLong(fsdpc_comm_receivers(self->comm)), \
      "Ranks to which this rank sends gradients of a unit over a wire; for kind 'c10d'.") \
    X(numbers, PyUnicode_FromString(fsdpc_comm_numbers(self->comm)), \
      "What set_numbers() was given, or empty: the ranks' numbers are those of the program.") \
    X(ranks_per_host, PyLong_FromLong(fsdpc_comm_ranks_per_host(self->comm)), \
      "Ranks of each host that share memory in a group of several hosts; 0: not equally many.") \
    X(names_absentees, PyBool_FromLong(CAPS(self)->names_absentees), \
      "True if agree() and barrier() name the ranks that did not come by the deadline.") \
    X(rounds_sums, PyBool_FromLong(CAPS(self)->rounds_sums), \
      "True if sums of bfloat16 and float16 are rounded after each rank, unless symmetric.") \
    /* The communicator for reductions sums gradients, so this attribute describes it. */ \
    X(symmetric, PyBool_FromLong(fsdpc_comm_is_symmetric(fsdpc_comm_for_reductions(self->comm))), \
      "True if NCCL reduces in symmetric memory of all ranks' GPUs.") \
    X(closed, PyBool_FromLong(self->closed), "True after close().")
/* clang-format on */

#define GET(name, value, doc) FSDPC_PY_GETTER(fsdpc_py_comm, name, value)
#define ROW(name, value, doc) FSDPC_PY_ATTRIBUTE(name, NULL, doc),

ATTRIBUTES(GET)

static PyObject *
get_device(fsdpc_py_comm *self, void *Py_UNUSED(closure))
{
    int ordinal = fsdpc_device_get_caps(fsdpc_comm_device(self->comm))->ordinal;
    return ordinal < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(ordinal);
}

static PyGetSetDef comm_getset[] = {
    /* clang-format off */
    ATTRIBUTES(ROW)
    /* clang-format on */
    FSDPC_PY_ATTRIBUTE(device, NULL,
                       "Number of the GPU whose memory the collectives take; None: the CPU."),
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
    /* fsdpc_comm_free may wait seconds for NCCL or for peers, so it runs without the GIL. No other thread can
     * find the object now. The call also drops the communicator's reference to `callbacks`. */
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

static PyType_Slot comm_slots[] = {
    {Py_tp_doc,
     "Collectives among the ranks of a group, in place on arrays and tensors.\n\n"
     "Made by Comm.self_(), Comm.shm(), Comm.c10d() or Comm.nccl(). All\n"
     "collectives are called by all ranks in the same order and end within the deadline."},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},
    {Py_tp_members, comm_members},
    {Py_tp_repr, comm_repr},
    {Py_tp_traverse, comm_traverse},
    {Py_tp_dealloc, comm_dealloc},
    {0, NULL},
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
        PyObject *value = PyFloat_FromDouble(seconds);
        PyErr_Format(PyExc_ValueError, "set_timeout: seconds must be above 0 and finite, but is %R",
                     value);
        Py_XDECREF(value);
        return NULL;
    }
    fsdpc_set_timeout(seconds);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    FSDPC_PY_FUNCTION(set_timeout, METH_O, "(seconds, /)",
                      "Sets the deadline of waits that belong to no group: for this rank's GPU, "
                      "for another thread."),
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
