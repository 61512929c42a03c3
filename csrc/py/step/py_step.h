/* What happens to units and trees in a step, and the types: FlatParameter (one unit), Tree (the order of a
 * step) and Hook (a C callable that torch calls). py_bind.c: the modules and parameters that a unit stands
 * for; py_hooks*.c: what happens when; py_tree.c: the tree and its reports.
 */
#ifndef FSDPC_PY_STEP_H
#define FSDPC_PY_STEP_H

#include "py/unit/py_flat.h"

/* --- py_tree_report.c ------------------------------------------------------------------------ */

/* 0, or -1 with StateError after close(). */
int fsdpc_py_check_open(const fsdpc_py_tree *self);
PyObject *fsdpc_py_tree_memory(fsdpc_py_tree *self, PyObject *unused);
PyObject *fsdpc_py_tree_trace(fsdpc_py_tree *self, PyObject *args);
PyObject *fsdpc_py_tree_references(fsdpc_py_tree *self, PyObject *unused);
/* Calls the tree's observer, which must be set, with no gate entered. Errors are unraisable. */
void fsdpc_py_observe(const fsdpc_py_tree *tree, const char *kind, int unit);

/* --- py_clip.c ------------------------------------------------------------------------------- */

PyObject *fsdpc_py_tree_clip(fsdpc_py_tree *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *keywords);

/* --- the types ------------------------------------------------------------------------------- */

/* Add the types to the module. */
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
/* Calls comm_hook. 1: the gradients are summed; 0: not yet, call this function again later; -1: exception. */
int fsdpc_py_call_comm_hook(fsdpc_py_flat *flat);

/* --- py_bind.c ------------------------------------------------------------------------------- */

void fsdpc_py_flat_unbind(fsdpc_py_flat *flat);
/* Put the gathered tensors into the modules and out again; counted. uninstall_all ends all uses at once. */
int fsdpc_py_install(fsdpc_py_flat *flat);
int fsdpc_py_uninstall(fsdpc_py_flat *flat);
int fsdpc_py_uninstall_all(fsdpc_py_flat *flat);
/* Ends a stay (py_stay.c): the modules show sharded parameters again, if nothing else needs gathered ones,
 * except in entries that the user has replaced. */
int fsdpc_py_end_stay(fsdpc_py_flat *flat);
/* Ends the showing of gathered parameters for this backward, and a stay unless a forward goes on. */
int fsdpc_py_end_hold(fsdpc_py_flat *flat);
/* What the modules show while gathered tensors are not in them: stand-ins (in_pass) or sharded parameters. */
int fsdpc_py_set_in_pass(fsdpc_py_flat *flat, bool in_pass);

/* --- py_stay.c ------------------------------------------------------------------------------- */

/* True if the forward that ends leaves the gathered tensors in the modules. */
bool fsdpc_py_will_stay(const fsdpc_py_flat *flat);
/* As fsdpc_py_end_stay, and the values are released: a backward gathers them again. */
int fsdpc_py_release_stay(fsdpc_py_flat *flat);
/* Ends the stays that end with the outermost forward. `graph`: a backward may come to its outputs. */
int fsdpc_py_end_stays(fsdpc_py_tree *tree, bool graph);
/* Called when the program drops a graph, to which no backward can come any more. After the last one all units
 * stop showing gathered parameters (fsdpc_py_end_stay). */
void fsdpc_py_graph_dropped(fsdpc_py_tree *tree);

/* --- py_flags.c ------------------------------------------------------------------------------ */

/* Puts a gradient hook on every trainable gathered tensor from now on. */
int fsdpc_py_watch_all(fsdpc_py_flat *flat);
/* Puts a hook on a parameter's new gathered tensor, if the old tensor had one or all are watched. */
int fsdpc_py_watch_again(fsdpc_py_flat *flat, int param);
/* Copies requires_grad of the sharded parameters to the gathered ones. 1: a parameter without gradient
 * memory is to be trained, and was left as it is; 0: none; -1 with an exception. */
int fsdpc_py_sync_flags(fsdpc_py_flat *flat);
/* Copies requires_grad that the program has set on gathered tensors to the parameters, while the modules show
 * these tensors or once they have been `lent`. */
int fsdpc_py_take_shown_flags(fsdpc_py_flat *flat);

/* --- py_range.c ------------------------------------------------------------------------------ */

/* Opens a range of torch's profilers; `flat` may be NULL. NULL, without an exception, while none runs. */
PyObject *fsdpc_py_range_open(const fsdpc_py_tree *tree, const char *what,
                              const fsdpc_py_flat *flat);
/* Ends and drops the range; keeps an exception that is set. NULL is allowed. */
void fsdpc_py_range_close(PyObject *range);

/* --- py_versions.c --------------------------------------------------------------------------- */

/* Updates sites and versions after the unit may have been gathered or released. 0, or -1 with an
 * exception: StateError when the gathered values were written to. */
int fsdpc_py_mark(fsdpc_py_flat *flat);
int fsdpc_py_mark_all(fsdpc_py_tree *tree);
/* To be called when a pass (`pass_begins`) or a backward begins: tensors that autograd saved before the
 * optimizer's last step become stale. */
int fsdpc_py_detect_step(fsdpc_py_flat *flat, bool pass_begins);
/* Whether autograd has counted a write to a sharded parameter, with or without elements, since the last call.
 * 1, 0, or -1 with an exception. */
int fsdpc_py_was_touched(fsdpc_py_flat *flat);
/* Raises StateError if the unit's own values are not those of the latest forward, and the backward that runs
 * uses them. 0, or -1. */
int fsdpc_py_check_values(const fsdpc_py_flat *flat);

/* --- py_grads_sharded.c ------------------------------------------------------------------------- */

/* Sets the tensor over the gradient of `sharded`, whose covers must be known. 0, or -1 with an exception. */
int fsdpc_py_set_grad(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad);
/* To be called before the shard gradient is written: takes a slot (fsdpc_unit_take_slot). */
int fsdpc_py_take_slot(fsdpc_py_flat *flat);
/* Reads what the user did to the sharded parameters' gradients since the last backward (cleared,
 * replaced) and sets up accumulation. Once per backward. */
int fsdpc_py_prepare_grads(fsdpc_py_flat *flat);
/* After a backward: shows the gradients that exist. With `sync` (they are complete) *listened
 * gets the parameters that have listeners, as by fsdpc_py_note_listeners. */
int fsdpc_py_show_grads(fsdpc_py_flat *flat, bool sync, PyObject **listened);

/* --- py_grads_full.c ------------------------------------------------------------------------- */

/* Views of the gathered tensors' gradients in flat->grads (data NULL where there is none) and a
 * reference to each gradient in flat->held. Does nothing when they are there already. */
int fsdpc_py_collect_grads(fsdpc_py_flat *flat);
/* Number of parameters with a collected gradient. */
int fsdpc_py_count_held(const fsdpc_py_flat *flat);
/* Among `params` (NULL: the first `count`): with `all`, 1 if every gathered tensor has a gradient;
 * without, 1 if any has. 0 otherwise, -1 with an exception. */
int fsdpc_py_full_grads(fsdpc_py_flat *flat, const int *params, int count, bool all);
/* Drops the references in flat->held. */
void fsdpc_py_drop_held(fsdpc_py_flat *flat);
/* Clears those gradients of the gathered tensors that are held; `all`: also those that are not. */
int fsdpc_py_clear_full_grads(fsdpc_py_flat *flat, bool all);

/* --- py_writeback.c -------------------------------------------------------------------------- */

/* Calls on_changed if a parameter that the optimizer sees points at other memory than the shard, or
 * another object has taken its place in a module. 1: called; 0, or -1 with an exception. */
int fsdpc_py_detect_changes(fsdpc_py_flat *flat);
/* Raises StateError if a gathered tensor points at other memory than the unit's. 0, or -1. */
int fsdpc_py_check_gathered(const fsdpc_py_flat *flat);
/* Fills the gradient of `sharded` with negative zeros, which stand for gradients that wait. */
int fsdpc_py_show_waiting(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* How many writes to the shown gradient autograd has counted; -1 with an exception. */
long fsdpc_py_grad_version(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* After a backward: notes which sharded gradients stand for gradients that wait. */
int fsdpc_py_note_waiting(fsdpc_py_flat *flat);
/* Discards waiting gradients if the user has set the zeros that stand for them to zero in place since. */
int fsdpc_py_drop_zeroed(fsdpc_py_flat *flat);

/* --- py_listen.c ----------------------------------------------------------------------------- */

/* Adds a parameter that has got a gradient to *list (NULL: made when needed; the caller's) if it
 * has listeners. 1: it has listeners, 0, or -1 with an exception. */
int fsdpc_py_note_listeners(fsdpc_py_sharded *sharded, PyObject **list);
/* True if the program refers to gradients of the unit besides .grad. */
bool fsdpc_py_keeps_grads(const fsdpc_py_flat *flat);
/* Calls the listeners of the parameters in `list`, which may be NULL. */
int fsdpc_py_call_listeners(fsdpc_py_tree *tree, PyObject *list);

/* --- py_walk.c ------------------------------------------------------------------------------- */

typedef int (*fsdpc_py_visit)(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
/* Calls `visit` for every tensor in nested tuples, lists, dicts, sets, dataclasses and registered pytree
 * nodes, each container once; 1 if any call gave 1, 0 if none, -1 with an exception. */
int fsdpc_py_walk(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument);
/* Visitors. Register the callable `argument` on the autograd node that made the tensor; for an
 * output also on the node below a view (see tree->inputs). 1 if there is such a node. */
int fsdpc_py_watch_node(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
int fsdpc_py_watch_output(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
/* `argument` is a fsdpc_py_flat: 1 if the tensor's memory is the unit's gathered range. */
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

/* Undoes the forward of this unit, which has raised. 0, or -1 with an exception. */
int fsdpc_py_forward_failed(fsdpc_py_flat *flat);
/* py_hooks_begin.c: true if a backward of the tree is in progress, in whatever thread. A backward that has
 * failed is over: torch has dropped its end hook. */
bool fsdpc_py_in_backward(const fsdpc_py_tree *tree);
/* py_hooks_broken.c: clears away a failed backward: peers that wait get an error, and its gradients that are
 * still in reduce slots change no .grad that the user has touched since. Waits for the other ranks. */
int fsdpc_py_clear_broken_backward(fsdpc_py_tree *tree);

#endif
