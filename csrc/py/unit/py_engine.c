/* The engine's types and the strings that they share. */
#include "py/unit/py_engine.h"

fsdpc_py_names fsdpc_py_name;

static int
make_names(void)
{
    struct {
        PyObject **slot;
        const char *text;
    } table[] = {
        {&fsdpc_py_name.grad, "grad"},
        {&fsdpc_py_name.grad_fn, "grad_fn"},
        {&fsdpc_py_name.requires_grad, "requires_grad"},
        {&fsdpc_py_name.register_prehook, "register_prehook"},
        {&fsdpc_py_name.data, "data"},
        {&fsdpc_py_name.is_view, "_is_view"},
        {&fsdpc_py_name.base, "_base"},
        {&fsdpc_py_name.sequence, "_sequence_nr"},
        {&fsdpc_py_name.backward_hooks, "_backward_hooks"},
        {&fsdpc_py_name.register_hook_dict, "_register_hook_dict"},
        {&fsdpc_py_name.detach, "detach"},
        {&fsdpc_py_name.version, "_version"},
        {&fsdpc_py_name.accumulated, "_post_accumulate_grad_hooks"},
        {&fsdpc_py_name.backward_optimizers, "_in_backward_optimizers"},
        {&fsdpc_py_name.dataclass_fields, "__dataclass_fields__"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        *table[i].slot = PyUnicode_InternFromString(table[i].text);
        if (!*table[i].slot) {
            return -1;
        }
    }
    return 0;
}

int
fsdpc_py_engine_exec(PyObject *module)
{
    if (make_names() < 0 || fsdpc_py_flat_exec(module) < 0 || fsdpc_py_tree_exec(module) < 0) {
        return -1;
    }
    return fsdpc_py_hook_exec(module);
}
