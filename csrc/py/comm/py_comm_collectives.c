/* The collectives of a Comm, on arrays and tensors.
 *
 * Each collective makes a view of its array, releases the GIL, calls the core and converts the status.
 */
#include "py/comm/py_comm_impl.h"

#include <string.h>

/* --- the array ------------------------------------------------------------------------------- */

static int
open_array(PyObject *array, fsdpc_py_view *view)
{
    if (fsdpc_py_tensor_view_any(array, view) < 0) {
        return -1;
    }
    if (view->contiguous && !view->readonly) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "the array is %s; collectives work in place",
                 view->contiguous ? "read-only" : "not contiguous");
    fsdpc_py_view_release(view);
    return -1;
}

static size_t
view_bytes(const fsdpc_py_view *view)
{
    return (size_t)view->numel * view->itemsize;
}

/* Checks that the array can be divided into one equal piece per rank. */
static int
check_pieces(const fsdpc_py_view *view, int world)
{
    if (view->numel % world == 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "the array has %lld elements, which is not a multiple of %d ranks",
                 (long long)view->numel, world);
    return -1;
}

static int
check_float(const fsdpc_py_view *view)
{
    if (fsdpc_dtype_is_float(view->dtype)) {
        return 0;
    }
    PyErr_SetString(PyExc_TypeError,
                    "only float32, bfloat16, float16 and float64 arrays can be reduced");
    return -1;
}

/* --- what they have in common ---------------------------------------------------------------- */

/* One call of a collective: its arguments, and the view of its array. */
typedef struct job {
    fsdpc_comm *comm;
    fsdpc_py_view view;
    const char *what;
    int root;
    enum fsdpc_op op;
    bool on_device;
} job;

/* Chooses the group's GPU collectives, queued on torch's current stream, for torch tensors in the memory of
 * the group's GPU; chooses the group's host collectives for host memory. */
static int
choose_way(job *self, PyObject *array)
{
    fsdpc_device *device = fsdpc_comm_device(self->comm);
    fsdpc_py_device place = fsdpc_py_device_of(device);
    self->on_device = fsdpc_device_get_caps(device)->asynchronous && fsdpc_py_is_torch(array) &&
                      self->view.place.type == place.type && self->view.place.id == place.id;
    return self->on_device ? fsdpc_py_enter_device(device)
                           : fsdpc_py_check_device(&self->view, fsdpc_py_host);
}

static int
run_all_gather(job *self)
{
    size_t piece = view_bytes(&self->view) / (size_t)fsdpc_comm_world(self->comm);
    return (self->on_device ? fsdpc_comm_all_gather : fsdpc_comm_host_all_gather)(
        self->comm, self->view.data, piece, self->what);
}

static int
run_reduce_scatter(job *self)
{
    int64_t piece = self->view.numel / fsdpc_comm_world(self->comm);
    return (self->on_device ? fsdpc_comm_reduce_scatter : fsdpc_comm_host_reduce_scatter)(
        self->comm, self->view.data, piece, self->view.dtype, self->what);
}

static int
run_all_reduce(job *self)
{
    return (self->on_device ? fsdpc_comm_all_reduce : fsdpc_comm_host_all_reduce)(
        self->comm, self->view.data, self->view.numel, self->view.dtype, self->op, self->what);
}

static int
run_broadcast(job *self)
{
    return (self->on_device ? fsdpc_comm_broadcast : fsdpc_comm_host_broadcast)(
        self->comm, self->view.data, view_bytes(&self->view), self->root, self->what);
}

/* Runs a collective. The array must have one piece per rank if `pieces`, and a float type if `floats`. */
static PyObject *
run(job *self, PyObject *array, int (*collective)(job *), bool pieces, bool floats)
{
    if (open_array(array, &self->view) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (choose_way(self, array) == 0 &&
        (!pieces || check_pieces(&self->view, fsdpc_comm_world(self->comm)) == 0) &&
        (!floats || check_float(&self->view) == 0)) {
        int status = FSDPC_PY_UNLOCKED(collective(self));
        result = fsdpc_py_none_or(status);
    }
    fsdpc_py_view_release(&self->view);
    return result;
}

typedef struct arguments {
    PyObject *const *values;
    Py_ssize_t count;
    PyObject *keywords;
} arguments;

/* Runs a method (array, what='') whose array has one piece per rank. */
static PyObject *
run_pieces(PyObject *self, const char *method, const arguments *given, int (*collective)(job *),
           bool floats)
{
    PyObject *array = NULL;
    job work = {.what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (fsdpc_py_comm_get(self, &work.comm) < 0 ||
        fsdpc_py_args(method, table, 2, given->values, given->count, given->keywords) < 0) {
        return NULL;
    }
    return run(&work, array, collective, true, floats);
}

/* --- methods --------------------------------------------------------------------------------- */

PyObject *
fsdpc_py_comm_all_gather(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *keywords)
{
    arguments given = {values, count, keywords};
    return run_pieces(self, "all_gather", &given, run_all_gather, false);
}

PyObject *
fsdpc_py_comm_reduce_scatter(PyObject *self, PyObject *const *values, Py_ssize_t count,
                             PyObject *keywords)
{
    arguments given = {values, count, keywords};
    return run_pieces(self, "reduce_scatter", &given, run_reduce_scatter, true);
}

static int
parse_op(const char *name, enum fsdpc_op *out)
{
    static const char *const names[] = {"sum", "max", "min"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (enum fsdpc_op)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op must be 'sum', 'max' or 'min', not '%.50s'", name);
    return -1;
}

PyObject *
fsdpc_py_comm_all_reduce(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *keywords)
{
    PyObject *array = NULL;
    const char *op = "sum";
    job work = {.what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"op", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &op},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (fsdpc_py_comm_get(self, &work.comm) < 0 ||
        fsdpc_py_args("all_reduce", table, 3, values, count, keywords) < 0 ||
        parse_op(op, &work.op) < 0) {
        return NULL;
    }
    return run(&work, array, run_all_reduce, false, true);
}

PyObject *
fsdpc_py_comm_broadcast(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *keywords)
{
    PyObject *array = NULL;
    int32_t root = 0;
    job work = {.what = ""};
    const fsdpc_py_arg table[] = {
        {"array", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &array},
        {"root", FSDPC_PY_INT32, FSDPC_PY_OPTIONAL, &root},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &work.what},
    };
    if (fsdpc_py_comm_get(self, &work.comm) < 0 ||
        fsdpc_py_args("broadcast", table, 3, values, count, keywords) < 0) {
        return NULL;
    }
    work.root = root;
    return run(&work, array, run_broadcast, false, false);
}

PyObject *
fsdpc_py_comm_barrier(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_comm *comm = NULL;
    const char *what = "";
    const fsdpc_py_arg table[] = {{"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &what}};
    if (fsdpc_py_comm_get(self, &comm) < 0 ||
        fsdpc_py_args("barrier", table, 1, values, count, keywords) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_comm_barrier(comm, what));
    return fsdpc_py_none_or(status);
}

PyObject *
fsdpc_py_comm_agree(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    fsdpc_comm *comm = NULL;
    const char *text = NULL;
    const char *what = "";
    const fsdpc_py_arg table[] = {
        {"text", FSDPC_PY_STR, FSDPC_PY_REQUIRED, &text},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &what},
    };
    if (fsdpc_py_comm_get(self, &comm) < 0 ||
        fsdpc_py_args("agree", table, 2, values, count, keywords) < 0) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_comm_agree(comm, text, what));
    return fsdpc_py_none_or(status);
}
