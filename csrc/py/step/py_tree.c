/* fsdpc._C.Tree: the units of one root module in the order of a training step, and their recorded events. */
#include "py/step/py_step.h"

#include <string.h>

#include "base/mem.h"

/* --- life ------------------------------------------------------------------------------------ */

static int
take_units(fsdpc_py_tree *self, PyObject *units)
{
    self->units = fsdpc_mem_calloc((size_t)PyTuple_GET_SIZE(units), sizeof *self->units);
    if (!self->units) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(units); i++) {
        fsdpc_py_flat *flat;
        if (fsdpc_py_flat_get(PyTuple_GET_ITEM(units, i), &flat) < 0) {
            return -1;
        }
        for (int other = 0; other < self->count; other++) {
            if (self->units[other] == flat) {
                PyErr_Format(PyExc_ValueError, "Tree: unit %s is listed twice",
                             fsdpc_unit_name(flat->unit));
                return -1;
            }
        }
        if (flat->tree) {
            PyErr_Format(fsdpc_py_current()->state_error, "unit %s belongs to another tree",
                         fsdpc_unit_name(flat->unit));
            return -1;
        }
        if (fsdpc_py_try_flat(flat) < 0) {
            return -1;
        }
        self->units[self->count++] = (fsdpc_py_flat *)Py_NewRef(flat);
    }
    return 0;
}

/* Leaves the gates that take_units entered. */
static void
leave_units(fsdpc_py_tree *self)
{
    for (int i = 0; i < self->count; i++) {
        fsdpc_py_leave_flat(self->units[i]);
    }
}

static int
make_tree(fsdpc_py_tree *self, PyObject *depths, const fsdpc_tree_options *options)
{
    int result = -1, status;
    size_t count = (size_t)self->count;
    fsdpc_unit **units = fsdpc_mem_calloc(count, sizeof(fsdpc_unit *));
    int *levels = fsdpc_mem_calloc(count, sizeof *levels);
    if (!units || !levels) {
        PyErr_NoMemory();
        goto done;
    }
    if (PyTuple_GET_SIZE(depths) != self->count) {
        PyErr_SetString(PyExc_ValueError, "Tree: depths must have one entry per unit");
        goto done;
    }
    for (int i = 0; i < self->count; i++) {
        long depth = PyLong_AsLong(PyTuple_GET_ITEM(depths, i));
        if (depth < 0 || depth > 1000) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "Tree: depths must be from 0 to 1000");
            }
            goto done;
        }
        units[i] = self->units[i]->unit;
        levels[i] = (int)depth;
    }
    if (self->count > 0 && fsdpc_py_enter(self->units[0]) < 0) {
        goto done;
    }
    status = FSDPC_PY_UNLOCKED(fsdpc_tree_new(units, levels, self->count, options, &self->tree));
    if (fsdpc_py_checked(status) < 0) {
        goto done;
    }
    result = 0;
done:
    fsdpc_mem_free(units);
    fsdpc_mem_free(levels);
    return result;
}

/* The objects that a tree owns besides its units: first the items of `torch`, in the order of
 * fsdpc/_engine/interop.py. `type`: the type that the item must have; NULL: any. */
#define MEMBER(name) .offset = offsetof(fsdpc_py_tree, name)
static const struct {
    size_t offset;
    PyTypeObject *type;
} owned[] = {
    {MEMBER(tensor_type), &PyType_Type},
    {MEMBER(grad_enabled)},
    {MEMBER(graph_task)},
    {MEMBER(keeps_graph)},
    {MEMBER(makes_grads)},
    {MEMBER(queue_callback)},
    {MEMBER(listeners)},
    {MEMBER(set_versions)},
    {MEMBER(increment_versions)},
    {MEMBER(alias_inputs)},
    {MEMBER(copy_outputs)},
    {MEMBER(nodes), &PyDict_Type},
    {MEMBER(transforms_active)},
    {MEMBER(inner_tensors)},
    {MEMBER(refuse_export)},
    {MEMBER(profiler), &PyDict_Type},
    {MEMBER(record)},
    {MEMBER(step_unit)},
    {MEMBER(before_end)},
    {MEMBER(before_pass)},
    {MEMBER(on_thaw)},
    {MEMBER(observer)},
};
enum { OF_TORCH = 17, OWNED = sizeof owned / sizeof *owned };

static PyObject **
owned_by(fsdpc_py_tree *self, int number)
{
    return (PyObject **)((char *)self + owned[number].offset);
}

static int
take_torch(fsdpc_py_tree *self, PyObject *torch)
{
    if (torch == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(torch) || PyTuple_GET_SIZE(torch) != OF_TORCH) {
        PyErr_Format(PyExc_TypeError,
                     "Tree: torch must be a tuple of seventeen items or None, not %.100s",
                     Py_TYPE(torch)->tp_name);
        return -1;
    }
    for (int i = 0; i < OF_TORCH; i++) {
        PyObject *item = PyTuple_GET_ITEM(torch, i);
        if (owned[i].type && !PyObject_TypeCheck(item, owned[i].type)) {
            PyErr_Format(PyExc_TypeError, "Tree: item %d of torch must be a %s, not %.100s", i + 1,
                         owned[i].type->tp_name, Py_TYPE(item)->tp_name);
            return -1;
        }
        *owned_by(self, i) = Py_NewRef(item);
    }
    return 0;
}

static int
parse_tree(fsdpc_py_tree *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "units",        "depths",       "torch",  "backward_prefetch", "forward_prefetch",
        "gather_slots", "reduce_slots", "poison", "trust_order",       NULL};
    PyObject *unit_list, *depth_list, *torch = Py_None;
    int backward_prefetch = 0, forward_prefetch = 0, poison = 0, trust_order = 0;
    fsdpc_tree_options options = {0};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|Oipiipp:Tree", names, &unit_list,
                                     &depth_list, &torch, &backward_prefetch, &forward_prefetch,
                                     &options.gather_slots, &options.reduce_slots, &poison,
                                     &trust_order)) {
        return -1;
    }
    if (backward_prefetch < FSDPC_PREFETCH_NONE || backward_prefetch > FSDPC_PREFETCH_POST) {
        PyErr_SetString(PyExc_ValueError,
                        "Tree: backward_prefetch must be 0 (none), 1 (pre) or 2 (post)");
        return -1;
    }
    options.backward_prefetch = (enum fsdpc_prefetch)backward_prefetch;
    options.forward_prefetch = forward_prefetch != 0;
    options.poison = self->poison = poison != 0;
    options.trust_order = trust_order != 0;
    PyObject *units = PySequence_Tuple(unit_list);
    PyObject *depths = units ? PySequence_Tuple(depth_list) : NULL;
    int result = -1;
    if (depths && take_torch(self, torch) == 0) {
        result = take_units(self, units) == 0 ? make_tree(self, depths, &options) : -1;
        leave_units(self);
    }
    Py_XDECREF(units);
    Py_XDECREF(depths);
    return result;
}

static int
tree_traverse(fsdpc_py_tree *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < self->count; i++) {
        Py_VISIT((PyObject *)self->units[i]);
    }
    for (int i = 0; i < OWNED; i++) {
        Py_VISIT(*owned_by(self, i));
    }
    return 0;
}

/* Detaches the units: after this call no unit belongs to this tree. */
static void
let_units_go(fsdpc_py_tree *self)
{
    for (int i = 0; i < self->count; i++) {
        fsdpc_py_flat *flat = self->units[i];
        if (flat->tree == self) {
            flat->own_tree = false;
            flat->tree = NULL;
            flat->earlier = self->backward.number;
            Py_DECREF(self);
        }
    }
}

/* Freeing waits for the GPU, up to a minute per stream, and the GPU may wait for a collective that
 * another thread has yet to issue. So the GIL is released, even in tp_clear and tp_dealloc. This is safe:
 * tp_clear and tp_dealloc may run Python code anyway, and Python starts no second garbage collection during
 * the first one. Other threads wait at the gate and then find the tree closed. Units that already belong to
 * another tree are not touched. */
static void
free_core(fsdpc_py_tree *self)
{
    fsdpc_tree *core = self->tree;
    self->tree = NULL;
    if (self->count > 0) {
        fsdpc_py_enter_quietly(fsdpc_unit_device(self->units[0]->unit));
    }
    fsdpc_py_shut_tree(self);
    Py_BEGIN_ALLOW_THREADS
    fsdpc_tree_free(core);
    Py_END_ALLOW_THREADS
    let_units_go(self);
    fsdpc_py_reopen_tree(self);
}

static int
tree_clear(fsdpc_py_tree *self)
{
    if (self->tree) {
        free_core(self);
    }
    let_units_go(self);
    int count = self->count;
    self->count = 0; /* code that runs while units are freed finds a tree without units */
    for (int i = 0; i < count; i++) {
        Py_CLEAR(self->units[i]);
    }
    for (int i = 0; i < OWNED; i++) {
        Py_CLEAR(*owned_by(self, i));
    }
    return 0;
}

/* Detaches the units and frees all that the tree owns. The tree must not be in use. */
static void
close_now(PyObject *object)
{
    fsdpc_py_tree *self = (fsdpc_py_tree *)object;
    Py_INCREF(self);
    for (int i = 0; i < self->count; i++) {
        /* A unit may be in another tree by now. */
        if (self->units[i]->tree == self && (fsdpc_py_set_in_pass(self->units[i], false) < 0 ||
                                             fsdpc_py_uninstall_all(self->units[i]) < 0)) {
            PyErr_Clear();
        }
    }
    tree_clear(self);
    Py_DECREF(self);
}

static void
tree_dealloc(fsdpc_py_tree *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    tree_clear(self);
    fsdpc_mem_free(self->units);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
tree_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    fsdpc_py_tree *self = (fsdpc_py_tree *)type->tp_alloc(type, 0);
    if (!self) {
        return NULL;
    }
    PyObject_GC_UnTrack(self); /* hidden from gc until the object is complete */
    self->gate.late = close_now;
    self->backward.entered = self->backward.lingers = -1;
    if (parse_tree(self, args, keywords) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    for (int i = 0; i < self->count; i++) {
        fsdpc_py_flat *flat = self->units[i];
        flat->tree = (fsdpc_py_tree *)Py_NewRef(self);
        flat->id = i;
        self->backward.number =
            flat->earlier > self->backward.number ? flat->earlier : self->backward.number;
    }
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* --- reports --------------------------------------------------------------------------------- */

static PyObject *
tree_detach(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_tree_in_use(self) && !self->thaws) {
        PyErr_SetString(fsdpc_py_current()->state_error,
                        "the tree is in use; detach its units after the step has ended");
        return NULL;
    }
    if (self->tree && fsdpc_tree_in_backward(self->tree) && !fsdpc_py_in_backward(self) &&
        fsdpc_py_clear_broken_backward(self) < 0) {
        return NULL;
    }
    for (int i = 0; i < self->count; i++) {
        if (fsdpc_py_set_in_pass(self->units[i], false) < 0 ||
            fsdpc_py_uninstall_all(self->units[i]) < 0) {
            return NULL;
        }
    }
    if (self->tree) {
        if (self->count > 0) {
            fsdpc_py_enter_quietly(fsdpc_unit_device(self->units[0]->unit));
        }
        int status = fsdpc_tree_detach(self->tree);
        if (status != FSDPC_OK) {
            return fsdpc_py_raise(status);
        }
        if (fsdpc_py_mark_all(self) < 0) {
            return NULL;
        }
    }
    Py_INCREF(self);
    let_units_go(self);
    Py_DECREF(self);
    Py_RETURN_NONE;
}

static PyObject *
tree_clear_trace(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_check_open(self) < 0) {
        return NULL;
    }
    fsdpc_trace_clear(fsdpc_tree_trace(self->tree));
    Py_RETURN_NONE;
}

/* Enters the gate of an open tree, then checks again: the gate's previous user may have closed the tree. */
static int
use_open(fsdpc_py_tree *self, fsdpc_py_use *use)
{
    if (fsdpc_py_check_open(self) < 0 || fsdpc_py_use_tree(self, use) < 0) {
        return -1;
    }
    if (fsdpc_py_check_open(self) < 0) {
        fsdpc_py_end_use(use);
        return -1;
    }
    return 0;
}

static PyObject *
tree_defer(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_use use;
    if (use_open(self, &use) < 0) {
        return NULL;
    }
    fsdpc_tree_defer_reduces(self->tree, true);
    fsdpc_py_end_use(&use);
    Py_RETURN_NONE;
}

static PyObject *
tree_forget(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_use use;
    if (use_open(self, &use) < 0) {
        return NULL;
    }
    const int status = fsdpc_tree_forget(self->tree);
    fsdpc_py_end_use(&use);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    Py_RETURN_NONE;
}

/* Makes the listed units share gradient memory. Returns the numbers of the units that now share it. */
static PyObject *
share_grads(fsdpc_py_tree *self, PyObject *numbers)
{
    int status = FSDPC_OK;
    uint8_t *mask = fsdpc_mem_calloc((size_t)self->count + 1, 1);
    PyObject *shared = mask ? PyList_New(0) : PyErr_NoMemory();
    for (Py_ssize_t k = 0; shared && k < PyTuple_GET_SIZE(numbers); k++) {
        const long i = PyLong_AsLong(PyTuple_GET_ITEM(numbers, k));
        if (i < 0 || i >= self->count) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_IndexError, "share_grads: the tree has no such unit");
            }
            Py_CLEAR(shared);
        } else {
            mask[i] = 1;
        }
    }
    if (shared && self->count > 0 && fsdpc_py_enter(self->units[0]) == 0) {
        status = FSDPC_PY_UNLOCKED(fsdpc_tree_share_grads(self->tree, mask));
    }
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
    }
    for (int i = 0; shared && !PyErr_Occurred() && i < self->count; i++) {
        PyObject *number = mask[i] ? PyLong_FromLong(i) : NULL;
        if (number) {
            PyList_Append(shared, number);
            Py_DECREF(number);
        }
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(shared);
    }
    fsdpc_mem_free(mask);
    return shared;
}

static PyObject *
tree_share_grads(fsdpc_py_tree *self, PyObject *numbers)
{
    fsdpc_py_use use;
    if (!PyTuple_Check(numbers)) {
        PyErr_SetString(PyExc_TypeError, "share_grads takes a tuple of numbers of units");
        return NULL;
    }
    if (use_open(self, &use) < 0) {
        return NULL;
    }
    PyObject *shared = share_grads(self, numbers);
    fsdpc_py_end_use(&use);
    return shared;
}

static PyObject *
get_phase(fsdpc_py_tree *self, void *Py_UNUSED(closure))
{
    if (fsdpc_py_check_open(self) < 0) {
        return NULL;
    }
    if (fsdpc_py_in_backward(self)) {
        return PyUnicode_FromString("backward");
    }
    return PyUnicode_FromString(self->forward_depth > 0 ? "forward" : "idle");
}

static PyObject *
get_kind(fsdpc_py_tree *self, void *Py_UNUSED(closure))
{
    if (fsdpc_py_check_open(self) < 0) {
        return NULL;
    }
    return PyUnicode_FromString(fsdpc_tree_kind(self->tree));
}

static PyObject *
get_entered(fsdpc_py_tree *self, void *Py_UNUSED(closure))
{
    return self->backward.entered < 0
               ? Py_NewRef(Py_None)
               : Py_BuildValue("iO", self->backward.entered,
                               self->backward.entered_done ? Py_True : Py_False);
}

static int
set_step_unit(fsdpc_py_tree *self, PyObject *value, void *closure)
{
    if (fsdpc_py_check_open(self) < 0) {
        return -1;
    }
    fsdpc_py_set_member((PyObject *)self, value, closure);
    fsdpc_tree_set_steps_inside(self->tree, self->step_unit != NULL);
    return 0;
}

/* Tells the other ranks that a parameter is trained from now on; if `hook` is not NULL, that it runs next. */
static PyObject *
tell(fsdpc_py_tree *self, const char *method, int unit, int param, const char *hook)
{
    if (unit < 0 || unit >= self->count) {
        PyErr_Format(PyExc_IndexError, "%s: the tree has %d units; index %d is out of range",
                     method, self->count, unit);
        return NULL;
    }
    fsdpc_py_use use;
    if (use_open(self, &use) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(hook ? fsdpc_tree_before_hook(self->tree, unit, hook)
                                        : fsdpc_tree_announce(self->tree, unit, param));
    PyObject *result = fsdpc_py_none_or(status);
    fsdpc_py_end_use(&use);
    return result;
}

static PyObject *
tree_announce(fsdpc_py_tree *self, PyObject *args)
{
    int unit, param;
    if (fsdpc_py_check_open(self) < 0 || !PyArg_ParseTuple(args, "ii:announce", &unit, &param)) {
        return NULL;
    }
    return tell(self, "announce", unit, param, NULL);
}

static PyObject *
tree_before_hook(fsdpc_py_tree *self, PyObject *args)
{
    int unit;
    const char *what;
    if (fsdpc_py_check_open(self) < 0 || !PyArg_ParseTuple(args, "is:before_hook", &unit, &what)) {
        return NULL;
    }
    return tell(self, "before_hook", unit, 0, what);
}

static PyObject *
tree_meet(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    fsdpc_py_use use;
    if (use_open(self, &use) < 0) {
        return NULL;
    }
    PyObject *result = fsdpc_py_none_or(fsdpc_tree_meet_all(self->tree));
    fsdpc_py_end_use(&use);
    return result;
}

/* A garbage collection may call close() while the tree is in use: then the tree closes after that use. */
static PyObject *
tree_close(fsdpc_py_tree *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_tree_in_use(self)) {
        self->closes = self->late_work = true;
    } else {
        close_now((PyObject *)self);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    FSDPC_PY_METHOD(memory, fsdpc_py_tree_memory, METH_NOARGS, "()",
                    "Bytes by role, on this rank."),
    FSDPC_PY_METHOD(trace, fsdpc_py_tree_trace, METH_VARARGS, "(last=0)",
                    "The latest events (at most `last`, 0: all), oldest first: dicts with op, "
                    "phase, step, unit, bytes, time_ns."),
    FSDPC_PY_METHOD(references, fsdpc_py_tree_references, METH_NOARGS, "()",
                    "References to each unit's gathered values; 0: the unit is released."),
    FSDPC_PY_METHOD(clear_trace, tree_clear_trace, METH_NOARGS, "()", "Drops the events so far."),
    FSDPC_PY_METHOD(defer_reduces, tree_defer, METH_NOARGS, "()",
                    "Postpones reductions that are matched by their order to the end of backward, "
                    "for units that run or not depending on the data."),
    FSDPC_PY_METHOD(forget, tree_forget, METH_NOARGS, "()",
                    "Drops what coding lost of gradients and would be added to the next ones."),
    FSDPC_PY_METHOD(share_grads, tree_share_grads, METH_O, "(units)",
                    "On a GPU: the gradients of those of these units (a tuple of numbers) that\n"
                    "step_unit steps take turns in a few slots of memory; none may be shown or\n"
                    "kept. Returns the numbers of the units whose gradients have another address\n"
                    "now; others keep their own memory."),
    FSDPC_PY_METHOD(
        clip, fsdpc_py_tree_clip, FSDPC_PY_KEYWORDS,
        "(masks, p, max_norm, out, extra=None, scale=True)",
        "On a GPU, queued: out[0] = the norm of order p of all ranks' gradients, out[1] = min(1, "
        "max_norm / (norm + 1e-6)), by which they are multiplied. masks: per unit None or bytes, "
        "one per parameter. extra: rows of sum, largest, 0 of other gradients. Collective."),
    FSDPC_PY_METHOD(
        announce, tree_announce, METH_VARARGS, "(unit, param)",
        "Announces that this parameter is trained from now on: ranks that begin a pass instead "
        "raise MismatchError, and so does this rank. Collective where ranks send."),
    FSDPC_PY_METHOD(
        before_hook, tree_before_hook, METH_VARARGS, "(unit, what)",
        "Before the collectives of a communication hook, `what`, of this unit or others of its "
        "communicator. MismatchError: another rank gathers, reduces or ends its backward instead. "
        "Collective where ranks send."),
    FSDPC_PY_METHOD(meet, tree_meet, METH_NOARGS, "()",
                    "Between passes: the ranks of all units have met, however many forwards each "
                    "has run; their "
                    "next passes have "
                    "equal numbers. Local."),
    FSDPC_PY_METHOD(
        close, tree_close, METH_NOARGS, "()",
        "Detaches the units and frees the slots, after the running hook if there is one. Local."),
    FSDPC_PY_METHOD(detach, tree_detach, METH_NOARGS, "()",
                    "Detaches the units; another tree may take them afterwards."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"phase", (getter)get_phase, NULL, "'idle', 'forward' or 'backward'.", NULL},
    {"entered", (getter)get_entered, NULL,
     "Of the latest backward: index of the unit that it entered last, and whether that unit's "
     "gradients are complete; None if it has entered none.",
     NULL},
    {"kind", (getter)get_kind, NULL,
     "How ranks exchange: 'shared', 'wire', 'stream', 'mixed' (units differ) or 'none' (no units).",
     NULL},
    {"step_unit", fsdpc_py_get_member, (setter)set_step_unit,
     "Called with the number of each unit when its gradient is summed over all ranks, perhaps "
     "before backward has ended; the gradient's memory is given up afterwards, unless the call "
     "returns True.",
     (void *)offsetof(fsdpc_py_tree, step_unit)},
    FSDPC_PY_MEMBER(
        fsdpc_py_tree, before_end,
        "Called when a synchronised backward has sent all its reductions, before its end."),
    FSDPC_PY_MEMBER(
        fsdpc_py_tree, before_pass,
        "Called once when the next pass that records gradients begins; again if it raises."),
    FSDPC_PY_MEMBER(fsdpc_py_tree, on_thaw,
                    "Called when a pass begins and a parameter that was frozen is now trained: "
                    "allocates its gradient and gives the units a new tree."),
    FSDPC_PY_MEMBER(
        fsdpc_py_tree, observer,
        "Called as observer(kind, unit) after each hook of a step: kind as in a Hook's repr, unit "
        "an index into the tree. What it raises goes to sys.unraisablehook."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_traverse, tree_traverse},
    {Py_tp_clear, tree_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc,
     "Tree(units, depths, torch=None, backward_prefetch=0, forward_prefetch=False, gather_slots=0, "
     "reduce_slots=0, poison=False, trust_order=False)\n--\n\nThe units of a root module in module "
     "order, with their "
     "nesting depths. Collective over all communicators involved."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpc._C.Tree",
    .basicsize = sizeof(fsdpc_py_tree),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
fsdpc_py_tree_exec(PyObject *module)
{
    return fsdpc_py_add_type(module, &spec, &fsdpc_py_state(module)->tree_type);
}
