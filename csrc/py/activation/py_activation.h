/* Functions for packed activations and coded rows, which fsdpc/activations and fsdpc/lowbit.py call. */
#ifndef FSDPC_PY_ACTIVATION_H
#define FSDPC_PY_ACTIVATION_H

#include "device/device.h"
#include "py/base/py.h"

/* Sets *out to the GPU with this ordinal, after a call of fsdpc_py_enter_device for that GPU. For -1 (host
 * memory), sets *out to NULL. */
int fsdpc_py_activation_device(int32_t ordinal, fsdpc_device **out);

extern PyMethodDef fsdpc_py_activation_methods[];
/* py_codec.c */
extern PyMethodDef fsdpc_py_codec_methods[];
int fsdpc_py_codec_exec(PyObject *module);

#endif
