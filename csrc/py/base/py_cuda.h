/* Functions of this extension for the machine's devices. */
#ifndef FSDPC_PY_CUDA_H
#define FSDPC_PY_CUDA_H

#include "py/base/py.h"

/* Get the GPU with this ordinal, a C or a Python integer. The first call starts the CUDA driver. Return 0, or
 * -1 with an exception. */
int fsdpc_py_gpu(int ordinal, fsdpc_device **out);
int fsdpc_py_find_gpu(PyObject *number, fsdpc_device **out);

extern PyMethodDef fsdpc_py_cuda_methods[];
/* py_alloc.c */
extern PyMethodDef fsdpc_py_alloc_methods[];
/* py_lane.c */
extern PyMethodDef fsdpc_py_lane_methods[];
/* py_threads.c */
extern PyMethodDef fsdpc_py_thread_methods[];

#endif
