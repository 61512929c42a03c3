/* Kernels that only devices have: packing many tensors by one launch, and multiplying by a factor that
 * the host never reads. A pack plan is a capsule, which is freed with its last reference.
 */
#include "base/mem.h"
#include "probe_kernels.h"

typedef struct pack_way {
    fsdpc_py_kernels kernels;
    fsdpc_pack_plan *plan;
    fsdpc_pack_target *targets; /* an array of `count` targets, freed with this struct */
    int count;
    size_t bytes;
} pack_way;

static const char *const capsule_name = "fsdpc.pack_plan";

static void
free_way(pack_way *way)
{
    if (way->plan != NULL) {
        fsdpc_device_pack_plan_free(way->kernels.device, way->plan);
    }
    fsdpc_mem_free(way->targets);
    fsdpc_mem_free(way);
}

static void
drop_capsule(PyObject *capsule)
{
    free_way(PyCapsule_GetPointer(capsule, capsule_name));
}

/* (elements, offset, dtype) */
static int
read_target(PyObject *item, fsdpc_pack_target *out)
{
    long long n, offset;
    const char *dtype;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "LLs", &n, &offset, &dtype)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a target must be (elements, offset, dtype)");
        }
        return -1;
    }
    const int status = fsdpc_dtype_from_name(dtype, &out->dtype);
    out->n = n;
    out->offset = offset < 0 ? SIZE_MAX : (size_t)offset; /* SIZE_MAX makes the plan fail */
    return fsdpc_py_checked(status);
}

static int
read_targets(PyObject *sequence, pack_way *way)
{
    PyObject *items = PySequence_Tuple(sequence);
    int result = items == NULL ? -1 : 0;
    if (items != NULL) {
        way->count = (int)PyTuple_GET_SIZE(items);
        way->targets = fsdpc_mem_calloc((size_t)way->count, sizeof *way->targets);
        if (way->targets == NULL) {
            PyErr_NoMemory();
            result = -1;
        }
    }
    for (int i = 0; result == 0 && i < way->count; i++) {
        result = read_target(PyTuple_GET_ITEM(items, i), &way->targets[i]);
    }
    Py_XDECREF(items);
    return result;
}

static int
make_plan(pack_way *way)
{
    if (way->kernels.device == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "kernel_pack_plan needs a device, not a table of kernels");
        return -1;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_device_pack_plan(
        way->kernels.device, way->targets, NULL, way->count, way->bytes, false, &way->plan));
    return fsdpc_py_checked(status);
}

PyObject *
fsdpc_py_kernel_pack_plan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                          PyObject *keywords)
{
    PyObject *targets = NULL, *capsule = NULL;
    const char *kernels = NULL;
    size_t bytes = 0;
    const fsdpc_py_arg table[] = {
        {"targets", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &targets},
        {"bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &bytes},
        {"kernels", FSDPC_PY_STR_OR_NONE, FSDPC_PY_OPTIONAL, &kernels},
    };
    if (fsdpc_py_args("kernel_pack_plan", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    pack_way *way = fsdpc_mem_calloc(1, sizeof *way);
    if (way == NULL) {
        return PyErr_NoMemory();
    }
    way->bytes = bytes;
    if (fsdpc_py_kernels_find(kernels, &way->kernels) == 0 && read_targets(targets, way) == 0 &&
        make_plan(way) == 0) {
        capsule = PyCapsule_New(way, capsule_name, drop_capsule);
    }
    if (capsule == NULL) {
        free_way(way);
    }
    return capsule;
}

/* --- packing --------------------------------------------------------------------------------------- */

typedef struct pack_call {
    pack_way *way;
    fsdpc_py_buffer dst;
    fsdpc_py_view *views;       /* an array with one view for each target, freed with this struct */
    fsdpc_pack_source *sources; /* an array of sources, freed with this struct; they use `views` */
    double scale;
} pack_call;

static int
open_source(PyObject *item, const pack_call *call, int i)
{
    fsdpc_py_view *view = &call->views[i];
    if (item == Py_None) {
        return 0;
    }
    if (fsdpc_py_tensor_view_any(item, view) < 0) {
        view->owner = NULL;
        return -1;
    }
    if (fsdpc_py_check_device(view, call->dst.view.place) < 0) {
        return -1;
    }
    if (view->numel != call->way->targets[i].n) {
        PyErr_Format(PyExc_ValueError, "tensor %d has %lld elements, but its target has %lld", i,
                     (long long)view->numel, (long long)call->way->targets[i].n);
        return -1;
    }
    call->sources[i] = (fsdpc_pack_source){.data = view->data,
                                           .dtype = view->dtype,
                                           .ndim = view->ndim,
                                           .shape = view->shape,
                                           .strides = view->contiguous ? NULL : view->strides};
    return 0;
}

static int
open_sources(PyObject *sequence, pack_call *call)
{
    const int count = call->way->count;
    PyObject *items = PySequence_Tuple(sequence);
    if (items == NULL) {
        return -1;
    }
    int result = -1;
    call->views = fsdpc_mem_calloc((size_t)count, sizeof *call->views);
    call->sources = fsdpc_mem_calloc((size_t)count, sizeof *call->sources);
    if (call->views == NULL || call->sources == NULL) {
        PyErr_NoMemory();
    } else if (PyTuple_GET_SIZE(items) != count) {
        PyErr_Format(PyExc_ValueError, "%zd tensors for %d targets", PyTuple_GET_SIZE(items),
                     count);
    } else {
        result = 0;
    }
    for (int i = 0; result == 0 && i < count; i++) {
        result = open_source(PyTuple_GET_ITEM(items, i), call, i);
    }
    Py_DECREF(items);
    return result;
}

static int
open_call(PyObject *capsule, PyObject *dst, PyObject *src, pack_call *call)
{
    call->way = PyCapsule_GetPointer(capsule, capsule_name);
    if (call->way == NULL || fsdpc_py_enter_device(call->way->kernels.device) < 0 ||
        fsdpc_py_buffer_open(dst, "uint8", true, &call->way->kernels, &call->dst) < 0) {
        return -1;
    }
    if ((size_t)call->dst.n < call->way->bytes) {
        PyErr_Format(PyExc_ValueError, "the buffer has %lld bytes, but the plan needs %zu",
                     (long long)call->dst.n, call->way->bytes);
        return -1;
    }
    return open_sources(src, call);
}

static void
close_call(pack_call *call)
{
    for (int i = 0; call->views != NULL && i < call->way->count; i++) {
        if (call->views[i].owner != NULL) {
            fsdpc_py_view_release(&call->views[i]);
        }
    }
    fsdpc_py_buffer_close(&call->dst);
    fsdpc_mem_free(call->views);
    fsdpc_mem_free(call->sources);
}

PyObject *
fsdpc_py_kernel_pack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                     PyObject *keywords)
{
    PyObject *capsule = NULL, *dst = NULL, *src = NULL, *result = NULL;
    pack_call call = {.scale = 1.0};
    const fsdpc_py_arg table[] = {
        {"plan", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &capsule},
        {"dst", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &dst},
        {"src", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &src},
        {"scale", FSDPC_PY_DOUBLE, FSDPC_PY_OPTIONAL, &call.scale},
    };
    if (fsdpc_py_args("kernel_pack", table, 4, args, count, keywords) < 0) {
        return NULL;
    }
    if (open_call(capsule, dst, src, &call) == 0) {
        int status = FSDPC_PY_UNLOCKED(fsdpc_device_pack_onto(call.way->kernels.device,
                                                              call.way->plan, call.dst.view.data,
                                                              NULL, call.sources, call.scale));
        result = fsdpc_py_kernels_finish(status);
    }
    close_call(&call);
    return result;
}

/* --- a factor on the device ------------------------------------------------------------------------ */

PyObject *
fsdpc_py_kernel_scale_by(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords)
{
    PyObject *x = NULL, *factor = NULL, *result = NULL;
    const char *dtype = NULL, *kernels = NULL;
    fsdpc_py_kernels where;
    fsdpc_py_buffer values = {0}, number = {0};
    const fsdpc_py_arg table[] = {
        {"x", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &x},
        {"dtype", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &dtype},
        {"factor", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &factor},
        {"kernels", FSDPC_PY_STR_OR_NONE, FSDPC_PY_OPTIONAL, &kernels},
    };
    if (fsdpc_py_args("kernel_scale_by", table, 4, args, count, keywords) < 0 ||
        fsdpc_py_kernels_find(kernels, &where) < 0) {
        return NULL;
    }
    if (where.device == NULL) {
        PyErr_SetString(PyExc_ValueError, "kernel_scale_by needs a device, not a table of kernels");
        return NULL;
    }
    if (fsdpc_py_buffer_open(x, dtype, true, &where, &values) == 0 &&
        fsdpc_py_buffer_open(factor, "float64", false, &where, &number) == 0) {
        if (number.n != 1) {
            PyErr_SetString(PyExc_ValueError, "factor must be one float64");
        } else {
            const fsdpc_stretch all = {values.view.data, values.n, values.dtype};
            const int status =
                fsdpc_device_scale_by(where.device, &all, values.n > 0, number.view.data);
            result = fsdpc_py_kernels_finish(status);
        }
    }
    fsdpc_py_buffer_close(&values);
    fsdpc_py_buffer_close(&number);
    return result;
}
