/* Declarations that the files of the Python layer share: module state, errors, arguments, tensors.
 *
 * The layer converts Python objects to C values, releases the GIL, calls the core and converts its
 * status to an exception. There is one module state in a process (sub-interpreters and a second
 * load are refused, since devices and communicators belong to the process). fsdpc_py_current()
 * returns that state, so that errors can be raised without a module object.
 *
 * Functions that return PyObject * return a new reference, or NULL with an exception set; functions
 * that return int return 0, or -1 with an exception set, unless stated otherwise. Callers of all
 * functions here hold the GIL, unless stated otherwise.
 */
#ifndef FSDPC_PY_H
#define FSDPC_PY_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "py/base/dlpack_abi.h"
#include "base/dtype.h"
#include "base/status.h"

/* --- module state (py_state.c) --------------------------------------------------------------- */

enum { FSDPC_PY_TENSOR_TYPES = 4 };

/* Attributes and methods of tensors that are read often (py_tensor_type.c). */
enum fsdpc_py_field_id {
    FSDPC_PY_GRAD,
    FSDPC_PY_GRAD_FN,
    FSDPC_PY_REQUIRES_GRAD,
    FSDPC_PY_DATA,
    FSDPC_PY_BASE,
    FSDPC_PY_VERSION,
    FSDPC_PY_BACKWARD_HOOKS,
    FSDPC_PY_ACCUMULATED_HOOKS,
    FSDPC_PY_IS_NEG,
    FSDPC_PY_FIELDS
};

/* The C functions of a tensor type. A function that the type does not have is NULL. */
typedef struct fsdpc_py_tensor_type {
    PyTypeObject *type; /* the tensor type; NULL: this entry is not in use yet */
    const dlpack_exchange *exchange;
    unsigned int version; /* tp_version_tag for which the members below are valid; 0: none */
    const PyGetSetDef *attributes[FSDPC_PY_FIELDS];
    const PyMethodDef *methods[FSDPC_PY_FIELDS]; /* without arguments */
} fsdpc_py_tensor_type;

typedef struct fsdpc_py_module_state {
    PyObject *comm_error;
    PyObject *peer_error;
    PyObject *comm_timeout;
    PyObject *mismatch_error;
    PyObject *state_error;
    PyObject *out_of_memory_error;
    PyTypeObject *comm_type;
    PyTypeObject *unit_type;
    PyTypeObject *tree_type;
    PyTypeObject *hook_type;
    vectorcallfunc hook_call; /* vectorcall function of hook_type */
    PyObject *stalls;         /* long waits call its methods: see py_stall.c */
    /* the interned string "is_conj"; field_names are interned strings too */
    PyObject *name_is_conj;
    PyObject *field_names[FSDPC_PY_FIELDS];
    PyObject
        *current_stream; /* callable: a GPU's ordinal -> handle of its current stream; or NULL */
    fsdpc_py_tensor_type tensors[FSDPC_PY_TENSOR_TYPES]; /* the first tensor types used */
} fsdpc_py_module_state;

fsdpc_py_module_state *fsdpc_py_state(PyObject *module);
/* Returns the state of the one loaded module, or NULL before the module starts and after it ends. */
fsdpc_py_module_state *fsdpc_py_current(void);
/* Sets the current state when the module starts, and sets it to NULL when the module ends. */
void fsdpc_py_set_current(fsdpc_py_module_state *state);
/* Makes a heap type from its spec, bound to `module`, adds it to the module under its short name
 * and stores a reference in *slot (a member of the module state, which owns it). */
int fsdpc_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);
/* True when the interpreter is shutting down and the GIL must not be taken any more. */
bool fsdpc_py_finalizing(void);

/* --- callbacks (py_state.c) ------------------------------------------------------------------ */

/* Call core_calls_python(1) before Python code that runs in the middle of a core call of this thread, and
 * core_calls_python(-1) after it. is_in_core tells whether such code is running. */
void fsdpc_py_core_calls_python(int more);
bool fsdpc_py_is_in_core(void);
/* Call these around a callback into Python, from a thread with or without the GIL. An exception that was set
 * before enter is restored by leave. enter fails with FSDPC_E_STATE while the interpreter shuts down. */
typedef struct fsdpc_py_entered {
    PyGILState_STATE gil;
    PyObject *type, *value, *trace;
} fsdpc_py_entered;
int fsdpc_py_callback_enter(fsdpc_py_entered *self);
/* Returns `status`. */
int fsdpc_py_callback_leave(fsdpc_py_entered *self, int status);

/* --- errors (py_status.c) ---------------------------------------------------------------------*/

/* Raises the exception class of `status` with this thread's error text; always returns NULL. An exception
 * that is already set because a callback raised it becomes the cause of the new one. An exception that a
 * signal handler raised (FSDPC_E_INTERRUPT), or that is not an Exception (SystemExit), is kept
 * unchanged. */
PyObject *fsdpc_py_raise(int status);
/* Returns the status for the class of the exception that is set, which a communicator's callback raised. */
int fsdpc_py_status_of_exception(void);
/* Returns None, or raises with fsdpc_py_raise and returns NULL if `status` is an error. */
PyObject *fsdpc_py_none_or(int status);
/* Returns 0, or raises with fsdpc_py_raise and returns -1 if `status` is an error. */
int fsdpc_py_checked(int status);
/* Evaluates an expression without the GIL, and yields its value. */
#define FSDPC_PY_UNLOCKED(expression)                       \
    __extension__({                                         \
        PyThreadState *thread_ = PyEval_SaveThread();       \
        const __typeof__(expression) value_ = (expression); \
        PyEval_RestoreThread(thread_);                      \
        value_;                                             \
    })
/* Writes "ClassName: message" of the exception that is set to `buffer`, as one line, and returns `buffer`.
 * The text is "" if no exception is set. The exception stays set. */
const char *fsdpc_py_exception_text(char *buffer, size_t bytes);
/* Writes a new line and the last note (add_note) of the exception that is set; "" if there is no note. */
void fsdpc_py_exception_note(char *buffer, size_t bytes);
/* Calls a callable without arguments. Returns 0 or -1. The call may remove the callable from its owner. */
int fsdpc_py_call(PyObject *callable);
/* Runs Python's signal handlers, and takes the GIL meanwhile: waits call it without the GIL. A no-op on
 * threads other than the main one.
 * Returns non-zero if a handler raised an exception: it stays set, and fsdpc_py_raise keeps it. */
int fsdpc_py_check_signals(void);

/* --- arguments (py_args.c) ------------------------------------------------------------------- */

enum fsdpc_py_kind {
    FSDPC_PY_INT,         /* int64_t: anything with __index__ */
    FSDPC_PY_INT32,       /* int32_t */
    FSDPC_PY_SIZE,        /* size_t: an int that is not negative */
    FSDPC_PY_DOUBLE,      /* double */
    FSDPC_PY_BOOL,        /* bool: truth value */
    FSDPC_PY_STR,         /* const char *: UTF-8 without NUL, borrowed from the argument */
    FSDPC_PY_STR_OR_NONE, /* const char *: as STR, or NULL for None */
    FSDPC_PY_OBJECT       /* PyObject *: borrowed */
};

enum fsdpc_py_need {
    FSDPC_PY_OPTIONAL, /* if the argument is missing, *out keeps its value */
    FSDPC_PY_REQUIRED,
    FSDPC_PY_KEYWORD /* optional and by name only; such rows come last in the table */
};

typedef struct fsdpc_py_arg {
    const char *name;
    enum fsdpc_py_kind kind;
    enum fsdpc_py_need need;
    void *out; /* points to a variable of the kind's C type */
} fsdpc_py_arg;

/* Parses arguments of a METH_FASTCALL | METH_KEYWORDS function (`keywords` may be NULL). Messages name
 * `function`. Raises TypeError, OverflowError or ValueError, in CPython's words. */
int fsdpc_py_args(const char *function, const fsdpc_py_arg *table, int count,
                  PyObject *const *values, Py_ssize_t positional, PyObject *keywords);

/* Returns the list of item(context, i) for each i below `count`, or NULL with an exception set. */
PyObject *fsdpc_py_list(Py_ssize_t count, PyObject *(*item)(const void *context, Py_ssize_t number),
                        const void *context);

/* --- tables of methods ----------------------------------------------------------------------- */

/* A row of a table of methods: the name in Python, the C function, how Python calls the function, the
 * arguments as help() shows them, and what the method does. */
#define FSDPC_PY_METHOD(name, function, flags, arguments, doc) \
    {#name, (PyCFunction)(void (*)(void))(function), flags, #name arguments "\n--\n\n" doc}
/* A row of a table of methods whose C function has the method's name. */
#define FSDPC_PY_FUNCTION(name, flags, arguments, doc) \
    FSDPC_PY_METHOD(name, name, flags, arguments, doc)
#define FSDPC_PY_KEYWORDS (METH_FASTCALL | METH_KEYWORDS)
/* Defines the getter get_name of an attribute of `type`. `value` is an expression of `self`. */
#define FSDPC_PY_GETTER(type, name, value)                            \
    static PyObject *get_##name(type *self, void *Py_UNUSED(closure)) \
    {                                                                 \
        return value;                                                 \
    }

/* --- attributes (py_args.c) ------------------------------------------------------------------ */

/* A row of a table of attributes with the getter get_name. `set` is the setter, or NULL. */
#define FSDPC_PY_ATTRIBUTE(name, set, doc) {#name, (getter)get_##name, (setter)(set), doc, NULL}
/* A row of a table of attributes for a member that holds any object, or NULL, which Python reads as None. The
 * closure of getter and setter is the member's offset. */
#define FSDPC_PY_MEMBER(type, member, doc) \
    {#member, fsdpc_py_get_member, fsdpc_py_set_member, doc, (void *)offsetof(type, member)}
PyObject *fsdpc_py_get_member(PyObject *self, void *offset);
int fsdpc_py_set_member(PyObject *self, PyObject *value, void *offset);

/* --- tensors (py_tensor.c, py_dlpack.c) ------------------------------------------------------ */

/* Returns the DLPack functions that the type publishes; NULL (without an exception) if none can be used. */
const dlpack_exchange *fsdpc_py_look_up_exchange(PyTypeObject *type);
/* Returns the C functions of a tensor type. NULL, without an exception, for other types and when the module
 * state has no room for another type. */
fsdpc_py_tensor_type *fsdpc_py_tensor_type_of(PyTypeObject *type);
/* Read tensor.name, set tensor.name (torch refuses NULL) and call tensor.name(), with the same results as
 * Python's own functions (py_tensor_type.c). */
PyObject *fsdpc_py_field(PyObject *tensor, enum fsdpc_py_field_id field);
int fsdpc_py_set_field(PyObject *tensor, enum fsdpc_py_field_id field, PyObject *value);
PyObject *fsdpc_py_call_field(PyObject *tensor, enum fsdpc_py_field_id field);
int fsdpc_py_make_fields(fsdpc_py_module_state *state);

enum { FSDPC_PY_MAX_DIMS = 16 };

/* The place of tensors' memory, in DLPack's codes. Host memory of any kind is {DLPACK_DEVICE_CPU, 0}. */
typedef struct fsdpc_py_device {
    int32_t type, id;
} fsdpc_py_device;
extern const fsdpc_py_device fsdpc_py_host;
/* Returns the DLPack device of tensors that are in the device's memory. */
fsdpc_py_device fsdpc_py_device_of(const fsdpc_device *device);

/* Memory of a tensor or an array. Types other than those of dtype.h are BYTES, with the size
 * of one element in `itemsize`; shape and strides count elements in any case. */
typedef struct fsdpc_py_view {
    void *data;
    fsdpc_dtype dtype;
    size_t itemsize;
    int64_t numel;
    int ndim;
    int64_t shape[FSDPC_PY_MAX_DIMS];
    int64_t strides[FSDPC_PY_MAX_DIMS];
    bool contiguous; /* row-major without gaps; true for tensors without elements */
    bool readonly;
    fsdpc_py_device place;
    PyObject *owner; /* keeps the memory alive until fsdpc_py_view_release */
} fsdpc_py_view;

/* Views any object with __dlpack__ or the buffer protocol. Only a torch tensor may be in a GPU's memory. The
 * view keeps the memory alive until fsdpc_py_view_release. Raises TypeError or BufferError. */
int fsdpc_py_tensor_view_any(PyObject *object, fsdpc_py_view *out);
void fsdpc_py_view_release(fsdpc_py_view *view);
/* Views a torch.Tensor in host memory, without ownership: the view is valid as long as the tensor keeps its
 * storage, and is not released. Requires-grad tensors are allowed. Fast if torch exports its C functions
 * (2.13 does); otherwise the tensor's methods are called. Raises TypeError or BufferError. */
int fsdpc_py_torch_view(PyObject *tensor, fsdpc_py_view *out);
/* Like fsdpc_py_torch_view, but for tensors in the given place. For a tensor in another place, a BufferError
 * names both places. */
int fsdpc_py_torch_view_on(PyObject *tensor, fsdpc_py_device place, fsdpc_py_view *out);
/* Like fsdpc_py_torch_view, but for tensors in host memory or in a GPU's memory. */
int fsdpc_py_torch_view_any(PyObject *tensor, fsdpc_py_view *out);
/* Returns 0 if the view is in `place`, else -1 with a BufferError. */
int fsdpc_py_check_device(const fsdpc_py_view *view, fsdpc_py_device place);
/* Gets only the address of a tensor's memory, which is the cheapest query. */
int fsdpc_py_torch_data(PyObject *tensor, const void **out);
/* Like fsdpc_py_torch_view, but always calls the tensor's methods. For tests and measurements. */
int fsdpc_py_torch_view_slow(PyObject *tensor, fsdpc_py_view *out);
/* True if the object is a torch tensor. */
bool fsdpc_py_is_torch(PyObject *object);
/* Fills in numel and contiguous from ndim, shape and strides, and checks that the memory exists. Raises
 * BufferError. */
int fsdpc_py_view_finish(fsdpc_py_view *view);
/* Fills a view from a DLPack tensor in host or CUDA memory. Raises BufferError. */
int fsdpc_py_view_from_dlpack(const dlpack_tensor *tensor, fsdpc_py_view *out);
/* Returns a "dltensor" capsule over `data` (row-major), as torch.utils.dlpack.from_dlpack takes it. The
 * consumer keeps `owner` alive; shape is copied. */
PyObject *fsdpc_py_dlpack_export(void *data, fsdpc_dtype dtype, int ndim, const int64_t *shape,
                                 fsdpc_py_device place, PyObject *owner);

/* --- streams (py_stream.c) ------------------------------------------------------------------- */

/* Makes this thread queue its work for the device on torch's current stream from now on. A no-op for a
 * synchronous device. */
int fsdpc_py_enter_device(fsdpc_device *device);
/* Like fsdpc_py_enter_device, but raises no exception: an exception that is already set stays set, and a
 * failure is ignored. */
void fsdpc_py_enter_quietly(fsdpc_device *device);
/* Implements set_stream_function(function) of the module. */
PyObject *fsdpc_py_set_stream_function(PyObject *module, PyObject *function);

#endif
