/* Comm.nccl(): communicators over NCCL. A Python callable is the channel between the hosts.
 *
 * The channel is called with the GIL held, like the callbacks of a "c10d" communicator. If the callable
 * raises CommTimeout or PeerError, the exception's class and text are kept: the channel can name the missing
 * rank, and the layers above cannot.
 */
#include <stdio.h>
#include <string.h>

#include "base/deadline.h"
#include "comm/comm_nccl.h"
#include "base/mem.h"
#include "py/comm/py_comm_impl.h"
#include "py/base/py_numpy.h"

typedef struct channel {
    PyObject *callable;
    int world;
} channel;

/* Returns the status for the exception that is set. Clears a CommTimeout or PeerError: its text is kept. */
static int
status_of_exception(const char *what)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    char text[1024];
    fsdpc_py_exception_text(text, sizeof text);
    const char *message = strstr(text, ": ") ? strstr(text, ": ") + 2 : text;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return fsdpc_error(FSDPC_E_INTERRUPT, "%s: %s", what, text);
    }
    bool late = PyErr_ExceptionMatches(state->comm_timeout);
    if (late || PyErr_ExceptionMatches(state->peer_error)) {
        PyErr_Clear();
        return fsdpc_error(late ? FSDPC_E_TIMEOUT : FSDPC_E_PEER, "%s", message);
    }
    return fsdpc_error(FSDPC_E_COMM, "%s: %s", what, text);
}

static int
exchange(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    const channel *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    npy_intp length = (npy_intp)piece_bytes * to->world;
    PyObject *memory = PyArray_SimpleNewFromData(1, &length, NPY_UINT8, buffer);
    PyObject *result = NULL;
    if (memory != NULL) {
        result = PyObject_CallFunction(to->callable, "Ons", memory, (Py_ssize_t)piece_bytes, what);
    }
    int status = result == NULL ? status_of_exception(what) : FSDPC_OK;
    Py_XDECREF(result);
    Py_XDECREF(memory);
    return fsdpc_py_callback_leave(&state, status);
}

static void
release(void *context)
{
    channel *to = context;
    if (fsdpc_py_finalizing()) {
        return; /* a deliberate leak: Python may not be called while the interpreter ends */
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(to->callable);
    PyGILState_Release(gil);
    fsdpc_mem_free(to);
}

/* The arguments of nccl(). */
typedef struct request {
    int32_t rank, world, device;
    PyObject *id, *reduce_id, *exchange;
    const char *name;
    double timeout;
    bool registers;
} request;

static int
check_id(PyObject *id, const char *name)
{
    if (!PyBytes_Check(id) || PyBytes_GET_SIZE(id) != FSDPC_COMM_NCCL_ID_BYTES) {
        PyErr_Format(PyExc_ValueError, "%s must be the %d bytes of nccl_id()", name,
                     (int)FSDPC_COMM_NCCL_ID_BYTES);
        return -1;
    }
    return 0;
}

static int
read_request(PyObject *const *values, Py_ssize_t count, PyObject *keywords, request *out)
{
    const fsdpc_py_arg table[] = {
        {"rank", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &out->rank},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &out->world},
        {"id", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &out->id},
        {"reduce_id", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &out->reduce_id},
        {"device", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &out->device},
        {"name", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &out->name},
        {"timeout", FSDPC_PY_DOUBLE, FSDPC_PY_OPTIONAL, &out->timeout},
        {"exchange", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &out->exchange},
        {"register", FSDPC_PY_BOOL, FSDPC_PY_KEYWORD, &out->registers},
    };
    if (fsdpc_py_args("nccl", table, 9, values, count, keywords) < 0 ||
        check_id(out->id, "id") < 0 || check_id(out->reduce_id, "reduce_id") < 0) {
        return -1;
    }
    if (out->exchange != Py_None && !PyCallable_Check(out->exchange)) {
        PyErr_SetString(PyExc_TypeError, "exchange must be callable or None");
        return -1;
    }
    return 0;
}

static int
set_channel(PyObject *callable, int world, fsdpc_comm_nccl_options *options)
{
    if (callable == Py_None) {
        return 0;
    }
    channel *to = fsdpc_mem_calloc(1, sizeof *to);
    if (to == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    to->callable = Py_NewRef(callable);
    to->world = world;
    options->exchange = exchange;
    options->context = to;
    options->release = release;
    return 0;
}

/* Makes the communicator and its twin, a second communicator for reductions. Called without the GIL. Takes
 * over the options' context, even on failure. */
static int
make(const request *from, const fsdpc_comm_nccl_options *options, const char *const ids[2],
     fsdpc_comm **out)
{
    int status = FSDPC_OK;
    fsdpc_device *device = NULL;
    fsdpc_comm *comm = NULL, *twin = NULL;
    char name[64];
    /* The first communicator owns the channel and outlives the second. */
    fsdpc_comm_nccl_options second = *options;
    second.name = name;
    second.release = NULL;
    status = fsdpc_device_cuda(from->device, &device);
    if (status != FSDPC_OK) {
        if (options->release) {
            options->release(options->context);
        }
        return status;
    }
    snprintf(name, sizeof name, "%.40s, reductions", options->name);
    FSDPC_TRY(fsdpc_comm_nccl(device, from->rank, from->world, ids[0], options, &comm));
    FSDPC_GOTO(fsdpc_comm_nccl(device, from->rank, from->world, ids[1], &second, &twin), fail);
    fsdpc_comm_set_twin(comm, twin);
    *out = comm;
    return FSDPC_OK;
fail:
    fsdpc_comm_free(comm);
    return status;
}

PyObject *
fsdpc_py_comm_nccl(PyObject *type, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    request from = {.name = "", .timeout = FSDPC_DEFAULT_TIMEOUT_S, .exchange = Py_None};
    fsdpc_comm *comm = NULL;
    if (read_request(values, count, keywords, &from) < 0) {
        return NULL;
    }
    fsdpc_comm_nccl_options options = {.timeout_s = from.timeout,
                                       .registers = from.registers,
                                       .name = from.name[0] ? from.name : "nccl"};
    const char *const ids[2] = {PyBytes_AS_STRING(from.id), PyBytes_AS_STRING(from.reduce_id)};
    if (set_channel(from.exchange, from.world, &options) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(make(&from, &options, ids, &comm));
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return fsdpc_py_comm_wrap(type, comm, from.exchange == Py_None ? NULL : from.exchange);
}

static PyObject *
nccl_id(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    char id[FSDPC_COMM_NCCL_ID_BYTES];
    int status = FSDPC_PY_UNLOCKED(fsdpc_comm_nccl_id(id));
    return status == FSDPC_OK ? PyBytes_FromStringAndSize(id, sizeof id) : fsdpc_py_raise(status);
}

static PyObject *
nccl_version(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    char text[512];
    int status = FSDPC_PY_UNLOCKED(fsdpc_comm_nccl_describe(text, sizeof text));
    return status == FSDPC_OK ? PyUnicode_FromString(text) : fsdpc_py_raise(status);
}

/* Returns the communicator of `object`, or NULL with an exception if it is not a communicator over NCCL. */
static fsdpc_comm *
nccl_of(PyObject *object)
{
    fsdpc_comm *comm = NULL;
    if (fsdpc_py_comm_get(object, &comm) < 0) {
        return NULL;
    }
    if (!fsdpc_comm_is_nccl(comm)) {
        PyErr_Format(PyExc_ValueError, "a communicator of kind \"nccl\" is needed, not \"%s\"",
                     fsdpc_comm_kind(comm));
        return NULL;
    }
    return comm;
}

static PyObject *
nccl_stall(PyObject *Py_UNUSED(module), PyObject *object)
{
    char text[512];
    fsdpc_comm *comm = nccl_of(object);
    return comm ? Py_BuildValue("(ds)", fsdpc_comm_nccl_stall(comm, text, sizeof text), text)
                : NULL;
}

static PyObject *
nccl_note_others(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *object;
    const char *text;
    if (!PyArg_ParseTuple(arguments, "Os:nccl_note_others", &object, &text)) {
        return NULL;
    }
    fsdpc_comm *comm = nccl_of(object);
    if (comm == NULL) {
        return NULL;
    }
    fsdpc_comm_nccl_note_others(comm, text);
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_nccl_methods[] = {
    FSDPC_PY_FUNCTION(nccl_stall, METH_O, "(comm)",
                      "(seconds, text) of a communicator of kind \"nccl\": for how long its\n"
                      "oldest collective has been in flight (0.0: none is), and its name, or that\n"
                      "of the last one that ended. Local."),
    FSDPC_PY_FUNCTION(nccl_note_others, METH_VARARGS, "(comm, text)",
                      "Sets the text about the other ranks that is quoted when a deadline of\n"
                      "`comm` passes; '' removes the text. Local."),
    FSDPC_PY_FUNCTION(nccl_id, METH_NOARGS, "()",
                      "A new id for Comm.nccl(), to be made on one rank and sent to the others.\n"
                      "NotImplementedError where there is no NCCL, or NCCL is older than 2.18."),
    FSDPC_PY_FUNCTION(nccl_version, METH_NOARGS, "()",
                      "Which NCCL is used: 'NCCL 2.28.3 (/path/libnccl.so.2)'."),
    {NULL, NULL, 0, NULL},
};
