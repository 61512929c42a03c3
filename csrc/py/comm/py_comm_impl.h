/* The C struct of a Comm object, and the methods of Comm that py_comm.c lists but does not define. */
#ifndef FSDPC_PY_COMM_IMPL_H
#define FSDPC_PY_COMM_IMPL_H

#include "py/comm/py_comm.h"

typedef struct fsdpc_py_comm {
    PyObject_HEAD
    fsdpc_comm *comm;
    /* The Python object that `comm` uses and keeps alive, or NULL. The reference belongs to `comm`. */
    PyObject *callbacks;
    PyObject *weak_references;
    bool closed;
} fsdpc_py_comm;

typedef PyObject *fsdpc_py_method(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                  PyObject *keywords);

/* Defined in py_comm_make.c. self_, shm and c10d are class methods: their first argument is the type. */
fsdpc_py_method fsdpc_py_comm_self_, fsdpc_py_comm_shm, fsdpc_py_comm_c10d;
fsdpc_py_method fsdpc_py_comm_set_hosts;
PyObject *fsdpc_py_comm_set_numbers(PyObject *self, PyObject *text);
/* py_comm_nccl.c */
fsdpc_py_method fsdpc_py_comm_nccl;
/* py_comm_collectives.c */
fsdpc_py_method fsdpc_py_comm_all_gather, fsdpc_py_comm_reduce_scatter, fsdpc_py_comm_all_reduce;
fsdpc_py_method fsdpc_py_comm_broadcast, fsdpc_py_comm_barrier, fsdpc_py_comm_agree;
/* py_comm_staged.c */
PyObject *fsdpc_py_comm_staged(PyObject *self, PyObject *device);

#endif
