/* Declarations for the files of the table of an optimizer's steps; py_optim_table.c describes the design. */
#ifndef FSDPC_PY_OPTIM_TABLE_IMPL_H
#define FSDPC_PY_OPTIM_TABLE_IMPL_H

#include "optim/optim.h"
#include "py/base/py.h"

/* Addresses that the last step found for one tensor: the Python object, its values and torch's array of its
 * sizes. The next step prefetches the object and the sizes (ask_for). */
struct seen {
    const void *object, *data, *shape;
    /* Owned: a weak reference to the tensor if it is an optimizer state; NULL for other tensors. */
    PyObject *weak;
};

enum { GRAD, PARAM, COUNTER, AVERAGE, FIRST_STATE, SEEN = FIRST_STATE + FSDPC_OPTIM_STATES };
/* The most references that a step holds per member: SEEN tensors and their local tensors. */
enum { HELD = 2 * SEEN };

struct member {
    const PyObject *param; /* an address */
    /* The parameter's state dict, or NULL. A reference is owned only while a step reads the table. */
    PyObject *state;
    /* The tensor that gets the new values rounded to 16 bits, kept alive by the caller; NULL: none. */
    PyObject *copy;
    const void *data;
    int64_t numel, first;
    uint64_t key;
    fsdpc_dtype type;
    int part;
    struct seen seen[SEEN];
};

struct group {
    int begin, end;    /* members */
    int first, count;  /* the group's range in table.tensors in this step */
    PyObject *counter; /* owned: the name of the state that counts steps; NULL: there is none */
    PyObject *average; /* owned: the name of the state that holds the average; NULL: none */
    PyObject *names[FSDPC_OPTIM_STATES]; /* owned */
    int name_count;
};

/* An entry of the optimizer's state: the addresses of a parameter and of its state dict. */
struct entry {
    const PyObject *param;
    PyObject *state;
};

struct table {
    PyTypeObject *cut;   /* owned: the type DTensor, which wraps a tensor of the plain type */
    PyTypeObject *plain; /* owned: torch.Tensor, the type that gradients and states must have */
    const dlpack_exchange *exchange; /* of that type */
    struct member *members;
    int member_count;
    struct group *groups;
    int group_count;
    struct entry *entries;
    int entry_count;
    /* The fields below describe the step in progress. */
    /* True from fsdpc_py_table_read to fsdpc_py_table_give_up. Python code that runs in between may begin
     * another step, which must not use the table. */
    bool busy;
    fsdpc_optim_tensor *tensors;
    float **steps;
    int *numbers;      /* per tensor: the index of its member in `members` */
    PyObject **locals; /* per tensor: its DTensor's local tensor, else NULL; `held` owns it */
    PyObject **grads;  /* per tensor: the gradient; `held` owns it */
    int count;
    PyObject **held; /* owned references to the step's gradients, states and local tensors */
    Py_ssize_t held_count;
};

/* Returns a table made from the arguments of _C.optim_table, or NULL with an exception. */
struct table *fsdpc_py_table_new(PyObject *const *args);
void fsdpc_py_table_free(struct table *self);
/* Ends a step: drops the references in `held` and clears `busy`. */
void fsdpc_py_table_give_up(struct table *self);

/* Raises TypeError, unless an exception is set already. Returns -1. */
int fsdpc_py_table_misused(const char *problem);

/* Returns a DTensor's local tensor, else `tensor` itself: a new reference, or NULL without an exception. */
PyObject *fsdpc_py_table_local(const struct table *self, PyObject *tensor);

/* Reads the tensors of a step from the groups' lists of parameters and the optimizer's state. Returns false,
 * without an exception, if anything differs from the table. After true, call fsdpc_py_table_give_up. */
bool fsdpc_py_table_read(struct table *self, PyObject *groups, PyObject *state);

#endif
