/* Conversion of parameter lists from Python, and of layouts to Python. */
#ifndef FSDPC_PY_LAYOUT_H
#define FSDPC_PY_LAYOUT_H

#include "unit/layout.h"
#include "py/base/py.h"

typedef struct fsdpc_py_specs {
    PyObject *items; /* owned tuple; the specs' names are borrowed from it */
    fsdpc_param_spec *specs;
    int count;
} fsdpc_py_specs;

/* Parses rows (name, numel, storage, compute, reduce, trainable[, row_numel[, codec[, reduce_codec[,
 * feedback]]]]). `out` must be zeroed; release it in any case. Returns 0, or -1 with an exception set. */
int fsdpc_py_specs_parse(PyObject *list, fsdpc_py_specs *out);
void fsdpc_py_specs_release(fsdpc_py_specs *list);
/* Returns the dictionary that FlatParameter.layout() returns. */
PyObject *fsdpc_py_layout_dict(const fsdpc_layout *layout, bool spans);
/* py_layout_call.c: layout(). */
extern PyMethodDef fsdpc_py_layout_methods[];

#endif
