/* Declarations that the files probe_kernels*.c share: functions that turn Python arguments into arrays of a
 * dtype, and functions that turn them into the kernel table or the device for these arrays. */
#ifndef FSDPC_PROBE_KERNELS_H
#define FSDPC_PROBE_KERNELS_H

#include "device/device.h"
#include "kernels.h"
#include "py/base/py.h"

/* A kernel table or a device. Exactly one of the two pointers is set. */
typedef struct fsdpc_py_kernels {
    const fsdpc_kernels *table;
    fsdpc_device *device;
} fsdpc_py_kernels;

typedef struct fsdpc_py_buffer {
    fsdpc_py_view view;
    fsdpc_dtype dtype;
    int64_t n;
} fsdpc_py_buffer;

/* --- probe_kernels_buffer.c --------------------------------------------------------------------- */

/* Finds kernels by `name`: the name of a kernel table, "cuda:N" for that GPU, or NULL for the CPU device.
 * From then on, this thread queues its work for the GPU on torch's current stream. Returns -1 with an
 * exception set if this fails. */
int fsdpc_py_kernels_find(const char *name, fsdpc_py_kernels *out);
/* Opens a contiguous array in memory of the device. `out` must be zeroed, and must be closed even if
 * this fails. */
int fsdpc_py_buffer_open(PyObject *object, const char *dtype, bool writable,
                         const fsdpc_py_kernels *kernels, fsdpc_py_buffer *out);
void fsdpc_py_buffer_close(fsdpc_py_buffer *buffer);
/* Returns None if `status` is FSDPC_OK. Else sets the exception for the status and returns NULL. */
PyObject *fsdpc_py_kernels_finish(int status);

/* --- probe_kernels_device.c --------------------------------------------------------------------- */

PyObject *fsdpc_py_kernel_pack_plan(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *fsdpc_py_kernel_pack(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *fsdpc_py_kernel_scale_by(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

#endif
