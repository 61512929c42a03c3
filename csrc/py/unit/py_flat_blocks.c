/* Reads and writes blocks of a flat parameter's parameters, as SHARDED state dicts have them. See
 * fsdpc_unit_read_blocks.
 */
#define PY_SSIZE_T_CLEAN
#include "py/unit/py_flat.h"

#include "base/mem.h"

/* The blocks of one call, one per parameter of the unit. The first `held` views must be released. */
typedef struct blocks {
    int64_t *block;
    void **data;
    fsdpc_py_view *views;
    int held;
    int side;    /* see fsdpc_py_side */
    bool writes; /* the call writes to the tensors */
} blocks;

static void
release(blocks *all)
{
    for (int i = 0; i < all->held; i++) {
        if (all->views[i].owner) {
            fsdpc_py_view_release(&all->views[i]);
        }
    }
    fsdpc_mem_free(all->block);
    fsdpc_mem_free(all->data);
    fsdpc_mem_free(all->views);
}

static int
take_tensor(const fsdpc_py_flat *self, int i, PyObject *tensor, blocks *all)
{
    const fsdpc_layout *layout = fsdpc_unit_layout(self->unit);
    fsdpc_dtype dtype = layout->segments[layout->params[i].segment].storage;
    int64_t length = fsdpc_unit_block_length(self->unit, i, all->block[i]);
    fsdpc_py_view *view = &all->views[i];
    if (fsdpc_py_tensor_view_any(tensor, view) < 0) {
        return -1;
    }
    all->held = i + 1;
    bool fits = dtype == FSDPC_BYTES ? view->numel * (int64_t)view->itemsize == length
                                     : view->dtype == dtype && view->numel == length;
    if (!fits || !view->contiguous || (all->writes && view->readonly)) {
        PyErr_Format(PyExc_ValueError,
                     "rank %d's block of parameter %s of unit %s needs a contiguous%s %s tensor of "
                     "%lld elements",
                     fsdpc_unit_rank(self->unit), layout->params[i].name,
                     fsdpc_unit_name(self->unit), all->writes ? ", writable" : "",
                     fsdpc_dtype_name(dtype), (long long)length);
        return -1;
    }
    all->data[i] = length > 0 ? view->data : NULL;
    return fsdpc_py_side(self, view, &all->side);
}

/* Fills `all` from two tuples. Parameter i is skipped if numbers[i] is 0 and tensors[i] is None. */
static int
fill(const fsdpc_py_flat *self, PyObject *numbers, PyObject *tensors, blocks *all)
{
    int count = fsdpc_unit_layout(self->unit)->param_count;
    if (PyTuple_GET_SIZE(numbers) != count || PyTuple_GET_SIZE(tensors) != count) {
        PyErr_Format(PyExc_ValueError, "unit %s needs one block and one tensor per parameter (%d)",
                     fsdpc_unit_name(self->unit), count);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
        all->block[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i));
        if (all->block[i] < 0 || (all->block[i] == 0) != (tensor == Py_None)) {
            if (!PyErr_Occurred()) {
                PyErr_Format(
                    PyExc_ValueError,
                    "parameter %s of unit %s needs a positive block and a tensor, or 0 and None",
                    fsdpc_unit_layout(self->unit)->params[i].name, fsdpc_unit_name(self->unit));
            }
            return -1;
        }
        if (tensor != Py_None && take_tensor(self, i, tensor, all) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
move(fsdpc_py_flat *self, PyObject *numbers, PyObject *tensors, bool write)
{
    size_t count = (size_t)fsdpc_unit_layout(self->unit)->param_count + 1;
    PyObject *result = NULL;
    if (fsdpc_py_enter(self) < 0) {
        return NULL;
    }
    blocks all = {fsdpc_mem_calloc(count, sizeof *all.block),
                  fsdpc_mem_calloc(count, sizeof *all.data),
                  fsdpc_mem_calloc(count, sizeof *all.views),
                  0,
                  -1,
                  !write};
    if (!all.block || !all.data || !all.views) {
        PyErr_NoMemory();
    } else if (fill(self, numbers, tensors, &all) == 0) {
        int status;
        enum fsdpc_memory_kind place = all.side == FSDPC_ON_HOST ? FSDPC_ON_HOST : FSDPC_ON_DEVICE;
        if (write) {
            fsdpc_py_touch(self);
        }
        status = FSDPC_PY_UNLOCKED(
            write ? fsdpc_unit_write_blocks(self->unit, all.block, (const void *const *)all.data,
                                            place)
                  : fsdpc_unit_read_blocks(self->unit, all.block, all.data, place));
        result = fsdpc_py_met(self, status);
    }
    release(&all);
    return result;
}

static PyObject *
parse_and_move(fsdpc_py_flat *self, PyObject *args, const char *format, bool write)
{
    PyObject *numbers, *tensors, *result = NULL;
    if (!PyArg_ParseTuple(args, format, &numbers, &tensors)) {
        return NULL;
    }
    numbers = PySequence_Tuple(numbers);
    tensors = numbers ? PySequence_Tuple(tensors) : NULL;
    if (tensors) {
        result = move(self, numbers, tensors, write);
    }
    Py_XDECREF(numbers);
    Py_XDECREF(tensors);
    return result;
}

PyObject *
fsdpc_py_flat_read_blocks(fsdpc_py_flat *self, PyObject *args)
{
    return parse_and_move(self, args, "OO:read_blocks", false);
}

PyObject *
fsdpc_py_flat_write_blocks(fsdpc_py_flat *self, PyObject *args)
{
    return parse_and_move(self, args, "OO:write_blocks", true);
}
