/* Conversion of a status of the core to a Python exception.
 *
 * The class comes from the status. The message is the thread's error text, in which the core says what failed
 * and what can be done. An OSError gets its errno, so that Python picks the subclass.
 */
#include <string.h>

#include "py/base/py.h"

/* Returns the exception class for a status. The reference is borrowed. */
static PyObject *
exception_class(int status)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    if (state == NULL) {
        return PyExc_RuntimeError;
    }
    switch (status) {
    case FSDPC_E_INVAL:
        return PyExc_ValueError;
    case FSDPC_E_TYPE:
        return PyExc_TypeError;
    case FSDPC_E_NOMEM:
        return PyExc_MemoryError;
    case FSDPC_E_DEVMEM:
        return state->out_of_memory_error;
    case FSDPC_E_STATE:
        return state->state_error;
    case FSDPC_E_COMM:
        return state->comm_error;
    case FSDPC_E_PEER:
        return state->peer_error;
    case FSDPC_E_TIMEOUT:
        return state->comm_timeout;
    case FSDPC_E_MISMATCH:
        return state->mismatch_error;
    case FSDPC_E_IO:
        return PyExc_OSError;
    case FSDPC_E_UNAVAILABLE:
        return PyExc_NotImplementedError;
    case FSDPC_E_INTERRUPT:
        return PyExc_KeyboardInterrupt;
    default:
        return PyExc_RuntimeError;
    }
}

/* Returns the class of the new exception. An out-of-memory error of another allocator keeps that allocator's
 * class, which the allocator's users catch. */
static PyObject *
class_for(int status, PyObject *cause)
{
    const char *name = cause == NULL ? "" : Py_TYPE(cause)->tp_name;
    const char *dot = strrchr(name, '.');
    bool same = status == FSDPC_E_DEVMEM && strcmp(dot ? dot + 1 : name, "OutOfMemoryError") == 0;
    return same ? (PyObject *)Py_TYPE(cause) : exception_class(status);
}

static PyObject *
make_exception(int status, PyObject *cause)
{
    const char *text = fsdpc_error_text();
    if (text[0] == '\0') {
        text = fsdpc_status_text(status);
    }
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message == NULL) {
        return NULL;
    }
    PyObject *class = class_for(status, cause);
    PyObject *made = NULL;
    if (status == FSDPC_E_IO && fsdpc_error_errnum() != 0) {
        made = PyObject_CallFunction(class, "iO", fsdpc_error_errnum(), message);
    } else {
        made = PyObject_CallOneArg(class, message);
    }
    Py_DECREF(message);
    return made;
}

/* Returns the exception that is set, normalised, and clears it. NULL if no exception is set. */
static PyObject *
take_exception(void)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    if (type == NULL) {
        return NULL;
    }
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(trace);
    Py_DECREF(type);
    return value;
}

int
fsdpc_py_status_of_exception(void)
{
    const fsdpc_py_module_state *state = fsdpc_py_current();
    if (state != NULL && PyErr_ExceptionMatches(state->comm_timeout)) {
        return FSDPC_E_TIMEOUT;
    }
    return state != NULL && PyErr_ExceptionMatches(state->peer_error) ? FSDPC_E_PEER : FSDPC_E_COMM;
}

PyObject *
fsdpc_py_raise(int status)
{
    if (PyErr_Occurred() != NULL &&
        (status == FSDPC_E_INTERRUPT || !PyErr_ExceptionMatches(PyExc_Exception))) {
        return NULL;
    }
    PyObject *cause = take_exception();
    PyObject *raised = make_exception(status, cause);
    if (raised == NULL) {
        Py_XDECREF(cause);
        return NULL;
    }
    if (cause != NULL) {
        PyException_SetContext(raised, Py_NewRef(cause));
        PyException_SetCause(raised, cause);
    }
    PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
    Py_DECREF(raised);
    return NULL;
}

PyObject *
fsdpc_py_none_or(int status)
{
    return status == FSDPC_OK ? Py_NewRef(Py_None) : fsdpc_py_raise(status);
}

int
fsdpc_py_checked(int status)
{
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

/* Writes "ClassName: first line" of the exception `value`, or only the class name if it has no text. */
static void
copy_line(PyObject *value, char *buffer, size_t bytes)
{
    PyObject *text = PyObject_Str(value);
    const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const char *name = Py_TYPE(value)->tp_name;
    const char *dot = strrchr(name, '.');
    name = dot == NULL ? name : dot + 1;
    if (utf8 == NULL || utf8[0] == '\0') {
        snprintf(buffer, bytes, "%s", name);
    } else {
        snprintf(buffer, bytes, "%s: %.*s", name, (int)strcspn(utf8, "\n"), utf8);
    }
    PyErr_Clear();
    Py_XDECREF(text);
}

const char *
fsdpc_py_exception_text(char *buffer, size_t bytes)
{
    buffer[0] = '\0';
    PyObject *value = take_exception();
    if (value != NULL) {
        copy_line(value, buffer, bytes);
        PyErr_SetObject((PyObject *)Py_TYPE(value), value);
        Py_DECREF(value);
    }
    return buffer;
}

void
fsdpc_py_exception_note(char *buffer, size_t bytes)
{
    buffer[0] = '\0';
    PyObject *value = take_exception();
    if (value == NULL) {
        return;
    }
    PyObject *notes = PyObject_GetAttrString(value, "__notes__");
    Py_ssize_t count = notes && PyList_Check(notes) ? PyList_GET_SIZE(notes) : 0;
    const char *note = count > 0 ? PyUnicode_AsUTF8(PyList_GET_ITEM(notes, count - 1)) : NULL;
    if (note != NULL) {
        snprintf(buffer, bytes, "\n%s", note);
    }
    Py_XDECREF(notes);
    PyErr_Clear();
    PyErr_SetObject((PyObject *)Py_TYPE(value), value);
    Py_DECREF(value);
}

int
fsdpc_py_call(PyObject *callable)
{
    Py_INCREF(callable);
    PyObject *result = PyObject_CallNoArgs(callable);
    Py_DECREF(callable);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int
fsdpc_py_check_signals(void)
{
    if (fsdpc_py_finalizing()) {
        return 0;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    fsdpc_py_core_calls_python(1);
    int interrupted = PyErr_CheckSignals() < 0;
    fsdpc_py_core_calls_python(-1);
    if (interrupted) {
        char text[512];
        (void)fsdpc_error(FSDPC_E_INTERRUPT, "%s", fsdpc_py_exception_text(text, sizeof text));
    }
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
    }
    PyGILState_Release(gil);
    return interrupted;
}
