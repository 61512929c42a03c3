/* The callbacks of a "c10d" communicator, which call collectives as methods of a Python object.
 *
 * The core calls these functions with the GIL released or held. They take the GIL, wrap the memory as a NumPy
 * array of bytes that is valid only during the call, and call the method. An exception that the method raises
 * stays set in this thread and ends the collective with FSDPC_E_COMM; when that status reaches
 * Python, fsdpc_py_raise makes the exception its cause (or keeps it, for KeyboardInterrupt).
 *
 * Methods: all_gather(array, piece_bytes, what), reduce_scatter(array, piece_numel, dtype, what),
 * all_reduce(array, numel, dtype, op, what), broadcast(array, root, what), barrier(what). An object whose
 * attribute `flies` is true also has post([(array, peer, send)], tag, what) -> transfers. The arrays stay
 * valid until land(transfers, skip, what) returns: land does not wait for ranks r with skip[r] (skip None: it
 * waits for all). After give_up(transfers) the arrays stay valid for ever.
 */
#include <string.h>

#include "base/mem.h"
#include "py/comm/py_comm.h"
#include "py/base/py_numpy.h"

static const char *const op_names[] = {"sum", "max", "min"};

typedef struct target {
    PyObject *object;
    int world;
} target;

/* Returns the status of a method call, and drops the call's result or reads its exception. */
static int
finish(PyObject *result, const char *method, const char *what)
{
    if (result != NULL) {
        Py_DECREF(result);
        return FSDPC_OK;
    }
    char text[512], table[FSDPC_ERROR_BYTES - 1024];
    fsdpc_py_exception_text(text, sizeof text);
    fsdpc_py_exception_note(table, sizeof table);
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return fsdpc_error(FSDPC_E_INTERRUPT, "%s of %s: %s", method, what, text);
    }
    const int status = fsdpc_py_status_of_exception();
    if (status != FSDPC_E_COMM) {             /* fsdpc's own error, which says what failed */
        const char *own = strstr(text, ": "); /* after the class name */
        return fsdpc_error(status, "%s%s", own ? own + 2 : text, table);
    }
    if (what[0] == '\0' || strcmp(what, method) == 0) {
        return fsdpc_error(FSDPC_E_COMM, "%s: %s%s", method, text, table);
    }
    return fsdpc_error(FSDPC_E_COMM, "%s for %s: %s%s", method, what, text, table);
}

/* Returns the memory as a NumPy array, or NULL with an exception set. */
static PyObject *
wrap(void *buffer, size_t bytes)
{
    npy_intp length = (npy_intp)bytes;
    return PyArray_SimpleNewFromData(1, &length, NPY_UINT8, buffer);
}

/* Calls object.method(array, *rest). `rest` is a new reference to a tuple, or NULL after an error. */
static int
call(const target *to, const char *method, void *buffer, size_t bytes, PyObject *rest,
     const char *what)
{
    PyObject *array = rest == NULL ? NULL : wrap(buffer, bytes);
    PyObject *head = array == NULL ? NULL : PyTuple_Pack(1, array);
    PyObject *args = head == NULL ? NULL : PySequence_Concat(head, rest);
    PyObject *bound = args == NULL ? NULL : PyObject_GetAttrString(to->object, method);
    PyObject *result = bound == NULL ? NULL : PyObject_CallObject(bound, args);
    int status = finish(result, method, what);
    Py_XDECREF(bound);
    Py_XDECREF(args);
    Py_XDECREF(head);
    Py_XDECREF(array);
    Py_XDECREF(rest);
    return status;
}

static int
all_gather(void *context, void *buffer, size_t piece_bytes, const char *what)
{
    const target *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *rest = Py_BuildValue("(ns)", (Py_ssize_t)piece_bytes, what);
    size_t bytes = piece_bytes * (size_t)to->world;
    return fsdpc_py_callback_leave(&state, call(to, "all_gather", buffer, bytes, rest, what));
}

static int
reduce_scatter(void *context, void *buffer, int64_t piece_numel, fsdpc_dtype dtype,
               const char *what)
{
    const target *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *rest = Py_BuildValue("(Lss)", (long long)piece_numel, fsdpc_dtype_name(dtype), what);
    size_t bytes = (size_t)piece_numel * fsdpc_dtype_bytes(dtype) * (size_t)to->world;
    return fsdpc_py_callback_leave(&state, call(to, "reduce_scatter", buffer, bytes, rest, what));
}

static int
all_reduce(void *context, void *buffer, int64_t numel, fsdpc_dtype dtype, enum fsdpc_op op,
           const char *what)
{
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *rest =
        Py_BuildValue("(Lsss)", (long long)numel, fsdpc_dtype_name(dtype), op_names[op], what);
    size_t bytes = (size_t)numel * fsdpc_dtype_bytes(dtype);
    return fsdpc_py_callback_leave(&state, call(context, "all_reduce", buffer, bytes, rest, what));
}

static int
broadcast(void *context, void *buffer, size_t bytes, int root, const char *what)
{
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *rest = Py_BuildValue("(is)", root, what);
    return fsdpc_py_callback_leave(&state, call(context, "broadcast", buffer, bytes, rest, what));
}

static int
barrier(void *context, const char *what)
{
    const target *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *result = PyObject_CallMethod(to->object, "barrier", "s", what);
    return fsdpc_py_callback_leave(&state, finish(result, "barrier", what));
}

/* --- transfers in the background ----------------------------------------------------------------- */

/* Returns the list [(array, peer, send)], or NULL with an exception set. */
static PyObject *
list_moves(const fsdpc_comm_move *moves, int count)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *array = wrap(moves[i].memory, moves[i].bytes);
        PyObject *move = array == NULL ? NULL
                                       : Py_BuildValue("(NiO)", array, moves[i].peer,
                                                       moves[i].send ? Py_True : Py_False);
        if (move == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, move);
        }
    }
    return list;
}

static int
post(void *context, const fsdpc_comm_move *moves, int count, uint32_t tag, const char *what,
     void **transfers)
{
    const target *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *list = list_moves(moves, count);
    PyObject *result =
        list == NULL ? NULL : PyObject_CallMethod(to->object, "post", "OIs", list, tag, what);
    Py_XDECREF(list);
    *transfers = Py_XNewRef(result);
    return fsdpc_py_callback_leave(&state, finish(result, "post", what));
}

static int
land(void *context, void *transfers, const bool *skip, const char *what)
{
    const target *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *result =
        PyObject_CallMethod(to->object, "land", "Oy#s", transfers, (const char *)skip,
                            (Py_ssize_t)(skip ? to->world : 0), what);
    int status = finish(result, "land", what);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_DECREF((PyObject *)transfers);
    PyErr_Restore(type, value, trace);
    return fsdpc_py_callback_leave(&state, status);
}

static void
drop(void *context, void *transfers)
{
    const target *to = context;
    if (fsdpc_py_finalizing()) {
        return;
    }
    PyObject *type, *value, *trace;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallMethod(to->object, "give_up", "O", transfers);
    if (result == NULL) {
        PyErr_WriteUnraisable(to->object);
    } else {
        Py_DECREF((PyObject *)transfers); /* if give_up failed, the transfers are leaked */
        Py_DECREF(result);
    }
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

static void
release(void *context)
{
    target *to = context;
    if (fsdpc_py_finalizing()) {
        return; /* leaked on purpose: Python may not be called any more */
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(to->object);
    PyGILState_Release(gil);
    fsdpc_mem_free(to);
}

/* Returns 1 if the object's attribute `flies` is true, 0 if not, or -1 with an exception set. */
static int
can_fly(PyObject *object)
{
    PyObject *flies = PyObject_GetAttrString(object, "flies");
    int result = flies == NULL ? -1 : PyObject_IsTrue(flies);
    Py_XDECREF(flies);
    if (result < 0 && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    return result;
}

int
fsdpc_py_c10d_callbacks(PyObject *object, int world, fsdpc_comm_callbacks *out)
{
    const int flies = can_fly(object);
    if (flies < 0) {
        return -1;
    }
    target *to = fsdpc_mem_calloc(1, sizeof *to);
    if (to == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    to->object = Py_NewRef(object);
    to->world = world;
    *out = (fsdpc_comm_callbacks){
        .context = to,
        .all_gather = all_gather,
        .reduce_scatter = reduce_scatter,
        .all_reduce = all_reduce,
        .broadcast = broadcast,
        .barrier = barrier,
        .post = flies ? post : NULL,
        .land = flies ? land : NULL,
        .drop = flies ? drop : NULL,
        .release = release,
    };
    return 0;
}
