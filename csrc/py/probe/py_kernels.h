/* The kernels as functions of the extension; for tests and measurements. */
#ifndef FSDPC_PY_KERNELS_H
#define FSDPC_PY_KERNELS_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_kernel_methods[];

#endif
