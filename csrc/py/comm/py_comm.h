/* The Python type Comm, as far as other C files need them. */
#ifndef FSDPC_PY_COMM_H
#define FSDPC_PY_COMM_H

#include "comm/comm.h"
#include "py/base/py.h"

/* The communicator of a Comm object, borrowed for as long as the object lives: closing a Comm from
 * Python only ends its use, and frees nothing. TypeError for other objects, StateError when closed.
 * 0, or -1 with an exception set. */
int fsdpc_py_comm_get(PyObject *object, fsdpc_comm **out);

/* Fills the callbacks of a "c10d" communicator of `world` ranks: they call the methods of `object`
 * (see py_c10d.c) and own a reference to it, which fsdpc_comm_free drops through `release`. */
int fsdpc_py_c10d_callbacks(PyObject *object, int world, fsdpc_comm_callbacks *out);

/* A Comm object that takes over `comm`, even on failure. `callbacks` (or NULL) is the object that
 * the communicator keeps, for the garbage collector. */
PyObject *fsdpc_py_comm_wrap(PyObject *type, fsdpc_comm *comm, PyObject *callbacks);
/* Functions of the module about NCCL (py_comm_nccl.c). */
extern PyMethodDef fsdpc_py_nccl_methods[];
/* The board and the reports of stalls (py_stall.c). */
extern PyMethodDef fsdpc_py_stall_methods[];

/* Adds the type to the module and points fsdpc_shm_interrupt_check at the signal check. */
int fsdpc_py_comm_exec(PyObject *module);

#endif
