/* The objects behind FlatParameter (one unit) and Tree (the order of a step), the thread that uses them,
 * and a unit's memory and values. What happens to them in a step, and their types: py/step/py_step.h.
 */
#ifndef FSDPC_PY_FLAT_H
#define FSDPC_PY_FLAT_H

#include "py/base/py.h"
#include "tree/tree.h"

/* The thread that uses a unit or a tree; see py_gate.c. */
typedef struct fsdpc_py_gate {
    unsigned long thread;
    int depth;                      /* nested entries of that thread */
    void (*late)(PyObject *object); /* does what was put off until the last exit */
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
    PyObject *alias; /* another tensor over that memory: the user may point `grad` elsewhere */
    const void *grad_data, *param_data;
    long param_version; /* of `param`, when last recorded; -1: the parameter was not trained then */
    long version;       /* version of `grad` when the last backward ended, if `waits` */
    long broken;        /* version of `grad` when the last backward failed; -1: not noted */
    uint64_t
        without_optimizers; /* a state of param's dictionary without backward optimizers, or 0 */
    bool touched;           /* by the user since the last backward failed */
    bool waits;             /* `grad` stands for gradients that wait on this rank (no_sync) */
    int *covers;
    int cover_count;
    bool requires_grad; /* when last read */
    bool holds_nothing; /* other ranks hold the parameter's elements */
    bool strided;       /* `grad` is not row-major: the parameter is cut along a later dimension */
    bool cleared;       /* .grad was None when this backward prepared the gradients */
} fsdpc_py_sharded;

/* What a unit has done in the backward in progress: fsdpc_py_forget_backward empties this record afterwards.
 * The phases are in csrc/py/README.md. */
typedef struct fsdpc_py_backward {
    bool entered;   /* the unit was gathered for this backward */
    bool unwatched; /* the backward has reached a forward whose inputs are not watched */
    bool complete;  /* all gradients have arrived, but the values are still needed */
    bool prepared;  /* fsdpc_py_prepare_grads has run */
    int open_calls; /* forwards: their outputs are reached, but not all their watched inputs */
    int arrived_count;
} fsdpc_py_backward;

/* What the ranks do with the gradients of a backward when it ends. */
enum fsdpc_py_backward_kind {
    FSDPC_BACKWARD_KEEPS, /* nothing: all units keep theirs (no_sync) */
    FSDPC_BACKWARD_SUMS,  /* some unit's gradients are summed over the ranks */
    FSDPC_BACKWARD_LOCAL  /* nothing: the backward is a part of a forward, see py_hooks_begin.c */
};

typedef struct fsdpc_py_flat {
    PyObject_HEAD
    fsdpc_unit *unit;
    PyObject *shard_comm, *replicate_comm; /* kept alive; replicate_comm may be NULL */
    struct fsdpc_py_tree *tree;            /* strong; NULL while unattached */
    bool own_tree;                         /* the tree was made by fsdpc._probe.gather() */
    int id;
    fsdpc_py_gate gate;
    bool unbinds; /* unbind() waits until the unit is not in use */
    PyObject *on_unattached, *after_backward;
    PyObject *on_changed;   /* takes over parameters that the user changed */
    PyObject *on_kept;      /* moves cleared gradients that the program keeps to other memory */
    PyObject *on_moved;     /* makes new tensors over gradients that have another address */
    PyObject *on_values;    /* of a foreign unit: makes the gathered values, or drops them */
    PyObject *comm_hook;    /* sums the gradients over the ranks instead of the engine, or NULL */
    PyObject **full;        /* per parameter: the gathered tensor, or NULL */
    const void **full_data; /* per parameter: where that tensor lay when it was bound */
    fsdpc_py_site *sites;
    int site_count;
    fsdpc_py_sharded *sharded;
    int sharded_count;
    /* Buffers for the gradients of one reduction, per parameter. */
    fsdpc_tensor *grads;
    fsdpc_py_view *views;
    PyObject **held;
    int installed; /* number of users that need the gathered tensors in the modules */
    bool in_pass;  /* a forward of the model runs: sites show stand-ins, not sharded parameters */
    /* Sites show the gathered tensors whenever the unit is gathered, whatever `installed` is. */
    bool by_gather;
    /* See [Note: versions] in py_versions.c. */
    /* Tuples of a tensor that shares the gathered tensors' version counter: with that tensor once, and three
     * times. */
    PyObject *versions, *versions_thrice;
    bool marked;       /* modules and versions say that the unit is gathered */
    bool foreign;      /* the parameters' values are not in the unit's memory */
    uint64_t gathered; /* fsdpc_unit_gathers of the values that on_values made; 0: none */
    long gathered_version, released_version;
    long writes;      /* to the sharded parameters, as counted at the last fsdpc_py_was_touched */
    bool unsharded;   /* by unshard(): the modules show gathered parameters without a forward */
    bool stays;       /* the modules show gathered parameters after a forward: see py_stay.c */
    int members_left; /* how many of the unit's modules have yet to run in this pass */
    bool
        lent; /* modules have shown gathered tensors outside of forwards, which the program may hold */
    bool full_dtensors; /* some of `full` are DTensors of tensor parallelism */
    bool dtensors;      /* the optimizer sees DTensors around this rank's rows */
    PyObject *row_dims; /* bytes: the dimension along which each parameter is cut; NULL: all 0 */
    bool shown;         /* the modules show full values of the user: passes leave them there */
    bool observed;      /* the user has backward hooks on the unit's modules */
    bool graphless;     /* its last forward made no graph */
    /* How many passes that began with this unit have a graph to which a backward may come. Backwards that
     * free graphs end an `era`, whose hooks no longer count. */
    int graphs;
    uint64_t era;
    bool reentrant; /* see [Note: backwards inside a backward] in py_hooks_backward.c */
    /* Which gathered tensors have a gradient hook: those of the module that runs first in forward,
     * whose gradients come last, or all (see [Note: watched parameters] in py_hooks_backward.c). */
    int *watched;
    int watched_count;
    bool watch_all;
    uint8_t *hooked;            /* per parameter: its gathered tensor has a gradient hook */
    struct fsdpc_py_hook *call; /* the forward in progress, see py_hooks_impl.h; owned */
    fsdpc_py_backward backward;
    /* The next members are about the backward in progress, or about the last one. */
    bool withheld;       /* fsdpc_unit_withholds when the backward began */
    bool hold_installed; /* the backward's hold counts in `installed` */
    bool collected;      /* `grads` and `held` are filled */
    bool incomplete;     /* the last backward left parameters without gradient */
    long task;           /* torch's number of the backward that entered the unit last */
    uint64_t closed;     /* number of the last backward that ended at the unit's inputs */
    uint64_t
        earlier; /* number of the earlier tree's last backward, from which the next tree counts */
    uint8_t *arrived; /* per parameter: its gradient has arrived; see backward.arrived_count */
    int expected;     /* how many parameters are trained */
} fsdpc_py_flat;

typedef struct fsdpc_py_tree {
    PyObject_HEAD
    fsdpc_tree *tree;
    fsdpc_py_flat **units; /* strong */
    int count;
    fsdpc_py_gate gate;
    bool closes;    /* close() waits until the tree is not in use */
    bool late_work; /* the tree or a unit has put something off until the tree is not in use */
    bool thaws;     /* on_thaw runs, and may detach the units */
    int forward_depth;
    bool recompute; /* the outermost forward in progress runs inside a backward */
    bool poison;    /* see fsdpc_tree_options */
    struct {
        uint64_t number;
        enum fsdpc_py_backward_kind kind;
        PyObject *end_pending; /* its end hook; borrowed, NULL: none */
        bool twice;            /* it makes a graph for a second backward */
        bool makes_graph;      /* torch's answer, asked for the task and the backward below: */
        long asked_task;
        uint64_t asked_number;
        int entered;       /* the unit that it has entered last; -1: none */
        int lingers;       /* the unit that is complete and held until another is entered, or -1 */
        bool entered_done; /* the gradients of that unit are complete, and sent if they were due */
    } backward;            /* in progress, or the last one */
    uint32_t passes;       /* outermost passes that have begun */
    bool outer_grad;       /* the outermost forward began with gradients enabled */
    PyObject *grad_enabled, *graph_task, *keeps_graph, *queue_callback; /* torch's functions */
    PyObject *makes_grads; /* see fsdpc/_engine/interop.py */
    PyObject *listeners;   /* calls the hooks of a list of parameters */
    PyObject *set_versions, *increment_versions, *alias_inputs,
        *copy_outputs; /* see fsdpc/_engine/interop.py */
    PyObject *
        nodes; /* torch's pytree nodes by type; these and the functions above: NULL without torch */
    /* transforms_active: whether torch.func transforms what runs. inner_tensors: the tensors inside of a
     * transformed output. refuse_export: raises while torch.export runs. */
    PyObject *profiler, *record; /* a dictionary with torch's flag, and the class of ranges */
    PyObject *transforms_active, *inner_tensors, *refuse_export;
    PyObject *tensor_type;
    PyObject
        *before_pass;  /* called when the next pass with gradients begins, again if it has raised */
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
        *flatten_fn, *profiles, *is_meta;
} fsdpc_py_names;
extern fsdpc_py_names fsdpc_py_name;

/* --- py_flat.c ------------------------------------------------------------------------------- */

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
/* Address of the first element of fsdpc_py_local's tensor. 0, or -1 with an exception. */
int fsdpc_py_local_data(const fsdpc_py_flat *flat, PyObject *tensor, const void **out);
/* How many writes autograd has counted, to the tensor and to what the tensor wraps; -1 with an exception. */
long fsdpc_py_local_version(const fsdpc_py_flat *flat, PyObject *tensor);

/* A parameter's number from Python; IndexError names the unit. */
int fsdpc_py_flat_index(const fsdpc_py_flat *self, PyObject *object, int *out);

/* The devices of the tensors that torch computes with (gathered values and their gradients), and of those
 * that the optimizer sees. */
fsdpc_py_device fsdpc_py_full_device(const fsdpc_py_flat *flat);
fsdpc_py_device fsdpc_py_own_device(const fsdpc_py_flat *flat);
/* See fsdpc_py_enter_device. */
int fsdpc_py_enter(const fsdpc_py_flat *flat);

/* --- py_gate.c ------------------------------------------------------------------------------- */

/* What a thread uses: a reference to each member, which may be NULL. */
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
/* Enter and leave the gate of the unit alone, without a wait or a reference. StateError if it is shut. */
int fsdpc_py_try_flat(fsdpc_py_flat *flat);
void fsdpc_py_leave_flat(fsdpc_py_flat *flat);
/* Around freeing a tree that is not in use: other threads wait at the gates of the tree and its units.
 * Neither takes a reference; fsdpc_py_reopen_tree does what was put off for units meanwhile. */
void fsdpc_py_shut_tree(fsdpc_py_tree *tree);
void fsdpc_py_reopen_tree(fsdpc_py_tree *tree);
/* True if a thread, perhaps this one, uses the unit or the tree. */
bool fsdpc_py_flat_in_use(const fsdpc_py_flat *flat);
bool fsdpc_py_tree_in_use(const fsdpc_py_tree *tree);

/* --- py_flat_values.c ------------------------------------------------------------------------ */

/* *side: whether a tensor is in the memory of the unit's device or the host's, an enum fsdpc_memory_kind; -1
 * before the first. All tensors of one call are on one side. 0, or -1 with BufferError or ValueError. */
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
