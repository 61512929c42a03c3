/* An allocator of GPU memory that calls torch's allocator through Python, so that torch's cache and
 * statistics include what units allocate. Steps allocate nothing, so the cost of calling Python does not
 * matter.
 *
 * The core calls these functions with the GIL released or held. An exception that `alloc` raises stays set in
 * this thread and becomes the cause of the final exception; an OutOfMemoryError keeps its class. */
#include <string.h>

#include "base/mem.h"
#include "py/base/py_cuda.h"

typedef struct hooks {
    PyObject *alloc, *free, *trim; /* trim gives unused memory back to the driver, or is None */
} hooks;

static int
status_of_exception(size_t bytes)
{
    char text[1024];
    fsdpc_py_exception_text(text, sizeof text);
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return fsdpc_error(FSDPC_E_INTERRUPT, "allocation of %zu bytes: %s", bytes, text);
    }
    bool full = PyErr_ExceptionMatches(PyExc_MemoryError) ||
                strncmp(text, "OutOfMemoryError", strlen("OutOfMemoryError")) == 0;
    return fsdpc_error(full ? FSDPC_E_DEVMEM : FSDPC_E_INTERNAL,
                       "allocation of %zu bytes of device memory: %s", bytes, text);
}

static int
read_address(PyObject *number, size_t bytes, void **out)
{
    *out = number == NULL ? NULL : PyLong_AsVoidPtr(number);
    if (PyErr_Occurred() != NULL) {
        *out = NULL;
        return status_of_exception(bytes);
    }
    return FSDPC_OK;
}

static int
alloc(void *context, size_t bytes, fsdpc_stream *stream, void **out)
{
    const hooks *to = context;
    fsdpc_py_entered state;
    FSDPC_TRY(fsdpc_py_callback_enter(&state));
    PyObject *number = PyObject_CallFunction(to->alloc, "nK", (Py_ssize_t)bytes,
                                             (unsigned long long)(uintptr_t)stream);
    int status = read_address(number, bytes, out);
    Py_XDECREF(number);
    return fsdpc_py_callback_leave(&state, status);
}

/* Passes an exception to sys.unraisablehook, because no caller can receive it here. */
static void
finish(PyObject *result, PyObject *callable)
{
    if (result == NULL) {
        PyErr_WriteUnraisable(callable);
    }
    Py_XDECREF(result);
}

static void
give_back(void *context, void *block)
{
    const hooks *to = context;
    fsdpc_py_entered state;
    if (fsdpc_py_finalizing() || fsdpc_py_callback_enter(&state) != FSDPC_OK) {
        return; /* the process ends, which frees its memory */
    }
    finish(PyObject_CallFunction(to->free, "K", (unsigned long long)(uintptr_t)block), to->free);
    (void)fsdpc_py_callback_leave(&state, FSDPC_OK);
}

static void
trim(void *context)
{
    const hooks *to = context;
    fsdpc_py_entered state;
    if (fsdpc_py_finalizing() || fsdpc_py_callback_enter(&state) != FSDPC_OK) {
        return;
    }
    finish(PyObject_CallNoArgs(to->trim), to->trim);
    (void)fsdpc_py_callback_leave(&state, FSDPC_OK);
}

static void
release(void *context)
{
    hooks *to = context;
    if (fsdpc_py_finalizing()) {
        return; /* leaked on purpose: Python may not be called any more */
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_XDECREF(to->alloc);
    Py_XDECREF(to->free);
    Py_XDECREF(to->trim);
    PyGILState_Release(gil);
    fsdpc_mem_free(to);
}

static int
set_hooks(fsdpc_device *device, PyObject *allocate, PyObject *free_block, PyObject *give_unused)
{
    if (!PyCallable_Check(allocate) || !PyCallable_Check(free_block) ||
        (give_unused != Py_None && !PyCallable_Check(give_unused))) {
        PyErr_SetString(PyExc_TypeError, "alloc and free must be callable, trim callable or None");
        return -1;
    }
    hooks *made = fsdpc_mem_calloc(1, sizeof *made);
    if (made == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *made = (hooks){Py_NewRef(allocate), Py_NewRef(free_block), Py_NewRef(give_unused)};
    const fsdpc_allocator table = {.context = made,
                                   .alloc = alloc,
                                   .free = give_back,
                                   .trim = give_unused == Py_None ? NULL : trim,
                                   .release = release};
    int status = fsdpc_device_set_allocator(device, &table);
    if (status != FSDPC_OK) {
        release(made);
        fsdpc_py_raise(status);
        return -1;
    }
    return 0;
}

static PyObject *
set_cuda_allocator(PyObject *Py_UNUSED(module), PyObject *args)
{
    int ordinal;
    PyObject *allocate, *free_block, *give_unused = Py_None;
    fsdpc_device *device;
    if (!PyArg_ParseTuple(args, "iOO|O:set_cuda_allocator", &ordinal, &allocate, &free_block,
                          &give_unused) ||
        fsdpc_py_gpu(ordinal, &device) < 0) {
        return NULL;
    }
    if (allocate != Py_None) {
        return set_hooks(device, allocate, free_block, give_unused) < 0 ? NULL : Py_NewRef(Py_None);
    }
    return fsdpc_py_none_or(fsdpc_device_set_allocator(device, NULL));
}

static PyObject *
cuda_allocated(PyObject *Py_UNUSED(module), PyObject *number)
{
    fsdpc_device *device;
    return fsdpc_py_find_gpu(number, &device) < 0
               ? NULL
               : PyLong_FromSize_t(fsdpc_device_foreign_bytes(device));
}

PyMethodDef fsdpc_py_alloc_methods[] = {
    FSDPC_PY_FUNCTION(
        set_cuda_allocator, METH_VARARGS, "(ordinal, alloc, free, trim=None, /)",
        "Memory that units allocate on that GPU (except for slots) comes from alloc(bytes,\n"
        "stream) -> address from now on, and is returned by free(address) when the GPU has\n"
        "finished with it. trim() must return unused memory to the driver; it is called when the\n"
        "driver has no memory for a slot. alloc and free None: the driver allocates again. All\n"
        "are called with the GIL; not in a step, once a model runs as before."),
    FSDPC_PY_FUNCTION(
        cuda_allocated, METH_O, "(ordinal, /)",
        "Returns the bytes now allocated from the allocators that were set for that GPU."),
    {NULL, NULL, 0, NULL},
};
