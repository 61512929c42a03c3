/* Units whose modules show gathered parameters after their forward, as with torch's fully_shard.
 *
 * [Note: who stays] A loss may read the head's weight after the forward. So a unit that is not released after
 * its forward shows its gathered parameters until its backward is done, reshard() is called, the graphs are
 * dropped, or the next pass begins. A loss inside the outermost forward may read a weight whose module is
 * never called. So a unit of several modules shows its parameters from the forward of its first module until
 * all its modules have run, or until the outermost forward ends. If a module has not run, a hook on the
 * outermost outputs gathers the unit for its backward. */
#include "py/step/py_hooks_impl.h"

bool
fsdpc_py_will_stay(const fsdpc_py_flat *flat)
{
    return flat->dtensors && !flat->tree->recompute && flat->site_count > 0 &&
           flat->installed == 1 + flat->stays &&
           (flat->members_left > 0 || !fsdpc_unit_reshards(flat->unit));
}

int
fsdpc_py_release_stay(fsdpc_py_flat *flat)
{
    if (fsdpc_py_end_stay(flat) < 0) {
        return -1;
    }
    int status = fsdpc_tree_end_stay(flat->tree->tree, flat->id);
    return fsdpc_py_checked(status) < 0 ? -1 : fsdpc_py_mark(flat);
}

int
fsdpc_py_end_stays(fsdpc_py_tree *tree, bool graph)
{
    for (int i = 0; i < tree->count; i++) {
        fsdpc_py_flat *flat = tree->units[i];
        bool partial = flat->members_left > 0;
        flat->members_left = 0;
        if (!flat->stays || (graph && !(partial && fsdpc_unit_reshards(flat->unit)))) {
            continue;
        }
        if (fsdpc_py_release_stay(flat) < 0) {
            return -1;
        }
    }
    return 0;
}

void
fsdpc_py_graph_dropped(fsdpc_py_tree *tree)
{
    bool busy = !tree->tree || tree->forward_depth > 0 || fsdpc_py_tree_in_use(tree) ||
                fsdpc_tree_in_backward(tree->tree);
    for (int i = 0; !busy && i < tree->count; i++) {
        busy = tree->units[i]->graphs > 0;
    }
    if (busy) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (int i = 0; i < tree->count; i++) {
        if (fsdpc_py_end_stay(tree->units[i]) < 0) {
            PyErr_Clear();
        }
    }
    PyErr_Restore(type, value, traceback);
}
