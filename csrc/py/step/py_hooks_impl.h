/* Declarations that py_hook.c and the files py_hooks*.c share. A function that runs when torch calls a hook
 * returns 0, or -1 with an exception. */
#ifndef FSDPC_PY_HOOKS_IMPL_H
#define FSDPC_PY_HOOKS_IMPL_H

#include "py/step/py_step.h"

typedef struct fsdpc_py_hook {
    PyObject_HEAD
    vectorcallfunc call;
    enum fsdpc_py_hook_kind kind;
    int param;
    PyObject *owner;
    /* In a post_forward hook: a pre_backward hook, for all forwards that need no pre_backward hook of their
     * own. In an input_done hook: the pre_backward hook of the same forward. In a hook on the stack
     * flat->call: the hook below, which belongs to the enclosing forward of the same unit. */
    PyObject *again;
    /* In a pre_backward hook that was made for one forward: how many inputs of that forward are watched, how
     * many of these inputs have no gradient yet, and the backward for which they are counted. */
    int inputs, inputs_left;
    PyObject *input_hook; /* watches these inputs; borrowed, and only its address is used */
    uint64_t backward;
    bool counted; /* owner->graphs counts this hook while owner->era is `era` */
    uint64_t era;
} fsdpc_py_hook;

/* --- py_hook.c ------------------------------------------------------------------------------- */

/* Calls function() and returns the truth of its result: 1, 0, or -1 with an exception. */
int fsdpc_py_call_truth(PyObject *function);
/* Returns self->again, borrowed. If it is NULL, makes a hook of this `kind` first. NULL with an exception. */
PyObject *fsdpc_py_companion(fsdpc_py_hook *self, enum fsdpc_py_hook_kind kind);

/* --- py_hooks_forward.c ---------------------------------------------------------------------- */

/* Gives a tree to a unit without one, by calling on_unattached. Returns 0, or -1 with an exception. */
int fsdpc_py_attach(fsdpc_py_flat *flat);
/* *out replaces the inputs (pre_forward) or the output (post_forward). NULL if nothing is replaced. */
int fsdpc_py_pre_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count,
                         PyObject **out);
int fsdpc_py_post_forward(fsdpc_py_hook *self, PyObject *const *args, Py_ssize_t count,
                          PyObject **out);

/* --- py_hooks_begin.c ------------------------------------------------------------------------ */

/* Sets *id to torch's number of the backward that this thread runs; -1: none. Returns 0, or -1: exception. */
int fsdpc_py_graph_task(const fsdpc_py_tree *tree, long *id);
/* Begins a backward if none is in progress, and queues its end hook, which runs after the whole graph. */
int fsdpc_py_begin_backward(fsdpc_py_tree *tree);
/* Returns true if some unit's gradients are to be summed over the ranks, or if no unit has parameters. */
bool fsdpc_py_any_sync(const fsdpc_py_tree *tree);

/* --- py_hooks_broken.c ----------------------------------------------------------------------- */

/* Empties a unit's record of the backward. */
void fsdpc_py_forget_backward(fsdpc_py_flat *flat);
/* Drops a unit's gradients of a failed backward. fsdpc_py_clear_broken_backward later does what has to wait
 * for the other ranks. */
int fsdpc_py_drop_half_made(fsdpc_py_flat *flat);

/* --- py_hooks_backward.c --------------------------------------------------------------------- */

int fsdpc_py_pre_backward(fsdpc_py_hook *self);
int fsdpc_py_grad_arrived(fsdpc_py_hook *self);
int fsdpc_py_input_done(fsdpc_py_hook *self);
/* Returns true if the unit's values may still be needed when all its trained parameters have their
 * gradients. */
bool fsdpc_py_is_used_late(const fsdpc_py_flat *flat);
bool fsdpc_py_has_nested(const fsdpc_py_flat *flat);
/* Finishes a unit whose gradients in this backward have all arrived: ends the hold and reduces the unit. */
int fsdpc_py_finish_unit(fsdpc_py_flat *flat);
/* Finishes the units whose graphs cannot run any more when the backward comes to `next`, whether their
 * gradients have arrived or not. See [Note: units that are passed]. */
int fsdpc_py_finish_those_passed(const fsdpc_py_flat *next);
/* If parameters without a hook have gradients, sets arrived_count to 1 and watches all parameters. */
int fsdpc_py_find_unwatched(fsdpc_py_flat *flat);
/* Reduces the complete units whose turn it is. `at_end`: no further unit will become complete. */
int fsdpc_py_send_what_is_due(fsdpc_py_tree *tree, bool at_end);
/* If the optimizer steps in backward, steps the units whose sums are complete (py_hooks_step.c). */
int fsdpc_py_step_summed(fsdpc_py_tree *tree);
/* Call this just before the gradients of `unit` are sent. Waits until the reduce slot for these gradients is
 * free (fsdpc_tree_make_room), then steps the units whose sums are complete. */
int fsdpc_py_step_before(fsdpc_py_tree *tree, int unit);
/* Steps the units that this backward has not stepped. Call it at the end, when gradients are shown. */
int fsdpc_py_step_rest(fsdpc_py_tree *tree);
/* Steps the units whose values lie in host memory, each as soon as the unit's sum is complete. */
int fsdpc_py_step_late(fsdpc_py_tree *tree);

/* --- py_hooks_end.c -------------------------------------------------------------------------- */

int fsdpc_py_end_backward(fsdpc_py_tree *tree);

#endif
