/* What the files of probe_kernels* share: arrays with the name of their dtype, and where they run. */
#ifndef FSDPC_PROBE_KERNELS_H
#define FSDPC_PROBE_KERNELS_H

#include "device/device.h"
#include "kernels.h"
#include "py/base/py.h"

/* Exactly one of the two is set. */
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

/* A table's name; "cuda:N": that GPU, and this thread's work for it goes on torch's current stream;
 * NULL: the CPU device. -1 with an exception. */
int fsdpc_py_kernels_find(const char *name, fsdpc_py_kernels *out);
/* A contiguous array in memory of the device. `out` must be zeroed; close it in any case. */
int fsdpc_py_buffer_open(PyObject *object, const char *dtype, bool writable,
                         const fsdpc_py_kernels *kernels, fsdpc_py_buffer *out);
void fsdpc_py_buffer_close(fsdpc_py_buffer *buffer);
/* None, or the status's exception. */
PyObject *fsdpc_py_kernels_finish(int status);

/* --- probe_kernels_device.c --------------------------------------------------------------------- */

PyObject *fsdpc_py_kernel_pack_plan(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *fsdpc_py_kernel_pack(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *fsdpc_py_kernel_scale_by(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

#endif
