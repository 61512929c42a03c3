/* Makes torch's current stream the engine's stream. The stream is read at each entry, because users may
 * change it at any time. On a simulated GPU torch's operators run on the default stream.
 */
#include "py/base/py.h"

static int
ask_torch(int ordinal, void **out)
{
    PyObject *function = fsdpc_py_current()->current_stream;
    if (function == NULL) {
        PyErr_SetString(
            fsdpc_py_current()->state_error,
            "the current CUDA stream is unknown: set_stream_function() has not been called");
        return -1;
    }
    PyObject *number = PyLong_FromLong(ordinal);
    PyObject *handle = number == NULL ? NULL : PyObject_CallOneArg(function, number);
    Py_XDECREF(number);
    if (handle == NULL) {
        return -1;
    }
    *out = PyLong_AsVoidPtr(handle);
    Py_DECREF(handle);
    return *out == NULL && PyErr_Occurred() != NULL ? -1 : 0;
}

int
fsdpc_py_enter_device(fsdpc_device *device)
{
    const fsdpc_device_caps *caps = fsdpc_device_get_caps(device);
    void *stream = NULL;
    if (!caps->asynchronous) {
        return 0;
    }
    if (!caps->stand_in && ask_torch(caps->ordinal, &stream) < 0) {
        return -1;
    }
    (void)fsdpc_device_use(device, stream);
    return 0;
}

void
fsdpc_py_enter_quietly(fsdpc_device *device)
{
    PyObject *type, *value, *traceback;
    if (!fsdpc_device_get_caps(device)->asynchronous || fsdpc_py_finalizing()) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (fsdpc_py_enter_device(device) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
}

PyObject *
fsdpc_py_set_stream_function(PyObject *module, PyObject *function)
{
    fsdpc_py_module_state *state = fsdpc_py_state(module);
    if (!PyCallable_Check(function)) {
        PyErr_SetString(PyExc_TypeError, "set_stream_function: the argument must be callable");
        return NULL;
    }
    Py_XSETREF(state->current_stream, Py_NewRef(function));
    Py_RETURN_NONE;
}
