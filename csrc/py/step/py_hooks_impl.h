/* Shared by the files of the hooks. A function that torch calls returns 0, or -1 with an
 * exception. */
#ifndef FSDPC_PY_HOOKS_IMPL_H
#define FSDPC_PY_HOOKS_IMPL_H

#include "py/step/py_step.h"

typedef struct fsdpc_py_hook {
    PyObject_HEAD
    vectorcallfunc call;
    enum fsdpc_py_hook_kind kind;
    int param;
    PyObject *owner;
    /* post_forward: the pre_backward hook that this hook registers when inputs are not watched, made
     * once. input_done: the pre_backward hook of its forward. pre_backward, in flat->call: the hook of
     * the unit's forward that encloses this one. */
    PyObject *again;
    /* In a pre_backward hook that was made for one forward: how many inputs of that forward are watched,
     * how many of these have yet to get their gradient, and in which backward. */
    int inputs, inputs_left;
    PyObject *input_hook; /* that watches these inputs; borrowed, for comparison */
    uint64_t backward;
    bool counted; /* this hook counts in owner->graphs, while owner->era is `era` */
    uint64_t era;
} fsdpc_py_hook;

/* --- py_hook.c ------------------------------------------------------------------------------- */

/* The truth of what function() returns: 1, 0, or -1 with an exception. */
int fsdpc_py_call_truth(PyObject *function);
/* self->again, made if it is NULL: a hook of this kind. Borrowed; NULL with an exception. */
PyObject *fsdpc_py_companion(fsdpc_py_hook *self, enum fsdpc_py_hook_kind kind);

/* --- py_hooks_forward.c ---------------------------------------------------------------------- */

/* Gives a unit without a tree one, by on_unattached. */
int fsdpc_py_attach(fsdpc_py_flat *flat);
/* *out: replaces forward's inputs, or its output; stays NULL where nothing is replaced. */
int fsdpc_py_pre_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count,
                         PyObject **out);
int fsdpc_py_post_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count,
                          PyObject **out);

/* --- py_hooks_begin.c ------------------------------------------------------------------------ */

/* torch's number of the backward that this thread runs; -1: none. 0, or -1 with an exception. */
int fsdpc_py_graph_task(const fsdpc_py_tree *tree, long *id);
/* Begins a backward if none is in progress, and queues its end hook, which runs after the whole graph. */
int fsdpc_py_begin_backward(fsdpc_py_tree *tree);
/* True if some unit's gradients are to be summed over the ranks, or if no unit has parameters. */
bool fsdpc_py_any_sync(const fsdpc_py_tree *tree);

/* --- py_hooks_broken.c ----------------------------------------------------------------------- */

/* Empties a unit's record of the backward. */
void fsdpc_py_forget_backward(fsdpc_py_flat *flat);
/* Drops what a backward that has raised leaves in a unit, as far as that goes without the peers. */
int fsdpc_py_drop_half_made(fsdpc_py_flat *flat);

/* --- py_hooks_backward.c --------------------------------------------------------------------- */

int fsdpc_py_pre_backward(fsdpc_py_hook *self);
int fsdpc_py_grad_arrived(fsdpc_py_hook *self);
int fsdpc_py_input_done(fsdpc_py_hook *self);
/* True if the unit's values may still be needed when all parameters that are trained have their
 * gradients. */
bool fsdpc_py_is_used_late(const fsdpc_py_flat *flat);
bool fsdpc_py_has_nested(const fsdpc_py_flat *flat);
/* All gradients that this backward computes for the unit have arrived: drops its hold and reduces. */
int fsdpc_py_finish_unit(fsdpc_py_flat *flat);
/* The same for units of whose graph nothing can run any more when the backward comes to `next`, whether their
 * gradients have arrived or not. See [Note: units that are passed]. */
int fsdpc_py_finish_those_passed(const fsdpc_py_flat *next);
/* Finds gradients without a hook: then arrived_count is not zero, and hooks count from now on. */
int fsdpc_py_find_unwatched(fsdpc_py_flat *flat);
/* Reduces the units that are complete and whose turn it is; `at_end`: all that take turns. */
int fsdpc_py_send_what_is_due(fsdpc_py_tree *tree, bool at_end);
/* Steps the units whose gradients are summed, if the optimizer steps in backward (py_hooks_step.c). */
int fsdpc_py_step_summed(fsdpc_py_tree *tree);
/* Makes room for `unit`, which is about to be sent, then steps as fsdpc_py_step_summed. */
int fsdpc_py_step_before(fsdpc_py_tree *tree, int unit);
/* Steps the units that this backward has not stepped. To be called at its end, when gradients are shown. */
int fsdpc_py_step_rest(fsdpc_py_tree *tree);
/* Steps the units whose values lie in host memory, each when its own sum is there. */
int fsdpc_py_step_late(fsdpc_py_tree *tree);

/* --- py_hooks_end.c -------------------------------------------------------------------------- */

int fsdpc_py_end_backward(fsdpc_py_tree *tree);

#endif
