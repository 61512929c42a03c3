/* Functions for reports of stalls. They open the board (base/board.h), which shows other processes what this
 * process waits for, and set the Python object whose methods a wait in shared memory calls. */
#include <string.h>

#include "base/board.h"
#include "base/deadline.h"
#include "base/mem.h"
#include "base/status.h"
#include "py/comm/py_comm.h"

/* --- what waits call ------------------------------------------------------------------------- */

static fsdpc_shm_reports reports;

/* Handles an exception of a report. The exception must not replace the error or end the wait that the report
 * is about, so it is written as an unraisable exception. Ctrl-C during a report is meant for the program: the
 * signal is set again, and the wait raises KeyboardInterrupt. Returns `result`. */
static PyObject *
consumed(PyObject *result, const char *method)
{
    if (result == NULL && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        PyErr_SetInterrupt();
    } else if (result == NULL) {
        PyObject *where = PyUnicode_FromString(method);
        PyErr_WriteUnraisable(where);
        Py_XDECREF(where);
    }
    return result;
}

static void
linger(const char *group)
{
    fsdpc_py_entered state;
    if (fsdpc_py_callback_enter(&state) != FSDPC_OK) {
        return;
    }
    PyObject *object = fsdpc_py_current() ? fsdpc_py_current()->stalls : NULL;
    if (object != NULL) {
        Py_XDECREF(consumed(PyObject_CallMethod(object, "linger", "s", group), "linger"));
    }
    fsdpc_py_callback_leave(&state, FSDPC_OK);
}

static PyObject *
number_at(const void *values, Py_ssize_t number)
{
    return PyLong_FromLong(((const int *)values)[number]);
}

/* Reads a verdict: a tuple (ranks that caused the stall, text). Returns false if `found` is no such tuple. */
static bool
read_verdict(PyObject *found, int *causes, int *count, char *text, size_t bytes)
{
    PyObject *list = NULL;
    const char *report = NULL;
    if (!PyTuple_Check(found) || !PyArg_ParseTuple(found, "O!s", &PyList_Type, &list, &report)) {
        PyErr_Clear();
        return false;
    }
    int kept = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && kept < FSDPC_SHM_MAX_RANKS; i++) {
        causes[kept++] = (int)PyLong_AsLong(PyList_GET_ITEM(list, i));
    }
    PyErr_Clear();
    *count = kept;
    const int written = snprintf(text, bytes, "%s", report);
    return written >= 0;
}

static bool
verdict(const char *group, bool gives_up, int *causes, int *count, char *text, size_t bytes)
{
    fsdpc_py_entered state;
    fsdpc_kept_error kept;
    bool known = false;
    fsdpc_error_keep(&kept);
    if (fsdpc_py_callback_enter(&state) == FSDPC_OK) {
        PyObject *object = fsdpc_py_current() ? fsdpc_py_current()->stalls : NULL;
        PyObject *late = object ? fsdpc_py_list(*count, number_at, causes) : NULL;
        PyObject *found = late ? consumed(PyObject_CallMethod(object, "verdict", "sOO", group,
                                                              gives_up ? Py_True : Py_False, late),
                                          "verdict")
                               : NULL;
        known = found != NULL && read_verdict(found, causes, count, text, bytes);
        Py_XDECREF(found);
        Py_XDECREF(late);
        PyErr_Clear();
        fsdpc_py_callback_leave(&state, FSDPC_OK);
    }
    fsdpc_error_restore(&kept);
    return known;
}

/* --- functions ------------------------------------------------------------------------------- */

static PyObject *
set_stalls(PyObject *module, PyObject *args)
{
    double seconds;
    PyObject *object;
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (!PyArg_ParseTuple(args, "dO:set_stalls", &seconds, &object)) {
        return NULL;
    }
    if (!(seconds > 0)) {
        return PyErr_Format(PyExc_ValueError, "set_stalls: the seconds must be above 0");
    }
    Py_XSETREF(state->stalls, Py_NewRef(object));
    reports = (fsdpc_shm_reports){.after_s = seconds, .linger = linger, .verdict = verdict};
    fsdpc_shm_reporter = &reports;
    Py_RETURN_NONE;
}

static PyObject *
board_open(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    int fd, signal_number;
    const int status = fsdpc_board_open(&fd, &signal_number);
    return status == FSDPC_OK ? Py_BuildValue("(ii)", fd, signal_number) : fsdpc_py_raise(status);
}

static PyObject *
board_begin(PyObject *Py_UNUSED(module), PyObject *what)
{
    const char *text = PyUnicode_AsUTF8(what);
    if (text == NULL) {
        return NULL;
    }
    fsdpc_board_begin(text, NULL, NULL);
    Py_RETURN_NONE;
}

static PyObject *
board_end(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    fsdpc_board_end();
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_py_stall_methods[] = {
    FSDPC_PY_FUNCTION(
        set_stalls, METH_VARARGS, "(seconds, reports, /)",
        "What waits over shared memory call: reports.linger(group) about once a second when a\n"
        "wait has lasted so long, and reports.verdict(group, gives_up, causes) at its deadline,\n"
        "which returns (causes, text) or None. Process wide."),
    FSDPC_PY_FUNCTION(board_open, METH_NOARGS, "()",
                      "(descriptor, signal) of this process's board, opened once: the page in\n"
                      "which other processes read what this one waits for, and the signal that\n"
                      "asks for its Python line (0: none is free)."),
    FSDPC_PY_FUNCTION(board_begin, METH_O, "(what, /)",
                      "Shows a wait for other ranks on the board, until board_end()."),
    FSDPC_PY_FUNCTION(board_end, METH_NOARGS, "()", "Ends board_begin()."),
    {NULL, NULL, 0, NULL},
};
