/* Declarations of the Python type Comm that other C files need. */
#ifndef FSDPC_PY_COMM_H
#define FSDPC_PY_COMM_H

#include "comm/comm.h"
#include "py/base/py.h"

/* Gets the communicator of a Comm object, borrowed for as long as the object exists: closing a Comm from
 * Python only ends its use, and frees nothing. Raises TypeError for other objects, and StateError if the Comm
 * is closed. Returns 0, or -1 with an exception set. */
int fsdpc_py_comm_get(PyObject *object, fsdpc_comm **out);

/* Fills in the callbacks of a "c10d" communicator of `world` ranks. They call the methods of `object` (see
 * py_c10d.c) and own a reference to `object`, which fsdpc_comm_free drops through `release`. */
int fsdpc_py_c10d_callbacks(PyObject *object, int world, fsdpc_comm_callbacks *out);

/* Returns a Comm object that owns `comm`. On failure, frees `comm` and returns NULL. `callbacks` is the
 * Python object to which `comm` owns a reference, or NULL; the Comm object shows it to the garbage
 * collector. */
PyObject *fsdpc_py_comm_wrap(PyObject *type, fsdpc_comm *comm, PyObject *callbacks);
/* Functions of the Python module about NCCL (py_comm_nccl.c). */
extern PyMethodDef fsdpc_py_nccl_methods[];
/* Functions of the Python module that report stalls (py_stall.c). Some of them open this process's board, a
 * page on which other processes read what this process waits for (base/board.h). */
extern PyMethodDef fsdpc_py_stall_methods[];

/* Adds the type to the module, and makes fsdpc_shm_interrupt_check run Python's signal handlers. */
int fsdpc_py_comm_exec(PyObject *module);

#endif
