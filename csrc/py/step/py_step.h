/* The Python types FlatParameter (one unit), Tree (the order of a step) and Hook (a C callable that torch
 * calls), and the functions that act on units and trees in a step. py_bind.c: the modules and parameters that
 * a unit stands for; py_hooks*.c: the order of events; py_tree.c: the tree and its reports.
 */
#ifndef FSDPC_PY_STEP_H
#define FSDPC_PY_STEP_H

#include "py/unit/py_flat.h"

/* --- py_tree_report.c ------------------------------------------------------------------------ */

/* Returns 0, or -1 with StateError after close(). */
int fsdpc_py_check_open(const fsdpc_py_tree *self);
PyObject *fsdpc_py_tree_memory(fsdpc_py_tree *self, PyObject *unused);
PyObject *fsdpc_py_tree_trace(fsdpc_py_tree *self, PyObject *args);
PyObject *fsdpc_py_tree_references(fsdpc_py_tree *self, PyObject *unused);
/* Calls the tree's observer, which must be set, outside of all gates. Errors go to sys.unraisablehook. */
void fsdpc_py_observe(const fsdpc_py_tree *tree, const char *kind, int unit);

/* --- py_clip.c ------------------------------------------------------------------------------- */

PyObject *fsdpc_py_tree_clip(fsdpc_py_tree *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *keywords);

/* --- the types ------------------------------------------------------------------------------- */

/* Add the types to the module. Return 0, or -1 with an exception. */
int fsdpc_py_flat_exec(PyObject *module);
int fsdpc_py_tree_exec(PyObject *module);
int fsdpc_py_hook_exec(PyObject *module);

/* py_flat_getset.c */
extern PyGetSetDef fsdpc_py_flat_getset[];
/* Methods of FlatParameter in py_bind.c, py_flat_enter.c, py_unshard.c and py_flat_hooked.c. */
fsdpc_py_flat_fast fsdpc_py_flat_bind;
fsdpc_py_flat_method fsdpc_py_flat_note_full, fsdpc_py_flat_replace_full;
fsdpc_py_flat_method fsdpc_py_flat_enter_forward, fsdpc_py_flat_leave_forward;
fsdpc_py_flat_method fsdpc_py_flat_unshard, fsdpc_py_flat_reshard;
fsdpc_py_flat_method fsdpc_py_flat_grad_bits, fsdpc_py_flat_pack_grads, fsdpc_py_flat_take_sums;
/* Methods of FlatParameter in py_flags.c, py_writeback.c and py_grads_sharded.c. */
fsdpc_py_flat_method fsdpc_py_flat_thaw, fsdpc_py_flat_renew_grads;
fsdpc_py_flat_method fsdpc_py_flat_replace_param, fsdpc_py_flat_place_param;
fsdpc_py_flat_method fsdpc_py_flat_replace_grad, fsdpc_py_flat_adopt_grads;

/* --- py_flat_hooked.c ------------------------------------------------------------------------ */

PyObject *fsdpc_py_flat_get_comm_hook(fsdpc_py_flat *self, void *closure);
int fsdpc_py_flat_set_comm_hook(fsdpc_py_flat *self, PyObject *value, void *closure);
/* Calls comm_hook. Returns 1: the gradients are summed; 0: not yet, call this again later; -1: exception. */
int fsdpc_py_call_comm_hook(fsdpc_py_flat *flat);

/* --- py_bind.c ------------------------------------------------------------------------------- */

void fsdpc_py_flat_unbind(fsdpc_py_flat *flat);
/* install puts gathered tensors into the modules. They are taken out again after as many calls of uninstall,
 * or by one call of uninstall_all. */
int fsdpc_py_install(fsdpc_py_flat *flat);
int fsdpc_py_uninstall(fsdpc_py_flat *flat);
int fsdpc_py_uninstall_all(fsdpc_py_flat *flat);
/* Ends a stay (py_stay.c): unless another use needs the gathered tensors, the modules show sharded parameters
 * again, except in entries that the user has replaced. */
int fsdpc_py_end_stay(fsdpc_py_flat *flat);
/* Ends this backward's use of the gathered tensors in the modules. Outside of a forward, also ends a stay. */
int fsdpc_py_end_hold(fsdpc_py_flat *flat);
/* Sets what the modules show instead of gathered tensors: placeholders (in_pass) or sharded parameters. */
int fsdpc_py_set_in_pass(fsdpc_py_flat *flat, bool in_pass);

/* --- py_stay.c ------------------------------------------------------------------------------- */

/* Returns true if the forward that ends must leave the gathered tensors in the modules. */
bool fsdpc_py_will_stay(const fsdpc_py_flat *flat);
/* Calls fsdpc_py_end_stay and releases the gathered values; a backward gathers them again. */
int fsdpc_py_release_stay(fsdpc_py_flat *flat);
/* Ends the stays that must not outlast the outermost forward. `graph`: a backward may come to the outputs of
 * that forward. */
int fsdpc_py_end_stays(fsdpc_py_tree *tree, bool graph);
/* Called when the program drops a graph, so that no backward can come to that graph any more. After the last
 * graph, all units stop showing gathered parameters (fsdpc_py_end_stay). */
void fsdpc_py_graph_dropped(fsdpc_py_tree *tree);

/* --- py_flags.c ------------------------------------------------------------------------------ */

/* Puts a gradient hook on every trainable gathered tensor from now on. */
int fsdpc_py_watch_all(fsdpc_py_flat *flat);
/* Puts a hook on a parameter's new gathered tensor if the old one had a hook or all tensors are watched. */
int fsdpc_py_watch_again(fsdpc_py_flat *flat, int param);
/* Copies requires_grad from the sharded parameters to the gathered tensors. Returns 1 if a parameter without
 * gradient memory is to be trained (its flag is not copied), else 0; -1 with an exception. */
int fsdpc_py_sync_flags(fsdpc_py_flat *flat);
/* Copies each requires_grad that the program has set on a gathered tensor to the sharded parameter. Does
 * nothing unless the program can hold gathered tensors: the modules show them now, or flat->lent is set. */
int fsdpc_py_take_shown_flags(fsdpc_py_flat *flat);

/* --- py_range.c ------------------------------------------------------------------------------ */

/* Opens a range of torch's profilers; `flat` may be NULL. If none runs, returns NULL without an exception. */
PyObject *fsdpc_py_range_open(const fsdpc_py_tree *tree, const char *what,
                              const fsdpc_py_flat *flat);
/* Ends and drops the range, which may be NULL. Keeps an exception that is set. */
void fsdpc_py_range_close(PyObject *range);

/* --- py_versions.c --------------------------------------------------------------------------- */

/* Updates the modules' entries and the versions after the unit may have been gathered or released. Returns 0,
 * or -1 with an exception: StateError if the gathered values were written to. */
int fsdpc_py_mark(fsdpc_py_flat *flat);
int fsdpc_py_mark_all(fsdpc_py_tree *tree);
/* Call this when a pass (`pass_begins`) or a backward begins. If the optimizer has stepped, autograd refuses
 * the gathered tensors that it saved before the step. */
int fsdpc_py_detect_step(fsdpc_py_flat *flat, bool pass_begins);
/* Returns whether autograd has counted a write to a sharded parameter since the last call: 1, 0, or -1 with
 * an exception. A write to a parameter without elements counts as well. */
int fsdpc_py_was_touched(fsdpc_py_flat *flat);
/* Raises StateError if the current backward uses a value of the unit that has changed on this rank since the
 * latest forward. Returns 0, or -1. */
int fsdpc_py_check_values(const fsdpc_py_flat *flat);

/* --- py_grads_sharded.c ------------------------------------------------------------------------- */

/* Makes `grad` the gradient tensor of `sharded`; sharded->covers must be set. 0, or -1 with an exception. */
int fsdpc_py_set_grad(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad);
/* Takes a slot for the shard gradient (fsdpc_unit_take_slot). Call this before the gradient is written. */
int fsdpc_py_take_slot(fsdpc_py_flat *flat);
/* Finds out what the user did to the sharded parameters' gradients since the last backward (cleared or
 * replaced them), and decides whether the new gradients are added to the old ones. Later calls in the same
 * backward do nothing. */
int fsdpc_py_prepare_grads(fsdpc_py_flat *flat);
/* After a backward, sets .grad where a gradient exists. With `sync` the gradients are complete; then calls
 * fsdpc_py_note_listeners(parameter, listened) for each parameter that got a gradient. */
int fsdpc_py_show_grads(fsdpc_py_flat *flat, bool sync, PyObject **listened);

/* --- py_grads_full.c ------------------------------------------------------------------------- */

/* Puts views of the gathered tensors' gradients into flat->grads (data NULL where there is none), and a
 * reference to each gradient into flat->held. A no-op if the gradients are collected already. */
int fsdpc_py_collect_grads(fsdpc_py_flat *flat);
/* Returns the number of parameters with a collected gradient. */
int fsdpc_py_count_held(const fsdpc_py_flat *flat);
/* With `all`, returns 1 if every gathered tensor among `params` has a gradient; without `all`, 1 if any has.
 * Returns 0 otherwise, -1 with an exception. `params` NULL: the first `count` parameters. */
int fsdpc_py_full_grads(fsdpc_py_flat *flat, const int *params, int count, bool all);
/* Drops the references in flat->held. */
void fsdpc_py_drop_held(fsdpc_py_flat *flat);
/* Clears .grad of all gathered tensors or, without `all`, of those whose gradients are in flat->held. */
int fsdpc_py_clear_full_grads(fsdpc_py_flat *flat, bool all);

/* --- py_writeback.c -------------------------------------------------------------------------- */

/* Calls on_changed if a parameter that the optimizer sees points at other memory than the shard, or if
 * another object has taken its place in a module. Returns 1 if called, else 0; -1 with an exception. */
int fsdpc_py_detect_changes(fsdpc_py_flat *flat);
/* Raises StateError if a gathered tensor points at other memory than the unit's. Returns 0, or -1. */
int fsdpc_py_check_gathered(const fsdpc_py_flat *flat);
/* Fills the gradient of `sharded` with negative zeros, which stand for gradients that no_sync has kept. */
int fsdpc_py_show_waiting(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* Returns how many writes to sharded->shown autograd has counted, or -1 with an exception. */
long fsdpc_py_grad_version(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* After a backward, notes which sharded gradients stand for gradients kept on this rank (no_sync). */
int fsdpc_py_note_waiting(fsdpc_py_flat *flat);
/* Discards gradients kept by no_sync if the user has zeroed .grad in place: see [Note: negative zeros]. */
int fsdpc_py_drop_zeroed(fsdpc_py_flat *flat);

/* --- py_listen.c ----------------------------------------------------------------------------- */

/* Adds a parameter that has got a gradient to *list if the parameter has listeners. A NULL *list is replaced
 * by a new list, which the caller owns. Returns 1 if the parameter has listeners, 0, or -1: exception. */
int fsdpc_py_note_listeners(fsdpc_py_sharded *sharded, PyObject **list);
/* Returns true if the program refers to a gradient of the unit, for example by .grad. */
bool fsdpc_py_keeps_grads(const fsdpc_py_flat *flat);
/* Calls the listeners of the parameters in `list`, which may be NULL. */
int fsdpc_py_call_listeners(fsdpc_py_tree *tree, PyObject *list);

/* --- py_walk.c ------------------------------------------------------------------------------- */

typedef int (*fsdpc_py_visit)(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
/* Calls `visit` for every tensor in nested tuples, lists, dicts, sets, dataclasses and registered pytree
 * nodes, each container once. Returns 1 if any call returned 1, 0 if none did, -1 with an exception. */
int fsdpc_py_walk(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument);
/* Visitors that register the callable `argument` on the autograd node that made the tensor. For a view,
 * watch_output also uses the node of the view's base (see tree->inputs). They return 1 if there is a node. */
int fsdpc_py_watch_node(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
int fsdpc_py_watch_output(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
/* A visitor that returns 1 if the tensor lies in the gathered values of the unit `argument`, a
 * fsdpc_py_flat. */
int fsdpc_py_lies_in(fsdpc_py_tree *tree, PyObject *tensor, void *argument);

/* --- py_hook.c ------------------------------------------------------------------------------- */

enum fsdpc_py_hook_kind {
    FSDPC_HOOK_PRE_FORWARD,
    FSDPC_HOOK_POST_FORWARD,
    FSDPC_HOOK_PRE_BACKWARD,
    FSDPC_HOOK_INPUT_DONE,
    FSDPC_HOOK_GRAD,
    FSDPC_HOOK_END
};
/* `owner` is a flat parameter, or a tree for FSDPC_HOOK_END. */
PyObject *fsdpc_py_hook_new(enum fsdpc_py_hook_kind kind, PyObject *owner, int param);

/* --- py_hooks_forward.c ---------------------------------------------------------------------- */

/* Undoes the forward of this unit, which has raised. Returns 0, or -1 with an exception. */
int fsdpc_py_forward_failed(fsdpc_py_flat *flat);
/* Defined in py_hooks_begin.c. Returns true if a backward of the tree is in progress, in any thread. A
 * backward that has failed is not in progress: torch has dropped its end hook. */
bool fsdpc_py_in_backward(const fsdpc_py_tree *tree);
/* Defined in py_hooks_broken.c. Ends a failed backward on this rank, and waits for the other ranks. Gradients
 * still in reduce slots change no .grad that the user has touched since: [Note: touched gradients]. */
int fsdpc_py_clear_broken_backward(fsdpc_py_tree *tree);

#endif
