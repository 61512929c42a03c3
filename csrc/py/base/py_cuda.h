/* What this extension can do with GPUs, for reports and tests. */
#ifndef FSDPC_PY_CUDA_H
#define FSDPC_PY_CUDA_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_cuda_methods[];
/* py_alloc.c */
extern PyMethodDef fsdpc_py_alloc_methods[];

#endif
