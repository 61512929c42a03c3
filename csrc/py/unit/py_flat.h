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

/* What a unit has done in the backward in progress: fsdpc_py_forget_backward empties this record afterwards. The
 * phases are in csrc/py/README.md. */
typedef struct fsdpc_py_backward {
    bool entered;   /* the unit was gathered for this backward */
    bool unwatched; /* the backward has reached a forward whose inputs are not watched */
    bool complete;  /* all gradients exist; the hold ends with the backward */
    bool prepared;  /* fsdpc_py_prepare_grads has run */
    int open_calls; /* forwards whose outputs it has reached, but not all watched inputs */
    int arrived_count;
} fsdpc_py_backward;

/* What the ranks do with the gradients of a backward when it ends. */
enum fsdpc_py_backward_kind {
    FSDPC_BACKWARD_KEEPS, /* nothing: all units keep theirs (no_sync) */
    FSDPC_BACKWARD_SUMS,  /* some unit's are summed over the ranks */
    FSDPC_BACKWARD_LOCAL  /* nothing: it is a part of a forward, see py_hooks_begin.c */
};

typedef struct fsdpc_py_flat {
    PyObject_HEAD
    fsdpc_unit *unit;
    PyObject *shard_comm, *replicate_comm; /* kept alive; replicate_comm may be NULL */
    struct fsdpc_py_tree *tree;            /* strong; NULL while unattached */
    bool own_tree;                         /* made by fsdpc._probe.gather() */
    int id;
    fsdpc_py_gate gate;
    bool unbinds; /* as soon as it is not in use */
    PyObject *on_unattached, *after_backward;
    PyObject *on_changed;   /* takes over parameters that the user changed */
    PyObject *on_kept;      /* gives cleared gradients that the program keeps their own memory */
    PyObject *on_moved;     /* makes new tensors over the gradients, which have another address */
    PyObject *on_values;    /* of a foreign unit: makes the gathered values, or drops them */
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
    /* Tuples of a tensor that shares the gathered tensors' version counter: with that tensor once, and three
     * times. */
    PyObject *versions, *versions_thrice;
    bool marked;       /* as gathered */
    bool foreign;      /* the parameters' values are not in the unit's memory */
    uint64_t gathered; /* fsdpc_unit_gathers of the values that on_values made; 0: none */
    long gathered_version, released_version;
    long writes; /* to the sharded parameters, as autograd had counted them: fsdpc_py_was_touched */
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
    fsdpc_py_backward backward;
    /* Of the backward in progress, or of the last one. */
    bool withheld;       /* fsdpc_unit_withholds when the backward began */
    bool hold_installed; /* the hold is one of `installed` */
    bool collected;      /* `grads` and `held` are filled */
    bool incomplete;     /* the last backward left parameters without gradient */
    long task;           /* torch's number of the backward that entered it last */
    uint64_t closed;     /* number of the last backward that ended at the unit's inputs */
    uint64_t
        earlier; /* number of the last backward of an earlier tree: its graphs may still come */
    uint8_t *arrived; /* per parameter; `backward` counts them */
    int expected;     /* how many parameters are trained */
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
    bool recompute; /* the outermost forward in progress runs inside a backward */
    bool poison;    /* see fsdpc_tree_options */
    struct {
        uint64_t number;
        enum fsdpc_py_backward_kind kind;
        PyObject *end_pending; /* its end hook; borrowed, NULL: none */
        bool twice;            /* it makes a graph for a second one */
        bool makes_graph;      /* torch's answer to that, for this task of this backward: */
        long asked_task;
        uint64_t asked_number;
        int entered;       /* the unit that it has entered last; -1: none */
        int lingers;       /* the unit that is complete and held until another is entered; -1 */
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
        nodes; /* torch's table of pytree nodes by type. NULL, like the functions above, in a Tree made without torch */
    /* Whether torch.func transforms what runs, and the tensors inside of a transformed output; raises while
     * torch.export runs. */
    PyObject *profiler, *record; /* a dictionary with torch's flag, and the class of ranges */
    PyObject *transforms_active, *inner_tensors, *refuse_export;
    PyObject *tensor_type;
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

/* --- py_flat_values.c ------------------------------------------------------------------------ */

/* Whether a tensor is the unit's device's or the host's: *side, an enum fsdpc_memory_kind, -1 before the
 * first; all tensors of one call are on one side. 0, or -1 with BufferError or ValueError. */
int fsdpc_py_side(const fsdpc_py_flat *flat, const fsdpc_py_view *view, int *side);

/* --- methods of FlatParameter ---------------------------------------------------------------- */

/* They are listed and described in py_flat_type.c, which enters the unit's gate around those that need it. */
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
