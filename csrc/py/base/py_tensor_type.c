/* C functions of tensor types: DLPack's functions, and the functions behind attributes and methods that a
 * step reads for each parameter. A call of these functions saves the search through the type and its bases.
 *
 * A type's functions are looked up once and kept in the module state, which holds a reference to the
 * type so that no other type gets its address. Functions behind attributes are kept with the type's
 * version. Python gives the type another version when the type or a base changes; the functions are then
 * looked up again. An attribute is read by name if it is not a C getter, if the type has its own
 * `__getattribute__`, or if the module state has no room for the type.
 */
#include "py/base/py.h"

static const char exchange_name[] = "dlpack_exchange_api";

static bool
is_torch_type(PyTypeObject *type)
{
    return PyObject_HasAttrString((PyObject *)type, "__torch_function__") &&
           PyObject_HasAttrString((PyObject *)type, "data_ptr");
}

bool
fsdpc_py_is_torch(PyObject *object)
{
    return is_torch_type(Py_TYPE(object));
}

/* --- DLPack ---------------------------------------------------------------------------------- */

const dlpack_exchange *
fsdpc_py_look_up_exchange(PyTypeObject *type)
{
    if (!is_torch_type(type)) {
        return NULL;
    }
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const dlpack_exchange *found = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, exchange_name)) {
        found = PyCapsule_GetPointer(capsule, exchange_name);
    }
    Py_XDECREF(capsule);
    PyErr_Clear();
    while (found != NULL && found->version.major > DLPACK_MAJOR) {
        found = found->previous;
    }
    if (found != NULL && (found->version.major != DLPACK_MAJOR || found->borrow == NULL)) {
        found = NULL;
    }
    return found;
}

fsdpc_py_tensor_type *
fsdpc_py_tensor_type_of(PyTypeObject *type)
{
    fsdpc_py_module_state *state = fsdpc_py_current();
    for (int i = 0; i < FSDPC_PY_TENSOR_TYPES; i++) {
        fsdpc_py_tensor_type *known = &state->tensors[i];
        if (known->type == type) {
            return known;
        }
        if (known->type == NULL) {
            if (!is_torch_type(type)) {
                return NULL;
            }
            known->exchange = fsdpc_py_look_up_exchange(type);
            known->type = (PyTypeObject *)Py_NewRef(type);
            return known;
        }
    }
    return NULL;
}

/* --- attributes ------------------------------------------------------------------------------ */

static const char *const texts[FSDPC_PY_FIELDS] = {
    [FSDPC_PY_GRAD] = "grad",
    [FSDPC_PY_GRAD_FN] = "grad_fn",
    [FSDPC_PY_REQUIRES_GRAD] = "requires_grad",
    [FSDPC_PY_DATA] = "data",
    [FSDPC_PY_BASE] = "_base",
    [FSDPC_PY_VERSION] = "_version",
    [FSDPC_PY_BACKWARD_HOOKS] = "_backward_hooks",
    [FSDPC_PY_ACCUMULATED_HOOKS] = "_post_accumulate_grad_hooks",
    [FSDPC_PY_IS_NEG] = "is_neg",
};

int
fsdpc_py_make_fields(fsdpc_py_module_state *state)
{
    for (int i = 0; i < FSDPC_PY_FIELDS; i++) {
        state->field_names[i] = PyUnicode_InternFromString(texts[i]);
        if (state->field_names[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Looks up the functions. The type's descriptors own the functions, as long as the type has this version. */
static int
look_up(fsdpc_py_tensor_type *self, fsdpc_py_module_state *state)
{
    PyTypeObject *type = self->type;
    self->version = 0;
    for (int i = 0; i < FSDPC_PY_FIELDS; i++) {
        PyObject *found = PyObject_GetAttr((PyObject *)type, state->field_names[i]);
        if (found == NULL) {
            return -1;
        }
        self->attributes[i] = Py_IS_TYPE(found, &PyGetSetDescr_Type) &&
                                      type->tp_getattro == PyObject_GenericGetAttr &&
                                      type->tp_setattro == PyObject_GenericSetAttr
                                  ? ((PyGetSetDescrObject *)found)->d_getset
                                  : NULL;
        self->methods[i] = Py_IS_TYPE(found, &PyMethodDescr_Type) &&
                                   ((PyMethodDescrObject *)found)->d_method->ml_flags == METH_NOARGS
                               ? ((PyMethodDescrObject *)found)->d_method
                               : NULL;
        Py_DECREF(found);
    }
    self->version = type->tp_version_tag;
    return 0;
}

static const fsdpc_py_tensor_type *
renew_functions(PyTypeObject *type)
{
    fsdpc_py_tensor_type *known = fsdpc_py_tensor_type_of(type);
    if (known != NULL && look_up(known, fsdpc_py_current()) < 0) {
        PyErr_Clear();
        return NULL;
    }
    return known;
}

/* Returns the functions of the tensor's type, or NULL (without an exception) to read attributes by name. */
static inline const fsdpc_py_tensor_type *
functions_of(PyObject *tensor)
{
    const fsdpc_py_tensor_type *known = fsdpc_py_current()->tensors;
    const PyTypeObject *type = Py_TYPE(tensor);
    for (int i = 0; i < FSDPC_PY_TENSOR_TYPES; i++) {
        if (known[i].type == type && known[i].version == type->tp_version_tag &&
            known[i].version != 0) {
            return &known[i];
        }
    }
    return renew_functions(Py_TYPE(tensor));
}

PyObject *
fsdpc_py_field(PyObject *tensor, enum fsdpc_py_field_id field)
{
    const fsdpc_py_tensor_type *known = functions_of(tensor);
    const PyGetSetDef *found = known == NULL ? NULL : known->attributes[field];
    return found != NULL && found->get != NULL
               ? found->get(tensor, found->closure)
               : PyObject_GetAttr(tensor, fsdpc_py_current()->field_names[field]);
}

int
fsdpc_py_set_field(PyObject *tensor, enum fsdpc_py_field_id field, PyObject *value)
{
    const fsdpc_py_tensor_type *known = functions_of(tensor);
    const PyGetSetDef *found = known == NULL ? NULL : known->attributes[field];
    return found != NULL && found->set != NULL
               ? found->set(tensor, value, found->closure)
               : PyObject_SetAttr(tensor, fsdpc_py_current()->field_names[field], value);
}

PyObject *
fsdpc_py_call_field(PyObject *tensor, enum fsdpc_py_field_id field)
{
    const fsdpc_py_tensor_type *known = functions_of(tensor);
    const PyMethodDef *found = known == NULL ? NULL : known->methods[field];
    return found != NULL
               ? found->ml_meth(tensor, NULL)
               : PyObject_CallMethodNoArgs(tensor, fsdpc_py_current()->field_names[field]);
}
