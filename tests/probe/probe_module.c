/* The extension module fsdpc._probe. The module has all functions of fsdpc._C, its own module state, and
 * further functions that only tests and benchmarks call.
 */
#include "probe.h"
#include "py/py_module.h"

static int
probe_exec(PyObject *module)
{
    PyMethodDef *const functions[] = {fsdpc_probe_comm_methods, fsdpc_probe_flat_methods,
                                      fsdpc_probe_kernel_methods, fsdpc_probe_tensor_methods,
                                      fsdpc_probe_codec_methods};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (PyModule_AddFunctions(module, functions[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fsdpc_py_module_exec},
    {Py_mod_exec, probe_exec},
    FSDPC_PY_LAST_SLOTS,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fsdpc._probe",
    .m_doc = "fsdpc._C with more functions, for tests and benchmarks. Not in the wheel.",
    .m_slots = slots,
    FSDPC_PY_MODULE_STATE,
};

PyMODINIT_FUNC
PyInit__probe(void)
{
    return PyModuleDef_Init(&definition);
}
