/* The arguments of the kernels in probe_kernels.c and probe_kernels_device.c: arrays, and a kernel
 * table or a device. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "probe_kernels.h"

void
fsdpc_py_buffer_close(fsdpc_py_buffer *buffer)
{
    if (buffer->view.owner != NULL) {
        fsdpc_py_view_release(&buffer->view);
    }
}

static int
check_buffer(fsdpc_py_buffer *buffer, bool writable)
{
    const int64_t bytes = buffer->view.numel * (int64_t)buffer->view.itemsize;
    const int64_t item = (int64_t)fsdpc_dtype_bytes(buffer->dtype);
    if (!buffer->view.contiguous || (writable && buffer->view.readonly) || bytes % item != 0) {
        PyErr_Format(PyExc_BufferError, "a contiguous%s array of whole %s items is needed",
                     writable ? ", writable" : "", fsdpc_dtype_name(buffer->dtype));
        return -1;
    }
    buffer->n = bytes / item;
    return 0;
}

int
fsdpc_py_buffer_open(PyObject *object, const char *dtype, bool writable,
                     const fsdpc_py_kernels *kernels, fsdpc_py_buffer *out)
{
    int status = fsdpc_dtype_from_name(dtype, &out->dtype);
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    if (fsdpc_py_tensor_view_any(object, &out->view) < 0) {
        out->view.owner = NULL;
        return -1;
    }
    const fsdpc_py_device place =
        kernels->device == NULL ? fsdpc_py_host : fsdpc_py_device_of(kernels->device);
    return fsdpc_py_check_device(&out->view, place) < 0 ? -1 : check_buffer(out, writable);
}

static int
find_gpu(const char *number, fsdpc_device **out)
{
    char *end;
    const long ordinal = strtol(number, &end, 10);
    const bool known = *number && !*end && ordinal >= 0 && ordinal <= INT_MAX;
    int status = FSDPC_PY_UNLOCKED(fsdpc_device_cuda(known ? (int)ordinal : -1, out));
    return status;
}

int
fsdpc_py_kernels_find(const char *name, fsdpc_py_kernels *out)
{
    int status;
    *out = (fsdpc_py_kernels){NULL, NULL};
    if (name == NULL) {
        status = fsdpc_device_cpu(&out->device);
    } else if (strncmp(name, "cuda:", 5) == 0) {
        status = find_gpu(name + 5, &out->device);
    } else {
        status = fsdpc_kernels_by_name(name, &out->table);
    }
    if (fsdpc_py_checked(status) < 0) {
        return -1;
    }
    return out->device == NULL ? 0 : fsdpc_py_enter_device(out->device);
}

PyObject *
fsdpc_py_kernels_finish(int status)
{
    return fsdpc_py_none_or(status);
}
