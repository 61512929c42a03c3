/* Files of states on a disk as functions of the extension. */
#ifndef FSDPC_PY_DISK_H
#define FSDPC_PY_DISK_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_disk_methods[];

#endif
