/* Functions of the extension for files of optimizer states on a disk. */
#ifndef FSDPC_PY_DISK_H
#define FSDPC_PY_DISK_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_disk_methods[];

#endif
