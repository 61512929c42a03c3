/* Finding the tensors in what a forward is given and gives back, and the autograd nodes behind them.
 */
#include "py_engine.h"

static int
walk_dataclass(fsdpc_py_tree *tree, PyObject *value, PyObject *fields, fsdpc_py_visit visit,
               void *argument, int depth)
{
    int found = 0;
    Py_ssize_t position = 0;
    PyObject *key, *field;
    while (found >= 0 && PyDict_Check(fields) && PyDict_Next(fields, &position, &key, &field)) {
        PyObject *item = PyObject_GetAttr(value, key);
        if (!item) {
            PyErr_Clear(); /* a field without a value yet */
            continue;
        }
        int one = fsdpc_py_walk(tree, item, visit, argument, depth + 1);
        Py_DECREF(item);
        found = one < 0 ? -1 : found | one;
    }
    return found;
}

static int
walk_items(fsdpc_py_tree *tree, PyObject *sequence, fsdpc_py_visit visit, void *argument, int depth)
{
    int found = 0;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    for (Py_ssize_t i = 0; found >= 0 && i < count; i++) {
        int one =
            fsdpc_py_walk(tree, PySequence_Fast_GET_ITEM(sequence, i), visit, argument, depth + 1);
        found = one < 0 ? -1 : found | one;
    }
    return found;
}

static int
walk_other(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument, int depth)
{
    PyObject *list = NULL;
    int found = 0;
    if (PyDict_Check(value)) {
        list = PyDict_Values(value);
    } else if (PyAnySet_Check(value)) {
        list = PySequence_List(value);
    } else {
        PyObject *fields =
            PyObject_GetAttr((PyObject *)Py_TYPE(value), fsdpc_py_name.dataclass_fields);
        if (!fields) {
            PyErr_Clear();
            return 0;
        }
        found = walk_dataclass(tree, value, fields, visit, argument, depth);
        Py_DECREF(fields);
        return found;
    }
    if (!list) {
        return -1;
    }
    found = walk_items(tree, list, visit, argument, depth);
    Py_DECREF(list);
    return found;
}

/* Calls `visit` for every tensor in nested tuples, lists, dicts, sets and dataclasses; 1 if any
 * call gave 1, 0 if none, -1 with an exception. */
int
fsdpc_py_walk(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == tree->tensor_type || type == tree->param_type ||
        PyType_IsSubtype(type, tree->tensor_type)) {
        return visit(tree, value, argument);
    }
    if (value == Py_None || PyLong_Check(value) || PyUnicode_Check(value) || PyFloat_Check(value) ||
        depth > 64) {
        return 0;
    }
    if (PyTuple_Check(value) || PyList_Check(value)) {
        return walk_items(tree, value, visit, argument, depth);
    }
    return walk_other(tree, value, visit, argument, depth);
}

/* The dictionary of a tensor's own hooks, as torch makes it for Tensor.register_hook, with
 * `argument` as key and value: a third of the time of a pre-hook on the node, whose registration
 * goes through Python. 1 if it was put there, 0 if the tensor has a dictionary already. */
static int
put_hook_dict(PyObject *tensor, PyObject *node, PyObject *argument)
{
    PyObject *dict = PyObject_GetAttr(tensor, fsdpc_py_name.backward_hooks);
    if (!dict || dict != Py_None) {
        Py_XDECREF(dict);
        return dict ? 0 : -1;
    }
    Py_DECREF(dict);
    dict = PyODict_New();
    int result = -1;
    if (dict && PyODict_SetItem(dict, argument, argument) == 0 &&
        PyObject_SetAttr(tensor, fsdpc_py_name.backward_hooks, dict) == 0) {
        PyObject *done = PyObject_CallMethodOneArg(node, fsdpc_py_name.register_hook_dict, tensor);
        result = done ? 1 : -1;
        Py_XDECREF(done);
    }
    Py_XDECREF(dict);
    return result;
}

/* Registers `argument` on the autograd node that made the tensor. */
int
fsdpc_py_watch_node(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    (void)tree;
    PyObject *node = PyObject_GetAttr(tensor, fsdpc_py_name.grad_fn);
    if (!node || node == Py_None) {
        Py_XDECREF(node);
        return node ? 0 : -1;
    }
    int put = put_hook_dict(tensor, node, argument);
    if (put == 0) {
        PyObject *handle =
            PyObject_CallMethodOneArg(node, fsdpc_py_name.register_prehook, argument);
        put = handle ? 1 : -1;
        Py_XDECREF(handle);
    }
    Py_DECREF(node);
    return put;
}

/* The number of the autograd node behind a tensor: later nodes have larger ones. -1: no node. */
static int
node_number(PyObject *tensor, long long *out)
{
    *out = -1;
    PyObject *node = PyObject_GetAttr(tensor, fsdpc_py_name.grad_fn);
    if (!node || node == Py_None) {
        Py_XDECREF(node);
        return node ? 0 : -1;
    }
    PyObject *number = PyObject_CallMethodNoArgs(node, fsdpc_py_name.sequence);
    Py_DECREF(node);
    if (number) {
        *out = PyLong_AsLongLong(number);
        Py_DECREF(number);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Raises *argument (long long) to the newest node among the tensors. */
static int
newest_node(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    (void)tree;
    long long number, *newest = argument;
    if (node_number(tensor, &number) < 0) {
        return -1;
    }
    *newest = number > *newest ? number : *newest;
    return 0;
}

/* An operation in place on an output that is a view takes the view's node out of the graph; the
 * node of what it is a view of stays. It is watched too, unless it is older than the inputs: then
 * the unit has only passed a view of them on. */
static int
hook_base(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    PyObject *base = PyObject_GetAttr(tensor, fsdpc_py_name.base);
    if (!base || base == Py_None) {
        Py_XDECREF(base);
        return base ? 0 : -1;
    }
    long long newest = -1, own;
    int result = fsdpc_py_walk(tree, tree->inputs, newest_node, &newest, 0);
    if (result >= 0) {
        result = node_number(base, &own);
    }
    if (result >= 0 && own > newest) {
        result = fsdpc_py_watch_node(tree, base, argument);
    }
    Py_DECREF(base);
    return result;
}

int
fsdpc_py_watch_output(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    int hooked = fsdpc_py_watch_node(tree, tensor, argument);
    if (hooked <= 0) {
        return hooked;
    }
    PyObject *view = PyObject_CallMethodNoArgs(tensor, fsdpc_py_name.is_view);
    if (!view) {
        return -1;
    }
    Py_DECREF(view);
    return view == Py_True && hook_base(tree, tensor, argument) < 0 ? -1 : 1;
}
