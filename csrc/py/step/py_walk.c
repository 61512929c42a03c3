/* Finds the tensors in a forward's inputs and outputs, and registers hooks on their autograd nodes.
 *
 * Containers may be nested to any depth and in cycles, and the code that `visit` calls may change a
 * container. So the walk opens every container only once, and owns a reference to each pending value.
 */
#include "py/step/py_step.h"

#include "base/mem.h"

enum { FEW = 16 };

/* A stack of owned references: pending values, or containers that the walk has opened. */
struct pile {
    PyObject *few[FEW];
    PyObject **items;
    size_t count, room;
};

struct walk {
    struct pile ahead, opened;
    PyObject *ids; /* a set of the addresses in `opened`; NULL while these are at most FEW */
};

static void
pile_init(struct pile *pile)
{
    pile->items = pile->few;
    pile->room = FEW;
    pile->count = 0;
}

static void
pile_free(struct pile *pile)
{
    while (pile->count > 0) {
        Py_DECREF(pile->items[--pile->count]);
    }
    if (pile->items != pile->few) {
        fsdpc_mem_free(pile->items);
    }
}

/* Pushes `item` and steals the reference to it, even on failure. */
static int
pile_push(struct pile *pile, PyObject *item)
{
    if (pile->count == pile->room) {
        PyObject **old = pile->items == pile->few ? NULL : pile->items;
        PyObject **grown = fsdpc_mem_realloc(old, 2 * pile->room, sizeof(PyObject *));
        if (!grown) {
            Py_DECREF(item);
            PyErr_NoMemory();
            return -1;
        }
        for (size_t i = 0; !old && i < pile->count; i++) {
            grown[i] = pile->few[i];
        }
        pile->items = grown;
        pile->room *= 2;
    }
    pile->items[pile->count++] = item;
    return 0;
}

/* --- containers that were opened ------------------------------------------------------------- */

static int
add_id(struct walk *walk, PyObject *container)
{
    PyObject *id = PyLong_FromVoidPtr(container);
    int result = id ? PySet_Add(walk->ids, id) : -1;
    Py_XDECREF(id);
    return result;
}

static int
has_id(struct walk *walk, PyObject *container)
{
    PyObject *id = PyLong_FromVoidPtr(container);
    int result = id ? PySet_Contains(walk->ids, id) : -1;
    Py_XDECREF(id);
    return result;
}

static int
make_ids(struct walk *walk)
{
    walk->ids = PySet_New(NULL);
    for (size_t i = 0; walk->ids && i < walk->opened.count; i++) {
        if (add_id(walk, walk->opened.items[i]) < 0) {
            return -1;
        }
    }
    return walk->ids ? 0 : -1;
}

/* Returns 1 if the container is opened now, 0 if it was opened before, -1 with an exception. */
static int
open_container(struct walk *walk, PyObject *container)
{
    if (!walk->ids) {
        for (size_t i = 0; i < walk->opened.count; i++) {
            if (walk->opened.items[i] == container) {
                return 0;
            }
        }
        if (walk->opened.count == FEW && make_ids(walk) < 0) {
            return -1;
        }
    } else {
        int known = has_id(walk, container);
        if (known != 0) {
            return known < 0 ? -1 : 0;
        }
    }
    if (walk->ids && add_id(walk, container) < 0) {
        return -1;
    }
    return pile_push(&walk->opened, Py_NewRef(container)) < 0 ? -1 : 1;
}

/* --- contents of containers ------------------------------------------------------------------- */

/* Items are pushed in reverse order, so that the first item is popped first. */
static int
push_items(struct walk *walk, PyObject *sequence)
{
    for (Py_ssize_t i = PySequence_Fast_GET_SIZE(sequence); i-- > 0;) {
        if (pile_push(&walk->ahead, Py_NewRef(PySequence_Fast_GET_ITEM(sequence, i))) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Pushes the items of `list`, which may be NULL with an exception, and steals the reference to `list`. */
static int
push_list(struct walk *walk, PyObject *list)
{
    int result = list ? push_items(walk, list) : -1;
    Py_XDECREF(list);
    return result;
}

static int
push_dataclass(struct walk *walk, PyObject *value, PyObject *fields)
{
    PyObject *names = PyDict_Check(fields) ? PyDict_Keys(fields) : PyList_New(0);
    int result = names ? 0 : -1;
    for (Py_ssize_t i = names ? PyList_GET_SIZE(names) : 0; result == 0 && i-- > 0;) {
        PyObject *item = PyObject_GetAttr(value, PyList_GET_ITEM(names, i));
        if (!item) {
            PyErr_Clear(); /* the field has no value yet */
            continue;
        }
        result = pile_push(&walk->ahead, item);
    }
    Py_XDECREF(names);
    return result;
}

/* Opens a value whose type is registered with torch's pytrees: see fsdpc/_engine/containers.py. */
static int
push_node(struct walk *walk, PyObject *nodes, PyObject *value)
{
    PyObject *node = PyDict_GetItemWithError(nodes, (PyObject *)Py_TYPE(value));
    if (!node) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(node);
    PyObject *parts = PyObject_CallMethodOneArg(node, fsdpc_py_name.flatten_fn, value);
    PyObject *children = parts ? PySequence_GetItem(parts, 0) : NULL;
    int result = push_list(walk, children ? PySequence_List(children) : NULL);
    Py_XDECREF(children);
    Py_XDECREF(parts);
    Py_DECREF(node);
    return result;
}

static int
push_contents(struct walk *walk, PyObject *nodes, PyObject *value)
{
    if (PyTuple_Check(value) || PyList_Check(value)) {
        return push_items(walk, value);
    }
    if (PyDict_Check(value)) {
        return push_list(walk, PyDict_Values(value));
    }
    if (PyAnySet_Check(value)) {
        return push_list(walk, PySequence_List(value));
    }
    PyObject *fields = PyObject_GetAttr((PyObject *)Py_TYPE(value), fsdpc_py_name.dataclass_fields);
    if (!fields) {
        PyErr_Clear();
        return push_node(walk, nodes, value);
    }
    int result = push_dataclass(walk, value, fields);
    Py_DECREF(fields);
    return result;
}

static bool
is_plain(PyObject *value)
{
    return value == Py_None || PyLong_Check(value) || PyUnicode_Check(value) ||
           PyFloat_Check(value) || PyBytes_Check(value);
}

int
fsdpc_py_walk(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument)
{
    if (PyObject_TypeCheck(value, (PyTypeObject *)tree->tensor_type)) {
        return visit(tree, value, argument);
    }
    struct walk walk = {.ids = NULL};
    int found = 0, one = 0;
    pile_init(&walk.ahead);
    pile_init(&walk.opened);
    if (pile_push(&walk.ahead, Py_NewRef(value)) < 0) {
        return -1;
    }
    while (found >= 0 && walk.ahead.count > 0) {
        PyObject *next = walk.ahead.items[--walk.ahead.count];
        if (PyObject_TypeCheck(next, (PyTypeObject *)tree->tensor_type)) {
            one = visit(tree, next, argument);
        } else if (is_plain(next)) {
            one = 0;
        } else {
            int first = open_container(&walk, next);
            one = first > 0 ? push_contents(&walk, tree->nodes, next) : first;
        }
        Py_DECREF(next);
        found = one < 0 ? -1 : found | one;
    }
    pile_free(&walk.ahead);
    pile_free(&walk.opened);
    Py_XDECREF(walk.ids);
    return found;
}

/* Sets `_backward_hooks` of the tensor to a dictionary with `argument` as key and value, as
 * Tensor.register_hook does. This takes a third of the time of the node's register_prehook, which is Python
 * code. Returns 1 if the dictionary was set, 0 if the tensor already has one. */
static int
put_hook_dict(PyObject *tensor, PyObject *node, PyObject *argument)
{
    PyObject *dict = fsdpc_py_field(tensor, FSDPC_PY_BACKWARD_HOOKS);
    if (!dict || dict != Py_None) {
        Py_XDECREF(dict);
        return dict ? 0 : -1;
    }
    Py_DECREF(dict);
    dict = PyODict_New();
    int result = -1;
    if (dict && PyODict_SetItem(dict, argument, argument) == 0 &&
        fsdpc_py_set_field(tensor, FSDPC_PY_BACKWARD_HOOKS, dict) == 0) {
        PyObject *done = PyObject_CallMethodOneArg(node, fsdpc_py_name.register_hook_dict, tensor);
        result = done ? 1 : -1;
        Py_XDECREF(done);
    }
    Py_XDECREF(dict);
    return result;
}

/* Registers `argument` on the autograd node that made the tensor. */
int
fsdpc_py_watch_node(fsdpc_py_tree *Py_UNUSED(tree), PyObject *tensor, void *argument)
{
    PyObject *node = fsdpc_py_field(tensor, FSDPC_PY_GRAD_FN);
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

/* Sets *out to the sequence number of the tensor's node, larger for later nodes, or to -1 without a node. */
static int
node_number(PyObject *tensor, long long *out)
{
    *out = -1;
    PyObject *node = fsdpc_py_field(tensor, FSDPC_PY_GRAD_FN);
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

/* A visitor: *argument (a long long) becomes the largest sequence number among the tensors' nodes. */
static int
newest_node(fsdpc_py_tree *Py_UNUSED(tree), PyObject *tensor, void *argument)
{
    long long number, *newest = argument;
    if (node_number(tensor, &number) < 0) {
        return -1;
    }
    *newest = number > *newest ? number : *newest;
    return 0;
}

/* An in-place operation on an output that is a view removes the view's node from the graph, but not the
 * node of the view's base. So the base's node gets the hook as well. A base whose node is older than the
 * inputs' nodes gets none: then the output is a view of an input. */
static int
hook_base(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    PyObject *base = fsdpc_py_field(tensor, FSDPC_PY_BASE);
    if (!base || base == Py_None) {
        Py_XDECREF(base);
        return base ? 0 : -1;
    }
    long long newest = -1, own;
    int result = fsdpc_py_walk(tree, tree->inputs, newest_node, &newest);
    if (result >= 0) {
        result = node_number(base, &own);
    }
    if (result >= 0 && own > newest) {
        result = fsdpc_py_watch_node(tree, base, argument);
    }
    Py_DECREF(base);
    return result;
}

/* Returns 1 if the tensor is an input that forward returned unchanged, so that its node is not the unit's. */
static int
is_input(const fsdpc_py_tree *tree, PyObject *tensor)
{
    if (!tree->input_hook) {
        return 0;
    }
    PyObject *hooks = fsdpc_py_field(tensor, FSDPC_PY_BACKWARD_HOOKS);
    int result = hooks ? 0 : -1;
    if (hooks && PyDict_Check(hooks)) {
        result = PyDict_Contains(hooks, tree->input_hook);
    }
    Py_XDECREF(hooks);
    return result;
}

int
fsdpc_py_watch_output(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    int input = is_input(tree, tensor);
    if (input != 0) {
        return input;
    }
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

static bool
contains(const fsdpc_py_flat *flat, const void *data)
{
    const char *begin = fsdpc_unit_full(flat->unit);
    const char *end = begin + fsdpc_unit_layout(flat->unit)->full_bytes;
    return !flat->foreign && (const char *)data >= begin && (const char *)data < end;
}

static int
address_lies_in(fsdpc_py_tree *Py_UNUSED(tree), PyObject *tensor, void *argument)
{
    const void *data = NULL;
    if (fsdpc_py_torch_data(tensor, &data) < 0) {
        PyErr_Clear();
        return 0;
    }
    return contains(argument, data);
}

/* A tensor without an address (meta, sparse) is not in the unit's range. A wrapper of torch.func has no
 * address either, but the tensors that it wraps may be in the unit's range. */
int
fsdpc_py_lies_in(fsdpc_py_tree *tree, PyObject *tensor, void *argument)
{
    const void *data = NULL;
    if (fsdpc_py_torch_data(tensor, &data) == 0) {
        return contains(argument, data);
    }
    PyErr_Clear();
    PyObject *inner = PyObject_CallOneArg(tree->inner_tensors, tensor);
    int found = inner ? fsdpc_py_walk(tree, inner, address_lies_in, argument) : -1;
    Py_XDECREF(inner);
    return found;
}
