/* The Python type Comm: collectives of a communicator on arrays and tensors.
 *
 * Every method turns its array into a view, lets go of the GIL, calls the core and maps the
 * status. close() ends the use by Python and tells the peers that this rank left in good order;
 * the communicator itself lives as long as the object, because units and buffers borrow it.
 */
#include "py_comm.h"

#include <limits.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct comm_object {
    PyObject_HEAD
    fsdpc_comm *comm;
    PyObject *callbacks; /* borrowed from the communicator, for the garbage collector */
    PyObject *weak_references;
    bool closed;
} comm_object;

/* NULL with an exception set when closed. */
static fsdpc_comm *
usable(comm_object *self)
{
    if (self->closed) {
        fsdpc_py_raise(fsdpc_error(FSDPC_E_STATE, "the communicator is closed"));
        return NULL;
    }
    return self->comm;
}

static PyObject *
none_or_raise(int status)
{
    return status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
}

int
fsdpc_py_comm_get(PyObject *object, fsdpc_comm **out)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    if (state == NULL || !Py_IS_TYPE(object, state->comm_type)) {
        PyErr_Format(PyExc_TypeError, "expected a fsdpc._C.Comm, not %.100s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *out = usable((comm_object *)object);
    return *out == NULL ? -1 : 0;
}

/* --- constructors ---------------------------------------------------------------------------- */

static comm_object *
new_object(PyTypeObject *type)
{
    return (comm_object *)type->tp_alloc(type, 0);
}

/* Takes over `status` of making self->comm: gives self, or drops it and raises. */
static PyObject *
made(comm_object *self, int status)
{
    if (status == FSDPC_OK) {
        return (PyObject *)self;
    }
    fsdpc_py_raise(status);
    Py_DECREF(self);
    return NULL;
}

PyObject *
fsdpc_py_comm_wrap(PyObject *type, fsdpc_comm *comm, PyObject *callbacks)
{
    comm_object *self = new_object((PyTypeObject *)type);
    if (self == NULL) {
        fsdpc_comm_free(comm);
        return NULL;
    }
    self->comm = comm;
    self->callbacks = callbacks;
    return (PyObject *)self;
}

/* None is the CPU, a number a GPU's. */
static int
find_device(PyObject *number, fsdpc_device **out)
{
    int status;
    long ordinal = number == Py_None ? 0 : PyLong_AsLong(number);
    if (ordinal == -1 && PyErr_Occurred() != NULL) {
        return -1;
    }
    ordinal = ordinal < 0 || ordinal > INT_MAX ? -1 : ordinal;
    Py_BEGIN_ALLOW_THREADS
    status = number == Py_None ? fsdpc_device_cpu(out) : fsdpc_device_cuda((int)ordinal, out);
    Py_END_ALLOW_THREADS
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(self_doc, "self_($type, device=None)\n--\n\n"
                       "A communicator of this rank alone; needs no peer. device: a GPU's number,\n"
                       "None for the CPU. NotImplementedError where there is no such GPU.");

static PyObject *
comm_self_(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    PyObject *number = Py_None;
    fsdpc_device *device = NULL;
    const fsdpc_py_arg table[] = {
        {"device", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &number},
    };
    if (fsdpc_py_args("self_", table, 1, values, count, keywords) < 0 ||
        find_device(number, &device) < 0) {
        return NULL;
    }
    comm_object *self = new_object((PyTypeObject *)type);
    if (self == NULL) {
        return NULL;
    }
    return made(self, fsdpc_comm_self(device, &self->comm));
}

PyDoc_STRVAR(
    shm_doc,
    "shm($type, rank, world, name, timeout)\n--\n\n"
    "A communicator of ranks of this host over shared memory. Collective: all ranks of the group\n"
    "call it with the same name, which is unique to the group. timeout is in seconds and holds\n"
    "for this call and for every later wait. Raises ValueError, CommTimeout, PeerError, OSError.");

static PyObject *
comm_shm(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    int32_t rank = 0;
    int32_t world = 0;
    const char *name = NULL;
    double timeout = 0.0;
    const fsdpc_py_arg table[] = {
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &rank},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"name", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &name},
        {"timeout", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &timeout},
    };
    if (fsdpc_py_args("shm", table, 4, values, count, keywords) < 0) {
        return NULL;
    }
    comm_object *self = new_object((PyTypeObject *)type);
    if (self == NULL) {
        return NULL;
    }
    fsdpc_device *device = NULL;
    int status = fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = fsdpc_comm_shm(device, rank, world, name, timeout, &self->comm);
        Py_END_ALLOW_THREADS
    }
    return made(self, status);
}

PyDoc_STRVAR(
    c10d_doc,
    "c10d($type, rank, world, callbacks)\n--\n\n"
    "A communicator whose collectives are methods of the object `callbacks`: all_gather(array,\n"
    "piece_bytes, what), reduce_scatter(array, piece_numel, dtype, what), all_reduce(array, "
    "numel,\n"
    "dtype, op, what), broadcast(array, root, what) and barrier(what). array is a 1-D NumPy array\n"
    "of bytes over the memory, valid for the call. What they raise becomes the cause of "
    "CommError.");

static PyObject *
comm_c10d(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    int32_t rank = 0;
    int32_t world = 0;
    PyObject *object = NULL;
    const fsdpc_py_arg table[] = {
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &rank},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"callbacks", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
    };
    if (fsdpc_py_args("c10d", table, 3, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm_callbacks callbacks;
    if (fsdpc_py_c10d_callbacks(object, world, &callbacks) < 0) {
        return NULL;
    }
    comm_object *self = new_object((PyTypeObject *)type);
    fsdpc_device *device = NULL;
    int status = self == NULL ? FSDPC_E_NOMEM : fsdpc_device_cpu(&device);
    if (status == FSDPC_OK) {
        status = fsdpc_comm_c10d(device, rank, world, &callbacks, &self->comm);
    }
    if (status != FSDPC_OK) {
        callbacks.release(callbacks.context);
        return self == NULL ? NULL : made(self, status);
    }
    self->callbacks = object;
    return (PyObject *)self;
}

PyDoc_STRVAR(
    nccl_doc,
    "nccl($type, rank, world, id, reduce_id, device, name='', timeout=600.0, exchange=None, *, "
    "register=False)\n--\n\n"
    "A communicator of GPUs over NCCL, and a second one for its reductions. Collective: all ranks\n"
    "pass the same two ids of nccl_id(). device: this rank's GPU by number. timeout is in seconds\n"
    "and holds for this call and each later collective. exchange(memory, piece_bytes, what):\n"
    "the host's own channel, an all-gather on a 1-D array of bytes, for what ranks tell each "
    "other\n"
    "outside of steps; without it that goes over the GPU. register: slots are registered with "
    "NCCL\n"
    "where it can do that; the same on all ranks. Methods take arrays in host memory, for\n"
    "that channel, and torch's tensors on the GPU, for NCCL on torch's current stream.\n"
    "Raises ValueError, CommTimeout, CommError, NotImplementedError.");

/* --- collectives ----------------------------------------------------------------------------- */

static int
open_array(PyObject *array, fsdpc_py_view *view)
{
    if (fsdpc_py_tensor_view_any(array, view) < 0) {
        return -1;
    }
    if (view->contiguous && !view->readonly) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "the array is %s; collectives work in place",
                 view->contiguous ? "read-only" : "not contiguous");
    fsdpc_py_view_release(view);
    return -1;
}

static size_t
view_bytes(const fsdpc_py_view *view)
{
    return (size_t)view->numel * view->itemsize;
}

/* The array is made of one piece a rank. */
static int
check_pieces(const fsdpc_py_view *view, int world)
{
    if (view->numel % world == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "the array has %lld elements, which is no multiple of %d ranks",
                 (long long)view->numel, world);
    return -1;
}

static int
check_float(const fsdpc_py_view *view)
{
    if (fsdpc_dtype_is_float(view->dtype)) {
        return 0;
    }
    PyErr_SetString(PyExc_TypeError,
                    "only float32, bfloat16, float16 and float64 arrays can be reduced");
    return -1;
}

/* What the collectives have in common: arguments, view, call, release. */
typedef struct job {
    fsdpc_comm *comm;
    fsdpc_py_view view;
    const char *what;
    int root;
    enum fsdpc_op op;
    bool on_device;
} job;

/* torch's tensors in the memory of the group's GPU go by its own collectives, queued on torch's
 * current stream; host memory goes as the group carries it. */
static int
choose_way(job *self, PyObject *array)
{
    fsdpc_device *device = fsdpc_comm_device(self->comm);
    fsdpc_py_place place = fsdpc_py_place_of(device);
    self->on_device = fsdpc_device_get_caps(device)->asynchronous && fsdpc_py_is_torch(array) &&
                      self->view.place.type == place.type && self->view.place.id == place.id;
    return self->on_device ? fsdpc_py_enter_device(device)
                           : fsdpc_py_check_place(&self->view, fsdpc_py_host);
}

static int
run_all_gather(job *self)
{
    size_t piece = view_bytes(&self->view) / (size_t)fsdpc_comm_world(self->comm);
    return (self->on_device ? fsdpc_comm_all_gather : fsdpc_comm_host_all_gather)(
        self->comm, self->view.data, piece, self->what);
}

static int
run_reduce_scatter(job *self)
{
    int64_t piece = self->view.numel / fsdpc_comm_world(self->comm);
    return (self->on_device ? fsdpc_comm_reduce_scatter : fsdpc_comm_host_reduce_scatter)(
        self->comm, self->view.data, piece, self->view.dtype, self->what);
}

static int
run_all_reduce(job *self)
{
    return (self->on_device ? fsdpc_comm_all_reduce : fsdpc_comm_host_all_reduce)(
        self->comm, self->view.data, self->view.numel, self->view.dtype, self->op, self->what);
}

static int
run_broadcast(job *self)
{
    return (self->on_device ? fsdpc_comm_broadcast : fsdpc_comm_host_broadcast)(
        self->comm, self->view.data, view_bytes(&self->view), self->root, self->what);
}

/* `pieces`, `floats`: what is demanded of the array. */
static PyObject *
run(job *self, PyObject *array, int (*collective)(job *), bool pieces, bool floats)
{
    if (open_array(array, &self->view) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (choose_way(self, array) == 0 &&
        (!pieces || check_pieces(&self->view, fsdpc_comm_world(self->comm)) == 0) &&
        (!floats || check_float(&self->view) == 0)) {
        int status;
        Py_BEGIN_ALLOW_THREADS
        status = collective(self);
        Py_END_ALLOW_THREADS
        result = none_or_raise(status);
    }
    fsdpc_py_view_release(&self->view);
    return result;
}

typedef struct arguments {
    PyObject *const *values;
    Py_ssize_t count;
    PyObject *keywords;
} arguments;

/* A method (array, what='') whose array holds one piece a rank. */
static PyObject *
run_pieces(PyObject *self, const char *method, const arguments *given, int (*collective)(job *),
           bool floats)
{
    PyObject *array = NULL;
    job work = {.comm = usable((comm_object *)self), .what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (work.comm == NULL ||
        fsdpc_py_args(method, table, 2, given->values, given->count, given->keywords) < 0) {
        return NULL;
    }
    return run(&work, array, collective, true, floats);
}

PyDoc_STRVAR(all_gather_doc,
             "all_gather($self, array, what='')\n--\n\n"
             "In place: the array holds one piece a rank; this rank's is there before, all are\n"
             "there after. Any dtype. Collective. `what` goes into error texts.");

static PyObject *
comm_all_gather(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    arguments given = {values, count, keywords};
    return run_pieces(self, "all_gather", &given, run_all_gather, false);
}

PyDoc_STRVAR(reduce_scatter_doc,
             "reduce_scatter($self, array, what='')\n--\n\n"
             "In place: the array holds one piece a rank; after, this rank's piece is the sum\n"
             "over ranks and the others are unspecified. Floating point. Collective.");

static PyObject *
comm_reduce_scatter(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    arguments given = {values, count, keywords};
    return run_pieces(self, "reduce_scatter", &given, run_reduce_scatter, true);
}

static int
parse_op(const char *name, enum fsdpc_op *out)
{
    static const char *const names[] = {"sum", "max", "min"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (enum fsdpc_op)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op is 'sum', 'max' or 'min', not '%.50s'", name);
    return -1;
}

PyDoc_STRVAR(all_reduce_doc, "all_reduce($self, array, op='sum', what='')\n--\n\n"
                             "In place: every rank gets the sum ('max', 'min') of all arrays.\n"
                             "Floating point. Collective.");

static PyObject *
comm_all_reduce(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    PyObject *array = NULL;
    const char *op = "sum";
    job work = {.comm = usable((comm_object *)self), .what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"op", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &op},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (work.comm == NULL || fsdpc_py_args("all_reduce", table, 3, values, count, keywords) < 0 ||
        parse_op(op, &work.op) < 0) {
        return NULL;
    }
    return run(&work, array, run_all_reduce, false, true);
}

PyDoc_STRVAR(broadcast_doc,
             "broadcast($self, array, root=0, what='')\n--\n\n"
             "In place: every rank gets the array of `root`. Any dtype. Collective.");

static PyObject *
comm_broadcast(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    PyObject *array = NULL;
    int32_t root = 0;
    job work = {.comm = usable((comm_object *)self), .what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"root", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &root},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (work.comm == NULL || fsdpc_py_args("broadcast", table, 3, values, count, keywords) < 0) {
        return NULL;
    }
    work.root = root;
    return run(&work, array, run_broadcast, false, false);
}

PyDoc_STRVAR(barrier_doc, "barrier($self, what='')\n--\n\nReturns when all ranks have called it.");

static PyObject *
comm_barrier(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_comm *comm = usable((comm_object *)self);
    const char *what = "";
    const fsdpc_py_arg table[] = {{"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &what}};
    if (comm == NULL || fsdpc_py_args("barrier", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_comm_barrier(comm, what);
    Py_END_ALLOW_THREADS
    return none_or_raise(status);
}

PyDoc_STRVAR(agree_doc, "agree($self, text, what='')\n--\n\n"
                        "Raises MismatchError on every rank, quoting the first differing line,\n"
                        "unless all ranks pass the same text. Collective.");

static PyObject *
comm_agree(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_comm *comm = usable((comm_object *)self);
    const char *text = NULL;
    const char *what = "";
    const fsdpc_py_arg table[] = {
        {"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &what},
    };
    if (comm == NULL || fsdpc_py_args("agree", table, 2, values, count, keywords) < 0) {
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = fsdpc_comm_agree(comm, text, what);
    Py_END_ALLOW_THREADS
    return none_or_raise(status);
}

/* --- the rest -------------------------------------------------------------------------------- */

PyDoc_STRVAR(abort_doc, "abort($self, text)\n--\n\n"
                        "Breaks the group: waits of all ranks end with PeerError quoting `text`\n"
                        "(kinds other than 'shm': on this rank only). Local, waits for nobody.");

static PyObject *
comm_abort(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    const char *text = NULL;
    const fsdpc_py_arg table[] = {{"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text}};
    if (fsdpc_py_args("abort", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_comm_abort(((comm_object *)self)->comm, text);
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
    fsdpc_comm_fail(((comm_object *)self)->comm, FSDPC_E_PEER, text);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc,
             "close($self)\n--\n\n"
             "Leaves the group in good order: peers that still need this rank are told\n"
             "so. Local; gives what is on its way over NCCL a few seconds to end. Later\n"
             "collectives raise StateError.");

static PyObject *
comm_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    comm_object *self = (comm_object *)object;
    if (!self->closed) {
        self->closed = true;
        Py_BEGIN_ALLOW_THREADS
        fsdpc_comm_close(self->comm);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(buffer_doc, "buffer($self, bytes, common=False)\n--\n\n"
                         "Memory of `bytes` a rank (`common`: one part for all) that every rank\n"
                         "sees, on which collectives copy nothing they need not. Collective;\n"
                         "NotImplementedError unless kind is 'shm'.");

static PyObject *
comm_buffer(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    size_t bytes = 0;
    bool common = false;
    const fsdpc_py_arg table[] = {
        {"bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &bytes},
        {"common", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &common},
    };
    if (usable((comm_object *)self) == NULL ||
        fsdpc_py_args("buffer", table, 2, values, count, keywords) < 0) {
        return NULL;
    }
    return fsdpc_py_comm_buffer_new(self, bytes, common);
}

static PyObject *
comm_rank(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(fsdpc_comm_rank(((comm_object *)self)->comm));
}

static PyObject *
comm_world(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(fsdpc_comm_world(((comm_object *)self)->comm));
}

/* Of reductions: what is asked is how they sum. */
static PyObject *
comm_symmetric(PyObject *self, void *Py_UNUSED(closure))
{
    fsdpc_comm *comm = ((comm_object *)self)->comm;
    return PyBool_FromLong(fsdpc_comm_is_symmetric(fsdpc_comm_for_reductions(comm)));
}

static PyObject *
comm_kind(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(fsdpc_comm_kind(((comm_object *)self)->comm));
}

static PyObject *
comm_closed(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((comm_object *)self)->closed);
}

static PyObject *
comm_repr(PyObject *object)
{
    const comm_object *self = (comm_object *)object;
    return PyUnicode_FromFormat("<fsdpc Comm %s, rank %d of %d%s>", fsdpc_comm_kind(self->comm),
                                fsdpc_comm_rank(self->comm), fsdpc_comm_world(self->comm),
                                self->closed ? ", closed" : "");
}

static int
comm_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((comm_object *)object)->callbacks);
    return 0;
}

static void
comm_dealloc(PyObject *object)
{
    comm_object *self = (comm_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    self->callbacks = NULL;
    fsdpc_comm_free(self->comm);
    type->tp_free(object);
    Py_DECREF(type);
}

#define FAST(name, flags)                                                                      \
    {#name, (PyCFunction)(void (*)(void))comm_##name, METH_FASTCALL | METH_KEYWORDS | (flags), \
     name##_doc}

static PyMethodDef comm_methods[] = {
    {"self_", (PyCFunction)(void (*)(void))comm_self_, METH_FASTCALL | METH_KEYWORDS | METH_CLASS,
     self_doc},
    FAST(shm, METH_CLASS),
    FAST(c10d, METH_CLASS),
    {"nccl", (PyCFunction)(void (*)(void))fsdpc_py_comm_nccl,
     METH_FASTCALL | METH_KEYWORDS | METH_CLASS, nccl_doc},
    FAST(all_gather, 0),
    FAST(reduce_scatter, 0),
    FAST(all_reduce, 0),
    FAST(broadcast, 0),
    FAST(barrier, 0),
    FAST(agree, 0),
    FAST(abort, 0),
    FAST(fail, 0),
    FAST(buffer, 0),
    {"close", comm_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

#undef FAST

static PyObject *
comm_device(PyObject *self, void *Py_UNUSED(closure))
{
    const fsdpc_device *device = fsdpc_comm_device(((comm_object *)self)->comm);
    int ordinal = fsdpc_device_get_caps(device)->ordinal;
    return ordinal < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(ordinal);
}

static PyGetSetDef comm_getset[] = {
    {"rank", comm_rank, NULL, "Rank within the group.", NULL},
    {"world", comm_world, NULL, "Number of ranks of the group.", NULL},
    {"kind", comm_kind, NULL, "'self', 'shm', 'c10d' or 'nccl'.", NULL},
    {"device", comm_device, NULL, "Number of the GPU whose memory it carries; None: the CPU's.",
     NULL},
    {"symmetric", comm_symmetric, NULL,
     "True if NCCL reduces on windows of memory that all ranks' GPUs see.", NULL},
    {"closed", comm_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef comm_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(comm_object, weak_references), READONLY, NULL},
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
    .basicsize = sizeof(comm_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = comm_slots,
};

int
fsdpc_py_comm_exec(PyObject *module)
{
    fsdpc_shm_interrupt_check = fsdpc_py_check_signals;
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (fsdpc_py_add_type(module, &comm_spec, &state->comm_type) < 0) {
        return -1;
    }
    return fsdpc_py_comm_buffer_exec(module);
}
