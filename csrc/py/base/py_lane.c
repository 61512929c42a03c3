/* Lanes (device/lane.h) in capsules, and pinned host memory in tensors that own the memory. */
#include "py/base/py_cuda.h"

#include "base/mem.h"
#include "device/device.h"
#include "device/lane.h"

static const char lane_name[] = "fsdpc._C.lane", pinned_name[] = "fsdpc._C.pinned";

/* --- pinned memory ------------------------------------------------------------------------------- */

struct pinned {
    fsdpc_device *device;
    void *memory;
    size_t bytes;
};

static void
pinned_end(PyObject *capsule)
{
    struct pinned *pinned = PyCapsule_GetPointer(capsule, pinned_name);
    fsdpc_py_enter_quietly(pinned->device);
    fsdpc_device_host_free(pinned->device, pinned->memory, pinned->bytes);
    fsdpc_mem_free(pinned);
}

static PyObject *
own_pinned(struct pinned *pinned)
{
    PyObject *owner = PyCapsule_New(pinned, pinned_name, pinned_end);
    if (owner == NULL) {
        fsdpc_device_host_free(pinned->device, pinned->memory, pinned->bytes);
        fsdpc_mem_free(pinned);
        return NULL;
    }
    const int64_t shape = (int64_t)pinned->bytes;
    PyObject *tensor =
        fsdpc_py_dlpack_export(pinned->memory, FSDPC_BYTES, 1, &shape, fsdpc_py_host, owner);
    Py_DECREF(owner);
    return tensor;
}

static PyObject *
pinned_new(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    int32_t ordinal;
    size_t bytes;
    const fsdpc_py_arg table[] = {
        {"ordinal", FSDPC_PY_INT32, FSDPC_PY_REQUIRED, &ordinal},
        {"bytes", FSDPC_PY_SIZE, FSDPC_PY_REQUIRED, &bytes},
    };
    fsdpc_device *device;
    if (fsdpc_py_args("pinned_new", table, 2, args, count, keywords) < 0 ||
        fsdpc_py_gpu(ordinal, &device) < 0) {
        return NULL;
    }
    struct pinned *pinned = fsdpc_mem_calloc(1, sizeof *pinned);
    if (pinned == NULL) {
        return PyErr_NoMemory();
    }
    *pinned = (struct pinned){.device = device, .bytes = bytes};
    if (fsdpc_py_checked(fsdpc_device_host_alloc(device, bytes, &pinned->memory)) < 0) {
        fsdpc_mem_free(pinned);
        return NULL;
    }
    return own_pinned(pinned);
}

/* --- lanes ---------------------------------------------------------------------------------------- */

static void
lane_end(PyObject *capsule)
{
    fsdpc_lane_free(PyCapsule_GetPointer(capsule, lane_name));
}

static PyObject *
lane_new(PyObject *Py_UNUSED(module), PyObject *number)
{
    fsdpc_device *device;
    fsdpc_lane *lane;
    if (fsdpc_py_find_gpu(number, &device) < 0 ||
        fsdpc_py_checked(fsdpc_lane_new(device, &lane)) < 0) {
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(lane, lane_name, lane_end);
    if (capsule == NULL) {
        fsdpc_lane_free(lane);
    }
    return capsule;
}

/* Returns the lane in a capsule, and makes torch's current stream the engine's. NULL with an exception. */
static fsdpc_lane *
entered(PyObject *object)
{
    fsdpc_lane *lane = PyCapsule_GetPointer(object, lane_name);
    return lane == NULL || fsdpc_py_enter_device(fsdpc_lane_device(lane)) < 0 ? NULL : lane;
}

static PyObject *
lane_begin(PyObject *Py_UNUSED(module), PyObject *object)
{
    fsdpc_lane *lane = entered(object);
    return lane == NULL ? NULL : fsdpc_py_none_or(fsdpc_lane_begin(lane));
}

static PyObject *
copy(const char *function, PyObject *const *args, Py_ssize_t count,
     int (*queue)(fsdpc_lane *, void *, const void *, size_t))
{
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "%s takes a lane, two addresses and a number of bytes",
                     function);
        return NULL;
    }
    fsdpc_lane *lane = entered(args[0]);
    void *to = lane == NULL ? NULL : PyLong_AsVoidPtr(args[1]);
    const void *from = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[2]);
    const size_t bytes = PyErr_Occurred() ? 0 : PyLong_AsSize_t(args[3]);
    return PyErr_Occurred() ? NULL : fsdpc_py_none_or(queue(lane, to, from, bytes));
}

static PyObject *
lane_out(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    return copy("lane_out", args, count, fsdpc_lane_out);
}

static PyObject *
lane_in(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    return copy("lane_in", args, count, fsdpc_lane_in);
}

static PyObject *
lane_mark(PyObject *Py_UNUSED(module), PyObject *object)
{
    int64_t mark;
    fsdpc_lane *lane = entered(object);
    if (lane == NULL || fsdpc_py_checked(fsdpc_lane_mark(lane, &mark)) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(mark);
}

static PyObject *
lane_join(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    PyObject *object;
    int64_t mark;
    const fsdpc_py_arg table[] = {
        {"lane", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"mark", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &mark},
    };
    if (fsdpc_py_args("lane_join", table, 2, args, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_lane *lane = entered(object);
    return lane == NULL ? NULL : fsdpc_py_none_or(fsdpc_lane_join(lane, mark));
}

static PyObject *
lane_finish(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
            PyObject *keywords)
{
    PyObject *object;
    int64_t mark;
    const char *what = "copies to pinned host memory";
    const fsdpc_py_arg table[] = {
        {"lane", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"mark", FSDPC_PY_INT, FSDPC_PY_REQUIRED, &mark},
        {"what", FSDPC_PY_STR, FSDPC_PY_OPTIONAL, &what},
    };
    if (fsdpc_py_args("lane_finish", table, 3, args, count, keywords) < 0) {
        return NULL;
    }
    fsdpc_lane *lane = entered(object);
    if (lane == NULL) {
        return NULL;
    }
    int status = FSDPC_PY_UNLOCKED(fsdpc_lane_finish(lane, mark, what));
    return fsdpc_py_none_or(status);
}

static PyObject *
lane_counts(PyObject *Py_UNUSED(module), PyObject *object)
{
    fsdpc_lane_counts n;
    const fsdpc_lane *lane = PyCapsule_GetPointer(object, lane_name);
    if (lane == NULL) {
        return NULL;
    }
    fsdpc_lane_count(lane, &n);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "copies_out", (long long)n.copies_out,
                         "copies_in", (long long)n.copies_in, "bytes_out", (long long)n.bytes_out,
                         "bytes_in", (long long)n.bytes_in, "begins", (long long)n.begins, "marks",
                         (long long)n.marks, "joins", (long long)n.joins, "finishes",
                         (long long)n.finishes);
}

PyMethodDef fsdpc_py_lane_methods[] = {
    FSDPC_PY_FUNCTION(pinned_new, FSDPC_PY_KEYWORDS, "(ordinal, bytes)",
                      "Zeroed pinned host memory of that GPU, as a DLPack capsule of uint8.\n"
                      "MemoryError. Freeing it is a host sync."),
    FSDPC_PY_FUNCTION(lane_new, METH_O, "(ordinal, /)",
                      "A stream of that GPU for copies between its memory and pinned host memory."),
    FSDPC_PY_FUNCTION(lane_begin, METH_O, "(lane, /)",
                      "Later copies come behind all work of torch's current stream so far.\n"
                      "StateError: that stream is captured into a CUDA graph."),
    FSDPC_PY_FUNCTION(lane_out, METH_FASTCALL, "(lane, host, source, bytes, /)",
                      "Queue a copy from an address on the GPU to one in pinned memory. Both stay\n"
                      "valid, and the source unchanged, until the copy is done."),
    FSDPC_PY_FUNCTION(lane_in, METH_FASTCALL, "(lane, target, host, bytes, /)",
                      "Queue a copy from an address in pinned memory to one on the GPU."),
    FSDPC_PY_FUNCTION(lane_mark, METH_O, "(lane, /)",
                      "Returns the number that stands for all copies so far."),
    FSDPC_PY_FUNCTION(lane_join, FSDPC_PY_KEYWORDS, "(lane, mark)",
                      "Later work of torch's current stream comes behind the mark."),
    FSDPC_PY_FUNCTION(
        lane_finish, FSDPC_PY_KEYWORDS, "(lane, mark, what=...)",
        "Host sync: until the mark's copies are done. TimeoutError after FSDPC_TIMEOUT seconds."),
    FSDPC_PY_FUNCTION(
        lane_counts, METH_O, "(lane, /)",
        "Returns copies_out, copies_in, bytes_out, bytes_in, and how often the lane waited for a\n"
        "stream (begins), a stream for the lane (joins), the host for the lane (finishes)."),
    {NULL, NULL, 0, NULL},
};
