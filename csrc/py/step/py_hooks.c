/* What torch calls in a step: C callables for module hooks, gradient hooks and the end of backward.
 *
 * All hooks have one heap type, Hook, and differ in their kind. Calls go through vectorcall, so no Python
 * frame runs per unit or per parameter. The order of events:
 *
 *   pre_forward   the first unit of a pass begins the pass. Gather; the modules show full tensors.
 *   post_forward  gets (inputs, output). The modules show sharded parameters again. Release or hold; a
 *                 pre-hook on the autograd nodes of the outputs waits for backward.
 *   pre_backward  a gradient reaches an output. Gather and hold; the modules show full tensors again, for
 *                 recomputation inside the unit (activation checkpointing).
 *   grad          a full parameter has its gradient. After the last gradient the unit is done: release,
 *                 then pack and reduce.
 *   input_done    an input has its gradient: see [Note: when a unit is done] in py_hooks_backward.c.
 *   end           after backward: finish units with partial gradients, end on all ranks, show .grad.
 *
 * What each hook does is in py_hooks_forward.c, py_hooks_begin.c, py_hooks_backward.c, py_hooks_end.c.
 *
 * The GIL is released around everything that copies, casts or waits, but kept for the release of a
 * unit, which is a few stores.
 */
#include "py/step/py_hooks_impl.h"

#include <structmember.h>

#include <stddef.h>

/* --- the type -------------------------------------------------------------------------------- */

static int
enter(const fsdpc_py_hook *self)
{
    if (self->kind != FSDPC_HOOK_END) {
        return fsdpc_py_enter((fsdpc_py_flat *)self->owner);
    }
    const fsdpc_py_tree *tree = (fsdpc_py_tree *)self->owner;
    return tree->count > 0 ? fsdpc_py_enter(tree->units[0]) : 0;
}

/* Returns true if this hook was the pending end hook of its tree's backward; afterwards none is pending. */
static bool
end_is_over(fsdpc_py_hook *self)
{
    fsdpc_py_tree *tree = self->kind == FSDPC_HOOK_END ? (fsdpc_py_tree *)self->owner : NULL;
    bool pending = tree && tree->backward.end_pending == (PyObject *)self;
    if (pending) {
        tree->backward.end_pending = NULL;
    }
    return pending;
}

/* Called when torch drops an end hook that is still pending. Either the backward raised before torch called
 * the hook, or the hook itself failed. */
static void
backward_broke(fsdpc_py_tree *tree)
{
    PyObject *type, *value, *traceback;
    /* If a thread uses the tree, the tree's next pass or backward clears this backward. */
    if (!tree->tree || tree->count == 0 || fsdpc_py_tree_in_use(tree) ||
        !fsdpc_tree_in_backward(tree->tree)) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    fsdpc_py_enter_quietly(fsdpc_unit_device(tree->units[0]->unit));
    for (int i = 0; i < tree->count; i++) {
        if (fsdpc_py_drop_half_made(tree->units[i]) < 0) {
            PyErr_Clear();
        }
    }
    /* A failure of the communicator is raised by the next call that needs it. */
    (void)fsdpc_tree_backward_broke(tree->tree);
    if (fsdpc_py_mark_all(tree) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
}

static int
go_in(const fsdpc_py_hook *self, fsdpc_py_use *use)
{
    if (!self->owner) {
        PyErr_SetString(fsdpc_py_current()->state_error, "the unit of this hook no longer exists");
        return -1;
    }
    return self->kind == FSDPC_HOOK_END ? fsdpc_py_use_tree((fsdpc_py_tree *)self->owner, use)
                                        : fsdpc_py_use_flat((fsdpc_py_flat *)self->owner, use);
}

static int
check_torch(const fsdpc_py_hook *self)
{
    if (self->kind == FSDPC_HOOK_END) {
        return 0;
    }
    const fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    if (!flat->tree || flat->tree->tensor_type) {
        return 0;
    }
    PyErr_Format(fsdpc_py_current()->state_error,
                 "unit %s: hooks need torch's functions, which its tree was created without; pass "
                 "Tree(..., torch=...)",
                 fsdpc_unit_name(flat->unit));
    return -1;
}

static int
dispatch(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count, PyObject **out)
{
    int result = -1;
    switch (self->kind) {
    case FSDPC_HOOK_PRE_FORWARD:
        result = fsdpc_py_pre_forward(self, args, count, out);
        break;
    case FSDPC_HOOK_POST_FORWARD:
        result = count > 0 ? fsdpc_py_post_forward(self, args, count, out) : 0;
        break;
    case FSDPC_HOOK_PRE_BACKWARD:
        result = fsdpc_py_pre_backward(self);
        break;
    case FSDPC_HOOK_INPUT_DONE:
        result = fsdpc_py_input_done(self);
        break;
    case FSDPC_HOOK_GRAD:
        result = fsdpc_py_grad_arrived(self);
        break;
    case FSDPC_HOOK_END:
        result = fsdpc_py_end_backward((fsdpc_py_tree *)self->owner);
        /* An end hook that fails stays pending until torch drops the hook, which calls backward_broke. */
        if (result == 0) {
            (void)end_is_over(self);
        }
        break;
    }
    return result;
}

static const char *const kind_names[] = {"pre_forward", "post_forward", "pre_backward",
                                         "input_done",  "grad",         "end"};

/* Opens the profiler's range of this hook. Returns NULL for hooks that run per parameter or per input. */
static PyObject *
open_range(const fsdpc_py_hook *self)
{
    const fsdpc_py_flat *flat = (fsdpc_py_flat *)self->owner;
    switch (self->kind) {
    case FSDPC_HOOK_INPUT_DONE:
    case FSDPC_HOOK_GRAD:
        return NULL;
    case FSDPC_HOOK_END:
        return fsdpc_py_range_open((fsdpc_py_tree *)self->owner, "root_post_backward_callback",
                                   NULL);
    default:
        return fsdpc_py_range_open(flat->tree, kind_names[self->kind], flat);
    }
}

/* Calls the observer after the hook has left its gates. An observer may call methods of units and trees. */
static void
call_observer(const fsdpc_py_hook *self)
{
    PyObject *owner = self->owner; /* NULL if a garbage collection has cleared the hook */
    const fsdpc_py_flat *flat = self->kind == FSDPC_HOOK_END ? NULL : (fsdpc_py_flat *)owner;
    fsdpc_py_tree *tree = flat ? flat->tree : (fsdpc_py_tree *)owner;
    if (!owner || !tree || !tree->observer) {
        return;
    }
    Py_INCREF(tree);
    fsdpc_py_observe(tree, kind_names[self->kind], flat ? flat->id : 0);
    Py_DECREF(tree);
}

static PyObject *
hook_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *Py_UNUSED(keywords))
{
    fsdpc_py_hook *self = (fsdpc_py_hook *)object;
    fsdpc_py_use use, tree_use = {NULL, NULL};
    PyObject *out = NULL;
    int result = go_in(self, &use);
    if (result < 0) {
        return NULL;
    }
    if (self->kind == FSDPC_HOOK_PRE_FORWARD && !use.tree) {
        result = fsdpc_py_attach(use.flat);
        /* The unit has a tree now, and the tree's gate must be entered as well. */
        result = result < 0 ? -1 : go_in(self, &tree_use);
    }
    if (result == 0 && (result = check_torch(self)) == 0 && (result = enter(self)) == 0) {
        PyObject *range = open_range(self);
        result = dispatch(self, args, PyVectorcall_NARGS(flags), &out);
        fsdpc_py_range_close(range);
    }
    if (tree_use.flat) {
        fsdpc_py_end_use(&tree_use);
    }
    fsdpc_py_end_use(&use);
    if (result < 0) {
        Py_XDECREF(out);
        return NULL;
    }
    call_observer(self);
    return out ? out : Py_NewRef(Py_None);
}

static int
hook_traverse(fsdpc_py_hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->owner);
    Py_VISIT(self->again);
    return 0;
}

static int
hook_clear(fsdpc_py_hook *self)
{
    if (end_is_over(self)) {
        backward_broke((fsdpc_py_tree *)self->owner);
    }
    fsdpc_py_flat *flat = self->counted ? (fsdpc_py_flat *)self->owner : NULL;
    if (flat && flat->era == self->era && --flat->graphs == 0 && flat->tree) {
        fsdpc_py_graph_dropped(flat->tree);
    }
    self->counted = false;
    Py_CLEAR(self->owner);
    Py_CLEAR(self->again);
    return 0;
}

static void
hook_dealloc(fsdpc_py_hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    hook_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
hook_repr(fsdpc_py_hook *self)
{
    return PyUnicode_FromFormat("<fsdpc %s hook>", kind_names[self->kind]);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(fsdpc_py_hook, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_repr, hook_repr},
    {Py_tp_members, members},
    {Py_tp_doc, "A C callable that torch calls; made by FlatParameter.hook()."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpc._C.Hook",
    .basicsize = sizeof(fsdpc_py_hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int
fsdpc_py_hook_exec(PyObject *module)
{
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    state->hook_call = hook_call;
    return fsdpc_py_add_type(module, &spec, &state->hook_type);
}
