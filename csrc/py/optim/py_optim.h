/* Optimizer steps as functions of the extension; fsdpc/optim calls them. */
#ifndef FSDPC_PY_OPTIM_H
#define FSDPC_PY_OPTIM_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_optim_methods[];
extern PyMethodDef fsdpc_py_optim_value_methods[];

#endif
