/* unshard() and reshard(): after unshard() the modules show gathered parameters without a forward, until
 * reshard() or the next pass. A pass gathers again, because the values may be older than the optimizer's last
 * step. */
#include "py/step/py_hooks_impl.h"

/* Returns true if neither a pass nor a backward runs. */
static bool
is_outside(const fsdpc_py_tree *tree)
{
    bool running = tree->forward_depth > 0 || fsdpc_tree_in_backward(tree->tree);
    for (int i = 0; !running && i < tree->count; i++) {
        running = fsdpc_tree_is_running(tree->tree, i);
    }
    return !running;
}

PyObject *
fsdpc_py_flat_unshard(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    if (!self->tree) {
        return fsdpc_py_raise(fsdpc_error(FSDPC_E_STATE, "unshard: unit %s belongs to no tree",
                                          fsdpc_unit_name(self->unit)));
    }
    fsdpc_py_tree *tree = self->tree;
    bool outside = is_outside(tree);
    if (self->unsharded) {
        return PyBool_FromLong(outside);
    }
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    int status = FSDPC_OK;
    for (int i = 0; outside && i < tree->count; i++) { /* the new pass drops all gathered values */
        if (fsdpc_py_end_stay(tree->units[i]) < 0) {
            return NULL;
        }
    }
    if (outside && fsdpc_py_detect_changes(self) < 0) {
        return NULL;
    }
    fsdpc_py_touch(self); /* other units are not checked for writes, so assume a write */
    Py_BEGIN_ALLOW_THREADS
    if (outside) {
        status = fsdpc_tree_begin_forward(
            tree->tree, true); /* begins a pass with the master shards' present values */
    }
    if (status == FSDPC_OK) {
        status = fsdpc_tree_forward_enter(tree->tree, self->id);
    }
    Py_END_ALLOW_THREADS
    if (fsdpc_py_checked(status) < 0 || fsdpc_py_mark_all(tree) < 0 || fsdpc_py_install(self) < 0) {
        return NULL;
    }
    self->unsharded = self->lent = true;
    return PyBool_FromLong(outside);
}

PyObject *
fsdpc_py_flat_reshard(fsdpc_py_flat *self, PyObject *Py_UNUSED(unused))
{
    if (fsdpc_py_end_stay(self) < 0) {
        return NULL;
    }
    if (!self->unsharded) {
        Py_RETURN_NONE;
    }
    self->unsharded = false;
    if (fsdpc_py_uninstall(self) < 0 || fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    int status =
        self->tree ? fsdpc_tree_forward_leave(self->tree->tree, self->id, false) : FSDPC_OK;
    if (fsdpc_py_checked(status) < 0 || (self->tree && fsdpc_py_mark(self) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}
