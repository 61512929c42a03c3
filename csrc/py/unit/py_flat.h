/* The structs of FlatParameter (one unit) and Tree (the order of a step), the gate for the thread that uses
 * them, and functions for a unit's memory and values. py/step/py_step.h declares their types and what happens
 * in a step. */
#ifndef FSDPC_PY_FLAT_H
#define FSDPC_PY_FLAT_H

#include "py/base/py.h"
#include "tree/tree.h"

/* The gate of a unit or a tree, which records the thread that uses the unit or tree; see py_gate.c. */
typedef struct fsdpc_py_gate {
    unsigned long thread;
    int depth; /* how many uses `thread` has begun and not ended; 0: the gate is free */
    void (*late)(PyObject *object); /* does the work that was deferred while the gate was in use */
} fsdpc_py_gate;

/* A module's entry for a parameter. dict[key] is `full` while the parameter is gathered for use. At other
 * times it is `placeholder` (if not NULL) while a forward of the model runs, and `sharded` otherwise. */
typedef struct fsdpc_py_site {
    PyObject *dict, *key, *full, *sharded, *placeholder;
} fsdpc_py_site;

/* A sharded parameter, as the optimizer sees it. It holds this rank's part of the unit's parameters whose
 * numbers are in `covers`: of one parameter, or of several if it is a flat parameter. */
typedef struct fsdpc_py_sharded {
    PyObject *param, *grad; /* grad: the tensor over the shard gradient, or NULL (frozen) */
    PyObject *shown;        /* the object in param.grad: `grad`, or a DTensor around `grad` */
    /* dict[key] is the flat parameter's entry in its module. Both are NULL for other parameters. */
    PyObject *dict, *key;
    /* A second tensor over the shard gradient, for the case that the user sets grad.data. */
    PyObject *alias;
    const void *grad_data, *param_data;
    /* The next three are counts of writes, by autograd's version counters. param_version: writes to `param`
     * when was_stepped last recorded them; -1: `param` was frozen then. version: if `waits`, writes to
     * `shown` when the last backward ended. broken: writes to `shown` when the last backward failed; -1: not
     * noted. */
    long param_version;
    long version;
    long broken;
    /* The last state_of(param.__dict__), see py_listen.c, at which it held no backward optimizers, or 0. */
    uint64_t without_optimizers;
    bool touched; /* the user has changed .grad since the last backward failed */
    bool waits;   /* `grad` stands for gradients that no_sync has kept on this rank */
    int *covers;
    int cover_count;
    bool requires_grad; /* when last read */
    bool holds_nothing; /* all elements of the parameter are on other ranks */
    bool strided; /* `grad` is not row-major: the parameter is cut along dimension 1 or later */
    bool cleared; /* .grad was None when fsdpc_py_prepare_grads last ran */
} fsdpc_py_sharded;

/* What a unit has done in the backward in progress; fsdpc_py_forget_backward empties this record afterwards.
 * csrc/py/README.md describes the phases. */
typedef struct fsdpc_py_backward {
    bool entered;   /* the unit was gathered for this backward */
    bool unwatched; /* the backward has reached outputs of a forward whose inputs have no hooks */
    bool complete;  /* all gradients have arrived, but the values are still needed */
    bool prepared;  /* fsdpc_py_prepare_grads has run */
    int open_calls; /* forwards whose outputs were reached, but not yet all watched inputs */
    int arrived_count;
} fsdpc_py_backward;

/* What the ranks do with the gradients of a backward when it ends. */
enum fsdpc_py_backward_kind {
    FSDPC_BACKWARD_KEEPS, /* nothing: all units keep their gradients (no_sync) */
    FSDPC_BACKWARD_SUMS,  /* some unit's gradients are summed over the ranks */
    FSDPC_BACKWARD_LOCAL  /* nothing: the backward is a part of a forward, see py_hooks_begin.c */
};

typedef struct fsdpc_py_flat {
    PyObject_HEAD
    fsdpc_unit *unit;
    PyObject *shard_comm, *replicate_comm; /* owned; replicate_comm may be NULL */
    struct fsdpc_py_tree *tree;            /* owned; NULL while the unit has no tree */
    bool own_tree;                         /* the tree was made by fsdpc._probe.gather() */
    int id;
    fsdpc_py_gate gate;
    bool unbinds; /* the unit was in use when it was to be unbound; it is unbound after that use */
    PyObject *on_unattached, *after_backward;
    /* Callables, or NULL. on_changed copies the values of parameters that the user has moved or replaced into
     * the shard. on_kept copies gradients that the user has cleared, but still holds, to new memory. on_moved
     * makes new gradient tensors after the shard gradient has got another address. on_values belongs to a
     * foreign unit: it makes the gathered values (called with True) or drops them (with False). */
    PyObject *on_changed;
    PyObject *on_kept;
    PyObject *on_moved;
    PyObject *on_values;
    PyObject *comm_hook;    /* replaces the engine's sum of the gradients over the ranks, or NULL */
    PyObject **full;        /* per parameter: the gathered tensor, or NULL */
    const void **full_data; /* per parameter: the address of that tensor when it was bound */
    fsdpc_py_site *sites;
    int site_count;
    fsdpc_py_sharded *sharded;
    int sharded_count;
    /* For the gradients of one reduction: arrays with an entry per parameter. */
    fsdpc_tensor *grads;
    fsdpc_py_view *views;
    PyObject **held;
    int installed; /* calls of fsdpc_py_install that have not been undone */
    bool
        in_pass; /* a forward of the model runs, so sites show placeholders in place of `sharded` */
    /* True if sites show the gathered tensors whenever the unit is gathered, even if `installed` is 0. */
    bool by_gather;
    /* Two tuples of a tensor that shares the version counter of the gathered tensors: `versions` has the
     * tensor once, `versions_thrice` three times. See [Note: versions] in py_versions.c. */
    PyObject *versions, *versions_thrice;
    bool marked;       /* fsdpc_py_mark has seen the unit gathered, and not released since */
    bool foreign;      /* the parameters' values are not in the unit's memory */
    uint64_t gathered; /* number of the gather for which on_values made the values; 0: no values */
    long gathered_version, released_version;
    long writes;      /* writes to the sharded parameters, as of the last fsdpc_py_was_touched */
    bool unsharded;   /* set by unshard(): modules show gathered parameters without a forward */
    bool stays;       /* the modules show gathered parameters after a forward: see py_stay.c */
    int members_left; /* how many of the unit's modules have yet to run in this pass */
    /* The program may hold gathered tensors, because modules have shown them outside of forwards. */
    bool lent;
    bool full_dtensors; /* some of `full` are DTensors of tensor parallelism */
    bool dtensors;      /* the optimizer sees DTensors around this rank's rows */
    PyObject *row_dims; /* bytes: each parameter's sharded dimension; NULL: dimension 0 for all */
    bool shown;     /* modules show values of summon_full_params; passes change no module then */
    bool observed;  /* the user has backward hooks on the unit's modules */
    bool graphless; /* the unit's last forward made no graph */
    /* How many passes that began with this unit have a graph to which a backward may come. A backward that
     * frees graphs begins a new `era`; hooks of earlier eras are not counted. */
    int graphs;
    uint64_t era;
    /* True once the last of the unit's gradients has arrived in a backward inside the backward that entered
     * the unit: see [Note: backwards inside a backward] in py_hooks_backward.c. */
    bool reentrant;
    /* watched: indexes of the parameters whose gathered tensors have a gradient hook from the start, because
     * their gradients are expected last. watch_all: all trainable gathered tensors have hooks. See
     * [Note: watched parameters] in py_hooks_backward.c. */
    int *watched;
    int watched_count;
    bool watch_all;
    uint8_t *hooked;            /* per parameter: its gathered tensor has a gradient hook */
    struct fsdpc_py_hook *call; /* owned: record of the forward in progress, see py_hooks_impl.h */
    fsdpc_py_backward backward;
    /* The fields below describe the backward in progress or, if there is none, the last backward. */
    bool withheld;       /* the backward began under no_sync (fsdpc_unit_withholds) */
    bool hold_installed; /* a backward holds the unit, and `installed` counts this hold */
    bool collected;      /* `grads` and `held` hold the gradients */
    bool incomplete;     /* the last backward left parameters without a gradient */
    long task;           /* torch's number of the backward that entered the unit last */
    uint64_t closed;     /* number of the last backward that has left or passed the unit's graph */
    /* Number of the last backward of the tree that the unit had before; a new tree counts on from there. */
    uint64_t earlier;
    uint8_t *arrived; /* per parameter: its gradient has arrived; see backward.arrived_count */
    int expected;     /* how many parameters are trained */
} fsdpc_py_flat;

typedef struct fsdpc_py_tree {
    PyObject_HEAD
    fsdpc_tree *tree;
    fsdpc_py_flat **units; /* strong */
    int count;
    fsdpc_py_gate gate;
    bool closes; /* close() was called while the tree was in use; the tree closes after that use */
    bool late_work; /* `closes`, or `unbinds` of a unit, was set: see finish_tree in py_gate.c */
    bool thaws;     /* true while on_thaw runs, which may detach the units */
    int forward_depth;
    bool recompute; /* the outermost forward in progress runs inside a backward */
    bool poison;    /* see fsdpc_tree_options */
    struct {
        uint64_t number;
        enum fsdpc_py_backward_kind kind;
        PyObject *end_pending; /* the end hook of this backward; borrowed, NULL: none */
        bool twice;            /* this backward makes a graph for a second backward */
        bool makes_graph;      /* torch's answer: graph task `asked_task` makes a graph */
        long asked_task;
        uint64_t asked_number;
        int entered;       /* the unit that the backward entered last; -1: none */
        int lingers;       /* complete unit, held until another unit is entered; -1: none */
        bool entered_done; /* the gradients of unit `entered` are complete, and sent if due */
    } backward;            /* the backward in progress, or the last one */
    uint32_t passes;       /* number of outermost passes that have begun */
    bool outer_grad;       /* the outermost forward began with gradients enabled */
    PyObject *grad_enabled, *graph_task, *keeps_graph, *queue_callback; /* torch's functions */
    PyObject *makes_grads; /* see fsdpc/_engine/interop.py */
    PyObject *listeners;   /* a callable that calls the hooks of a list of parameters */
    PyObject *set_versions, *increment_versions, *alias_inputs,
        *copy_outputs; /* see fsdpc/_engine/interop.py */
    PyObject *
        nodes; /* torch's dictionary from a type to its pytree node; NULL without torch, as the above */
    /* A dictionary that tells if a profiler runs, and the class torch.profiler.record_function. */
    PyObject *profiler, *record;
    /* transforms_active: returns whether a transform of torch.func is active. inner_tensors: returns the
     * tensors inside of a transformed output. refuse_export: raises while torch.export runs. */
    PyObject *transforms_active, *inner_tensors, *refuse_export;
    PyObject *tensor_type;
    /* Called when a pass with gradients begins, until one call has succeeded. */
    PyObject *before_pass;
    PyObject *on_thaw;    /* allocates gradients of parameters that are no longer frozen */
    PyObject *step_unit;  /* called with a unit's number when its gradient is summed */
    PyObject *before_end; /* called when a synchronised backward has nothing more to send */
    PyObject *observer;   /* called after each hook, for memory profiles; usually NULL */
    /* Borrowed while outputs are walked: the inputs of the forward, and the hook that watches them. */
    PyObject *inputs, *input_hook;
} fsdpc_py_tree;

/* Interned strings. */
typedef struct fsdpc_py_names {
    PyObject *register_prehook, *dataclass_fields, *detach, *is_view, *sequence,
        *register_hook_dict, *backward_optimizers, *local_tensor, *copy, *any, *signbit,
        *flatten_fn, *profiles, *is_meta;
} fsdpc_py_names;
extern fsdpc_py_names fsdpc_py_name;

/* --- py_flat.c ------------------------------------------------------------------------------- */

/* Call this if the program may have written the unit's values since the last pass: see fsdpc_tree_touch. */
void fsdpc_py_touch(const fsdpc_py_flat *flat);
/* Call this at the end of a collective call of the unit's ranks. If `status` is FSDPC_OK, calls
 * fsdpc_tree_meet and returns None. Otherwise raises the exception for `status` and returns NULL. */
PyObject *fsdpc_py_met(const fsdpc_py_flat *flat, int status);

int fsdpc_py_make_names(void);

/* Sets *out to `object` if that is a FlatParameter; the reference is borrowed. 0, or -1 with TypeError. */
int fsdpc_py_flat_get(PyObject *object, fsdpc_py_flat **out);

/* Returns the tensor with this rank's memory of a parameter or gradient that the optimizer sees: the local
 * tensor of a DTensor, or the tensor itself. A new reference, or NULL with an exception. */
PyObject *fsdpc_py_local(const fsdpc_py_flat *flat, PyObject *tensor);
/* Returns the local tensor of any DTensor, and every other tensor itself. The reference is new. */
PyObject *fsdpc_py_any_local(PyObject *tensor);
/* Returns what fsdpc_py_any_local returns, for a gathered parameter or its gradient. Only tensor parallelism
 * makes these DTensors. */
PyObject *fsdpc_py_full_local(const fsdpc_py_flat *flat, PyObject *tensor);
/* Sets *out to the address of a gathered parameter's first element. Returns 0, or -1 with an exception. */
int fsdpc_py_full_data(const fsdpc_py_flat *flat, int param, const void **out);
/* py_places.c: places(), at_places(). */
extern PyMethodDef fsdpc_py_places_methods[];
/* Sets *out to the address of the first element of fsdpc_py_local's tensor. 0, or -1 with an exception. */
int fsdpc_py_local_data(const fsdpc_py_flat *flat, PyObject *tensor, const void **out);
/* Returns how many writes autograd has counted to the tensor and its local tensor; -1 with an exception. */
long fsdpc_py_local_version(const fsdpc_py_flat *flat, PyObject *tensor);

/* Reads a parameter's number from Python. Returns 0, or -1 with IndexError, whose text names the unit. */
int fsdpc_py_flat_index(const fsdpc_py_flat *self, PyObject *object, int *out);

/* Return the device of the tensors that torch computes with (gathered values and their gradients), and the
 * device of the tensors that the optimizer sees. */
fsdpc_py_device fsdpc_py_full_device(const fsdpc_py_flat *flat);
fsdpc_py_device fsdpc_py_own_device(const fsdpc_py_flat *flat);
/* See fsdpc_py_enter_device. */
int fsdpc_py_enter(const fsdpc_py_flat *flat);

/* --- py_gate.c ------------------------------------------------------------------------------- */

/* The unit and the tree that a thread uses. The references are owned; each may be NULL. */
typedef struct fsdpc_py_use {
    fsdpc_py_flat *flat;
    fsdpc_py_tree *tree;
} fsdpc_py_use;

/* Call one of these functions before you call the core. fsdpc_py_use_flat waits until no other thread uses
 * the unit or its tree, fsdpc_py_use_tree until no other thread uses the tree. Both raise StateError at a
 * deadline. Each use must be ended by fsdpc_py_end_use. */
int fsdpc_py_use_flat(fsdpc_py_flat *flat, fsdpc_py_use *use);
int fsdpc_py_use_tree(fsdpc_py_tree *tree, fsdpc_py_use *use);
/* Ends a use. When the last use ends, calls the gates' `late` for the work that was deferred meanwhile. Keeps
 * the exception that is set. */
void fsdpc_py_end_use(fsdpc_py_use *use);
/* Enter and leave only the unit's gate, without a wait or a reference. fsdpc_py_try_flat returns 0, or -1
 * with StateError if another thread uses the unit. */
int fsdpc_py_try_flat(fsdpc_py_flat *flat);
void fsdpc_py_leave_flat(fsdpc_py_flat *flat);
/* Call these before and after freeing a tree that is not in use: in between, other threads wait at the gates
 * of the tree and its units. Neither takes a reference. fsdpc_py_reopen_tree also does the deferred work. */
void fsdpc_py_shut_tree(fsdpc_py_tree *tree);
void fsdpc_py_reopen_tree(fsdpc_py_tree *tree);
/* Return true if a thread, perhaps this one, uses the unit or the tree. */
bool fsdpc_py_flat_in_use(const fsdpc_py_flat *flat);
bool fsdpc_py_tree_in_use(const fsdpc_py_tree *tree);

/* --- py_flat_values.c ------------------------------------------------------------------------ */

/* Sets *side, an enum fsdpc_memory_kind, to the memory of a tensor: the unit's device or the host. *side must
 * be -1 before the first tensor. ValueError if a later tensor lies in the other memory. Returns 0, or -1 with
 * an exception. */
int fsdpc_py_side(const fsdpc_py_flat *flat, const fsdpc_py_view *view, int *side);

/* --- methods of FlatParameter ---------------------------------------------------------------- */

/* These methods are listed in py_flat_type.c, which enters the unit's gate around those that need it. */
typedef PyObject *fsdpc_py_flat_method(fsdpc_py_flat *self, PyObject *argument);
typedef PyObject *fsdpc_py_flat_fast(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count,
                                     PyObject *keywords);
/* py_flat_values.c */
fsdpc_py_flat_fast fsdpc_py_flat_write, fsdpc_py_flat_read;
fsdpc_py_flat_method fsdpc_py_flat_grad_norm, fsdpc_py_flat_scale_grads;
/* py_flat_blocks.c */
fsdpc_py_flat_method fsdpc_py_flat_read_blocks, fsdpc_py_flat_write_blocks;
/* py_flat_views.c */
fsdpc_py_flat_method fsdpc_py_flat_shard_part, fsdpc_py_flat_grad_part;
fsdpc_py_flat_method fsdpc_py_flat_shard_segment, fsdpc_py_flat_grad_segment;
PyObject *fsdpc_py_flat_full_param(fsdpc_py_flat *self, PyObject *const *args, Py_ssize_t count);

/* --- py_flat_views.c ------------------------------------------------------------------------- */

PyObject *fsdpc_py_flat_get_shard(fsdpc_py_flat *self, void *closure);
PyObject *fsdpc_py_flat_get_full(fsdpc_py_flat *self, void *closure);
PyObject *fsdpc_py_flat_get_grad(fsdpc_py_flat *self, void *closure);

#endif
