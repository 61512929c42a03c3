/* Functions of fsdpc._C for planners, which compute sizes from options: footprint(), plan_slots(), .... */
#ifndef FSDPC_PY_PLAN_H
#define FSDPC_PY_PLAN_H

#include "py/base/py.h"

extern PyMethodDef fsdpc_py_plan_methods[];

#endif
