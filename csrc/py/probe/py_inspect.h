/* Functions of the extension that show how it sees a tensor. */
#ifndef FSDPC_PY_INSPECT_H
#define FSDPC_PY_INSPECT_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_inspect_methods[];

#endif
