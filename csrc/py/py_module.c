/* The extension module fsdpc._C: its state, exceptions, types and functions.
 *
 * The module uses multi-phase initialisation and keeps its state in the module object. It refuses
 * sub-interpreters and a second load in the same process, because devices and communicators belong to the
 * process; so one global pointer to the module state suffices. The import prints nothing, starts no thread,
 * opens no file and reads no processor feature. Functions do this when they first need the result.
 */
#define FSDPC_PY_NUMPY_OWNER
#include "py/base/py_numpy.h"

#include <string.h>

#include "py/activation/py_activation.h"
#include "py/ckpt/py_ckpt.h"
#include "py/comm/py_comm.h"
#include "py/base/py_cuda.h"
#include "py/disk/py_disk.h"
#include "py/optim/py_optim.h"
#include "py/step/py_step.h"
#include "py/unit/py_layout.h"
#include "py/py_module.h"
#include "py/unit/py_plan.h"

/* --- exceptions ------------------------------------------------------------------------------ */

/* Adds the exception class `name` with one or two bases to the module. The module state owns *slot. */
static int
add_exception(PyObject *module, const char *name, const char *doc, PyObject *base, PyObject *other,
              PyObject **slot)
{
    PyObject *bases = other == NULL ? Py_NewRef(base) : PyTuple_Pack(2, base, other);
    if (bases == NULL) {
        return -1;
    }
    *slot = PyErr_NewExceptionWithDoc(name, doc, bases, NULL);
    Py_DECREF(bases);
    if (*slot == NULL) {
        return -1;
    }
    return PyModule_AddObjectRef(module, strchr(name, '.') + 1, *slot);
}

static int
add_exceptions(PyObject *module, fsdpc_py_module_state *state)
{
    if (add_exception(module, "fsdpc.CommError",
                      "Communication between ranks failed; base of the communication errors.",
                      PyExc_RuntimeError, NULL, &state->comm_error) < 0) {
        return -1;
    }
    const struct {
        const char *name, *doc;
        PyObject *base, *other, **slot;
    } rows[] = {
        {"fsdpc.PeerError",
         "Another rank died, left or raised; the message names the rank and the reason.",
         state->comm_error, NULL, &state->peer_error},
        {"fsdpc.CommTimeout",
         "A rank did not arrive in time; the message names the rank and the operation.",
         state->comm_error, PyExc_TimeoutError, &state->comm_timeout},
        {"fsdpc.MismatchError", "Ranks made calls that differ; the message quotes the difference.",
         state->comm_error, PyExc_ValueError, &state->mismatch_error},
        {"fsdpc.StateError", "A call was made in the wrong state.", PyExc_RuntimeError, NULL,
         &state->state_error},
        {"fsdpc.OutOfMemoryError", "Device memory is exhausted.", PyExc_MemoryError, NULL,
         &state->out_of_memory_error},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (add_exception(module, rows[i].name, rows[i].doc, rows[i].base, rows[i].other,
                          rows[i].slot) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
add_names(fsdpc_py_module_state *state)
{
    state->name_is_conj = PyUnicode_InternFromString("is_conj");
    return state->name_is_conj == NULL ? -1 : fsdpc_py_make_fields(state);
}

/* --- module ---------------------------------------------------------------------------------- */

static int
refuse_second(void)
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "fsdpc._C does not support sub-interpreters");
        return -1;
    }
    if (fsdpc_py_current() != NULL) {
        PyErr_SetString(PyExc_ImportError, "fsdpc._C is already loaded in this process");
        return -1;
    }
    return 0;
}

static int
add_engine(PyObject *module)
{
    if (fsdpc_py_make_names() < 0 || fsdpc_py_flat_exec(module) < 0 ||
        fsdpc_py_tree_exec(module) < 0) {
        return -1;
    }
    return fsdpc_py_hook_exec(module);
}

static int
add_parts(PyObject *module)
{
    PyMethodDef *const functions[] = {
        fsdpc_py_cuda_methods,        fsdpc_py_nccl_methods,       fsdpc_py_stall_methods,
        fsdpc_py_alloc_methods,       fsdpc_py_thread_methods,     fsdpc_py_layout_methods,
        fsdpc_py_plan_methods,        fsdpc_py_ckpt_methods,       fsdpc_py_optim_methods,
        fsdpc_py_optim_value_methods, fsdpc_py_activation_methods, fsdpc_py_disk_methods,
        fsdpc_py_lane_methods,        fsdpc_py_places_methods,     fsdpc_py_optim_table_methods,
        fsdpc_py_codec_methods};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (PyModule_AddFunctions(module, functions[i]) < 0) {
            return -1;
        }
    }
    return fsdpc_py_comm_exec(module) < 0 || fsdpc_py_codec_exec(module) < 0 ? -1
                                                                             : add_engine(module);
}

int
fsdpc_py_module_exec(PyObject *module)
{
    if (refuse_second() < 0) {
        return -1;
    }
    if (PyArray_ImportNumPyAPI() < 0) {
        return -1;
    }
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    fsdpc_py_set_current(state);
    if (add_names(state) < 0 || add_exceptions(module, state) < 0 || add_parts(module) < 0) {
        fsdpc_py_set_current(NULL);
        return -1;
    }
    return 0;
}

int
fsdpc_py_module_traverse(PyObject *module, visitproc visit, void *arg)
{
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (state == NULL) {
        return 0;
    }
    Py_VISIT(state->comm_error);
    Py_VISIT(state->peer_error);
    Py_VISIT(state->comm_timeout);
    Py_VISIT(state->mismatch_error);
    Py_VISIT(state->state_error);
    Py_VISIT(state->out_of_memory_error);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->unit_type);
    Py_VISIT(state->tree_type);
    Py_VISIT(state->hook_type);
    Py_VISIT(state->stalls);
    for (int i = 0; i < FSDPC_PY_TENSOR_TYPES; i++) {
        Py_VISIT(state->tensors[i].type);
    }
    return 0;
}

int
fsdpc_py_module_clear(PyObject *module)
{
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (state == NULL) {
        return 0;
    }
    if (fsdpc_py_current() == state) {
        fsdpc_py_set_current(NULL);
    }
    Py_CLEAR(state->comm_error);
    Py_CLEAR(state->peer_error);
    Py_CLEAR(state->comm_timeout);
    Py_CLEAR(state->mismatch_error);
    Py_CLEAR(state->state_error);
    Py_CLEAR(state->out_of_memory_error);
    Py_CLEAR(state->comm_type);
    Py_CLEAR(state->unit_type);
    Py_CLEAR(state->tree_type);
    Py_CLEAR(state->hook_type);
    Py_CLEAR(state->stalls);
    Py_CLEAR(state->name_is_conj);
    Py_CLEAR(state->current_stream);
    for (int i = 0; i < FSDPC_PY_FIELDS; i++) {
        Py_CLEAR(state->field_names[i]);
    }
    for (int i = 0; i < FSDPC_PY_TENSOR_TYPES; i++) {
        Py_CLEAR(state->tensors[i].type);
    }
    return 0;
}

void
fsdpc_py_module_free(void *module)
{
    fsdpc_py_module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fsdpc_py_module_exec},
    FSDPC_PY_LAST_SLOTS,
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fsdpc._C",
    .m_doc = "The core of fsdpc: communicators, layouts, units and trees. Use it through fsdpc.",
    .m_slots = module_slots,
    FSDPC_PY_MODULE_STATE,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
