/* Sizes from options alone, for planners: footprint, plan_slots and plan_reduce_slots of fsdpc._C. */
#ifndef FSDPC_PY_PLAN_H
#define FSDPC_PY_PLAN_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_plan_methods[];

#endif
