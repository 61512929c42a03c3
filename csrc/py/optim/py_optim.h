/* Optimizer steps as functions of the extension; fsdpc/optim calls them. */
#ifndef FSDPC_PY_OPTIM_H
#define FSDPC_PY_OPTIM_H

#include "optim/optim.h"
#include "py/base/py.h"

#define FSDPC_PY_STEP_NAME(NAME, name, ...) " '" name "'" /* in a message's list */

extern PyMethodDef fsdpc_py_optim_methods[];
extern PyMethodDef fsdpc_py_optim_value_methods[];
extern PyMethodDef fsdpc_py_optim_table_methods[];

/* Reads a rule, without its kind, from a tuple in the order of Rule (fsdpc/optim/_base.py). 0, or -1 with an
 * exception. */
int fsdpc_py_optim_rule(PyObject *tuple, fsdpc_optim_rule *out);

#endif
