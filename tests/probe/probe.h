/* The functions that fsdpc._probe has in addition to those of fsdpc._C. */
#ifndef FSDPC_PROBE_H
#define FSDPC_PROBE_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_probe_codec_methods[];
extern PyMethodDef fsdpc_probe_comm_methods[];
extern PyMethodDef fsdpc_probe_flat_methods[];
extern PyMethodDef fsdpc_probe_kernel_methods[];
extern PyMethodDef fsdpc_probe_tensor_methods[];

#endif
