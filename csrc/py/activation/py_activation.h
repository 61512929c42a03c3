/* Packed activations and coded rows as functions, which fsdpc/activations and fsdpc/lowbit.py call. */
#ifndef FSDPC_PY_ACTIVATION_H
#define FSDPC_PY_ACTIVATION_H

#include "device/device.h"
#include "py/base/py.h"

/* The GPU with this ordinal, entered on its current stream; NULL for -1, host memory. */
int fsdpc_py_activation_device(int32_t ordinal, fsdpc_device **out);

extern PyMethodDef fsdpc_py_activation_methods[];
/* py_codec.c */
extern PyMethodDef fsdpc_py_codec_methods[];
int fsdpc_py_codec_exec(PyObject *module);

#endif
