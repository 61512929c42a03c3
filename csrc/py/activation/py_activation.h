/* Packed activations and coded rows as functions of the extension; fsdpc/activations and fsdpc/lowbit.py call them. */
#ifndef FSDPC_PY_ACTIVATION_H
#define FSDPC_PY_ACTIVATION_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_activation_methods[];
/* py_codec.c */
extern PyMethodDef fsdpc_py_codec_methods[];

#endif
