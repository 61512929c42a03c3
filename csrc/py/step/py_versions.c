/* What a unit's modules and version counter show while the unit is gathered and while it is released.
 *
 * [Note: versions] All gathered tensors of a unit share one version counter of torch, and autograd refuses a
 * saved tensor whose counter has changed. Here the counter tells which values the memory holds: it is an even
 * number while the unit is gathered, a new odd number each time the unit is released, and a new even number
 * after the optimizer has changed all parameters of the unit. So a backward that comes to a saved weight
 * while the unit is released, or after a step, ends in autograd's error ("modified by an inplace operation")
 * and never in a wrong gradient. If the gathered values are the shard itself, they stay readable.
 *
 * If there are no sharded parameters of the user to show (use_orig_params=False), the modules show a
 * placeholder while the unit is released: the placeholder's shape can be read, but not its values.
 */
#include "py/step/py_hooks_impl.h"

static int
put_sites(const fsdpc_py_flat *flat, bool gathered)
{
    for (int i = 0; i < flat->site_count; i++) {
        const fsdpc_py_site *site = &flat->sites[i];
        if (PyDict_SetItem(site->dict, site->key, gathered ? site->full : site->sharded) < 0) {
            return -1;
        }
    }
    return 0;
}

static long
read_version(const fsdpc_py_flat *flat)
{
    PyObject *number = fsdpc_py_field(PyTuple_GET_ITEM(flat->versions, 0), FSDPC_PY_VERSION);
    long value = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return value;
}

/* Raises StateError after a write to gathered values, which changes no shard but may reach other ranks. */
static int
check_unwritten(const fsdpc_py_flat *flat, long found)
{
    if (found < 0 || found == flat->gathered_version) {
        return found < 0 ? -1 : 0;
    }
    PyErr_Format(fsdpc_py_current()->state_error,
                 "parameters of unit %s were changed in place during forward or backward, where "
                 "they are copies for reading: change them between steps, inside "
                 "summon_full_params or through the optimizer's parameters",
                 fsdpc_unit_name(flat->unit));
    return -1;
}

static int
put_version(const fsdpc_py_flat *flat, long version)
{
    PyObject *number = PyLong_FromLong(version);
    PyObject *numbers = number ? PyTuple_Pack(1, number) : NULL;
    PyObject *const args[] = {flat->versions, numbers};
    PyObject *result =
        numbers ? PyObject_Vectorcall(flat->tree->set_versions, args, 2, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(numbers);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Sets the counter from `found` to `version`. If the optimizer steps between two passes, the difference is
 * mostly 1 or 3. Then torch increments the counter, which takes a third of the time of setting it. */
static int
set_version(const fsdpc_py_flat *flat, long found, long version)
{
    if (found < 0) {
        return -1;
    }
    if (version - found != 1 && version - found != 3) {
        return put_version(flat, version);
    }
    PyObject *result =
        PyObject_CallOneArg(flat->tree->increment_versions,
                            version - found == 1 ? flat->versions : flat->versions_thrice);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Returns the next odd or even number that the counter has not had. */
static long
new_version(const fsdpc_py_flat *flat, bool odd)
{
    long top = flat->gathered_version > flat->released_version ? flat->gathered_version
                                                               : flat->released_version;
    return top + 1 + ((top + 1) % 2 != odd);
}

/* Gives the counter a new odd number. After a forbidden write, also raises check_unwritten's exception. */
static int
close_values(fsdpc_py_flat *flat)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    long found = read_version(flat);
    int written = check_unwritten(flat, found);
    if (written < 0) {
        PyErr_Fetch(&type, &value, &traceback);
    }
    flat->released_version = new_version(flat, true);
    int result = found < 0 ? -1 : set_version(flat, found, flat->released_version);
    if (written < 0) {
        PyErr_Restore(type, value, traceback);
    }
    return written < 0 ? -1 : result;
}

static int
call_on_values(fsdpc_py_flat *flat, bool gathered)
{
    flat->gathered = 0; /* stays 0 if the call fails */
    PyObject *result = PyObject_CallOneArg(flat->on_values, gathered ? Py_True : Py_False);
    if (!result) {
        return -1;
    }
    Py_DECREF(result);
    flat->gathered = gathered ? fsdpc_unit_gathers(flat->unit) : 0;
    return 0;
}

static int
mark_foreign(fsdpc_py_flat *flat)
{
    uint64_t now = fsdpc_unit_refs(flat->unit) > 0 ? fsdpc_unit_gathers(flat->unit) : 0;
    return now == flat->gathered || !flat->on_values ? 0 : call_on_values(flat, now > 0);
}

int
fsdpc_py_mark(fsdpc_py_flat *flat)
{
    if (flat->foreign) {
        return mark_foreign(flat);
    }
    bool gathered = fsdpc_unit_refs(flat->unit) > 0;
    if (gathered == flat->marked || fsdpc_unit_is_direct(flat->unit)) {
        return 0;
    }
    flat->marked = gathered;
    if (flat->by_gather && !flat->shown && put_sites(flat, gathered) < 0) {
        return -1;
    }
    if (!flat->versions || !flat->tree || !flat->tree->set_versions) {
        return 0;
    }
    return gathered ? set_version(flat, read_version(flat), flat->gathered_version)
                    : close_values(flat);
}

/* Marks all units, even if some fail. Raises the first failure. */
int
fsdpc_py_mark_all(fsdpc_py_tree *tree)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    for (int i = 0; i < tree->count; i++) {
        if (fsdpc_py_mark(tree->units[i]) == 0) {
            continue;
        }
        if (type) {
            PyErr_Clear();
        } else {
            PyErr_Fetch(&type, &value, &traceback);
        }
    }
    if (type) {
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    return 0;
}

/* Returns whether every parameter that was trained when versions were last recorded has been written to
 * since: 1, 0, or -1. Other parameters are ignored: their last write may be their initialisation. With
 * `records`, the versions of the parameters that are trained now are recorded. */
static int
was_stepped(fsdpc_py_flat *flat, bool records)
{
    int trained = 0, stepped = 0;
    for (int i = 0; i < flat->sharded_count; i++) {
        fsdpc_py_sharded *sharded = &flat->sharded[i];
        const bool counts = sharded->param_version >= 0;
        if (sharded->holds_nothing || !(counts || (records && sharded->requires_grad))) {
            continue;
        }
        long version = fsdpc_py_local_version(flat, sharded->param);
        if (version < 0) {
            return -1;
        }
        bool written = counts && version != sharded->param_version;
        if (counts && !written && !records) {
            return 0;
        }
        if (records) {
            sharded->param_version = sharded->requires_grad ? version : -1;
        }
        trained += counts;
        stepped += written;
    }
    return trained > 0 && stepped == trained;
}

/* A step of only some parameters does not count: the graphs that still exist may be those of another loss. */
int
fsdpc_py_detect_step(fsdpc_py_flat *flat, bool pass_begins)
{
    if (!flat->versions || fsdpc_unit_is_direct(flat->unit)) {
        return 0;
    }
    int stepped = was_stepped(flat, pass_begins);
    if (stepped > 0 && !pass_begins) {
        stepped = was_stepped(flat, true);
    }
    if (stepped <= 0) {
        return stepped;
    }
    fsdpc_unit_forget_values(flat->unit);
    flat->gathered_version = new_version(flat, false);
    return flat->marked && flat->tree && flat->tree->set_versions
               ? put_version(flat, flat->gathered_version)
               : 0;
}

/* Returns whether the current backward computes this parameter's gradient (`param` -1: any): 1, 0, or -1. */
static int
makes_grad(const fsdpc_py_flat *flat, int param)
{
    PyObject *params = PyList_New(0);
    int result = params ? 0 : -1;
    const int count = fsdpc_unit_layout(flat->unit)->param_count;
    for (int i = param < 0 ? 0 : param; result == 0 && i < (param < 0 ? count : param + 1); i++) {
        result = flat->full[i] ? PyList_Append(params, flat->full[i]) : 0;
    }
    PyObject *makes = result == 0 ? PyObject_CallOneArg(flat->tree->makes_grads, params) : NULL;
    result = makes ? PyObject_IsTrue(makes) : -1;
    Py_XDECREF(makes);
    Py_XDECREF(params);
    return result;
}

/* Returns 0 if this backward makes gradients of the unit, but not this parameter's; else 1, or -1. */
static int
uses_value(const fsdpc_py_flat *flat, int param)
{
    int makes = makes_grad(flat, param);
    return makes == 0 ? (makes = makes_grad(flat, -1)) < 0 ? -1 : !makes : makes;
}

int
fsdpc_py_check_values(const fsdpc_py_flat *flat)
{
    const bool whole = flat->tree->poison;
    int i = fsdpc_unit_next_changed(flat->unit, 0, whole), uses = 0;
    while (i >= 0 && (uses = uses_value(flat, i)) == 0) {
        i = fsdpc_unit_next_changed(flat->unit, i + 1, whole);
    }
    if (uses <= 0) {
        return uses;
    }
    PyErr_Format(fsdpc_py_current()->state_error,
                 "parameter %s of unit %s was changed on rank %d between its forward and this "
                 "backward, which would compute with old and new weights: change weights after "
                 "backward, or before forward",
                 fsdpc_unit_layout(flat->unit)->params[i].name, fsdpc_unit_name(flat->unit),
                 fsdpc_unit_rank(flat->unit));
    return -1;
}

int
fsdpc_py_was_touched(fsdpc_py_flat *flat)
{
    long writes = 0;
    for (int i = 0; i < flat->sharded_count; i++) {
        long version = fsdpc_py_local_version(flat, flat->sharded[i].param);
        if (version < 0) {
            return -1;
        }
        writes += version;
    }
    bool touched = writes != flat->writes;
    flat->writes = writes;
    return touched;
}
