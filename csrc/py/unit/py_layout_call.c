/* layout(): returns where the engine places a list of parameters. The engine uses layout.h as well, so tests
 * of this function test the engine's placement, and plans agree with runs.
 */
#include "py/unit/py_layout.h"

enum { MAX_WORLD = 1 << 17 }; /* limits the result, which has a row per rank */

struct request {
    fsdpc_py_specs list;
    int world;
    size_t align_bytes;
    bool spans;
};

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

static PyObject *
layout(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    struct request request = {0};
    fsdpc_layout *made = NULL;
    PyObject *result = NULL;
    if (parse_request(args, nargs, &request) == 0) {
        int status = fsdpc_layout_build(request.list.specs, request.list.count, request.world,
                                        request.align_bytes, &made);
        result =
            status == FSDPC_OK ? fsdpc_py_layout_dict(made, request.spans) : fsdpc_py_raise(status);
    }
    fsdpc_layout_free(made);
    fsdpc_py_specs_release(&request.list);
    return result;
}

PyMethodDef fsdpc_py_layout_methods[] = {
    FSDPC_PY_FUNCTION(
        layout, METH_FASTCALL, "($module, specs, world, align_bytes, spans=False, /)",
        "Where the parameters of a unit lie: sizes, segments, and with `spans` which ranks own\n"
        "which part and the padding of each rank's shard. specs: (name, numel, storage, compute,\n"
        "reduce, trainable[, row_numel[, codec[, reduce_codec[, feedback]]]]) each, dtypes as "
        "text.\n"
        "row_numel > 0: the parameter is cut between its rows, as by torch.chunk. codec, "
        "reduce_codec: how\n"
        "its values and its gradients travel. Offsets and sizes in bytes, counts in elements.\n"
        "ValueError, TypeError."),
    {NULL, NULL, 0, NULL},
};
