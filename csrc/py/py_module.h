/* What an extension of these files consists of: fsdpc._C, and fsdpc._probe of tests/probe. */
#ifndef FSDPC_PY_MODULE_H
#define FSDPC_PY_MODULE_H

#include "py/base/py.h"

/* For a PyModuleDef whose m_size is that of fsdpc_py_module_state. exec adds all exceptions, types
 * and functions of fsdpc._C; ImportError for a second module of the same library. */
int fsdpc_py_module_exec(PyObject *module);
int fsdpc_py_module_traverse(PyObject *module, visitproc visit, void *arg);
int fsdpc_py_module_clear(PyObject *module);
void fsdpc_py_module_free(void *module);

#endif
