/* The argument parser of all functions of the extension; helpers for lists and attributes.
 *
 * The parser reads a table with the name, the kind and the target of each argument. A target is the address
 * of a variable of the caller. The table is on the caller's stack, so parsing allocates nothing. Error
 * messages are worded like CPython's. */
#include <string.h>

#include "py/base/py.h"

enum { MAX_ARGS = 16 };

static int
bad_type(const char *function, const fsdpc_py_arg *arg, const char *wanted, PyObject *value)
{
    PyErr_Format(PyExc_TypeError, "%.200s() argument '%.100s' must be %s, not %.100s", function,
                 arg->name, wanted, value == Py_None ? "None" : Py_TYPE(value)->tp_name);
    return -1;
}

/* Reads the value of an integer argument, which must be within [low, high]. */
static int
parse_int(const char *function, const fsdpc_py_arg *arg, PyObject *value, int64_t low, int64_t high,
          int64_t *out)
{
    if (!PyIndex_Check(value)) {
        return bad_type(function, arg, "int", value);
    }
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (number == -1 && overflow == 0 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0 || number < low || number > high) {
        bool below = overflow < 0 || number < low;
        PyErr_Format(PyExc_OverflowError, "%.200s() argument '%.100s' is %s (%lld)", function,
                     arg->name, below ? "less than minimum" : "greater than maximum",
                     (long long)(below ? low : high));
        return -1;
    }
    *out = number;
    return 0;
}

static int
parse_str(const char *function, const fsdpc_py_arg *arg, PyObject *value, const char **out)
{
    if (!PyUnicode_Check(value)) {
        const char *wanted = arg->kind == FSDPC_PY_STR ? "str" : "str or None";
        return bad_type(function, arg, wanted, value);
    }
    Py_ssize_t bytes = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &bytes);
    if (text == NULL) {
        return -1;
    }
    if (strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "%.200s() argument '%.100s': embedded null character",
                     function, arg->name);
        return -1;
    }
    *out = text;
    return 0;
}

static int
parse_double(const char *function, const fsdpc_py_arg *arg, PyObject *value, double *out)
{
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return bad_type(function, arg, "float", value);
    }
    *out = number;
    return 0;
}

static int
parse_bool(PyObject *value, bool *out)
{
    int truth = PyObject_IsTrue(value);
    if (truth < 0) {
        return -1;
    }
    *out = truth != 0;
    return 0;
}

static int
parse_number(const char *function, const fsdpc_py_arg *arg, PyObject *value)
{
    int64_t low = INT64_MIN;
    int64_t high = INT64_MAX;
    if (arg->kind == FSDPC_PY_INT32) {
        low = INT32_MIN;
        high = INT32_MAX;
    }
    if (arg->kind == FSDPC_PY_SIZE) {
        low = 0;
    }
    int64_t number = 0;
    if (parse_int(function, arg, value, low, high, &number) < 0) {
        return -1;
    }
    if (arg->kind == FSDPC_PY_INT32) {
        *(int32_t *)arg->out = (int32_t)number;
    } else if (arg->kind == FSDPC_PY_SIZE) {
        *(size_t *)arg->out = (size_t)number;
    } else {
        *(int64_t *)arg->out = number;
    }
    return 0;
}

static int
parse_value(const char *function, const fsdpc_py_arg *arg, PyObject *value)
{
    switch (arg->kind) {
    case FSDPC_PY_DOUBLE:
        return parse_double(function, arg, value, arg->out);
    case FSDPC_PY_BOOL:
        return parse_bool(value, arg->out);
    case FSDPC_PY_STR:
        return parse_str(function, arg, value, arg->out);
    case FSDPC_PY_STR_OR_NONE:
        if (value == Py_None) {
            *(const char **)arg->out = NULL;
            return 0;
        }
        return parse_str(function, arg, value, arg->out);
    case FSDPC_PY_OBJECT:
        *(PyObject **)arg->out = value;
        return 0;
    default:
        return parse_number(function, arg, value);
    }
}

static int
find_name(const fsdpc_py_arg *table, int count, PyObject *name)
{
    for (int i = 0; i < count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, table[i].name) == 0) {
            return i;
        }
    }
    return -1;
}

static int
too_many(const char *function, const fsdpc_py_arg *table, int limit, Py_ssize_t given)
{
    bool exact = limit == 0 || table[limit - 1].need == FSDPC_PY_REQUIRED;
    PyErr_Format(PyExc_TypeError, "%.200s() takes %s %d positional argument%s (%zd given)",
                 function, exact ? "exactly" : "at most", limit, limit == 1 ? "" : "s", given);
    return -1;
}

/* Sets found[i] to the keyword argument that row i of the table names. */
static int
place_keywords(const char *function, const fsdpc_py_arg *table, int count, PyObject *const *values,
               PyObject *keywords, PyObject **found)
{
    Py_ssize_t given = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < given; i++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, i);
        int at = find_name(table, count, name);
        if (at < 0) {
            PyErr_Format(PyExc_TypeError, "%.200s() got an unexpected keyword argument '%U'",
                         function, name);
            return -1;
        }
        if (found[at] != NULL) {
            PyErr_Format(PyExc_TypeError, "%.200s() got multiple values for argument '%U'",
                         function, name);
            return -1;
        }
        found[at] = values[i];
    }
    return 0;
}

int
fsdpc_py_args(const char *function, const fsdpc_py_arg *table, int count, PyObject *const *values,
              Py_ssize_t positional, PyObject *keywords)
{
    PyObject *found[MAX_ARGS] = {NULL};
    if (count > MAX_ARGS) {
        PyErr_Format(PyExc_SystemError, "%.200s() has more than %d arguments", function, MAX_ARGS);
        return -1;
    }
    int limit = count;
    while (limit > 0 && table[limit - 1].need == FSDPC_PY_KEYWORD) {
        limit--;
    }
    if (positional > limit) {
        return too_many(function, table, limit, positional);
    }
    for (Py_ssize_t i = 0; i < positional; i++) {
        found[i] = values[i];
    }
    if (place_keywords(function, table, count, values + positional, keywords, found) < 0) {
        return -1;
    }
    for (int i = 0; i < count; i++) {
        if (found[i] == NULL && table[i].need == FSDPC_PY_REQUIRED) {
            PyErr_Format(PyExc_TypeError, "%.200s() missing required argument '%s' (pos %d)",
                         function, table[i].name, i + 1);
            return -1;
        }
        if (found[i] != NULL && parse_value(function, &table[i], found[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
fsdpc_py_list(Py_ssize_t count, PyObject *(*item)(const void *context, Py_ssize_t number),
              const void *context)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *made = item(context, i);
        if (made == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, made);
        }
    }
    return list;
}

PyObject *
fsdpc_py_get_member(PyObject *self, void *offset)
{
    PyObject *now = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(now ? now : Py_None);
}

int
fsdpc_py_set_member(PyObject *self, PyObject *value, void *offset)
{
    Py_XSETREF(*(PyObject **)((char *)self + (size_t)offset),
               value && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}
