/* The Python types of the engine: FlatParameter (one unit), Tree (the order of a step) and Hook (a C
 * callable that torch calls). py_flat*.c: memory and values; py_bind.c: the modules and parameters
 * that a unit stands for; py_hooks*.c: what happens when; py_tree.c: the tree and its reports.
 */
#ifndef FSDPC_PY_ENGINE_H
#define FSDPC_PY_ENGINE_H

#include "py/base/py.h"
#include "tree/tree.h"

/* The thread that uses a unit or a tree; see py_gate.c. */
typedef struct fsdpc_py_gate {
    unsigned long thread;
    int depth;                      /* nested entries of that thread */
    void (*late)(PyObject *object); /* runs what was put off */
} fsdpc_py_gate;

/* A place where a parameter is registered: dict[key] is `full` while gathered for use, else
 * `stand_in` (may be NULL) while a forward of the model runs, else `sharded`. */
typedef struct fsdpc_py_site {
    PyObject *dict, *key, *full, *sharded, *stand_in;
} fsdpc_py_site;

/* A parameter that the optimizer sees, and which of the unit's parameters it covers. */
typedef struct fsdpc_py_sharded {
    PyObject *param, *grad; /* grad: the tensor over the shard gradient, or NULL (frozen) */
    PyObject *shown;        /* what param.grad is: `grad`, or a DTensor around that tensor */
    PyObject *dict, *key;   /* where a flat parameter stands in its module, or NULL */
    PyObject *alias; /* a second tensor over that memory: the user may point `grad` elsewhere */
    const void *grad_data, *param_data;
    long param_version; /* of `param`, when last recorded; -1: the parameter was not trained then */
    long version;       /* of `grad` when the last backward ended, if it waits */
    long broken;        /* of `grad` when the last backward broke off, -1: not looked at */
    uint64_t
        without_optimizers; /* a state of param's dictionary without backward optimizers, or 0 */
    bool touched;           /* by the user since then */
    bool waits;             /* `grad` stands for gradients of no_sync */
    int *covers;
    int cover_count;
    bool requires_grad; /* when last read */
    bool holds_nothing; /* other ranks hold its elements */
    bool strided;       /* `grad` is not row-major: the parameter is cut along a later dimension */
    bool cleared;       /* had no gradient when this backward reached it */
} fsdpc_py_sharded;

typedef struct fsdpc_py_flat {
    PyObject_HEAD
    fsdpc_unit *unit;
    PyObject *shard_comm, *replicate_comm; /* kept alive; replicate_comm may be NULL */
    struct fsdpc_py_tree *tree;            /* strong; NULL while unattached */
    bool own_tree;                         /* made by fsdpc._probe.gather() */
    int id;
    uint64_t backward; /* number of the last one in an earlier tree, whose graphs may still come */
    fsdpc_py_gate gate;
    bool unbinds; /* as soon as it is not in use */
    PyObject *on_unattached, *after_backward;
    PyObject *on_changed;   /* takes over parameters that the user changed */
    PyObject *on_kept;      /* gives cleared gradients that the program keeps their own memory */
    PyObject *on_moved;     /* makes new tensors over the gradients, which have another address */
    PyObject *comm_hook;    /* sums the gradients over the ranks instead of the engine, or NULL */
    PyObject **full;        /* per parameter: the gathered tensor, or NULL */
    const void **full_data; /* its memory when it was bound */
    fsdpc_py_site *sites;
    int site_count;
    fsdpc_py_sharded *sharded;
    int sharded_count;
    /* Buffers for the gradients of one reduction, per parameter. */
    fsdpc_tensor *grads;
    fsdpc_py_view *views;
    PyObject **held;
    int installed; /* number of users that need the gathered tensors in the modules */
    bool in_pass;  /* a forward of the model runs: sites show stand-ins instead of sharded ones */
    /* Sites show the gathered tensors whenever the unit is gathered, instead of for `installed`. */
    bool by_gather;
    /* See [Note: versions] in py_versions.c. */
    /* (a tensor that shares the gathered ones' counter,), and with this tensor three times */
    PyObject *versions, *versions_thrice;
    bool marked; /* as gathered */
    long gathered_version, released_version;
    long writes; /* to the sharded parameters, as autograd had counted them: fsdpc_py_was_touched */
    bool hold_installed;
    bool withheld;    /* fsdpc_unit_withholds when the backward began */
    bool unsharded;   /* by unshard(): the modules show gathered parameters without a forward */
    bool stays;       /* the same after a forward: see py_stay.c */
    int members_left; /* of the modules of one unit: how many have yet to run in this pass */
    bool
        lent; /* modules have shown gathered tensors outside of forwards, which the program may hold */
    bool full_dtensors; /* some of `full` are DTensors of tensor parallelism */
    bool dtensors;      /* the optimizer sees DTensors around this rank's rows */
    PyObject *row_dims; /* bytes: the dimension along which each parameter is cut; NULL: all 0 */
    bool shown;         /* the modules hold full values of the user: they stay */
    bool observed;      /* by the user's backward hooks on its modules */
    bool graphless;     /* its last forward made no graph */
    /* How many passes that began with this unit have a graph to which a backward may come. Backwards that free
     * graphs end an `era`, whose hooks no longer count. */
    int graphs;
    uint64_t era;
    bool reentrant; /* see [Note: backwards inside a backward] in py_hooks_backward.c */
    /* Which gathered tensors have a gradient hook: those of the module that runs first in forward,
     * whose gradients come last, or all (see [Note: watched parameters] in py_hooks_backward.c). */
    int *watched;
    int watched_count;
    bool watch_all;
    uint8_t *hooked;            /* per parameter: its gathered tensor has one */
    struct fsdpc_py_hook *call; /* the forward in progress, see py_hooks_impl.h; owned */
    /* Of the backward in progress. */
    int open_calls; /* forwards whose outputs it has reached, but not all watched inputs */
    bool unwatched; /* it has reached a forward whose inputs are not watched */
    bool complete;  /* all gradients exist; the hold ends with the backward */
    bool collected; /* `grads` and `held` are filled */
    bool entered;   /* was gathered for this backward */
    long task;      /* torch's number of the backward that entered it last */
    uint8_t *arrived;
    int arrived_count, expected;
    bool prepared;   /* fsdpc_py_prepare_grads has run */
    bool incomplete; /* the last backward left parameters without gradient */
    uint64_t closed; /* number of the last backward that ended at the unit's inputs */
} fsdpc_py_flat;

typedef struct fsdpc_py_tree {
    PyObject_HEAD
    fsdpc_tree *tree;
    fsdpc_py_flat **units; /* strong */
    int count;
    fsdpc_py_gate gate;
    bool closes;    /* as soon as it is not in use */
    bool late_work; /* the tree or a unit has put something off until then */
    bool thaws;     /* on_thaw runs, and may detach the units */
    int forward_depth;
    bool recompute;   /* the outermost forward in progress runs inside a backward */
    bool poison;      /* see fsdpc_tree_options */
    bool twice;       /* the backward in progress makes a graph for a second one */
    bool makes_graph; /* torch's answer to that, for this task of this backward: */
    long asked_task;
    uint64_t asked_backward;
    PyObject *end_pending; /* the end hook of the backward in progress; borrowed, NULL: none */
    bool sums;             /* some unit's gradients of that backward are summed over the ranks */
    bool local;            /* that backward is a part of a forward: see py_hooks_begin.c */
    uint64_t backward;     /* number of that backward */
    int entered;           /* the unit that the latest backward has entered last; -1: none */
    int lingers;           /* the unit that is complete and held until another is entered; -1 */
    bool entered_done;     /* the gradients of that unit are complete, and sent if they were due */
    uint32_t passes;       /* outermost passes that have begun */
    bool outer_grad;       /* the outermost forward began with gradients enabled */
    PyObject *grad_enabled, *graph_task, *keeps_graph, *queue_callback; /* torch's functions */
    PyObject *makes_grads; /* see fsdpc/_engine/interop.py */
    PyObject *listeners;   /* calls the hooks of a list of parameters */
    PyObject *set_versions, *increment_versions, *alias_inputs,
        *copy_outputs; /* see fsdpc/_engine/interop.py */
    PyObject *nodes;   /* torch's table of pytree nodes by type; NULL as the functions above */
    /* Whether torch.func transforms what runs, and the tensors inside of a transformed output; raises while
     * torch.export runs. */
    PyObject *profiler, *record; /* a dictionary with torch's flag, and the class of ranges */
    PyObject *transforms_active, *inner_tensors, *refuse_export;
    PyTypeObject *tensor_type, *param_type;
    PyObject
        *before_pass;  /* called once when the next pass begins, unless it raises; NULL: nothing */
    PyObject *on_thaw; /* makes memory for gradients of parameters that are not frozen any more */
    PyObject *step_unit;  /* called with a unit's number when its gradient is summed */
    PyObject *before_end; /* called when a synchronised backward has nothing more to send */
    PyObject *observer;   /* called after each hook, for memory profiles; mostly NULL */
    /* Borrowed while outputs are walked: what the forward was given, and the hook that watches it. */
    PyObject *inputs, *input_hook;
} fsdpc_py_tree;

/* Interned strings. */
typedef struct fsdpc_py_names {
    PyObject *register_prehook, *dataclass_fields, *detach, *is_view, *sequence,
        *register_hook_dict, *backward_optimizers, *local_tensor, *copy, *any, *signbit,
        *flatten_fn, *profiles;
} fsdpc_py_names;
extern fsdpc_py_names fsdpc_py_name;

/* --- py_engine.c ----------------------------------------------------------------------------- */

/* Notes that the program writes the unit's values: see fsdpc_tree_touch. */
void fsdpc_py_touch(const fsdpc_py_flat *flat);
/* The result of a call in which the ranks have read or written the unit's values together: they have met. */
PyObject *fsdpc_py_met(const fsdpc_py_flat *flat, int status);

int fsdpc_py_make_names(void);

/* 0, or -1 with TypeError. Borrowed. */
int fsdpc_py_flat_get(PyObject *object, fsdpc_py_flat **out);

/* The tensor with this rank's memory behind a parameter or gradient that the optimizer sees: the tensor
 * itself, or what a DTensor wraps. New reference, NULL with an exception. */
PyObject *fsdpc_py_local(const fsdpc_py_flat *flat, PyObject *tensor);
/* The same for any object: plain tensors and DTensors. */
PyObject *fsdpc_py_any_local(PyObject *tensor);
/* The same for a gathered parameter or its gradient: only those of tensor parallelism are DTensors. */
PyObject *fsdpc_py_full_local(const fsdpc_py_flat *flat, PyObject *tensor);
/* Address of the first element of a gathered parameter. 0, or -1 with an exception. */
int fsdpc_py_full_data(const fsdpc_py_flat *flat, int param, const void **out);
/* py_places.c: places(), at_places(). */
extern PyMethodDef fsdpc_py_places_methods[];
/* Address of its first element. 0, or -1 with an exception. */
int fsdpc_py_local_data(const fsdpc_py_flat *flat, PyObject *tensor, const void **out);
/* Writes that autograd has counted, to the tensor and to what the tensor wraps; -1 with an exception. */
long fsdpc_py_local_version(const fsdpc_py_flat *flat, PyObject *tensor);

/* A parameter's number from Python; IndexError names the unit. */
int fsdpc_py_flat_index(const fsdpc_py_flat *self, PyObject *object, int *out);

/* Where the tensors are that torch computes with (gathered values and their gradients), and those
 * that the optimizer sees. */
fsdpc_py_device fsdpc_py_full_device(const fsdpc_py_flat *flat);
fsdpc_py_device fsdpc_py_own_device(const fsdpc_py_flat *flat);
/* See fsdpc_py_enter_device. */
int fsdpc_py_enter(const fsdpc_py_flat *flat);

/* --- py_gate.c ------------------------------------------------------------------------------- */

/* What a thread uses: references to both, either may be NULL. */
typedef struct fsdpc_py_use {
    fsdpc_py_flat *flat;
    fsdpc_py_tree *tree;
} fsdpc_py_use;

/* To be called before the core: waits, with a deadline, until no other thread uses the unit (and
 * its tree), or the tree. StateError. Each use must be ended by fsdpc_py_end_use. */
int fsdpc_py_use_flat(fsdpc_py_flat *flat, fsdpc_py_use *use);
int fsdpc_py_use_tree(fsdpc_py_tree *tree, fsdpc_py_use *use);
/* Does what was put off while the unit or tree was in use, by the gates' `late`. Keeps the
 * exception that is set. */
void fsdpc_py_end_use(fsdpc_py_use *use);
/* The same for the unit alone, without waiting, and without a reference. */
int fsdpc_py_try_flat(fsdpc_py_flat *flat);
void fsdpc_py_leave_flat(fsdpc_py_flat *flat);
/* Around freeing a tree that is not in use: other threads wait at its gate and its units'. They
 * take no reference. The second one does what was put off for units meanwhile. */
void fsdpc_py_shut_tree(fsdpc_py_tree *tree);
void fsdpc_py_reopen_tree(fsdpc_py_tree *tree);
/* True if a thread, perhaps this one, uses the unit or the tree. */
bool fsdpc_py_flat_in_use(const fsdpc_py_flat *flat);
bool fsdpc_py_tree_in_use(const fsdpc_py_tree *tree);

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

/* Add them to the module. */
int fsdpc_py_flat_exec(PyObject *module);
int fsdpc_py_tree_exec(PyObject *module);
int fsdpc_py_hook_exec(PyObject *module);

/* py_flat_getset.c */
extern PyGetSetDef fsdpc_py_flat_getset[];

/* --- py_flat_values.c ------------------------------------------------------------------------ */

/* Whether a tensor is the unit's device's or the host's: *side, an enum fsdpc_memory_kind, -1 before the
 * first; all tensors of one call are on one side. 0, or -1 with BufferError or ValueError. */
int fsdpc_py_side(const fsdpc_py_flat *flat, const fsdpc_py_view *view, int *side);
PyObject *fsdpc_py_flat_write(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count,
                              PyObject *keywords);
PyObject *fsdpc_py_flat_read(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *keywords);
PyObject *fsdpc_py_flat_grad_norm(fsdpc_py_flat *self, PyObject *args);
PyObject *fsdpc_py_flat_scale_grads(fsdpc_py_flat *self, PyObject *args);

/* --- py_flat_views.c ------------------------------------------------------------------------- */

PyObject *fsdpc_py_flat_shard_part(fsdpc_py_flat *self, PyObject *index);
PyObject *fsdpc_py_flat_grad_part(fsdpc_py_flat *self, PyObject *index);
PyObject *fsdpc_py_flat_full_param(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count);
PyObject *fsdpc_py_flat_shard_segment(fsdpc_py_flat *self, PyObject *index);
PyObject *fsdpc_py_flat_grad_segment(fsdpc_py_flat *self, PyObject *index);
PyObject *fsdpc_py_flat_get_shard(fsdpc_py_flat *self, void *closure);
PyObject *fsdpc_py_flat_get_full(fsdpc_py_flat *self, void *closure);
PyObject *fsdpc_py_flat_get_grad(fsdpc_py_flat *self, void *closure);

/* --- py_flat_blocks.c ------------------------------------------------------------------------ */

PyObject *fsdpc_py_flat_read_blocks(fsdpc_py_flat *self, PyObject *args);
PyObject *fsdpc_py_flat_write_blocks(fsdpc_py_flat *self, PyObject *args);

/* --- py_flat_hooked.c ------------------------------------------------------------------------ */

PyObject *fsdpc_py_flat_get_comm_hook(fsdpc_py_flat *self, void *closure);
int fsdpc_py_flat_set_comm_hook(fsdpc_py_flat *self, PyObject *value, void *closure);
/* Calls comm_hook for the gradients collected. 1: the unit had its turn; 0: not yet; -1: exception. */
int fsdpc_py_call_comm_hook(fsdpc_py_flat *flat);
PyObject *fsdpc_py_flat_grad_bits(fsdpc_py_flat *self, PyObject *unused);
PyObject *fsdpc_py_flat_pack_grads(fsdpc_py_flat *self, PyObject *buffer);
PyObject *fsdpc_py_flat_take_sums(fsdpc_py_flat *self, PyObject *args);

/* --- py_flat_enter.c ------------------------------------------------------------------------- */

PyObject *fsdpc_py_flat_enter(fsdpc_py_flat *self, PyObject *unused);
PyObject *fsdpc_py_flat_leave(fsdpc_py_flat *self, PyObject *unused);

/* --- py_bind.c ------------------------------------------------------------------------------- */

PyObject *fsdpc_py_flat_bind(PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *keywords);
void fsdpc_py_flat_unbind(fsdpc_py_flat *flat);
/* Swap the modules' entries; counted. */
int fsdpc_py_install(fsdpc_py_flat *flat);
int fsdpc_py_uninstall(fsdpc_py_flat *flat);
int fsdpc_py_uninstall_all(fsdpc_py_flat *flat);
/* Sharded parameters are shown again, if gathered ones were after a forward (py_stay.c), and the user has not
 * replaced them. */
int fsdpc_py_end_stay(fsdpc_py_flat *flat);
/* Sharded parameters are shown again, if gathered ones were for the backward in progress. */
int fsdpc_py_end_hold(fsdpc_py_flat *flat);
/* What the modules show while the gathered tensors are not in them: the stand-ins or the sharded. */
int fsdpc_py_set_in_pass(fsdpc_py_flat *flat, bool in_pass);

/* --- py_unshard.c ---------------------------------------------------------------------------- */

PyObject *fsdpc_py_flat_unshard(fsdpc_py_flat *self, PyObject *unused);
PyObject *fsdpc_py_flat_reshard(fsdpc_py_flat *self, PyObject *unused);

/* --- py_stay.c ------------------------------------------------------------------------------- */

/* The forward that ends leaves the gathered tensors in the modules. */
bool fsdpc_py_will_stay(const fsdpc_py_flat *flat);
/* As fsdpc_py_end_stay, and the values are released: a backward gathers them again. */
int fsdpc_py_release_stay(fsdpc_py_flat *flat);
/* At the end of the outermost forward, `graph`: to whose outputs a backward may come. */
int fsdpc_py_end_stays(fsdpc_py_tree *tree, bool graph);
/* No backward will come to a graph that the program had: the same, if it was the last one. */
void fsdpc_py_graph_dropped(fsdpc_py_tree *tree);

/* --- py_flags.c ------------------------------------------------------------------------------ */

/* Puts a gradient hook on every trainable gathered tensor from now on. */
int fsdpc_py_watch_all(fsdpc_py_flat *flat);
/* Copies requires_grad of the sharded parameters to the gathered ones. 1: a parameter without gradient
 * memory is to be trained, and was left as it is; 0: none; -1 with an exception. */
int fsdpc_py_sync_flags(fsdpc_py_flat *flat);
/* Copies flags that the program has set on gathered tensors to the parameters: while the modules show these
 * tensors, and later (`lent`). */
int fsdpc_py_take_shown_flags(fsdpc_py_flat *flat);
PyObject *fsdpc_py_flat_thaw(fsdpc_py_flat *self, PyObject *args);
PyObject *fsdpc_py_flat_renew_grads(fsdpc_py_flat *self, PyObject *list);

/* --- py_range.c ------------------------------------------------------------------------------ */

/* A range of torch's profilers; `flat` may be NULL. NULL (without an exception) while none runs. */
PyObject *fsdpc_py_range_open(const fsdpc_py_tree *tree, const char *what,
                              const fsdpc_py_flat *flat);
/* Ends and drops it; keeps an exception that is set. NULL is allowed. */
void fsdpc_py_range_close(PyObject *range);

/* --- py_versions.c --------------------------------------------------------------------------- */

/* Updates sites and versions after the unit may have been gathered or released. 0, or -1 with an
 * exception: StateError when the gathered values were written to. */
int fsdpc_py_mark(fsdpc_py_flat *flat);
int fsdpc_py_mark_all(fsdpc_py_tree *tree);
/* To be called when a pass (`pass_begins`) or a backward begins: tensors that autograd saved before the
 * optimizer's last step become stale. */
int fsdpc_py_detect_step(fsdpc_py_flat *flat, bool pass_begins);
/* Whether autograd has counted a write to a sharded parameter since the last call, to one without elements, too.
 * 1, 0, or -1 with an exception. */
int fsdpc_py_was_touched(fsdpc_py_flat *flat);
/* Raises StateError if the unit's own values are not those of the latest forward, and the backward that runs uses
 * them. 0, or -1. */
int fsdpc_py_check_values(const fsdpc_py_flat *flat);

/* --- py_grads_sharded.c ------------------------------------------------------------------------- */

/* `grad` is the tensor over the gradient of `sharded`, whose covers are known. */
int fsdpc_py_set_grad(fsdpc_py_flat *flat, fsdpc_py_sharded *sharded, PyObject *grad);
/* Before the shard gradient is written: takes a slot (fsdpc_unit_take_slot). */
int fsdpc_py_take_slot(fsdpc_py_flat *flat);
/* Reads what the user did to the sharded parameters' gradients since the last backward (cleared,
 * replaced) and
 * sets up accumulation. Once per backward. */
int fsdpc_py_prepare_grads(fsdpc_py_flat *flat);
/* replace_grad(number, grad): another object stands for the gradient of the number-th sharded
 * parameter. */
PyObject *fsdpc_py_flat_replace_grad(fsdpc_py_flat *self, PyObject *args);
/* Copies gradients that the user assigned into the unit's memory. */
PyObject *fsdpc_py_flat_adopt(fsdpc_py_flat *flat, PyObject *unused);
/* After a backward: shows the gradients that exist. With `sync`, when they are complete, *listened
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
/* Drops those references. */
void fsdpc_py_drop_held(fsdpc_py_flat *flat);
/* Full tensors have no gradient afterwards; `all`: also those whose gradient is not held. */
int fsdpc_py_clear_full_grads(fsdpc_py_flat *flat, bool all);

/* --- py_writeback.c -------------------------------------------------------------------------- */

/* Calls on_changed if a parameter that the optimizer sees points at other memory than the shard, or
 * another object has taken its place in a module. 1: it has, 0, or -1 with an exception. */
int fsdpc_py_detect_changes(fsdpc_py_flat *flat);
/* -1 with StateError: a gathered tensor points at other memory than the unit's. */
int fsdpc_py_check_gathered(const fsdpc_py_flat *flat);
PyObject *fsdpc_py_flat_replace(fsdpc_py_flat *self, PyObject *args);
PyObject *fsdpc_py_flat_place(fsdpc_py_flat *self, PyObject *args);
/* `sharded` shows zeros for gradients that wait. */
int fsdpc_py_show_waiting(fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* What autograd has counted of writes to `grad`; -1 with an exception. */
long fsdpc_py_grad_version(const fsdpc_py_flat *flat, const fsdpc_py_sharded *sharded);
/* A backward has ended: which sharded gradients stand for something that waits. */
int fsdpc_py_note_waiting(fsdpc_py_flat *flat);
/* Discards what waits for gradients that the user has set to zero in place since. */
int fsdpc_py_drop_zeroed(fsdpc_py_flat *flat);

/* --- py_listen.c ----------------------------------------------------------------------------- */

/* Adds a parameter that has got a gradient to *list (NULL: made when needed; the caller's) if it
 * has listeners. 1: it has, 0, or -1 with an exception. */
int fsdpc_py_note_listeners(fsdpc_py_sharded *sharded, PyObject **list);
/* The program refers to gradients of the unit beside .grad. */
bool fsdpc_py_keeps_grads(const fsdpc_py_flat *flat);
/* Calls them; `list` may be NULL. */
int fsdpc_py_call_listeners(fsdpc_py_tree *tree, PyObject *list);

/* --- py_walk.c ------------------------------------------------------------------------------- */

typedef int (*fsdpc_py_visit)(fsdpc_py_tree *tree, PyObject *tensor, void *argument);
/* Calls `visit` for every tensor in nested tuples, lists, dicts, sets, dataclasses and registered pytree nodes,
 * each container once; 1 if any call gave 1, 0 if none, -1 with an exception. */
int fsdpc_py_walk(fsdpc_py_tree *tree, PyObject *value, fsdpc_py_visit visit, void *argument);
/* Visitors. Register the callable `argument` on the autograd node that made the tensor; for an
 * output also on the node below a view (see tree->inputs). 1 if there is one. */
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

/* The forward of this unit raised. */
int fsdpc_py_forward_failed(fsdpc_py_flat *flat);
/* py_hooks_begin.c: a backward of the tree is in progress, in whatever thread. One that has failed
 * is over: torch has dropped its end hook. */
bool fsdpc_py_in_backward(const fsdpc_py_tree *tree);
/* py_hooks_broken.c: clears away a backward that has failed: the peers get their message, and what the ranks
 * still sum of it changes no gradient that the user has touched since. Waits for the other ranks. */
int fsdpc_py_clear_broken_backward(fsdpc_py_tree *tree);

#endif
