/* optim_step(): one step of many tensors in one call, without the GIL, in host memory or on a GPU's current
 * stream.
 *
 * Everything is checked before the first byte is written: a step that raises has changed nothing. The caller
 * increments the tensors' version counters by functions of torch. */
#include "py/optim/py_optim.h"

#include <string.h>

#include "base/mem.h"
#include "device/device.h"
#include "optim/optim.h"
#include "py/base/py_numpy.h"

enum { MAX_STATES = 4 };

struct request {
    fsdpc_optim_rule rule;
    fsdpc_optim_states how;
    int least_states, most_states;
    fsdpc_device *device;  /* NULL: host memory */
    fsdpc_py_device place; /* of all tensors */
    fsdpc_step_control control;
    void *scratch;
    PyObject *params, *grads, *steps;    /* owned tuples */
    PyObject *places, *edges, *measures; /* borrowed */
    PyObject *averages;                  /* owned tuple; NULL: the step updates no averages */
    PyObject *states[MAX_STATES];        /* owned tuples */
    int state_count;
    int32_t threads;
    int count;
    fsdpc_optim_tensor *tensors; /* owned */
    float **step_values;         /* owned: addresses of step numbers, on the device `place` */
};

static void
request_close(struct request *request)
{
    Py_XDECREF(request->params);
    Py_XDECREF(request->grads);
    Py_XDECREF(request->steps);
    Py_XDECREF(request->averages);
    for (int s = 0; s < MAX_STATES; s++) {
        Py_XDECREF(request->states[s]);
    }
    fsdpc_mem_free(request->tensors);
    fsdpc_mem_free(request->step_values);
}

/* --- the rule ---------------------------------------------------------------------------------- */

static int
parse_kind(const char *kind, struct request *out)
{
    static const struct {
        const char *name;
        fsdpc_optim_kind kind;
        fsdpc_optim_states how;
        int least, most;
    } kinds[] = {
#define WHOLE(NAME, name, least, most) {name, FSDPC_OPTIM_##NAME, FSDPC_OPTIM_WHOLE, least, most},
#define CODES(NAME, name, least, most) {name, FSDPC_OPTIM_ADAM, FSDPC_OPTIM_##NAME, least, most},
        FSDPC_STEP_ELEMENT_KINDS(WHOLE) FSDPC_STEP_BLOCK_KINDS(WHOLE) FSDPC_STEP_8BIT_KINDS(CODES)
#undef WHOLE
#undef CODES
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(kind, kinds[i].name) == 0) {
            out->rule.kind = kinds[i].kind;
            out->how = kinds[i].how;
            out->least_states = kinds[i].least;
            out->most_states = kinds[i].most;
            return 0;
        }
    }
    PyErr_Format(
        PyExc_ValueError,
        "optim_step: kind '%.40s': choose from" FSDPC_STEP_ELEMENT_KINDS(FSDPC_PY_STEP_NAME)
            FSDPC_STEP_BLOCK_KINDS(FSDPC_PY_STEP_NAME) FSDPC_STEP_8BIT_KINDS(FSDPC_PY_STEP_NAME),
        kind);
    return -1;
}

int
fsdpc_py_optim_rule(PyObject *tuple, fsdpc_optim_rule *out)
{
    int decoupled, maximize, nesterov, stochastic, keeps_grads;
    unsigned long long seed;
    if (!PyTuple_Check(tuple) ||
        !PyArg_ParseTuple(tuple, "dddddddpppppK", &out->lr, &out->beta1, &out->beta2, &out->eps,
                          &out->weight_decay, &out->grad_scale, &out->clip, &decoupled, &maximize,
                          &nesterov, &stochastic, &keeps_grads, &seed)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "optim_step: the rule must be a tuple");
        }
        return -1;
    }
    out->decoupled = decoupled;
    out->maximize = maximize;
    out->nesterov = nesterov;
    out->stochastic = stochastic;
    out->keeps_grads = keeps_grads;
    out->seed = seed;
    return 0;
}

/* --- tensors ----------------------------------------------------------------------------------- */

static PyObject *
tuple_of(PyObject *sequence, const char *what, int count)
{
    PyObject *tuple = PySequence_Tuple(sequence); /* a list may change while the GIL is released */
    if (tuple != NULL && count >= 0 && PyTuple_GET_SIZE(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "optim_step: %zd %s for %d parameters",
                     PyTuple_GET_SIZE(tuple), what, count);
        Py_CLEAR(tuple);
    }
    return tuple;
}

static int
bad(int i, const char *what, const char *problem)
{
    PyErr_Format(PyExc_ValueError, "optim_step: the %s of tensor %d %s", what, i, problem);
    return -1;
}

static int
view_of(const struct request *request, PyObject *tuple, int i, const char *what, int64_t numel,
        fsdpc_py_view *out)
{
    if (fsdpc_py_torch_view_on(PyTuple_GET_ITEM(tuple, i), request->place, out) < 0) {
        return -1;
    }
    if (!out->contiguous) {
        return bad(i, what, "is not contiguous");
    }
    return numel < 0 || out->numel == numel ? 0 : bad(i, what, "has another number of elements");
}

static int
read_dlpack_device(struct request *request, int i, fsdpc_optim_tensor *tensor)
{
    long long first = 0, block = 1;
    unsigned long long key = (unsigned long long)i;
    PyObject *place = request->places == Py_None ? NULL : PyTuple_GET_ITEM(request->places, i);
    if (place && !PyTuple_Check(place)) {
        return bad(i, "place", "must be a tuple (first, key, block)");
    }
    if (place && !PyArg_ParseTuple(place, "LKL", &first, &key, &block)) {
        return -1;
    }
    if (first < 0 || block < 1) {
        return bad(i, "place", "must have a first index >= 0 and a block >= 1");
    }
    tensor->first = first;
    tensor->key = key;
    tensor->block = block;
    return 0;
}

static int64_t
blocks_of(const fsdpc_optim_tensor *tensor, int64_t block)
{
    if (tensor->numel == 0) {
        return 0;
    }
    return (tensor->first + tensor->numel - 1) / block - tensor->first / block + 1;
}

/* Reads state `s` of an 8-bit step: 0 and 1 are the codes of m and v, 2 and 3 the scales of m and v. */
static int
read_state8(struct request *request, int i, int s, fsdpc_optim_tensor *tensor)
{
    fsdpc_py_view view;
    const int64_t expected = s < 2 ? tensor->numel : blocks_of(tensor, FSDPC_OPTIM_BLOCK);
    if (view_of(request, request->states[s], i, s < 2 ? "codes" : "scales", expected, &view) < 0) {
        return -1;
    }
    if (view.itemsize != (s < 2 ? 1 : 4) || (s >= 2 && view.dtype != FSDPC_F32)) {
        return bad(i, s < 2 ? "codes" : "scales", "are of another type");
    }
    if (s < 2) {
        tensor->states[s] = view.data;
    } else {
        tensor->scales[s - 2] = view.data;
    }
    return 0;
}

static int
read_state(struct request *request, int i, int s, fsdpc_optim_tensor *tensor)
{
    fsdpc_py_view view;
    const bool shared = request->rule.kind == FSDPC_OPTIM_MINI && s == 1;
    const int64_t expected = shared ? blocks_of(tensor, tensor->block) : tensor->numel;
    if (view_of(request, request->states[s], i, "state", expected, &view) < 0) {
        return -1;
    }
    if (shared) {
        if (view.dtype != FSDPC_F32) {
            return bad(i, "denominators", "are not float32");
        }
    } else if (s > 0 && view.dtype != tensor->state_type) {
        return bad(i, "states", "differ in type");
    } else {
        tensor->state_type = view.dtype;
    }
    tensor->states[s] = view.data;
    return 0;
}

static int
read_tensor(struct request *request, int i)
{
    fsdpc_optim_tensor *tensor = &request->tensors[i];
    fsdpc_py_view param, grad, step;
    if (read_dlpack_device(request, i, tensor) < 0 ||
        view_of(request, request->params, i, "parameter", -1, &param) < 0 ||
        view_of(request, request->grads, i, "gradient", param.numel, &grad) < 0 ||
        view_of(request, request->steps, i, "step", 1, &step) < 0) {
        return -1;
    }
    if (step.dtype != FSDPC_F32) {
        return bad(i, "step", "is not float32");
    }
    tensor->param = param.data;
    tensor->param_type = tensor->state_type = param.dtype;
    tensor->grad = grad.data;
    tensor->grad_type = grad.dtype;
    tensor->numel = param.numel;
    request->step_values[i] = step.data;
    tensor->step = request->device ? 0 : (double)*request->step_values[i] + 1;
    for (int s = 0; s < request->state_count; s++) {
        if ((request->how != FSDPC_OPTIM_WHOLE ? read_state8 : read_state)(request, i, s, tensor) <
            0) {
            return -1;
        }
    }
    return 0;
}

/* Points *out at the values of request->edges: a tensor if the step runs on a GPU, else a NumPy array. */
static int
find_edges(struct request *request, float **out)
{
    const npy_intp shape[] = {request->count, 2, FSDPC_OPTIM_EDGE};
    PyArrayObject *array = (PyArrayObject *)request->edges;
    fsdpc_py_view view;
    if (request->device) {
        if (fsdpc_py_torch_view_on(request->edges, request->place, &view) < 0) {
            return -1;
        }
        if (!view.contiguous || view.dtype != FSDPC_F32 ||
            view.numel != (int64_t)request->count * 2 * FSDPC_OPTIM_EDGE) {
            PyErr_SetString(
                PyExc_ValueError,
                "optim_step: edges must be a contiguous float32 tensor, 6 values per parameter");
            return -1;
        }
        *out = view.data;
        return 0;
    }
    if (!PyArray_Check(request->edges) || PyArray_TYPE(array) != NPY_FLOAT32 ||
        PyArray_NDIM(array) != 3 || memcmp(PyArray_DIMS(array), shape, sizeof shape) != 0 ||
        !PyArray_ISCARRAY(array)) {
        PyErr_Format(PyExc_ValueError, "optim_step: edges must be a float32 array of (%d, 2, %d)",
                     request->count, FSDPC_OPTIM_EDGE);
        return -1;
    }
    *out = PyArray_DATA(array);
    return 0;
}

static int
read_edges(struct request *request)
{
    float *edges;
    if (request->edges == Py_None && request->how != FSDPC_OPTIM_EDGES8) {
        return 0;
    }
    if (find_edges(request, &edges) < 0) {
        return -1;
    }
    for (int i = 0; i < request->count; i++) {
        request->tensors[i].edges = edges + (size_t)i * 2 * FSDPC_OPTIM_EDGE;
    }
    return 0;
}

static int
read_measures(struct request *request)
{
    PyArrayObject *array = (PyArrayObject *)request->measures;
    if (request->measures == Py_None) {
        return 0;
    }
    if (request->device || request->how == FSDPC_OPTIM_EDGES8) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "optim_step: statistics are those of a step in host memory");
        return -1;
    }
    if (!PyArray_Check(request->measures) || PyArray_TYPE(array) != NPY_FLOAT64 ||
        !PyArray_ISCARRAY(array) ||
        PyArray_SIZE(array) != (npy_intp)request->count * FSDPC_OPTIM_MEASURES) {
        PyErr_Format(PyExc_ValueError, "optim_step: measures must be a float64 array of (%d, %d)",
                     request->count, FSDPC_OPTIM_MEASURES);
        return -1;
    }
    double *values = PyArray_DATA(array);
    for (int i = 0; i < request->count; i++) {
        request->tensors[i].measures = values + (size_t)i * FSDPC_OPTIM_MEASURES;
    }
    return 0;
}

static int
read_average(struct request *request, int i)
{
    fsdpc_optim_tensor *tensor = &request->tensors[i];
    fsdpc_py_view view;
    if (PyTuple_GET_ITEM(request->averages, i) == Py_None) {
        return 0;
    }
    if (view_of(request, request->averages, i, "average", tensor->numel, &view) < 0) {
        return -1;
    }
    if (view.dtype != (tensor->param_type == FSDPC_F64 ? FSDPC_F64 : FSDPC_F32)) {
        return bad(i, "average", "is neither float32 nor, of a float64 parameter, float64");
    }
    tensor->average = view.data;
    return 0;
}

/* Reads `given`, which is (weight, averages) or None. Returns 0, or -1 with an exception. */
static int
read_averages(struct request *request, PyObject *given)
{
    PyObject *averages;
    if (given == Py_None) {
        return 0;
    }
    if (request->device || request->how == FSDPC_OPTIM_EDGES8) {
        PyErr_SetString(PyExc_NotImplementedError,
                        "optim_step: averages are those of a step in host memory");
        return -1;
    }
    if (!PyTuple_Check(given)) {
        PyErr_Format(PyExc_TypeError,
                     "optim_step: averages must be (weight, averages) or None, not %.100s",
                     Py_TYPE(given)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(given, "dO", &request->rule.average_weight, &averages)) {
        return -1;
    }
    request->rule.averages = true;
    request->averages = tuple_of(averages, "averages", request->count);
    for (int i = 0; request->averages != NULL && i < request->count; i++) {
        if (read_average(request, i) < 0) {
            return -1;
        }
    }
    return request->averages == NULL ? -1 : 0;
}

/* --- tensors on a GPU --------------------------------------------------------------------------- */

/* Sets *out to the address of a tensor of one element on the device; for None, *out is unchanged. Returns 0,
 * or -1 with an exception. */
static int
read_value(const struct request *request, PyObject *tensor, fsdpc_dtype type, const void **out)
{
    fsdpc_py_view view;
    if (tensor == Py_None) {
        return 0;
    }
    if (fsdpc_py_torch_view_on(tensor, request->place, &view) < 0) {
        return -1;
    }
    if (view.numel != 1 || view.dtype != type) {
        PyErr_Format(PyExc_ValueError,
                     "optim_step: each tensor of control must hold one value in %s",
                     fsdpc_dtype_name(type));
        return -1;
    }
    *out = view.data;
    return 0;
}

static int
read_device(struct request *request, int32_t ordinal, PyObject *control, PyObject *scratch)
{
    PyObject *scale, *found, *clip;
    const void *values[3] = {NULL, NULL, NULL};
    fsdpc_py_view view;
    const int status = fsdpc_device_cuda(ordinal, &request->device);
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    request->place = fsdpc_py_device_of(request->device);
    if (!PyArg_ParseTuple(control, "OOO", &scale, &found, &clip) ||
        read_value(request, scale, FSDPC_F32, &values[0]) < 0 ||
        read_value(request, found, FSDPC_F32, &values[1]) < 0 ||
        read_value(request, clip, FSDPC_F64, &values[2]) < 0 ||
        fsdpc_py_torch_view_on(scratch, request->place, &view) < 0) {
        return -1;
    }
    if ((uint64_t)view.numel * view.itemsize <
            (uint64_t)PySequence_Size(request->params) * FSDPC_STEP_SCRATCH ||
        (uintptr_t)view.data % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "optim_step: scratch needs %d bytes per tensor",
                     FSDPC_STEP_SCRATCH);
        return -1;
    }
    request->control = (fsdpc_step_control){values[0], values[1], values[2]};
    request->scratch = view.data;
    return fsdpc_py_enter_device(request->device);
}

static int
run_on_device(const struct request *request)
{
    return fsdpc_optim_step_on(request->device, &request->rule, request->how, &request->control,
                               request->tensors, request->step_values, request->count,
                               request->scratch);
}

/* --- the call ---------------------------------------------------------------------------------- */

static int
check_state_count(const struct request *request)
{
    const int found = request->state_count;
    if (found >= request->least_states && found <= request->most_states) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "optim_step: this kind of step has another number of states than %d", found);
    return -1;
}

static int
request_open(struct request *request, PyObject *params, PyObject *grads, PyObject *states,
             PyObject *steps, int32_t device, PyObject *control, PyObject *scratch)
{
    request->params = tuple_of(params, "parameters", -1);
    if (request->params == NULL ||
        (device >= 0 && read_device(request, device, control, scratch) < 0)) {
        return -1;
    }
    request->count = (int)PyTuple_GET_SIZE(request->params);
    if (!PyTuple_Check(states) || PyTuple_GET_SIZE(states) > MAX_STATES) {
        PyErr_SetString(PyExc_TypeError, "optim_step: states must be a tuple of lists");
        return -1;
    }
    request->state_count = (int)PyTuple_GET_SIZE(states);
    for (int s = 0; s < request->state_count; s++) {
        request->states[s] = tuple_of(PyTuple_GET_ITEM(states, s), "states", request->count);
        if (request->states[s] == NULL) {
            return -1;
        }
    }
    request->grads = tuple_of(grads, "gradients", request->count);
    request->steps = request->grads ? tuple_of(steps, "steps", request->count) : NULL;
    if (request->steps == NULL || check_state_count(request) < 0) {
        return -1;
    }
    if (request->places != Py_None &&
        (!PyTuple_Check(request->places) || PyTuple_GET_SIZE(request->places) != request->count)) {
        PyErr_SetString(PyExc_TypeError, "optim_step: places must be a tuple, one per parameter");
        return -1;
    }
    request->tensors = fsdpc_mem_calloc((size_t)request->count, sizeof *request->tensors);
    request->step_values = fsdpc_mem_calloc((size_t)request->count, sizeof *request->step_values);
    if (request->tensors == NULL || request->step_values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < request->count; i++) {
        if (read_tensor(request, i) < 0) {
            return -1;
        }
    }
    return read_edges(request) < 0 ? -1 : read_measures(request);
}

static int
run(const struct request *request)
{
    const fsdpc_optim_tensor *tensors = request->tensors;
    int status;
    Py_BEGIN_ALLOW_THREADS
    if (request->device) {
        status = run_on_device(request);
    } else if (request->how == FSDPC_OPTIM_EDGES8) {
        status = fsdpc_optim_edges8(&request->rule, tensors, request->count);
    } else if (request->how != FSDPC_OPTIM_WHOLE) {
        status = fsdpc_optim_step8(&request->rule, tensors, request->count, request->threads);
    } else {
        status = fsdpc_optim_step(&request->rule, tensors, request->count, request->threads);
    }
    Py_END_ALLOW_THREADS
    const bool counts =
        status == FSDPC_OK && request->how != FSDPC_OPTIM_EDGES8 && !request->device;
    for (int i = 0; counts && i < request->count; i++) {
        *request->step_values[i] = (float)tensors[i].step;
    }
    return status;
}

static PyObject *
optim_step(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    struct request request = {.places = Py_None,
                              .edges = Py_None,
                              .measures = Py_None,
                              .threads = 1,
                              .place = fsdpc_py_host};
    PyObject *rule, *params, *grads, *states, *steps, *result = NULL;
    PyObject *control = Py_None, *scratch = Py_None, *averages = Py_None;
    int32_t device = -1;
    const char *kind;
    const fsdpc_py_arg table[] = {
        {"kind", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &kind},
        {"rule", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &rule},
        {"params", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &params},
        {"grads", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &grads},
        {"states", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &states},
        {"steps", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &steps},
        {"places", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &request.places},
        {"edges", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &request.edges},
        {"threads", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &request.threads},
        {"device", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &device},
        {"control", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &control},
        {"scratch", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &scratch},
        {"measures", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &request.measures},
        {"averages", FSDPC_PY_OBJECT, FSDPC_PY_OPTIONAL, &averages},
    };
    if (fsdpc_py_args("optim_step", table, 14, args, count, keywords) == 0 &&
        parse_kind(kind, &request) == 0 && fsdpc_py_optim_rule(rule, &request.rule) == 0 &&
        request_open(&request, params, grads, states, steps, device, control, scratch) == 0 &&
        read_averages(&request, averages) == 0) {
        const int status = run(&request);
        result = fsdpc_py_none_or(status);
    }
    request_close(&request);
    return result;
}

PyMethodDef fsdpc_py_optim_methods[] = {
    FSDPC_PY_FUNCTION(
        optim_step, FSDPC_PY_KEYWORDS,
        "(kind, rule, params, grads, states, steps, places=None, edges=None, threads=1, device=-1, "
        "control=None, scratch=None, measures=None, averages=None)",
        "One step of contiguous tensors in host memory, see csrc/optim/optim.h. rule: (lr, beta1,\n"
        "beta2, eps, weight_decay, grad_scale, clip, decoupled, maximize, nesterov, stochastic,\n"
        "keeps_grads, seed). states: one list per state. places: (first, key, block) of each\n"
        "tensor. device: the GPU's ordinal if all tensors, steps and edges are in its memory.\n"
        "Then the step is queued on its current stream; control is (grad_scale, found_inf, clip),\n"
        "a tensor of one value there or None each; scratch: 256 bytes there for each tensor.\n"
        "measures: a float64 array, 6 values for each tensor that the step adds to. averages:\n"
        "(weight, averages), a tensor for each parameter or None."),
    {NULL, NULL, 0, NULL},
};
