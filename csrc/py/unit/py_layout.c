/* Parses lists of parameters from Python, and converts a unit's layout to plain Python data. */
#include "py/unit/py_layout.h"

#include "base/mem.h"

static int
parse_dtype(const char *name, fsdpc_dtype *out)
{
    int status = fsdpc_dtype_from_name(name, out);
    return fsdpc_py_checked(status);
}

static int
parse_spec(PyObject *item, fsdpc_param_spec *out)
{
    const char *storage, *compute, *reduce, *codec = "", *reduce_codec = "";
    long long numel, row_numel = 0;
    int trainable, feedback = 0;
    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "layout: a parameter must be a tuple, not %.100s",
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(
            item,
            "sLsssp|Lssp;layout: a parameter must be (name: str, numel: int, storage: str, "
            "compute: str, reduce: str, trainable: bool[, row_numel: int[, codec: str[, "
            "reduce_codec: str[, feedback: bool]]]])",
            &out->name, &numel, &storage, &compute, &reduce, &trainable, &row_numel, &codec,
            &reduce_codec, &feedback)) {
        return -1;
    }
    out->numel = numel;
    out->row_numel = row_numel;
    out->trainable = trainable != 0;
    out->feedback = feedback != 0;
    if (parse_dtype(storage, &out->storage) < 0 || parse_dtype(compute, &out->compute) < 0) {
        return -1;
    }
    if (fsdpc_py_checked(fsdpc_codec_from_name(codec, &out->codec)) < 0 ||
        fsdpc_py_checked(fsdpc_codec_from_name(reduce_codec, &out->reduce_codec)) < 0) {
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
param_dict(const void *context, Py_ssize_t number)
{
    const fsdpc_layout *layout = context;
    const int param = (int)number;
    const fsdpc_param_place *place = &layout->params[param];
    return Py_BuildValue("{s:s,s:i,s:L,s:L,s:i,s:n,s:N}", "name", place->name, "segment",
                         place->segment, "offset", (long long)place->offset, "numel",
                         (long long)place->numel, "trainable_index", place->trainable_index,
                         "full_offset", (Py_ssize_t)fsdpc_layout_full_offset(layout, param),
                         "reduce_offset", reduce_offset(layout, param));
}

static PyObject *
segment_dict(const void *layout, Py_ssize_t index)
{
    const fsdpc_segment *segment = &((const fsdpc_layout *)layout)->segments[index];
    return Py_BuildValue(
        "{s:s,s:s,s:s,s:s,s:O,s:L,s:L,s:L,s:n,s:n,s:n,s:n,s:s,s:n,s:s,s:n}", "storage",
        fsdpc_dtype_name(segment->storage), "compute", fsdpc_dtype_name(segment->compute), "reduce",
        fsdpc_dtype_name(segment->reduce), "accumulate", fsdpc_dtype_name(segment->accumulate),
        "trainable", segment->trainable ? Py_True : Py_False, "numel", (long long)segment->numel,
        "row_numel", (long long)segment->row_numel, "piece_numel", (long long)segment->piece_numel,
        "full_offset", (Py_ssize_t)segment->full_offset, "shard_offset",
        (Py_ssize_t)segment->shard_offset, "grad_offset", (Py_ssize_t)segment->grad_offset,
        "reduce_offset", (Py_ssize_t)segment->reduce_offset, "codec",
        fsdpc_codec_name(segment->codec), "coded_bytes", (Py_ssize_t)segment->coded_bytes,
        "reduce_codec", fsdpc_codec_name(segment->reduce_codec), "reduce_coded_bytes",
        (Py_ssize_t)segment->reduce_coded_bytes);
}

typedef struct param_of {
    const fsdpc_layout *layout;
    int param;
} param_of;

static PyObject *
span_tuple(const void *context, Py_ssize_t rank)
{
    const param_of *of = context;
    const fsdpc_span span = fsdpc_layout_span(of->layout, of->param, (int)rank);
    return Py_BuildValue("LLL", (long long)span.param_begin, (long long)span.piece_begin,
                         (long long)span.length);
}

static PyObject *
span_list(const void *layout, Py_ssize_t param)
{
    const param_of of = {layout, (int)param};
    return fsdpc_py_list(of.layout->world, span_tuple, &of);
}

static PyObject *
shard_padding(const void *layout, Py_ssize_t rank)
{
    return PyLong_FromLongLong(fsdpc_layout_shard_padding(layout, (int)rank));
}

PyObject *
fsdpc_py_layout_dict(const fsdpc_layout *layout, bool spans)
{
    PyObject *params = fsdpc_py_list(layout->param_count, param_dict, layout);
    PyObject *segments = fsdpc_py_list(layout->segment_count, segment_dict, layout);
    PyObject *owned =
        spans ? fsdpc_py_list(layout->param_count, span_list, layout) : Py_NewRef(Py_None);
    PyObject *padding =
        spans ? fsdpc_py_list(layout->world, shard_padding, layout) : Py_NewRef(Py_None);
    if (params == NULL || segments == NULL || owned == NULL || padding == NULL) {
        Py_XDECREF(params);
        Py_XDECREF(segments);
        Py_XDECREF(owned);
        Py_XDECREF(padding);
        return NULL;
    }
    return Py_BuildValue(
        "{s:i,s:n,s:n,s:n,s:n,s:n,s:L,s:N,s:N,s:N,s:N}", "world", layout->world, "align_bytes",
        (Py_ssize_t)layout->align_bytes, "full_bytes", (Py_ssize_t)layout->full_bytes,
        "shard_bytes", (Py_ssize_t)layout->shard_bytes, "grad_bytes",
        (Py_ssize_t)layout->grad_bytes, "reduce_bytes", (Py_ssize_t)layout->reduce_bytes,
        "padding_bytes", (long long)layout->padding_bytes, "shard_padding_bytes", padding, "params",
        params, "segments", segments, "spans", owned);
}
