/* Packed activations as functions of the extension; fsdpc/activations calls them. */
#ifndef FSDPC_PY_ACTIVATION_H
#define FSDPC_PY_ACTIVATION_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_activation_methods[];

#endif
