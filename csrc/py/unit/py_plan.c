/* Functions that compute how much memory an engine would take, without making it. See py_plan.h. */
#include "py/unit/py_plan.h"

#include "base/mem.h"
#include "py/unit/py_layout.h"
#include "tree/tree_plan.h"
#include "unit/footprint.h"

static PyObject *
footprint_dict(const fsdpc_layout *layout, const fsdpc_footprint *print)
{
    return Py_BuildValue(
        "{s:O,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:L}", "direct",
        print->direct ? Py_True : Py_False, "master_bytes", (Py_ssize_t)print->master_bytes,
        "grad_bytes", (Py_ssize_t)print->grad_bytes, "grad_out_bytes",
        (Py_ssize_t)print->grad_out_bytes, "grads_bytes", (Py_ssize_t)print->grads_bytes,
        "partial_bytes", (Py_ssize_t)print->partial_bytes, "local_bytes",
        (Py_ssize_t)print->local_bytes, "range_bytes", (Py_ssize_t)print->range_bytes,
        "reduce_bytes", (Py_ssize_t)print->reduce_bytes, "coded_bytes",
        (Py_ssize_t)print->coded_bytes, "lost_bytes", (Py_ssize_t)print->lost_bytes, "full_bytes",
        (Py_ssize_t)layout->full_bytes, "gathered_bytes", (Py_ssize_t)print->gathered_bytes,
        "reduced_bytes", (Py_ssize_t)print->reduced_bytes, "padding_bytes",
        (long long)layout->padding_bytes);
}

static PyObject *
footprint(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    PyObject *list = NULL, *result = NULL;
    int32_t world = 1;
    size_t align = 0;
    fsdpc_footprint_options options = {0};
    fsdpc_py_specs specs = {0};
    fsdpc_layout *layout = NULL;
    const fsdpc_py_arg table[] = {
        {"specs", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"align_bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &align},
        {"range_grain", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &options.range_grain},
        {"page_bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &options.page_bytes},
        {"replicas", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &options.replicas},
        {"offload", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &options.offload},
        {"senders", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &options.senders},
        {"foreign", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &options.foreign},
        {"to_all", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &options.to_all},
    };
    if (fsdpc_py_args("footprint", table, 10, args, nargs, names) < 0) {
        return NULL;
    }
    if (options.range_grain == 0 || options.page_bytes == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "footprint: range_grain and page_bytes must be at least 1");
        return NULL;
    }
    if (fsdpc_py_specs_parse(list, &specs) == 0) {
        int status = fsdpc_layout_build(specs.specs, specs.count, world, align, &layout);
        if (status == FSDPC_OK) {
            fsdpc_footprint print = fsdpc_footprint_of(layout, &options);
            result = footprint_dict(layout, &print);
        } else {
            fsdpc_py_raise(status);
        }
    }
    fsdpc_layout_free(layout);
    fsdpc_py_specs_release(&specs);
    return result;
}

static int
parse_need(PyObject *item, struct fsdpc_slot_need *out)
{
    int shares, direct;
    Py_ssize_t bytes;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "plan_slots: a unit must be a tuple, not %.100s",
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(item,
                          "ippn;plan_slots: a unit must be (depth: int, shares: bool, direct: "
                          "bool, bytes: int)",
                          &out->depth, &shares, &direct, &bytes)) {
        return -1;
    }
    if (out->depth < 0 || out->depth > 1000 || bytes < 0) {
        PyErr_Format(PyExc_ValueError,
                     "plan_slots: depth %d and bytes %zd must be from 0 to 1000 and >= 0",
                     out->depth, bytes);
        return -1;
    }
    out->shares = shares != 0;
    out->direct = direct != 0;
    out->bytes = (size_t)bytes;
    return 0;
}

static PyObject *
slot_of(const void *plan, Py_ssize_t unit)
{
    return PyLong_FromLong(((const struct fsdpc_slot_plan *)plan)->slot_of[unit]);
}

static PyObject *
slot_bytes(const void *plan, Py_ssize_t slot)
{
    return PyLong_FromSize_t(((const struct fsdpc_slot_plan *)plan)->slot_bytes[slot]);
}

/* Returns the plan as ([slot of each unit], [bytes of each slot]). */
static PyObject *
slot_lists(const struct fsdpc_slot_plan *plan, Py_ssize_t count)
{
    return Py_BuildValue("NN", fsdpc_py_list(count, slot_of, plan),
                         fsdpc_py_list(plan->slot_count, slot_bytes, plan));
}

static PyObject *
make_slots(PyObject *items, int per_level)
{
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    PyObject *result = NULL;
    struct fsdpc_slot_plan plan = {0};
    if (count > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "plan_slots: too many units");
        return NULL;
    }
    struct fsdpc_slot_need *needs = fsdpc_mem_calloc((size_t)count, sizeof *needs);
    if (!needs) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parse_need(PyTuple_GET_ITEM(items, i), &needs[i]) < 0) {
            goto done;
        }
    }
    int status = fsdpc_slot_plan_make(needs, (int)count, per_level, &plan);
    result = status == FSDPC_OK ? slot_lists(&plan, count) : fsdpc_py_raise(status);
done:
    fsdpc_slot_plan_free(&plan);
    fsdpc_mem_free(needs);
    return result;
}

static PyObject *
plan_slots(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    PyObject *list = NULL;
    int32_t per_level = 0;
    bool wire = false;
    const fsdpc_py_arg table[] = {
        {"needs", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"per_level", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &per_level},
        {"wire", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &wire},
    };
    if (fsdpc_py_args("plan_slots", table, 3, args, nargs, names) < 0) {
        return NULL;
    }
    if (per_level < 0 || per_level > 1000) {
        PyErr_Format(PyExc_ValueError, "plan_slots: per_level is %d, but must be from 0 to 1000",
                     per_level);
        return NULL;
    }
    PyObject *items = PySequence_Tuple(list);
    if (!items) {
        return NULL;
    }
    const int usual = wire ? FSDPC_DEFAULT_SLOTS_WIRE : FSDPC_DEFAULT_SLOTS;
    PyObject *result = make_slots(items, per_level > 0 ? per_level : usual);
    Py_DECREF(items);
    return result;
}

static PyObject *
plan_reduce_slots(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
                  PyObject *names)
{
    int32_t world = 1, wanted = 0;
    bool any_offload = false;
    size_t largest = 0;
    const fsdpc_py_arg table[] = {
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"any_offload", FSDPC_PY_BOOL, FSDPC_PY_REQUIRED, &any_offload},
        {"largest", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &largest},
        {"wanted", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &wanted},
    };
    if (fsdpc_py_args("plan_reduce_slots", table, 4, args, nargs, names) < 0) {
        return NULL;
    }
    return PyLong_FromLong(fsdpc_footprint_reduce_slots(world, any_offload, largest,
                                                        wanted > 0 ? wanted : FSDPC_DEFAULT_SLOTS));
}

static PyObject *
plan_grad_slots(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
                PyObject *names)
{
    size_t largest = 0, all = 0;
    int32_t reduce_slots = 0;
    const fsdpc_py_arg table[] = {
        {"largest", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &largest},
        {"all", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &all},
        {"reduce_slots", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &reduce_slots},
    };
    if (fsdpc_py_args("plan_grad_slots", table, 3, args, nargs, names) < 0) {
        return NULL;
    }
    return PyLong_FromLong(fsdpc_footprint_grad_slots(largest, all, reduce_slots));
}

PyMethodDef fsdpc_py_plan_methods[] = {
    FSDPC_PY_FUNCTION(
        footprint, FSDPC_PY_KEYWORDS,
        "(specs, world, align_bytes, range_grain, page_bytes, replicas=0, offload=False, "
        "senders=0, foreign=False, to_all=False)",
        "Bytes that a unit allocates on each rank. specs: as for layout(). range_grain: page of "
        "host memory, or the device's grain. to_all: a GPU, where senders count only for units "
        "whose gradients travel coded. ValueError, TypeError."),
    FSDPC_PY_FUNCTION(
        plan_slots, FSDPC_PY_KEYWORDS, "(needs, per_level=0, wire=False)",
        "Which slot each unit gets: ([slot or -1 of each unit], [bytes of each slot]). needs: "
        "(depth, shares, direct, bytes) of the units with one group of ranks, in module order. "
        "per_level: slots of a nesting level, 0 for the default. wire: units travel in the "
        "background."),
    FSDPC_PY_FUNCTION(plan_reduce_slots, FSDPC_PY_KEYWORDS,
                      "(world, any_offload, largest, wanted=0)",
                      "How many buffers for packed gradients a group of units has. largest: the "
                      "most reduce_bytes of a unit. wanted: 0 for the default."),
    FSDPC_PY_FUNCTION(
        plan_grad_slots, FSDPC_PY_KEYWORDS, "(largest, all, reduce_slots)",
        "How many slots of `largest` bytes the gradients of a group's units that step in backward "
        "share; 0: none. largest, all: the most and the sum of their grads_bytes."),
    {NULL, NULL, 0, NULL},
};
