/* The NumPy C API. All files of the extension use one table, which py_module.c fills. */
#ifndef FSDPC_PY_NUMPY_H
#define FSDPC_PY_NUMPY_H

#include "py/base/py.h"

#define NPY_NO_DEPRECATED_API NPY_1_20_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL fsdpc_numpy_api
#ifndef FSDPC_PY_NUMPY_OWNER
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#endif
