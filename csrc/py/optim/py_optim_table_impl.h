/* Shared by the files of the table of an optimizer's steps; py_optim_table.c describes its design. */
#ifndef FSDPC_PY_OPTIM_TABLE_IMPL_H
#define FSDPC_PY_OPTIM_TABLE_IMPL_H

#include "optim/optim.h"
#include "py/base/py.h"

/* A tensor as it was read last, see lies(). `shape`: where torch keeps the shape, for prefetching. */
struct seen {
    const void *object, *data, *shape;
    PyObject
        *weak; /* owned: a weak reference to a tensor that is a state; NULL for other tensors */
};

enum { GRAD, PARAM, COUNTER, AVERAGE, FIRST_STATE, SEEN = FIRST_STATE + FSDPC_OPTIM_STATES };
enum { HELD = 2 * SEEN }; /* for each member: what is seen, and local tensors of DTensors */

struct member {
    const PyObject *param; /* an address */
    PyObject *state;       /* an address, held in a step; NULL: the parameter has no state */
    PyObject *copy;        /* an address, kept alive by the caller; NULL: none */
    const void *data;
    int64_t numel, first;
    uint64_t key;
    fsdpc_dtype type;
    int part;
    struct seen seen[SEEN];
};

struct group {
    int begin, end;    /* members */
    int first, count;  /* a range of this step's tensors */
    PyObject *counter; /* owned: the name of the number of steps; NULL: there is none */
    PyObject *average; /* owned: the name of the average, which a member may have; NULL: none has */
    PyObject *names[FSDPC_OPTIM_STATES]; /* owned */
    int name_count;
};

/* An entry of the optimizer's state, by addresses. */
struct entry {
    const PyObject *param;
    PyObject *state;
};

struct table {
    PyTypeObject *cut;   /* owned: DTensor, around a local tensor of the plain type */
    PyTypeObject *plain; /* owned: the type of tensors that are not looked at in another way */
    const dlpack_exchange *exchange; /* of that type */
    struct member *members;
    int member_count;
    struct group *groups;
    int group_count;
    struct entry *entries;
    int entry_count;
    /* of the step that is being done */
    bool
        busy; /* from the beginning of a read to the end of its step: Python code may run in between */
    fsdpc_optim_tensor *tensors;
    float **steps;
    int *numbers;      /* the member of each tensor */
    PyObject **locals; /* of parameters that are DTensors, else NULL; `held` owns the references */
    PyObject **grads;  /* one per tensor; `held` owns the references */
    int count;
    PyObject **held; /* owned: gradients, states, local tensors */
    Py_ssize_t held_count;
};

/* The arguments of _C.optim_table; NULL with an exception. */
struct table *fsdpc_py_table_new(PyObject *const *args);
void fsdpc_py_table_free(struct table *self);
void fsdpc_py_table_give_up(struct table *self); /* drops what a step holds; the step is over */

/* Raises TypeError, unless an exception is set already. Returns -1. */
int fsdpc_py_table_misused(const char *problem);

/* The local tensor of a DTensor, else the tensor itself: a new reference, or NULL without an exception. */
PyObject *fsdpc_py_table_local(const struct table *self, PyObject *tensor);

/* Reads the tensors of a step, from the lists of the groups' parameters and the optimizer's state. False
 * without an exception: something is not as the table knows it. Else call fsdpc_py_table_give_up later. */
bool fsdpc_py_table_read(struct table *self, PyObject *groups, PyObject *state);

#endif
