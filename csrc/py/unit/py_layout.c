/* fsdpc._C.layout: the placement of a unit's parameters as plain Python data.
 *
 * For tests and reports; the engine uses layout.h directly, so both see the same bytes.
 */
#include "py/unit/py_layout.h"

#include "base/mem.h"

enum { MAX_WORLD = 1 << 17 }; /* each rank has a row in the result */

struct request {
    fsdpc_py_specs list;
    int world;
    size_t align_bytes;
    bool spans;
};

static int
parse_dtype(const char *name, fsdpc_dtype *out)
{
    int status = fsdpc_dtype_from_name(name, out);
    if (status != FSDPC_OK) {
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

static int
parse_spec(PyObject *item, fsdpc_param_spec *out)
{
    const char *storage, *compute, *reduce;
    long long numel;
    int trainable;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "layout: a parameter must be a tuple, not %.100s",
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(
            item,
            "sLsssp;layout: a parameter must be (name: str, numel: int, storage: str, "
            "compute: str, reduce: str, trainable: bool)",
            &out->name, &numel, &storage, &compute, &reduce, &trainable)) {
        return -1;
    }
    out->numel = numel;
    out->trainable = trainable != 0;
    if (parse_dtype(storage, &out->storage) < 0 || parse_dtype(compute, &out->compute) < 0) {
        return -1;
    }
    return parse_dtype(reduce, &out->reduce);
}

int
fsdpc_py_specs_parse(PyObject *list, fsdpc_py_specs *out)
{
    out->items = PySequence_Tuple(list);
    if (out->items == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(out->items);
    if (count > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "layout: too many parameters");
        return -1;
    }
    out->specs = fsdpc_mem_calloc((size_t)count, sizeof *out->specs);
    if (out->specs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parse_spec(PyTuple_GET_ITEM(out->items, i), &out->specs[i]) < 0) {
            return -1;
        }
    }
    out->count = (int)count;
    return 0;
}

static int
parse_request(PyObject *const *args, Py_ssize_t nargs, struct request *out)
{
    PyObject *list = NULL;
    int32_t world = 1;
    const fsdpc_py_arg table[] = {
        {"specs", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &list},
        {"world", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &world},
        {"align_bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &out->align_bytes},
        {"spans", FSDPC_PY_BOOL, FSDPC_PY_OPTIONAL, &out->spans},
    };
    if (fsdpc_py_args("layout", table, 4, args, nargs, NULL) < 0) {
        return -1;
    }
    if (world > MAX_WORLD) {
        PyErr_Format(PyExc_ValueError, "layout: world is %d, but at most %d is supported", world,
                     MAX_WORLD);
        return -1;
    }
    out->world = world;
    return fsdpc_py_specs_parse(list, &out->list);
}

void
fsdpc_py_specs_release(fsdpc_py_specs *list)
{
    fsdpc_mem_free(list->specs);
    Py_XDECREF(list->items);
}

/* --- results --------------------------------------------------------------------------------- */

static PyObject *
reduce_offset(const fsdpc_layout *layout, int param)
{
    if (layout->params[param].trainable_index < 0) {
        return Py_NewRef(Py_None);
    }
    return PyLong_FromSize_t(fsdpc_layout_reduce_offset(layout, param));
}

static PyObject *
param_dict(const fsdpc_layout *layout, int param)
{
    const fsdpc_param_place *place = &layout->params[param];
    return Py_BuildValue("{s:s,s:i,s:L,s:L,s:i,s:n,s:N}", "name", place->name, "segment",
                         place->segment, "offset", (long long)place->offset, "numel",
                         (long long)place->numel, "trainable_index", place->trainable_index,
                         "full_offset", (Py_ssize_t)fsdpc_layout_full_offset(layout, param),
                         "reduce_offset", reduce_offset(layout, param));
}

static PyObject *
segment_dict(const fsdpc_layout *layout, int index)
{
    const fsdpc_segment *segment = &layout->segments[index];
    return Py_BuildValue(
        "{s:s,s:s,s:s,s:s,s:O,s:L,s:L,s:n,s:n,s:n,s:n}", "storage",
        fsdpc_dtype_name(segment->storage), "compute", fsdpc_dtype_name(segment->compute), "reduce",
        fsdpc_dtype_name(segment->reduce), "accumulate", fsdpc_dtype_name(segment->accumulate),
        "trainable", segment->trainable ? Py_True : Py_False, "numel", (long long)segment->numel,
        "piece_numel", (long long)segment->piece_numel, "full_offset",
        (Py_ssize_t)segment->full_offset, "shard_offset", (Py_ssize_t)segment->shard_offset,
        "grad_offset", (Py_ssize_t)segment->grad_offset, "reduce_offset",
        (Py_ssize_t)segment->reduce_offset);
}

static PyObject *
span_list(const fsdpc_layout *layout, int param)
{
    PyObject *list = PyList_New(layout->world);
    for (int rank = 0; list != NULL && rank < layout->world; rank++) {
        fsdpc_span span = fsdpc_layout_span(layout, param, rank);
        PyObject *item = Py_BuildValue("LLL", (long long)span.param_begin,
                                       (long long)span.piece_begin, (long long)span.length);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, rank, item);
    }
    return list;
}

typedef PyObject *(*make_item)(const fsdpc_layout *layout, int index);

static PyObject *
list_of(const fsdpc_layout *layout, int count, make_item make)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        PyObject *item = make(layout, i);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

PyObject *
fsdpc_py_layout_dict(const fsdpc_layout *layout, bool spans)
{
    PyObject *params = list_of(layout, layout->param_count, param_dict);
    PyObject *segments = list_of(layout, layout->segment_count, segment_dict);
    PyObject *owned = spans ? list_of(layout, layout->param_count, span_list) : Py_NewRef(Py_None);
    if (params == NULL || segments == NULL || owned == NULL) {
        Py_XDECREF(params);
        Py_XDECREF(segments);
        Py_XDECREF(owned);
        return NULL;
    }
    return Py_BuildValue(
        "{s:i,s:n,s:n,s:n,s:n,s:n,s:L,s:N,s:N,s:N}", "world", layout->world, "align_bytes",
        (Py_ssize_t)layout->align_bytes, "full_bytes", (Py_ssize_t)layout->full_bytes,
        "shard_bytes", (Py_ssize_t)layout->shard_bytes, "grad_bytes",
        (Py_ssize_t)layout->grad_bytes, "reduce_bytes", (Py_ssize_t)layout->reduce_bytes,
        "padding_bytes", (long long)layout->padding_bytes, "params", params, "segments", segments,
        "spans", owned);
}

PyObject *
fsdpc_py_layout(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    struct request request = {0};
    fsdpc_layout *layout = NULL;
    PyObject *result = NULL;
    if (parse_request(args, nargs, &request) == 0) {
        int status = fsdpc_layout_build(request.list.specs, request.list.count, request.world,
                                        request.align_bytes, &layout);
        result = status == FSDPC_OK ? fsdpc_py_layout_dict(layout, request.spans)
                                    : fsdpc_py_raise(status);
    }
    fsdpc_layout_free(layout);
    fsdpc_py_specs_release(&request.list);
    return result;
}
