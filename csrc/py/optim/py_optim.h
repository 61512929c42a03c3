/* Functions of the extension for optimizer steps, which fsdpc/optim calls. */
#ifndef FSDPC_PY_OPTIM_H
#define FSDPC_PY_OPTIM_H

#include "optim/optim.h"
#include "py/base/py.h"

#define FSDPC_PY_STEP_NAME(NAME, name, ...) " '" name "'" /* an item of a list in an error text */

extern PyMethodDef fsdpc_py_optim_methods[];
extern PyMethodDef fsdpc_py_optim_value_methods[];
extern PyMethodDef fsdpc_py_optim_table_methods[];

/* Fills *out from a tuple with the fields of class Rule (fsdpc/optim/_base.py), in their order; leaves
 * out->kind unchanged. Returns 0, or -1 with an exception. */
int fsdpc_py_optim_rule(PyObject *tuple, fsdpc_optim_rule *out);

#endif
