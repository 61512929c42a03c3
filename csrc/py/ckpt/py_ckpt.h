/* Functions of the extension for checkpoint files. */
#ifndef FSDPC_PY_CKPT_H
#define FSDPC_PY_CKPT_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_ckpt_methods[];

#endif
