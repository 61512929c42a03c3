/* Declarations for an extension module made of these files: fsdpc._C, and fsdpc._probe of tests/probe. */
#ifndef FSDPC_PY_MODULE_H
#define FSDPC_PY_MODULE_H

#include "py/base/py.h"

/* Functions for a PyModuleDef whose m_size is that of fsdpc_py_module_state. fsdpc_py_module_exec adds all
 * exceptions, types and functions of fsdpc._C. Raises ImportError for a second module of the same library. */
int fsdpc_py_module_exec(PyObject *module);
int fsdpc_py_module_traverse(PyObject *module, visitproc visit, void *arg);
int fsdpc_py_module_clear(PyObject *module);
void fsdpc_py_module_free(void *module);

/* The members of a PyModuleDef that these functions need, and the slots that follow Py_mod_exec. The slots
 * refuse sub-interpreters (devices belong to the process) and keep the GIL, which guards the state. */
#define FSDPC_PY_MODULE_STATE                                                        \
    .m_size = sizeof(fsdpc_py_module_state), .m_traverse = fsdpc_py_module_traverse, \
    .m_clear = fsdpc_py_module_clear, .m_free = fsdpc_py_module_free
#if PY_VERSION_HEX >= 0x030D0000
#define FSDPC_PY_LAST_SLOTS                                                     \
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, \
        {Py_mod_gil, Py_MOD_GIL_USED},                                          \
    {                                                                           \
        0, NULL                                                                 \
    }
#elif PY_VERSION_HEX >= 0x030C0000
#define FSDPC_PY_LAST_SLOTS                                                     \
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, \
    {                                                                           \
        0, NULL                                                                 \
    }
#else
#define FSDPC_PY_LAST_SLOTS {0, NULL}
#endif

#endif
