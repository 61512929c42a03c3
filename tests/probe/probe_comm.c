/* Sets the deadline of a communicator that is in use. A test can then have a long deadline for its
 * preparations, and a short deadline for the wait that it tests.
 */
#include "comm/comm_impl.h"
#include "probe.h"
#include "py/comm/py_comm_impl.h"
#include "shm/shm_impl.h"

#include <string.h>

static PyObject *
set_deadline(PyObject *Py_UNUSED(module), PyObject *const *values, Py_ssize_t count,
             PyObject *keywords)
{
    PyObject *object = NULL;
    double seconds = 0.0;
    const fsdpc_py_arg table[] = {
        {"comm", FSDPC_PY_OBJECT, FSDPC_PY_REQUIRED, &object},
        {"seconds", FSDPC_PY_DOUBLE, FSDPC_PY_REQUIRED, &seconds},
    };
    if (fsdpc_py_args("set_deadline", table, 2, values, count, keywords) < 0) {
        return NULL;
    }
    /* The type is compared by its name. fsdpc._C and fsdpc._probe are compiled from the same sources,
     * and have separate types of the same name. */
    if (strcmp(Py_TYPE(object)->tp_name, "fsdpc._C.Comm") != 0 || !(seconds > 0)) {
        return PyErr_Format(PyExc_ValueError, "set_deadline: a Comm and seconds above 0, not %R",
                            object);
    }
    fsdpc_comm *comm = ((fsdpc_py_comm *)object)->comm;
    fsdpc_shm *shm = fsdpc_comm_segment(comm);
    if (shm == NULL) {
        return PyErr_Format(PyExc_ValueError, "set_deadline: the communicator has no segment");
    }
    comm->timeout_s = shm->timeout_s = seconds;
    Py_RETURN_NONE;
}

PyMethodDef fsdpc_probe_comm_methods[] = {
    FSDPC_PY_FUNCTION(set_deadline, FSDPC_PY_KEYWORDS, "(comm, seconds)",
                      "The deadline of this rank's later waits in a communicator over shared\n"
                      "memory, of fsdpc._C or of this module; the other ranks keep theirs."),
    {NULL, NULL, 0, NULL},
};
