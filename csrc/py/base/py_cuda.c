/* Data about the GPUs of this process. The first query starts the CUDA driver; importing the module does not
 * start it. */
#include "py/base/py_cuda.h"

#include <limits.h>
#include <stdlib.h>

#include "device/cuda_driver.h"
#include "device/cuda_image.h"
#include "device/device.h"

static PyObject *
cuda_image_bytes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    size_t bytes;
    (void)fsdpc_cuda_image(&bytes);
    return PyLong_FromSize_t(bytes);
}

int
fsdpc_py_gpu(int ordinal, fsdpc_device **out)
{
    int status = FSDPC_PY_UNLOCKED(fsdpc_device_cuda(ordinal, out));
    return fsdpc_py_checked(status);
}

int
fsdpc_py_find_gpu(PyObject *number, fsdpc_device **out)
{
    const long ordinal = PyLong_AsLong(number);
    if (ordinal == -1 && PyErr_Occurred()) {
        return -1;
    }
    return fsdpc_py_gpu(ordinal < 0 || ordinal > INT_MAX ? -1 : (int)ordinal, out);
}

static PyObject *
cuda_device(PyObject *Py_UNUSED(module), PyObject *number)
{
    fsdpc_device *device;
    if (fsdpc_py_find_gpu(number, &device) < 0) {
        return NULL;
    }
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(device);
    return Py_BuildValue("{s:s,s:s,s:O,s:O,s:n,s:n,s:z}", "device", fsdpc_device_name(device),
                         "kernels", fsdpc_device_kernels_name(device), "virtual_memory",
                         caps->virtual_memory ? Py_True : Py_False, "stand_in",
                         caps->stand_in ? Py_True : Py_False, "align_bytes",
                         (Py_ssize_t)caps->align_bytes, "grain_bytes",
                         (Py_ssize_t)fsdpc_device_grain(device), "note", caps->note);
}

static PyObject *
cuda_waits(PyObject *Py_UNUSED(module), PyObject *number)
{
    fsdpc_device *device;
    return fsdpc_py_find_gpu(number, &device) < 0 ? NULL
                                                  : PyLong_FromLongLong(fsdpc_device_waits(device));
}

static PyObject *
cuda_memory(PyObject *Py_UNUSED(module), PyObject *number)
{
    fsdpc_device *device;
    size_t free_bytes, total;
    if (fsdpc_py_find_gpu(number, &device) < 0 ||
        fsdpc_py_checked(fsdpc_device_free_bytes(device, &free_bytes, &total)) < 0) {
        return NULL;
    }
    return Py_BuildValue("(nn)", (Py_ssize_t)free_bytes, (Py_ssize_t)total);
}

/* Returns whether FSDPC_LIBCUDA names a simulated driver. Loads no driver if the variable is not set. */
static PyObject *
stand_in(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    const char *file = getenv("FSDPC_LIBCUDA");
    const fsdpc_cuda_driver *driver;
    if (!file || !*file) {
        Py_RETURN_FALSE;
    }
    int status = fsdpc_cuda_driver_get(&driver);
    if (status != FSDPC_OK) {
        return fsdpc_py_raise(status);
    }
    return PyBool_FromLong(driver->stand_in);
}

PyMethodDef fsdpc_py_cuda_methods[] = {
    FSDPC_PY_METHOD(set_stream_function, fsdpc_py_set_stream_function, METH_O, "(function, /)",
                    "function(ordinal) returns the driver's handle of that GPU's current stream on "
                    "this thread."),
    FSDPC_PY_FUNCTION(stand_in, METH_NOARGS, "()",
                      "True if $FSDPC_LIBCUDA names a simulated driver, whose memory is host\n"
                      "memory: CPU models are then sharded on its GPU. NotImplementedError if\n"
                      "that library cannot be loaded."),
    FSDPC_PY_FUNCTION(
        cuda_image_bytes, METH_NOARGS, "()",
        "Returns the size of the CUDA kernels in this extension; 0: it was built without nvcc."),
    FSDPC_PY_FUNCTION(cuda_device, METH_O, "(ordinal, /)",
                      "Returns a GPU's properties: device, kernels, virtual_memory, stand_in,\n"
                      "align_bytes, grain_bytes, note. NotImplementedError where there is no such\n"
                      "GPU, driver or kernel."),
    FSDPC_PY_FUNCTION(
        cuda_waits, METH_O, "(ordinal, /)",
        "Returns the number of host syncs with that GPU in this process, without torch's."),
    FSDPC_PY_FUNCTION(
        cuda_memory, METH_O, "(ordinal, /)",
        "Returns (free, total) bytes of that GPU; what any process uses is not free."),
    {NULL, NULL, 0, NULL},
};
